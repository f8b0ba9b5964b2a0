"""Captured segments that always run full batches, gathered from the samples of many.

In front of each segment is a ring of a few slots of `size` rows. A segment's graph reads one slot,
decides, copies the samples that stay straight into the ring of the next segment, and the answers of
the others into a table. The device needs no word from the host for that. The host learns who left
from pinned memory, while the next graphs run, and only to know which segment to start next:

    batches -> [ring 0] -> segment 0 -> [ring 1] -> segment 1 -> ... -> answers, in order
                               |                        |
                               +------- exits ----------+-------------> table
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.run.graphs.recorder import CaptureBudget, Recorded, Recorder
from swiftsure.run.graphs.row_compaction import Decision, copy_rows, decide, row_buffer
from swiftsure.run.streaming import StreamError
from swiftsure.torch.segments import SegmentPlan, Step
from swiftsure.torch.staged import batch_size, device_of

if TYPE_CHECKING:
    from swiftsure.torch.runtime import EarlyExit

__all__ = ["CapturedLane", "Left"]

SLOTS, FEWER_SLOTS = 3, 2
"""Slots of a ring: one is read, one holds the samples that wait, one takes those that overflow.
With fewer, the host must know a segment's decisions before it runs again."""

LARGE = 64 * 2**20
"""Bytes of a slot from which on memory counts more than a wait of the device for the host."""

IN_FLIGHT = 3
"""Graphs that run before the host has learned the decisions of the first of them."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Left:
    """Samples that left at an exit: their numbers, ascending."""

    ids: Numbers
    exit_index: int


@dataclass
class _Ring:
    """Samples in front of a segment; positions count rows since the beginning."""

    tensors: list[Tensor]
    ids: Tensor
    slots: int
    head: int = 0
    tail: int = 0

    def __post_init__(self) -> None:
        self.waiting: deque[tuple[Numbers, Numbers]] = deque()  # numbers, and when they came

    @property
    def n(self) -> int:
        return self.head - self.tail

    def oldest(self) -> tuple[int, int] | None:
        """Return the number of the sample that waits longest, and when it came."""
        if not self.waiting:
            return None
        ids, since = self.waiting[0]
        return int(ids[0]), int(since[0])

    def add(self, ids: Numbers, since: Numbers) -> None:
        if len(ids):
            self.waiting.append((ids, since))
            self.head += len(ids)

    def take(self, n: int) -> tuple[Numbers, Numbers]:
        """Remove the first n samples from the list of those that wait."""
        parts, missing = [], n
        while missing:
            ids, since = self.waiting.popleft()
            if len(ids) > missing:
                self.waiting.appendleft((ids[missing:], since[missing:]))
                ids, since = ids[:missing], since[:missing]
            parts.append((ids, since))
            missing -= len(ids)
        if len(parts) == 1:
            return parts[0]
        ids, since = (np.concatenate(each) for each in zip(*parts, strict=True))
        return ids, since


@dataclass(frozen=True)
class _Fired:
    """A graph that was launched, whose decisions the host does not know yet."""

    segment: int
    slot: int
    ids: Numbers
    since: Numbers
    event: Any


class CapturedLane:
    """The segments of a runtime captured at one size, with their rings; for one stream at a time.

    Parameters
    ----------
    fast : EarlyExit
    batch
        An example with at least one sample.
    size : int
        How many samples a segment runs at once.
    n_answers : int
        Rows of the table of answers: how many samples may be unanswered or not taken yet.
    full : bool
        Run the full model, whatever the policy says.
    """

    def __init__(
        self,
        fast: "EarlyExit",
        batch: Any,
        size: int,
        n_answers: int,
        budget: CaptureBudget,
        *,
        compiled: bool = False,
        full: bool = False,
    ) -> None:
        self.plan = SegmentPlan(fast, batch, full=full, compiled=compiled, dynamic=False)
        self.size, self.n_answers = size, n_answers
        self.device = device_of(batch)
        self.recorder = Recorder(self.device, fast.dtype, budget)
        self._cuda = self.recorder.captures
        self._used = self.recorder.event()
        self._strict = fast.policy.strict
        # Partial batches run at smaller sizes, unless each size would be compiled.
        sizes = {size} if compiled else {size, -(-size // 2), -(-size // 4), -(-size // 8)}
        self._sizes = sorted(sizes)
        plan, n_segments = self.plan, len(self.plan.exits)
        with self.recorder.buffers():
            self._live = torch.zeros(n_segments, dtype=torch.long, device=self.device)
            self._fill = torch.zeros(n_segments, dtype=torch.long, device=self.device)
            self.values = [
                row_buffer(leaf, n_answers) if isinstance(leaf, Tensor) else leaf
                for leaf in plan.outputs
            ]
            self.exits = torch.zeros(n_answers + 1, dtype=torch.long, device=self.device)
            self.decided = torch.zeros(n_answers + 1, device=self.device)
            self._flags = torch.zeros(size, dtype=torch.int8, device=self.device)
            self._places = torch.zeros(size, dtype=torch.long, device=self.device)
            self._answers = torch.zeros(size, dtype=torch.long, device=self.device)
            # The host fills the first ring itself, so nothing overflows.
            slots = FEWER_SLOTS if n_segments > 1 else 1
            self._rings = [self._ring(plan.batch_tensors(batch), slots)]
        self._graphs: dict[tuple[int, int, int], Recorded] = {}
        self._told = [
            [self.recorder.pinned(size, torch.int8) for _ in range(SLOTS)]
            for _ in range(n_segments)
        ]
        self._events = {
            (k, slot): self.recorder.event() for k in range(n_segments) for slot in range(SLOTS)
        }
        self._lives = [0] * n_segments
        self._fired: deque[_Fired] = deque()
        self.failures: list[StreamError] = []  # since the stream last looked
        self._unknown = [0] * n_segments
        self._steps: list[Callable[[list[Tensor]], Step]] = []
        for k in range(n_segments):
            inputs = [tensor[:size] for tensor in self._rings[k].tensors]
            self._steps.append(plan.fastest_step(k, inputs, self.recorder))
            if k < plan.last:  # the next ring is laid out like what this segment gives
                with budget.timed():
                    found = self._steps[k](inputs)
                large = sum(leaf.nbytes for leaf in found.state) > LARGE
                with self.recorder.buffers():
                    slots = FEWER_SLOTS if large else SLOTS
                    self._rings.append(self._ring(found.state, slots))
                del found
            for slot in range(self._rings[k].slots):
                self._graphs[k, slot, size] = self._capture(k, slot, size)

    @property
    def n_graphs(self) -> int:
        """Number of graphs captured."""
        return len(self._graphs)

    def reset(self) -> None:
        """Forget all samples, to serve another stream."""
        for ring in self._rings:
            ring.head = ring.tail = 0
            ring.waiting.clear()
        self._fired.clear()
        self.failures.clear()
        self._unknown = [0] * len(self._rings)
        self._fill.zero_()

    def acquire(self) -> None:
        """Begin a stream, after the work of the one before."""
        if self._used is not None:
            self._used.wait(torch.cuda.current_stream(self.device))
        with torch.inference_mode():
            self.reset()

    def release(self) -> None:
        """End a stream."""
        if self._used is not None:
            self._used.record(torch.cuda.current_stream(self.device))

    # ------------------------------------------------------------------------------- scheduling

    @property
    def in_flight(self) -> int:
        """Number of samples that have not exited, as far as the host knows."""
        return sum(ring.n for ring in self._rings) + sum(len(f.ids) for f in self._fired)

    def oldest(self) -> int | None:
        """Return the lowest number of a sample that has not exited, as far as the host knows."""
        found = [ring.oldest() for ring in self._rings]
        numbers = [each[0] for each in found if each is not None]
        numbers += [int(fired.ids[0]) for fired in self._fired]
        return min(numbers, default=None)

    def put(self, batch: Any, start: int, now: int, left: list[Left]) -> None:
        """Add a batch whose samples are numbered from `start`, and run what is ready."""
        tensors, n = self.plan.batch_tensors(batch), batch_size(batch)
        ring, done = self._rings[0], 0
        capacity = ring.slots * self.size
        while done < n:
            place = ring.head % capacity
            room = min(n - done, self.size - place % self.size)
            for held, new in zip(ring.tensors, tensors, strict=True):
                held[place : place + room].copy_(new[done : done + room])
            ids = np.arange(start + done, start + done + room)
            torch.arange(start + done, start + done + room, out=ring.ids[place : place + room])
            ring.add(ids, np.full(room, now))
            done += room
            self.run_ready(left)

    def run_ready(self, left: list[Left]) -> None:
        """Run the segments that have full batches, the last ones first."""
        while True:
            k = next(
                (k for k in reversed(range(len(self._rings))) if self._rings[k].n >= self.size),
                None,
            )
            if k is None:
                return
            self._fire(k, self.size, left)

    def run_overdue(self, before: int, left: list[Left]) -> None:
        """Run partial batches for samples that came before a moment."""
        for k, ring in enumerate(self._rings):
            while True:
                oldest = ring.oldest()
                if oldest is None or oldest[1] >= before:
                    break
                self._fire_partial(k, left)

    def run_oldest(self, left: list[Left]) -> None:
        """Run a partial batch with the sample that has the lowest number."""
        while self._fired:
            self._learn(left)
        self.run_ready(left)
        waiting = [(ring.oldest(), k) for k, ring in enumerate(self._rings) if ring.waiting]
        if waiting:
            self._fire_partial(min(waiting)[1], left)

    def learn_all(self, left: list[Left]) -> None:
        """Wait until the host knows all decisions."""
        while self._fired:
            self._learn(left)
            self.run_ready(left)

    def flush(self, left: list[Left]) -> None:
        """Run all samples to their exits."""
        self.learn_all(left)
        for k, ring in enumerate(self._rings):
            while ring.waiting:
                self._fire_partial(k, left)

    def _fire_partial(self, k: int, left: list[Left]) -> None:
        # The ring is realigned below, so nothing may be on its way into it.
        self.learn_all(left)
        ring = self._rings[k]
        if ring.waiting:
            self._fire(k, min(self.size, ring.n), left)
        self.learn_all(left)

    def _fire(self, k: int, n: int, left: list[Left]) -> None:
        """Launch a segment on the first n samples that wait for it."""
        last, ring = k == self.plan.last, self._rings[k]
        if not last:
            # The next ring must have room if all of these and all unknown ones stay, and the
            # decisions of the slot's last run must be known before they are overwritten.
            after = self._rings[k + 1]
            while (
                after.n + (self._unknown[k] + 1) * self.size > after.slots * self.size
                or self._unknown[k] >= ring.slots
            ):
                self._learn(left)
                if after.n >= self.size:
                    return self.run_ready(left)
        capacity = ring.slots * self.size
        slot = ring.tail % capacity // self.size
        ids, since = ring.take(n)
        ring.tail += self.size
        if n < self.size:
            ring.head = ring.tail
            self._fill[k].fill_(ring.head % capacity)
        if self._lives[k] != n:
            self._live[k].fill_(n)
            self._lives[k] = n
        try:
            self._replay(k, slot, n)
        except Exception as error:
            self.failures.append(StreamError.of(self.plan.stages_text(k), ids, error))
            for tensor in ring.tensors:  # else they might fail again as rows that do not count
                tensor[slot * self.size : (slot + 1) * self.size].zero_()
            while self._fired:  # this slot counts as free, which other slots may not be yet
                self._learn(left)
            return None
        if last:
            left.append(Left(ids, self.plan.exits[k]))
            return None
        event = self._events[k, slot]
        if event is not None:
            event.record()
        self._fired.append(_Fired(k, slot, ids, since, event))
        self._unknown[k] += 1
        while len(self._fired) >= IN_FLIGHT:
            self._learn(left)
        return None

    def _replay(self, k: int, slot: int, n: int) -> None:
        """Run a segment on the first n rows of a slot; captures it the first time."""
        size = next(size for size in self._sizes if size >= n)
        graph = self._graphs.get((k, slot, size))
        if graph is None:
            graph = self._graphs[k, slot, size] = self._capture(k, slot, size)
        graph.replay()

    def _learn(self, left: list[Left]) -> None:
        """Wait for the decisions of the first graph whose decisions are not known."""
        fired = self._fired.popleft()
        if fired.event is not None:
            fired.event.synchronize()
        staying = self._told[fired.segment][fired.slot].numpy()[: len(fired.ids)].astype(bool)
        self._unknown[fired.segment] -= 1
        self._rings[fired.segment + 1].add(fired.ids[staying], fired.since[staying])
        if not staying.all():
            left.append(Left(fired.ids[~staying], self.plan.exits[fired.segment]))

    # ---------------------------------------------------------------------------------- capture

    def _ring(self, like: list[Tensor], slots: int) -> _Ring:
        capacity = slots * self.size
        ids = torch.zeros(capacity + 1, dtype=torch.long, device=self.device)
        return _Ring([row_buffer(tensor, capacity) for tensor in like], ids, slots)

    def _capture(self, k: int, slot: int, size: int) -> Recorded:
        plan, ring, is_last = self.plan, self._rings[k], k == self.plan.last
        first = slot * self.size
        rows = slice(first, first + size)
        inputs = [tensor[rows] for tensor in ring.tensors]
        after = None if is_last else self._rings[k + 1]
        decision = Decision(
            self._live[k],
            ring.ids[rows],
            self._answers[:size],
            self.exits,
            self.decided,
            *(
                ()
                if after is None
                else (self._fill[k + 1], after.ids, self._flags[:size], self._places[:size])
            ),
        )
        level, exit_index = plan.threshold(k), plan.exits[k]
        told = self._told[k][slot][:size]

        def step() -> None:
            found = self._steps[k](inputs)
            decide(found.scores, level, self._strict, exit_index, decision)
            if after is not None:
                for source, target in zip(found.state, after.tensors, strict=True):
                    copy_rows(source, target, self._places[:size])
                told.copy_(self._flags[:size], non_blocking=True)
            for held, new in zip(self.values, found.values, strict=True):
                if isinstance(held, Tensor):
                    copy_rows(new, held, self._answers[:size])

        # While warming up no row is valid, so that nothing is decided; and what waits in the slot,
        # which a stage may overwrite, is put back.
        saved = [tensor.clone() for tensor in inputs]
        self._live[k].zero_()
        try:
            return self.recorder.record(step)
        finally:
            for held, kept in zip(inputs, saved, strict=True):
                held.copy_(kept)
            self._live[k].fill_(self._lives[k])
