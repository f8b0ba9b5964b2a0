"""`PublishedModel`: networks that load published weights, and checks of their arguments."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Self

from torch import Tensor, nn

from swiftsure._lib import checks
from swiftsure.torch.staged import Staged
from swiftsure.torch.state_dicts import plain_state_dict

__all__ = [
    "PublishedModel",
    "check_counts",
    "check_hyperparameters",
    "check_images",
    "check_rate",
    "load_published",
]

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


class PublishedModel(Staged):
    """Base class of published networks; a subclass defines `from_hyperparameters`."""

    from_hyperparameters: Callable[..., Self]

    @classmethod
    def from_published(
        cls, hyperparameters: Mapping[str, Any], state_dict: Mapping[str, Any], **options: Any
    ) -> Self:
        """Return a published network with its weights, in evaluation mode.

        Parameters
        ----------
        hyperparameters, options
            As for `from_hyperparameters`.
        state_dict
            Tensors by their published names, or a checkpoint that contains them.

        Raises
        ------
        ValueError
            If a hyperparameter or a tensor is missing, surplus or does not fit; names which.
        """
        model = cls.from_hyperparameters(hyperparameters, **options)
        load_published(model, state_dict)
        return model.eval()


def load_published(model: nn.Module, published: Mapping[str, Any]) -> None:
    """Load a published checkpoint or state dict into a model with exactly the same keys.

    Raises
    ------
    ValueError
        Lists the missing keys, the surplus keys, and the shapes that differ.

    Examples
    --------
    >>> import torch
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


def check_hyperparameters(
    given: Mapping[str, Any], names: Collection[str], optional: Collection[str] = ()
) -> dict[str, Any]:
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
    surplus = [name for name in given if name not in {*names, *optional, *TRAINING_ONLY}]
    if missing or surplus:
        listed = [f"missing: {_some(missing)}"] * bool(missing)
        listed += [f"unknown: {_some(surplus)}"] * bool(surplus)
        raise ValueError(f"`hyperparameters` do not fit; {'; '.join(listed)}.")
    return {name: given[name] for name in [*names, *optional] if name in given}


def check_counts(name: str, values: object, length: int | None = None) -> list[int]:
    """Return whole numbers of at least 1 as a list; raises unless there are `length` of them."""
    if (
        isinstance(values, str)
        or not isinstance(values, Sequence)
        or not values
        or length not in (None, len(values))
    ):
        expected = "whole numbers" if length is None else f"{length} whole numbers"
        raise ValueError(f"`{name}` must be a sequence of {expected}, but got {values!r}.")
    return [checks.count(name, value) for value in values]


def check_rate(name: str, value: float) -> float:
    """Return a dropout rate; raises unless it is in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"`{name}` must be in [0, 1), but got {value}.")
    return value


def check_images(images: Tensor, sides: range) -> Tensor:
    """Return images, (n, 3, height, width); raises unless height and width are in `sides`."""
    if images.ndim == 4 and images.shape[1] == 3 and all(s in sides for s in images.shape[2:]):
        return images
    low, high = sides[0], sides[-1]
    if sides.stop == sys.maxsize:
        expected = f"sides that are multiples of {low}" if low > 1 else "at least one pixel a side"
    else:
        expected = f"{low if low == high else f'{low} to {high}'} pixels a side"
    raise ValueError(
        f"`images` must have shape (n, 3, height, width) with {expected}, but got"
        f" {checks.shape_text(images.shape)}."
    )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
