"""`Stream`: gathers samples that remain from several batches, so that late stages run full."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.onnx.results import Gathered, StreamResult
from swiftsure.onnx.runtime import EarlyExit
from swiftsure.onnx.stages import State
from swiftsure.run.streaming import StageStream, Step

__all__ = ["Stream"]

Array = NDArray[Any]


class Stream(StageStream[StreamResult]):
    """Runs late stages on full batches, as `swiftsure.torch.Stream` does.

    Parameters
    ----------
    fast : EarlyExit
    batch_size : int
        How many samples a stage runs at once.
    max_wait : int
        After how many further pushes a stage runs a batch that is not full.

    Notes
    -----
    A stream is not thread-safe. Threads may share the `EarlyExit`, each with its own stream.
    """

    def __init__(self, fast: EarlyExit, batch_size: int, max_wait: int = 32) -> None:
        if not isinstance(fast, EarlyExit):
            raise TypeError(f"`fast` must be an EarlyExit, but got {type(fast).__name__}.")
        super().__init__(fast.stages.n_exits, batch_size, max_wait)
        self.fast = fast

    def _size(self, batch: Any) -> int:
        return len(self.fast.stages.begin(batch)[0])

    def _begin(self, batch: Any, start: int, n: int) -> tuple[Array, State]:
        return np.arange(start, start + n), self.fast.stages.begin(batch)

    def _step(self, exit_index: int, ids: Array, state: State) -> Step[StreamResult]:
        fast, stages = self.fast, self.fast.stages
        state = stages.advance(exit_index, state)
        if exit_index == stages.n_exits - 1:
            return Step(fast.finish(ids, state), None)
        if not fast.may_fire(exit_index):
            return Step(None, lambda: (ids, state))
        left, stay, _ = fast.part(exit_index, stages.head(exit_index, state), ids)
        if left is None:
            return Step(None, lambda: (ids, state))
        if stay is None:
            return Step(left, None)
        return Step(left, lambda: (ids[stay], stages.select(state, stay)))

    def _assembly(self, batch: Any, start: int) -> Gathered:
        stages = self.fast.stages
        open_ = Gathered(self._size(batch), stages.output, start)
        if open_.n == 0:
            open_.arrays = stages.empty_output()
        return open_

    def _form(self, state: State) -> None:
        """All states of a stage have one form: that of the export."""

    def _rows(self, state: State, first: int, stop: int) -> State:
        return [array[first:stop] for array in state]

    def _joined(self, states: list[State]) -> State:
        return [np.concatenate(arrays) for arrays in zip(*states, strict=True)]

    def _joined_ids(self, ids: list[Array]) -> Array:
        return np.concatenate(ids)
