"""The loop over stages: a batch runs stage by stage, and at each exit some of its samples leave.

    begin -> [ advance -> answer -> which samples exit? -> select ] ... -> advance -> answer

The loop decides on the host, in NumPy, and knows nothing of a framework's arrays. A `StageExecutor`
runs stages and heads, and takes rows out of its arrays. Streams use the same steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure.exits import exits_in_use, reaches

__all__ = ["Assembly", "ExitLoop", "Exited", "StageExecutor", "Step"]

Rows = NDArray[np.int64]
Scores = NDArray[np.float32]


class Exited(NamedTuple):
    """Samples that exited together.

    Attributes
    ----------
    ids : (m,)
        Numbers of the samples, ascending.
    values
        Their outputs.
    exit : int
    confidences : (m,), optional
        What decided; None at the last exit.
    """

    ids: Rows
    values: Any
    exit: int
    confidences: Scores | None = None


class Step(NamedTuple):
    """What an exit decided.

    Attributes
    ----------
    exited : Exited, optional
        None if all samples stay.
    staying : (m,), optional
        Rows of the samples that stay, if some exit; None if nobody stays.
    confidences : (n,), optional
        Of all samples; None where no head was run for a decision.
    """

    exited: Exited | None = None
    staying: Rows | None = None
    confidences: Scores | None = None


class StageExecutor(ABC):
    """Runs the stages of a model for a loop or a stream, on the arrays of one framework."""

    n_exits: int

    @abstractmethod
    def size(self, batch: Any) -> int:
        """Return the number of samples in a batch."""

    @abstractmethod
    def begin(self, batch: Any) -> tuple[int, Any]:
        """Return the number of samples in a batch, and their state before the first exit."""

    @abstractmethod
    def advance(self, exit_index: int, state: Any) -> Any:
        """Return the state at an exit, from the one before."""

    @abstractmethod
    def answer(self, exit_index: int, state: Any, n: int) -> tuple[Any, Scores | None]:
        """Return an exit's outputs for n samples, and their confidences except at the last."""

    @abstractmethod
    def select(self, state: Any, rows: Rows) -> Any:
        """Return the state of some of the samples."""

    @abstractmethod
    def rows(self, values: Any, rows: Rows | slice) -> Any:
        """Return the outputs of some of the samples."""

    @abstractmethod
    def assembled(self, parts: Sequence[tuple[Rows, Any]], n: int) -> Any:
        """Return outputs of n samples from those of some rows each; raises unless all are alike."""

    def owned(self, values: Any) -> Any:
        """Return outputs that no later stage overwrites."""
        return values

    def nothing(self, batch: Any) -> Any:
        """Return the outputs of a batch without samples."""
        return self.full(batch)

    def full(self, batch: Any) -> Any:
        """Return the outputs of the full model."""
        n, state = self.begin(batch)
        for k in range(self.n_exits):
            state = self.advance(k, state)
        return self.answer(self.n_exits - 1, state, n)[0]

    # ------------------------------------------------------------------------------- for streams

    def form(self, state: Any) -> Any:  # noqa: ARG002 (for subclasses)
        """Return what the states of samples must have in common to run in one batch."""
        return None

    @abstractmethod
    def joined(self, states: Sequence[Any]) -> Any:
        """Return several states of one form as one."""

    def context(self, state: Any) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return the context in which stages run."""
        return nullcontext()


class Assembly:
    """The results of a batch of n samples, numbered from `start`, put together as they exit."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start, self.missing = n, start, n
        self.exits = np.zeros(n, np.int64)
        self.decided = np.zeros(n, np.float32)
        self.parts: list[tuple[Rows, Any]] = []

    def put(self, exited: Exited) -> None:
        """Keep the results of some samples of this batch."""
        where = exited.ids - self.start if self.start else exited.ids
        self.exits[where] = exited.exit
        if exited.confidences is not None:
            self.decided[where] = exited.confidences
        self.missing -= len(where)
        self.parts.append((where, exited.values))

    def values(self, executor: StageExecutor) -> Any:
        """Return the outputs of the batch once no sample is missing."""
        alone = len(self.parts) == 1
        return self.parts[0][1] if alone else executor.assembled(self.parts, self.n)


class ExitLoop:
    """Runs batches by the exit rule.

    Parameters
    ----------
    executor : StageExecutor
    thresholds : (n_exits - 1,)
        Infinity for exits that are never taken.
    strict, min_exit
        As in `ExitRule`.
    """

    def __init__(
        self, executor: StageExecutor, thresholds: ArrayLike, *, strict: bool, min_exit: int
    ) -> None:
        self.executor, self.strict = executor, strict
        self.thresholds = np.asarray(thresholds, np.float32)
        self.last = executor.n_exits - 1
        self._used = frozenset(exits_in_use(self.thresholds, strict=strict, min_exit=min_exit))

    def can_exit(self, exit_index: int) -> bool:
        """Return whether any confidence makes a sample exit here."""
        return exit_index in self._used

    def decide(self, exit_index: int, ids: Rows, state: Any) -> Step:
        """Return which samples exit, given the state at an exit."""
        executor, n = self.executor, len(ids)
        if exit_index == self.last:
            values, _ = executor.answer(exit_index, state, n)
            return Step(Exited(ids, executor.owned(values), exit_index))
        if exit_index not in self._used:
            return Step()
        values, scores = executor.answer(exit_index, state, n)
        assert scores is not None  # noqa: S101
        exiting = reaches(scores, self.thresholds[exit_index], strict=self.strict)
        n_exiting = np.count_nonzero(exiting)
        if n_exiting == 0:
            return Step(confidences=scores)
        if n_exiting == n:
            exited = Exited(ids, executor.owned(values), exit_index, scores)
            return Step(exited, confidences=scores)
        rows = np.flatnonzero(exiting)
        exited = Exited(ids[rows], executor.rows(values, rows), exit_index, scores[rows])
        return Step(exited, np.flatnonzero(~exiting), scores)

    def run(self, batch: Any) -> tuple[Assembly, Scores]:
        """Return the results of a batch, and the confidences (n, n_exits - 1) that were computed.

        Confidences are NaN where an exit was not reached, or no decision needed them.
        """
        executor = self.executor
        if self._used:
            n, state = executor.begin(batch)
        else:
            n, state = executor.size(batch), None
        assembly, ids = Assembly(n), np.arange(n)
        confidences = np.full((n, self.last), np.nan, np.float32)
        if n == 0 or not self._used:
            values = executor.owned(executor.full(batch)) if n else executor.nothing(batch)
            assembly.put(Exited(ids, values, self.last))
            return assembly, confidences
        for k in range(self.last + 1):
            state = executor.advance(k, state)
            exited, staying, scores = self.decide(k, ids, state)
            if scores is not None:
                confidences[ids, k] = scores
            if exited is None:
                continue
            assembly.put(exited)
            if staying is None:
                break
            ids, state = ids[staying], executor.select(state, staying)
        return assembly, confidences
