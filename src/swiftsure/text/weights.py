"""Weights in safetensors files, with hashes of the training texts."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from swiftsure.files import atomic_write

__all__ = ["load_weights", "save_weights"]


def save_weights(
    path: str | os.PathLike[str], weights: Mapping[str, Tensor], trained_on: Iterable[str]
) -> None:
    """Write weights and training hashes atomically."""
    from safetensors.torch import save_file

    held = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    note = {"trained_on": json.dumps(sorted(trained_on))}
    with atomic_write(path) as temporary:
        save_file(held, temporary, metadata=note)


def load_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Return weights, and hashes of the training texts."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ValueError(f"`path` must be an existing file, but {path} is not one.")
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            note = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}).") from None
    return weights, frozenset(json.loads(note.get("trained_on", "[]")))
