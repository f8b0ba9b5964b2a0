"""Load published hyperparameters and state dicts, from checkpoints and wrapped models."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["check_hyperparameters", "load_published", "plain_state_dict"]

ENTRIES = ("state_dict", "model_state_dict", "model")
"""Keys under which a checkpoint may keep the state dict."""

TRAINING_ONLY = (
    "attn_drop",
    "attn_drop_rate",
    "drop",
    "drop_connect_rate",
    "drop_path",
    "drop_path_rate",
    "drop_rate",
    "dropout",
    "dropout_rate",
    "label_smoothing",
    "use_checkpoint",
)
"""Published hyperparameters that change nothing in evaluation mode."""

SHOWN = 8
"""How many keys of each kind an error lists."""


def load_published(model: nn.Module, published: Mapping[str, Any]) -> None:
    """Load a published checkpoint or state dict into a model with exactly the same keys.

    Raises
    ------
    ValueError
        Lists the missing keys, the surplus keys, and the shapes that differ.

    Examples
    --------
    >>> weights = {"module.weight": torch.ones(1, 2), "module.bias": torch.zeros(1)}
    >>> model = nn.Linear(2, 1)
    >>> load_published(model, {"epoch": 90, "state_dict": weights})
    >>> model.weight.tolist()
    [[1.0, 1.0]]
    """
    found = plain_state_dict(published)
    expected = model.state_dict()
    shapes = [
        f"{key} must be {tuple(expected[key].shape)} but is {tuple(found[key].shape)}"
        for key in expected
        if key in found and found[key].shape != expected[key].shape
    ]
    complaints = {
        "missing": [key for key in expected if key not in found],
        "surplus": [key for key in found if key not in expected],
        "of another shape": shapes,
    }
    if any(complaints.values()):
        listed = "; ".join(
            f"{len(keys)} {kind}: {_some(keys)}" for kind, keys in complaints.items() if keys
        )
        raise ValueError(f"`state_dict` does not fit {type(model).__name__}: {listed}.")
    model.load_state_dict(found)


def plain_state_dict(published: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state dict of a checkpoint, without the key prefixes that wrappers add.

    These are a leading `module.` (DataParallel), and `_orig_mod.` (torch.compile) anywhere.
    """
    for entry in ENTRIES:
        if isinstance(published.get(entry), Mapping):
            return plain_state_dict(published[entry])
    return {_plain_key(key): _tensor(key, value) for key, value in published.items()}


def check_hyperparameters(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the published hyperparameters with these names; drops those that only affect training.

    Raises
    ------
    ValueError
        If a name is missing or unknown.

    Examples
    --------
    >>> check_hyperparameters({"depth": 12, "drop_path_rate": 0.1}, ["depth"])
    {'depth': 12}
    """
    missing = [name for name in names if name not in given]
    surplus = [name for name in given if name not in {*names, *TRAINING_ONLY}]
    if missing or surplus:
        listed = [f"missing: {_some(missing)}"] * bool(missing)
        listed += [f"unknown: {_some(surplus)}"] * bool(surplus)
        raise ValueError(f"`hyperparameters` do not fit; {'; '.join(listed)}.")
    return {name: given[name] for name in names}


def _plain_key(key: str) -> str:
    parts = [part for part in key.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def _tensor(key: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
        raise TypeError(f"`state_dict` must hold tensors, but {key!r} is a {kind}.") from None


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
