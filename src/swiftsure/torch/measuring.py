"""`measure`: times the ways to run batches on the user's device, and keeps the fastest."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from swiftsure._lib import checks
from swiftsure.torch.runtime import EarlyExit
from swiftsure.torch.staged import batch_size, device_of

__all__ = ["Timings", "measure"]


@dataclass(frozen=True)
class Timings:
    """Seconds per sample of the ways to run batches of one size.

    Attributes
    ----------
    batch_size : int
    seconds : dict
        "full": the full model; "single": each batch by itself; "stream": late stages on full
        batches gathered from several. Everything is included: heads, decisions, regrouping.
    fastest : str
        The way that `EarlyExit.run` uses from now on for batches of this size.
    graphs, graph_bytes, capture_seconds
        CUDA graphs that the runtime holds, their memory, and the time spent capturing.
    """

    batch_size: int
    seconds: dict[str, float]
    fastest: str
    graphs: int
    graph_bytes: int
    capture_seconds: float

    @property
    def speed_up(self) -> float:
        """Speed of the fastest way, relative to the full model."""
        return self.seconds["full"] / self.seconds[self.fastest]

    def __str__(self) -> str:
        full, best = self.seconds["full"], self.seconds[self.fastest]
        others = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in self.seconds.items())
        said = (
            "Early exits do not pay here, so `run` uses the full model"
            if self.fastest == "full"
            else f"`run` uses {self.fastest!r}, {full / best:.2f} times as fast as the full model"
        )
        return f"Batches of {self.batch_size}: {said} (ms per sample: {others})."


def measure(fast: EarlyExit, batches: Iterable[Any], repeats: int = 3) -> Timings:
    """Time the full model and the ways of early exiting, and let `run` use the fastest.

    Parameters
    ----------
    fast : EarlyExit
        With `capture`, the full model is captured too, and compiled if `fast` is. It may be chosen.
    batches : iterable
        Batches as they will come, at least a few: a stream gathers samples from several. The first
        one's size is the size that the choice is for.
    repeats : int
        The best of this many runs counts, after one that captures.

    Returns
    -------
    timings : Timings
        Also kept in `fast.fastest`, by batch size. Graphs of slower streams are dropped. Without
        `capture`, `run` never uses the full model; `timings.speed_up` below 1 then says that early
        exits do not pay.

    Examples
    --------
    >>> print(measure(fast, batches))  # doctest: +SKIP
    Batches of 64: `run` uses 'stream', 1.71 times as fast as the full model (ms per sample: ...).
    """
    given = list(batches)
    checks.count("repeats", repeats)
    if not given or batch_size(given[0]) == 0:
        raise ValueError("`batches` must hold at least one sample.")
    size, device = batch_size(given[0]), device_of(given[0])
    ways: dict[str, Any] = {name: fast.way(name, size) for name in ("single", "stream")}
    ways["full"] = fast.way("full", size) if fast.captures else lambda parts: map(full, parts)

    @torch.inference_mode()
    def full(batch: Any) -> Any:
        with fast.context(batch):
            return fast.full_outputs(batch)

    best = dict.fromkeys(ways, float("inf"))
    for repeat in range(repeats + 1):
        for name, run in ways.items():
            _wait(device)
            start = time.perf_counter()
            for _ in run(given):
                pass
            _wait(device)
            if repeat > 0:
                best[name] = min(best[name], time.perf_counter() - start)
    n = sum(map(batch_size, given))
    seconds = {name: total / n for name, total in best.items()}
    choices = seconds if fast.captures else {k: v for k, v in seconds.items() if k != "full"}
    fastest = min(choices, key=choices.__getitem__)
    fast.fastest[size] = fastest
    spent = None
    if fast.captures:
        fast.captures.keep_way(size, fastest)
        spent = fast.captures.budget
    return Timings(
        size,
        seconds,
        fastest,
        spent.graphs if spent else 0,
        spent.bytes if spent else 0,
        spent.seconds if spent else 0.0,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
