"""Records in pieces: a folder that a long run writes to, and goes on from after a stop."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.files import write_text
from swiftsure.records import ThresholdRecord

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

    def __init__(self, folder: Path | None, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _claim(folder, json.loads(json.dumps(identity)))

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


def joined(parts: list[ThresholdRecord]) -> ThresholdRecord:
    """Put the records of all pieces together."""

    def whole(name: str) -> dict[str, NDArray[Any]]:
        tables = [getattr(part, name) for part in parts]
        return {key: np.concatenate([table[key] for table in tables]) for key in tables[0]}

    return replace(
        parts[0],
        inconsistencies=whole("inconsistencies"),
        costs=whole("costs"),
        ids=np.concatenate([part.ids for part in parts]),
    )
