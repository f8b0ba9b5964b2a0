"""What a stage saves for later ones: the tensors of samples, and the structures around them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from swiftsure.torch.module_calls import Key
from swiftsure.torch.staged import flattened

__all__ = ["SHARED", "DataFlow", "Form", "Rest", "Template", "Unused"]


class Row(NamedTuple):
    """The place of a tensor in the state; a nested one, of several lengths, is kept padded."""

    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axis: int = 0
    nested: bool = False

    def filled(self, rows: Sequence[Tensor]) -> Tensor:
        given = rows[self.place]
        if not self.nested:
            return given.movedim(0, self.axis) if self.axis else given
        present = torch.arange(given.shape[1], device=given.device) < rows[self.place + 1][:, None]
        return torch._nested_tensor_from_mask(given, present)


class Unused(NamedTuple):
    """A tensor whose values do not matter; its shape may.

    It is filled with NaN, so that a batch for which the values do matter, unlike for the example,
    gives NaN instead of a wrong answer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axis: int = 0

    def filled(self, n: int) -> Tensor:
        """Return a tensor of that shape for n samples."""
        shape = (*self.shape[: self.axis], n, *self.shape[self.axis :])
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)


class Template(NamedTuple):
    """A nested structure without the tensors that have one row per sample."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    alone: bool
    """Whether the structure is a single value."""

    def filled(self, rows: Sequence[Tensor], n: int, blanks: dict[Unused, Tensor]) -> Any:
        """Return the structure with its tensors; `blanks` are those made so far for the rest."""
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, Row):
                leaves.append(leaf.filled(rows))
            elif isinstance(leaf, Unused):
                blank = blanks.get(leaf)
                if blank is None:
                    blank = blanks[leaf] = leaf.filled(n)
                leaves.append(blank)
            else:
                leaves.append(leaf)
        return leaves[0] if self.alone else pytree.tree_unflatten(leaves, self.spec)

    def reduced(
        self, rows: Sequence[Tensor], needed: Sequence[bool]
    ) -> "tuple[tuple[Tensor, ...], Template]":
        """Return what is still needed of the tensors, and the template for it."""
        if not rows or len(needed) != len(self.leaves):
            return tuple(rows), self
        kept: list[Tensor] = []
        leaves = []
        for leaf, wanted in zip(self.leaves, needed, strict=True):
            if not isinstance(leaf, Row):
                leaves.append(leaf)
            elif wanted or leaf.nested or not leaf.dtype.is_floating_point:
                leaves.append(leaf._replace(place=len(kept)))
                kept += rows[leaf.place : leaf.place + 1 + leaf.nested]
            else:
                leaves.append(Unused(*leaf[1:5]))
        return tuple(kept), self._replace(leaves=tuple(leaves))


class Rest:
    """The part of a state that all its samples share; equal if such states can be joined."""

    def __init__(self, templates: dict[Key, Template]) -> None:
        self.templates = templates

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rest) or list(self.templates) != list(other.templates):
            return False
        pairs = zip(self.templates.values(), other.templates.values(), strict=True)
        return all(
            one.spec == two.spec and all(map(_same, one.leaves, two.leaves)) for one, two in pairs
        )

    __hash__ = None  # type: ignore[assignment]


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one is two or torch.equal(one, two)
    return type(one) is type(two) and bool(one == two)


SHARED = -1
"""The axis of samples of a tensor that has none."""


@dataclass(frozen=True)
class Form:
    """What the example showed of a value: its structure, and the axis of samples of each tensor.

    The axis is `SHARED` for tensors that all samples share, and None where there was no tensor.
    """

    spec: pytree.TreeSpec
    axes: tuple[int | None, ...]
    odd: tuple[bool, ...] = ()
    """Which tensors depend on the number of samples in another way."""

    def __reduce__(self) -> Any:
        """Pickle an empty structure: a TreeSpec is not made for it."""
        empty = pytree.tree_unflatten([None] * len(self.axes), self.spec)
        return _form_like, (empty, self.axes, self.odd)

    @classmethod
    def of(cls, two: Any, three: Any) -> "Form":
        """Compare the values of batches of two and three samples."""
        leaves, spec = pytree.tree_flatten(three)
        others = pytree.tree_leaves(two)
        if len(others) != len(leaves):
            return cls(spec, (None,) * len(leaves), (False,) * len(leaves))
        axes = tuple(map(_sample_axis, others, leaves))
        odd = tuple(
            axis == SHARED and a.shape != b.shape
            for axis, a, b in zip(axes, others, leaves, strict=True)
        )
        return cls(spec, axes, odd)

    def packed(
        self, tree: Any, needed: Sequence[bool], n: int
    ) -> tuple[tuple[Tensor, ...], Template]:
        """Return the tensors with one row per sample, batch first, and the template for the rest.

        A value of another structure than the example's is kept whole, and a tensor where the
        example had none has one row per sample if it has as many rows.
        """
        leaves, spec = flattened(tree)
        known = spec == self.spec
        rows: list[Tensor] = []
        places: list[Any] = []
        for place, leaf in enumerate(leaves):
            axis = self.axes[place] if known else None
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or axis == SHARED:
                places.append(leaf)
            elif leaf.is_nested:
                places.append(Row(len(rows), (), leaf.dtype, leaf.device, nested=True))
                lengths = leaf._nested_tensor_size()[:, 0].to(leaf.device)
                rows += [leaf.to_padded_tensor(0.0), lengths]
            elif axis is None and leaf.shape[0] != n:
                places.append(leaf)
            else:
                row = leaf.movedim(axis, 0) if axis else leaf
                form = (tuple(row.shape[1:]), leaf.dtype, leaf.device, axis or 0)
                if axis is not None and not needed[place] and leaf.is_floating_point():
                    places.append(Unused(*form))
                else:
                    places.append(Row(len(rows), *form))
                    rows.append(row)
        return tuple(rows), Template(tuple(places), spec, spec.is_leaf())


def _form_like(empty: Any, axes: tuple[int | None, ...], odd: tuple[bool, ...]) -> Form:
    return Form(pytree.tree_structure(empty), axes, odd)


def _sample_axis(two: Any, three: Any) -> int | None:
    if not isinstance(two, Tensor) or not isinstance(three, Tensor):
        return None
    if two.is_nested or three.is_nested:
        return 0
    sizes = zip(two.shape, three.shape, strict=False)
    return next((axis for axis, pair in enumerate(sizes) if pair == (2, 3)), SHARED)


class DataFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which tensors are computed from which sources, by the memory that they share."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._labels: dict[int, frozenset[Any]] = {}
        self._read: frozenset[Any] = frozenset()
        self._alive: list[Any] = []  # so that no memory is used twice

    def add_source(self, tensor: Tensor, label: Any) -> None:
        """Follow a tensor."""
        self._alive.append(tensor)
        self._labels[_memory(tensor)] = frozenset([label])

    def sources_of(self, tree: Any) -> frozenset[Any]:
        """Return the sources of some tensors, and of numbers that were read."""
        return self._read | self._union(pytree.tree_leaves(tree))

    def _union(self, leaves: Iterable[Any]) -> frozenset[Any]:
        found = (
            self._labels.get(_memory(leaf), frozenset())
            for leaf in leaves
            if isinstance(leaf, Tensor)
        )
        return reduce(frozenset.union, found, frozenset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = pytree.tree_leaves((args, kwargs))
        labels = self._union(given)
        if labels:
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            if not made:
                self._read |= labels
            if func._schema.is_mutable:
                made += [leaf for leaf in given if isinstance(leaf, Tensor)]
            for tensor in made:
                where = _memory(tensor)
                self._labels[where] = self._labels.get(where, frozenset()) | labels
        self._alive.append(result)
        return result


def _memory(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place
