"""Writing files whole or not at all, and reading npz files without pickles."""

import glob
import hashlib
import json
import math
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "STDOUT",
    "LockedError",
    "NotJSONError",
    "TooLargeError",
    "atomic_write",
    "is_open_at",
    "json_checksum",
    "locked",
    "max_unpacked",
    "npz",
    "read_json",
    "remove_stale",
    "shortened",
    "sync",
    "validation_message",
    "writable",
    "write_text",
]

STDOUT = Path("-")
"""The path that means standard output."""

READERS = {
    "swiftsure-policy": "one policy: `swiftsure.Policy.load` reads it.",
    "swiftsure-sliced-policy": (
        "a policy for each slice: `swiftsure.SlicedPolicy.load` reads it, and its [name] is the"
        " policy of a slice, which can be saved by itself."
    ),
}
"""What reads a JSON file of ours that is given for another."""

MAX_UNPACKED = 1 << 30
"""Largest unpacked size in bytes of a file that is much smaller on disk; see `max_unpacked`."""

OPEN_FILE = re.compile(r"/dev/(stdin|stdout|stderr|fd/\d+)|/proc/[^/]+/fd/\d+")
"""Paths that name a file that a process holds open."""
PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How arrays of an npz file may be packed, as NumPy does it."""

NOT_ZIP = (
    OSError,
    EOFError,
    NotImplementedError,
    UnicodeDecodeError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
"""What zipfile raises for damaged files."""

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
            temporary = Path(folder) / "content"
            temporary.touch()
            yield temporary
            try:
                with temporary.open("rb") as source, _open_special(given) as sink:
                    shutil.copyfileobj(source, sink)
            except OSError as error:
                raise _not_written(given, error) from error
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
            sync(temporary)
        temporary.replace(target)
        if durable:
            sync(target.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise _not_written(target, error) from error
        raise
    finally:
        os.close(handle)


def write_text(path: str | os.PathLike[str], text: str, *, durable: bool = True) -> None:
    """Write a text file, atomically."""
    with atomic_write(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def locked(path: str | os.PathLike[str], wait: float = 0.0) -> Iterator[None]:
    """Lock a folder, or a lock file that this creates, so that no other process writes there.

    The system releases the lock if the process dies. File systems without locks are not protected.

    Parameters
    ----------
    path : path
    wait : float
        How many seconds to wait for a lock that is held.

    Raises
    ------
    LockedError
        If another process, or another caller in this one, holds it.
    """
    if sys.platform == "win32":
        yield
        return
    until = time.monotonic() + wait
    folder = Path(path).is_dir()
    while True:
        handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            if time.monotonic() < until:
                time.sleep(0.01)
                continue
            raise LockedError(
                f"{path} is locked by another process, which writes to the same place: wait for it"
                " to end, or choose another place."
            ) from None
        except OSError:  # a file system without locks
            break
        if folder or is_open_at(handle, path):
            break
        os.close(handle)  # its last holder deleted it in between
    try:
        yield
    finally:
        if not folder:
            with suppress(OSError):
                Path(path).unlink()
        os.close(handle)


class LockedError(ValueError):
    """Another process, or another caller in this one, holds a lock."""


def is_open_at(handle: int, path: str | os.PathLike[str]) -> bool:
    """Return whether the path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(handle), Path(path).stat())
    except FileNotFoundError:
        return False


def read_json(
    path: str | os.PathLike[str], what: str, file_format: str | None = None, newest: int = 0
) -> dict[str, Any]:
    """Return the JSON object in a file.

    Parameters
    ----------
    path : path
    what : str
        What the file should be, in words for errors: "a Swiftsure policy".
    file_format : str, optional
        The field `format` of such a file.
    newest : int
        The newest `version` of that format that can be read.

    Raises
    ------
    NotJSONError
        If the file does not hold JSON, or an object has a key twice.
    ValueError
        If it does not exist, holds something else, or was written by a newer version.
    """
    if not Path(path).is_file():
        raise ValueError(f"`path` must be an existing file, but {path} is not one.")
    try:
        content = json.loads(
            Path(path).read_text(encoding="utf-8"),
            object_pairs_hook=_distinct,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise NotJSONError(path, what, "it is nested too deeply") from None
    except ValueError as error:
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise NotJSONError(path, what, why) from None
    if not isinstance(content, dict) or file_format not in (None, content.get("format")):
        other = READERS.get(str(content.get("format")) if isinstance(content, dict) else "")
        hint = f" It holds {other}" if other is not None else ""
        raise ValueError(f"{path} is JSON, but not {what}.{hint}")
    version = content.get("version")
    if file_format is not None and isinstance(version, int) and version > newest:
        kind = what.rsplit(maxsplit=1)[-1]
        raise ValueError(
            f"{path} was written by a newer Swiftsure ({kind} version {version}; this one reads up"
            f" to {newest}): upgrade swiftsure to read it."
        )
    return content


def json_checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum of a JSON file's content without its checksum; spaces do not matter."""
    text = json.dumps(content, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


class NotJSONError(ValueError):
    """A file does not hold JSON; `why` says what is wrong with it."""

    def __init__(self, path: str | os.PathLike[str], what: str, why: str) -> None:
        super().__init__(f"{path} is not a JSON file, as {what} is ({why}).")
        self.why = why


@contextmanager
def npz(path: str | os.PathLike[str]) -> Iterator[Mapping[str, NDArray[Any]]]:
    """Open an npz file of plain arrays; each is checked against its claimed size, then read.

    Raises
    ------
    ValueError
        If it is not such a file, or unpacks to more than `max_unpacked` allows.
    """
    if not Path(path).is_file():
        raise ValueError(f"`path` must be an existing file, but {path} is not one.")
    try:
        with zipfile.ZipFile(path) as archive:
            if _entries(Path(path)) not in (len(archive.infolist()), 0xFFFF):  # more: in ZIP64
                raise zipfile.BadZipFile("its directory is damaged")
            for item in archive.infolist():
                if item.flag_bits & 1 or item.compress_type not in PACKINGS:
                    raise zipfile.BadZipFile(f"{item.filename!r:.80} is encrypted or packed oddly")
            sizes = {item.filename: item.file_size for item in archive.infolist()}
            max_unpacked(path, sum(sizes.values()))
            yield _Arrays(archive, sizes)
    except NOT_ZIP as error:
        raise ValueError(f"{path} is not a readable npz file ({shortened(error)}).") from None
    except _BadArrayError as error:
        raise ValueError(f"{path} is not a readable npz file: {error}.") from None


def _entries(path: Path) -> int:
    """Return how many files a zip says it holds, which zipfile does not compare."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16) - 22))
        tail = file.read()
    end = tail.rfind(b"PK\x05\x06")
    return int.from_bytes(tail[end + 10 : end + 12], "little")


class _BadArrayError(Exception):
    """An array of an npz file cannot be read."""


class _Arrays(Mapping[str, NDArray[Any]]):
    """The arrays of an npz file by name, read when asked for."""

    def __init__(self, archive: zipfile.ZipFile, sizes: Mapping[str, int]) -> None:
        self._archive = archive
        self._sizes = {name.removesuffix(".npy"): (name, size) for name, size in sizes.items()}
        if len(self._sizes) < len(sizes):
            raise _BadArrayError("two arrays have the same name")

    def __getitem__(self, key: str) -> NDArray[Any]:
        name, size = self._sizes[key]
        with self._archive.open(name) as file:
            try:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0
                if version != (1, 0):
                    read = np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file, max_header_size=10_000)
                claimed = math.prod(shape) * dtype.itemsize
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
                raise _BadArrayError(f"{key!r} is not an array ({shortened(error)})") from None
            except Exception as error:  # tokenize.TokenError of a damaged header
                raise _BadArrayError(f"{key!r} has a damaged header ({error!r:.80})") from None
            if dtype.hasobject:
                raise _BadArrayError(f"{key!r} holds Python objects, which are never loaded")
            if claimed > size:
                raise _BadArrayError(
                    f"{key!r} claims {claimed:,} bytes, but the file holds {size:,}"
                )
        with self._archive.open(name) as file:
            try:
                array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
            except ValueError as error:
                raise _BadArrayError(f"{key!r} cannot be read ({shortened(error)})") from None
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


def max_unpacked(path: str | os.PathLike[str], unpacked: int) -> None:
    """Raise if a file would unpack to far more memory than its size suggests.

    The limit applies to files that unpack to over 50 times their size. It is 1 GiB, or the number
    of bytes in the environment variable SWIFTSURE_MAX_UNPACKED.

    Raises
    ------
    TooLargeError
    """
    text = os.environ.get("SWIFTSURE_MAX_UNPACKED", str(MAX_UNPACKED))
    if not text.isdecimal():
        raise ValueError(f"SWIFTSURE_MAX_UNPACKED must be a number of bytes, but is {text!r:.200}.")
    packed = Path(path).stat().st_size
    if unpacked > max(int(text), 50 * packed):
        raise TooLargeError(
            f"{path} is {packed:,} bytes long but would unpack to {unpacked:,}, over the limit of"
            f" {int(text):,}. If you trust it, set SWIFTSURE_MAX_UNPACKED={unpacked}."
        )


class TooLargeError(ValueError):
    """A file would unpack to far more memory than its size suggests."""


def shortened(error: BaseException | str) -> str:
    """Return what an error says, in one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:199]}…"


def validation_message(error: ValidationError) -> str:
    """Return where pydantic found the first fault, and what it is, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ")
    return shortened(f"{where:.100}: {what}" if where else what)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {double!r:.200} appears twice")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _not_written(path: Path, error: OSError) -> OSError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return OSError(error.errno, f"{path} could not be written: {reason}")


def _is_special(path: Path) -> bool:
    """Return whether the path exists and leads to a pipe, device or socket, or to an open file."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    # /dev/stdout may lead to a regular file, which must not be replaced while it is open.
    return not stat.S_ISREG(mode) or OPEN_FILE.fullmatch(str(path.absolute())) is not None


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


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # not every folder can sync
            os.fsync(handle)
    finally:
        os.close(handle)


def remove_stale(folder: Path) -> None:
    """Remove the temporary files of every file in a folder that killed processes left behind."""
    for name in {path.name[1:].rsplit(".", 2)[0] for path in folder.glob(".*.*.part")}:
        _remove_stale(folder / name)


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
