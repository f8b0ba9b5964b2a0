"""Triton kernels of `rows`: copy the rows that stay, and decide which do."""

import triton
import triton.language as tl

__all__ = ["copy_rows_kernel", "decide_kernel"]


@triton.jit
def copy_rows_kernel(
    source,
    target,
    places,
    n_places,
    row,
    source_stride,
    BLOCK: tl.constexpr,
):
    """Copy row i of `source` to row `places[i]` of `target`, unless that is `n_places`."""
    sample = tl.program_id(0).to(tl.int64)
    place = tl.load(places + sample)
    if place < n_places:
        column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = column < row
        values = tl.load(source + sample * source_stride + column, mask=inside)
        tl.store(target + place * row + column, values, mask=inside)


@triton.jit
def decide_kernel(
    scores,
    level,
    live,
    fill,
    ids,
    next_ids,
    flags,
    places,
    answers,
    exits,
    decided,
    n,
    n_places,
    n_answers,
    exit_index,
    LAST: tl.constexpr,
    STRICT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do what `rows.decide` documents, in one program."""
    row = tl.arange(0, BLOCK)
    valid = row < tl.load(live)
    inside = row < n
    number = tl.load(ids + row, mask=inside, other=0)
    answer = number % n_answers
    if LAST:
        leaving = valid
    else:
        score = tl.load(scores + row, mask=inside, other=0.0)
        if STRICT:  # noqa: SIM108
            leaving = valid & (score > level)
        else:
            leaving = valid & (score >= level)
        staying = valid & (leaving == 0)
        start = tl.load(fill)
        rank = tl.cumsum(staying.to(tl.int32), axis=0).to(tl.int64)
        place = (start + rank - 1) % n_places
        tl.store(flags + row, staying.to(tl.int8), mask=inside)
        tl.store(places + row, tl.where(staying, place, n_places), mask=inside)
        tl.store(next_ids + place, number, mask=staying)
        tl.store(decided + answer, score, mask=leaving)
        tl.store(fill, (start + tl.sum(staying.to(tl.int64))) % n_places)
    tl.store(answers + row, tl.where(leaving, answer, n_answers), mask=inside)
    tl.store(exits + answer, tl.zeros_like(number) + exit_index, mask=leaving)
