"""Keys and values at fixed addresses, with a position of its own for every row.

A CUDA graph replays the same addresses, so its cache must not grow. Rows need not be at the same
position: each writes where it is, and its mask hides what lies behind.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

__all__ = ["CacheView", "KeysValues", "StaticCache", "chosen_rows", "places"]

KeysValues = tuple[Tensor, Tensor]


def chosen_rows(buffer: Tensor, rows: Tensor | None, n: int) -> Tensor:
    """Return some rows of a buffer; None: the first n, without a copy."""
    return buffer[:n] if rows is None else buffer.index_select(0, rows)


def places(rows: Tensor | None, n: int) -> Any:
    """Return an index of some rows of a buffer to write to; None: the first n."""
    return slice(0, n) if rows is None else rows


class StaticCache:
    """The cache of n sequences: one pair of buffers per block, and one for the source's.

    Buffers are (n + 1, heads, capacity, head width). The last row is for padding a group of rows to
    a size that was captured.

    Parameters
    ----------
    n : int
        Number of sequences.
    capacity : int
        Largest number of positions.
    counted : callable
        Returns a context in which buffers are allocated, to count their memory.
    """

    def __init__(self, n: int, capacity: int, counted: Callable[[], Any] = nullcontext) -> None:
        self.n, self.capacity, self._counted = n, capacity, counted
        self.own: dict[int, KeysValues] = {}
        self.source: dict[int, KeysValues] = {}
        self.last_position: int | None = None
        """The last position that the model has an embedding for; None: it has none."""
        self.visible = capacity
        """Positions that attention reads; fewer than the capacity where shapes may change."""

    def embedded(self, positions: Tensor) -> Tensor:
        """Return positions that the model can embed; those beyond belong to padding."""
        return positions if self.last_position is None else positions.clamp(max=self.last_position)

    def allocate(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Make the buffers of a block, for keys and values of this shape and dtype."""
        if index not in self.own:
            with self._counted():
                self.own[index] = _buffer(keys, self), _buffer(values, self)

    def write(
        self,
        index: int,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        rows: Tensor | None,
    ) -> None:
        """Write keys and values, (b, heads, q, head width), at positions (b, q) of these rows."""
        self.allocate(index, keys, values)
        for buffer, new in zip(self.own[index], (keys, values), strict=True):
            if rows is None:
                place = positions[:, None, :, None].expand_as(new)
                buffer[: self.n].scatter_(2, place, new)
            else:
                heads = torch.arange(new.shape[1], device=new.device)[None, :, None]
                buffer[rows[:, None, None], heads, positions[:, None, :]] = new

    def read(self, index: int, rows: Tensor | None) -> KeysValues:
        """Return the keys and values of these rows, up to the last visible position."""
        keys, values = (each[:, :, : self.visible] for each in self.own[index])
        return chosen_rows(keys, rows, self.n), chosen_rows(values, rows, self.n)

    def load(self, layers: Sequence[Any], rows: Tensor | None) -> None:
        """Copy the layers of a cache that holds the prompts of these rows."""
        for index, layer in enumerate(layers):
            self.allocate(index, layer.keys, layer.values)
            for buffer, given in zip(self.own[index], (layer.keys, layer.values), strict=True):
                buffer[places(rows, self.n), :, : given.shape[2]] = given

    def load_source(self, index: int, pair: KeysValues, capacity: int, rows: Tensor | None) -> None:
        """Copy the source's keys and values for a block; `capacity` is the longest source."""
        if index not in self.source:
            with self._counted():
                keys, values = (
                    each.new_zeros((self.n + 1, each.shape[1], capacity, each.shape[3]))
                    for each in pair
                )
            self.source[index] = keys, values
        for buffer, given in zip(self.source[index], pair, strict=True):
            buffer[places(rows, self.n), :, : given.shape[2]] = given


def _buffer(like: Tensor, cache: StaticCache) -> Tensor:
    return like.new_zeros((cache.n + 1, like.shape[1], cache.capacity, like.shape[3]))


class _Layer:
    """A block's keys and values of the source, for some rows."""

    def __init__(self, pair: KeysValues, rows: Tensor | None, n: int) -> None:
        self._pair, self._rows, self._n = pair, rows, n

    @property
    def keys(self) -> Tensor:
        return chosen_rows(self._pair[0], self._rows, self._n)

    @property
    def values(self) -> Tensor:
        return chosen_rows(self._pair[1], self._rows, self._n)


class _Own(Cache):
    """What a block's self-attention calls: writes the new positions, returns all of them."""

    def __init__(self, cache: StaticCache, positions: Tensor, rows: Tensor | None) -> None:
        self._cache, self._positions, self._rows = cache, positions, rows

    @property
    def _passed(self) -> Tensor:
        """What models with learned positions add 0, 1, ... to: that gives the positions."""
        shown = self._cache.embedded(self._positions)
        return shown - torch.arange(shown.shape[1], device=shown.device)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> KeysValues:
        self._cache.write(layer_idx, key_states, value_states, self._positions, self._rows)
        return self._cache.read(layer_idx, self._rows)

    def get_seq_length(self, layer_idx: int = 0) -> Any:  # noqa: ARG002
        return self._passed


class _Source(Cache):
    """The source's keys and values, which are complete."""

    def __init__(self, cache: StaticCache, rows: Tensor | None) -> None:
        self.layers: Any = {
            index: _Layer(pair, rows, cache.n) for index, pair in cache.source.items()
        }


class CacheView(EncoderDecoderCache):
    """A static cache as a block with cross-attention expects it, for some rows."""

    def __init__(self, cache: StaticCache, positions: Tensor, rows: Tensor | None) -> None:
        self.self_attention_cache: Any = _Own(cache, positions, rows)
        self.cross_attention_cache: Any = _Source(cache, rows)
        self.is_updated = dict.fromkeys(cache.source, True)

    @staticmethod
    def of(cache: StaticCache, positions: Tensor, rows: Tensor | None) -> Any:
        """Return the view that the model's blocks expect: with a source, or without."""
        view = CacheView if cache.source else _Own
        return view(cache, positions, rows)
