"""A recorder that pretends to capture, so that a CPU tries what only a GPU would."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swiftsure.run.graphs import conditional
from swiftsure.run.graphs.recorder import Recorded, Recorder

__all__ = ["PretendingRecorder"]

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "lift_fresh"}
"""Operations that wait for the device, depend on values in their shape, or copy from the host."""


class _Refusing(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name in WAITS:
            raise AssertionError(f"{name} cannot be captured")
        return function(*args, **kwargs or {})


@contextmanager
def _recording():
    """Make `run_if` run its function in any case, as while a recorder warms up."""
    conditional._local.bodies = SimpleNamespace(capturing=False)
    try:
        yield
    finally:
        conditional._local.bodies = None


class _Event:
    def record(self):
        pass

    def synchronize(self):
        pass


class PretendingRecorder(Recorder):
    """Runs functions as often as a capture would, and refuses those that could not be captured."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.captures = True

    branches = True

    def record(self, function, warm_up=2):
        with _recording():
            for _ in range(warm_up):
                function()
            with _Refusing():
                held = function()
        self.budget.graphs += 1

        def replay():
            found = function()
            if held is not None:
                held.copy_(found)

        return Recorded(replay, held, None)

    def pinned(self, n, dtype):
        return torch.zeros(n, dtype=dtype)

    def event(self):
        return _Event()
