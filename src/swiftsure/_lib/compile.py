"""The decorator that compiles kernels with numba, cached on disk and without the GIL."""

import glob
import hashlib
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

__all__ = ["compiled"]

NO_CACHE = (
    "Swiftsure's kernels are compiled in every process, which takes some seconds: neither the"
    " package's folder nor the user's cache folder can be written to. Set NUMBA_CACHE_DIR to a"
    " folder that can."
)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with numba and keep the machine code on disk if some folder allows it.

    numba's cache only detects changes in the kernel's own file, so kernels that call each other
    must be in the same file.
    """
    kernel: Any = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        kernel._cache = _ForgivingCache(function)  # type: ignore[no-untyped-call]
    except RuntimeError:  # numba found no folder to write to
        global _warned  # noqa: PLW0603 (once per process, not once per kernel)
        if not _warned:
            _warned = True
            warnings.warn(NO_CACHE, RuntimeWarning, stacklevel=2)
    result: Callable[..., Any] = kernel
    return result


_warned = False


class _ForgivingCache(FunctionCache):
    """numba's cache, but a damaged or unwritable file means compiling again, not an error.

    Damaged machine code may crash or compute wrong numbers, so the files have a checksum.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled code from the cache, or None; a damaged cache is emptied."""
        try:
            if self._sums_file().read_text(encoding="utf-8") != self._sums():
                raise ValueError("the cache is damaged")
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # unpickling a damaged file can raise anything
            with suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the compiled code to the cache if possible."""
        with suppress(Exception):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
            self._sums_file().write_text(self._sums(), encoding="utf-8")

    def _sums_file(self) -> Path:
        return Path(self._cache_file._index_path).with_suffix(".sha256")

    def _sums(self) -> str:
        """Return the checksums of this kernel's files in the cache."""
        index = Path(self._cache_file._index_path)
        files = sorted(index.parent.glob(f"{glob.escape(index.stem)}*.nb[ic]"))
        return "".join(
            f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files
        )
