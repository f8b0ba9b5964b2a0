"""Journal: keeps what was read from a pipe since the last save, so a killed run loses nothing."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from swiftsure._lib.files import sync

__all__ = ["Journal"]


class Journal:
    """An append-only file beside a state file, with the bytes read since the state was saved.

    The first line names the state by its checksum. A journal of another state is ignored: the
    process died after it wrote the new state and before it started a new journal.

    Parameters
    ----------
    state : path
        The state file.
    promise : str
        What is watched; a journal of another promise is ignored too.
    """

    def __init__(self, state: str | os.PathLike[str], promise: str) -> None:
        self.path = Path(f"{os.fspath(state)}.journal")
        self._promise = hashlib.sha256(promise.encode()).hexdigest()[:16]
        self._file: BinaryIO | None = None

    def read(self, checksum: str | None) -> bytes:
        """Return the bytes read after the state with this checksum; None means no state yet."""
        if not self.path.is_file():
            return b""
        head, _, data = self.path.read_bytes().partition(b"\n")
        return data if head == self._head(checksum) else b""

    def start(self, checksum: str | None, data: bytes = b"") -> None:
        """Start a new journal for the state with this checksum."""
        self.close()
        if self.path.exists() and not self.path.is_file():
            raise OSError(f"{self.path} must be a file, but is something else.")
        self._file = self.path.open("wb")
        self.append(self._head(checksum) + b"\n" + data)
        sync(self.path.parent)

    def append(self, data: bytes) -> None:
        """Append bytes and wait until they are on disk."""
        if self._file is None:
            raise ValueError("A journal must be started before data can be added.")
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file but keep it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def delete(self) -> None:
        """Remove the file; the state now holds everything."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _head(self, checksum: str | None) -> bytes:
        return f"{checksum or 'new'} {self._promise}".encode()
