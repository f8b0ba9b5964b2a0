"""Resumable records: a long run writes numbered shards to a folder and can continue from them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from swiftsure.files import write_text
from swiftsure.records.exit_record import ExitRecord
from swiftsure.records.threshold_record import ThresholdRecord

__all__ = ["Shards"]

Record = TypeVar("Record", ExitRecord, ThresholdRecord)


class Shards(Generic[Record]):
    """The finished shards of one run, in memory and, with a folder, on disk.

    Parameters
    ----------
    folder : path, optional
        Without one, shards are kept in memory only.
    kind : type
        `ExitRecord` or `ThresholdRecord`.
    identity : mapping
        What identifies the run: model, settings, a hash of the data.

    Attributes
    ----------
    records : list of records
        Finished shards, starting with those of the interrupted run.
    notes : dict
        Other data that a resumed run needs; see `note`.

    Raises
    ------
    ValueError
        If the folder holds shards of another run.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, kind: type[Record], identity: Mapping[str, Any]
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.records: list[Record] = []
        self.notes: dict[str, Any] = {}
        self._identity = json.loads(json.dumps(identity))
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            paths = sorted(self.folder.glob("shard-*.parquet"))
            self._claim(self.folder, resuming=bool(paths))
            self.records = [kind.load(path) for path in paths]

    def append(self, record: Record) -> None:
        """Add a finished shard and save it."""
        number = len(self.records)
        self.records.append(record)  # before saving, so that a full disk does not lose it
        if self.folder is not None:
            record.save(self.folder / f"shard-{number:05d}.parquet")

    def note(self, **notes: Any) -> None:
        """Save data, as JSON, that a resumed run needs besides the shards."""
        self.notes |= notes
        if self.folder is not None:
            content = {"identity": self._identity, "notes": self.notes}
            write_text(self.folder / "manifest.json", json.dumps(content, indent=2) + "\n")

    def _claim(self, folder: Path, *, resuming: bool) -> None:
        manifest = folder / "manifest.json"
        if not (manifest.is_file() or resuming):
            self.note()
            return
        found = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
        identity = found.get("identity", {})
        other = [name for name, value in self._identity.items() if identity.get(name) != value]
        if other:
            raise ValueError(
                f"`shards`: {folder} holds another run, with other {', '.join(other)}: choose"
                " another folder, or delete it."
            )
        self.notes = found.get("notes", {})
