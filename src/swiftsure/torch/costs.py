"""Cost of each exit: counted FLOPs and measured time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from swiftsure._lib import checks
from swiftsure.scores import LearnedScore
from swiftsure.torch.modes import refuse_training
from swiftsure.torch.scoring import confidence
from swiftsure.torch.staged import StagedModel, batch_size, device_of

__all__ = [
    "exit_and_full_flops",
    "exit_flops",
    "exit_seconds",
    "full_flops",
    "full_seconds",
    "stage_seconds",
]


def exit_flops(model: StagedModel, batch: Any) -> NDArray[np.float64]:
    """Return the FLOPs of one sample up to and including each exit, (n_exits,).

    `torch.utils.flop_counter` counts them (a multiply-add is two), including the heads of earlier
    exits.

    Examples
    --------
    >>> from torch import nn
    >>> from swiftsure.torch import Staged
    >>> model = Staged.from_sequential(
    ...     [nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 2), nn.Linear(8, 2)]
    ... ).eval()
    >>> exit_flops(model, torch.zeros(1, 4)).tolist()
    [96.0, 256.0]
    """
    stages, heads = _counted(model, batch)
    return np.cumsum(stages + heads)


def full_flops(model: StagedModel, batch: Any) -> float:
    """Return the FLOPs of one sample in the full model alone, without the heads of early exits.

    Examples
    --------
    >>> from torch import nn
    >>> from swiftsure.torch import Staged
    >>> model = Staged.from_sequential(
    ...     [nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 2), nn.Linear(8, 2)]
    ... ).eval()
    >>> full_flops(model, torch.zeros(1, 4))
    224.0
    """
    return _alone(*_counted(model, batch))


def exit_and_full_flops(model: StagedModel, batch: Any) -> tuple[NDArray[np.float64], float]:
    """Return `exit_flops` and `full_flops`, counted in one run."""
    stages, heads = _counted(model, batch)
    return np.cumsum(stages + heads), _alone(stages, heads)


def stage_seconds(
    model: StagedModel, batch: Any, repeats: int = 15, score: str | LearnedScore | None = None
) -> NDArray[np.float64]:
    """Return the seconds that a batch takes in each stage with its head, (n_exits,).

    This is the minimum over `repeats` runs, after two runs to warm up.

    Parameters
    ----------
    score : str or LearnedScore, optional
        Also compute this confidence at each exit but the last, and wait for it on the host, as
        `EarlyExit` does to decide.
    """
    checks.count("repeats", repeats)
    refuse_training(model)
    best = np.full(model.n_exits, np.inf)
    for _ in range(repeats + 2):
        times = []
        with torch.inference_mode():
            _wait(batch)
            start = time.perf_counter()
            state = model.begin(batch)
            for k in range(model.n_exits):
                state = model.advance(k, state)
                output = model.head(k, state)
                if score is not None and k < model.n_exits - 1:
                    int((confidence(score, output, k) < 0.5).sum())
                _wait(batch)
                now = time.perf_counter()
                times.append(now - start)
                start = now
        best = np.minimum(best, times)
    return best


def exit_seconds(
    model: StagedModel, batch: Any, repeats: int = 15, score: str | LearnedScore | None = None
) -> NDArray[np.float64]:
    """Return the seconds per sample up to each exit, at this batch size, (n_exits,).

    With `score`, decisions are included; see `stage_seconds`.
    """
    n = _samples(batch)
    return np.cumsum(stage_seconds(model, batch, repeats, score)) / n


def full_seconds(model: StagedModel, batch: Any, repeats: int = 15) -> float:
    """Return the seconds per sample of the full model alone, without the heads of early exits."""
    n = _samples(batch)
    refuse_training(model)
    best, last = np.inf, model.n_exits - 1
    for _ in range(checks.count("repeats", repeats) + 2):
        with torch.inference_mode():
            _wait(batch)
            start = time.perf_counter()
            state = model.begin(batch)
            for k in range(model.n_exits):
                state = model.advance(k, state)
            model.head(last, state)
            _wait(batch)
            best = min(best, time.perf_counter() - start)
    return best / n


def _samples(batch: Any) -> int:
    n = batch_size(batch)
    if n == 0:
        raise ValueError(
            "`batch` must hold at least one sample to measure costs with, but is empty."
        )
    return n


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Run attention as matrix products: the FLOP counter may not know fused kernels."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _wait(batch: Any) -> None:
    """Wait until the batch's device is idle."""
    device = device_of(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _counted(model: StagedModel, batch: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the FLOPs of one sample in each stage and in each head; the first stage begins."""
    refuse_training(model)
    n = _samples(batch)
    stages, heads = np.zeros(model.n_exits), np.zeros(model.n_exits)
    state: Any = None
    with torch.inference_mode(), _plain_attention():
        for k in range(model.n_exits):
            with FlopCounterMode(display=False) as counter:
                state = model.advance(k, model.begin(batch) if k == 0 else state)
            stages[k] = counter.get_total_flops() / n
            with FlopCounterMode(display=False) as counter:
                model.head(k, state)
            heads[k] = counter.get_total_flops() / n
    return stages, heads


def _alone(stages: NDArray[np.float64], heads: NDArray[np.float64]) -> float:
    return float(stages.sum() + heads[-1])
