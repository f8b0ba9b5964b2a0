"""`CapturedSample`: answers one sample with one graph, in which the device takes the exit.

    segment -> decision -> [if it stays: segment -> decision -> [if it stays: ...]]

The host launches the graph and does not wait for any decision.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swiftsure.exits import reaches
from swiftsure.run.graphs.conditional import run_if
from swiftsure.run.graphs.recorder import Recorded, Recorder
from swiftsure.run.graphs.row_compaction import row_buffer
from swiftsure.torch.results import ExitOutput
from swiftsure.torch.segments import SegmentPlan, Step

if TYPE_CHECKING:
    from swiftsure.torch.runtime import EarlyExit

__all__ = ["CapturedSample"]


class CapturedSample:
    """Runs batches of one sample and one signature.

    Parameters
    ----------
    fast : EarlyExit
    plan : SegmentPlan
    recorder : Recorder
    batch
        An example.
    """

    def __init__(
        self, fast: "EarlyExit", plan: SegmentPlan, recorder: Recorder, batch: Any
    ) -> None:
        self._plan, self._strict = plan, fast.policy.strict
        with recorder.buffers():
            self._inputs = [row_buffer(each, 1)[:1] for each in plan.batch_tensors(batch)]
            self._values = [
                row_buffer(leaf, 1)[:1] if isinstance(leaf, Tensor) else leaf
                for leaf in plan.outputs
            ]
            # The confidence at every exit but the last, the exit taken, and what decided.
            self._seen = torch.zeros(1, fast.model.n_exits + 1, device=recorder.device)
            self._stays = torch.zeros(1, dtype=torch.bool, device=recorder.device)
        self._steps: list[Callable[[list[Tensor]], Step]] = []
        tensors = self._inputs
        for k in range(len(plan.exits)):
            self._steps.append(plan.fastest_step(k, tensors, recorder))
            tensors = self._steps[k]([tensor.clone() for tensor in tensors]).state
        self._graph: Recorded = recorder.record(self._run)

    def __call__(self, batch: Any, meanwhile: Callable[[], None]) -> ExitOutput:
        """Run a batch of one sample; calls `meanwhile` while it runs."""
        for held, new in zip(self._inputs, self._plan.batch_tensors(batch), strict=True):
            held.copy_(new)
        self._graph.replay()
        meanwhile()
        with torch.inference_mode(False):  # users may compute with these, also with gradients
            leaves = [v.clone() if isinstance(v, Tensor) else v for v in self._values]
            seen = self._seen.clone()
            exits = seen[:, -2].long()
            return ExitOutput(self._plan.output(leaves), exits, seen[:, :-2], seen[:, -1])

    def _run(self) -> None:
        self._seen.fill_(torch.nan)
        self._segment(0, self._inputs)

    def _segment(self, k: int, tensors: list[Tensor]) -> None:
        plan, found = self._plan, self._steps[k](tensors)
        for held, new in zip(self._values, found.values, strict=True):
            if isinstance(held, Tensor):
                held.copy_(new)  # a later exit overwrites it
        exit_index, scores = plan.exits[k], found.scores
        self._seen[:, -2].fill_(exit_index)
        if scores is None:
            self._seen[:, -1].fill_(0.0)
            return
        self._seen[:, exit_index].copy_(scores)
        self._seen[:, -1].copy_(scores)
        level = plan.threshold(k)
        self._stays.copy_(~reaches(scores, level, strict=self._strict))
        run_if(self._stays, partial(self._segment, k + 1, found.state))
