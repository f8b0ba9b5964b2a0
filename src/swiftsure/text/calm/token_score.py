"""`TokenScore`: a confidence of tokens learned from softmax, saturation and block, not labels."""

import os
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from swiftsure.scores.features import EDGE
from swiftsure.text.calm.looks import cosine
from swiftsure.text.weights import load_weights, save_weights

__all__ = ["TOKEN_FEATURES", "TokenScore", "token_features"]

TOKEN_FEATURES = ("log_ratio", "log1p_ratio", "saturation")
"""What the score of a block is computed from: the log of the largest probability over the second,
the log of 1 plus that, and how much the block changed the state."""


class TokenScore(nn.Module):
    """How likely a block already gives the full model's token: a logistic regression per block.

    Parameters
    ----------
    weights : (n_exits - 1, 4)
        Intercept and slopes of each block but the last, in the order of `TOKEN_FEATURES`.
    trained_on : hashes of inputs
        Hashes of the texts that it was learned on (`input_hashes`), which `sweep` refuses to
        record.

    Examples
    --------
    >>> score = TokenScore([[0.0, 1.0, 0.0, 0.0]])
    >>> logits, now = torch.tensor([[3.0, 1.0]]), torch.ones(1, 8)
    >>> round(float(score(0, token_features(logits, now, now))), 3)  # 1 / (1 + exp(-2))
    0.881
    """

    def __init__(self, weights: ArrayLike, *, trained_on: Iterable[str] = ()) -> None:
        super().__init__()
        values = torch.as_tensor(np.asarray(weights), dtype=torch.float32)
        if values.ndim != 2 or values.shape[1] != 1 + len(TOKEN_FEATURES):
            raise ValueError(
                f"`weights` must have shape (n_exits - 1, {1 + len(TOKEN_FEATURES)}), but got"
                f" {tuple(values.shape)}."
            )
        self.weights = nn.Parameter(values, requires_grad=False)
        self.trained_on = frozenset(trained_on)

    def forward(self, exit_index: int, features: Tensor) -> Tensor:
        """Return confidences, (m,) in float32, from the features of m tokens at one exit."""
        own = self.weights[exit_index]
        return torch.sigmoid(own[0] + (features * own[1:]).sum(dim=1))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights and the hashes of the texts to a safetensors file."""
        save_weights(path, self.state_dict(), self.trained_on)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TokenScore":
        """Read a score that `save` wrote."""
        weights, trained_on = load_weights(path, _shapes)
        return cls(weights["weights"].numpy(), trained_on=trained_on)


def token_features(logits: Tensor, now: Tensor, before: Tensor) -> Tensor:
    """Return the features of m tokens after a block, (m, 3) in float32.

    Parameters
    ----------
    logits : (m, vocabulary)
    now, before : (m, width)
        States after and before the block.
    """
    two = logits.float().topk(2, dim=1).values
    ratio = two[:, 0] - two[:, 1]
    apart = (1.0 - cosine(now, before)).clamp(min=EDGE)
    return torch.stack([ratio, ratio.log1p(), -apart.log()], dim=1)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of the weights."""
    found = weights.get("weights")
    rows = 0 if found is None or found.ndim == 0 else found.shape[0]
    return {"weights": (rows, 1 + len(TOKEN_FEATURES))}
