"""Sampling: how the samples of a record were drawn, and what a mean over them weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.curves.curve import Average, RiskCurve

__all__ = ["Sampling", "check_groups", "checked_weights"]

Array = NDArray[Any]

SLACK = 1e-6
"""How far rounding may carry a weight out of its range, relative to the largest."""


@dataclass(frozen=True, eq=False)
class Sampling:
    """What is known of the draw of samples, besides their groups and slices.

    Attributes
    ----------
    average : {"group", "sample"} or None
        For samples in groups, what a risk weights equally: every group (the default), or every
        sample.
    max_size : int or None
        The largest number of samples that a group can have, declared for averages over samples.
    weights : (n,) or None
        Density of production samples relative to that of these samples.
    max_weight : float or None
        The largest weight that can occur, declared before the data are seen.
    estimated : bool
        Whether the weights were estimated, which certificates then state as an assumption.
    population : int or None
        Size of the finite population that the samples, or whole groups of them, were drawn from
        without replacement.
    part : bool
        Whether these are the samples of one slice, whose mean weight need not be 1.
    """

    average: Average | None = None
    max_size: int | None = None
    weights: Array | None = field(default=None, repr=False)
    max_weight: float | None = None
    estimated: bool = False
    population: int | None = None
    part: bool = False

    def check(self, groups: Array | None, n: int) -> None:
        """Raise if these facts do not fit n samples in these groups."""
        if self.average is not None or self.max_size is not None:
            check_groups(groups, self.average, self.max_size)
        if self.weights is not None:
            checks.of_shape("weights", self.weights, {"n": n})
        if self.population is not None:
            checks.count("population", self.population, n if groups is None else _number(groups))

    def take(self, rows: Array) -> "Sampling":
        """Return the same facts about some of the samples."""
        return self if self.weights is None else replace(self, weights=self.weights[rows])

    def facts(self) -> dict[str, Any]:
        """Return what all samples share, as JSON; empty if nothing was declared."""
        held = {
            name: getattr(self, name)
            for name in ("average", "max_size", "max_weight", "estimated", "population")
        }
        return {name: value for name, value in held.items() if value not in (None, False)}

    def applied(
        self, curve: RiskCurve, groups: Array | None, rows: Array | None = None
    ) -> RiskCurve:
        """Return the curve of these samples, or of some rows of them, as the promise weights them.

        `rows` are those of one slice, in which the mean weight need not be 1.
        """
        weights = self.weights
        if rows is not None:
            curve = curve.take(rows)
            groups = None if groups is None else groups[rows]
            weights = None if weights is None else weights[rows]
        return curve.drawn(
            weights=weights,
            max_weight=self.max_weight or 1.0,
            estimated=self.estimated,
            groups=groups,
            average=self.average or "group",
            max_size=self.max_size,
            part=self.part or rows is not None,
        )


def _number(groups: Array) -> int:
    return len(np.unique(groups))


def check_groups(groups: Array | None, average: str | None, max_size: int | None) -> None:
    """Raise if what is averaged, or the declared largest size, does not fit the groups."""
    if groups is None:
        raise ValueError("`average` and `max_size` are for samples in groups; give the groups too.")
    found = None if average is None else checks.choice("average", average, ["group", "sample"])
    if found == "sample" and max_size is None:
        raise ValueError(
            "`max_size` must be given for `average='sample'`: the largest number of samples that a"
            " group can have, declared before the data are seen."
        )
    if found != "sample" and max_size is not None:
        raise ValueError("`max_size` is for `average='sample'` only.")
    if max_size is None:
        return
    largest = checks.count("max_size", max_size)
    names, sizes = np.unique(groups, return_counts=True)
    most = int(sizes.argmax())
    if sizes[most] > largest:
        raise ValueError(
            f"`max_size` must be at least the size of every group, but it is {largest:,} and group"
            f" {names[most]!s} has {sizes[most]:,} samples. Declare the largest size that can"
            " occur, and calibrate on other samples."
        )


def checked_weights(
    weights: ArrayLike | Mapping[Any, float],
    max_weight: float,
    slices: Array | None,
    n: int,
    n_units: int,
) -> tuple[Array, float]:
    """Return one weight for each sample, and the declared largest one.

    `n_units` of the samples, or of groups of them, were drawn independently.
    """
    most = checks.between("max_weight", max_weight, 0.0, np.inf)
    if most < 1:
        raise ValueError(
            f"`max_weight` must be at least 1, since the mean weight is 1, but got {most:g}."
        )
    if isinstance(weights, Mapping):
        if slices is None:
            raise ValueError("`weights` by slice need a record with slices; see `sliced`.")
        named = {str(name): float(weight) for name, weight in weights.items()}
        for name in np.unique(slices.astype(str)).tolist():
            checks.choice("weights", name, named)
        weights = np.asarray([named[name] for name in slices.astype(str).tolist()])
    values = checks.finite("weights", checks.numbers("weights", weights, np.float64))
    checks.of_shape("weights", values, {"n": n})
    values = checks.within("weights", values, 0.0, most, SLACK * most)
    # Bernstein's inequality: weights in [0, W] with mean 1 have a variance of at most W - 1.
    surprise = np.log(2e9) / n_units
    off = np.sqrt(2 * (most - 1) * surprise) + most * surprise / 3 + SLACK
    if abs(values.mean() - 1) > off:
        raise ValueError(
            "`weights` must be 1 on average over the calibration distribution, as a ratio of"
            f" densities is, but the mean of these {n:,} is {values.mean():g}."
        )
    return values, most
