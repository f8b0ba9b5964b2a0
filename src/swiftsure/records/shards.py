"""Resumable records: a long run writes numbered shards to a folder and can continue from them."""

import json
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from swiftsure._lib.files import (
    json_checksum,
    locked,
    read_json,
    remove_stale,
    validation_message,
    write_text,
)
from swiftsure.records import files
from swiftsure.records.exit_record import ExitRecord
from swiftsure.records.threshold_record import ThresholdRecord

__all__ = ["Shards", "check_shards"]

MANIFEST = "manifest.json"
SHARD = re.compile(r"shard-([0-9]{5,})\.parquet")

Record = TypeVar("Record", ExitRecord, ThresholdRecord)


class _Manifest(BaseModel):
    """What the manifest of a folder holds besides its checksum."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    identity: dict[str, Any]
    notes: dict[str, Any]
    shards: dict[str, str]
    """The checksum of each shard's header, by file name."""


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
        self._checksums: dict[str, str] = {}

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
        """Add a finished shard and save it, after its notes and its checksum."""
        self.records[number] = record  # before saving, so that a full disk does not lose it
        if self.folder is None:
            self.notes |= notes
            return
        file, table = self._file(number), files.packed(record)
        self._checksums[file.name] = files.checksum(table)
        self.note(**notes)
        files.write(table, file, durable=self._durable)
        self.saved.add(number)

    def drop_from(self, number: int) -> None:
        """Remove this shard and all after it."""
        for each in [each for each in self.records if each >= number]:
            del self.records[each]
            self.saved.discard(each)
            self._file(each).unlink(missing_ok=True)
            self._checksums.pop(self._file(each).name, None)

    def note(self, **notes: Any) -> None:
        """Save data, as JSON, that a resumed run needs besides the shards."""
        self.notes |= notes
        if self.folder is not None:
            content = {
                "identity": self._identity,
                "notes": json.loads(json.dumps(self.notes)),
                "shards": self._checksums,
            }
            whole = content | {"checksum": json_checksum(content)}
            write_text(self.manifest, json.dumps(whole, indent=2) + "\n")

    @property
    def manifest(self) -> Path:
        """The file that describes the run."""
        if self.folder is None:
            raise ValueError("Shards without a folder have no files.")
        return self.folder / MANIFEST

    def _file(self, number: int) -> Path:
        return self.manifest.with_name(f"shard-{number:05d}.parquet")

    def _open(self, folder: Path) -> None:
        """Read the manifest and the shards of an interrupted run, or start a new manifest."""
        remove_stale(folder)
        matches = [SHARD.fullmatch(path.name) for path in folder.iterdir()]
        numbers = sorted(int(match[1]) for match in matches if match)
        if not (self.manifest.exists() or numbers):
            self.note()
            return
        found = _Manifest(identity={}, notes={}, shards={})
        if self.manifest.exists():
            found = _read_manifest(self.manifest)
        other = [n for n, value in self._identity.items() if found.identity.get(n) != value]
        if other:
            raise ValueError(
                f"`shards`: {folder} holds another run, with other {', '.join(other)}: choose"
                " another folder, or delete it."
            )
        self.notes, self._checksums = dict(found.notes), dict(found.shards)
        for number in numbers:
            path = self._file(number)
            try:
                record = self._kind.load(path)
                if files.checksum(path) != found.shards.get(path.name):
                    raise ValueError(f"{path} is not the shard that {MANIFEST} names")
            except ValueError as error:
                warnings.warn(f"This shard is made again: {error}", UserWarning, stacklevel=4)
            else:
                self.records[number] = record
                self.saved.add(number)


def check_shards(folder: Path, paths: list[Path]) -> None:
    """Raise if these files are not the shards that a folder's manifest names, if it has one."""
    if not (folder / MANIFEST).exists():
        return
    named = _read_manifest(folder / MANIFEST).shards
    for name in sorted(set(named) - {path.name for path in paths}):
        raise ValueError(f"{folder / name} is missing, which {MANIFEST} names: resume the run.")
    for path in paths:
        if path.name not in named or files.checksum(path) != named[path.name]:
            raise ValueError(f"{path} is not a shard that {folder / MANIFEST} names.")


def _read_manifest(path: Path) -> _Manifest:
    content = read_json(path, "a manifest of shards")
    start_again = f"Delete {path.parent} and start again."
    if content.pop("checksum", None) != json_checksum(content):
        raise ValueError(f"{path} is damaged: its checksum does not fit its content. {start_again}")
    try:
        return _Manifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise ValueError(
            f"{path} is not a manifest of shards: {validation_message(error)}. {start_again}"
        ) from None
