"""Denoising captured as CUDA graphs: whole samplers, or single steps.

After each look the device decides whether anybody goes on, and skips the remaining blocks of the
step if nobody does; the host does not wait (`swiftsure.run.graphs.conditional`). A graph has fixed
shapes, so exited images stay in the batch, masked, until all have exited.

    blocks -> look -> [if anybody exits: estimate] -> [if anybody stays: blocks -> look -> ...]

A single image does one or the other, which takes one conditional part instead of two.
A small batch leaves the GPU mostly idle, so there the next block starts beside the look. It is
wasted if all images exit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swiftsure.diffusion.rules import DeeDiffRule
from swiftsure.diffusion.schedules import Sampler
from swiftsure.diffusion.steps import Denoised, exit_confidence, exit_output
from swiftsure.exits import reaches
from swiftsure.run.graphs.conditional import can_branch, can_choose, run_beside, run_if
from swiftsure.run.graphs.recorder import CaptureBudget, Recorder
from swiftsure.run.graphs.row_compaction import has_triton
from swiftsure.torch.staged import StagedModel

__all__ = ["RecordedSampler", "RecordedSteps", "Sampled"]

MOST_STEPS = 250
"""Steps of a sampler that fit into one graph."""

MOST_FUSED = 8192
"""Images that one program of the fused kernel decides about."""

Batch = tuple[Tensor, ...]
Part = Callable[[], None]


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
        Shared with other captures.
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
        self._masked = step = _MaskedStep(model, batch, rule, looks)
        recorder = Recorder(batch[0].device, dtype, budget)
        if not recorder.captures:
            self._run: Part = step.run
        elif can_branch():
            step.choose_ahead(recorder)
            self._recorded = recorder.record(step.run)
            self._run = self._recorded.replay
        else:  # the host decides: one graph per part
            self._run = partial(step.run, step.captured_parts(recorder))

    def __call__(self, batch: Batch, levels: Tensor) -> Denoised:
        """Return the result of a step; its noise is overwritten by the next step."""
        for held, new in zip(self._masked.batch, batch, strict=True):
            held.copy_(new)
        self._masked.levels.copy_(levels)
        self._masked.reset()
        self._run()
        found = self._masked.found
        return found._replace(
            exits=found.exits.clone(),
            max_skipped=found.max_skipped.clone(),
            min_taken=found.min_taken.clone(),
        )


class Sampled(NamedTuple):
    """Images, (n, ...); their exits, (n, n_steps); and the confidences of `Generated`, (n,)."""

    images: Tensor
    exits: Tensor
    max_skipped: Tensor
    min_taken: Tensor


class RecordedSampler:
    """All steps of a sampler without fresh noise as one graph; eager on other devices than a GPU.

    Parameters
    ----------
    sampler : Sampler
    model, batch, rule, looks, dtype, budget
        As for `RecordedSteps`.
    """

    def __init__(
        self,
        sampler: Sampler,
        model: StagedModel,
        batch: Batch,
        rule: DeeDiffRule,
        looks: bool,
        dtype: str | None,
        budget: CaptureBudget | None = None,
    ) -> None:
        images = batch[0]
        n, device = len(images), images.device
        self._sampler, self._rule = sampler, rule
        self._masked = _MaskedStep(model, batch, rule, looks)
        self._times = sampler.schedule.times(torch.tensor(sampler.times, device=device))
        self._exits = torch.zeros(len(sampler.times), n, dtype=torch.long, device=device)
        recorder = Recorder(device, dtype, budget)
        if recorder.captures:
            self._masked.choose_ahead(recorder)
            recorder.record(partial(self._run, 1))  # so that all kernels have run before
        self._recorded = recorder.record(partial(self._run, len(sampler.times)), warm_up=0)

    @staticmethod
    def suits(sampler: Sampler) -> bool:
        """Return whether a sampler can be captured as one graph here."""
        steps = range(len(sampler.times))
        return can_branch() and len(steps) <= MOST_STEPS and not any(map(sampler.draws, steps))

    def __call__(self, images: Tensor, labels: tuple[Tensor, ...], levels: Tensor) -> Sampled:
        """Return what the sampler makes of noise."""
        held_images, _, *held_labels = self._masked.batch
        for held, new in zip((held_images, *held_labels), (images, *labels), strict=True):
            held.copy_(new)
        self._masked.levels.copy_(levels)
        self._masked.reset()
        self._exits.fill_(self._masked.last)
        self._recorded.replay()
        _, _, skipped, taken = self._masked.found
        found = (held_images, self._exits.T, skipped, taken)
        return Sampled(*(each.clone() for each in found))

    def _run(self, n_steps: int) -> None:
        images, times = self._masked.batch[:2]
        for k in range(n_steps):
            times.copy_(self._times[k].expand(len(images)))
            self._masked.found = self._masked.found._replace(exits=self._exits[k])
            if self._rule.looks_in(k):
                self._masked.run()
            else:
                self._masked.run_full()
            noise = self._masked.found.noise
            with torch.autocast(images.device.type, enabled=False):
                images.copy_(self._sampler.step(k, images, noise, None))


class _MaskedStep:
    """A denoising step on fixed tensors: reads `batch` and `levels`, writes `found`.

    Without looks only the noise is written. Confidences in `found` are those of all steps since
    `reset`.
    """

    def __init__(self, model: StagedModel, batch: Batch, rule: DeeDiffRule, looks: bool) -> None:
        images = batch[0]
        n, device = len(images), images.device
        self._model, self._rule = model, rule
        self.last = model.n_exits - 1
        self._looks = rule.looks(model.n_exits) if looks else []
        self.batch = tuple(part.clone() for part in batch)
        self.levels = torch.zeros(n, device=device)
        self.found = Denoised(
            torch.empty_like(images),
            torch.zeros(n, dtype=torch.long, device=device),
            torch.zeros(n, device=device),
            torch.zeros(n, device=device),
        )
        self.reset()
        self._active = torch.ones(n, dtype=torch.bool, device=device)
        self._leaving = torch.zeros_like(self._active)
        self._anyone_leaves = torch.zeros((), dtype=torch.bool, device=device)
        self._anyone_stays = torch.zeros_like(self._anyone_leaves)
        self._states: dict[int, Any] = {}  # after each stage; kept for estimates and later parts
        self._has_estimates = hasattr(model, "confidence_at")
        self._is_single = n == 1 and can_choose()
        self._ahead = False

    def reset(self) -> None:
        """Forget the exits and confidences of earlier steps."""
        _, exits, stayed, left = self.found
        exits.fill_(self.last)
        stayed.fill_(-torch.inf)
        left.fill_(torch.inf)

    def run(self, parts: dict[str, Part] | None = None) -> None:
        """Run a step, by its own parts or captured ones."""
        self._run_from(0, parts or self._parts())

    def run_full(self) -> None:
        """Run a step without looks; only the noise is written."""
        state = self._model.begin(self.batch)
        for k in range(self.last + 1):
            state = self._model.advance(k, state)
        self.found.noise.copy_(exit_output(self._model, self.last, state))

    def captured_parts(self, recorder: Recorder) -> dict[str, Part]:
        """Return the parts, each captured as a graph of its own."""
        return {name: self._alone(recorder, part) for name, part in self._parts().items()}

    def choose_ahead(self, recorder: Recorder) -> None:
        """Start the next block beside a look if that pays where half of the steps exit."""
        if not self._looks:
            return
        k = self._looks[0]
        look = partial(self._look, k)

        def block() -> None:
            self._model.advance(k + 1, self._states[k])

        recorder.record(partial(self._advance, k))
        looking, going_on, both = (
            recorder.record(part).seconds(recorder.device, repeats=20)
            for part in (look, block, partial(run_beside, look, block))
        )
        hidden, wasted = looking + going_on - both, both - looking
        self._ahead = hidden > wasted

    def _parts(self) -> dict[str, Part]:
        """Return what runs between two decisions, in the order of a step without early exits."""
        parts: dict[str, Part] = {}
        for k in self._looks:
            parts[f"look {k}"] = partial(self._advance_and_look, k)
            parts[f"estimate {k}"] = partial(self._estimate, k)
        return parts | {"rest": self._finish}

    def _run_from(self, index: int, parts: dict[str, Part]) -> None:
        """Run the parts of a step from a look on."""
        if index == len(self._looks):
            parts["rest"]()
            return
        k = self._looks[index]
        parts[f"look {k}"]()
        go_on, estimate = partial(self._run_from, index + 1, parts), parts[f"estimate {k}"]
        if self._has_estimates and self._is_single:
            run_if(self._anyone_stays, go_on, otherwise=estimate)
            return
        if self._has_estimates:
            run_if(self._anyone_leaves, estimate)
        run_if(self._anyone_stays, go_on)

    def _alone(self, recorder: Recorder, part: Part) -> Part:
        before = dict(self._states)

        def again() -> None:
            self._states = dict(before)
            part()

        return recorder.record(again).replay

    def _advance_and_look(self, k: int) -> None:
        """Run the stages up to exit k, and let the confident images exit."""
        self._advance(k)
        if self._ahead:
            run_beside(partial(self._look, k), partial(self._advance, k + 1))
        else:
            self._look(k)

    def _advance(self, until: int) -> None:
        """Run the stages up to `until` that have not run in this step."""
        first = self._looks[0] if self._looks else self.last
        if until <= first:
            self._states.clear()
            state, done = self._model.begin(self.batch), -1
        else:
            done = max(k for k in self._states if k <= until)
            state = self._states[done]
        for k in range(done + 1, until + 1):
            state = self._model.advance(k, state)
        self._states[until] = state

    def _look(self, k: int) -> None:
        scores, output = exit_confidence(self._model, k, self._states[k])
        self._decide(scores, k)
        if output is not None:
            self._write_noise(self._leaving, output)

    def _decide(self, scores: Tensor, k: int) -> None:
        """Let the confident images exit; the first look of a step begins with all of them."""
        _, exits, stayed, left = self.found
        is_first, n = k == self._looks[0], len(scores)
        if has_triton(scores) and n <= MOST_FUSED:
            from swiftsure.diffusion._look_kernels import look_kernel

            flags = (self._active, self._leaving, self._anyone_stays, self._anyone_leaves)
            look_kernel[(1,)](
                scores.contiguous(),
                self.levels,
                *(flag.view(torch.uint8) for flag in flags),
                exits,
                stayed,
                left,
                n,
                k,
                self.last,
                FIRST=is_first,
                STRICT=self._rule.strict,
                BLOCK=1 << max(n - 1, 1).bit_length(),
            )
            return
        if is_first:
            self._active.fill_(True)
            exits.fill_(self.last)
        staying = ~reaches(scores, self.levels, strict=self._rule.strict)
        torch.bitwise_and(self._active, ~staying, out=self._leaving)
        self._active &= staying
        exits.masked_fill_(self._leaving, k)
        left.copy_(torch.where(self._leaving, torch.minimum(left, scores), left))
        stayed.copy_(torch.where(self._active, torch.fmax(stayed, scores), stayed))
        torch.any(self._leaving, dim=0, out=self._anyone_leaves)
        torch.any(self._active, dim=0, out=self._anyone_stays)

    def _estimate(self, k: int) -> None:
        self._write_noise(self._leaving, exit_output(self._model, k, self._states[k]))

    def _finish(self) -> None:
        self._advance(self.last)
        state = self._states[self.last]
        self._write_noise(self._active, exit_output(self._model, self.last, state))

    def _write_noise(self, whose: Tensor, output: Tensor) -> None:
        noise = self.found.noise
        if not self._looks:
            noise.copy_(output)
        else:
            torch.where(whose.view(-1, 1, 1, 1), output.to(noise.dtype), noise, out=noise)
