"""Resumable records: a long run writes numbered shards to a folder and can continue from them."""

import json
import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from swiftsure.files import json_checksum, locked, read_json, write_text
from swiftsure.records.exit_record import ExitRecord
from swiftsure.records.threshold_record import ThresholdRecord

__all__ = ["Shards"]

MANIFEST = "manifest.json"

Record = TypeVar("Record", ExitRecord, ThresholdRecord)


class Shards(Generic[Record]):
    """The finished shards of one run, in memory and, with a folder, on disk.

    Use it as a context manager: it locks the folder, so that two runs never mix their shards.

    Parameters
    ----------
    folder : path, optional
        Without one, shards are kept in memory only.
    kind : type
        `ExitRecord` or `ThresholdRecord`.
    identity : mapping
        What identifies the run: model, settings, a hash of the data.
    durable : bool
        Wait until each shard is on the disk. Shards that a power failure damages are noticed and
        made again, so False loses time at most.

    Attributes
    ----------
    records : dict of int to record
        Finished shards by number, starting with those of the interrupted run. Shards that were
        deleted or damaged are missing.
    saved : set of int
        Numbers of the shards that are on the disk.
    notes : dict
        Other data that a resumed run needs; see `note`.

    Raises
    ------
    ValueError
        If the folder holds shards of another run, or another process is writing to it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        kind: type[Record],
        identity: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.records: dict[int, Record] = {}
        self.saved: set[int] = set()
        self.notes: dict[str, Any] = {}
        self._kind: type[Record] = kind
        self._durable = durable
        self._identity = json.loads(json.dumps(identity))
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._stack.enter_context(locked(self.folder))
            try:
                self._open(self.folder)
            except BaseException:
                self._stack.close()
                raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Record:
        return self.records[number]

    @property
    def all(self) -> list[Record]:
        """The shards in order."""
        return [self.records[number] for number in sorted(self.records)]

    def put(self, number: int, record: Record, **notes: Any) -> None:
        """Add a finished shard and save it, after its notes."""
        self.records[number] = record  # before saving, so that a full disk does not lose it
        if notes:
            self.note(**notes)
        if self.folder is not None:
            record.save(self._file(number), durable=self._durable)
            self.saved.add(number)

    def drop_from(self, number: int) -> None:
        """Remove this shard and all after it."""
        for each in [each for each in self.records if each >= number]:
            del self.records[each]
            self.saved.discard(each)
            self._file(each).unlink(missing_ok=True)

    def note(self, **notes: Any) -> None:
        """Save data, as JSON, that a resumed run needs besides the shards."""
        self.notes |= notes
        if self.folder is not None:
            content = {"identity": self._identity, "notes": json.loads(json.dumps(self.notes))}
            whole = content | {"checksum": json_checksum(content)}
            write_text(self.folder / MANIFEST, json.dumps(whole, indent=2) + "\n")

    def _file(self, number: int) -> Path:
        if self.folder is None:
            raise ValueError("Shards without a folder have no files.")
        return self.folder / f"shard-{number:05d}.parquet"

    def _open(self, folder: Path) -> None:
        """Read the manifest and the shards of an interrupted run, or start a new manifest."""
        paths = {int(path.stem[6:]): path for path in folder.glob("shard-[0-9]*.parquet")}
        manifest = folder / MANIFEST
        if not (manifest.exists() or paths):
            self.note()
            return
        found: dict[str, Any] = {"identity": {}, "notes": {}}
        if manifest.exists():
            found = read_json(manifest, "a manifest of shards")
            if found.pop("checksum", None) != json_checksum(found):
                raise ValueError(
                    f"{manifest} is damaged: its checksum does not fit its content. Delete"
                    f" {folder} and start again."
                )
        identity, notes = found["identity"], found["notes"]
        other = [name for name, value in self._identity.items() if identity.get(name) != value]
        if other:
            raise ValueError(
                f"`shards`: {folder} holds another run, with other {', '.join(other)}: choose"
                " another folder, or delete it."
            )
        self.notes = notes
        for number, path in sorted(paths.items()):
            try:
                self.records[number] = self._kind.load(path)
                self.saved.add(number)
            except ValueError as error:
                warnings.warn(f"This shard is made again: {error}", UserWarning, stacklevel=4)
