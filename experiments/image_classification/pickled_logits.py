"""Convert the authors' precomputed logits, pickles of (logits, targets), to npz files:
`python -m experiments.image_classification.pickled_logits imagenet.p -o logits.npz`.

Reading a pickle can run any code. This reader allows only arrays and tensors and refuses anything
else.
"""

import argparse
import io
import os
import pickle  # noqa: TID251  (restricted below to arrays)
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure._lib.files import atomic_write, max_unpacked, shortened

__all__ = ["convert_logits", "read_pickled_logits"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--output", "-o", type=Path, default=Path("logits.npz"))
    arguments = parser.parse_args()
    samples, exits, classes = convert_logits(arguments.source, arguments.output)
    print(f"{samples:,} samples, {exits} exits, {classes:,} classes: {arguments.output}")


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
    """Return logits (samples, exits, classes) and labels of a pickle of arrays.

    Raises
    ------
    ValueError
        If the file holds anything else, or values that a record cannot hold.
    """
    try:
        content = Path(source).read_bytes()
    except OSError as error:
        raise ValueError(f"`source` must be a readable file ({error}).") from None
    try:
        parts = ArrayUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle can raise anything
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{source} is not a pickle of arrays ({shortened(why)}).") from None
    if not isinstance(parts, tuple | list) or len(parts) < 2:
        raise ValueError(f"{source} must hold (logits, targets), but holds {_kind(parts)}.")
    try:
        _refuse_bomb(source, parts[:2], len(content))
        given = checks.numbers("logits", parts[0])
        labels = checks.numbers("targets", parts[1])
    except Exception as error:
        raise ValueError(f"{source} must hold arrays of numbers: {shortened(error)}") from None
    if given.ndim != 3 or given.dtype.kind != "f" or given.size == 0:
        raise ValueError(
            f"{source} must hold logits of shape (exits, samples, classes), but they are"
            f" {_kind(parts[0])} of shape {given.shape}."
        )
    if labels.shape != given.shape[1:2] or labels.dtype.kind not in "iuf":
        raise ValueError(
            f"{source} must hold one target per sample, ({given.shape[1]},), but they are"
            f" {_kind(parts[1])} of shape {labels.shape}."
        )
    with np.errstate(over="ignore", invalid="ignore"):
        logits = np.ascontiguousarray(given.transpose(1, 0, 2), np.float32)
    # A finite number becomes infinite if it does not fit float32.
    if (
        np.isnan(logits).any()
        or np.isposinf(logits).any()
        or np.isinf(logits).sum() > np.isinf(given).sum()
    ):
        raise ValueError(
            f"{source} must hold logits that are finite in float32, or −inf, but holds others."
        )
    n_classes = logits.shape[2]
    # Negative ones are missing. NaN is outside of every range.
    usable = (labels > -(2**31)) & (labels < n_classes) & (labels == np.floor(labels))
    if not usable.all():
        first = int(np.argmin(usable))
        raise ValueError(
            f"{source} must hold targets that are whole numbers below {n_classes}, the number of"
            f" classes, but target {first} is {labels[first]}."
        )
    return logits, labels.astype(np.int64)


def _refuse_bomb(source: str | os.PathLike[str], parts: Any, size: int) -> None:
    """Raise if lists or arrays claim far more than the file holds, as repeated ones do."""
    todo, seen, claimed = list(parts), 0, 0
    while todo:
        each = todo.pop()
        seen += 1
        if isinstance(each, tuple | list):
            todo += each
        claimed += getattr(each, "nbytes", 0)
        if seen > size:
            raise ValueError("it repeats its lists")
    max_unpacked(source, claimed)


# The C unpickler reserves memory for any memo number that a file names; this one uses a dict.
class ArrayUnpickler(pickle._Unpickler):
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


_from_buffer = np.empty(0).__reduce_ex__(5)[0]


def _reconstruct(kind: object, shape: tuple[int, ...], _: object) -> NDArray[Any]:
    """Return an empty array, which the pickle fills; never one of uninitialised memory."""
    if kind is not NDARRAY or tuple(shape) != (0,):
        raise pickle.UnpicklingError("it makes an array without values")
    return np.empty(0)


def _encode(text: str, encoding: str) -> bytes:
    """Replace `codecs.encode`, which old pickles of bytes call."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it uses the encoding {encoding!r:.80}")
    return text.encode(encoding)


NDARRAY = object()
"""Stands for the class of arrays, which pickles name but may not call."""

NUMPY_PARTS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): NDARRAY,
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


if __name__ == "__main__":
    main()
