"""Quality of each exit: mean losses, whether they fall from exit to exit, and reliability."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swiftsure.records import ExitRecord

__all__ = ["ExitLoss", "Reliability", "exit_losses", "reliability"]

BINS = 10
CLEAR = 2.0
"""Standard errors beyond which a rise of the mean loss is not noise."""


@dataclass(frozen=True)
class Rise:
    """An exit whose mean loss is above that of the exit before it."""

    exit: int
    """0-based number of the later exit."""
    by: float
    standard_error: float

    @property
    def clear(self) -> bool:
        """Whether it is more than noise."""
        return self.by > CLEAR * self.standard_error


@dataclass(frozen=True)
class ExitLoss:
    """The mean of one loss at each exit, and where it rises: the check of the paper's Eq. 2.

    Attributes
    ----------
    n : int
        Samples with a label.
    against : {"labels", "last exit"}
    rises : tuple of Rise
        Empty if every exit improves on the one before it.
    """

    loss: str
    against: str
    means: tuple[float, ...]
    n: int
    rises: tuple[Rise, ...]


@dataclass(frozen=True)
class Reliability:
    """How often an exit is right, by confidence.

    Attributes
    ----------
    confidences, accuracies, counts : (bins,)
        One per bin that holds samples.
    error : float
        Expected calibration error: mean |confidence − accuracy|, weighted by the counts.
    """

    exit: int
    confidences: tuple[float, ...]
    accuracies: tuple[float, ...]
    counts: tuple[int, ...]
    error: float


def exit_losses(record: ExitRecord) -> list[ExitLoss]:
    """Return the mean losses of the exits, compared with the last exit if there are no labels."""
    if record.losses:
        return [_exit_loss(name, "labels", values) for name, values in record.losses.items()]
    return [
        _exit_loss(name, "last exit", values) for name, values in record.inconsistencies.items()
    ]


def _exit_loss(name: str, against: str, values: NDArray[np.floating]) -> ExitLoss:
    labelled = values[~np.isnan(values).any(axis=1)].astype(np.float64)
    n = len(labelled)
    if n == 0:
        return ExitLoss(name, against, (), 0, ())
    steps = np.diff(labelled, axis=1)
    rise = steps.mean(axis=0)
    errors = steps.std(axis=0, ddof=min(1, n - 1)) / np.sqrt(n)
    return ExitLoss(
        loss=name,
        against=against,
        means=tuple(labelled.mean(axis=0).tolist()),
        n=n,
        rises=tuple(
            Rise(int(k) + 1, float(rise[k]), float(errors[k])) for k in np.flatnonzero(rise > 0)
        ),
    )


def reliability(record: ExitRecord) -> list[Reliability] | None:
    """Return the reliability of each exit but the last; None if the record lacks the data.

    It needs the score "top1" (the probability of the predicted class) and the loss "zero_one"
    (whether the prediction was wrong) of every sample.
    """
    if "top1" not in record.confidences or "zero_one" not in record.losses:
        return None
    wrong = record.losses["zero_one"]
    if np.isnan(wrong).any():  # labels are often missing where exits agree, which would bias it
        return None
    confidences = record.confidences["top1"].astype(np.float64)
    return [
        _reliability(k, confidences[:, k], 1.0 - wrong[:, k]) for k in range(record.n_exits - 1)
    ]


def _reliability(
    exit_: int, confidences: NDArray[np.float64], right: NDArray[np.float64]
) -> Reliability:
    bins = np.minimum((confidences * BINS).astype(np.int64), BINS - 1)
    counts = np.bincount(bins, minlength=BINS)
    held = counts > 0
    mean_confidence = np.bincount(bins, confidences, BINS)[held] / counts[held]
    accuracy = np.bincount(bins, right, BINS)[held] / counts[held]
    weights = counts[held] / len(bins)
    return Reliability(
        exit=exit_,
        confidences=tuple(mean_confidence.tolist()),
        accuracies=tuple(accuracy.tolist()),
        counts=tuple(counts[held].tolist()),
        error=float(weights @ np.abs(mean_confidence - accuracy)),
    )
