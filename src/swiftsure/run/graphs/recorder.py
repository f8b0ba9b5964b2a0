"""Functions captured as CUDA graphs, replayed with one launch; called as they are on other devices.

A captured function reads and writes tensors at fixed addresses. Functions captured into one
`Recorder` share the memory of their intermediate results, so they must not run at the same time.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure._lib import checks
from swiftsure.run.graphs.conditional import Bodies, GraphPool, can_branch, no_garbage_collection
from swiftsure.run.graphs.precision import inference

__all__ = ["CaptureBudget", "CaptureLimits", "Recorded", "Recorder", "no_autocast_cache"]


_ONE_CAPTURE = threading.RLock()
"""One capture at a time: each waits for the device before, and memory is counted by difference."""


@dataclass(frozen=True)
class CaptureLimits:
    """How much a runtime may capture.

    Parameters
    ----------
    graphs : int
        Number of CUDA graphs.
    memory : float
        Share of the device's memory that graphs and their buffers may take, in (0, 1].
    """

    graphs: int = 512
    memory: float = 0.5

    def __post_init__(self) -> None:
        """Check both limits."""
        checks.count("graphs", self.graphs)
        if not 0 < self.memory <= 1:
            raise ValueError(f"`memory` must be in (0, 1], but got {self.memory}.")


class CaptureBudget:
    """Counts what a runtime has captured, and raises when it exceeds the limits.

    Attributes
    ----------
    graphs : int
        Graphs captured so far.
    bytes : int
        GPU memory of the graphs and their buffers; 0 on other devices.
    seconds : float
        Time spent capturing, including compilation.
    """

    lock = _ONE_CAPTURE

    def __init__(self, limits: CaptureLimits | None = None) -> None:
        self.limits = limits or CaptureLimits()
        self.graphs, self.bytes, self.seconds = 0, 0, 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time that the block takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    @contextmanager
    def spending(self, device: torch.device, graphs: int = 0) -> Iterator[None]:
        """Count the graphs and the GPU memory that the block takes."""
        with self.lock:
            if self.graphs + graphs > self.limits.graphs:
                raise RuntimeError(
                    f"All {self.limits.graphs} CUDA graphs are captured: run batches of fewer"
                    " sizes and shapes, or pass capture=CaptureLimits(graphs=...) with a higher"
                    " limit."
                )
            before = _reserved(device)
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise RuntimeError(
                    f"The GPU has no memory left to capture a graph (captured so far:"
                    f" {self.graphs} graphs, {self.bytes / 2**30:.2f} GiB): run smaller batches or"
                    " fewer sizes."
                ) from error
            self.graphs += graphs
            self.bytes += max(0, _reserved(device) - before)
            if device.type != "cuda":
                return
            allowed = self.limits.memory * torch.cuda.get_device_properties(device).total_memory
            if self.bytes > allowed:
                raise RuntimeError(
                    f"Captured graphs take {self.bytes / 2**30:.2f} GiB, more than the limit of"
                    f" {allowed / 2**30:.2f} GiB: run smaller batches or fewer sizes, or pass"
                    " capture=CaptureLimits(memory=...) with a higher share."
                )

    @contextmanager
    def returning(self, graphs: int) -> Iterator[None]:
        """Count off the graphs that the block drops, and the GPU memory that this frees."""
        with self.lock:
            before = _all_reserved()
            yield
            if graphs:
                gc.collect()  # functions that were captured refer to what holds their graphs
                if before:
                    torch.cuda.empty_cache()
            self.graphs -= graphs
            self.bytes = max(0, self.bytes - max(0, before - _all_reserved()))


class Recorded:
    """A captured function: `replay()` runs it again and overwrites the tensors in `result`."""

    def __init__(self, replay: Callable[[], None], result: Any, bodies: Bodies | None) -> None:
        self.replay, self.result = replay, result
        self._bodies = bodies  # kept: their memory is the graph's

    def seconds(self, device: torch.device, repeats: int = 3) -> float:
        """Return how long a replay takes."""

        def wait() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        self.replay()
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            self.replay()
        wait()
        return (time.perf_counter() - start) / repeats


class Recorder:
    """Captures functions that never run at the same time.

    Each capture gets its own cuBLAS workspace. Otherwise all of them would use the workspace of the
    stream they were captured on, and one graph would overwrite it while another reads it.

    Parameters
    ----------
    device : torch.device
    dtype : str, optional
        Autocast dtype of the functions.
    budget : CaptureBudget, optional
        Shared with other recorders.
    """

    def __init__(
        self, device: torch.device, dtype: str | None = None, budget: CaptureBudget | None = None
    ) -> None:
        self.device, self.dtype = device, dtype
        self.budget = budget or CaptureBudget()
        self.captures = device.type == "cuda"
        self._bodies: Bodies | None = None
        if self.captures:
            with self.budget.lock:
                self._pool = GraphPool(device)
                self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._bodies = Bodies(device) if can_branch() else None

    @property
    def branches(self) -> bool:
        """Whether parts of what is captured may be conditional (`run_if`)."""
        return self._bodies is not None

    def record(self, function: Callable[[], Any], warm_up: int = 2) -> Recorded:
        """Capture a function without arguments; it runs `warm_up` times before.

        The function must not draw random numbers, wait for the device or change shapes. Parts that
        it runs with `run_if` become conditional.
        """
        with self.budget.timed():
            return self._captured(function, warm_up) if self.captures else self._eager(function)

    def _captured(self, function: Callable[[], Any], warm_up: int) -> Recorded:
        current = torch.cuda.current_stream(self.device)
        graph = torch.cuda.CUDAGraph()
        branching = self._bodies.recording() if self._bodies else nullcontext()
        with inference(self.device, self.dtype), no_autocast_cache(), self.budget.lock, branching:
            self._side.wait_stream(current)
            _clear_workspaces()
            with torch.cuda.stream(self._side):
                for _ in range(warm_up):
                    function()
            torch.cuda.synchronize(self.device)
            _clear_workspaces()
            torch.cuda.empty_cache()
            with self.budget.spending(self.device, 1):
                # thread_local: other threads may allocate memory during the capture.
                with (
                    no_garbage_collection(),
                    torch.cuda.graph(
                        graph,
                        pool=self._pool.id,
                        stream=self._side,
                        capture_error_mode="thread_local",
                    ),
                ):
                    result = function()
                _clear_workspaces()
            current.wait_stream(self._side)
        return Recorded(graph.replay, result, self._bodies)

    def buffers(self) -> Any:
        """Return a context that counts the memory of fixed tensors allocated in it."""
        return self.budget.spending(self.device) if self.captures else nullcontext()

    def pinned(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return n elements on the host that the device can write to without a wait."""
        return torch.zeros(n, dtype=dtype, pin_memory=self.captures)

    def event(self) -> Any:
        """Return a CUDA event; None on other devices."""
        return torch.cuda.Event() if self.captures else None  # type: ignore[no-untyped-call]

    def _eager(self, function: Callable[[], Any]) -> Recorded:
        with self.budget.spending(self.device, 1), inference(self.device, self.dtype):
            held = pytree.tree_map_only(Tensor, torch.clone, function())

        def replay() -> None:
            for kept, new in zip(
                pytree.tree_leaves(held), pytree.tree_leaves(function()), strict=True
            ):
                if isinstance(kept, Tensor):
                    kept.copy_(new)

        return Recorded(replay, held, None)


def _all_reserved() -> int:
    """Return the bytes that PyTorch holds on all GPUs."""
    return sum(torch.cuda.memory_reserved(k) for k in range(torch.cuda.device_count()))


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _clear_workspaces() -> None:
    """Free cuBLAS workspaces, so that a capture allocates its own in its graph's memory."""
    torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Disable autocast's cache: cached casts would live in one graph's memory."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
