"""Journal: what was read from a pipe since the state was saved, so that a killed run loses none."""

import os
from pathlib import Path
from typing import BinaryIO

__all__ = ["Journal"]


class Journal:
    """An append-only file beside a state file; it holds the bytes read since that was written.

    The first line names the state by its checksum. A journal of another state is ignored: the
    process died after it wrote the new state and before it started a new journal.

    Parameters
    ----------
    state : path
        The state file.
    """

    def __init__(self, state: str | os.PathLike[str]) -> None:
        self.path = Path(f"{os.fspath(state)}.journal")
        self._file: BinaryIO | None = None

    def read(self, checksum: str | None) -> bytes:
        """Return what follows the state with this checksum; None if there is no state yet."""
        if not self.path.is_file():
            return b""
        head, _, data = self.path.read_bytes().partition(b"\n")
        return data if head == _head(checksum) else b""

    def start(self, checksum: str | None, data: bytes = b"") -> None:
        """Start anew, after the state with this checksum."""
        self.close()
        self._file = self.path.open("wb")
        self.append(_head(checksum) + b"\n" + data)

    def append(self, data: bytes) -> None:
        """Add what was read, and wait until it is on the disk."""
        if self._file is None:
            raise ValueError("A journal must be started before data can be added.")
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, and keep it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def delete(self) -> None:
        """Remove the file: the state holds everything."""
        self.close()
        self.path.unlink(missing_ok=True)


def _head(checksum: str | None) -> bytes:
    return b"new" if checksum is None else checksum.encode()
