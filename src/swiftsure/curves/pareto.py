"""The front of risk and cost: settings that no other one beats in both, safest first."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["pareto_order", "upper_estimates"]

Floats = NDArray[np.float64]

CAUTION = 1.0
"""Standard errors that are added to each estimate."""

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
    """Return an upper estimate of the risk of each setting, (K,), from losses (n, K).

    It is the mean of max(0, loss) and `CAUTION` standard errors. The smallest of many means is too
    small, and gaps that cancel on a few samples may not cancel on others. A setting that is placed
    too early fails its test, and the walk ends there.
    """
    harm = np.maximum(losses, 0.0)
    return np.asarray(harm.mean(axis=0) + CAUTION * harm.std(axis=0) / np.sqrt(len(harm)))
