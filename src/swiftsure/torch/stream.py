"""`Stream`: gathers the remaining samples of several batches so that late stages run full ones."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure import checks
from swiftsure.torch.results import ExitOutput, Gathered, StreamResult, owned
from swiftsure.torch.runtime import EarlyExit
from swiftsure.torch.staged import batch_size, device_of, plain_output, rows_of

__all__ = ["Stream", "StreamError"]


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
        self.results: list[StreamResult] = []


class Stream:
    """Runs late stages on full batches, for offline throughput and for serving.

    Samples that do not exit wait before the next stage until there are `batch_size` of them. At
    most `2 · batch_size` samples wait before any stage, so memory is bounded. No sample waits for
    more than `max_wait` further pushes, so waiting is bounded too.

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

    Examples
    --------
    >>> stream = Stream(fast, batch_size=256)  # doctest: +SKIP
    >>> for output in stream.run(batches, ordered=True):
    ...     ...  # doctest: +SKIP
    """

    def __init__(self, fast: EarlyExit, batch_size: int, max_wait: int = 32) -> None:
        self.fast = fast
        self.batch_size = checks.count("batch_size", batch_size)
        self.max_wait = checks.count("max_wait", max_wait)
        self.pushed = 0
        self._n_pushes = 0
        self._queues: list[deque[_Group]] = [deque() for _ in range(fast.model.n_exits)]

    def push(self, batch: Any) -> list[StreamResult]:
        """Add a batch and return the samples that exited, from this batch or earlier ones.

        Raises
        ------
        StreamError
            If a stage fails. The samples that it ran are lost, and named in the error; those that
            exited are in the error's `results`; all others stay, and the stream can go on.
        """
        n = batch_size(batch)
        results: list[StreamResult] = []
        with self.fast.context(batch):
            self._n_pushes += 1
            if n > 0:
                state = self.fast.model.begin(batch)
                ids = torch.arange(self.pushed, self.pushed + n, device=device_of(batch))
                self.pushed += n
                self._queues[0].append(_Group(ids, state, self._n_pushes))
            self._drain_all(results)
        return results

    def flush(self) -> list[StreamResult]:
        """Run all waiting samples and return their results; see `push` for errors."""
        results: list[StreamResult] = []
        first = next((group for queue in self._queues for group in queue), None)
        if first is not None:
            with self.fast.context(first.state):
                self._drain_all(results, everything=True)
        return results

    @property
    def in_flight(self) -> int:
        """Number of samples that have not exited yet."""
        return sum(len(group.ids) for queue in self._queues for group in queue)

    def run(self, batches: Iterable[Any], ordered: bool = False) -> Iterator[Any]:
        """Yield `StreamResult`s as they come or, if `ordered`, one `ExitOutput` per batch."""
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
        order = _BatchOrder()
        for batch in batches:
            open_ = Gathered(batch_size(batch), device_of(batch), self.pushed)
            if open_.n == 0:  # run it anyway, for the shapes of its outputs
                out = self.fast(batch)
                open_.put(StreamResult(out.exits, out.raw, 0))
            order.open.append(open_)
            for result in _delivered(self.push, batch):
                yield from order.complete([result])
        for result in _delivered(self.flush):
            yield from order.complete([result])

    def _drain_all(self, results: list[StreamResult], everything: bool = False) -> None:
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

    def _drain(self, k: int, results: list[StreamResult], everything: bool = False) -> None:
        """Run stage k while it has a full batch or samples that waited too long."""
        queue = self._queues[k]
        while queue:
            count = sum(len(group.ids) for group in queue)
            overdue = self._n_pushes - queue[0].since >= self.max_wait
            if not (k == 0 or everything or overdue or count >= self.batch_size):
                break
            group, n_before = _take(queue, self.batch_size), len(results)
            try:
                self._step(k, group, results)
            except Exception as error:
                exited = [result.ids.cpu().numpy() for result in results[n_before:]]
                samples = np.setdiff1d(group.ids.cpu().numpy(), np.concatenate([[], *exited]))
                shown = ", ".join(map(str, samples[:10].tolist())) + ", …" * (len(samples) > 10)
                raise StreamError(
                    f"Stage {k + 1} failed on samples {shown} ({type(error).__name__}: {error});"
                    " the others go on.",
                    samples,
                ) from error
            if k + 1 < len(self._queues):
                self._drain(k + 1, results)  # at once, so that no queue grows long

    def _step(self, k: int, group: "_Group", results: list[StreamResult]) -> None:
        """Run one stage, collect the samples that exit, and queue the rest for the next stage."""
        fast, last = self.fast, self.fast.model.n_exits - 1
        ids, state = group.ids, fast.stage(k, group.state)
        if k == last:
            output = fast.answer(k, state, len(ids))
            results.append(StreamResult(ids, owned(plain_output(output)), k))
            return
        if fast.may_fire(k):
            output = fast.answer(k, state, len(ids))
            left, stay, _ = fast.part(k, output, ids)
            if left is not None:
                results.append(left)
                if stay is None:
                    return
                ids, state = ids[stay], fast.model.select(state, stay)
        self._queues[k + 1].append(_Group(ids, state, group.since))


def _delivered(run: Callable[..., list[StreamResult]], *given: Any) -> Iterator[StreamResult]:
    """Yield the results of a call; if it fails, those that it has before the error."""
    try:
        yield from run(*given)
    except StreamError as error:
        yield from error.results
        raise


@dataclass(frozen=True)
class _Group:
    ids: Tensor
    state: Any
    since: int


def _take(queue: deque[_Group], size: int) -> _Group:
    """Remove up to `size` samples from the head of a queue and return them as one group."""
    parts: list[_Group] = []
    count = 0
    while queue and count < size:
        if parts and not _same_form(parts[0].state, queue[0].state):
            break  # such as texts of other lengths, which cannot share a batch
        group = queue.popleft()
        room = size - count
        if len(group.ids) > room:
            index = torch.arange(len(group.ids), device=device_of(group.state))
            rest = _Group(group.ids[room:], rows_of(group.state, index[room:]), group.since)
            queue.appendleft(rest)
            group = _Group(group.ids[:room], rows_of(group.state, index[:room]), group.since)
        parts.append(group)
        count += len(group.ids)
    if len(parts) == 1:
        return parts[0]
    ids = torch.cat([part.ids for part in parts])
    states = [pytree.tree_flatten(part.state) for part in parts]
    leaves = [
        torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
        for leaves in zip(*(leaves for leaves, _ in states), strict=True)
    ]
    return _Group(ids, pytree.tree_unflatten(leaves, states[0][1]), parts[0].since)


def _same_form(one: Any, two: Any) -> bool:
    """Return whether two states can be joined: equal structures, and shapes per sample."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(one), pytree.tree_flatten(two)
    return spec == other_spec and all(
        a.shape[1:] == b.shape[1:] if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(leaves, others, strict=True)
    )


class _BatchOrder:
    """Reassembles results into the original batches, in order."""

    def __init__(self) -> None:
        self.open: deque[Gathered] = deque()

    def complete(self, results: list[StreamResult]) -> Iterator[ExitOutput]:
        for result in results:
            ids = result.ids.cpu().numpy()  # ascending: queues keep the order of samples
            for batch in self.open:
                first, stop = np.searchsorted(ids, [batch.start, batch.start + batch.n]).tolist()
                if first < stop:
                    batch.put(result.rows(first, stop))
        while self.open and self.open[0].missing == 0:
            yield self.open.popleft().whole()
