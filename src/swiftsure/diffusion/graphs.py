"""Steps of denoising that a GPU records once and replays: for small batches.

There the time goes into starting kernels one by one, and a network that leaves early starts as many
more to look at its exits as it saves. Recorded (CUDA graphs), a block and the look after it are one
start. A recording has fixed shapes, so images that left stay in the batch, masked; in large batches
it is better to drop them (`denoise`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiftsure.diffusion.rules import ExitRule
from swiftsure.diffusion.steps import Denoised, estimated, looked
from swiftsure.torch.modes import inference
from swiftsure.torch.staged import StagedModel

__all__ = ["RecordedSteps"]

Batch = tuple[Tensor, ...]


class RecordedSteps:
    """Steps of one network on batches of one size; recorded where that is possible, on a GPU.

    Parameters
    ----------
    model : StagedModel
        Without random numbers, and without anything that waits for the device.
    batch : tensors
        (images, times) or (images, times, labels); any of the size wanted.
    rule : ExitRule
    looks : bool
        Whether any level can be reached; if none can, no early head runs.
    dtype : str, optional
        Of autocast.
    """

    def __init__(
        self, model: StagedModel, batch: Batch, rule: ExitRule, looks: bool, dtype: str | None
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
        # What runs between two decisions of the host is one part; in the order of recordings.
        parts: dict[str, Callable[[], None]] = {}
        for k in range(first, last):
            parts[f"look {k}"] = partial(self._advance_and_look, k, 0 if k == first else k)
            if apart:
                parts[f"estimate {k}"] = partial(self._estimate, k)
        parts["rest"] = partial(self._finish, last if first < last else 0)
        self._parts = self._recorded(parts) if device.type == "cuda" else parts
        self._looks = range(first, last)

    def __call__(self, batch: Batch, levels: Tensor) -> Denoised:
        """Return what a step found; its noise is overwritten by the next one."""
        for held, new in zip(self._batch, batch, strict=True):
            held.copy_(new)
        self._levels.copy_(levels)
        under_way = len(levels)
        for k in self._looks:
            self._parts[f"look {k}"]()
            before, under_way = under_way, int(self._n_active)  # the one wait for the device
            if under_way < before and f"estimate {k}" in self._parts:
                self._parts[f"estimate {k}"]()
            if not under_way:
                break
        else:
            self._parts["rest"]()
        found = self._found
        return found._replace(
            exits=found.exits.clone(), stayed=found.stayed.clone(), left=found.left.clone()
        )

    def _advance(self, first: int, until: int) -> None:
        """Run stages; the first of them begins a step."""
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
        """Run stages up to an exit, and let those leave who are sure enough."""
        self._advance(first, k)
        scores, output = looked(self._model, k, self._state)
        # NaN counts as leaving: it must not run on unseen, and who leaves by it is refused.
        staying = scores <= self._levels if self._rule.strict else scores < self._levels
        torch.bitwise_and(self._active, ~staying, out=self._leaving)
        self._active &= staying
        _, exits, stayed, left = self._found
        exits.masked_fill_(self._leaving, k)
        left.copy_(torch.where(self._leaving, scores, left))
        stayed.copy_(torch.where(self._active, torch.maximum(stayed, scores), stayed))
        self._n_active.copy_(self._active.sum())
        if output is not None:
            self._answer(self._leaving, output)

    def _estimate(self, k: int) -> None:
        self._answer(self._leaving, estimated(self._model, k, self._state))

    def _finish(self, first: int) -> None:
        self._advance(first, self._last)
        self._answer(self._active, estimated(self._model, self._last, self._state))

    def _answer(self, whose: Tensor, output: Tensor) -> None:
        noise = self._found.noise
        noise.copy_(torch.where(whose.view(-1, 1, 1, 1), output.to(noise.dtype), noise))

    def _recorded(self, parts: dict[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
        """Record the parts, in the order in which they are replayed."""
        device, pool = self._levels.device, torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        # States outlive their parts, for those that follow read them where they lie.
        self._kept: list[Any] = []
        graphs = {name: torch.cuda.CUDAGraph() for name in parts}
        with inference(device, self._dtype), _uncached(), torch.cuda.stream(side):
            for part in [*parts.values()] * 2:
                part()
            for name, part in parts.items():
                torch.cuda.synchronize(device)
                with torch.cuda.graph(graphs[name], pool=pool, stream=side):
                    part()
                self._kept.append(self._state)
        torch.cuda.current_stream(device).wait_stream(side)
        return {name: graph.replay for name, graph in graphs.items()}


@contextmanager
def _uncached() -> Iterator[None]:
    """Let autocast keep nothing: what it keeps lies in one recording, and others would read it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
