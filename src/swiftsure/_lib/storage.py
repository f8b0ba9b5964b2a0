"""Storage of large arrays: in memory, or in temporary files that the operating system caches.

Everything that is computed from a `RiskCurve` is the same code for both. Only arrays with one row
per sample are made through a storage, so that with `Scratch` they need no memory of their own.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MEMORY", "Scratch", "Storage", "blocks"]

Array = NDArray[Any]
Rows = NDArray[np.int64]

BLOCK_BYTES = 1 << 25
"""Size of the blocks in which large arrays are processed."""


def blocks(n: int, row_bytes: int = 8) -> Iterator[slice]:
    """Yield slices that cover n rows in order, each of about `BLOCK_BYTES`."""
    size = max(1, BLOCK_BYTES // max(1, row_bytes))
    for first in range(0, n, size):
        yield slice(first, min(n, first + size))


class Storage:
    """Arrays in memory, each computed at once."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array."""
        return np.empty(shape, dtype)

    def mapped(self, function: Callable[..., Array], *arrays: Array) -> Array:
        """Return a function of arrays, whose result has a row for each of their rows.

        The rows of the result must depend on the same rows of the arrays only.
        """
        return function(*arrays)

    def arange(self, n: int) -> Rows:
        """Return 0 … n − 1."""
        return np.arange(n)

    def permutation(self, n: int, rng: np.random.Generator) -> Rows:
        """Return 0 … n − 1 in a random order."""
        return rng.permutation(n)

    def taken(self, order: Rows, *tables: Array) -> tuple[Array, ...]:
        """Return the rows of each table in another order, which must be a permutation."""
        return tuple(table.take(order, axis=0) for table in tables)  # faster than indexing


class Scratch(Storage):
    """Arrays in temporary files, processed in blocks.

    A file has no name, where the operating system allows that, and is gone with its array.

    Parameters
    ----------
    folder : path, optional
        Where the files are made; by default the operating system's folder for temporary files. It
        should be on a disk: some systems keep /tmp in memory.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = folder

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array in a file, with undefined content."""
        if 0 in shape:  # an empty file cannot be mapped
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            return np.asarray(np.memmap(file, dtype, "w+", shape=shape))

    def mapped(self, function: Callable[..., Array], *arrays: Array) -> Array:
        """Return a function of arrays, computed block by block."""
        n = len(arrays[0])
        out: Array | None = None
        for part in blocks(n, max(array[:1].nbytes for array in arrays)):
            found = function(*(array[part] for array in arrays))
            if out is None:
                out = self.empty((n, *found.shape[1:]), found.dtype)
            out[part] = found
        return function(*arrays) if out is None else out

    def arange(self, n: int) -> Rows:
        """Return 0 … n − 1."""
        out = self.empty((n,), np.int64)
        for part in blocks(n):
            out[part] = np.arange(part.start, part.stop)
        return out

    def permutation(self, n: int, rng: np.random.Generator) -> Rows:
        """Return 0 … n − 1 in a random order, the same as in memory."""
        out = self.arange(n)
        rng.shuffle(out)  # what `rng.permutation` does to its own array
        return out

    def taken(self, order: Rows, *tables: Array) -> tuple[Array, ...]:
        """Return the rows of each table in another order, which must be a permutation.

        Random access to a file is slow unless all of it is cached. So rows are written, in the
        order in which they are read, to the block that they belong to; then each block is sorted.
        """
        position = self.empty(order.shape, np.int64)
        for part in blocks(len(order)):
            position[order[part]] = np.arange(part.start, part.stop)
        return tuple(self._moved(table, position) for table in tables)

    def _moved(self, table: Array, position: Rows) -> Array:
        """Return the table whose row `position[i]` is row i of this one."""
        n = len(table)
        out = self.empty(table.shape, table.dtype)
        places = self.empty((n,), np.int64)  # of the rows in `out`, until they are sorted
        parts = list(blocks(n, table[:1].nbytes))
        size = parts[0].stop if parts else 1
        free = np.asarray([part.start for part in parts])  # the first free row of each block
        for part in parts:
            target = position[part] // size
            sorted_rows = np.argsort(target, kind="stable")
            counts = np.bincount(target, minlength=len(parts))
            rows, goals = table[part][sorted_rows], position[part][sorted_rows]
            first = 0
            for block in np.flatnonzero(counts).tolist():
                last = first + counts[block]
                there = slice(free[block], free[block] + counts[block])
                out[there], places[there] = rows[first:last], goals[first:last]
                free[block] += counts[block]
                first = last
        for part in parts:
            ordered = np.empty_like(out[part])
            ordered[places[part] - part.start] = out[part]
            out[part] = ordered
        return out


MEMORY = Storage()
"""The storage of everything that was not opened from a folder."""
