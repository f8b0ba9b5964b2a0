"""Writing files whole or not at all, and reading npz files without pickles."""

import glob
import os
import shutil
import stat
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

if sys.platform != "win32":
    import fcntl

__all__ = ["STDOUT", "atomic_write", "npz", "writable", "write_text"]

STDOUT = Path("-")
"""The path that means standard output."""

STALE_AFTER = 60.0
"""Age in seconds after which a temporary file that no process holds is removed."""


def writable(path: str | os.PathLike[str]) -> Path:
    """Return `path` if it can be written to: its folder exists and accepts files.

    Call it before long work, so that the work is not lost at the end.
    """
    target = Path(path)
    if target == STDOUT:
        return target
    if target.is_dir():
        raise ValueError(f"`path` must be a file, but {target} is a folder.")
    if _is_special(target):
        return target
    folder = target.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"`path` must be in an existing folder, but {folder} is not one.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"`path` must be in a folder that can be written to, but {folder} is not.")
    return target


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces `path` if no exception is raised.

    A symbolic link stays and its target is replaced. A pipe, a device or standard output ("-") is
    not replaced: what was written is copied to it at the end. Temporary files of processes that
    died are removed.

    Parameters
    ----------
    path : path
    durable : bool
        Wait until the file and its name are on the disk, so that it survives a power failure.
    """
    given = writable(path)
    if given == STDOUT or _is_special(given):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder) / given.name
            temporary.touch()
            yield temporary
            with temporary.open("rb") as source, _open_special(given) as sink:
                shutil.copyfileobj(source, sink)
        return
    target = given.resolve()
    _remove_stale(target)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    temporary = Path(name)
    try:
        if sys.platform != "win32":
            with suppress(OSError):  # not every file system has locks
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary
        temporary.chmod(_mode(target))
        if durable:
            _sync(temporary)
        temporary.replace(target)
        if durable:
            _sync(target.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(error.errno, f"{target} could not be written: {reason}") from error
        raise
    finally:
        os.close(handle)


def write_text(path: str | os.PathLike[str], text: str, *, durable: bool = True) -> None:
    """Write a text file, atomically."""
    with atomic_write(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def npz(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open an npz file of plain arrays; raise ValueError if it cannot be read."""
    if not Path(path).is_file():
        raise ValueError(f"`path` must be an existing file, but {path} is not one.")
    try:
        with Path(path).open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise zipfile.BadZipFile("it is not an archive, or is cut short")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                yield arrays
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a readable npz file ({error}).") from None


def _is_special(path: Path) -> bool:
    """Return whether the path exists and leads to a pipe, device or socket, or to an open file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    # /dev/stdout may lead to a regular file, which must not be replaced while it is open.
    return not stat.S_ISREG(mode) or path.absolute().parts[1:2] in [("dev",), ("proc",)]


def _open_special(path: Path) -> BinaryIO:
    """Open standard output, a pipe or a device for writing."""
    if path == STDOUT or path.absolute() in (Path("/dev/stdout"), Path("/dev/fd/1")):
        sys.stdout.flush()
        return os.fdopen(os.dup(1), "wb")
    return path.open("wb")


def _mode(target: Path) -> int:
    """Return the permissions of the file, or those of any new file (mkstemp's are stricter)."""
    with suppress(OSError):
        return stat.S_IMODE(target.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # not every folder can sync
            os.fsync(handle)
    finally:
        os.close(handle)


def _remove_stale(target: Path) -> None:
    """Remove temporary files for `target` that a killed process left behind."""
    if sys.platform == "win32":
        return
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime < STALE_AFTER:
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its writer lives
                path.unlink()
