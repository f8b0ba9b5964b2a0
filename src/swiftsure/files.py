"""Atomic file writes, JSON files with a checksum, and npz files without pickles."""

import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["atomic_write", "checksum", "npz", "parse_json", "writable", "write_text"]


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
                raise zipfile.BadZipFile("it is not an archive, or is cut short")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                yield arrays
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a readable npz file ({error}).") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON content, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def parse_json(path: str | os.PathLike[str], file_format: str, what: str, newest: int) -> Any:
    """Return the content of a JSON file of a given format; newer versions are refused.

    `what` names the content in errors, such as "policy".
    """
    if not Path(path).is_file():
        raise ValueError(f"`path` must be an existing file, but {path} is not one.")
    try:
        content = json.loads(Path(path).read_bytes())
    except ValueError as error:
        why = "" if isinstance(error, UnicodeDecodeError) else f" ({error})"
        raise ValueError(
            f"{path} is not a JSON file{why}: it is another file, or a damaged {what}. It was left"
            " as it is."
        ) from None
    if not isinstance(content, dict) or content.get("format") != file_format:
        raise ValueError(f"{path} is JSON, but not a Swiftsure {what}.")
    version = content.get("version")
    if isinstance(version, int) and version > newest:
        raise ValueError(
            f"{path} was written by a newer Swiftsure ({what} version {version}; this one reads up"
            f" to {newest}): upgrade swiftsure to read it."
        )
    return content
