"""`Batch`: inputs from a loader, with optional labels, ids and groups."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Batch", "moved"]


class Batch(NamedTuple):
    """The parts of a batch; None for those it lacks."""

    inputs: Any
    labels: Any = None
    ids: Any = None
    groups: Any = None

    @classmethod
    def of(cls, batch: Any) -> "Batch":
        """Return a batch from a dict of parts, a tuple in their order, or inputs alone."""
        if isinstance(batch, dict):
            if "inputs" not in batch:
                raise ValueError(
                    "A batch that is a dict must have the key `inputs`, but has"
                    f" {', '.join(map(str, batch)) or 'no keys'}."
                )
            return cls(*(batch.get(name) for name in cls._fields))
        if isinstance(batch, tuple | list):
            if len(batch) not in (1, 2, 3):
                raise ValueError(
                    "A batch must be (inputs, labels) or (inputs, labels, ids), but has"
                    f" {len(batch)} parts; pass a dict for anything else."
                )
            return cls(*batch)
        return cls(batch)

    @property
    def names(self) -> list[str]:
        """Names of the parts that the batch has."""
        return [name for name, part in zip(self._fields, self, strict=True) if part is not None]

    def after(self, first: int) -> "Batch":
        """Return the batch without its first `first` samples."""
        kinds = (Tensor, np.ndarray)
        inputs = pytree.tree_map_only(kinds, lambda leaf: leaf[first:], self.inputs)
        return Batch(inputs, *(None if part is None else part[first:] for part in self[1:]))


def moved(tree: Any, device: torch.device | None) -> Any:
    """Return a nested structure with its tensors on a device; unchanged for None."""
    if device is None:
        return tree
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), tree)
