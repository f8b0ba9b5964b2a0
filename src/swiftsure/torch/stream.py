"""`Stream`: gathers the remaining samples of several batches so that late stages run full ones."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure import checks
from swiftsure.torch.captured import CapturedStream
from swiftsure.torch.results import ExitOutput, Gathered, StreamResult, owned
from swiftsure.torch.runtime import EarlyExit
from swiftsure.torch.staged import batch_size, device_of, plain_output, rows_of

__all__ = ["Stream"]


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
        """Add a batch and return the samples that exited, from this batch or earlier ones."""
        n = batch_size(batch)
        if self._captured is not None:
            self.pushed += n
            return self._captured.push(batch)
        results: list[StreamResult] = []
        with self.fast.context(batch):
            self._n_pushes += 1
            if n > 0:
                ids = torch.arange(self.pushed, self.pushed + n, device=device_of(batch))
                self.pushed += n
                self._queues[0].append(_Group(ids, self.fast.model.begin(batch), self._n_pushes))
            for k in range(len(self._queues)):
                self._drain(k, results)
        return results

    def flush(self) -> list[StreamResult]:
        """Run all waiting samples and return their results."""
        if self._captured is not None:
            return self._captured.flush()
        results: list[StreamResult] = []
        first = next((group for queue in self._queues for group in queue), None)
        if first is not None:
            with self.fast.context(first.state):
                for k in range(len(self._queues)):
                    self._drain(k, results, everything=True)
        return results

    @property
    def in_flight(self) -> int:
        """Number of samples that have not exited yet."""
        if self._captured is not None:
            return self._captured.in_flight
        return sum(len(group.ids) for queue in self._queues for group in queue)

    def run(self, batches: Iterable[Any], ordered: bool = False) -> Iterator[Any]:
        """Yield `StreamResult`s as they come or, if `ordered`, one `ExitOutput` per batch."""
        if not ordered:
            for batch in batches:
                yield from self.push(batch)
            yield from self.flush()
            return
        if self.in_flight:
            raise ValueError(
                f"`ordered` must be False while samples of earlier pushes wait ({self.in_flight}"
                " do), which are in none of these batches: take them out with flush() first."
            )
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
            yield from order.complete(self.push(batch))
        yield from order.complete(self.flush())

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
            self._step(k, _take(queue, self.batch_size), results)
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


@dataclass(frozen=True)
class _Group:
    ids: Tensor
    state: Any
    since: int


def _take(queue: deque[_Group], size: int) -> _Group:
    """Remove up to `size` samples from the head of a queue and return them as one group."""
    parts, count = [], 0
    while queue and count < size:
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
