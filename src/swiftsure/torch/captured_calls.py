"""`CapturedCalls`: answers one batch at a time with captured segments, for low latency.

A single sample is one graph (`CapturedSample`). For larger batches each segment is captured for the
size of the batch and, as samples exit, for powers of two below it. Samples that exited stay in the
batch, ignored, until the rest fits the next smaller size.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.exits import reaches
from swiftsure.run.graphs.conditional import can_branch
from swiftsure.run.graphs.recorder import CaptureBudget, Recorded, Recorder
from swiftsure.run.graphs.row_compaction import row_buffer
from swiftsure.torch.captured_sample import CapturedSample
from swiftsure.torch.results import ExitOutput
from swiftsure.torch.segments import SegmentPlan
from swiftsure.torch.staged import batch_size, device_of

if TYPE_CHECKING:
    from swiftsure.torch.runtime import EarlyExit

__all__ = ["CapturedCalls", "captured_size"]


def captured_size(n: int) -> int:
    """Return the captured size for n samples: at most a quarter more, of few different ones.

    Examples
    --------
    >>> [captured_size(n) for n in (1, 7, 9, 64, 100)]
    [1, 7, 10, 64, 112]
    """
    step = 1 << max(0, n.bit_length() - 3)
    return -(-n // step) * step


@dataclass
class _Node:
    """One segment at one size: its fixed inputs, and its graph once captured."""

    inputs: list[Tensor]
    graph: Recorded | None = None
    state: list[Tensor] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    scores: Tensor | None = None  # on the host


class CapturedCalls:
    """Runs batches of one signature; see `EarlyExit`.

    Parameters
    ----------
    fast : EarlyExit
    batch
        An example with at least one sample.
    budget : CaptureBudget
    compiled : bool
        Compile the segments, for any batch size.
    """

    def __init__(
        self, fast: "EarlyExit", batch: Any, budget: CaptureBudget, compiled: bool = False
    ) -> None:
        self._fast = fast
        self.plan = SegmentPlan(fast, batch, compiled=compiled)
        self.device = device_of(batch)
        self.recorder = Recorder(self.device, fast.dtype, budget)
        self._strict = fast.policy.strict
        self._n_early = fast.model.n_exits - 1
        self._nodes: dict[tuple[int, int], _Node] = {}
        self._lock = threading.Lock()
        self._cuda = self.recorder.captures
        self._stream: Any = None  # that of the last call
        self._events = [self.recorder.event() for _ in self.plan.exits]
        self._sample: CapturedSample | None = None

    def __call__(self, batch: Any, meanwhile: Callable[[], None]) -> ExitOutput:
        """Run a batch; threads take turns. Calls `meanwhile` while the first segment runs."""
        with self._lock:
            if self._cuda:
                # Replays on different streams share buffers, so they run one after the other.
                stream = torch.cuda.current_stream(self.device)
                if self._stream is not None and self._stream != stream:
                    stream.wait_stream(self._stream)
                self._stream = stream
            if batch_size(batch) == 1 and (can_branch() or not self._cuda):
                if self._sample is None:
                    self._sample = CapturedSample(self._fast, self.plan, self.recorder, batch)
                return self._sample(batch, meanwhile)
            return self._run(batch, meanwhile)

    def _run(self, batch: Any, meanwhile: Callable[[], None]) -> ExitOutput:
        plan, n = self.plan, batch_size(batch)
        size = captured_size(n)
        tensors = plan.batch_tensors(batch)
        first = self._nodes.get((0, size))
        if first is None:
            with self.recorder.buffers():
                inputs = [row_buffer(tensor, size)[:size] for tensor in tensors]
            first = self._nodes[0, size] = _Node(inputs)
        for held, new in zip(first.inputs, tensors, strict=True):
            held[:n].copy_(new)
        seen = np.full((n, self._n_early + 2), np.nan, dtype=np.float32)
        taken: list[tuple[NDArray[np.int64], list[Any]]] = []
        ids = rows = np.arange(n)
        for k, exit_index in enumerate(plan.exits):
            node = self._nodes[k, size]
            self._launch(k, size)
            if k == 0:
                meanwhile()
            if k == plan.last:
                taken.append((ids, self._take(node, rows)))
                seen[ids, -2:] = exit_index, 0.0
                break
            scores = self._scores(k, node)[rows]
            seen[ids, exit_index] = scores
            level = np.float32(plan.threshold(k))
            leaving = reaches(scores, level, strict=self._strict)
            staying = ~leaving
            if leaving.any():
                gone = ids[leaving]
                taken.append((gone, self._take(node, rows[leaving])))
                seen[gone, -2], seen[gone, -1] = exit_index, scores[leaving]
                ids, rows = ids[staying], rows[staying]
                if not len(ids):
                    break
                smaller = 1 << (len(ids) - 1).bit_length()
                if smaller < size:
                    rows = self._shrink(k, node, smaller, rows)
                    size = smaller
        return self._result(taken, seen)

    def _launch(self, segment: int, size: int) -> None:
        node = self._nodes[segment, size]
        if node.graph is None:
            self._capture(segment, size, node)
        node.graph.replay()  # type: ignore[union-attr]
        if self._cuda:
            self._events[segment].record()

    def _scores(self, segment: int, node: _Node) -> NDArray[np.float32]:
        """Wait for the confidences of a segment."""
        if self._cuda:
            self._events[segment].synchronize()
        scores: NDArray[np.float32] = node.scores.numpy()  # type: ignore[union-attr]
        return scores

    def _capture(self, segment: int, size: int, node: _Node) -> None:
        plan, is_last = self.plan, segment == self.plan.last
        after = self._nodes.get((segment + 1, size))
        scores = None if is_last else self.recorder.pinned(size, torch.float32)
        saved = [tensor.clone() for tensor in node.inputs]  # a stage may overwrite its input
        with self.recorder.buffers():
            # Outside of the graph's memory, which the next segment may overwrite.
            values = [
                row_buffer(leaf, size)[:size] if isinstance(leaf, Tensor) else leaf
                for leaf in plan.outputs
            ]
        run = plan.fastest_step(segment, node.inputs, self.recorder)

        def step() -> list[Tensor]:
            found = run(node.inputs)
            for held, new in zip(values, found.values, strict=True):
                if isinstance(held, Tensor):
                    held.copy_(new)
            if scores is not None and found.scores is not None:
                scores.copy_(found.scores, non_blocking=True)
            if after is None:
                return [_writable(leaf) for leaf in found.state]
            for held, new in zip(after.inputs, found.state, strict=True):
                held.copy_(new)
            return after.inputs

        node.graph = self.recorder.record(step)
        node.state, node.values, node.scores = node.graph.result, values, scores
        if not is_last and after is None:
            self._nodes[segment + 1, size] = _Node(node.state)
        elif after is not None:
            node.state = after.inputs
        for held, kept in zip(node.inputs, saved, strict=True):
            held.copy_(kept)

    def _shrink(
        self, segment: int, node: _Node, size: int, rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Gather the samples that stay into the next segment's input at a smaller size."""
        after = self._nodes.get((segment + 1, size))
        if after is None:
            with self.recorder.buffers():
                inputs = [row_buffer(tensor, size)[:size] for tensor in node.state]
            after = self._nodes[segment + 1, size] = _Node(inputs)
        index = torch.from_numpy(rows).to(self.device, non_blocking=True)
        for held, tensor in zip(after.inputs, node.state, strict=True):
            part = held[: len(rows)]
            if part.is_contiguous():
                torch.index_select(tensor, 0, index, out=part)
            else:
                part.copy_(tensor.index_select(0, index))
        return np.arange(len(rows))

    @torch.inference_mode(False)  # users may compute with these tensors, also with gradients
    def _take(self, node: _Node, rows: NDArray[np.int64]) -> list[Any]:
        """Return a copy of some rows of a segment's output."""
        m = len(rows)
        if rows[-1] == m - 1:
            return [v[:m].clone() if isinstance(v, Tensor) else v for v in node.values]
        index = torch.from_numpy(rows).to(self.device, non_blocking=True)
        return [v.index_select(0, index) if isinstance(v, Tensor) else v for v in node.values]

    @torch.inference_mode(False)
    def _result(
        self,
        taken: list[tuple[NDArray[np.int64], list[Any]]],
        seen: NDArray[np.float32],
    ) -> ExitOutput:
        leaves = taken[0][1]
        if len(taken) > 1:
            order = np.argsort(np.concatenate([ids for ids, _ in taken]))
            index = torch.from_numpy(order).to(self.device, non_blocking=True)
            leaves = [
                torch.cat(parts).index_select(0, index)
                if isinstance(parts[0], Tensor)
                else parts[0]
                for parts in zip(*(leaves for _, leaves in taken), strict=True)
            ]
        told = torch.from_numpy(seen).to(self.device, non_blocking=True)
        exits = told[:, -2].long()
        return ExitOutput(self.plan.output(leaves), exits, told[:, :-2], told[:, -1])


def _writable(leaf: Tensor) -> Tensor:
    """Return the tensor, or a copy if several of its elements share memory."""
    return leaf.contiguous() if 0 in leaf.stride() else leaf
