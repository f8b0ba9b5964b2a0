"""Places in files: how far one was read, and whether it is still the same file."""

import hashlib
import os
from dataclasses import dataclass
from typing import BinaryIO, Literal

from pydantic import Field

from swiftsure.monitor.state import Section

__all__ = ["HEAD", "START", "TAIL", "Edges", "StreamState", "compared", "inode_of"]

HEAD = 4096
"""How many of the first bytes read must still be there when reading goes on."""
TAIL = 512
"""How many bytes before the place reached must still be there."""


def fingerprint(data: bytes) -> str:
    """Return what tells some bytes from others."""
    return hashlib.sha256(data).hexdigest()


class StreamState(Section):
    """How far a stream was read, and what was odd about it."""

    lines: int = Field(ge=0)
    offset: int = Field(ge=0)
    tail: str
    """Fingerprint of the last bytes read, to know the file again."""
    head: str | None = None
    """Of the first ones."""
    inode: int | None = None
    """The file's number on its disk, for files whose lines are all the same."""
    unreadable: int = Field(default=0, ge=0)
    requests: int = Field(default=0, ge=0)
    odd: int = Field(default=0, ge=0)


START = StreamState(lines=0, offset=0, tail=fingerprint(b""))


@dataclass(frozen=True)
class Edges:
    """The first and the last bytes that were read of a file."""

    head: bytes = b""
    tail: bytes = b""

    def and_then(self, data: bytes) -> "Edges":
        """Return the edges after some more bytes."""
        return Edges(self.head + data[: max(0, HEAD - len(self.head))], (self.tail + data)[-TAIL:])

    @classmethod
    def of(cls, file: BinaryIO, offset: int) -> "Edges":
        """Read the edges of the first bytes of a file, and stay behind these."""
        file.seek(0)
        head = file.read(min(HEAD, offset))
        file.seek(max(0, offset - TAIL))
        return cls(head, file.read(min(TAIL, offset)))

    def at(self, lines: int, offset: int, inode: int | None) -> StreamState:
        """Return the place after these bytes."""
        return StreamState(
            lines=lines,
            offset=offset,
            tail=fingerprint(self.tail),
            head=fingerprint(self.head),
            inode=inode,
        )

    @property
    def telling(self) -> bool:
        """Whether two files would hardly have them in common by chance."""
        whole = self.head.rpartition(b"\n")[0], self.tail.partition(b"\n")[2]
        return len(set(b"\n".join(whole).split(b"\n")) - {b""}) > 1


def inode_of(file: BinaryIO) -> int | None:
    """Return the number of a file on its disk; None if it has none."""
    try:
        return os.fstat(file.fileno()).st_ino or None
    except OSError:
        return None


def compared(place: StreamState, file: BinaryIO) -> Literal["same", "other", "unclear"]:
    """Say whether a place is in this file; unclear: a new file, of the same few lines."""
    found = Edges.of(file, place.offset)
    length = len(found.tail) == min(TAIL, place.offset)
    if not length or fingerprint(found.tail) != place.tail:
        return "other"
    if place.head not in (None, fingerprint(found.head)):
        return "other"
    moved = place.inode not in (None, inode_of(file))
    return "unclear" if moved and place.offset and not found.telling else "same"
