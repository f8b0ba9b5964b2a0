"""What each exit costs: FLOPs, counted; time, measured."""

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from swiftsure import checks
from swiftsure.torch.staged import StagedModel, batch_size

__all__ = ["exit_flops", "exit_seconds", "stage_seconds"]


def exit_flops(model: StagedModel, batch: Any) -> NDArray[np.float64]:
    """Return the FLOPs of one sample up to and with each exit, (n_exits,).

    Counted by `torch.utils.flop_counter` (a multiply-add counts as two), all heads on the way
    included.

    Examples
    --------
    >>> from swiftsure.torch import Staged
    >>> model = Staged.from_sequential(
    ...     [nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 2), nn.Linear(8, 2)]
    ... ).eval()
    >>> exit_flops(model, torch.zeros(1, 4)).tolist()
    [96.0, 256.0]
    """
    counts = []
    total = 0.0
    with torch.inference_mode():
        with FlopCounterMode(display=False) as counter:
            state = model.begin(batch)
        total += counter.get_total_flops()
        for k in range(model.n_exits):
            with FlopCounterMode(display=False) as counter:
                state = model.advance(k, state)
                model.head(k, state)
            total += counter.get_total_flops()
            counts.append(total)
    return np.asarray(counts) / batch_size(batch)


def stage_seconds(model: StagedModel, batch: Any, repeats: int = 15) -> NDArray[np.float64]:
    """Return the seconds of a batch in each stage with its head, (n_exits,): best of many."""
    checks.count("repeats", repeats)
    best = np.full(model.n_exits, np.inf)
    for _ in range(repeats + 2):  # the first two warm up
        times = []
        with torch.inference_mode():
            _wait(batch)
            start = time.perf_counter()
            state = model.begin(batch)
            for k in range(model.n_exits):
                state = model.advance(k, state)
                model.head(k, state)
                _wait(batch)
                now = time.perf_counter()
                times.append(now - start)
                start = now
        best = np.minimum(best, times)
    return best


def exit_seconds(model: StagedModel, batch: Any, repeats: int = 15) -> NDArray[np.float64]:
    """Return the seconds of one sample of such a batch up to each exit, (n_exits,)."""
    if isinstance(model, nn.Module) and model.training:
        raise ValueError("`model` must be in evaluation mode: call model.eval() first.")
    return np.cumsum(stage_seconds(model, batch, repeats)) / batch_size(batch)


def _wait(batch: Any) -> None:
    """Wait until the device has done what was asked of it."""
    leaf = next(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    if leaf.is_cuda:
        torch.cuda.synchronize(leaf.device)
