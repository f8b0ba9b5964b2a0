"""A key-value cache for early exits: skipped blocks get their keys and values when needed.

A skipped block defers the keys and values of the exit state. They are computed when a
later token reaches the block, for all skipped positions at once: one matrix product instead of one
per token, and none at all if no token gets that far.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

__all__ = ["ExitLayer", "prepare_cache", "rows_of_cache"]

Rotary = tuple[Tensor, Tensor]
Project = Callable[[Tensor, Rotary | None], tuple[Tensor, Tensor]]
"""Maps states (n, positions, width) and their rotary positions to keys and values."""


class ExitLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one block; those of skipped positions are computed on first access.

    Parameters
    ----------
    project : callable
        Computes the block's keys and values from hidden states.
    """

    def __init__(self, project: Project, **kwargs: Any) -> None:
        self._held: dict[str, Tensor | None] = {}
        self._deferred: list[tuple[Tensor, Rotary | None]] = []
        self._project = project
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]

    def defer(self, states: Tensor, rotary: Rotary | None) -> None:
        """Add a position, (n, 1, width), whose keys and values are computed later."""
        self._deferred.append((states, rotary))

    # Plain attributes in the base class. Properties here, so that reading them adds deferred ones.
    @property
    def keys(self) -> Tensor | None:
        """All keys, (n, heads, positions, head width)."""
        if self._deferred:
            self._compute_deferred()
        return self._held.get("keys")

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._held["keys"] = value

    @property
    def values(self) -> Tensor | None:
        """All values, (n, heads, positions, head width)."""
        if self._deferred:
            self._compute_deferred()
        return self._held.get("values")

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._held["values"] = value

    def get_seq_length(self) -> int:
        """Return the number of positions, including deferred ones."""
        held = self._held.get("keys")
        known = 0 if held is None or held.numel() == 0 else held.shape[-2]
        return known + len(self._deferred)

    def reset(self) -> None:
        """Forget all positions."""
        self._deferred = []
        super().reset()

    @torch.no_grad()
    def _compute_deferred(self) -> None:
        states = torch.cat([each for each, _ in self._deferred], dim=1)
        rotary = _concat_rotary([turned for _, turned in self._deferred])
        self._deferred = []  # before `update`, which reads the keys
        self.update(*self._project(states, rotary))


def prepare_cache(cache: Any, projects: Sequence[Project]) -> None:
    """Replace the layers of an empty or partly filled cache with `ExitLayer`s.

    Sliding windows keep all positions from then on; the model's own mask hides the old ones.

    Raises
    ------
    ValueError
        If its layers do not simply grow: static, offloaded or quantised caches, and sliding windows
        that have dropped positions.
    """
    crossed = isinstance(cache, EncoderDecoderCache)
    inner = cache.self_attention_cache if crossed else cache
    plain = isinstance(inner, Cache) and not inner.offloading
    if not plain or not all(map(_is_whole, inner.layers)):
        raise ValueError(
            "Early exits need a DynamicCache without offloading, quantisation or windows that have"
            f" dropped positions, but got {type(inner).__name__}: call generate without"
            " `cache_implementation` and `past_key_values`."
        )
    # One per block, however many layers were given: `generate` may count the encoder's instead.
    layers = [ExitLayer(project) for project in projects]
    for given, layer in zip(inner.layers, layers, strict=False):
        if given.get_seq_length() > 0:
            layer.update(given.keys, given.values)
    inner.layers = layers
    if crossed:
        cross = cache.cross_attention_cache
        missing = len(layers) - len(cross.layers)
        cross.layers.extend(DynamicLayer() for _ in range(missing))  # type: ignore[no-untyped-call]


def _is_whole(layer: Any) -> bool:
    """Whether a layer of a cache has the keys of all positions and may grow."""
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.keys is None or layer.keys.shape[-2] == layer.get_seq_length()
    return type(layer) in (DynamicLayer, ExitLayer)


def rows_of_cache(
    cache: Any, index: int, rows: Tensor, exited: Tensor, propagated: tuple[Tensor, Tensor]
) -> Any:
    """Return a view of one block's cache that reads some rows of the batch and writes all.

    Parameters
    ----------
    cache : the whole cache
    index : the block
    rows : rows that go through the block
    exited : rows that do not
    propagated : keys and values of the rows in `exited`, written together with the others
    """
    if isinstance(cache, EncoderDecoderCache):
        shown = _Rows(cache.self_attention_cache.layers[index], rows, exited, propagated)
        source = _Rows(cache.cross_attention_cache.layers[index], rows, exited, propagated)
        return _EncoderDecoderRows(
            _RowsCache(index, shown), _RowsCache(index, source), cache.is_updated
        )
    return _RowsCache(index, _Rows(cache.layers[index], rows, exited, propagated))


class _Rows:
    """A view of some rows of a cache layer."""

    def __init__(
        self, layer: Any, rows: Tensor, exited: Tensor, propagated: tuple[Tensor, Tensor]
    ) -> None:
        self.layer, self.rows, self.exited, self.propagated = layer, rows, exited, propagated

    @property
    def keys(self) -> Tensor:
        keys: Tensor = self.layer.keys.index_select(0, self.rows)
        return keys

    @property
    def values(self) -> Tensor:
        values: Tensor = self.layer.values.index_select(0, self.rows)
        return values

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append a position for all rows of the batch; return all positions of these rows."""
        self.layer.update(*map(self._merge_rows, (keys, values), self.propagated))
        return self.keys, self.values

    def get_seq_length(self) -> int:
        length: int = self.layer.get_seq_length()
        return length

    def _merge_rows(self, active: Tensor, exited: Tensor) -> Tensor:
        n = len(active) + len(exited)
        whole = active.new_empty((n, *active.shape[1:]))
        whole.index_copy_(0, self.rows, active)
        return whole.index_copy_(0, self.exited, exited.to(active.dtype))


class _RowsCache(Cache):
    """The cache methods that one block's attention uses."""

    def __init__(self, index: int, layer: _Rows) -> None:
        self.layers: Mapping[int, _Rows] = {index: layer}  # type: ignore[assignment]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        return self.layers[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx].get_seq_length()


class _EncoderDecoderRows(EncoderDecoderCache):
    """`_RowsCache` for a block with cross-attention to the source."""

    def __init__(self, own: _RowsCache, source: _RowsCache, is_updated: dict[int, bool]) -> None:
        self.self_attention_cache: Any = own
        self.cross_attention_cache: Any = source
        self.is_updated = is_updated


def _concat_rotary(rotaries: list[Rotary | None]) -> Rotary | None:
    """Concatenate the positions' cosines and sines; a model has them for all positions or none."""
    known = [each for each in rotaries if each is not None]
    if not known:
        return None
    cosines, sines = (torch.cat(parts, dim=1) for parts in zip(*known, strict=True))
    return cosines, sines
