"""The decorator that compiles kernels with numba, cached on disk and without the GIL."""

from collections.abc import Callable
from typing import Any

import numba

__all__ = ["compiled"]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with numba and keep the machine code on disk.

    numba's cache only detects changes in the kernel's own file, so kernels that call each other
    must be in the same file.
    """
    kernel: Callable[..., Any] = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    return kernel
