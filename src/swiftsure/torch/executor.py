"""`TorchExecutor`: runs the stages of a PyTorch model for the loop and for streams."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure.run.stages import Assembly, Exited, StageExecutor
from swiftsure.torch.replaying import ReplayedModel
from swiftsure.torch.results import ExitOutput, StreamResult, assembled, owned
from swiftsure.torch.scoring import confidence
from swiftsure.torch.segments import SegmentPlan, signature_of
from swiftsure.torch.staged import (
    batch_size,
    device_of,
    exit_output,
    flattened,
    plain_output,
    rows_of,
)

if TYPE_CHECKING:
    from swiftsure.torch.runtime import EarlyExit

__all__ = ["SegmentExecutor", "TorchExecutor"]

Rows = NDArray[np.int64]


class TorchExecutor(StageExecutor):
    """Runs the stages of an `EarlyExit`, compiled or not.

    Each exit that decides copies its confidences to the host, which on a GPU waits for them; the
    shapes of the next stage depend on them.
    """

    def __init__(self, fast: "EarlyExit", stages: Sequence[Callable[[Any], Any]]) -> None:
        self.n_exits = fast.model.n_exits
        self.stages = stages
        self._fast, self._model = fast, fast.model
        self._score = fast.score
        self._temperatures = fast.policy.temperatures or (1.0,) * self.n_exits

    def size(self, batch: Any) -> int:
        """Return the number of samples in a batch."""
        return batch_size(batch)

    def begin(self, batch: Any) -> tuple[int, Any]:
        """Return the number of samples in a batch, and their state before the first exit."""
        return batch_size(batch), self._model.begin(batch)

    def advance(self, exit_index: int, state: Any) -> Any:
        """Return the state at an exit, from the one before; runs the compiled stage if any."""
        return self.stages[exit_index](state)

    def answer(self, exit_index: int, state: Any, n: int) -> tuple[Any, NDArray[np.float32] | None]:
        """Return an exit's outputs for n samples, and their confidences except at the last."""
        output = exit_output(self._model, exit_index, state, n, self._temperatures[exit_index])
        values = plain_output(output)
        if exit_index == self.n_exits - 1:
            return values, None
        scores = confidence(self._score, output, exit_index)
        return values, scores.detach().cpu().numpy()

    def full(self, batch: Any) -> Any:
        """Return the outputs of the full model; a replayed network runs as it is."""
        model = self._model
        if not isinstance(model, ReplayedModel):
            return super().full(batch)
        last, n = self.n_exits - 1, batch_size(batch)
        state = model.full_state(batch)
        return plain_output(exit_output(model, last, state, n, self._temperatures[last]))

    def select(self, state: Any, rows: Rows) -> Any:
        """Return the state of some of the samples."""
        return self._model.select(state, on_device(rows, device_of(state)))

    def rows(self, values: Any, rows: Rows | slice) -> Any:
        """Return the outputs of some of the samples."""
        if isinstance(rows, slice):
            return pytree.tree_map_only(Tensor, lambda leaf: leaf[rows], values)
        return rows_of(values, on_device(rows, _device(values)))

    def assembled(self, parts: Sequence[tuple[Rows, Any]], n: int) -> Any:
        """Return outputs of n samples from those of some rows each; raises unless all are alike."""
        device = _device(parts[0][1])
        return assembled([(on_device(rows, device), values) for rows, values in parts], n)

    def owned(self, values: Any) -> Any:
        """Return a copy of outputs, which may alias a state, the batch or a weight."""
        return owned(values)

    def form(self, state: Any) -> Any:
        """Return the structure of a state, and the type and shape of a sample in each leaf."""
        leaves, structure = pytree.tree_flatten(state)
        forms = [
            (leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else None for leaf in leaves
        ]
        return structure, forms

    def joined(self, states: Sequence[Any]) -> Any:
        """Return several states of one form as one."""
        flat = [pytree.tree_flatten(state) for state in states]
        leaves = [
            torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
            for leaves in zip(*(leaves for leaves, _ in flat), strict=True)
        ]
        return pytree.tree_unflatten(leaves, flat[0][1])

    def context(self, state: Any) -> AbstractContextManager[None]:
        """Return the context in which stages run."""
        return self._fast.context(state)

    @torch.inference_mode(False)  # users may compute with these tensors, also with gradients
    def output(
        self, done: Assembly, confidences: NDArray[np.float32] | None, on_invalid: str
    ) -> ExitOutput:
        """Return the results of a batch as tensors."""
        values = done.values(self)
        device = _device(values)
        seen = None if confidences is None else on_device(confidences, device)
        exits, decided = on_device(done.exits, device), on_device(done.decided, device)
        return ExitOutput(values, exits, seen, decided, on_invalid=on_invalid)

    @torch.inference_mode(False)
    def result(self, exited: Exited, on_invalid: str) -> StreamResult:
        """Return samples that exited together as tensors."""
        device, scores = _device(exited.values), exited.confidences
        decided = None if scores is None else on_device(scores, device)
        ids = on_device(exited.ids, device)
        return StreamResult(ids, exited.values, exited.exit, decided, on_invalid)


class _Segmented(NamedTuple):
    """The state of samples between segments, and what the last one returned."""

    plan: SegmentPlan
    tensors: list[Tensor]
    found: Any = None


class SegmentExecutor(TorchExecutor):
    """Runs the stages between two exits that can be taken, with head and score, as one function.

    For networks whose stages stop in the middle of a forward: each function is compiled from the
    operations that it calls.
    """

    def __init__(self, fast: "EarlyExit", stages: Sequence[Callable[[Any], Any]]) -> None:
        super().__init__(fast, stages)
        self._plain = TorchExecutor(fast, stages)
        self._lock = threading.RLock()
        self.forget()

    def forget(self) -> None:
        """Drop what was compiled, as it holds weights that may have been replaced."""
        self._plans: dict[Any, SegmentPlan] = {}

    def begin(self, batch: Any) -> tuple[int, Any]:
        """Return the number of samples in a batch, and their tensors."""
        n = batch_size(batch)
        return (n, self._begun(batch, full=False)) if n else (0, None)

    def advance(self, exit_index: int, state: _Segmented) -> _Segmented:
        """Run a segment if it ends at this exit."""
        plan = state.plan
        if exit_index not in plan.exits:
            return state
        found = plan.steps[plan.exits.index(exit_index)](state.tensors)
        return _Segmented(plan, found.state, found)

    def answer(
        self,
        exit_index: int,  # noqa: ARG002
        state: _Segmented,
        n: int,  # noqa: ARG002
    ) -> tuple[Any, NDArray[np.float32] | None]:
        """Return an exit's outputs for n samples, and their confidences except at the last."""
        scores = state.found.scores
        values = state.plan.output(state.found.values)
        return values, None if scores is None else scores.cpu().numpy()

    def select(self, state: _Segmented, rows: Rows) -> _Segmented:
        """Return the state of some of the samples."""
        index = on_device(rows, state.tensors[0].device)
        return _Segmented(state.plan, [each.index_select(0, index) for each in state.tensors])

    def nothing(self, batch: Any) -> Any:
        """Return the outputs of a batch without samples."""
        return self._plain.full(batch)

    def full(self, batch: Any) -> Any:
        """Return the outputs of the full model."""
        state = self._begun(batch, full=True)
        return state.plan.output(state.plan.steps[0](state.tensors).values)

    def form(self, state: _Segmented) -> Any:
        """Return what the states of samples must have in common to run in one batch."""
        return id(state.plan)

    def joined(self, states: Sequence[_Segmented]) -> _Segmented:
        """Return several states of one form as one."""
        parts = zip(*(state.tensors for state in states), strict=True)
        return _Segmented(states[0].plan, [torch.cat(each) for each in parts])

    def context(self, state: Any) -> AbstractContextManager[None]:
        """Return the context in which stages run."""
        return super().context(state.tensors if isinstance(state, _Segmented) else state)

    def _begun(self, batch: Any, *, full: bool) -> _Segmented:
        model: Any = self._model
        batch = model.settled(batch)
        key = (full, signature_of(batch))
        plan = self._plans.get(key)
        if plan is None:
            with self._lock:
                plan = self._plans.get(key)
                if plan is None:
                    plan = SegmentPlan(self._fast, batch, full=full, compiled=True)
                    self._plans[key] = plan
        return _Segmented(plan, plan.batch_tensors(batch))


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device, without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _device(values: Any) -> torch.device:
    """Return where outputs are; the CPU for those without a tensor."""
    leaves = (leaf.device for leaf in flattened(values)[0] if isinstance(leaf, Tensor))
    return next(leaves, torch.device("cpu"))
