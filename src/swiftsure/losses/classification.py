"""Losses of classifiers: 0-1 for predictions, Brier (Eq. 7 of the paper) for distributions."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.losses.base import LOSSES, Loss, LossRange

__all__ = [
    "BRIER",
    "ZERO_ONE",
    "brier",
    "brier_inconsistency",
    "zero_one",
    "zero_one_inconsistency",
]

Array = NDArray[Any]


def zero_one(probabilities: Array, labels: Array) -> Array:
    """Return 1 where the most probable class is not the label, else 0."""
    wrong: Array = probabilities.argmax(axis=-1) != labels[:, None]
    return wrong.astype(np.float64)


def zero_one_inconsistency(probabilities: Array) -> Array:
    """Return 1 where an exit's prediction is not the last exit's, else 0."""
    predictions = probabilities.argmax(axis=-1)
    differs: Array = predictions != predictions[:, -1:]
    return differs.astype(np.float64)


def brier(probabilities: Array, labels: Array) -> Array:
    """Return the squared distance between a distribution and the one-hot label, in [0, 2]."""
    of_label = np.take_along_axis(probabilities, labels[:, None, None], axis=-1)[..., 0]
    loss: Array = np.square(probabilities).sum(axis=-1) - 2.0 * of_label + 1.0
    return loss


def brier_inconsistency(probabilities: Array) -> Array:
    """Return the squared distance to the last exit's distribution q, in [0, 2].

    This is the exact mean, over labels drawn from q, of an exit's Brier loss minus the last exit's.
    """
    distance: Array = np.square(probabilities - probabilities[:, -1:, :]).sum(axis=-1)
    return distance


ZERO_ONE = LOSSES.register(
    Loss(
        "zero_one",
        LossRange(0, 1, whole=True),
        of="prediction",
        against_labels=zero_one,
        against_last=zero_one_inconsistency,
    )
)
BRIER = LOSSES.register(
    Loss(
        "brier",
        LossRange(0, 2),
        of="distribution",
        against_labels=brier,
        against_last=brier_inconsistency,
    )
)
