"""The stream's scheduler: gathers samples that remain from several batches before a stage runs.

It keeps one queue per stage and knows nothing of arrays or devices. A runtime subclasses
`StageStream` and says how its states are split, joined and run.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks

__all__ = ["Assembly", "StageStream", "Step", "StreamError", "Waiting"]


class Leaving(Protocol):
    """Samples that exited together, as a runtime returns them."""

    @property
    def ids(self) -> Any:
        """Numbers of the samples, ascending."""

    def rows(self, first: int, stop: int) -> Any:
        """Return the samples from `first` up to `stop`."""


class Assembly(Protocol):
    """A batch of `n` samples, numbered from `start`, that is assembled as they exit."""

    n: int
    start: int
    missing: int

    def put(self, left: Any) -> None:
        """Store samples of this batch that exited."""

    def whole(self) -> Any:
        """Return the results of the batch once no sample is missing."""


Left = TypeVar("Left", bound=Leaving)


class StreamError(RuntimeError, ValueError):
    """A stage failed on some samples of a stream, or refused them; the others go on.

    Attributes
    ----------
    samples : (m,)
        Numbers of the samples that failed, in the order in which samples were pushed. They have
        left the stream.
    results : list of StreamResult
        Samples that exited during the same call.
    """

    def __init__(self, message: str, samples: NDArray[np.int64]) -> None:
        super().__init__(message)
        self.samples = samples
        self.results: list[Any] = []

    @classmethod
    def of(cls, stages: str, samples: NDArray[np.int64], error: Exception) -> Self:
        """Return the error for stages that failed on some samples."""
        shown = ", ".join(map(str, samples[:10].tolist())) + ", …" * (len(samples) > 10)
        cause = f"{type(error).__name__}: {error}"
        found = cls(f"{stages} failed on samples {shown} ({cause}); the others go on.", samples)
        found.__cause__ = error
        return found


@dataclass(frozen=True)
class Waiting:
    """Samples that wait for a stage: their numbers, their state, and the push they arrived with."""

    ids: Any
    state: Any
    since: int


class Step(NamedTuple, Generic[Left]):
    """Samples that exit at a stage, and a function that selects the others: (ids, state)."""

    left: Left | None
    stay: Callable[[], tuple[Any, Any]] | None


class StageStream(ABC, Generic[Left]):
    """Runs late stages on full batches.

    Samples that do not exit wait before the next stage until there are `batch_size` of them. At
    most `2 · batch_size` samples wait before any stage, and none waits for more than `max_wait`
    further pushes.
    """

    def __init__(self, n_exits: int, batch_size: int, max_wait: int) -> None:
        self.batch_size = checks.count("batch_size", batch_size)
        self.max_wait = checks.count("max_wait", max_wait)
        self._n_pushed = 0
        self._n_pushes = 0
        self._queues: list[deque[Waiting]] = [deque() for _ in range(n_exits)]

    # ------------------------------------------------------------------- what a runtime defines

    @abstractmethod
    def _size(self, batch: Any) -> int:
        """Return the number of samples in a batch."""

    @abstractmethod
    def _begin(self, batch: Any, start: int, n: int) -> tuple[Any, Any]:
        """Return the numbers, from `start`, and the first state of n samples."""

    @abstractmethod
    def _step(self, exit_index: int, ids: Any, state: Any) -> Step[Left]:
        """Run one stage on samples and decide who exits."""

    @abstractmethod
    def _assembly(self, batch: Any, start: int) -> Assembly:
        """Return a batch to assemble results in; complete if it has no samples."""

    @abstractmethod
    def _form(self, state: Any) -> Any:
        """Return what the states of samples must have in common to run in one batch."""

    @abstractmethod
    def _rows(self, state: Any, first: int, stop: int) -> Any:
        """Return the samples from `first` up to `stop` of a state."""

    @abstractmethod
    def _joined(self, states: list[Any]) -> Any:
        """Return several states as one."""

    @abstractmethod
    def _joined_ids(self, ids: list[Any]) -> Any:
        """Return the numbers of several groups of samples as one array."""

    @staticmethod
    def _on_host(ids: Any) -> NDArray[np.int64]:
        """Return the numbers of samples as an array."""
        return np.asarray(ids)

    def _context(self, state: Any) -> AbstractContextManager[None]:  # noqa: ARG002 (for subclasses)
        """Return the context in which stages run."""
        return nullcontext()

    # ------------------------------------------------------------------------------ the schedule

    def push(self, batch: Any) -> list[Left]:
        """Add a batch and return the samples that exited, from this batch or earlier ones.

        Raises
        ------
        StreamError
            If a stage fails. The samples that it ran are lost; the error names them. Those that
            exited are in the error's `results`. All others stay, and the stream can go on.
        """
        n = self._size(batch)
        results: list[Left] = []
        with self._context(batch):
            self._n_pushes += 1
            if n > 0:
                ids, state = self._begin(batch, self.pushed, n)
                self._n_pushed += n
                self._queues[0].append(Waiting(ids, state, self._n_pushes))
            self._drain_all(results)
        return results

    def flush(self) -> list[Left]:
        """Run all waiting samples and return their results; see `push` for errors."""
        results: list[Left] = []
        first = next((group for queue in self._queues for group in queue), None)
        if first is not None:
            with self._context(first.state):
                self._drain_all(results, everything=True)
        return results

    @property
    def pushed(self) -> int:
        """Number of samples that were ever added."""
        return self._n_pushed

    @property
    def in_flight(self) -> int:
        """Number of samples that have not exited yet."""
        return sum(len(group.ids) for queue in self._queues for group in queue)

    def run(self, batches: Iterable[Any], ordered: bool = False) -> Iterator[Any]:
        """Yield `StreamResult`s as samples exit or, if `ordered`, one `ExitOutput` per batch."""
        if not ordered:
            for batch in batches:
                yield from _delivered(self.push, batch)
            yield from _delivered(self.flush)
            return
        if self.in_flight:
            raise ValueError(
                f"`ordered` must be False while samples of earlier pushes wait ({self.in_flight}"
                " do), which are in none of these batches: take them out with flush() first."
            )
        yield from self._run_ordered(batches)

    def ordered(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield one `ExitOutput` per batch, in order."""
        return self.run(batches, ordered=True)

    def _run_ordered(self, batches: Iterable[Any]) -> Iterator[Any]:
        order = _BatchOrder(self._on_host)
        for batch in batches:
            order.open.append(self._assembly(batch, self.pushed))
            yield from order.delivered(self.push, batch)
        yield from order.delivered(self.flush)

    def _drain_all(self, results: list[Left], everything: bool = False) -> None:
        """Run every stage that is due; after a failure the others still run, then it is raised."""
        failed: list[StreamError] = []
        for k in range(len(self._queues)):
            while True:
                try:
                    self._drain(k, results, everything)
                except StreamError as error:
                    failed.append(error)
                    continue
                break
        if failed:
            first = failed[0]
            first.samples = np.concatenate([each.samples for each in failed])
            first.results = results
            raise first

    def _drain(self, k: int, results: list[Left], everything: bool = False) -> None:
        """Run stage k while it has a full batch or samples that waited too long."""
        queue = self._queues[k]
        while queue:
            count = sum(len(group.ids) for group in queue)
            overdue = self._n_pushes - queue[0].since >= self.max_wait
            if not (k == 0 or everything or overdue or count >= self.batch_size):
                break
            parts, n_before = self._take(queue), len(results)
            try:
                self._run_stage(k, parts, results)
            except Exception as error:
                exited = [self._on_host(result.ids) for result in results[n_before:]]
                tried = np.concatenate([self._on_host(part.ids) for part in parts])
                samples = np.setdiff1d(tried, np.concatenate([[], *exited]))
                raise StreamError.of(f"Stage {k + 1}", samples, error) from error
            if k + 1 < len(self._queues):
                self._drain(k + 1, results)  # at once, so that no queue grows long

    def _run_stage(self, k: int, parts: list[Waiting], results: list[Left]) -> None:
        """Run one stage, collect the samples that exit, and queue the rest for the next stage."""
        ids, state = parts[0].ids, parts[0].state
        if len(parts) > 1:
            ids = self._joined_ids([part.ids for part in parts])
            state = self._joined([part.state for part in parts])
        left, stay = self._step(k, ids, state)
        if left is not None:
            results.append(left)
        if stay is not None:
            self._queues[k + 1].append(Waiting(*stay(), parts[0].since))

    def _take(self, queue: deque[Waiting]) -> list[Waiting]:
        """Remove up to `batch_size` samples from the head of a queue that can run in one batch."""
        parts: list[Waiting] = []
        count, form = 0, self._form(queue[0].state)
        while queue and count < self.batch_size and self._form(queue[0].state) == form:
            group = queue.popleft()
            room, n = self.batch_size - count, len(group.ids)
            if n > room:
                rest = self._rows(group.state, room, n)
                queue.appendleft(Waiting(group.ids[room:], rest, group.since))
                group = Waiting(group.ids[:room], self._rows(group.state, 0, room), group.since)
            parts.append(group)
            count += len(group.ids)
        return parts


def _delivered(run: Callable[..., list[Left]], *given: Any) -> Iterator[Left]:
    """Yield the results of a call; if it fails, those that it has before the error."""
    try:
        yield from run(*given)
    except StreamError as error:
        yield from error.results
        raise


class _BatchOrder:
    """Reassembles results into the original batches, in order."""

    def __init__(self, on_host: Callable[[Any], NDArray[np.int64]]) -> None:
        self.open: deque[Assembly] = deque()
        self._on_host = on_host
        self._parts: dict[int, list[Any]] = {}  # of batches that are not complete

    def delivered(self, run: Callable[..., list[Any]], *given: Any) -> Iterator[Any]:
        """Yield the batches that a call completes.

        If it fails, its error keeps the results of the batches that are not complete.
        """
        try:
            results = run(*given)
        except StreamError as error:
            yield from self.complete(error.results)
            error.results = [part for parts in self._parts.values() for part in parts]
            raise
        yield from self.complete(results)

    def complete(self, results: list[Any]) -> Iterator[Any]:
        for result in results:
            ids = self._on_host(result.ids)  # ascending: queues keep the order of samples
            for batch in self.open:
                first, stop = np.searchsorted(ids, [batch.start, batch.start + batch.n]).tolist()
                if first < stop:
                    part = result.rows(first, stop)
                    batch.put(part)
                    self._parts.setdefault(batch.start, []).append(part)
        while self.open and self.open[0].missing == 0:
            batch = self.open.popleft()
            self._parts.pop(batch.start, None)
            yield batch.whole()
