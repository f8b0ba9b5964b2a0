"""`plain_state_dict`: a checkpoint's tensors by their plain names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["plain_state_dict"]

ENTRIES = ("state_dict", "model_state_dict", "model")
"""Keys under which a checkpoint may keep the state dict."""


def plain_state_dict(published: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state dict of a checkpoint, without the key prefixes that wrappers add.

    These are a leading `module.` (DataParallel), and `_orig_mod.` (torch.compile) anywhere.

    Examples
    --------
    >>> plain_state_dict({"epoch": 90, "state_dict": {"module.bias": [1.0]}})
    {'bias': tensor([1.])}
    """
    for entry in ENTRIES:
        if isinstance(published.get(entry), Mapping):
            return plain_state_dict(published[entry])
    return {_plain_key(key): _tensor(key, value) for key, value in published.items()}


def _plain_key(key: str) -> str:
    parts = [part for part in key.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def _tensor(key: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
        raise TypeError(f"`state_dict` must hold tensors, but {key!r} is a {kind}.") from None
