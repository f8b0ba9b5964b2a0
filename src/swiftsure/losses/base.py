"""The classes `Loss` and `LossRange`, and the registry of losses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.registry import Registry

__all__ = ["LOSSES", "Loss", "LossRange", "resolve_loss"]

Array = NDArray[Any]
AnyLoss = TypeVar("AnyLoss")


@dataclass(frozen=True)
class LossRange:
    """The declared range of a loss; bounds use this, never the observed range.

    Parameters
    ----------
    low, high : float
        Smallest and largest possible loss.
    whole : bool
        Whether losses are whole numbers; whole numbers in [0, 1] admit the exact binomial test, and
        those in [-1, 1] the exact trinomial test.

    Examples
    --------
    >>> LossRange(0, 1, whole=True).gap()
    LossRange(low=-1.0, high=1.0, whole=True)
    """

    low: float = 0.0
    high: float = 1.0
    whole: bool = False

    def __post_init__(self) -> None:
        """Refuse ranges that are empty, infinite, or not above 0."""
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))
        if not (np.isfinite(self.low) and np.isfinite(self.high) and self.low < self.high):
            raise ValueError(
                f"`loss_range` must be (low, high) with low < high, but got"
                f" ({self.low:g}, {self.high:g})."
            )
        if not self.high > 0:
            raise ValueError(f"`loss_range` must reach above 0, but got high = {self.high:g}.")

    @property
    def binary(self) -> bool:
        """Whether every loss is 0 or 1."""
        return self.whole and (self.low, self.high) == (0.0, 1.0)

    @property
    def ternary(self) -> bool:
        """Whether every loss is −1, 0 or 1, like a 0-1 gap."""
        return self.whole and (self.low, self.high) == (-1.0, 1.0)

    @classmethod
    def of(cls, value: "LossRange | tuple[float, float]") -> "LossRange":
        """Return a range, or a pair (low, high), as a LossRange."""
        if isinstance(value, LossRange):
            return value
        try:
            low, high = (float(each) for each in value)
        except (TypeError, ValueError):
            raise TypeError(
                f"`loss_range` must be a pair (low, high), but got {value!r}."
            ) from None
        return cls(low, high)

    def gap(self) -> "LossRange":
        """Return the range of the difference of two such losses."""
        width = self.high - self.low
        return LossRange(-width, width, self.whole)

    def zero_bounded(self) -> "LossRange":
        """Return the range of max(0, loss), Eq. 16 of the paper."""
        return LossRange(max(0.0, self.low), self.high, self.whole)


@dataclass(frozen=True)
class Loss:
    """A named loss: its range, its input, and the functions that compute it.

    Parameters
    ----------
    name : str
        The name that users pass.
    range : LossRange
        Range of the loss against labels.
    of : {"prediction", "distribution"}
        What it is computed from. A prediction loss is the same for equal predictions, so its gap is
        0 without a label if an exit agrees with the full model.
    against_labels : callable
        (probabilities (n, n_exits, n_classes), labels (n,)) -> losses (n, n_exits).
    against_last : callable
        probabilities (n, n_exits, n_classes) -> inconsistencies (n, n_exits) with the last exit.

    Notes
    -----
    Segmentation has a distribution and a label at every pixel: probabilities are then of shape
    (n, n_exits, height, width, n_classes) and labels (n, height, width).
    """

    name: str
    range: LossRange
    of: Literal["prediction", "distribution"]
    against_labels: Callable[[Array, Array], Array]
    against_last: Callable[[Array], Array]


LOSSES: Registry[Loss] = Registry("loss")
"""Losses by name; `LOSSES.register(loss)` adds one."""


def resolve_loss(loss: str | AnyLoss, registry: Mapping[str, AnyLoss]) -> AnyLoss:
    """Return a loss, looked up in a registry if it is given by name."""
    if isinstance(loss, type(next(iter(registry.values())))):
        return loss
    return registry[checks.choice("losses", str(loss), registry)]
