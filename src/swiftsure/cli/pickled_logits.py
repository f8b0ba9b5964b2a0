"""Convert the authors' precomputed logits, pickles of (logits, targets), to npz files.

Reading a pickle can run any code. This reader allows only arrays and tensors and refuses anything
else. No other part of the library reads pickles.
"""

import io
import os
import pickle  # noqa: TID251  (restricted below to arrays)
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.files import atomic_write

__all__ = ["convert_logits", "read_pickled_logits"]


def convert_logits(
    source: str | os.PathLike[str], target: str | os.PathLike[str]
) -> tuple[int, ...]:
    """Write the logits and labels of a pickle to an npz that `ExitRecord.load` reads.

    Returns the shape of the logits: samples, exits, classes.

    Parameters
    ----------
    source : path
        Pickle of (logits, targets) or (logits, targets, …): arrays or tensors, logits (exits,
        samples, classes), as published with the paper for ImageNet.
    target : path
        The npz to write: `logits` (samples, exits, classes) and `labels`.
    """
    logits, labels = read_pickled_logits(source)
    with atomic_write(target) as temporary, temporary.open("wb") as file:
        np.savez(file, logits=logits, labels=labels)
    return logits.shape


def read_pickled_logits(
    source: str | os.PathLike[str],
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return logits (samples, exits, classes) and labels of a pickle of arrays."""
    try:
        with Path(source).open("rb") as file:
            content = ArrayUnpickler(file).load()
    except OSError as error:
        raise ValueError(f"`source` must be a readable file ({error}).") from None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"{source} is not a pickle of arrays ({error}).") from None
    if not isinstance(content, tuple | list) or len(content) < 2:
        raise ValueError(f"{source} must hold (logits, targets), but holds {_kind(content)}.")
    logits, labels = np.asarray(content[0]), np.asarray(content[1])
    if logits.ndim != 3 or logits.dtype.kind != "f":
        raise ValueError(
            f"{source} must hold logits of shape (exits, samples, classes), but they are"
            f" {_kind(content[0])} of shape {logits.shape}."
        )
    if labels.shape != logits.shape[1:2] or labels.dtype.kind not in "iuf":
        raise ValueError(
            f"{source} must hold one target per sample, ({logits.shape[1]},), but they are"
            f" {_kind(content[1])} of shape {labels.shape}."
        )
    return np.ascontiguousarray(logits.transpose(1, 0, 2), np.float32), labels.astype(np.int64)


class ArrayUnpickler(pickle.Unpickler):
    """Unpickler for numbers, text, tuples, lists, dicts, NumPy arrays and tensors only."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that arrays or tensors need; refuse all others."""
        if (module, name) in NUMPY_PARTS:
            return NUMPY_PARTS[module, name]
        if (module, name) in TORCH_PARTS:
            return TORCH_PARTS[module, name]()
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not part of an array")


def _rebuild_tensor() -> Callable[..., Any]:
    from torch._utils import _rebuild_tensor_v2

    return _rebuild_tensor_v2


def _load_storage() -> Callable[..., Any]:
    import torch

    return lambda data: torch.load(io.BytesIO(data), weights_only=True)


_reconstruct = np.empty(0).__reduce__()[0]
_from_buffer = np.empty(0).__reduce_ex__(5)[0]


def _encode(text: str, encoding: str) -> bytes:
    """Replace `codecs.encode`, which old pickles of bytes call."""
    return text.encode(encoding)


NUMPY_PARTS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): OrderedDict,
}
TORCH_PARTS = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch.storage", "_load_from_bytes"): _load_storage,
}


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
