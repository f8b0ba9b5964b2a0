"""Fingerprints of models: what a policy certifies, in one hash."""

import hashlib
from itertools import chain

import torch
from torch import nn

__all__ = ["fingerprint"]


def fingerprint(
    model: nn.Module, *, temperatures: tuple[float, ...] | None = None, dtype: str | None = None
) -> str:
    """Return a hash of names, shapes and values of parameters and buffers, and how they are run.

    Wrapping the model, or moving it to another device, does not change it.

    Examples
    --------
    >>> layer = nn.Linear(2, 2)
    >>> fingerprint(layer) == fingerprint(torch.nn.DataParallel(layer))
    True
    """
    digest = hashlib.sha256()
    digest.update(f"{temperatures}{dtype}".encode())
    # Not the state dict, which lacks buffers that are not saved: answers depend on those too.
    values = dict(
        chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    )
    for name, value in sorted(
        zip(_plain(list(values)), values.values(), strict=True), key=lambda entry: entry[0]
    ):
        array = value.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(array.shape)}{array.dtype}".encode())
        digest.update(array.view(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _plain(names: list[str]) -> list[str]:
    """Drop what wrapping adds: `_orig_mod` (torch.compile), `module` before all (data parallel)."""
    plain = [".".join(part for part in name.split(".") if part != "_orig_mod") for name in names]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain
