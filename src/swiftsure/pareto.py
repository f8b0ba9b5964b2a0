"""The front of risk and cost: settings that no other one beats in both, safest first."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["pareto_order"]

Floats = NDArray[np.float64]

CAUTION = 1.0
"""Standard errors that are added to each estimated risk.

The smallest of many estimates is too small. A setting that is placed too early fails its test, and
the walk ends there.
"""

LEAST_STEP = 0.005
"""Least saving of a setting against the one before it, as a share of the full model's cost."""


def pareto_order(risks: Floats, costs: Floats) -> NDArray[np.int64]:
    """Return the settings of the front in the order in which to test them, from setting 0 on.

    Parameters
    ----------
    risks : (K,)
        Upper estimates; setting 0 is the full model.
    costs : (K,)

    Examples
    --------
    >>> pareto_order(np.array([0, 0.1, 0.02, 0.3]), np.array([1.0, 0.5, 0.6, 0.7]))
    array([0, 2, 1])
    """
    order = np.lexsort((costs, risks))
    front, least, step = [0], costs[0], LEAST_STEP * costs[0]
    for setting in order[order != 0].tolist():
        if costs[setting] < least - step:
            front.append(setting)
            least = costs[setting]
    return np.asarray(front, np.int64)


def upper_estimates(losses: Floats) -> Floats:
    """Return the mean loss of each setting and `CAUTION` standard errors, (K,); losses (n, K)."""
    return np.asarray(losses.mean(axis=0) + CAUTION * losses.std(axis=0) / np.sqrt(len(losses)))
