"""`Batch`: inputs from a loader, with optional labels, ids and groups."""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure.torch.staged import batch_size

__all__ = [
    "Batch",
    "DataHash",
    "moved",
    "register_batch_types",
    "sample_digests",
    "without_labels",
]


class Batch(NamedTuple):
    """The parts of a batch; None for those it lacks."""

    inputs: Any
    labels: Any = None
    ids: Any = None
    groups: Any = None

    @classmethod
    def of(cls, batch: Any) -> "Batch":
        """Return a batch from a dict of parts, a tuple in their order, or inputs alone.

        In a dict without `inputs`, as a tokenizer makes it, all other entries are the inputs.
        """
        if isinstance(batch, Mapping):
            return cls(*(_parts(batch).get(name) for name in cls._fields))
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

    @property
    def size(self) -> int:
        """Number of samples."""
        return batch_size(self.inputs)

    def load(self) -> "Batch":
        """Return the batch itself; see `swiftsure.torch.ray_data.RemoteBatch`."""
        return self

    def rows(self, which: slice) -> "Batch":
        """Return some of the samples."""
        kinds = (Tensor, np.ndarray)
        inputs = pytree.tree_map_only(  # a 0-dim leaf belongs to every sample
            kinds, lambda leaf: leaf[which] if leaf.ndim else leaf, self.inputs
        )
        return Batch(inputs, *(None if part is None else part[which] for part in self[1:]))


LABELS = ("labels", "label")
ANSWERS = ("start_positions", "end_positions")


def _parts(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a batch that is a dict."""
    if "inputs" in batch:
        return dict(batch)
    named = {name: batch[name] for name in ("ids", "groups") if name in batch}
    for name in LABELS:
        if name in batch:
            named["labels"] = batch[name]
    if all(name in batch for name in ANSWERS):
        named["labels"] = torch.stack([torch.as_tensor(batch[name]) for name in ANSWERS], dim=1)
    inputs = without_labels(batch)
    inputs = {name: value for name, value in inputs.items() if name not in named}
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(inputs)):
        raise ValueError(
            "A batch that is a dict must have the key `inputs`, or tensors by the names of the"
            f" network's arguments, but has {', '.join(map(str, batch)) or 'no keys'}."
        )
    return {"inputs": inputs, **named}


def without_labels(batch: Any) -> Any:
    """Return a batch without labels, so that a network computes no loss; dicts of any kind."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: value for name, value in batch.items() if name not in (*LABELS, *ANSWERS)}


def register_batch_types() -> None:
    """Let nested structures contain the batches of tokenizers and image processors."""
    transformers = sys.modules.get("transformers")
    for name in ("BatchEncoding", "BatchFeature"):
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                lambda batch: (list(batch.values()), list(batch.keys())),
                lambda values, names: dict(zip(names, values, strict=True)),
                serialized_type_name=f"transformers.{name}",
            )


class DataHash:
    """A running hash of each part of the samples; the same however they are batched."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}

    def update(self, digests: Mapping[str, bytes]) -> None:
        """Add the samples whose digests these are."""
        for name, content in digests.items():
            self._hashes.setdefault(name, hashlib.blake2b(digest_size=DIGEST)).update(content)

    def digests(self) -> dict[str, str]:
        """Return the hash of every part so far."""
        return {name: found.hexdigest() for name, found in self._hashes.items()}


DIGEST = 16
"""Bytes of a digest."""


def sample_digests(batch: Batch) -> dict[str, bytes]:
    """Return a digest of each sample, joined, for every part of a batch.

    Samples are hashed one by one, so that workers can do it where the data are.
    """
    n, found = batch.size, {}
    for name in batch.names:
        part = getattr(batch, name)
        leaves = pytree.tree_leaves(part) if name == "inputs" else [part]
        for number, leaf in enumerate(leaves):
            key = name if len(leaves) == 1 else f"{name} ({number + 1})"
            kind, contents = _contents(leaf, n)
            start = hashlib.blake2b(kind.encode(), digest_size=DIGEST)
            digests = []
            for content in contents:
                own = start.copy()
                own.update(content)
                digests.append(own.digest())
            found[key] = b"".join(digests)
    return found


def _contents(leaf: Any, n: int) -> tuple[str, Iterable[Any]]:
    """Return the dtype and shape of one sample of a leaf, and the values of each as bytes."""
    if isinstance(leaf, Tensor):
        shape, dtype = tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")
        values = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        values = np.asarray(leaf)
        shape, dtype = values.shape, values.dtype.name
        if values.dtype.kind in "OUS":  # NumPy's dtype of text depends on the longest of a batch
            rows = values.reshape(shape[0], prod(shape[1:])).tolist() if shape else [[leaf]] * n
            texts = ["".join(f"{each!r}," for each in row) for row in rows]
            return f"text {_row_shape(shape)}", [text.encode() for text in texts]
        values = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    kind = f"{dtype} {_row_shape(shape)}"
    if not shape:  # belongs to every sample
        return kind, [values.data] * n
    width = len(values) // n if n else 0
    return kind, (values[k * width : (k + 1) * width].data for k in range(n))


def _row_shape(shape: tuple[int, ...]) -> Any:
    return list(shape[1:]) if shape else "single"


def moved(tree: Any, device: torch.device | None) -> Any:
    """Return a nested structure with its tensors on a device; unchanged for None."""
    if device is None:
        return tree
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), tree)
