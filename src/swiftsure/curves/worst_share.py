"""The worst share: the mean loss of a share of the samples, counted from where losses cut it off.

For every t, t + E[(ℓ − t)⁺] / share is at least that mean, and equal to it if t is the quantile
that cuts off the share. A bet may take t from the units before the one that it bets on.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import kernels as _kernels

__all__ = ["Members", "followed", "worst_share"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Members:
    """The samples that the rows of a curve were made of: groups, or samples with weights.

    Attributes
    ----------
    losses : Losses
        Of single samples without weights, from 0 on and divided by the share.
    weights : (n,)
        How much each sample counts.
    codes : (n,)
        The unit of each sample.
    divisors : (n_units,)
        What sums over a unit are divided by.
    exits_only : bool
        Whether samples that reach the full model do not count.
    units : (n_rows,)
        The unit that each row of the curve is.
    """

    losses: _kernels.Losses
    weights: Floats
    codes: Rows
    divisors: NDArray[Any]
    exits_only: bool
    units: Rows

    def take(self, rows: Rows, settings: slice = slice(None)) -> "Members":
        """Return the members of some rows of the curve, at some settings."""
        values, thresholds = self.losses.values, self.losses.thresholds[settings]
        if thresholds.shape[1] == 0:
            values = np.ascontiguousarray(values[:, settings])
        losses = self.losses._replace(values=values, thresholds=thresholds)
        return replace(self, losses=losses, units=self.units[rows])

    def along(self, thresholds: NDArray[np.float32]) -> "Members":
        """Return the same samples along another path."""
        return replace(self, losses=self.losses._replace(thresholds=thresholds))

    def column(self, index: int, rows: Rows) -> tuple[Floats, Floats, Rows]:
        """Return losses and weights at one setting, with the row of each, unit after unit."""
        by_unit = np.argsort(self.codes, kind="stable")
        ends = np.searchsorted(self.codes[by_unit], np.arange(len(self.divisors) + 1))
        wanted = self.units[rows]
        sizes = ends[wanted + 1] - ends[wanted]
        place = np.repeat(np.arange(len(rows)), sizes)
        before = np.repeat(np.cumsum(sizes) - sizes, sizes)
        members = by_unit[np.repeat(ends[wanted], sizes) + np.arange(len(place)) - before]
        values = _kernels.gather(self.losses, members, index, index + 1)[:, 0]
        weights = self.weights[members] / self.divisors[wanted][place]
        if self.exits_only:
            exits = _kernels.exit_indices(
                self.losses.confidences[members],
                self.losses.thresholds[index],
                self.losses.strict,
                self.losses.min_exit,
            )
            weights = weights * (exits < self.losses.confidences.shape[1])
        return values, weights, place


def followed(curve: Any, index: int, rows: Rows) -> Any:
    """Return a curve with one setting and some rows, whose losses count from earlier cuts.

    The mean of each, given those before, is at least the mean of the worst share; so a bet on them
    is a test of it.
    """
    alone = curve.only(index, rows)
    share, n = curve.statistic.worst, len(rows)
    losses, weights, place = alone.data.values[:, 0], np.ones(n), np.arange(n)
    if curve.units.members is not None:
        losses, weights, place = curve.units.members.column(index, rows)
    starts = np.searchsorted(place, np.arange(n + 1))
    cuts = _kernels.earlier_cuts(losses, weights, starts, share)
    values = np.bincount(place, weights * _counted_from(losses, cuts, share), minlength=n)
    data = alone.data._replace(values=np.ascontiguousarray(values[:, None]))
    return replace(
        alone,
        data=data,
        statistic=replace(alone.statistic, above=0.0),
        units=replace(alone.units, members=None),
    )


def worst_share(losses: Floats, weights: Floats, share: float) -> float:
    """Return the mean of the worst share of some samples; losses are divided by the share."""
    total = float(weights.sum())
    if total == 0.0:
        return 0.0
    cut = np.full(len(losses), _cut(losses, weights, share))
    return float((weights * _counted_from(losses, cut, share)).sum() / total)


def _counted_from(losses: Floats, cuts: Floats, share: float) -> Floats:
    """Return t + (ℓ − t)⁺ / share, for ℓ and t divided by the share."""
    counted: Floats = share * cuts + np.maximum(losses - cuts, 0.0)
    return counted


def _cut(losses: Floats, weights: Floats, share: float) -> float:
    """Return the smallest loss, at least 0, above which lies at most the share of the weight."""
    order = np.argsort(losses)
    reached = np.cumsum(weights[order])
    if not len(order) or reached[-1] <= 0.0:
        return 0.0
    position = int(np.searchsorted(reached, (1.0 - share) * reached[-1] * (1.0 - 1e-12)))
    return max(float(losses[order[min(position, len(order) - 1)]]), 0.0)
