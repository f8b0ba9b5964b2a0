"""Rows of tensors moved on the device, without telling the host how many.

Buffers have one row more than they hold: rows that go nowhere are written there.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swiftsure.exits import reaches

__all__ = ["Decision", "copy_rows", "decide", "has_triton", "row_buffer"]

MAX_FUSED = 8192
"""Rows that one program of the fused kernel decides about."""


def row_buffer(like: Tensor, n: int) -> Tensor:
    """Return zeros for n rows, and a spare one, laid out in memory like the rows of a tensor."""
    size = like[:1].numel()
    inner = like.stride()[1:] if _is_dense(like) else like[:1].contiguous().stride()[1:]
    shape = (n + 1, *like.shape[1:])
    return torch.empty_strided(shape, (size, *inner), dtype=like.dtype, device=like.device).zero_()


def copy_rows(source: Tensor, target: Tensor, places: Tensor) -> None:
    """Copy row i of a tensor to row `places[i]` of a buffer; the spare row receives garbage."""
    if source.shape[0] == 0 or source.numel() == 0:
        return
    if not _is_dense(source) or source.stride()[1:] != target.stride()[1:]:
        source = torch.empty_strided(
            source.shape, (target.stride(0), *target.stride()[1:]),
            dtype=source.dtype, device=source.device,
        ).copy_(source)  # fmt: skip
    if not has_triton(source):
        target.index_copy_(0, places, source.to(target.dtype))
        return
    from swiftsure.run.graphs._row_kernels import copy_rows_kernel

    if source.dtype != target.dtype:
        source = source.to(target.dtype)
    if source.dtype == torch.bool:
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    row = source[0].numel()
    block = min(4096, 1 << max(row - 1, 1).bit_length())
    grid = (source.shape[0], -(-row // block))
    copy_rows_kernel[grid](
        source, target, places, target.shape[0] - 1, row, source.stride(0), BLOCK=block
    )


class Decision(NamedTuple):
    """Fixed tensors that a decision about b rows reads and writes.

    Attributes
    ----------
    live : ()
        Number of valid rows; the others are garbage.
    ids : (b,)
        Numbers of the samples.
    fill : (), next_ids : (n_places + 1,)
        Where the next sample that stays is put in the buffer of the next segment, and the numbers
        of the samples there. None after the last segment, like `flags` and `places`.
    flags : (b,)
        Written: whether each row stays.
    places : (b,)
        Written: where each row goes in the next buffer.
    answers : (b,)
        Written: where each row's answer goes; a sample's number modulo the number of answers.
    exits, decided : (n_answers + 1,)
        Written: exit of the samples that leave, and the confidence that decided.
    """

    live: Tensor
    ids: Tensor
    answers: Tensor
    exits: Tensor
    decided: Tensor
    fill: Tensor | None = None
    next_ids: Tensor | None = None
    flags: Tensor | None = None
    places: Tensor | None = None


def decide(
    scores: Tensor | None, level: float, strict: bool, exit_index: int, it: Decision
) -> None:
    """Decide which rows leave at an exit, and where rows and answers go.

    `scores` is None at the last exit, where all rows leave.
    """
    b, n_answers = len(it.ids), len(it.exits) - 1
    if has_triton(it.ids) and b <= MAX_FUSED:
        from swiftsure.run.graphs._row_kernels import decide_kernel

        unused = it.ids
        n_places = 1 if it.next_ids is None else len(it.next_ids) - 1
        decide_kernel[(1,)](
            it.decided if scores is None else scores.contiguous(),
            level,
            it.live,
            unused if it.fill is None else it.fill,
            it.ids,
            unused if it.next_ids is None else it.next_ids,
            unused if it.flags is None else it.flags,
            unused if it.places is None else it.places,
            it.answers,
            it.exits,
            it.decided,
            b,
            n_places,
            n_answers,
            exit_index,
            LAST=scores is None,
            STRICT=strict,
            BLOCK=1 << max(b - 1, 1).bit_length(),
        )
        return
    valid = torch.arange(b, device=it.ids.device) < it.live
    answer = it.ids % n_answers
    leaving = valid
    if scores is not None:
        assert it.fill is not None and it.next_ids is not None  # noqa: S101, PT018
        assert it.flags is not None and it.places is not None  # noqa: S101, PT018
        n_places = len(it.next_ids) - 1
        staying = valid & (~reaches(scores, level, strict=strict))
        leaving = valid & ~staying
        place = (it.fill + staying.cumsum(0) - 1) % n_places
        it.flags.copy_(staying)
        it.places.copy_(torch.where(staying, place, n_places))
        it.next_ids.index_copy_(0, it.places, it.ids)
        it.fill.copy_((it.fill + staying.sum()) % n_places)
    it.answers.copy_(torch.where(leaving, answer, n_answers))
    it.exits.index_fill_(0, it.answers, exit_index)
    if scores is not None:
        it.decided.index_copy_(0, it.answers, scores)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether each row is one block of memory, in any order of its axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.shape[0] <= 1 or tensor.stride(0) >= expected


_found: list[Any] = []


def has_triton(tensor: Tensor) -> bool:
    """Return whether Triton can run on this tensor's device."""
    if not _found:
        _found.append(find_spec("triton") is not None)
    return tensor.device.type == "cuda" and bool(_found[0])
