"""One way to compile a kernel: cached on disk, releasing the GIL."""

from collections.abc import Callable
from typing import Any

import numba

__all__ = ["compiled"]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with numba and keep the machine code on disk.

    numba's cache notices a change only in the file that a kernel stands in, so kernels that call
    each other must share one.
    """
    kernel: Callable[..., Any] = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    return kernel
