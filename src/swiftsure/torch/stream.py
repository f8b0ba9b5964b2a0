"""`Stream`: gathers samples that remain from several batches, so that late stages run full."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure import checks
from swiftsure.torch.captured import CapturedStream
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
    full : bool
        Run the full model as one captured graph, whatever the policy says; needs an `EarlyExit`
        with `capture`.

    Notes
    -----
    A stream is not thread-safe. Threads may share the `EarlyExit`, each with its own stream. If the
    `EarlyExit` captures, samples also wait before the first stage until there are `batch_size` of
    them, and results come a few stages later: the host learns who left while later stages run.

    Examples
    --------
    >>> stream = Stream(fast, batch_size=256)  # doctest: +SKIP
    >>> for output in stream.run(batches, ordered=True):
    ...     ...  # doctest: +SKIP
    """

    def __init__(
        self, fast: EarlyExit, batch_size: int, max_wait: int = 32, *, full: bool = False
    ) -> None:
        if not isinstance(fast, EarlyExit):
            raise TypeError(f"`fast` must be an EarlyExit, but got {type(fast).__name__}.")
        self.fast = fast
        self.batch_size = checks.count("batch_size", batch_size)
        self.max_wait = checks.count("max_wait", max_wait)
        self._captured: CapturedStream | None = None
        if fast.captures is not None:
            self._captured = CapturedStream(fast, fast.captures, batch_size, max_wait, full)
        elif full:
            raise ValueError("`full` needs EarlyExit(..., capture=True).")
        self.pushed = 0
        self._n_pushes = 0
        self._queues: list[deque[_Group]] = [deque() for _ in range(fast.model.n_exits)]

    def push(self, batch: Any) -> list[StreamResult]:
        """Add a batch and return the samples that exited, from this batch or earlier ones.

        Raises
        ------
        StreamError
            If a stage fails. The samples that it ran are lost; the error names them. Those that
            exited are in the error's `results`. All others stay, and the stream can go on.
        """
        n = batch_size(batch)
        if self._captured is not None:
            self.pushed += n
            return self._marked(self._captured.push(batch))
        results: list[StreamResult] = []
        with self.fast.context(batch):
            self._n_pushes += 1
            if n > 0:
                state = self.fast.model.begin(batch)
                ids = torch.arange(self.pushed, self.pushed + n, device=device_of(batch))
                self.pushed += n
                self._queues[0].append(_Group(ids, state, self._n_pushes))
            self._drain_all(results)
        return self._marked(results)

    def flush(self) -> list[StreamResult]:
        """Run all waiting samples and return their results; see `push` for errors."""
        if self._captured is not None:
            return self._marked(self._captured.flush())
        results: list[StreamResult] = []
        first = next((group for queue in self._queues for group in queue), None)
        if first is not None:
            with self.fast.context(first.state):
                self._drain_all(results, everything=True)
        return self._marked(results)

    def _marked(self, results: list[StreamResult]) -> list[StreamResult]:
        """Return results that mark invalid samples, if the `EarlyExit` does."""
        mark = self.fast.on_invalid
        return results if mark == "raise" else [replace(each, on_invalid=mark) for each in results]

    @property
    def in_flight(self) -> int:
        """Number of samples that have not exited yet."""
        if self._captured is not None:
            return self._captured.in_flight
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
        mark = self.fast.on_invalid
        for out in self._run_ordered(batches):
            yield out if mark == "raise" else replace(out, on_invalid=mark)

    def _run_ordered(self, batches: Iterable[Any]) -> Iterator[ExitOutput]:
        if self._captured is not None:
            yield from self._captured.run(batches)
            return
        order = _BatchOrder()
        for batch in batches:
            open_ = Gathered(batch_size(batch), device_of(batch), self.pushed)
            if open_.n == 0:  # run it anyway, for the shapes of its outputs
                out = self.fast(batch)
                open_.put(StreamResult(out.exits, out.raw, 0))
            order.open.append(open_)
            yield from order.delivered(self.push, batch)
        yield from order.delivered(self.flush)

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
            first.results = self._marked(results)
            raise first

    def ordered(self, batches: Iterable[Any]) -> Iterator[ExitOutput]:
        """Yield one `ExitOutput` per batch, in order."""
        return self.run(batches, ordered=True)

    def _drain(self, k: int, results: list[StreamResult], everything: bool = False) -> None:
        """Run stage k while it has a full batch or samples that waited too long."""
        queue = self._queues[k]
        while queue:
            count = sum(len(group.ids) for group in queue)
            overdue = self._n_pushes - queue[0].since >= self.max_wait
            if not (k == 0 or everything or overdue or count >= self.batch_size):
                break
            parts, n_before = _take(queue, self.batch_size), len(results)
            try:
                self._step(k, _joined(parts), results)
            except Exception as error:
                exited = [result.ids.cpu().numpy() for result in results[n_before:]]
                tried = np.concatenate([part.ids.cpu().numpy() for part in parts])
                samples = np.setdiff1d(tried, np.concatenate([[], *exited]))
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


def _take(queue: deque[_Group], size: int) -> list[_Group]:
    """Remove up to `size` samples from the head of a queue that can run in one batch."""
    parts: list[_Group] = []
    count, form = 0, _form(queue[0].state)
    while queue and count < size and _form(queue[0].state) == form:
        group = queue.popleft()
        room = size - count
        if len(group.ids) > room:
            index = torch.arange(len(group.ids), device=device_of(group.state))
            rest = _Group(group.ids[room:], rows_of(group.state, index[room:]), group.since)
            queue.appendleft(rest)
            group = _Group(group.ids[:room], rows_of(group.state, index[:room]), group.since)
        parts.append(group)
        count += len(group.ids)
    return parts


def _form(state: Any) -> Any:
    """Return the structure of a state, and the type and shape of a sample in each leaf."""
    leaves, structure = pytree.tree_flatten(state)
    forms = [(leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else None for leaf in leaves]
    return structure, forms


def _joined(parts: list[_Group]) -> _Group:
    """Return several groups as one."""
    if len(parts) == 1:
        return parts[0]
    ids = torch.cat([part.ids for part in parts])
    states = [pytree.tree_flatten(part.state) for part in parts]
    leaves = [
        torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
        for leaves in zip(*(leaves for leaves, _ in states), strict=True)
    ]
    return _Group(ids, pytree.tree_unflatten(leaves, states[0][1]), parts[0].since)


class _BatchOrder:
    """Reassembles results into the original batches, in order."""

    def __init__(self) -> None:
        self.open: deque[Gathered] = deque()
        self._parts: dict[int, list[StreamResult]] = {}  # of batches that are not complete

    def delivered(
        self, run: Callable[..., list[StreamResult]], *given: Any
    ) -> Iterator[ExitOutput]:
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

    def complete(self, results: list[StreamResult]) -> Iterator[ExitOutput]:
        for result in results:
            ids = result.ids.cpu().numpy()  # ascending: queues keep the order of samples
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
