"""Classification losses: 0-1 for predictions, Brier (Eq. 7 of the paper) for distributions.

All functions take arrays or tensors; those of 0-1 also take logits for probabilities, and those of
Brier also take pixels, (n, n_exits, height, width, n_classes) with labels (n, height, width).
"""

from typing import Any

import numpy as np

from swiftsure.losses.base import LOSSES, Loss, LossRange

__all__ = [
    "BRIER",
    "ZERO_ONE",
    "brier",
    "brier_inconsistency",
    "zero_one",
    "zero_one_inconsistency",
]


def zero_one(probabilities: Any, labels: Any) -> Any:
    """Return 1 where the most probable class is not the label, else 0."""
    return (probabilities.argmax(-1) != labels[:, None]) * 1.0


def zero_one_inconsistency(probabilities: Any) -> Any:
    """Return 1 where an exit's prediction is not the last exit's, else 0."""
    predictions = probabilities.argmax(-1)
    return (predictions != predictions[:, -1:]) * 1.0


def brier(probabilities: Any, labels: Any) -> Any:
    """Return the squared distance between a distribution and the one-hot label, in [0, 2]."""
    index = labels[:, None, ..., None]
    if isinstance(probabilities, np.ndarray):
        of_label = np.take_along_axis(probabilities, index, axis=-1)
    else:
        of_label = probabilities.take_along_dim(index, dim=-1)
    return (probabilities**2).sum(-1) - 2.0 * of_label[..., 0] + 1.0


def brier_inconsistency(probabilities: Any) -> Any:
    """Return the squared distance to the last exit's distribution q, in [0, 2].

    This is the exact mean, over labels drawn from q, of an exit's Brier loss minus the last exit's.
    """
    return ((probabilities - probabilities[:, -1:]) ** 2).sum(-1)


ZERO_ONE = LOSSES.register(
    Loss(
        "zero_one",
        LossRange(0, 1, whole=True),
        "prediction",
        zero_one,
        zero_one_inconsistency,
        tensors="swiftsure.torch.losses:ZERO_ONE",
    )
)
BRIER = LOSSES.register(
    Loss(
        "brier",
        LossRange(0, 2),
        "distribution",
        brier,
        brier_inconsistency,
        tensors="swiftsure.torch.losses:BRIER",
    )
)
