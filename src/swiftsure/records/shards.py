"""Records in pieces: a folder that a long run writes to, and goes on from after a stop."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.files import write_text
from swiftsure.progress import steps
from swiftsure.records.threshold_record import ThresholdRecord

__all__ = ["Shards", "joined"]


class Shards:
    """A folder of records of one run, or none.

    Parameters
    ----------
    folder : path, optional
        Without, every piece is made and none is kept.
    identity : mapping
        What makes it this run; a folder of another one is refused.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            _claim(self.folder, json.loads(json.dumps(identity)))

    def piece(self, number: int, make: Callable[[], ThresholdRecord]) -> ThresholdRecord:
        """Return a piece of the record, read where it is there, and made where it is not."""
        if self.folder is None:
            return make()
        path = self.folder / f"shard-{number:05d}.parquet"
        if path.is_file():
            return ThresholdRecord.load(path)
        made = make()
        made.save(path)
        return made

    def record(
        self,
        n: int,
        size: int,
        make: Callable[[slice], ThresholdRecord],
        progress: bool | None = None,
    ) -> ThresholdRecord:
        """Return the record of n samples, made `size` at a time, with a progress bar."""
        parts = []
        with steps("sweeping", n, progress) as advance:
            for number, first in enumerate(range(0, n, checks.count("shard_size", size))):
                rows = slice(first, min(first + size, n))
                parts.append(self.piece(number, partial(make, rows)))
                for _ in range(parts[-1].n):
                    advance()
        return joined(parts)


def _claim(folder: Path, identity: dict[str, Any]) -> None:
    manifest = folder / "sweep.json"
    if not manifest.is_file():
        write_text(manifest, json.dumps(identity, indent=2) + "\n")
        return
    found = json.loads(manifest.read_text(encoding="utf-8"))
    other = [name for name in identity if found.get(name) != identity[name]]
    if other:
        raise ValueError(
            f"`shards`: {folder} holds another run, with other {', '.join(other)}: choose another"
            " folder, or delete it."
        )


def joined(parts: Sequence[ThresholdRecord]) -> ThresholdRecord:
    """Put the records of all pieces together; a cost that is one for all samples stays so."""
    first = parts[0]

    def whole(name: str) -> dict[str, NDArray[Any]]:
        tables = [getattr(part, name) for part in parts]
        return {
            key: values if values.ndim < 2 else np.concatenate([table[key] for table in tables])
            for key, values in tables[0].items()
        }

    groups = [part.groups for part in parts if part.groups is not None]
    return replace(
        first,
        losses=whole("losses"),
        inconsistencies=whole("inconsistencies"),
        costs=whole("costs"),
        ids=np.concatenate([part.ids for part in parts]),
        groups=np.concatenate(groups) if groups else None,
    )
