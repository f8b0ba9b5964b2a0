"""Denoising steps captured as CUDA graphs.

A step is one graph. After each look the device decides whether anybody goes on, and skips the
remaining blocks if nobody does; the host does not wait (`swiftsure.torch.conditional`). A graph has
fixed shapes, so exited images stay in the batch, masked, until all have exited.

    blocks -> look -> [if anybody exits: estimate] -> [if anybody stays: blocks -> look -> ...]

A small batch leaves the GPU mostly idle, so there the next block starts beside the look. It is
wasted if all images exit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiftsure.diffusion.rules import DeeDiffRule
from swiftsure.diffusion.steps import Denoised, exit_confidence, exit_output
from swiftsure.torch.capture import CaptureBudget, Recorder
from swiftsure.torch.conditional import can_branch, run_beside, run_if
from swiftsure.torch.staged import StagedModel

__all__ = ["RecordedSteps"]

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
        images = batch[0]
        n, device = len(images), images.device
        self._model, self._rule = model, rule
        self._last = model.n_exits - 1
        self._looks = rule.looks(model.n_exits) if looks else []
        self._batch = tuple(part.clone() for part in batch)
        self._levels = torch.zeros(n, device=device)
        self._active = torch.ones(n, dtype=torch.bool, device=device)
        self._leaving = torch.zeros_like(self._active)
        self._anyone_leaves = torch.zeros((), dtype=torch.bool, device=device)
        self._anyone_stays = torch.zeros_like(self._anyone_leaves)
        self._found = Denoised(
            torch.empty_like(images),
            torch.zeros(n, dtype=torch.long, device=device),
            torch.zeros(n, device=device),
            torch.zeros(n, device=device),
        )
        self._states: dict[int, Any] = {}  # after each stage; kept for estimates and later parts
        self._has_estimates = hasattr(model, "confidence_at")
        self._ahead = False
        recorder = Recorder(device, dtype, budget)
        if not recorder.captures:
            self._run: Part = partial(self._step, self._parts())
        elif can_branch():
            self._ahead = bool(self._looks) and self._pays_ahead(recorder, self._looks[0])
            self._recorded = recorder.record(partial(self._step, self._parts()))
            self._run = self._recorded.replay
        else:  # the host decides: one graph per part
            parts = {name: self._alone(recorder, part) for name, part in self._parts().items()}
            self._run = partial(self._step, parts)

    def __call__(self, batch: Batch, levels: Tensor) -> Denoised:
        """Return the result of a step; its noise is overwritten by the next step."""
        for held, new in zip(self._batch, batch, strict=True):
            held.copy_(new)
        self._levels.copy_(levels)
        self._run()
        found = self._found
        return found._replace(
            exits=found.exits.clone(),
            max_skipped=found.max_skipped.clone(),
            min_taken=found.min_taken.clone(),
        )

    def _parts(self) -> dict[str, Part]:
        """Return what runs between two decisions, in the order of a step without early exits."""
        parts: dict[str, Part] = {}
        for k in self._looks:
            parts[f"look {k}"] = partial(self._advance_and_look, k)
            parts[f"estimate {k}"] = partial(self._estimate, k)
        return parts | {"rest": self._finish}

    def _step(self, parts: dict[str, Part], first: int = 0) -> None:
        """Run the parts of a step from a look on."""
        if first == len(self._looks):
            parts["rest"]()
            return
        k = self._looks[first]
        parts[f"look {k}"]()
        if self._has_estimates:
            run_if(self._anyone_leaves, parts[f"estimate {k}"])
        run_if(self._anyone_stays, partial(self._step, parts, first + 1))

    def _alone(self, recorder: Recorder, part: Part) -> Part:
        """Capture a part as a graph of its own."""
        before = dict(self._states)

        def again() -> None:
            self._states = dict(before)
            part()

        return recorder.record(again).replay

    def _pays_ahead(self, recorder: Recorder, k: int) -> bool:
        """Return whether to start the next block beside look k: if half of the steps exit there."""
        look, device = partial(self._look, k), recorder.device

        def block() -> None:
            self._model.advance(k + 1, self._states[k])

        recorder.record(partial(self._advance, k))
        looking, going_on, both = (
            recorder.record(part).seconds(device, repeats=20)
            for part in (look, block, partial(run_beside, look, block))
        )
        hidden, wasted = looking + going_on - both, both - looking
        return hidden > wasted

    def _advance_and_look(self, k: int) -> None:
        """Run the stages up to exit k, and let the confident images exit."""
        self._advance(k)
        if self._ahead:
            run_beside(partial(self._look, k), partial(self._advance, k + 1))
        else:
            self._look(k)

    def _advance(self, until: int) -> None:
        """Run the stages up to `until` that have not run in this step."""
        first = self._looks[0] if self._looks else self._last
        if until <= first:
            self._begin()
            state, done = self._model.begin(self._batch), -1
        else:
            done = max(k for k in self._states if k <= until)
            state = self._states[done]
        for k in range(done + 1, until + 1):
            state = self._model.advance(k, state)
        self._states[until] = state

    def _begin(self) -> None:
        self._states.clear()
        self._active.fill_(True)
        _, exits, stayed, left = self._found
        exits.fill_(self._last)
        stayed.fill_(-torch.inf)
        left.fill_(torch.inf)

    def _look(self, k: int) -> None:
        scores, output = exit_confidence(self._model, k, self._states[k])
        # NaN counts as exiting, so that it is noticed: exits at NaN raise an error later.
        staying = scores <= self._levels if self._rule.strict else scores < self._levels
        torch.bitwise_and(self._active, ~staying, out=self._leaving)
        self._active &= staying
        _, exits, stayed, left = self._found
        exits.masked_fill_(self._leaving, k)
        left.copy_(torch.where(self._leaving, scores, left))
        stayed.copy_(torch.where(self._active, torch.maximum(stayed, scores), stayed))
        torch.any(self._leaving, dim=0, out=self._anyone_leaves)
        torch.any(self._active, dim=0, out=self._anyone_stays)
        if output is not None:
            self._write_noise(self._leaving, output)

    def _estimate(self, k: int) -> None:
        self._write_noise(self._leaving, exit_output(self._model, k, self._states[k]))

    def _finish(self) -> None:
        self._advance(self._last)
        state = self._states[self._last]
        self._write_noise(self._active, exit_output(self._model, self._last, state))

    def _write_noise(self, whose: Tensor, output: Tensor) -> None:
        noise = self._found.noise
        noise.copy_(torch.where(whose.view(-1, 1, 1, 1), output.to(noise.dtype), noise))
