"""Maps of the losses of a curve, of which every promise is made: each returns a curve to test.

| map | the mean of the new losses is, or bounds |
|---|---|
| `tail(curve, 0.1)` | P(loss > 0.1) |
| `worst_mean(curve, 0.1)` | the mean loss of the worst tenth |
| `zero_bounded(curve)` | the mean of max(0, loss), Eq. 16 of the paper |
| `among_exits(curve)` | the mean loss of the samples that exit early |
| `cost_curve(curve, name, largest)` | a mean cost, as a share of the largest |

They come before units are weighted and grouped; see `swiftsure.curves.sampling.drawn`.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.measures import Measure, measured
from swiftsure.curves.statistic import ZERO_BOUNDED
from swiftsure.losses import LossRange

__all__ = ["among_exits", "cost_curve", "tail", "worst_mean", "zero_bounded"]


def tail(curve: RiskCurve, above: float) -> RiskCurve:
    """Return the curve of 1 where the loss is above a limit, else 0.

    Its risk is the probability of such a loss, and the exact binomial test applies.

    Examples
    --------
    >>> curve = RiskCurve.from_losses([1.0, 0.5], [[0, 0.3], [0, 0.1]], relative=True)
    >>> tail(curve, 0.2).risk()
    array([0. , 0.5])
    """
    return measured(curve, Measure(above=above))


def worst_mean(curve: RiskCurve, share: float, above: float | None = None) -> RiskCurve:
    """Return a curve whose risk is the mean loss of the worst share of the samples.

    For every t, t + E[(loss − t)⁺] / share is at least that mean (the conditional value at
    risk), and equal to it if t is the quantile that cuts off the share. Bets take t, at least 0,
    from the units before the one that they bet on. Other tests count from 0, which is as good if
    at most this share of the losses is above 0.

    Parameters
    ----------
    share : float
        In (0, 1), such as 0.1 for the worst tenth.
    above : float, optional
        t, fixed before the data are seen; risks are then the upper estimate with this t.

    References
    ----------
    Rockafellar and Uryasev (2000), Optimization of conditional value-at-risk.
    """
    return measured(curve, Measure(worst=share, above=above))


def zero_bounded(curve: RiskCurve) -> RiskCurve:
    """Return the curve of max(0, loss), Eq. 16 of the paper: an upper bound of this one.

    For a 0-1 gap it is 0 or 1, so the binomial test applies.
    """
    if curve.loss_range.low >= 0:
        return curve
    return replace(
        curve,
        loss_range=curve.loss_range.zero_bounded(),
        statistic=replace(curve.statistic, risk=ZERO_BOUNDED + curve.statistic.risk),
        data=curve.mapped(lambda losses: np.maximum(losses, 0.0)),
    )


def among_exits(curve: RiskCurve) -> RiskCurve:
    """Return the curve of the samples that exit early, whose mean loss is then the risk."""
    if not curve.has_exits:
        raise ValueError("`among='exits'` needs a record of exits.")
    return replace(curve, statistic=replace(curve.statistic, selective=True))


def cost_curve(curve: RiskCurve, name: str, largest: float) -> RiskCurve:
    """Return the curve of one cost, as a fraction of its largest possible value."""
    values: Any = curve.costs[name] / largest
    return replace(
        curve,
        loss_range=LossRange(0, 1),
        statistic=replace(curve.statistic, selective=False, worst=None, above=None),
        data=curve.mapped(lambda losses: np.tile(values, (len(losses), 1))),
    )
