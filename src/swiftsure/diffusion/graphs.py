"""Steps of denoising that a GPU records once and replays: for small batches.

There the time goes into starting kernels one by one, and a network that leaves early starts as many
more to look at its exits as it saves. Recorded (CUDA graphs), a block is one start, and so is a
look. A recording has fixed shapes, so images that left stay in the batch, masked; in large batches
it is better to drop them (`denoise`).

The host has to hear how sure an exit is before it knows what to start next, and the device would
wait for it. So the next block is started before the answer is there, beside the look, wherever the
step before went on: neighbouring steps mostly leave at the same exit, and a block is seldom run in
vain.
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
        # One for each exit: who left at one is still read when the next is looked at.
        self._leaving = torch.zeros((model.n_exits, n), dtype=torch.bool, device=device)
        self._under_way = torch.zeros(model.n_exits, dtype=torch.long)
        if device.type == "cuda":
            self._under_way = self._under_way.pin_memory()  # written by the device
        self._found = Denoised(
            torch.empty_like(images),
            torch.zeros(n, dtype=torch.long, device=device),
            torch.zeros(n, device=device),
            torch.zeros(n, device=device),
        )
        self._states: dict[int, Any] = {}
        self._last = model.n_exits - 1
        self._looks = range(rule.min_exit if looks else self._last, self._last)
        self._reached = 0  # the deepest exit that the step before looked at
        parts = self._in_order()
        self._looking: _Beside | None = None
        if device.type == "cuda":
            self._looking = _Beside(device)
            parts = self._recorded(parts)
        self._parts = parts

    def __call__(self, batch: Batch, levels: Tensor) -> Denoised:
        """Return what a step found; its noise is overwritten by the next one."""
        for held, new in zip(self._batch, batch, strict=True):
            held.copy_(new)
        self._levels.copy_(levels)
        under_way, k = len(levels), self._looks.start
        self._parts[f"advance {k}"]()
        for k in self._looks:
            self._look(k)
            ahead = k < self._reached
            if ahead:
                self._parts[f"advance {k + 1}"]()
            before, under_way = under_way, self._heard(k)
            if under_way < before and f"estimate {k}" in self._parts:
                self._parts[f"estimate {k}"]()
            if not under_way:
                break
            if not ahead:
                self._parts[f"advance {k + 1}"]()
        else:
            k = self._last
            self._parts["finish"]()
        self._reached = k
        found = self._found
        return found._replace(
            exits=found.exits.clone(), stayed=found.stayed.clone(), left=found.left.clone()
        )

    def _in_order(self) -> dict[str, Callable[[], None]]:
        """Return what the host starts, by name, in an order in which it might."""
        first = self._looks.start
        parts: dict[str, Callable[[], None]] = {f"advance {first}": self._begin}
        for k in self._looks:
            parts[f"look {k}"] = partial(self._leave, k)
            parts[f"advance {k + 1}"] = partial(self._advance, k + 1)
            if hasattr(self._model, "confidence_at"):
                parts[f"estimate {k}"] = partial(self._estimate, k)
        return {**parts, "finish": self._finish}

    def _begin(self) -> None:
        """Begin a step, up to the first exit that is looked at."""
        self._active.fill_(True)
        _, exits, stayed, left = self._found
        exits.fill_(self._last)
        stayed.fill_(-torch.inf)
        left.fill_(torch.inf)
        first = self._looks.start
        state = self._model.begin(self._batch)
        for k in range(first + 1):
            state = self._model.advance(k, state)
        self._states[first] = state

    def _advance(self, k: int) -> None:
        self._states[k] = self._model.advance(k, self._states[k - 1])

    def _leave(self, k: int) -> None:
        """Look at an exit, and let those leave who are sure enough."""
        scores, output = looked(self._model, k, self._states[k])
        # NaN counts as leaving: it must not run on unseen, and who leaves by it is refused.
        staying = scores <= self._levels if self._rule.strict else scores < self._levels
        leaving = self._leaving[k]
        torch.bitwise_and(self._active, ~staying, out=leaving)
        self._active &= staying
        _, exits, stayed, left = self._found
        exits.masked_fill_(leaving, k)
        left.copy_(torch.where(leaving, scores, left))
        stayed.copy_(torch.where(self._active, torch.maximum(stayed, scores), stayed))
        self._under_way[k].copy_(self._active.sum(), non_blocking=True)
        if output is not None:
            self._answer(leaving, output)

    def _estimate(self, k: int) -> None:
        self._answer(self._leaving[k], estimated(self._model, k, self._states[k]))

    def _finish(self) -> None:
        last = self._last
        self._answer(self._active, estimated(self._model, last, self._states[last]))

    def _look(self, k: int) -> None:
        """Start a look, beside whatever is started next."""
        if self._looking is None:
            self._parts[f"look {k}"]()
        else:
            self._looking.start(self._parts[f"look {k}"])

    def _heard(self, k: int) -> int:
        """Return how many go on, once the look is over: the one wait for the device."""
        if self._looking is not None:
            self._looking.wait()
        return int(self._under_way[k])

    def _answer(self, whose: Tensor, output: Tensor) -> None:
        noise = self._found.noise
        noise.copy_(torch.where(whose.view(-1, 1, 1, 1), output.to(noise.dtype), noise))

    def _recorded(self, parts: dict[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
        """Record the parts.

        What passes from one to another is kept, so that no recording reuses its memory; the rest
        they may share, in the order of recording. Looks run beside others and have their own.
        """
        device = self._levels.device
        pools = {looks: torch.cuda.graph_pool_handle() for looks in (False, True)}
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        graphs = {name: torch.cuda.CUDAGraph() for name in parts}
        with inference(device, self._dtype), _uncached(), torch.cuda.stream(side):
            for part in [*parts.values()] * 2:
                part()
            for name, part in parts.items():
                torch.cuda.synchronize(device)
                pool = pools[name.startswith("look")]
                with torch.cuda.graph(graphs[name], pool=pool, stream=side):
                    part()
        torch.cuda.current_stream(device).wait_stream(side)
        return {name: graph.replay for name, graph in graphs.items()}


class _Beside:
    """A stream of a GPU beside the current one, for looks, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self, look: Callable[[], None]) -> None:
        """Start a look, after all that has been started so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            look()
            self._over.record()

    def wait(self) -> None:
        """Wait until the look is over, whatever else is not."""
        self._over.synchronize()


@contextmanager
def _uncached() -> Iterator[None]:
    """Let autocast keep nothing: what it keeps lies in one recording, and others would read it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
