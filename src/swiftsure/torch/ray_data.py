"""`dataset_batches`: batches of a Ray Dataset, as references that workers load.

Ray Data reads and prepares the blocks on the cluster. The driver sees only their sizes, so samples
do not pass through it.
"""

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swiftsure.torch.batches import Batch

__all__ = ["RemoteBatch", "dataset_batches", "is_ray_dataset"]

Array = NDArray[Any]


def is_ray_dataset(given: Any) -> bool:
    """Whether an object is a Ray Dataset; does not import Ray."""
    module = sys.modules.get("ray.data")
    return module is not None and isinstance(given, module.Dataset)


def dataset_batches(dataset: Any, size: int) -> Generator["RemoteBatch", None, None]:
    """Yield the rows of a Ray Dataset in their order, `size` at a time; only the last has fewer."""
    with _in_order(dataset.context):
        parts: list[_Part] = []
        n = 0
        for bundle in dataset.iter_internal_ref_bundles():
            for entry in bundle.blocks:
                start, end = 0, _n_rows(entry)
                while start < end:
                    taken = min(end - start, size - n)
                    parts.append(_Part(entry.ref, start, start + taken))
                    start, n = start + taken, n + taken
                    if n == size:
                        yield RemoteBatch(tuple(parts))
                        parts, n = [], 0
        if parts:
            yield RemoteBatch(tuple(parts))


@dataclass(frozen=True)
class _Part:
    """Some rows of a block."""

    block: Any
    start: int
    stop: int


@dataclass(frozen=True)
class RemoteBatch:
    """A batch of rows of a Ray Dataset that are somewhere in the cluster."""

    parts: tuple[_Part, ...]

    @property
    def size(self) -> int:
        """Number of samples."""
        return sum(part.stop - part.start for part in self.parts)

    def rows(self, which: slice) -> "RemoteBatch":
        """Return some of the samples."""
        start, stop, _ = which.indices(self.size)
        kept, before = [], 0
        for part in self.parts:
            first = max(part.start, part.start + start - before)
            last = min(part.stop, part.start + stop - before)
            if first < last:
                kept.append(_Part(part.block, first, last))
            before += part.stop - part.start
        return RemoteBatch(tuple(kept))

    def load(self) -> Batch:
        """Return the samples, with the columns as tensors where they are numbers."""
        import ray
        from ray.data.block import BlockAccessor

        tables = []
        blocks = ray.get([part.block for part in self.parts])
        for block, part in zip(blocks, self.parts, strict=True):
            rows = BlockAccessor.for_block(block).slice(part.start, part.stop)
            tables.append(BlockAccessor.for_block(rows).to_batch_format("numpy"))
        return Batch.of({name: _column(name, tables) for name in tables[0]})


def _column(name: str, tables: list[dict[str, Array]]) -> Any:
    """Return a column as a tensor; ids, groups and text stay arrays."""
    columns = [np.asarray(table[name]) for table in tables]
    ragged = any(each.dtype == object and isinstance(each[0], np.ndarray) for each in columns)
    rows = [row for each in columns for row in each] if ragged else columns
    shapes = {row.shape if ragged else row.shape[1:] for row in rows}
    if len(shapes) > 1:
        raise ValueError(
            f"The rows of column {name!r} must have one shape, but have"
            f" {', '.join(map(str, sorted(shapes)[:3]))}: resize or pad them with"
            " `dataset.map_batches`."
        )
    values = np.stack(rows) if ragged else np.concatenate(rows)
    if name in ("ids", "groups"):
        return values
    if values.dtype.kind not in "biuf":
        return values
    # A copy: blocks are shared and cannot be written to, and a model may overwrite its inputs.
    return torch.from_numpy(np.array(values))


def _n_rows(entry: Any) -> int:
    n = entry.metadata.num_rows
    if n is None:
        raise ValueError("`loader`: Ray does not know how many rows a block of this Dataset has.")
    return int(n)


@contextmanager
def _in_order(context: Any) -> Iterator[None]:
    """Let a Dataset yield its rows in the same order each time, without a progress bar."""
    options = context.execution_options
    before = options.preserve_order, context.enable_progress_bars
    options.preserve_order, context.enable_progress_bars = True, False
    try:
        yield
    finally:
        options.preserve_order, context.enable_progress_bars = before
