"""Weights in safetensors files, with hashes of the training texts and a checksum of both."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from swiftsure._lib.files import atomic_write, shortened

__all__ = ["check_shapes", "load_weights", "save_weights"]

Shapes = Mapping[str, tuple[int, ...]]


def save_weights(
    path: str | os.PathLike[str], weights: Mapping[str, Tensor], trained_on: Iterable[str]
) -> None:
    """Write weights and training hashes atomically."""
    from safetensors.torch import save_file

    held = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    texts = json.dumps(sorted(trained_on))
    note = {"trained_on": texts, "checksum": _checksum(held, texts)}
    with atomic_write(path) as temporary:
        save_file(held, temporary, metadata=note)


def load_weights(
    path: str | os.PathLike[str], shapes: Callable[[Mapping[str, Tensor]], Shapes]
) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Return weights, and hashes of the training texts.

    Parameters
    ----------
    path : path
    shapes : callable
        Maps the weights to the shapes that they should have, before anything is built from them.

    Raises
    ------
    ValueError
        If `save_weights` did not write the file, or if it was changed since.
    """
    from safetensors import safe_open

    if not Path(path).is_file():
        raise ValueError(f"`path` must be an existing file, but {path} is not one.")
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            note = file.metadata() or {}
    except Exception as error:  # of several libraries, for damaged files
        raise ValueError(
            f"{path} is not a readable safetensors file ({shortened(error)})."
        ) from None
    try:
        check_shapes(weights, shapes(weights))
        texts = note.get("trained_on", "")
        if note.get("checksum") != _checksum(weights, texts):
            raise ValueError("its checksum does not fit its content; write it with `save`")
        trained_on = json.loads(texts)
        if not isinstance(trained_on, list) or not all(isinstance(e, str) for e in trained_on):
            raise ValueError("`trained_on` must be a list of hashes")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} does not hold such weights: {shortened(error)}.") from None
    return weights, frozenset(trained_on)


def check_shapes(weights: Mapping[str, Tensor], shapes: Shapes) -> None:
    """Raise if weights do not have these names and shapes, one dtype, and finite values."""
    if set(weights) != set(shapes):
        odd = min(set(weights) ^ set(shapes))
        raise ValueError(f"{odd!r:.80} is {'missing' if odd in shapes else 'unknown'}")
    dtypes = {value.dtype for value in weights.values()}
    for name, value in weights.items():
        if tuple(value.shape) != shapes[name]:
            raise ValueError(
                f"{name!r:.80} must have shape {shapes[name]}, not {tuple(value.shape)}"
            )
        if len(dtypes) > 1 or not value.dtype.is_floating_point:
            raise ValueError(
                f"all must have one floating-point dtype, not {sorted(map(str, dtypes))}"
            )
        if not torch.isfinite(value).all():
            raise ValueError(f"{name!r:.80} must be finite")


def _checksum(weights: Mapping[str, Tensor], texts: str) -> str:
    found = hashlib.sha256(texts.encode())
    for name in sorted(weights):
        value = weights[name]
        found.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{found.hexdigest()}"
