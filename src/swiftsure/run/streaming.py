"""`StageStream` gathers samples that remain from several batches before a stage runs.

It keeps one queue per stage. An `ExitLoop` decides who exits, and its executor runs stages.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.run.stages import Assembly, Exited, ExitLoop, StageExecutor

__all__ = ["StageStream", "StreamError"]

Result = TypeVar("Result")
Output = TypeVar("Output")


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
class _Waiting:
    """Samples that wait for a stage: their numbers, their state, and the push they arrived with."""

    ids: NDArray[np.int64]
    state: Any
    since: int


class StageStream(ABC, Generic[Result, Output]):
    """Runs late stages on full batches.

    Samples that do not exit wait before the next stage until there are `batch_size` of them. At
    most `2 · batch_size` samples wait before any stage, and none waits for more than `max_wait`
    further pushes.
    """

    def __init__(self, loop: ExitLoop, batch_size: int, max_wait: int) -> None:
        self.batch_size = checks.count("batch_size", batch_size)
        self.max_wait = checks.count("max_wait", max_wait)
        self._loop, self._executor = loop, loop.executor
        self._n_pushed = 0
        self._n_pushes = 0
        self._queues: list[deque[_Waiting]] = [deque() for _ in range(loop.last + 1)]

    @abstractmethod
    def _result(self, exited: Exited) -> Result:
        """Return samples that exited as a runtime's users get them."""

    @abstractmethod
    def _output(self, done: Assembly) -> Output:
        """Return the results of a batch as a runtime's users get them."""

    def push(self, batch: Any) -> list[Result]:
        """Add a batch and return the samples that exited, from this batch or earlier ones.

        Raises
        ------
        StreamError
            If a stage fails. The samples that it ran are lost; the error names them. Those that
            exited are in the error's `results`. All others stay, and the stream can go on.
        """
        return self._results(self._push, batch)

    def flush(self) -> list[Result]:
        """Run all waiting samples and return their results; see `push` for errors."""
        return self._results(self._flush)

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

    def ordered(self, batches: Iterable[Any]) -> Iterator[Output]:
        """Yield one `ExitOutput` per batch, in order."""
        return self.run(batches, ordered=True)

    # ------------------------------------------------------------------------------ the schedule

    def _results(self, run: Callable[..., list[Exited]], *given: Any) -> list[Result]:
        """Return what a call gives, for users; also what it had before an error."""
        try:
            return list(map(self._result, run(*given)))
        except StreamError as error:
            error.results = list(map(self._result, error.results))
            raise

    def _run_ordered(self, batches: Iterable[Any]) -> Iterator[Output]:
        order = _BatchOrder(self._executor)
        try:
            for batch in batches:
                order.open.append(Assembly(self._executor.size(batch), self.pushed))
                if not order.open[-1].n:
                    with self._executor.context(batch):
                        order.open[-1] = self._loop.run(batch)[0]
                yield from map(self._output, order.delivered(self._push, batch))
            yield from map(self._output, order.delivered(self._flush))
        except StreamError as error:
            error.results = list(map(self._result, error.results))
            raise

    def _push(self, batch: Any) -> list[Exited]:
        results: list[Exited] = []
        with self._executor.context(batch):
            self._n_pushes += 1
            n, state = self._executor.begin(batch)
            if n > 0:
                ids = np.arange(self.pushed, self.pushed + n)
                self._n_pushed += n
                self._queues[0].append(_Waiting(ids, state, self._n_pushes))
            self._drain_all(results)
        return results

    def _flush(self) -> list[Exited]:
        results: list[Exited] = []
        first = next((group for queue in self._queues for group in queue), None)
        if first is not None:
            with self._executor.context(first.state):
                self._drain_all(results, everything=True)
        return results

    def _drain_all(self, results: list[Exited], everything: bool = False) -> None:
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

    def _drain(self, k: int, results: list[Exited], everything: bool = False) -> None:
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
                exited = [result.ids for result in results[n_before:]]
                tried = np.concatenate([part.ids for part in parts])
                samples = np.setdiff1d(tried, np.concatenate([[], *exited]))
                raise StreamError.of(f"Stage {k + 1}", samples, error) from error
            if k + 1 < len(self._queues):
                self._drain(k + 1, results)  # at once, so that no queue grows long

    def _run_stage(self, k: int, parts: list[_Waiting], results: list[Exited]) -> None:
        """Run one stage, collect the samples that exit, and queue the rest for the next stage."""
        ids, state = parts[0].ids, parts[0].state
        if len(parts) > 1:
            ids = np.concatenate([part.ids for part in parts])
            state = self._executor.joined([part.state for part in parts])
        state = self._executor.advance(k, state)
        exited, staying, _ = self._loop.decide(k, ids, state)
        if exited is not None:
            results.append(exited)
            if staying is None:
                return
            ids, state = ids[staying], self._executor.select(state, staying)
        self._queues[k + 1].append(_Waiting(ids, state, parts[0].since))

    def _take(self, queue: deque[_Waiting]) -> list[_Waiting]:
        """Remove up to `batch_size` samples from the head of a queue that can run in one batch."""
        executor = self._executor
        parts: list[_Waiting] = []
        count, form = 0, executor.form(queue[0].state)
        while queue and count < self.batch_size and executor.form(queue[0].state) == form:
            group = queue.popleft()
            room, n = self.batch_size - count, len(group.ids)
            if n > room:
                first, rest = (
                    executor.select(group.state, np.arange(*span))
                    for span in ((0, room), (room, n))
                )
                queue.appendleft(_Waiting(group.ids[room:], rest, group.since))
                group = _Waiting(group.ids[:room], first, group.since)
            parts.append(group)
            count += len(group.ids)
        return parts


def _delivered(run: Callable[..., list[Result]], *given: Any) -> Iterator[Result]:
    """Yield the results of a call; if it fails, those that it has before the error."""
    try:
        yield from run(*given)
    except StreamError as error:
        yield from error.results
        raise


class _BatchOrder:
    """Reassembles results into the original batches, in order."""

    def __init__(self, executor: StageExecutor) -> None:
        self.open: deque[Assembly] = deque()
        self._executor = executor
        self._parts: dict[int, list[Exited]] = {}  # of batches that are not complete

    def delivered(self, run: Callable[..., list[Exited]], *given: Any) -> Iterator[Assembly]:
        """Yield the batches that a call completes.

        If it fails, its error keeps the results of the batches that are not complete.
        """
        try:
            results = run(*given)
        except StreamError as error:
            yield from self._complete(error.results)
            error.results = [part for parts in self._parts.values() for part in parts]
            raise
        yield from self._complete(results)

    def _complete(self, results: list[Exited]) -> Iterator[Assembly]:
        for result in results:
            ids = result.ids  # ascending: queues keep the order of samples
            for batch in self.open:
                first, stop = np.searchsorted(ids, [batch.start, batch.start + batch.n]).tolist()
                if first < stop:
                    part = self._part(result, first, stop)
                    batch.put(part)
                    self._parts.setdefault(batch.start, []).append(part)
        while self.open and self.open[0].missing == 0:
            batch = self.open.popleft()
            self._parts.pop(batch.start, None)
            yield batch

    def _part(self, exited: Exited, first: int, stop: int) -> Exited:
        if stop - first == len(exited.ids):
            return exited
        part = slice(first, stop)
        decided = None if exited.confidences is None else exited.confidences[part]
        values = self._executor.rows(exited.values, part)
        return Exited(exited.ids[part], values, exited.exit, decided)
