"""Checks of the thresholds, losses and costs of a curve or record."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.losses import LossRange

__all__ = ["cost_array", "dial_array", "in_range"]

Floats = NDArray[np.float64]

SLACK = 1e-6
"""How far rounding may carry a loss out of its range, relative to the largest loss."""


def dial_array(thresholds: ArrayLike) -> Floats:
    """Return checked thresholds; only the first may be None or infinity ("never")."""
    listed = [np.inf if value is None else value for value in np.ravel(np.asarray(thresholds))]
    values: Floats = checks.numbers("thresholds", listed, np.float64)
    checks.of_shape("thresholds", values, {"K": None})
    if np.isnan(values).any() or np.isinf(values[1:]).any() or np.isneginf(values[0]):
        raise ValueError(
            "`thresholds` must be finite, except that the first may be None or infinity."
        )
    return values


def in_range(name: str, values: NDArray[Any], declared: LossRange, hint: str = "") -> NDArray[Any]:
    """Return losses checked against their declared range, clipped if rounding exceeded it."""
    checks.finite(name, values)
    values = checks.within(name, values, declared.low, declared.high, SLACK * declared.high, hint)
    if declared.whole and not (values == np.rint(values)).all():
        raise ValueError(f"`{name}` is declared whole, so it must hold whole numbers only.")
    return values


def cost_array(
    name: str, values: ArrayLike, shape: tuple[int, ...], axis: str
) -> NDArray[np.float64]:
    """Return costs checked for shape (per column, or per sample and column) and sign."""
    title = f"costs['{name}']"
    array = checks.finite(title, checks.numbers(title, values, np.float64))
    if array.ndim == 1:
        checks.of_shape(title, array, {axis: shape[1]})
    else:
        checks.of_shape(title, array, {"n": shape[0], axis: shape[1]})
    if (array < 0).any():
        raise ValueError(f"`{title}` must not be negative, but its least value is {array.min():g}.")
    return np.ascontiguousarray(array)
