"""The base class of bounds, their registry, and helpers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib.registry import Registry
from swiftsure.curves.curve import RiskCurve
from swiftsure.losses import LossRange

__all__ = ["BOUNDS", "Bound", "last_before_failure", "smallest_certified"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Bound(ABC):
    """A way to certify that a risk is at most ε.

    Attributes
    ----------
    name : str
    needs : {"any", "non-negative", "binary", "ternary"}
        Which losses it is valid for; certificates say so. All bounds assume independent samples of
        one distribution.
    uses_order : bool
        Whether the result depends on the order of the samples. They are then tested in an order
        drawn beforehand, and the certificate says so.
    pools : bool
        Whether it can test the risk of a finite pool that the samples were drawn from without
        replacement (`pool`).
    weighs : bool
        Whether it can test per-sample averages over groups that differ in size: its p-value is
        then monotone in ε, at every setting.
    monotone : bool
        Whether a larger loss of any sample never lowers its p-value. A loss that is not known may
        then be replaced by the largest, whatever decided that it is not known.
    """

    name: str
    needs: str = "any"
    uses_order: bool = False
    pools: bool = False
    weighs: bool = False
    monotone: bool = False

    def refuse(self, loss_range: LossRange) -> None:
        """Raise if the bound is not valid for losses of this declared range."""
        low, high = loss_range.low, loss_range.high
        for needs, fits, values in (
            ("binary", loss_range.binary, "0 or 1"),
            ("ternary", loss_range.ternary, "-1, 0 or 1"),
        ):
            if self.needs == needs and not fits:
                raise ValueError(
                    f"`bound` '{self.name}' needs losses declared to be {values}, but these are"
                    f" declared to lie in [{low:g}, {high:g}]; use 'star', or declare whole losses."
                )
        if self.needs == "non-negative" and low < 0:
            raise ValueError(
                f"`bound` '{self.name}' needs losses of at least 0, but these may be as low as"
                f" {low:g}; use 'star', or test zero-bounded losses (`zero_bounded=True`)."
            )

    @abstractmethod
    def p_values(self, curve: RiskCurve, rows: Rows, epsilon: float, pool: int = 0) -> Floats:
        """Return a p-value of "the risk is at least ε" for each setting, (K,)."""

    def passes(
        self, curve: RiskCurve, rows: Rows, epsilon: float, delta: float, pool: int = 0
    ) -> NDArray[np.bool_]:
        """Return whether each setting is certified on its own, (K,)."""
        return np.asarray(self.p_values(curve, rows, epsilon, pool) <= delta)

    @abstractmethod
    def select(
        self, curve: RiskCurve, rows: Rows, epsilons: Floats, delta: float, start: int, pool: int
    ) -> NDArray[np.int64]:
        """Return the last setting certified for each ε, walking from `start` to the first failure.

        `epsilons` must be ascending; `start - 1` means that none is certified.
        """

    @abstractmethod
    def upper(self, curve: RiskCurve, rows: Rows, setting: int, delta: float, pool: int) -> float:
        """Return a value that the risk at a setting exceeds with probability at most δ."""


BOUNDS: Registry[Bound] = Registry("bound")
"""Bounds by name."""


def last_before_failure(passes: NDArray[np.bool_], start: int) -> int:
    """Return the last index of the run of successes that begins at `start`; `start - 1` if none."""
    failures = np.flatnonzero(~passes[start:])
    return start - 1 + (int(failures[0]) if failures.size else len(passes) - start)


def smallest_certified(
    certified: Callable[[float], bool],
    loss_range: LossRange,
    near: float | None = None,
    precision: float = 1e-9,
) -> float:
    """Return the smallest certified ε, rounded up; the largest loss if none is certified.

    The search starts at `near`; `precision` is relative to the width of the range.
    """
    low, high = loss_range.low, loss_range.high
    if not certified(np.nextafter(high, low)):
        return high
    width = high - low
    if near is not None:
        step = 16 * precision * width
        below, above = max(low, near), min(high, near + step)
        while above < high and not certified(above):
            step *= 4
            below, above = above, min(high, above + step)
        low, high = (low, above) if below == near and certified(below) else (below, above)
    while high - low > precision * width:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if certified(middle) else (middle, high)
    return high
