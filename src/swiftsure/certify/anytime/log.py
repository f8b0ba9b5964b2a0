"""GrowthLog: an append-only file of entries, for a state that only grows and survives kill -9."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from swiftsure._lib.files import atomic_write, locked, sync, writable

__all__ = ["Entry", "GrowthLog"]

MAGIC = b"swiftsure-calibration 1\n"
"""The first line of the file: what it is, and the version of its layout."""


class Entry(NamedTuple):
    """One entry: facts, which are JSON, and bytes."""

    facts: dict[str, Any]
    data: bytes


class GrowthLog:
    """A file of entries, each with a checksum, that are only ever added.

    An entry counts once all of it is on the disk. One that a killed process left incomplete at the
    end of the file is ignored, and overwritten by the next. Damage anywhere else is an error.

    Parameters
    ----------
    path : path
        The file; the first entry creates it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = writable(path).resolve()
        self._end = 0
        self._size = 0

    def read(self) -> list[Entry]:
        """Return all entries; none if there is no file yet."""
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        if not content.startswith(MAGIC):
            raise ValueError(f"{self.path} is not the state of a Swiftsure calibration.")
        entries, position = [], len(MAGIC)
        while position < len(content):
            found = self._entry(content, position)
            if found is None:
                break
            entry, position = found
            entries.append(entry)
        self._end, self._size = position, len(content)
        return entries

    def _entry(self, content: bytes, start: int) -> tuple[Entry, int] | None:
        """Return the entry at a position and where it ends; None if the file ends before it."""
        line = content.find(b"\n", start)
        if line < 0:
            return None
        try:
            head = json.loads(content[start:line])
            length, digest, facts = int(head["bytes"]), str(head["sha256"]), dict(head["facts"])
            whole = head.pop("head") == _digest(head, b"")
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._damaged(start) from None
        end = line + 1 + length
        if whole and end > len(content):  # the length is as it was written, so the rest never was
            return None
        if not whole or length < 0 or digest != _digest(facts, content[line + 1 : end]):
            raise self._damaged(start)
        return Entry(facts, content[line + 1 : end]), end

    def append(self, facts: Mapping[str, Any], data: bytes) -> None:
        """Add an entry and wait until it is on the disk.

        Raises
        ------
        ValueError
            If another process added entries meanwhile.
        """
        head = {"bytes": len(data), "sha256": _digest(facts, data), "facts": dict(facts)}
        block = json.dumps(head | {"head": _digest(head, b"")}).encode() + b"\n" + data
        with locked(self.path.with_name(f".{self.path.name}.lock"), wait=10.0):
            size = self.path.stat().st_size if self.path.exists() else 0
            if size != self._size:
                raise ValueError(
                    f"{self.path} was changed by another process. Nothing was added; start again"
                    " from the file, and add the samples then."
                )
            if self._end == 0:
                with atomic_write(self.path) as temporary:
                    temporary.write_bytes(MAGIC + block)
                self._end = len(MAGIC)
            else:
                with Path(self.path).open("r+b") as file:
                    file.seek(self._end)
                    file.truncate()
                    file.write(block)
                    file.flush()
                    os.fsync(file.fileno())
                sync(self.path.parent)
            self._end += len(block)
            self._size = self._end

    def _damaged(self, position: int) -> ValueError:
        return ValueError(
            f"{self.path} is a damaged calibration state, from byte {position:,} on, and was left"
            " as it is: restore a copy, or start again with another file and new samples."
        )


def _digest(facts: Mapping[str, Any], data: bytes) -> str:
    found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    found.update(data)
    return found.hexdigest()
