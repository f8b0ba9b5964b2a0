"""RepeatedIds: finds an id that is used twice among more ids than fit into memory."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib.storage import Storage, blocks

__all__ = ["RepeatedIds"]

FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that multiplying by it mixes 64 bits without loss."""

AT_ONCE = 1000
"""Number of equal hashes that are compared in one pass."""


class RepeatedIds:
    """Ids of n samples, added in parts; `check` raises if one is used twice.

    Whole numbers are sorted. Text is sorted by a hash of 64 bits, and ids with equal hashes are
    compared.
    """

    def __init__(self, n: int, storage: Storage) -> None:
        self._keys = storage.empty((n,), np.uint64)
        self._n = 0
        self._kind = ""

    def add(self, ids: NDArray[np.generic]) -> None:
        """Add ids, whole numbers or text."""
        kind = "text" if ids.dtype.kind == "U" else str(ids.dtype)
        if self._kind not in ("", kind):
            raise TypeError(f"`ids` must have one type, but some are {self._kind}, some {kind}.")
        self._kind = kind
        self._keys[self._n : self._n + len(ids)] = _keys(ids)
        self._n += len(ids)

    def check(self, again: Callable[[], Iterable[NDArray[np.generic]]]) -> None:
        """Raise if an id was added twice; `again` gives all ids once more, to compare text."""
        keys = self._keys[: self._n]
        keys.sort()  # in place
        equal = np.concatenate(
            [
                keys[part][:-1][keys[part][1:] == keys[part][:-1]]
                for part in (slice(p.start, p.stop + 1) for p in blocks(len(keys)))
            ]
            or [keys[:0]]
        )
        if not equal.size:
            return
        if self._kind != "text":
            twice = equal[:1].astype(np.int64) if self._kind.startswith("i") else equal[:1]
            raise ValueError(_message(str(twice[0])))
        suspects = np.unique(equal)
        for first in range(0, len(suspects), AT_ONCE):
            some = suspects[first : first + AT_ONCE]
            found = np.concatenate([ids[np.isin(_keys(ids), some)] for ids in again()])
            names, counts = np.unique(found, return_counts=True)
            if (counts > 1).any():
                raise ValueError(_message(str(names[counts > 1][0])))


def _message(name: str) -> str:
    return (
        f"`ids` must be unique, but {name} is used twice: a sample counted twice voids the"
        " guarantee."
    )


def _keys(ids: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Return whole numbers as they are, and a hash of text."""
    if ids.dtype.kind != "U":
        return ids.astype(np.uint64)
    letters = np.ascontiguousarray(ids).view(np.uint32).reshape(len(ids), -1)
    found = np.zeros(len(ids), np.uint64)
    for column in letters.T:
        # Trailing zeros pad shorter texts, which must have the same hash in a wider array.
        mixed = (found ^ column) * np.uint64(FACTOR)
        found = np.where(column > 0, mixed ^ (mixed >> np.uint64(29)), found)
    return found
