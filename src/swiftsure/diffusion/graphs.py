"""Denoising steps captured as CUDA graphs, for small batches.

Small batches are bound by kernel launches, and evaluating exits launches as many kernels as
exiting early saves. Captured, a block and its exit are one launch. A graph has fixed shapes, so
exited images stay in the batch, masked; in large batches it is better to drop them (`denoise`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiftsure.diffusion.rules import DeeDiffRule
from swiftsure.diffusion.steps import Denoised, exit_confidence, exit_output
from swiftsure.torch.capture import no_autocast_cache
from swiftsure.torch.modes import inference
from swiftsure.torch.staged import StagedModel

__all__ = ["RecordedSteps"]

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
    """

    def __init__(
        self, model: StagedModel, batch: Batch, rule: DeeDiffRule, looks: bool, dtype: str | None
    ) -> None:
        images = batch[0]
        n, device = len(images), images.device
        self._model, self._rule, self._dtype = model, rule, dtype
        self._batch = tuple(part.clone() for part in batch)
        self._levels = torch.zeros(n, device=device)
        self._active = torch.ones(n, dtype=torch.bool, device=device)
        self._leaving = torch.zeros_like(self._active)
        self._n_active = torch.zeros((), dtype=torch.long, device=device)
        self._found = Denoised(
            torch.empty_like(images),
            torch.zeros(n, dtype=torch.long, device=device),
            torch.zeros(n, device=device),
            torch.zeros(n, device=device),
        )
        self._state: Any = None
        last = model.n_exits - 1
        self._last = last
        first = rule.min_exit if looks else last
        apart = hasattr(model, "confidence_at")
        # Each part is what runs between two decisions of the host; listed in capture order.
        parts: dict[str, Callable[[], None]] = {}
        for k in range(first, last):
            parts[f"look {k}"] = partial(self._advance_and_look, k, 0 if k == first else k)
            if apart:
                parts[f"estimate {k}"] = partial(self._estimate, k)
        parts["rest"] = partial(self._finish, last if first < last else 0)
        self._parts = self._capture(parts) if device.type == "cuda" else parts
        self._looks = range(first, last)

    def __call__(self, batch: Batch, levels: Tensor) -> Denoised:
        """Return the result of a step; its noise is overwritten by the next step."""
        for held, new in zip(self._batch, batch, strict=True):
            held.copy_(new)
        self._levels.copy_(levels)
        under_way = len(levels)
        for k in self._looks:
            self._parts[f"look {k}"]()
            before, under_way = under_way, int(self._n_active)  # the only synchronisation
            if under_way < before and f"estimate {k}" in self._parts:
                self._parts[f"estimate {k}"]()
            if not under_way:
                break
        else:
            self._parts["rest"]()
        found = self._found
        return found._replace(
            exits=found.exits.clone(),
            max_skipped=found.max_skipped.clone(),
            min_taken=found.min_taken.clone(),
        )

    def _advance(self, first: int, until: int) -> None:
        """Run the stages from `first` to `until`; stage 0 begins a step."""
        if first == 0:
            self._active.fill_(True)
            _, exits, stayed, left = self._found
            exits.fill_(self._last)
            stayed.fill_(-torch.inf)
            left.fill_(torch.inf)
            self._state = self._model.begin(self._batch)
        for k in range(first, until + 1):
            self._state = self._model.advance(k, self._state)

    def _advance_and_look(self, k: int, first: int) -> None:
        """Run the stages up to exit k, and let the confident images exit."""
        self._advance(first, k)
        scores, output = exit_confidence(self._model, k, self._state)
        # NaN counts as exiting, so that it is noticed: exits at NaN raise an error later.
        staying = scores <= self._levels if self._rule.strict else scores < self._levels
        torch.bitwise_and(self._active, ~staying, out=self._leaving)
        self._active &= staying
        _, exits, stayed, left = self._found
        exits.masked_fill_(self._leaving, k)
        left.copy_(torch.where(self._leaving, scores, left))
        stayed.copy_(torch.where(self._active, torch.maximum(stayed, scores), stayed))
        self._n_active.copy_(self._active.sum())
        if output is not None:
            self._write_noise(self._leaving, output)

    def _estimate(self, k: int) -> None:
        self._write_noise(self._leaving, exit_output(self._model, k, self._state))

    def _finish(self, first: int) -> None:
        self._advance(first, self._last)
        self._write_noise(self._active, exit_output(self._model, self._last, self._state))

    def _write_noise(self, whose: Tensor, output: Tensor) -> None:
        noise = self._found.noise
        noise.copy_(torch.where(whose.view(-1, 1, 1, 1), output.to(noise.dtype), noise))

    def _capture(self, parts: dict[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
        """Capture the parts as CUDA graphs, in the order in which they are replayed."""
        device, pool = self._levels.device, torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        # Keep the states alive: later parts read them at the captured addresses.
        self._kept: list[Any] = []
        graphs = {name: torch.cuda.CUDAGraph() for name in parts}
        with inference(device, self._dtype), no_autocast_cache(), torch.cuda.stream(side):
            for part in [*parts.values()] * 2:
                part()
            for name, part in parts.items():
                torch.cuda.synchronize(device)
                with torch.cuda.graph(graphs[name], pool=pool, stream=side):
                    part()
                self._kept.append(self._state)
        torch.cuda.current_stream(device).wait_stream(side)
        return {name: graph.replay for name, graph in graphs.items()}
