"""`OnnxExecutor`: runs exported stages for the loop and for streams, on NumPy arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.onnx.results import ExitOutput, StreamResult
from swiftsure.onnx.scoring import confidence, tempered, warn_of_probabilities
from swiftsure.onnx.stages import Stages, State
from swiftsure.run.stages import Assembly, Exited, StageExecutor
from swiftsure.scores import LearnedScore

__all__ = ["OnnxExecutor"]

Array = NDArray[Any]
Rows = NDArray[np.int64]


class OnnxExecutor(StageExecutor):
    """Runs the stages of an `EarlyExit`."""

    def __init__(
        self, stages: Stages, score: str | LearnedScore, temperatures: Sequence[float] | None
    ) -> None:
        self.n_exits = stages.n_exits
        self._stages, self._score = stages, score
        self.temperatures = temperatures or (1.0,) * stages.n_exits
        self._warned = False

    def size(self, batch: Any) -> int:
        """Return the number of samples in a batch."""
        return len(self._stages.begin(batch)[0])

    def begin(self, batch: Any) -> tuple[int, State]:
        """Return the number of samples in a batch, and its arrays."""
        state = self._stages.begin(batch)
        return len(state[0]), state

    def advance(self, exit_index: int, state: State) -> State:
        """Return the state at an exit, from the one before."""
        return self._stages.advance(exit_index, state)

    def answer(
        self,
        exit_index: int,
        state: State,
        n: int,  # noqa: ARG002
    ) -> tuple[list[Array], NDArray[np.float32] | None]:
        """Return an exit's outputs for n samples, and their confidences except at the last."""
        found = self._stages.head(exit_index, state)
        temperature = self.temperatures[exit_index]
        values = tempered(found.arrays, temperature)
        if exit_index == self.n_exits - 1:
            return values, None
        if not self._warned:
            self._warned = True
            warn_of_probabilities(self._score, found)
        return values, confidence(self._score, found, temperature, exit_index)

    def select(self, state: State, rows: Rows) -> State:
        """Return the state of some of the samples."""
        return self._stages.select(state, rows)

    def rows(self, values: list[Array], rows: Rows | slice) -> list[Array]:
        """Return the outputs of some of the samples."""
        return [array[rows] for array in values]

    def assembled(self, parts: Sequence[tuple[Rows, list[Array]]], n: int) -> list[Array]:
        """Return outputs of n samples from those of some rows each."""
        whole = [np.empty((n, *array.shape[1:]), array.dtype) for array in parts[0][1]]
        for rows, values in parts:
            for target, array in zip(whole, values, strict=True):
                target[rows] = array
        return whole

    def joined(self, states: Sequence[State]) -> State:
        """Return several states as one."""
        return [np.concatenate(arrays) for arrays in zip(*states, strict=True)]

    def nothing(self, batch: Any) -> list[Array]:  # noqa: ARG002
        """Return the outputs of a batch without samples, for which graphs may not run."""
        return self._stages.empty_output()

    def output(self, done: Assembly, confidences: NDArray[np.float32] | None) -> ExitOutput:
        """Return the results of a batch."""
        build = self._stages.output
        return ExitOutput(done.values(self), done.exits, confidences, done.decided, build=build)

    def result(self, exited: Exited) -> StreamResult:
        """Return samples that exited together."""
        ids, values, exit_index, decided = exited
        return StreamResult(ids, values, exit_index, decided, build=self._stages.output)
