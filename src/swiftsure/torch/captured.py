"""`Captures`: what `EarlyExit(..., capture=True)` has captured, and how it runs batches with it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from swiftsure.run.graphs.recorder import CaptureBudget, CaptureLimits
from swiftsure.torch.captured_calls import CapturedCalls
from swiftsure.torch.captured_lane import CapturedLane
from swiftsure.torch.replaying import ReplayedModel
from swiftsure.torch.results import ExitOutput
from swiftsure.torch.segments import Signature, signature_of

if TYPE_CHECKING:
    from swiftsure.torch.runtime import EarlyExit

__all__ = ["Captures"]

SPARE_BATCHES = 5
"""Batches of answers beyond those of `max_wait`: running, learned, or not taken yet."""


class Captures:
    """Captured graphs of a runtime, by the signature and size of batches.

    All of them are dropped when a parameter or buffer of the model is replaced or moved. Changing
    values in place, as `load_state_dict` does, needs no new capture.

    Attributes
    ----------
    budget : CaptureBudget
        Number of graphs, their memory, and the time it took to capture them.
    """

    def __init__(self, fast: "EarlyExit", limits: CaptureLimits | None, compiled: bool) -> None:
        _watch_registrations()
        self._fast, self._limits, self._compiled = fast, limits, compiled
        self._lock = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        self.budget = CaptureBudget(self._limits)
        self._calls: dict[Signature, CapturedCalls] = {}
        self._lanes: dict[tuple[Any, ...], list[CapturedLane]] = {}
        self._registrations = _registrations[0]
        model = self._fast.model
        tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
        self._tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        # Graphs read weights at their addresses, so the memory must stay theirs.
        self._held = [tensor.detach() for tensor in self._tensors]

    @property
    def stale(self) -> bool:
        """Whether weights were replaced since the graphs were captured."""
        if self._registrations != _registrations[0]:
            return True
        return list(map(Tensor.data_ptr, self._tensors)) != self._addresses

    def drop_stale(self) -> None:
        """Drop all graphs if weights were replaced."""
        with self._lock:
            if not self.stale:
                return
            before = self._tensors, self._addresses
            budget, calls, lanes = self.budget, self._calls, self._lanes
            self._forget()
            unchanged = len(before[0]) == len(self._tensors) and all(
                map(is_, before[0], self._tensors)
            )
            if unchanged and before[1] == self._addresses:  # another model was changed
                self.budget, self._calls, self._lanes = budget, calls, lanes

    def call(self, batch: Any) -> ExitOutput:
        """Run a batch by itself."""
        model = self._fast.model
        batch = model.settled(batch) if isinstance(model, ReplayedModel) else batch
        key = signature_of(batch)
        with self._lock:
            found = self._calls.get(key)
            if found is None:
                self.drop_stale()
                found = CapturedCalls(self._fast, batch, self.budget, self._compiled)
                self._calls[key] = found
        try:
            return found(batch, self._check)
        except _StaleWeightsError:
            self.drop_stale()
            return self.call(batch)

    def _check(self) -> None:
        """Raise if weights were replaced, or the model is in training mode."""
        self._fast.check_mode()
        if self.stale:
            raise _StaleWeightsError

    def keep_way(self, size: int, way: str) -> None:
        """Drop what was captured to stream batches of a size, except for "stream" or "full"."""
        with self._lock:
            lost = [
                key
                for key in self._lanes
                if key[1] == size and ("full" if key[-1] else "stream") != way
            ]
            graphs = sum(lane.n_graphs for key in lost for lane in self._lanes[key])
            with self.budget.returning(graphs):
                for key in lost:
                    del self._lanes[key]

    @contextmanager
    def lane(self, batch: Any, size: int, max_wait: int, full: bool) -> Iterator[CapturedLane]:
        """Lend a captured lane to one stream; others get their own."""
        n_answers = (max_wait + SPARE_BATCHES) * size
        key = (signature_of(batch), size, n_answers, full)
        with self._lock:
            self.drop_stale()
            idle = self._lanes.setdefault(key, [])
            lane = idle.pop() if idle else None
        if lane is None:
            lane = CapturedLane(
                self._fast,
                batch,
                size,
                n_answers,
                self.budget,
                compiled=self._compiled,
                full=full,
            )
        lane.acquire()
        budget = self.budget
        try:
            yield lane
        finally:
            lane.release()
            with self._lock:
                if self.budget is budget:  # else its graphs read weights that were replaced
                    idle.append(lane)


_registrations = [0]
"""How often any module was given a parameter, buffer or submodule since the first capture."""


def _count_registration(*_: Any) -> None:
    _registrations[0] += 1


@cache
def _watch_registrations() -> None:
    """Count assignments to modules: walking a deep model takes as long as some of its layers."""
    register_module_parameter_registration_hook(_count_registration)
    register_module_buffer_registration_hook(_count_registration)
    register_module_module_registration_hook(_count_registration)


class _StaleWeightsError(Exception):
    """Weights were replaced after their graphs had been captured."""
