"""Steps of denoising that a GPU records once and replays: for small batches.

There the time goes into starting kernels one by one, and a network that leaves early starts as many
more to look at its exits as it saves. Recorded (CUDA graphs), a block and the look after it are one
start. A recording has fixed shapes, so images that left stay in the batch, masked; in large batches
it is better to drop them (`denoise`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from swiftsure.diffusion.rules import ExitRule
from swiftsure.diffusion.steps import Denoised
from swiftsure.torch.modes import inference
from swiftsure.torch.scoring import MODEL_SCORE, confidence
from swiftsure.torch.staged import StagedModel, plain_output

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
        self._n_active = torch.zeros((), dtype=torch.long, device=device)
        self._found = Denoised(
            torch.empty_like(images),
            torch.zeros(n, dtype=torch.long, device=device),
            torch.zeros(n, device=device),
            torch.zeros(n, device=device),
        )
        self._state: Any = None
        last = model.n_exits - 1
        first = rule.min_exit if looks else last
        # What runs between two decisions of the host is one part.
        parts = [self._until_first_look(first)]
        parts += [self._look_after(k) for k in range(first + 1, last)]
        self._last = last
        self._parts = [*parts, self._finish] if looks and first < last else [self._in_full]
        self._run = self._recorded() if device.type == "cuda" else self._parts

    def __call__(self, batch: Batch, levels: Tensor) -> Denoised:
        """Return what a step found; its noise is overwritten by the next one."""
        for held, new in zip(self._batch, batch, strict=True):
            held.copy_(new)
        self._levels.copy_(levels)
        *looks, finish = self._run
        for run in looks:
            run()
            if not int(self._n_active):
                break
        else:
            finish()
        found = self._found
        return found._replace(
            exits=found.exits.clone(), stayed=found.stayed.clone(), left=found.left.clone()
        )

    def _begin(self) -> None:
        self._active.fill_(True)
        _, exits, stayed, left = self._found
        exits.fill_(self._last)
        stayed.fill_(-torch.inf)
        left.fill_(torch.inf)
        self._state = self._model.begin(self._batch)

    def _until_first_look(self, first: int) -> Callable[[], None]:
        def run() -> None:
            self._begin()
            for k in range(first + 1):
                self._state = self._model.advance(k, self._state)
            self._look(first)

        return run

    def _look_after(self, k: int) -> Callable[[], None]:
        def run() -> None:
            self._state = self._model.advance(k, self._state)
            self._look(k)

        return run

    def _look(self, k: int) -> None:
        """Let those leave who are sure enough."""
        output = self._model.head(k, self._state)
        scores = confidence(MODEL_SCORE, output)
        # NaN counts as leaving: it must not run on unseen, and who leaves by it is refused.
        staying = scores <= self._levels if self._rule.strict else scores < self._levels
        leaving = self._active & ~staying
        self._active &= staying
        noise, exits, stayed, left = self._found
        here = leaving.view(-1, 1, 1, 1)
        noise.copy_(torch.where(here, plain_output(output).to(noise.dtype), noise))
        exits.masked_fill_(leaving, k)
        left.copy_(torch.where(leaving, scores, left))
        stayed.copy_(torch.where(self._active, torch.maximum(stayed, scores), stayed))
        self._n_active.copy_(self._active.sum())

    def _finish(self) -> None:
        self._state = self._model.advance(self._last, self._state)
        output = plain_output(self._model.head(self._last, self._state))
        noise = self._found.noise
        noise.copy_(torch.where(self._active.view(-1, 1, 1, 1), output.to(noise.dtype), noise))

    def _in_full(self) -> None:
        self._begin()
        for k in range(self._last):
            self._state = self._model.advance(k, self._state)
        self._finish()

    def _recorded(self) -> list[Callable[[], None]]:
        """Record the parts, in the order in which they are replayed."""
        graphs, pool = [torch.cuda.CUDAGraph() for _ in self._parts], torch.cuda.graph_pool_handle()
        device = self._levels.device
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        # States outlive their parts, for those that follow read them where they lie.
        self._kept: list[Any] = []
        with inference(device, self._dtype), _uncached(), torch.cuda.stream(side):
            for part in self._parts * 2:
                part()
            for graph, part in zip(graphs, self._parts, strict=True):
                torch.cuda.synchronize(device)
                with torch.cuda.graph(graph, pool=pool, stream=side):
                    part()
                self._kept.append(self._state)
        torch.cuda.current_stream(device).wait_stream(side)
        return [graph.replay for graph in graphs]


@contextmanager
def _uncached() -> Iterator[None]:
    """Let autocast keep nothing: what it keeps lies in one recording, and others would read it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
