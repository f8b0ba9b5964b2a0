"""Atomic file writes, and reading npz files without pickles."""

import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["atomic_write", "npz", "writable", "write_text"]


def writable(path: str | os.PathLike[str]) -> Path:
    """Return `path` if its folder exists and it is not a folder itself."""
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"`path` must be in an existing folder, but {target.parent} is not one.")
    if target.is_dir():
        raise ValueError(f"`path` must be a file, but {target} is a folder.")
    return target


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces `path` if no exception is raised."""
    target = writable(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp creates files readable by the owner only
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def npz(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open an npz file of plain arrays; raise ValueError if it cannot be read."""
    if not Path(path).is_file():
        raise ValueError(f"`path` must be an existing file, but {path} is not one.")
    try:
        with Path(path).open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise zipfile.BadZipFile("it is no archive, or is cut short")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                yield arrays
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a readable npz file ({error}).") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
