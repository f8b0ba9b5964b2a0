"""What a device decides by itself: confidences, which rows exit, and the next tokens.

Each function is one Triton kernel on a GPU, and a few operations of PyTorch elsewhere.
"""

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from swiftsure.exits import reaches

__all__ = ["Batch", "cosine", "decide", "gap_and_token", "next_tokens"]

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


class Batch(NamedTuple):
    """Fixed tensors that `decide` and `next_tokens` change; rows may be at different tokens.

    Attributes
    ----------
    tokens, positions, finished, exited, levels : (n,)
        Written by `next_tokens`: what the next token begins with.
    first : (n,)
        Position from which the first answer token was computed.
    limits : (n,)
        Largest number of answer tokens.
    level_table : (rows, columns)
    ends : (any,), pad : (1,)
        Tokens that end a sequence, and the one that follows them.
    found : (n,)
        Tokens of rows that exited.
    log : (looks, tokens, n)
        Confidences.
    behind : (segments,)
        Positions before the current one whose keys and values a segment lacks; -1 once it has run.
    left, alive : ()
        Whether a row is left that has not exited; whether a sequence goes on.
    """

    tokens: Tensor
    positions: Tensor
    finished: Tensor
    exited: Tensor
    levels: Tensor
    first: Tensor
    limits: Tensor
    level_table: Tensor
    ends: Tensor
    pad: Tensor
    found: Tensor
    log: Tensor
    behind: Tensor
    left: Tensor
    alive: Tensor


def decide(scores: Tensor, segment: int, tokens: Tensor | None, it: Batch, *, strict: bool) -> None:
    """Let rows exit after a segment, and record their confidences.

    Parameters
    ----------
    scores : (n,)
    segment : int
    tokens : (n,), optional
        What the rows would say.
    it : Batch
    strict : bool
    """
    n, log = len(scores), it.log[segment]
    if _fused(scores) and n <= MAX_FUSED:
        from swiftsure.text.calm._look_kernels import decide_kernel

        decide_kernel[(1,)](
            scores.contiguous(),
            it.levels,
            it.exited.view(torch.int8),
            it.left.view(torch.int8),
            log,
            it.positions,
            it.first,
            it.found if tokens is None else tokens,
            it.found,
            it.behind[segment],
            n,
            HAS_TOKENS=tokens is not None,
            STRICT=strict,
            BLOCK=_power(n),
        )
        return
    passed = reaches(scores, it.levels, strict=strict)
    log.scatter_(0, (it.positions - it.first)[None], scores[None])
    if tokens is not None:
        it.found.copy_(torch.where(passed & ~it.exited, tokens, it.found))
    it.exited.logical_or_(passed)
    it.behind[segment].fill_(-1)
    it.left.copy_((~it.exited).any())


def next_tokens(it: Batch) -> None:
    """Take the tokens that were found, and go on to the next ones; ended rows stay as they are."""
    n = len(it.found)
    if _fused(it.found) and n <= MAX_FUSED:
        from swiftsure.text.calm._look_kernels import next_tokens_kernel

        next_tokens_kernel[(1,)](
            it.found,
            it.tokens,
            it.positions,
            it.first,
            it.limits,
            it.finished.view(torch.int8),
            it.exited.view(torch.int8),
            it.level_table,
            it.levels,
            it.ends if len(it.ends) else it.pad,
            it.pad,
            it.behind,
            it.alive.view(torch.int8),
            n,
            it.level_table.shape[1],
            len(it.behind),
            N_ENDS=len(it.ends),
            BLOCK=_power(n),
            PARTS=_power(len(it.behind)),
        )
        return
    over = it.finished.clone()
    tokens = torch.where(over, it.pad, it.found)
    steps = it.positions - it.first + 1
    ended = steps >= it.limits
    if len(it.ends):
        ended |= (tokens[:, None] == it.ends).any(dim=1)
    it.finished.logical_or_(ended)
    it.exited.copy_(it.finished)
    it.tokens.copy_(tokens)
    it.positions.copy_(torch.where(over, it.positions, it.positions + 1))
    it.behind.add_(1)
    columns = steps.clamp(max=it.level_table.shape[1] - 1)
    it.levels.copy_(it.level_table[:n].gather(1, columns[:, None])[:, 0])
    it.alive.copy_((~it.finished).any())


def _fused(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and find_spec("triton") is not None


def _power(size: int) -> int:
    """Return the next power of two."""
    return 1 << max(size - 1, 1).bit_length()
