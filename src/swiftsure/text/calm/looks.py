"""What a device decides by itself: confidences, which rows exit, and the turn to the next token.

Each function is one Triton kernel on a GPU, and a few operations of PyTorch elsewhere.
"""

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from swiftsure.exits import reaches

__all__ = ["Turn", "cosine", "decide", "gap_and_token", "turn"]

MAX_FUSED = 4096
"""Rows that one program decides about."""


def cosine(now: Tensor, before: Tensor) -> Tensor:
    """Return the cosine similarity of the rows of two tensors, (m,) in float32."""
    m, width = now.shape
    if not _fused(now) or width > 16384:
        return cosine_similarity(now.float(), before.float(), dim=1)
    from swiftsure.text.calm._look_kernels import cosine_kernel

    now, before = (x if x.stride(1) == 1 else x.contiguous() for x in (now, before))
    scores = torch.empty(m, device=now.device)
    strides = now.stride(0), before.stride(0)
    cosine_kernel[(m,)](now, before, scores, width, *strides, BLOCK=_power(width))
    return scores


def gap_and_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return p₁ − p₂ of each row, (m,) in float32, and the place of its largest logit.

    In float32, unlike `swiftsure.torch.scoring.top_diff`: text records come from running this
    code, not from stored logits, and float64 is slower over a whole vocabulary.
    """
    m, size = logits.shape
    if not _fused(logits):
        two = logits.float().softmax(dim=1).topk(2, dim=1)
        return two.values[:, 0] - two.values[:, 1], logits.argmax(dim=1)
    from swiftsure.text.calm._look_kernels import gap_kernel

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    gaps = torch.empty(m, device=logits.device)
    tokens = torch.empty(m, dtype=torch.long, device=logits.device)
    block = min(4096, _power(size))
    gap_kernel[(m,)](logits, gaps, tokens, size, logits.stride(0), BLOCK=block, num_warps=16)
    return gaps, tokens


def decide(
    scores: Tensor,
    levels: Tensor,
    exited: Tensor,
    left: Tensor,
    log: Tensor,
    step: Tensor,
    tokens: Tensor | None,
    chosen: Tensor,
    positions: Tensor,
    filled: Tensor,
    *,
    strict: bool,
) -> None:
    """Let rows exit, and record their confidences.

    Parameters
    ----------
    scores, levels : (n,)
    exited : (n,)
        Rows that exited before; those that pass are added.
    left : ()
        Written: whether a row is left.
    log : (steps, n)
        Row `step` is written.
    step : (1,)
    tokens : (n,), optional
        What the rows would say.
    chosen : (n,)
        Written where a row exits now, if there are tokens.
    positions : (n,)
        All the same.
    filled : ()
        Written: the position after this token's.
    """
    n = len(scores)
    if _fused(scores) and n <= MAX_FUSED:
        from swiftsure.text.calm._look_kernels import decide_kernel

        decide_kernel[(1,)](
            scores.contiguous(),
            levels,
            exited.view(torch.int8),
            left.view(torch.int8),
            log,
            step,
            chosen if tokens is None else tokens,
            chosen,
            positions,
            filled,
            n,
            HAS_TOKENS=tokens is not None,
            STRICT=strict,
            BLOCK=_power(n),
        )
        return
    passed = reaches(scores, levels, strict=strict)
    log.index_copy_(0, step, scores[None])
    if tokens is not None:
        chosen.copy_(torch.where(passed & ~exited, tokens, chosen))
    exited |= passed
    filled.copy_(positions[0] + 1)
    left.copy_((~exited).any())


class Turn(NamedTuple):
    """Fixed tensors that a turn reads and changes.

    Attributes
    ----------
    tokens, positions, finished, exited, levels : (n,)
        Written: what the next token begins with.
    output : (rows, columns)
        Column `step` is written.
    level_table : (rows, columns)
    ends : (any,), pad : (1,)
        Tokens that end a sequence, and the one that follows them.
    step : (1,)
        Number of the token; counted up.
    limit : (1,)
        Largest number of tokens.
    alive : ()
        Written: whether a sequence goes on.
    """

    tokens: Tensor
    positions: Tensor
    finished: Tensor
    exited: Tensor
    levels: Tensor
    output: Tensor
    level_table: Tensor
    ends: Tensor
    pad: Tensor
    step: Tensor
    limit: Tensor
    alive: Tensor


def turn(found: Tensor, it: Turn) -> None:
    """Append the tokens that were found, (n,), and go on to the next ones."""
    n = len(found)
    if _fused(found) and n <= MAX_FUSED:
        from swiftsure.text.calm._look_kernels import turn_kernel

        turn_kernel[(1,)](
            found,
            it.tokens,
            it.positions,
            it.finished.view(torch.int8),
            it.exited.view(torch.int8),
            it.output,
            it.level_table,
            it.levels,
            it.ends if len(it.ends) else it.pad,
            it.pad,
            it.step,
            it.limit,
            it.alive.view(torch.int8),
            n,
            it.output.shape[1],
            it.level_table.shape[1],
            N_ENDS=len(it.ends),
            BLOCK=_power(n),
        )
        return
    tokens = torch.where(it.finished, it.pad, found)
    it.output[:n].index_copy_(1, it.step, tokens[:, None])
    if len(it.ends):
        it.finished.logical_or_((tokens[:, None] == it.ends).any(dim=1))
    it.exited.copy_(it.finished)
    it.tokens.copy_(tokens)
    it.positions.add_(1)
    it.step.add_(1)
    column = it.step.clamp(max=it.level_table.shape[1] - 1)
    it.levels.copy_(it.level_table[:n].index_select(1, column)[:, 0])
    it.alive.copy_(((~it.finished).any() & (it.step < it.limit))[0])


def _fused(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and find_spec("triton") is not None


def _power(size: int) -> int:
    """Return the next power of two."""
    return 1 << max(size - 1, 1).bit_length()
