"""Triton kernel of `graphs`: which images exit at a look, in one launch instead of a dozen."""

import triton
import triton.language as tl

__all__ = ["look_kernel"]


@triton.jit
def look_kernel(
    scores,
    levels,
    active,
    leaving,
    anyone_stays,
    anyone_leaves,
    exits,
    stayed,
    left,
    n,
    exit_index,
    last,
    FIRST: tl.constexpr,
    STRICT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do what `_MaskedStep._decide` does, in one program."""
    row = tl.arange(0, BLOCK)
    inside = row < n
    score = tl.load(scores + row, mask=inside, other=0.0)
    level = tl.load(levels + row, mask=inside, other=0.0)
    if FIRST:  # noqa: SIM108
        here = inside
    else:
        here = inside & (tl.load(active + row, mask=inside, other=0) != 0)
    if STRICT:  # noqa: SIM108
        leaves = here & (score > level)
    else:
        leaves = here & (score >= level)
    stays = here & (leaves == 0)
    tl.store(active + row, stays.to(tl.uint8), mask=inside)
    tl.store(leaving + row, leaves.to(tl.uint8), mask=inside)
    tl.store(anyone_stays, tl.max(stays.to(tl.int32), axis=0).to(tl.uint8))
    tl.store(anyone_leaves, tl.max(leaves.to(tl.int32), axis=0).to(tl.uint8))
    if FIRST:
        exit_taken = tl.where(leaves, exit_index, last).to(tl.int64)
        tl.store(exits + row, exit_taken, mask=inside)
    else:
        tl.store(exits + row, (tl.zeros_like(row) + exit_index).to(tl.int64), mask=leaves)
    highest = tl.load(stayed + row, mask=inside, other=0.0)
    tl.store(stayed + row, tl.maximum(highest, score), mask=stays)
    lowest = tl.load(left + row, mask=inside, other=0.0)
    tl.store(left + row, tl.minimum(lowest, score), mask=leaves)
