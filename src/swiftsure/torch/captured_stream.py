"""`CapturedStream`: runs batches through a captured lane, in the place of a plain `Stream`."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure.run.streaming import StreamError
from swiftsure.torch.captured import Captures
from swiftsure.torch.captured_lane import CapturedLane, Left
from swiftsure.torch.results import ExitOutput, StreamResult
from swiftsure.torch.staged import batch_size, rows_of

if TYPE_CHECKING:
    from swiftsure.torch.runtime import EarlyExit

__all__ = ["CapturedStream"]

CHECK_SECONDS = 0.005
"""How often a stream looks for replaced weights. Samples in flight may have seen either anyway."""


@dataclass
class _Open:
    """A batch whose samples have not all been answered."""

    start: int
    n: int
    missing: int


class CapturedStream:
    """Runs batches through a captured lane; the interface of `Stream`.

    Parameters
    ----------
    fast : EarlyExit
    size : int
        How many samples a segment runs at once.
    max_wait : int
        After how many further pushes a segment runs a batch that is not full.
    full : bool
        Run the full model instead of the policy.
    """

    def __init__(
        self, fast: "EarlyExit", captures: Captures, size: int, max_wait: int, full: bool = False
    ) -> None:
        self._fast, self._captures = fast, captures
        self._size, self._max_wait, self._full = size, max_wait, full
        self.pushed, self._pushes = 0, 0
        self._checked = 0.0
        self._lent: Any = None
        self._lane: CapturedLane | None = None
        self._open: deque[_Open] = deque()
        self._failures: list[StreamError] = []

    @property
    def in_flight(self) -> int:
        """Number of samples that have not exited yet."""
        return 0 if self._lane is None else self._lane.in_flight

    def push(self, batch: Any) -> list[StreamResult]:
        """Add a batch and return the samples that exited, from this batch or earlier ones."""
        with self._fast.context(batch):
            results = self._give_back_stale()
            for part in _split(batch, self._size):
                left: list[Left] = []
                while not self._has_room(batch_size(part)):
                    self._run_oldest(left)
                results += self._results(left)
                left = []
                self._put(part, left)
                results += self._results(left)
            self._raise_failures(results)
            return results

    def flush(self) -> list[StreamResult]:
        """Run all waiting samples and return their results."""
        if self._lane is None:
            return []
        left: list[Left] = []
        with self._fast.context(self._lane.exits):
            self._lane.flush(left)
            results = self._results(left)
            self._raise_failures(results)
        self._give_back()
        return results

    def _raise_failures(self, results: list[StreamResult]) -> None:
        """Raise if stages failed since the last call; the error holds these results."""
        failures = self._taken_failures()
        if failures:
            self._failures = []
            first = failures[0]
            first.samples = np.concatenate([each.samples for each in failures])
            first.results = results
            raise first

    def _taken_failures(self) -> list[StreamError]:
        """Return all failures that were not raised yet."""
        if self._lane is not None:
            self._failures += self._lane.failures
            self._lane.failures.clear()
        return self._failures

    def run(self, batches: Iterable[Any]) -> Iterator[ExitOutput]:
        """Yield one `ExitOutput` per batch, in order."""
        sizes: deque[list[int]] = deque()
        ready: deque[ExitOutput] = deque()
        delivered = self.pushed
        try:
            for batch in batches:
                parts = list(_split(batch, self._size))
                sizes.append([batch_size(part) for part in parts])
                with self._fast.context(batch):
                    if self._lane is not None and self._is_stale():
                        ready.extend(self._answers(flush=True))
                        self._fail_in_order(delivered, ready)
                        self._give_back()
                    for part in parts:
                        ready.extend(self._answers(part))
                for whole in _whole(sizes, ready):
                    delivered += len(whole.exits)
                    yield whole
                self._fail_in_order(delivered, ready)
            if self._lane is not None:
                with self._fast.context(self._lane.exits):
                    ready.extend(self._answers(flush=True))
            for whole in _whole(sizes, ready):
                delivered += len(whole.exits)
                yield whole
            self._fail_in_order(delivered, ready)
        finally:
            self._give_back()

    def _fail_in_order(self, delivered: int, ready: Iterable[ExitOutput]) -> None:
        """Raise if stages failed, with all other samples that were not delivered as results."""
        if not self._taken_failures():
            return
        found: list[StreamResult] = []
        for part in ready:
            found += _by_exit(part, delivered)
            delivered += len(part.exits)
        if self._lane is not None:
            with self._fast.context(self._lane.exits):
                self._lane.flush([])  # the stream ends here
                failed = np.concatenate([each.samples for each in self._taken_failures()])
                ids = np.setdiff1d(np.arange(delivered, self.pushed), failed)
                where = torch.from_numpy(ids).to(self._lane.device) % self._lane.n_answers
                exits = self._lane.exits[where].cpu().numpy()
                found += self._results([Left(ids[exits == k], int(k)) for k in np.unique(exits)])
        self._raise_failures(found)

    def _answers(self, batch: Any = None, flush: bool = False) -> Iterator[ExitOutput]:
        """Push a batch, or flush, and yield the batches that are whole, in order."""
        left: list[Left] = []
        if flush and self._lane is not None:
            self._lane.flush(left)
        elif batch is not None:
            n = batch_size(batch)
            while not self._has_room(n):
                self._run_oldest(left)
                yield from self._completed(left)
                left = []
            self._open.append(_Open(self.pushed, n, n))
            if n:
                self._put(batch, left)
            else:
                self._empty = self._fast.run_eager(batch)
        yield from self._completed(left)

    def _completed(self, left: list[Left]) -> Iterator[ExitOutput]:
        self._note(left)
        while self._open and not self._open[0].missing:
            done = self._open.popleft()
            yield self._taken(done) if done.n else self._empty

    def _put(self, batch: Any, left: list[Left]) -> None:
        """Run a batch of at most `size` samples."""
        if self._lane is None:
            self._fast.check_mode()
            self._lent = self._captures.lane(batch, self._size, self._max_wait, self._full)
            try:
                self._lane = self._lent.__enter__()
            except Exception as error:
                ids = np.arange(self.pushed, self.pushed + batch_size(batch))
                self._failures.append(StreamError.of("Capturing the stages", ids, error))
        start = self.pushed
        self.pushed += batch_size(batch)
        if self._lane is None:
            return
        self._pushes += 1
        self._lane.put(batch, start, self._pushes, left)
        self._lane.run_overdue(self._pushes - self._max_wait + 1, left)

    def _has_room(self, n: int) -> bool:
        """Return whether n more answers overwrite none that nobody has taken yet."""
        if self._lane is None:
            return True
        oldest = self._open[0].start if self._open else self._lane.oldest()
        return oldest is None or self.pushed + n - oldest <= self._lane.n_answers

    def _run_oldest(self, left: list[Left]) -> None:
        if self._lane is not None:
            self._lane.run_oldest(left)
            self._lane.learn_all(left)

    def _note(self, left: list[Left]) -> None:
        """Count the samples that left off the open batches."""
        for each in left:
            ids = each.ids
            first = 0
            for batch in self._open:
                stop = int(ids.searchsorted(batch.start + batch.n))
                batch.missing -= stop - first
                first = stop
                if first == len(ids):
                    break

    @torch.inference_mode(False)  # users may compute with these tensors, also with gradients
    def _taken(self, done: _Open) -> ExitOutput:
        lane = self._lane
        assert lane is not None  # noqa: S101
        first = done.start % lane.n_answers
        stop = first + done.n

        def rows(table: Any) -> Any:
            if not isinstance(table, Tensor):
                return table
            if stop <= lane.n_answers:
                return table[first:stop].clone()
            over = stop - lane.n_answers
            return torch.cat([table[first : lane.n_answers], table[:over]])

        values = lane.plan.output([rows(value) for value in lane.values])
        mark = self._fast.on_invalid
        return ExitOutput(values, rows(lane.exits), None, rows(lane.decided), on_invalid=mark)

    def _results(self, left: list[Left]) -> list[StreamResult]:
        """Return samples that left as results."""
        lane, found = self._lane, []
        for each in left:
            assert lane is not None  # noqa: S101
            ids = torch.from_numpy(each.ids).to(lane.device)
            where = ids % lane.n_answers
            with torch.inference_mode(False):
                values = [
                    v.index_select(0, where) if isinstance(v, Tensor) else v for v in lane.values
                ]
                last = each.exit_index == self._fast.model.n_exits - 1
                decided = None if last else lane.decided.index_select(0, where)
            raw = lane.plan.output(values)
            mark = self._fast.on_invalid
            found.append(StreamResult(ids, raw, each.exit_index, decided, mark))
        return found

    def _is_stale(self) -> bool:
        """Check the model's mode and weights, every few milliseconds."""
        now = time.monotonic()
        if now - self._checked < CHECK_SECONDS:
            return False
        self._checked = now
        self._fast.check_mode()
        return self._captures.stale

    def _give_back_stale(self) -> list[StreamResult]:
        """Finish with the old weights what began with them."""
        if self._lane is None or not self._is_stale():
            return []
        left: list[Left] = []
        self._lane.flush(left)
        results = self._results(left)
        self._give_back()
        return results

    def _give_back(self) -> None:
        self._open.clear()
        if self._lane is not None:
            self._taken_failures()
            lent, self._lent, self._lane = self._lent, None, None
            lent.__exit__(None, None, None)


def _by_exit(part: ExitOutput, start: int) -> list[StreamResult]:
    """Return a batch whose samples are numbered from `start` as results."""
    found = []
    for k in sorted(set(part.exits.tolist())):
        rows = (part.exits == k).nonzero()[:, 0]
        raw, decided = rows_of(part.raw, rows), part.decided[rows]
        found.append(StreamResult(start + rows, raw, k, decided, part.on_invalid))
    return found


def _split(batch: Any, size: int) -> Iterator[Any]:
    """Yield parts of a batch of at most `size` samples."""
    n = batch_size(batch)
    if n <= size:
        yield batch
        return
    for first in range(0, n, size):
        rows = slice(first, first + size)
        yield pytree.tree_map_only(Tensor, itemgetter(rows), batch)


def _whole(sizes: deque[list[int]], ready: deque[ExitOutput]) -> Iterator[ExitOutput]:
    """Yield the batches whose parts are all ready."""
    while sizes and len(ready) >= len(sizes[0]):
        parts = [ready.popleft() for _ in sizes.popleft()]
        yield parts[0] if len(parts) == 1 else _joined(parts)


@torch.inference_mode(False)
def _joined(parts: list[ExitOutput]) -> ExitOutput:
    flat = [pytree.tree_flatten(part.raw) for part in parts]
    leaves = [
        torch.cat(each) if isinstance(each[0], Tensor) else each[0]
        for each in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    exits = torch.cat([part.exits for part in parts])
    decided = torch.cat([part.decided for part in parts])
    raw = pytree.tree_unflatten(leaves, flat[0][1])
    return ExitOutput(raw, exits, None, decided, on_invalid=parts[0].on_invalid)
