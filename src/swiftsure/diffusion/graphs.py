"""A sampler captured as CUDA graphs: denoising blocks, decisions, and the sampler's own steps.

Small batches are bound by kernel launches, and evaluating exits launches as many kernels as
exiting early saves. Captured, a block and its exit are one launch. A graph has fixed shapes, so
exited images stay in the batch, masked; in large batches it is better to drop them (`denoise`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swiftsure.diffusion.rules import DeeDiffRule
from swiftsure.diffusion.schedules import Sampler
from swiftsure.diffusion.steps import Denoised, exit_confidence, exit_output
from swiftsure.torch.capture import CaptureBudget, Recorded, Recorder
from swiftsure.torch.rows import Marks, mark
from swiftsure.torch.staged import StagedModel

__all__ = ["RecordedSampler", "RecordedSteps", "Sampled"]

Batch = tuple[Tensor, ...]


class RecordedSteps:
    """Denoising steps of one network at one batch size; captured on a GPU, eager elsewhere.

    Parameters
    ----------
    model : StagedModel
        It must not draw random numbers or synchronise with the device.
    batch : tensors
        Any (images, times) or (images, times, labels) of the right batch size.
    rule : DeeDiffRule
    looks : bool
        Whether any threshold can be reached; if not, no early head runs.
    dtype : str, optional
        Autocast dtype.
    budget : CaptureBudget, optional
    """

    def __init__(
        self,
        model: StagedModel,
        batch: Batch,
        rule: DeeDiffRule,
        looks: bool,
        dtype: str | None,
        budget: CaptureBudget | None = None,
    ) -> None:
        images = batch[0]
        n, device = len(images), images.device
        self._model, self._rule = model, rule
        self.recorder = Recorder(device, dtype, budget)
        self.batch = tuple(part.clone() for part in batch)
        self.levels = torch.zeros(n, device=device)
        self.found = Denoised(
            torch.empty_like(images),
            torch.zeros(n, dtype=torch.long, device=device),
            torch.zeros(n, device=device),
            torch.zeros(n, device=device),
        )
        self._active = torch.ones(n, dtype=torch.bool, device=device)
        self._last = last = model.n_exits - 1
        first = rule.min_exit if looks else last
        self._looks = range(first, last)
        self._leaving = {k: torch.zeros_like(self._active) for k in self._looks}
        self._counts = torch.zeros(model.n_exits, dtype=torch.long, device=device)
        self._n_active = self.recorder.pinned(model.n_exits, torch.long)  # the same on the host
        self._states: dict[int, Any] = {}
        self._estimates = {}
        self._steps: list[Recorded] = []  # what runs between two decisions of the host
        self._event = self.recorder.event()
        # Captured in the order of replay: a state may lie where earlier parts keep intermediate
        # results.
        for k in self._looks:
            self._steps.append(self._record(partial(self._look, k, 0 if k == first else k)))
            if hasattr(model, "confidence_at"):
                self._estimates[k] = self._record(partial(self._estimate, k))
        self._steps.append(self._record(partial(self._finish, last if first < last else 0)))

    def __call__(self, batch: Batch, levels: Tensor) -> Denoised:
        """Return the result of a step; its noise is overwritten by the next step."""
        for held, new in zip(self.batch, batch, strict=True):
            held.copy_(new)
        self.levels.copy_(levels)
        self.run()
        found = self.found
        return found._replace(
            exits=found.exits.clone(),
            max_skipped=found.max_skipped.clone(),
            min_taken=found.min_taken.clone(),
        )

    def run(self) -> None:
        """Run a step on `batch` and `levels` into `found`."""
        under_way = len(self.levels)
        for look, k in zip(self._steps, self._looks, strict=False):
            look.replay()
            if self._event is not None:
                self._event.record()
                self._event.synchronize()
            before, under_way = under_way, int(self._n_active[k])
            if under_way < before and k in self._estimates:
                self._estimates[k].replay()
            if not under_way:
                return
        self._steps[-1].replay()

    def _record(self, part: Callable[[], None]) -> Recorded:
        recorded = self.recorder.record(part)
        if self.recorder.captures:
            recorded.replay()  # the next part is tried on the state that this one gives
        return recorded

    def _advance(self, first: int, until: int) -> Any:
        """Run the stages from `first` to `until`; stage 0 begins a step."""
        if first == 0:
            self._active.fill_(True)
            _, exits, max_skipped, min_taken = self.found
            exits.fill_(self._last)
            max_skipped.fill_(-torch.inf)
            min_taken.fill_(torch.inf)
            state = self._model.begin(self.batch)
        else:
            state = self._states[first - 1]
        for k in range(first, until + 1):
            state = self._model.advance(k, state)
        # Kept: later parts read it at the captured addresses.
        self._states[until] = state
        return state

    def _look(self, k: int, first: int) -> None:
        """Run the stages up to exit k, and let the confident images exit."""
        scores, output = exit_confidence(self._model, k, self._advance(first, k))
        leaving = self._leaving[k]
        _, exits, max_skipped, min_taken = self.found
        marks = Marks(self._active, leaving, exits, max_skipped, min_taken, self._counts[k : k + 1])
        mark(scores, self.levels, self._rule.strict, k, marks)
        self._n_active[k : k + 1].copy_(self._counts[k : k + 1], non_blocking=True)
        if output is not None:
            self._write_noise(leaving, output)

    def _estimate(self, k: int) -> None:
        self._write_noise(self._leaving[k], exit_output(self._model, k, self._states[k]))

    def _finish(self, first: int) -> None:
        state = self._advance(first, self._last)
        self._write_noise(self._active, exit_output(self._model, self._last, state))

    def _write_noise(self, whose: Tensor, output: Tensor) -> None:
        noise = self.found.noise
        noise.copy_(torch.where(whose.view(-1, 1, 1, 1), output.to(noise.dtype), noise))


class Sampled(NamedTuple):
    """Images, (n, ...); exits, (n, n_steps); and the confidences that bound the run, (n,)."""

    images: Tensor
    exits: Tensor
    max_skipped: Tensor
    min_taken: Tensor


class RecordedSampler:
    """All steps of a sampler with recorded denoising; the host only decides what runs next.

    Parameters
    ----------
    steps : RecordedSteps
    sampler : Sampler
    times : (n_steps,)
        Times of the steps, as the network takes them.
    """

    def __init__(self, steps: RecordedSteps, sampler: Sampler, times: Tensor) -> None:
        self._steps, self._sampler, self._times = steps, sampler, times
        n, images = len(steps.levels), steps.batch[0]
        self._exits = torch.zeros(len(times), n, dtype=torch.long, device=images.device)
        self._max_skipped, self._min_taken = (
            torch.zeros_like(steps.levels),
            torch.zeros_like(steps.levels),
        )
        self._fresh = torch.zeros_like(images)
        recorder = Recorder(images.device, None, steps.recorder.budget)
        self._updates = [recorder.record(partial(self._update, k), 1) for k in range(len(times))]

    def __call__(
        self,
        images: Tensor,
        labels: tuple[Tensor, ...],
        levels: Tensor,
        fresh: Callable[[int], Tensor],
        advance: Callable[[], None],
    ) -> Sampled:
        """Generate images from noise; `fresh` gives the noise that a step adds."""
        steps = self._steps
        new = (images, self._times[0].expand(len(images)), *labels)
        for held, part in zip(steps.batch, new, strict=True):
            held.copy_(part)
        steps.levels.copy_(levels)
        self._max_skipped.fill_(-torch.inf)
        self._min_taken.fill_(torch.inf)
        for k, update in enumerate(self._updates):
            if self._sampler.draws(k):
                self._fresh.copy_(fresh(k))
            steps.run()
            update.replay()
            advance()
        found = (steps.batch[0], self._exits.T, self._max_skipped, self._min_taken)
        return Sampled(*(each.clone() for each in found))

    def _update(self, k: int) -> None:
        images, found = self._steps.batch[0], self._steps.found
        self._exits[k].copy_(found.exits)
        torch.maximum(self._max_skipped, found.max_skipped, out=self._max_skipped)
        torch.minimum(self._min_taken, found.min_taken, out=self._min_taken)
        fresh = self._fresh if self._sampler.draws(k) else None
        images.copy_(self._sampler.step(k, images, found.noise, fresh))
        if k + 1 < len(self._times):
            self._steps.batch[1].copy_(self._times[k + 1].expand(len(images)))
