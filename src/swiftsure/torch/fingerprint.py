"""Fingerprints of models: what a policy certifies, in one hash."""

import hashlib

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
    entries = {_plain(name): value for name, value in model.state_dict().items()}
    for name in sorted(entries):
        value = entries[name]
        if not isinstance(value, torch.Tensor):
            continue
        array = value.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(array.shape)}{array.dtype}".encode())
        digest.update(array.view(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _plain(name: str) -> str:
    """Drop what wrapping adds: a leading `module` (data parallel), `_orig_mod` (torch.compile)."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0] == "module" else parts)
