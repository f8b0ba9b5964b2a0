"""What a decoder's stack hands its blocks, kept for each row at fixed addresses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from swiftsure.text.static_cache import chosen_rows

__all__ = ["BlockArguments", "Slot", "slots", "write_rows"]


@dataclass(frozen=True)
class Slot:
    """Place of a block argument among the kept tensors."""

    index: int
    attended: bool
    """Whether its last axis are the cached positions."""


class BlockArguments:
    """The arguments of blocks for some rows; each tensor is gathered once.

    Parameters
    ----------
    layout : one mapping per block
        Its arguments, by name: constants, and places among the kept tensors.
    kept : tensors with one row per sequence, and one for padding
    shared : tensors that are the same for all blocks and rows
    masks : the same for all blocks, with one row per sequence
    rows : (b,), or None for all n
    n : number of sequences
    visible : number of cached positions that attention reads
    """

    def __init__(
        self,
        layout: Sequence[Mapping[str, Any]],
        kept: Sequence[Tensor],
        shared: Mapping[str, Tensor],
        masks: Mapping[str, Tensor],
        rows: Tensor | None,
        *,
        n: int,
        visible: int,
    ) -> None:
        self.rows = rows
        self._layout, self._kept, self._shared, self._masks = layout, kept, shared, masks
        self._n, self._visible = n, visible
        self._gathered: dict[int, Tensor] = {}

    def of(self, index: int) -> dict[str, Any]:
        """Return the arguments of a block, without states and cache."""
        found = {name: self._value(each) for name, each in self._layout[index].items()}
        return found | self._of_source

    @cached_property
    def _of_source(self) -> dict[str, Tensor]:
        masks = {name: chosen_rows(each, self.rows, self._n) for name, each in self._masks.items()}
        return {**self._shared, **masks}

    def _value(self, place: Any) -> Any:
        if isinstance(place, tuple):
            return tuple(map(self._value, place))
        if not isinstance(place, Slot):
            return place
        if place.index not in self._gathered:
            found = self._kept[place.index]
            if place.attended:
                found = found[..., : self._visible]
            self._gathered[place.index] = chosen_rows(found, self.rows, self._n)
        return self._gathered[place.index]


def slots(value: Any, found: dict[int, Tensor], *, attended: bool) -> Any:
    """Return a block argument with its tensors replaced by places, which `found` counts."""
    if isinstance(value, tuple):
        return tuple(slots(each, found, attended=attended) for each in value)
    if not isinstance(value, Tensor):
        return value
    found.setdefault(id(value), value)
    return Slot(list(found).index(id(value)), attended)


def write_rows(kept: Tensor, tensor: Tensor, rows: Tensor | None) -> None:
    """Write the rows of a tensor into a buffer; None: all but the last, which is for padding."""
    if rows is None:
        kept[: len(kept) - 1].copy_(tensor)
    else:
        kept.index_copy_(0, rows, tensor.expand(len(rows), *tensor.shape[1:]).contiguous())
