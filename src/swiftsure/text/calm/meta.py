"""CALM's meta-classifier: predicts whether a block already gives the full model's token."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from swiftsure.text.weights import check_shapes, load_weights, save_weights

__all__ = ["MetaClassifier"]


class MetaClassifier(nn.Module):
    """Maps normed hidden states to two logits; the second means "agrees with the full model".

    Parameters
    ----------
    width : int
        Width of the hidden states.
    bias : bool
        Whether the two linear layers have biases.
    trained_on : hashes of inputs
        Hashes of the training texts (`input_hashes`); `sweep` refuses to record these texts, since
        a policy must not be calibrated on data that its confidence was trained on.

    Examples
    --------
    >>> import torch
    >>> MetaClassifier(8)(torch.zeros(3, 8)).shape
    torch.Size([3, 2])
    """

    def __init__(self, width: int, *, bias: bool = True, trained_on: Iterable[str] = ()) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width, bias=bias), nn.ReLU(), nn.Linear(width, 2, bias=bias)
        )
        self.width = width
        self.trained_on = frozenset(trained_on)

    def forward(self, states: Tensor) -> Tensor:
        """Return logits, (n, 2)."""
        logits: Tensor = self.layers(states)
        return logits

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights and the hashes of the training texts to a safetensors file."""
        save_weights(path, self.layers.state_dict(), self.trained_on)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "MetaClassifier":
        """Read a classifier that `save` wrote."""
        weights, trained_on = load_weights(path, _shapes)
        classifier = cls.from_published(weights, prefix="")
        classifier.trained_on = trained_on
        return classifier

    @classmethod
    def from_published(
        cls, state_dict: Mapping[str, Tensor], prefix: str = "cm_head."
    ) -> "MetaClassifier":
        """Return the classifier in the state dict of a published early-exit T5."""
        found: dict[str, Any] = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        if not {"0.weight", "2.weight"} <= set(found):
            raise ValueError(
                f"`state_dict` must hold {prefix}0.weight and {prefix}2.weight, but it does not."
            )
        try:
            check_shapes(found, _shapes(found))
        except ValueError as error:
            raise ValueError(f"`state_dict` must hold a classifier, but {error}.") from None
        weight = found["0.weight"]
        classifier = cls(weight.shape[1], bias="0.bias" in found)
        classifier.layers.load_state_dict(found)
        return classifier.to(weight.dtype).eval()


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a classifier: two maps, and two biases or none."""
    width = (
        weights["2.weight"].shape[-1] if "2.weight" in weights and weights["2.weight"].ndim else 0
    )
    if width == 0:
        raise ValueError("'2.weight' must be (2, width)")
    shapes: dict[str, tuple[int, ...]] = {"0.weight": (width, width), "2.weight": (2, width)}
    if "0.bias" in weights:
        shapes |= {"0.bias": (width,), "2.bias": (2,)}
    return shapes
