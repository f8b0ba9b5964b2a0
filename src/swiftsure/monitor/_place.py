"""Positions in files: how far a file was read, and whether it is still the same file."""

import hashlib
import os
from dataclasses import dataclass
from typing import BinaryIO, Literal

from pydantic import Field

from swiftsure.monitor.state import Section

__all__ = ["HEAD", "START", "TAIL", "Edges", "StreamState", "compare_file", "inode_of"]

HEAD = 4096
"""Number of bytes at the start of the file that must be unchanged to resume reading."""
TAIL = 512
"""Number of bytes before the read position that must be unchanged."""


def fingerprint(data: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


class StreamState(Section):
    """How far a stream was read, and counts of its bad lines."""

    lines: int = Field(ge=0)
    offset: int = Field(ge=0)
    tail: str
    """Fingerprint of the last bytes read, to recognise the file."""
    head: str | None = None
    """Fingerprint of the first bytes read."""
    inode: int | None = None
    """The file's inode, to tell apart files whose lines are all the same."""
    unreadable: int = Field(default=0, ge=0)
    requests: int = Field(default=0, ge=0)
    odd: int = Field(default=0, ge=0)


START = StreamState(lines=0, offset=0, tail=fingerprint(b""))


@dataclass(frozen=True)
class Edges:
    """The first and last bytes that were read from a file."""

    head: bytes = b""
    tail: bytes = b""

    def and_then(self, data: bytes) -> "Edges":
        """Return the edges after reading more bytes."""
        return Edges(self.head + data[: max(0, HEAD - len(self.head))], (self.tail + data)[-TAIL:])

    @classmethod
    def of(cls, file: BinaryIO, offset: int) -> "Edges":
        """Return the edges of the first `offset` bytes of a file, and leave it at `offset`."""
        file.seek(0)
        head = file.read(min(HEAD, offset))
        file.seek(max(0, offset - TAIL))
        return cls(head, file.read(min(TAIL, offset)))

    def at(self, lines: int, offset: int, inode: int | None) -> StreamState:
        """Return the position after these bytes."""
        return StreamState(
            lines=lines,
            offset=offset,
            tail=fingerprint(self.tail),
            head=fingerprint(self.head),
            inode=inode,
        )

    @property
    def distinctive(self) -> bool:
        """Whether they hold at least two different lines, so that another file hardly matches."""
        whole = self.head.rpartition(b"\n")[0], self.tail.partition(b"\n")[2]
        return len(set(b"\n".join(whole).split(b"\n")) - {b""}) > 1


def inode_of(file: BinaryIO) -> int | None:
    """Return the inode of a file; None if it has none."""
    try:
        return os.fstat(file.fileno()).st_ino or None
    except OSError:
        return None


def compare_file(place: StreamState, file: BinaryIO) -> Literal["same", "other", "unclear"]:
    """Return whether a file is the one read before; unclear: new inode, same repeated line."""
    found = Edges.of(file, place.offset)
    length = len(found.tail) == min(TAIL, place.offset)
    if not length or fingerprint(found.tail) != place.tail:
        return "other"
    if place.head not in (None, fingerprint(found.head)):
        return "other"
    moved = place.inode not in (None, inode_of(file))
    return "unclear" if moved and place.offset and not found.distinctive else "same"
