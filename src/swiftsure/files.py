"""Writing files whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["replaced", "write_text"]


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path to write to; it takes the place of `path` only if all went well."""
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"`path` must be in an existing folder, but {target.parent} is not one.")
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp's files are for the owner only
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file whole."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
