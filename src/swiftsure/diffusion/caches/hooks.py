"""Hooks on a transformer's blocks: count those that run, and reuse residuals sample by sample.

diffusers' FirstBlockCache runs the first block, and if its residual has changed by at most a
threshold since the last full step, adds the stored residual of all other blocks instead of running
them. It averages the change over the batch. `SampleReuse` does the same for each sample: those that
changed more run through the other blocks together, in a smaller batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.hooks.hooks import BaseState, CacheContext, StateManager, _set_cache_context
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["BlockCounts", "SampleReuse", "cache_context", "counted", "transformer_blocks"]

COUNT_HOOK = "swiftsure_count"
REUSE_HOOK = "swiftsure_reuse"

PER_SAMPLE = (
    "encoder_hidden_states",
    "timestep",
    "class_labels",
    "attention_mask",
    "encoder_attention_mask",
    "temb",
)
"""Arguments of a block whose first axis is the batch."""


def transformer_blocks(transformer: nn.Module) -> list[nn.Module]:
    """Return the blocks that diffusers' caches act on, in order."""
    found = [
        block
        for name, child in transformer.named_children()
        if name in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS and isinstance(child, nn.ModuleList)
        for block in child
    ]
    if len(found) < 2:
        raise ValueError(
            "`pipeline` must have a transformer with at least two blocks that diffusers' caches"
            f" know, but {type(transformer).__name__} has {len(found)}."
        )
    return found


class BlockCounts:
    """How many blocks ran for each of n samples."""

    def __init__(self, n: int) -> None:
        self.runs = np.zeros(n, np.int64)
        self.running: list[int] | None = None
        """The samples in the batch; None for all."""

    def add(self) -> None:
        """Count a block that runs."""
        if self.running is None:
            self.runs += 1
        else:
            self.runs[self.running] += 1


@contextmanager
def counted(transformer: nn.Module, counts: BlockCounts) -> Iterator[None]:
    """Count the blocks that run. Enter it before a cache: hooks added later act first."""
    blocks = transformer_blocks(transformer)
    for block in blocks:
        registry = HookRegistry.check_if_exists_or_initialize(block)
        registry.register_hook(_Count(counts), COUNT_HOOK)
    try:
        yield
    finally:
        _remove(blocks, COUNT_HOOK)


@contextmanager
def cache_context(transformer: nn.Module) -> Iterator[None]:
    """Start with an empty cache, and name the context for pipelines that do not name theirs."""
    registry = HookRegistry.check_if_exists_or_initialize(transformer)
    registry.invalidate_child_registries_cache()
    registry.reset_stateful_hooks()
    _set_cache_context(transformer, CacheContext("inference"))
    try:
        yield
    finally:
        registry.reset_stateful_hooks()
        registry.invalidate_child_registries_cache()


class SampleReuse:
    """A first-block cache that decides for each sample on its own.

    Parameters
    ----------
    thresholds : (n,)
        Largest relative change of the first block's residual at which a sample reuses; 0 for never.
    warm_up : (n,)
        Number of first steps at which a sample never reuses.
    counts : BlockCounts
    trace : bool
        Keep `max_reused` and `min_computed`.

    Attributes
    ----------
    max_reused, min_computed : (n,)
        The largest change at which each sample reused, and the smallest at which it did not: all
        thresholds from the one up to, but not including, the other give the same images.
    """

    def __init__(
        self,
        thresholds: NDArray[np.float32],
        warm_up: NDArray[np.int64],
        counts: BlockCounts,
        *,
        trace: bool = False,
    ) -> None:
        self.counts = counts
        self.trace = trace
        self.max_reused = np.full(len(thresholds), -np.inf, np.float32)
        self.min_computed = np.full(len(thresholds), np.inf, np.float32)
        self._thresholds = np.where(thresholds > 0, thresholds, -1).astype(np.float32)
        self._warm_up = warm_up
        self._states = StateManager(_SampleState)

    @contextmanager
    def installed(self, transformer: nn.Module) -> Iterator[None]:
        """Run the transformer with this cache."""
        blocks = transformer_blocks(transformer)
        for k, block in enumerate(blocks):
            registry = HookRegistry.check_if_exists_or_initialize(block)
            hook = _First(self) if k == 0 else _Other(self, last=k == len(blocks) - 1)
            registry.register_hook(hook, REUSE_HOOK)
        try:
            yield
        finally:
            _remove(blocks, REUSE_HOOK)

    def state(self) -> "_SampleState":
        """Return what is stored for the current context."""
        if self._states._context is None:
            self._states.set_context(CacheContext("inference"))
        found: _SampleState = self._states.get_state()
        return found

    def decide(self, state: "_SampleState", change: Tensor) -> list[int]:
        """Return the samples that run all blocks, given the first block's residual."""
        n = len(self._thresholds)
        state.step += 1
        if len(change) % n:
            raise ValueError(
                f"`pipeline` gave the transformer {len(change)} rows for {n} samples; a per-sample"
                " cache needs the same number of rows for each sample."
            )
        if state.reference is None:
            return list(range(n))
        shape = (len(change) // n, n, -1)
        moved = (change - state.reference).abs().reshape(shape).mean(dim=(0, 2))
        ratio = (moved / state.reference.abs().reshape(shape).mean(dim=(0, 2))).float()
        ratios = ratio.cpu().numpy()  # waits for the device, as diffusers' caches do
        warm = state.step > self._warm_up
        reused = warm & (ratios <= self._thresholds)
        if self.trace:
            np.maximum(self.max_reused, ratios, out=self.max_reused, where=reused)
            np.minimum(self.min_computed, ratios, out=self.min_computed, where=warm & ~reused)
        due: list[int] = np.flatnonzero(~reused).tolist()
        return due


class _SampleState(BaseState):  # type: ignore[misc]
    """What a context stores between steps, and the rows that run at the current one."""

    def __init__(self) -> None:
        self.step = 0
        self.reference: Tensor | None = None  # the first block's residual, when all blocks ran
        self.tail: Tensor | None = None  # the residual of all other blocks, at that step
        self.head = torch.empty(0)  # the first block's output
        self.skips = False
        self.rows: Tensor | None = None  # None for all
        self.selected: dict[int, tuple[Tensor, Tensor]] = {}

    def reset(self, *_: Any, **__: Any) -> None:
        """Forget everything; diffusers then drops the state."""


class _Hook(ModelHook):  # type: ignore[misc]
    def __init__(self, reuse: SampleReuse) -> None:
        super().__init__()
        self.reuse = reuse

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Look up where the block takes its hidden states."""
        self._metadata = TransformerBlockRegistry.get(type(module))
        if self._metadata.return_encoder_hidden_states_index is not None:
            raise ValueError(
                f"`cache` per sample needs blocks with one stream of hidden states, but"
                f" {type(module).__name__} has two: use DiffusersCache, with batches of one."
            )
        return module

    def hidden(self, args: Any, kwargs: Any) -> Tensor:
        """Return the hidden states among a block's arguments."""
        name = self._metadata.hidden_states_argument_name
        found: Tensor = self._metadata._get_parameter_from_args_kwargs(name, args, kwargs)
        return found


class _First(_Hook):
    """Runs the first block and decides which samples run the others."""

    _is_stateful = True

    def __init__(self, reuse: SampleReuse) -> None:
        super().__init__(reuse)
        self.states = reuse._states  # where diffusers sets the context

    def reset_state(self, module: nn.Module) -> nn.Module:
        """Empty the cache."""
        self.states.reset()
        return module

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block; return what the second one gets."""
        del module  # the hook's own reference is used
        hidden, counts = self.hidden(args, kwargs), self.reuse.counts
        counts.running = None
        output: Tensor = self.fn_ref.original_forward(*args, **kwargs)
        state, change = self.reuse.state(), output - hidden
        n = len(counts.runs)
        due = self.reuse.decide(state, change)
        state.head, state.skips, state.rows = output, not due, None
        state.selected.clear()
        if state.skips and state.tail is not None:
            return output + state.tail
        if len(due) == n or state.reference is None:
            state.reference = change
            return output
        copies = range(len(output) // n)
        state.rows = torch.tensor([k * n + i for k in copies for i in due], device=output.device)
        state.reference = state.reference.index_copy(0, state.rows, change[state.rows])
        counts.running = due
        return output[state.rows]


class _Other(_Hook):
    """Runs another block for the samples that are due; the last one stores the residual."""

    def __init__(self, reuse: SampleReuse, last: bool) -> None:
        super().__init__(reuse)
        self.last = last

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block."""
        state = self.reuse.state()
        if state.skips:
            return self.hidden(args, kwargs)
        if state.rows is not None:
            args, kwargs = self._selected(module, state, args, kwargs)
        output: Tensor = self.fn_ref.original_forward(*args, **kwargs)
        if not self.last:
            return output
        self.reuse.counts.running = None
        if state.rows is None:
            state.tail = output - state.head
            return output
        change = output - state.head[state.rows]
        state.tail = state.tail.index_copy(0, state.rows, change)  # type: ignore[union-attr]
        full = state.head + state.tail
        return full.index_copy_(0, state.rows, output)

    def _selected(
        self, module: nn.Module, state: _SampleState, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a block's arguments for the samples that are due."""
        names = list(signature(type(module).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, value in given.items():
            if name == self._metadata.hidden_states_argument_name:
                continue
            if not isinstance(value, Tensor) or not value.ndim or len(value) != len(state.head):
                continue
            if name not in PER_SAMPLE:
                raise ValueError(
                    f"`cache` per sample does not know whether the argument {name} of"
                    f" {type(module).__name__} has one row per sample: use DiffusersCache, with"
                    " batches of one."
                )
            if id(value) not in state.selected:
                state.selected[id(value)] = (value, value[state.rows])
            given[name] = state.selected[id(value)][1]
        return (), given


class _Count(ModelHook):  # type: ignore[misc]
    """Counts the runs of a block."""

    def __init__(self, counts: BlockCounts) -> None:
        super().__init__()
        self.counts = counts

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Count and run the block."""
        del module
        self.counts.add()
        return self.fn_ref.original_forward(*args, **kwargs)


def _remove(blocks: list[nn.Module], name: str) -> None:
    for block in blocks:
        registry = HookRegistry.check_if_exists_or_initialize(block)
        registry.remove_hook(name, recurse=False)
