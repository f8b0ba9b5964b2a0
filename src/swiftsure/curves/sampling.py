"""Sampling: how the samples of a record were drawn, and what a mean over them weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure._lib import kernels as _kernels
from swiftsure.curves.conditions import Condition
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.units import Average, Units
from swiftsure.curves.worst_share import Members
from swiftsure.losses import LossRange

__all__ = ["SHARED", "Sampled", "Sampling", "check_groups", "group_array"]

Array = NDArray[Any]
Floats = NDArray[np.float64]

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
            checks.between("max_weight", self.max_weight, 1.0 - SLACK, np.inf)  # type: ignore[arg-type]
        if self.population is not None:
            checks.count("population", self.population, n if groups is None else _number(groups))

    def take(self, rows: Array) -> "Sampling":
        """Return the same facts about some of the samples."""
        return self if self.weights is None else replace(self, weights=self.weights[rows])

    def facts(self) -> dict[str, Any]:
        """Return what all samples share, as JSON; empty if nothing was declared."""
        held = {name: getattr(self, name) for name in SHARED}
        return {name: value for name, value in held.items() if value not in (None, False)}

    def applied(
        self, curve: RiskCurve, groups: ArrayLike | None = None, rows: Array | None = None
    ) -> RiskCurve:
        """Return the curve of the units that were drawn, weighted as the promise weights them.

        Parameters
        ----------
        curve : RiskCurve
            Of single samples, all counted alike.
        groups : (n,), optional
            Labels of dependent rows (requests of one user, frames of one video).
        rows : (m,), optional
            Those of one slice, in which the mean weight need not be 1.

        Notes
        -----
        A promise is E[y] ≤ ε E[z], with y the weighted sum (or mean) of a unit's losses and z that
        of ones, both divided by the largest z possible. It holds if and only if y + ε (1 − z) has a
        mean of at most ε: the unit, filled up with losses of ε. That is at most B, so a test at ε
        of its mean is a test of the promise. For plain samples E[w] is 1, so z = 1 may stay.
        """
        weights = self.weights
        labels = None if groups is None else np.asarray(groups)
        if rows is not None:
            curve = curve.take(rows)
            labels = None if labels is None else labels[rows]
            weights = None if weights is None else weights[rows]
        part = self.part or rows is not None
        if not part and labels is None and weights is None:
            return curve
        if curve.units.grouped or curve.units.max_weight is not None:
            raise ValueError("`groups` and `weights` must be given once, and together.")
        if curve.shuffled_with is not None:
            raise ValueError("`groups` and `weights` must be given before samples are shuffled.")
        if labels is not None:
            checks.of_shape("groups", labels, {"n": curve.n})
            check_groups(labels, self.average, self.max_size)
        curve = replace(curve, units=self._units(part, labels is not None, curve.n))
        plain = labels is None and not curve.statistic.selective
        if weights is None:
            return curve if labels is None else _in_units(curve, labels, np.ones(curve.n))
        if plain and not part:
            return _weighted(curve, weights)
        return _in_units(curve, labels, weights / curve.units.max_weight)

    def _units(self, part: bool, grouped: bool, n: int) -> Units:
        """Return the units of n samples; their sizes are still to be summed."""
        unit = "groups" if grouped else "samples"
        draws = Condition.of("draws", kind="slices", unit=unit) if part else None
        if self.weights is not None:
            kind = "weighted slices" if part else "weights"
            draws = Condition.of("draws", kind=kind, unit=unit, estimated=self.estimated)
        most = None if self.weights is None else self.max_weight
        if not grouped:
            return Units(max_weight=most, drawn_as=draws)
        average = self.average or "group"
        return Units(True, average, self.max_size, n, max_weight=most, drawn_as=draws)


SHARED = [each.name for each in fields(Sampling) if each.name not in ("weights", "part")]
"""Facts that all samples share, which files state."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Sampled:
    """What a record says of the draw of its samples; the base class of records."""

    groups: Array | None = None
    slices: Array | None = None
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.ids)  # type: ignore[attr-defined]

    @property
    def unit(self) -> Literal["samples", "groups"]:
        """What was drawn independently: "samples", or "groups" of them."""
        return "samples" if self.groups is None else "groups"

    @property
    def n_units(self) -> int:
        """Number of samples, or of groups."""
        return self.n if self.groups is None else len(np.unique(self.groups))

    def grouped(
        self,
        groups: ArrayLike,
        *,
        average: Literal["group", "sample"] = "group",
        max_size: int | None = None,
    ) -> Self:
        """Return the record with groups of dependent samples, which guarantees then count.

        Parameters
        ----------
        groups : (n,)
            The group of each sample: one user's requests, one video's frames.
        average : {"group", "sample"}
            What a risk weights equally: every group, or every sample.
        max_size : int
            Required for "sample": the largest number of samples that a group can have, declared
            before the data are seen.

        Examples
        --------
        >>> import swiftsure as ss
        >>> record = ss.ExitRecord([[0.9], [0.4], [0.7]], losses={"zero_one": [[0, 0]] * 3})
        >>> record.grouped(["ann", "ann", "bob"], average="sample", max_size=20).sampling.max_size
        20
        """
        if self.sampling.population is not None:
            raise ValueError(
                "`groups` must be given before the population that they were drawn from, which is a"
                " number of groups: record.grouped(...).drawn_from(number_of_groups)."
            )
        labels = group_array(groups, self.n)
        sampling = replace(self.sampling, average=average, max_size=max_size)
        return replace(self, groups=labels, sampling=sampling)

    def sliced(self, slices: ArrayLike) -> Self:
        """Return the record with the slice of each sample: class, language, tenant, device.

        Examples
        --------
        >>> import swiftsure as ss
        >>> record = ss.ExitRecord([[0.9], [0.4]], losses={"zero_one": [[0, 0]] * 2})
        >>> record.sliced(["fr", "de"]).slices.tolist()
        ['fr', 'de']
        """
        return replace(self, slices=group_array(slices, self.n, "slices"))

    def weighted(
        self,
        weights: ArrayLike | Mapping[Any, float],
        *,
        max_weight: float,
        estimated: bool = False,
    ) -> Self:
        """Return the record with weights, so that promises are about another distribution.

        Parameters
        ----------
        weights : (n,) or mapping of slices to weights
            Density of production samples relative to that of these samples; its mean is 1.
        max_weight : float
            The largest weight that can occur, declared before the data are seen.
        estimated : bool
            Whether the weights were estimated; certificates then state what that assumes.

        Raises
        ------
        ValueError
            If the weights cannot be a ratio of densities, whose mean is 1: their mean differs from
            1 by more than chance allows, once in a thousand million.

        Examples
        --------
        >>> import swiftsure as ss
        >>> record = ss.ExitRecord([[0.9], [0.4]], losses={"zero_one": [[0, 0]] * 2})
        >>> sliced = record.sliced(["night", "day"])
        >>> sliced.weighted({"night": 1.6, "day": 0.4}, max_weight=1.6).sampling.weights.tolist()
        [1.6, 0.4]
        """
        values, most = _checked_weights(weights, max_weight, self.slices, self.n, self.n_units)
        sampling = replace(
            self.sampling, weights=values, max_weight=most, estimated=bool(estimated)
        )
        return replace(self, sampling=sampling)

    def drawn_from(self, population: int) -> Self:
        """Return the record of samples drawn without replacement from a finite population.

        Promises are then about that population. Of a record with groups, it is the number of groups
        in the population.

        Examples
        --------
        >>> import swiftsure as ss
        >>> record = ss.ExitRecord([[0.9], [0.4]], losses={"zero_one": [[0, 0]] * 2})
        >>> record.drawn_from(20_000).sampling.population
        20000
        """
        size = checks.count("population", population, self.n_units)
        return replace(self, sampling=replace(self.sampling, population=size))


def _in_units(curve: RiskCurve, labels: Array | None, weights: Floats) -> RiskCurve:
    """Return the curve whose rows are units: sums of weighted rows, divided by the largest size."""
    units, selective = curve.units, curve.statistic.selective
    codes, divisors = np.arange(curve.n), np.ones(curve.n, np.int64)
    if labels is not None:
        _, codes, divisors = np.unique(labels, return_inverse=True, return_counts=True)
    if units.max_size is not None:
        divisors = np.full_like(divisors, units.max_size)
    every = np.ones(curve.data.values.shape[1])
    counted = np.outer(weights, every)
    if selective and curve.has_exits:
        counted[:, -1] = 0.0  # the samples that reach the full model do not count

    def sums(table: Floats) -> Floats:
        found: Floats = _kernels.group_sums(
            curve.data._replace(values=np.ascontiguousarray(table)), codes, divisors
        )
        return found

    costs = dict(curve.costs)
    for name, values in curve.costs.items():
        if values.ndim == 2 or curve.has_exits:
            costs[name] = sums(np.outer(weights, every) * values)
    full_costs = {
        name: alone if np.ndim(alone) == 0 else np.bincount(codes, alone * weights) / divisors
        for name, alone in curve.full_costs.items()
    }
    table = sums(counted * curve.data.values)
    equal = units.grouped and units.average == "group" and units.max_weight is None
    return replace(
        curve,
        loss_range=LossRange(curve.loss_range.low, curve.loss_range.high),
        costs=costs,
        full_costs=full_costs,
        units=replace(
            units,
            weights=None if equal else np.bincount(codes, weights) / divisors,
            sizes=sums(counted) if selective else None,
            members=_members(curve, codes, weights, divisors),
        ),
        data=_kernels.Losses(
            table,
            np.empty((len(table), 0), np.float32),
            np.empty((curve.n_settings, 0), np.float32),
            *curve.data[3:],  # the exit rule, which a policy still has to say
        ),
    )


def _weighted(curve: RiskCurve, weights: Floats) -> RiskCurve:
    """Return the curve of plain samples with weighted losses: their mean weight is 1."""
    low, high, most = curve.loss_range.low, curve.loss_range.high, curve.units.max_weight or 1.0
    shares = weights / weights.mean()
    return replace(
        curve,
        # A weight may be 0, so losses of at least t > 0 may be 0 too.
        loss_range=LossRange(min(0.0, most * low), most * high),
        costs={k: _weighted_cost(curve, v, shares) for k, v in curve.costs.items()},
        full_costs={k: np.asarray(v) * shares for k, v in curve.full_costs.items()},
        units=replace(
            curve.units, members=_members(curve, np.arange(curve.n), weights, np.ones(curve.n))
        ),
        data=curve.mapped(lambda losses, weight: losses * weight[:, None], weights),
    )


def _members(curve: RiskCurve, codes: Array, weights: Floats, divisors: Array) -> Members | None:
    """Return the single samples, if the units of a worst share have to look at each."""
    if curve.statistic.worst is None or curve.statistic.above is not None:
        return None
    units, exits_only = np.arange(len(divisors)), curve.statistic.selective
    return Members(curve.data, weights, codes, divisors, exits_only, units)


def _weighted_cost(curve: RiskCurve, cost: Floats, shares: Floats) -> Floats:
    """Return each sample's costs times its share of the weights, (n, n_exits) or (n, K)."""
    if cost.ndim == 2:
        return curve.storage.mapped(lambda each, share: each * share[:, None], cost, shares)
    return curve.storage.mapped(lambda share: cost * share[:, None], shares)


def _number(groups: Array) -> int:
    return len(np.unique(groups))


def group_array(labels: ArrayLike | None, n: int, name: str = "groups") -> Array | None:
    """Return labels of groups or slices, or None."""
    return None if labels is None else checks.names(name, labels, n)


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


def _checked_weights(
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
