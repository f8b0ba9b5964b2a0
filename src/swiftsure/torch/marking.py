"""Marking: answer a batch although the model raises an error on some of its samples."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure.torch.results import ExitOutput
from swiftsure.torch.staged import batch_size

__all__ = ["run_marking"]


def run_marking(run: Callable[[Any], ExitOutput], batch: Any) -> ExitOutput:
    """Return the answers to a batch, with the samples on which `run` raises marked as invalid.

    Raises
    ------
    Exception
        What `run` raised, if it raised on every sample: then the batch is wrong, not a sample.
    """
    try:
        return replace(run(batch), on_invalid="mark")
    except (torch.OutOfMemoryError, MemoryError):
        raise  # not the fault of a sample
    except Exception as error:
        n = batch_size(batch)
        parts, failures = _in_halves(run, batch, 0, n, error)
        if not parts:
            raise
        return _merged(parts, failures, n)


def _in_halves(
    run: Callable[[Any], ExitOutput], batch: Any, first: int, n: int, error: Exception
) -> tuple[list[tuple[int, ExitOutput]], dict[int, str]]:
    """Run the halves of a batch that failed; return answers by first row, and failures by row."""
    if n <= 1:
        return [], {first: f"{type(error).__name__}: {error}"}
    parts: list[tuple[int, ExitOutput]] = []
    failures: dict[int, str] = {}
    for start, stop in ((0, n // 2), (n // 2, n)):
        half = _rows(batch, n, slice(start, stop))
        try:
            parts.append((first + start, run(half)))
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as why:
            inner, more = _in_halves(run, half, first + start, stop - start, why)
            parts += inner
            failures |= more
    return parts, failures


def _rows(batch: Any, n: int, part: slice) -> Any:
    """Return some rows of a batch; tensors of another length apply to all samples."""
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf[part] if leaf.ndim and leaf.shape[0] == n else leaf, batch
    )


@torch.inference_mode(False)
def _merged(parts: list[tuple[int, ExitOutput]], failures: dict[int, str], n: int) -> ExitOutput:
    """Return answers to parts of a batch as one; failed rows hold 0 and exit -1."""

    def placed(*values: Any) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        whole = values[0].new_zeros((n, *values[0].shape[1:]))
        for (first, _), value in zip(parts, values, strict=True):
            whole[first : first + len(value)] = value
        return whole

    outs = [out for _, out in parts]
    raw = pytree.tree_map(placed, *(out.raw for out in outs))
    exits, decided = placed(*(out.exits for out in outs)), placed(*(out.decided for out in outs))
    exits[[*failures]] = -1
    confidences = None
    if all(out.confidences is not None for out in outs):
        confidences = placed(*(out.confidences for out in outs))
        confidences[[*failures]] = torch.nan
    return ExitOutput(raw, exits, confidences, decided, on_invalid="mark", failures=failures)
