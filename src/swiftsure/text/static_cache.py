"""Keys and values at fixed addresses, with a position of its own for every row.

A CUDA graph replays the same addresses, so its cache must not grow. Rows need not be at the same
position: each writes where it is, and its mask hides what lies behind.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

__all__ = ["KeysValues", "Spot", "StaticCache", "chosen_rows", "places"]

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
        self.step = 1
        """What their number is a multiple of."""

    def embedded(self, positions: Tensor) -> Tensor:
        """Return positions that the model can embed; those beyond belong to padding."""
        return _embedded(positions, self.last_position)

    def show(self, positions: int) -> None:
        """Let attention read this many positions, or a few more."""
        self.visible = min(-(-positions // self.step) * self.step, self.capacity)

    def spot(self, index: int, positions: Tensor, rows: Tensor | None) -> "Spot":
        """Return where a block reads and writes for some rows."""
        own, source = self.own.get(index), self.source.get(index)
        return Spot(own, source, positions, rows, self.visible, self.last_position)

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
        _write(self.own[index], (keys, values), positions, rows)

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


class Spot(NamedTuple):
    """Where a block reads and writes keys and values.

    Attributes
    ----------
    own, source : pairs of buffers, or None
        The block's own, and those of its attention to a source.
    positions : (b, q)
    rows : (b,), or None for all
    visible, last_position
        As in `StaticCache`.
    """

    own: KeysValues | None
    source: KeysValues | None
    positions: Tensor
    rows: Tensor | None
    visible: int
    last_position: int | None

    def view(self) -> Any:
        """Return the cache that the block expects: with a source, or without."""
        own = _Own(self)
        return own if self.source is None else CacheView(own, self.source, self.rows)


def _write(buffers: KeysValues, pair: KeysValues, positions: Tensor, rows: Tensor | None) -> None:
    """Write keys and values at positions of some rows of their buffers."""
    for buffer, new in zip(buffers, pair, strict=True):
        if rows is None:
            place = positions[:, None, :, None].expand_as(new)
            buffer[:-1].scatter_(2, place, new)
        else:
            heads = torch.arange(new.shape[1], device=new.device)[None, :, None]
            buffer[rows[:, None, None], heads, positions[:, None, :]] = new


def _embedded(positions: Tensor, last_position: int | None) -> Tensor:
    return positions if last_position is None else positions.clamp(max=last_position)


class _Own(Cache):
    """What a block's self-attention calls: writes the new positions, returns all of them."""

    def __init__(self, spot: Spot) -> None:
        self._spot = spot

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,  # noqa: ARG002 (one compiled function runs all blocks)
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> KeysValues:
        buffers, _, positions, rows, visible, _ = self._spot
        if buffers is None:
            raise ValueError("The block's buffers must be allocated before it runs.")
        _write(buffers, (key_states, value_states), positions, rows)
        keys, values = (chosen_rows(each[:, :, :visible], rows, len(each) - 1) for each in buffers)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> Any:  # noqa: ARG002
        """Return what models with learned positions add 0, 1, ... to: that gives the positions."""
        shown = _embedded(self._spot.positions, self._spot.last_position)
        return shown - torch.arange(shown.shape[1], device=shown.device)


class _Layer:
    """A block's keys and values of the source, for some rows."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class _Same:
    """A mapping that gives the same for every block: each view is of one block."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, index: int) -> Any:
        return self._value

    def get(self, index: int) -> Any:  # noqa: ARG002
        return self._value


class _Source(Cache):
    """The source's keys and values, which are complete."""

    def __init__(self, layer: _Layer) -> None:
        self.layers: Any = _Same(layer)


class CacheView(EncoderDecoderCache):
    """One block's part of a static cache, as a block with cross-attention expects it."""

    def __init__(self, own: _Own, source: KeysValues, rows: Tensor | None) -> None:
        keys, values = (chosen_rows(each, rows, len(each) - 1) for each in source)
        self.self_attention_cache: Any = own
        self.cross_attention_cache: Any = _Source(_Layer(keys, values))
        self.is_updated: Any = _Same(True)
