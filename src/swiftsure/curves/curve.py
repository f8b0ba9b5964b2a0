"""RiskCurve: each sample's loss and cost at each setting of a path, the input to controls."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure._lib import kernels as _kernels
from swiftsure._lib.storage import MEMORY, Storage, blocks
from swiftsure.curves.branches import Branches
from swiftsure.curves.conditions import Condition
from swiftsure.curves.costs import deciding_costs, default_cost
from swiftsure.curves.paths import Path
from swiftsure.curves.pilots import PilotSamples
from swiftsure.curves.sample_order import SampleOrder
from swiftsure.curves.worst_share import Members, worst_share
from swiftsure.losses import LossRange

__all__ = ["RiskCurve"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Average = Literal["group", "sample"]
"""What a risk weights equally: every group, or every sample."""

SHUFFLE_STREAM = 0x5357495654
SLACK = 1e-6
"""How far rounding may carry a loss out of its range, relative to the largest loss."""

GIVEN_SETTINGS = "given settings"
"""The kind of a path whose settings came with the losses."""

LABELS_MISSING = Condition("labels missing")
"""The condition of bets on losses that were assumed to be the worst; monotone tests need none."""

UNNAMED, ZERO_BOUNDED = "loss", "zero-bounded "
"""The name of an unnamed loss, and the prefix of a risk whose losses are cut at 0."""


@dataclass(frozen=True)
class RiskCurve:
    """Losses (relative to the full model) and costs of n samples along a path of settings.

    Make one with `record.curve(...)`, or with `RiskCurve.from_losses` from plain arrays. In exit
    form it holds one loss per exit and the path's thresholds, and looks up the loss at a setting
    when it is needed. Only `losses()` makes an (n, K) matrix.

    Attributes
    ----------
    thresholds : (K,) or (K, n_exits - 1)
        The settings, safest first.
    loss_range : LossRange
        The declared range of the losses.
    relative : bool
        Whether losses are relative to the full model, whose own loss is then 0.
    full_model_first : bool
        Whether setting 0 is the full model, which needs no test. If not, setting 0 is tested like
        any other, and "nothing certified" means the full model, which is not on the path.
    costs : mapping
        Costs by name, per exit (or setting), or per sample and exit (or setting).
    full_costs : mapping
        Cost of running the full model alone, by name, if it differs from the cost of setting 0:
        a number, or one per sample, (n,).
    grouped : bool
        Whether rows are groups of samples; see `drawn`.
    n_samples : int or None
        Number of samples in these groups.
    average : {"sample", "group"}
        What risks and mean costs weight equally: every sample, or every group.
    max_group_size : int or None
        The declared largest group size, M, if the risk of groups is an average over samples.
    weights : (n,) or None
        The size of each row: how much it counts in a mean over samples, at most 1; None if all
        rows count the same. For groups it is their number of samples divided by M.
    sizes : (n, K) or None
        The same at each setting, if only the samples that exit there count.
    order : SampleOrder
        Seed of the order in which betting tests see the samples; drawn at random by default.
    conditions : tuple of Condition
        Assumptions of a promise made from these losses, besides those that every promise has.
    cut_from : int or None
        Number of settings on the path if the curve holds only the first of them; see `cut`.
    n_labels : int or None
        How many samples have a label, if the losses need labels.
    draws : Condition or None
        What calibration and production samples are, if not draws of one distribution.
    above : float or None
        If losses are 1 where another loss is above this, else 0: that limit; see `tail`. With
        `worst`, the point from which losses count; None if earlier samples decide it.
    worst : float or None
        If the risk is the mean of the worst share of the losses: that share; see `worst_mean`.
    members : Members or None
        The samples that rows were made of, if a worst share has to look at each of them.
    max_weight : float or None
        The largest weight, if losses are weighted; see `weighted`.
    selective : bool
        Whether the risk is the mean loss of the samples that exit early, and not of all.
    branches : Branches or None
        Sequences of settings that share δ, if there are several; see `Path.branching`.
    pilot : PilotSamples or None
        The separate samples that the path was learned on.
    chosen_cost : str or None
        The cost that chooses among the branches, if it was named.
    data : Losses
        The arrays, as the compiled kernels take them.
    storage : Storage
        Where arrays with a row per sample are made: in memory, or in temporary files.
    """

    thresholds: NDArray[Any]
    loss_range: LossRange
    relative: bool
    full_model_first: bool
    costs: Mapping[str, Floats]
    risk_name: str = "gap"
    loss_name: str = UNNAMED
    path_kind: str = GIVEN_SETTINGS
    grouped: bool = False
    average: Average = "sample"
    max_group_size: int | None = None
    weights: Floats | None = field(repr=False, default=None)
    sizes: Floats | None = field(repr=False, default=None)
    shuffled_with: int | None = None
    order: SampleOrder = field(default_factory=SampleOrder.draw)
    conditions: tuple[Condition, ...] = ()
    cut_from: int | None = None
    n_labels: int | None = None
    draws: Condition | None = None
    above: float | None = None
    worst: float | None = None
    members: Members | None = field(repr=False, compare=False, default=None)
    max_weight: float | None = None
    selective: bool = False
    branches: Branches | None = None
    pilot: PilotSamples | None = field(repr=False, default=None)
    chosen_cost: str | None = None
    full_costs: Mapping[str, float | Floats] = field(default_factory=dict)
    n_samples: int | None = None
    data: _kernels.Losses = field(repr=False, default=None)  # type: ignore[assignment]
    storage: Storage = field(repr=False, compare=False, default=MEMORY)
    _nested: bool = field(repr=False, default=False)

    @classmethod
    def from_losses(
        cls,
        thresholds: ArrayLike,
        losses: ArrayLike,
        costs: ArrayLike | Mapping[str, ArrayLike] | None = None,
        loss_range: LossRange | tuple[float, float] = (-1, 1),
        *,
        binary: bool = False,
        relative: bool | None = None,
        groups: ArrayLike | None = None,
        average: Average | None = None,
        max_group_size: int | None = None,
        risk: str = "gap",
        loss: str = UNNAMED,
        order: SampleOrder | int | None = None,
    ) -> "RiskCurve":
        """Make a curve from the loss of every sample at every setting.

        Parameters
        ----------
        thresholds : (K,)
            Settings from safest to fastest, in any unit.
        losses : (n, K)
            Losses relative to the full model (early loss minus full loss, for example).
        costs : (K,), (n, K) or a mapping of such, optional
            Cost of each setting.
        loss_range : (low, high) or LossRange
            Range of the losses, by their definition.
        binary : bool
            Declares that each loss is 0 or 1, which admits the exact binomial test.
        relative : bool, optional
            By default losses are relative to the full model, and setting 0 is the full model,
            which needs no test, only if its threshold is None or infinity; otherwise setting 0 is
            tested like any other. True: setting 0 is the full model, whatever its threshold. False:
            losses are not relative to the full model; setting 0 is tested, and `crc` refuses them.
        groups : (n,), optional
            Labels of dependent rows (frames of one video); groups are then the unit of every
            guarantee.
        average, max_group_size
            For curves with groups, as in `drawn`; `max_group_size` is its `max_size`.
        order : SampleOrder or int, optional
            Seed of the order in which betting tests see the samples. By default one is drawn from
            the operating system's random numbers, and the curve keeps it.

        Raises
        ------
        ValueError
            If shapes do not match, a loss is not finite or outside `loss_range`, or setting 0 is
            the full model and has a loss other than 0.

        Examples
        --------
        >>> curve = RiskCurve.from_losses([1.0, 0.5], [[0.0, 1.0], [0.0, -1.0]])
        >>> curve.risk()
        array([0., 0.])
        """
        declared = LossRange.of(loss_range)
        if binary:
            if (declared.low, declared.high) not in [(0, 1), (-1, 1)]:
                raise ValueError(
                    "`loss_range` of binary losses must be (0, 1), but got"
                    f" ({declared.low:g}, {declared.high:g})."
                )
            declared = LossRange(0, 1, whole=True)
        settings = dial_array(thresholds)
        values = checks.numbers("losses", losses, np.float64)
        checks.of_shape("losses", values, {"n": None, "K": len(settings)})
        values = in_range("losses", values, declared)
        # What is tested must not depend on the losses, so they are only checked against it.
        full_model_first = bool(np.isposinf(settings[0])) if relative is None else relative
        if full_model_first and values[:, 0].any():
            raise ValueError(
                "`losses` must be 0 in column 0, the full model: its threshold is None or infinity,"
                " or `relative=True` says so. Subtract the full model's losses, or pass"
                " `relative=False` if they are not relative to the full model."
            )
        if costs is None:
            costs = {}
        named = costs if isinstance(costs, Mapping) else {"cost": costs}
        curve = cls(
            thresholds=settings,
            loss_range=declared,
            relative=relative is not False,
            full_model_first=full_model_first,
            costs={k: cost_array(k, v, values.shape, "K") for k, v in named.items()},
            risk_name=risk,
            loss_name=loss,
            order=SampleOrder.of(order, "order"),
            data=_kernels.Losses(
                np.ascontiguousarray(values),
                np.empty((len(values), 0), np.float32),
                np.empty((len(settings), 0), np.float32),
                False,
                0,
            ),
        )
        if groups is None:
            if average is not None or max_group_size is not None:
                raise ValueError("`average` and `max_group_size` need groups.")
            return curve
        return curve.drawn(groups=groups, average=average or "group", max_size=max_group_size)

    @classmethod
    def from_exits(
        cls,
        confidences: NDArray[np.float32],
        losses: Floats,
        path: Path,
        costs: Mapping[str, Floats],
        loss_range: LossRange,
        *,
        strict: bool = False,
        min_exit: int = 0,
        risk: str = "gap",
        loss: str = UNNAMED,
        order: SampleOrder | int | None = None,
        conditions: tuple[Condition, ...] = (),
        full_costs: Mapping[str, float | Floats] | None = None,
        n_labels: int | None = None,
        selective: bool = False,
    ) -> "RiskCurve":
        """Make a curve from a record's checked arrays.

        Relative losses are (n, n_exits), the last column 0; costs are (n_exits,) or (n, n_exits).
        """
        curve = cls(
            thresholds=path.thresholds,
            loss_range=loss_range,
            relative=True,
            full_model_first=True,
            costs=costs,
            risk_name=risk,
            loss_name=loss,
            order=SampleOrder.of(order, "order"),
            conditions=conditions,
            full_costs=full_costs or {},
            n_labels=n_labels,
            selective=selective,
            data=_kernels.Losses(
                np.ascontiguousarray(losses),
                np.ascontiguousarray(confidences),
                np.empty((0, confidences.shape[1]), np.float32),
                bool(strict),
                int(min_exit),
            ),
        )
        return curve.along(path)

    @classmethod
    def joined(cls, parts: Iterable["RiskCurve"], n: int, storage: Storage) -> "RiskCurve":
        """Return one curve of the samples of several, which must be in exit form and not grouped.

        Parameters
        ----------
        parts : iterable of RiskCurve
            Of one record; each is used and released before the next is asked for.
        n : int
            Number of samples in all.
        storage : Storage
            Where the arrays are made.
        """
        tables: dict[str, NDArray[Any]] = {}
        shortest: RiskCurve | None = None
        conditions: dict[Condition, None] = {}
        splits: dict[SampleOrder, None] = {}
        n_labels, done = 0, 0
        for part in parts:
            rows = {"values": part.data.values, "confidences": part.confidences}
            rows |= {f"cost {k}": v for k, v in part.costs.items() if v.ndim == 2}
            rows |= {f"full {k}": np.asarray(v) for k, v in part.full_costs.items() if np.ndim(v)}
            for name, values in rows.items():
                if name not in tables:
                    tables[name] = storage.empty((n, *values.shape[1:]), values.dtype)
                tables[name][done : done + part.n] = values
            done += part.n
            n_labels += part.n_labels or 0
            conditions |= dict.fromkeys(part.conditions)
            splits |= dict.fromkeys(part.order.splits)
            if shortest is None or part.n_settings < shortest.n_settings:
                shortest = part  # where labels are missing, paths are cut
        if shortest is None or done != n:
            raise ValueError(f"`parts` must hold {n:,} samples, but hold {done:,}.")
        return replace(
            shortest,
            costs={k: tables.get(f"cost {k}", v) for k, v in shortest.costs.items()},
            full_costs={k: tables.get(f"full {k}", v) for k, v in shortest.full_costs.items()},
            conditions=tuple(conditions),
            order=shortest.order.after(*splits),
            n_labels=None if shortest.n_labels is None else n_labels,
            storage=storage,
            data=shortest.data._replace(values=tables["values"], confidences=tables["confidences"]),
        )

    def along(self, path: Path) -> "RiskCurve":
        """Return the same samples along another path."""
        if not self.has_exits:
            raise ValueError("A curve made from losses at each setting has no other path.")
        thresholds = path.per_exit(self.data.values.shape[1])
        return replace(
            self,
            thresholds=path.thresholds,
            data=self.data._replace(thresholds=thresholds),
            members=None if self.members is None else self.members.along(thresholds),
            _nested=bool((thresholds[1:] <= thresholds[:-1]).all()),
        ).taken_along(path)

    def taken_along(self, path: Path) -> "RiskCurve":
        """Return the curve, whose settings are those of a path, with what the path tells."""
        return replace(
            self,
            path_kind=path.kind,
            branches=path.branches,
            pilot=path.pilot,
            chosen_cost=path.cost,
        )

    @property
    def n(self) -> int:
        """Number of samples, or of groups."""
        return len(self.data.values)

    @property
    def n_pilot(self) -> int | None:
        """Number of samples, or of groups, that the path was learned on."""
        return None if self.pilot is None else self.pilot.count(self.grouped)

    @property
    def n_settings(self) -> int:
        """Number of settings, K."""
        return len(self.thresholds)

    @property
    def n_path(self) -> int:
        """Number of settings on the whole path, including those that were cut off."""
        return self.n_settings if self.cut_from is None else self.cut_from

    def cut(self, n_settings: int) -> "RiskCurve":
        """Return the curve of the first settings only, where a walk along the path has to stop.

        Stopping early is valid whatever decided it: a walk that stops certifies only settings that
        it would have certified anyway.
        """
        if n_settings >= self.n_settings:
            return self
        if self.branches is not None:
            raise ValueError("`path` with branches cannot be cut where labels are missing.")
        values, kept = self.data.values, slice(n_settings)
        costs = {
            name: cost if self.has_exits else cost[..., kept] for name, cost in self.costs.items()
        }
        return replace(
            self,
            thresholds=self.thresholds[kept],
            costs=costs,
            sizes=None if self.sizes is None else self.sizes[:, kept],
            cut_from=self.n_path,
            data=self.data._replace(
                values=values if self.has_exits else np.ascontiguousarray(values[:, kept]),
                thresholds=self.data.thresholds[kept],
            ),
        )

    def threshold_at(self, index: int) -> float | tuple[float | None, ...] | None:
        """Return the threshold of one setting: a number, one per exit, or None for never."""
        value = self.thresholds[index]
        if value.ndim == 0:
            return None if np.isposinf(value) else float(value)
        return tuple(None if np.isposinf(v) else float(v) for v in value)

    @property
    def has_exits(self) -> bool:
        """Whether the curve is in exit form."""
        return bool(self.data.thresholds.shape[1] > 0)

    @property
    def strict(self) -> bool:
        """Whether samples exit on `>` rather than `≥`."""
        return bool(self.data.strict)

    @property
    def min_exit(self) -> int:
        """Index of the first exit that may be taken."""
        return int(self.data.min_exit)

    @property
    def confidences(self) -> NDArray[np.float32]:
        """Confidences of a curve in exit form, (n, n_exits - 1); no columns otherwise."""
        found: NDArray[np.float32] = self.data.confidences
        return found

    def risk(self, rows: Rows | None = None) -> Floats:
        """Return the mean loss at each setting, (K,): over samples or groups, as `average` says.

        If `selective`, over the samples that exit early; 0 where none does. Of a worst share, the
        mean over that share of the samples.
        """
        if self.follows:
            chosen = self._rows(rows)
            return np.asarray([self._worst_share(k, chosen) for k in range(self.n_settings)])
        counted = np.asarray(self.counted(rows))
        risk: Floats = self.totals(rows)[0] / np.where(counted > 0, counted, 1.0)
        return risk

    def counted(self, rows: Rows | None = None) -> Floats | float:
        """Return what turns sums of losses into risks.

        The weight of the rows, or if `selective` that of those that exit at each setting, (K,).
        """
        if self.sizes is not None:
            exiting: Floats = (self.sizes if rows is None else self.sizes[rows]).sum(axis=0)
            return exiting
        if self.selective:
            left: Floats = np.rint((1 - self.exit_shares(rows)[:, -1]) * self.weight(rows))
            return left
        return self.weight(rows)

    def risk_at(self, index: int) -> float:
        """Return the mean loss at one setting; if `selective`, of the samples that exit early."""
        if self.follows:
            return self._worst_share(index, self._rows(None))
        total = self.loss_at(index).sum()
        if self.sizes is not None:
            return float(total / (self.sizes[:, index].sum() or 1.0))
        if self.selective:
            return float(total / max(1, self.left_at(index).sum()))
        return float(total / self.weight())

    @property
    def follows(self) -> bool:
        """Whether the point from which a worst share counts is that of the samples themselves."""
        plain = not self.grouped and self.max_weight is None
        return self.worst is not None and self.above is None and (plain or self.members is not None)

    def _worst_share(self, index: int, rows: Rows) -> float:
        part = 1.0 if self.worst is None else self.worst
        if self.members is not None:
            values, weights, _ = self.members.column(index, rows)
            return worst_share(values, weights, part)
        if self.selective:
            rows = rows[self.left_at(index)[rows]]
        return worst_share(self._column(index, rows)[:, 0], np.ones(len(rows)), part)

    def left_at(self, index: int) -> NDArray[np.bool_]:
        """Return which samples exit early at one setting, (n,)."""
        last = self.confidences.shape[1]
        return self.storage.mapped(lambda some: self._exits(some, index) < last, self.confidences)

    def _exits(self, confidences: NDArray[np.float32], index: int) -> Rows:
        """Return the exit that each sample takes at one setting."""
        exits: Rows = _kernels.exit_indices(
            confidences, self.data.thresholds[index], self.strict, self.min_exit
        )
        return exits

    def take(self, rows: Rows) -> "RiskCurve":
        """Return the curve of some samples only, in that order."""
        if self.grouped or self.shuffled_with is not None:
            raise ValueError("`rows` of a curve can be taken only before grouping and shuffling.")
        chosen = self._rows(np.asarray(rows))
        return replace(
            self,
            costs={k: v if v.ndim == 1 else v[chosen] for k, v in self.costs.items()},
            full_costs={k: v if np.ndim(v) == 0 else v[chosen] for k, v in self.full_costs.items()},  # type: ignore[index]
            data=self.data._replace(
                values=self.data.values[chosen], confidences=self.data.confidences[chosen]
            ),
            weights=None if self.weights is None else self.weights[chosen],
            sizes=None if self.sizes is None else self.sizes[chosen],
            members=None if self.members is None else self.members.take(chosen),
        )

    def tail(self, above: float) -> "RiskCurve":
        """Return the curve of 1 where the loss is above a limit, else 0.

        Its risk is the probability of such a loss, and the exact binomial test applies.

        Examples
        --------
        >>> curve = RiskCurve.from_losses([1.0, 0.5], [[0, 0.3], [0, 0.1]], relative=True)
        >>> curve.tail(0.2).risk()
        array([0. , 0.5])
        """
        limit = checks.number("above", above)
        if not 0 <= limit < self.loss_range.high:
            raise ValueError(
                f"`above` must be in [0, {self.loss_range.high:g}), but got {limit:g}."
            )
        self._refuse_transformed("above")
        return replace(
            self,
            loss_range=LossRange(0, 1, whole=True),
            above=limit,
            data=self._mapped(lambda losses: (losses > limit).astype(np.float64)),
        )

    def worst_mean(self, share: float, above: float | None = None) -> "RiskCurve":
        """Return a curve whose risk is the mean loss of the worst share of the samples.

        For every t, t + E[(ℓ − t)⁺] / share is at least that mean (the conditional value at
        risk), and equal to it if t is the quantile that cuts off the share. Bets take t, at least
        0, from the units before the one that they bet on. Other tests count from 0, which is as
        good if at most this share of the losses is above 0.

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
        part = checks.between("worst", share, 0.0, 1.0)
        limit = 0.0 if above is None else checks.number("above", above)
        high = self.loss_range.high
        if not 0 <= limit < high:
            raise ValueError(f"`above` must be in [0, {high:g}), but got {limit:g}.")
        self._refuse_transformed("worst")
        return replace(
            self,
            loss_range=LossRange(limit, limit + (high - limit) / part),
            above=None if above is None else limit,
            worst=part,
            data=self._mapped(lambda losses: limit + np.maximum(losses - limit, 0.0) / part),
        )

    def transformed(self, above: float | None, worst: float | None) -> "RiskCurve":
        """Return the curve of a tail or of the worst share, or this one if neither is given."""
        if worst is not None:
            return self.worst_mean(worst, above)
        return self if above is None else self.tail(above)

    def drawn(
        self,
        *,
        weights: Floats | None = None,
        max_weight: float = 1.0,
        estimated: bool = False,
        groups: ArrayLike | None = None,
        average: Average = "group",
        max_size: int | None = None,
        part: bool = False,
    ) -> "RiskCurve":
        """Return the curve of samples that are dependent, or drawn from another distribution.

        Parameters
        ----------
        weights : (n,), optional
            Density of production samples relative to that of these samples, in [0, `max_weight`];
            `record.weighted` checks them.
        max_weight : float
            The largest weight that can occur, declared before the data are seen.
        estimated : bool
            Whether the weights were estimated; certificates then say what that assumes.
        groups : (n,), optional
            Labels of dependent rows (requests of one user, frames of one video).
        average : {"group", "sample"}
            What is weighted equally. "group": the risk is the mean of the groups' mean losses.
            "sample": it is the mean over samples, that is, the expected sum of a group's losses
            divided by the expected size of a group.
        max_size : int
            Required for "sample": the largest number of samples M that a group can have, declared
            before the data are seen.
        part : bool
            Whether these are samples of one slice, whose mean weight need not be 1.

        Notes
        -----
        A promise is E[y] ≤ ε E[z], with y the weighted sum (or mean) of a unit's losses and z that
        of ones, both divided by the largest z possible. It holds if and only if y + ε (1 − z) has a
        mean of at most ε: the unit, filled up with losses of ε. That is at most B, so a test at ε
        of its mean is a test of the promise. For plain samples E[w] is 1, so z = 1 may stay.
        """
        curve = self
        unit = "samples" if groups is None else "groups"
        if part:
            curve = replace(self, draws=Condition.of("draws", kind="slices", unit=unit))
        if weights is None and groups is None:
            return curve
        if self.grouped or self.weights is not None or self.max_weight is not None:
            raise ValueError("`groups` and `weights` must be given once, and together.")
        if self.shuffled_with is not None:
            raise ValueError("`groups` and `weights` must be given before samples are shuffled.")
        if weights is not None:
            kind = "weighted slices" if part else "weights"
            draws = Condition.of("draws", kind=kind, unit=unit, estimated=estimated)
            curve = replace(self, max_weight=max_weight, draws=draws)
            if groups is None and not part and not self.selective:
                low, high = self.loss_range.low, self.loss_range.high
                return replace(
                    curve,
                    members=curve._members(np.arange(self.n), weights, np.ones(self.n)),
                    # A weight may be 0, so losses of at least t > 0 may be 0 too.
                    loss_range=LossRange(min(0.0, max_weight * low), max_weight * high),
                    costs={k: self._weighted_cost(v, weights) for k, v in self.costs.items()},
                    full_costs={
                        k: np.asarray(v) * weights / weights.mean()
                        for k, v in self.full_costs.items()
                    },
                    data=self._mapped(lambda losses, weight: losses * weight[:, None], weights),
                )
        relative = np.ones(self.n) if weights is None else weights / max_weight
        if groups is None:
            return curve._in_units(np.arange(self.n), relative, np.ones(self.n, np.int64))
        labels = np.asarray(groups)
        checks.of_shape("groups", labels, {"n": self.n})
        checks.choice("average", average, ["group", "sample"])
        names, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        divisors = counts
        if average == "sample":
            divisors = np.full_like(counts, _declared_size(max_size, names, counts))
        elif max_size is not None:
            raise ValueError("`max_size` goes with `average='sample'` only.")
        made = curve._in_units(codes, relative, divisors)
        if average == "group" and weights is None:  # every group counts 1
            made = replace(made, weights=None)
        return replace(
            made,
            grouped=True,
            n_samples=self.n,
            average=average,
            max_group_size=max_size,
        )

    def _in_units(self, codes: Rows, weights: Floats, divisors: Rows) -> "RiskCurve":
        """Return the curve whose rows are units: sums of weighted rows, divided."""
        every = np.ones(self.data.values.shape[1])
        counted = np.outer(weights, every)
        if self.selective and self.has_exits:
            counted[:, -1] = 0.0  # the samples that reach the full model do not count

        def sums(table: Floats) -> Floats:
            found: Floats = _kernels.group_sums(
                self.data._replace(values=np.ascontiguousarray(table)), codes, divisors
            )
            return found

        costs = dict(self.costs)
        for name, values in self.costs.items():
            if values.ndim == 2 or self.has_exits:
                costs[name] = sums(np.outer(weights, every) * values)
        full_costs = {
            name: alone if np.ndim(alone) == 0 else np.bincount(codes, alone * weights) / divisors
            for name, alone in self.full_costs.items()
        }
        table = sums(counted * self.data.values)
        return replace(
            self,
            loss_range=LossRange(self.loss_range.low, self.loss_range.high),
            costs=costs,
            full_costs=full_costs,
            weights=np.bincount(codes, weights) / divisors,
            sizes=sums(counted) if self.selective else None,
            members=self._members(codes, weights, divisors),
            data=_kernels.Losses(
                table,
                np.empty((len(table), 0), np.float32),
                np.empty((self.n_settings, 0), np.float32),
                self.data.strict,  # which a policy still has to say
                self.data.min_exit,
            ),
            _nested=False,
        )

    def _members(self, codes: Rows, weights: Floats, divisors: NDArray[Any]) -> Members | None:
        """Return the single samples, if the units of a worst share have to look at each."""
        if self.worst is None or self.above is not None:
            return None
        units = np.arange(len(divisors))
        return Members(self.data, weights, codes, divisors, self.selective, units)

    def _weighted_cost(self, cost: Floats, weights: Floats) -> Floats:
        """Return each sample's costs times its share of the weights, (n, n_exits) or (n, K)."""
        shares = weights / weights.mean()
        if cost.ndim == 2:
            return self.storage.mapped(lambda each, share: each * share[:, None], cost, shares)
        return self.storage.mapped(lambda share: cost * share[:, None], shares)

    def cost_curve(self, name: str, largest: float) -> "RiskCurve":
        """Return the curve of one cost, as a fraction of its largest possible value."""
        values = self.costs[name] / largest
        return replace(
            self,
            loss_range=LossRange(0, 1),
            selective=False,
            worst=None,
            data=self._mapped(lambda losses: np.tile(values, (len(losses), 1))),
        )

    def _mapped(self, function: Callable[..., Floats], *more: Floats) -> _kernels.Losses:
        """Return the data with a function of the losses, and of other arrays, for the losses."""
        return self.data._replace(values=self.storage.mapped(function, self.data.values, *more))

    def _refuse_transformed(self, name: str) -> None:
        if self.grouped or self.max_weight is not None:
            raise ValueError(f"`{name}` must be asked for before samples are grouped or weighted.")
        if self.above is not None or self.worst is not None:
            what = f"above {self.above or 0:g}" if self.worst is None else "of the worst share"
            raise ValueError(f"`{name}` does not go with a curve of losses {what}.")

    @property
    def test_sizes(self) -> Floats | None:
        """The size of each row at each setting, (n, K) or (n, 1); None if all rows count 1."""
        if self.sizes is not None:
            return self.sizes
        return None if self.weights is None else self.weights[:, None]

    def weight(self, rows: Rows | None = None) -> float:
        """Return the divisor that turns a sum over rows into a mean."""
        if self.weights is None:
            return self.n if rows is None else len(rows)
        return float((self.weights if rows is None else self.weights[rows]).sum())

    def losses(self, rows: Rows | None = None) -> Floats:
        """Return the loss of every sample at every setting, (n, K); this can be large.

        For groups it is their mean loss, or their total loss divided by `max_group_size`.
        """
        block: Floats = _kernels.gather(self.data, self._rows(rows), 0, self.n_settings)
        return block

    def loss_at(self, index: int) -> Floats:
        """Return the losses at one setting, (n,)."""
        if not 0 <= index < self.n_settings:
            raise IndexError(f"`index` must be in [0, {self.n_settings}), but got {index}.")
        return self._column(index, self._rows(None))[:, 0]

    def _column(self, index: int, rows: Rows) -> Floats:
        """Return the losses of some rows at one setting, (n_rows, 1)."""
        return self.storage.mapped(
            lambda some: _kernels.gather(self.data, some, index, index + 1), rows
        )

    def only(self, index: int, rows: Rows) -> "RiskCurve":
        """Return a curve with only one setting and some rows, in that order."""
        column = self._column(index, self._rows(rows))
        nothing = np.empty((len(rows), 0), np.float32), np.empty((1, 0), np.float32)
        return replace(
            self,
            thresholds=self.thresholds[index : index + 1],
            costs={},
            full_costs={},
            weights=None if self.weights is None else self.weights[rows],
            sizes=None if self.sizes is None else self.sizes[rows, index : index + 1],
            members=None if self.members is None else self.members.only(index, rows),
            data=_kernels.Losses(column, *nothing, self.strict, self.min_exit),
            _nested=False,
        )

    def totals(self, rows: Rows | None = None, monotone: bool = False) -> tuple[Floats, Floats]:
        """Return the sum and the sum of squares of the losses at each setting.

        With `monotone=True` each sample's loss is replaced by its running maximum from the safe
        end, starting at the full model's 0.
        """
        kernel = _kernels.totals_nested if self._nested else _kernels.totals_scan
        sums: tuple[Floats, Floats] = kernel(self.data, self._rows(rows), monotone)
        return sums

    def level_totals(self, rows: Rows) -> Callable[[float, slice], tuple[Floats, Floats]]:
        """Return a function from ε and settings to the `totals` that are tested at ε.

        They depend on ε only for averages over samples of groups, because groups are filled up to
        the largest size with losses of ε; see `drawn`.
        """
        sums, squares = self.totals(rows)
        counted = self.test_sizes
        if counted is None:
            return lambda _, settings: (sums[settings], squares[settings])
        missing = 1.0 - counted[rows]  # (n, 1), or (n, K)
        crossed = (missing * self.losses(rows)).sum(axis=0)
        filled = np.broadcast_to(missing.sum(axis=0), crossed.shape)
        filled_squares = np.broadcast_to((missing * missing).sum(axis=0), crossed.shape)

        def totals(epsilon: float, settings: slice) -> tuple[Floats, Floats]:
            more = 2.0 * epsilon * crossed[settings] + epsilon**2 * filled_squares[settings]
            return sums[settings] + epsilon * filled[settings], squares[settings] + more

        return totals

    def first_loss(self, rows: Rows | None = None) -> Rows:
        """Return the first setting at which each sample's loss is not 0; K if there is none."""
        found: Rows = _kernels.first_marked(self.data, self._rows(rows), self._nested)
        return found

    def exit_shares(self, rows: Rows | None = None) -> Floats:
        """Return the fraction of samples that take each exit, (K, n_exits)."""
        if not self.has_exits:
            raise ValueError("A curve made from losses at each setting has no exits.")
        selected = self._rows(rows)
        shares: Floats = _kernels.exit_counts(self.data, selected, self._nested) / len(selected)
        return shares

    def mean_cost(self, name: str, rows: Rows | None = None) -> Floats:
        """Return the mean cost at each setting, (K,)."""
        values = self.costs[checks.choice("cost", name, self.costs)]
        if values.ndim == 1:
            return self.exit_shares(rows) @ values if self.has_exits else values
        return self._costs_as_losses(values).risk(rows)

    def exit_shares_at(self, index: int) -> Floats:
        """Return the fraction of samples that take each exit at one setting, (n_exits,)."""
        counts = np.zeros(self.confidences.shape[1] + 1, np.int64)
        for part in blocks(self.n):
            exits = self._exits(self.confidences[part], index)
            counts += np.bincount(exits, minlength=len(counts))
        return np.asarray(counts / self.n)

    def mean_cost_at(self, name: str, index: int, shares: Floats | None = None) -> float:
        """Return the mean cost at one setting; `shares` are its exit shares, if they are known."""
        values = self.costs[checks.choice("cost", name, self.costs)]
        if values.ndim == 2:
            return self._costs_as_losses(values).risk_at(index)
        if not self.has_exits:
            return float(values[index])
        if index == 0 and self.full_model_first:
            return float(values[-1])
        return float((self.exit_shares_at(index) if shares is None else shares) @ values)

    def default_cost(self, cost: str | None = None) -> str | None:
        """Return the cost that is named, here or by the path, or the one that is meant."""
        if cost is None and self.chosen_cost in self.costs:
            cost = self.chosen_cost
        return default_cost(self.costs, self.full_costs, cost)

    def _costs_as_losses(self, values: Floats) -> "RiskCurve":
        """Return a curve with costs in place of losses; costs are means over all samples."""
        return replace(
            self, selective=False, sizes=None, worst=None, data=self.data._replace(values=values)
        )

    def full_cost(self, name: str, rows: Rows | None = None) -> float:
        """Return the mean cost of running the full model alone, on all samples or some rows."""
        alone = self.full_costs.get(name)
        if alone is None:
            return (
                self.mean_cost_at(name, 0) if rows is None else float(self.mean_cost(name, rows)[0])
            )
        if isinstance(alone, np.ndarray):
            return float((alone if rows is None else alone[rows]).sum() / self.weight(rows))
        return float(alone)

    def deciding_costs(self, cost: str | None = None) -> list[str]:
        """Return the costs of which a setting must save at least one to be worth running."""
        return deciding_costs(self.costs, self.full_costs, cost)

    def saving(self, name: str) -> Floats:
        """Return the fraction of the full model's cost that each setting saves, (K,)."""
        full = self.full_cost(name)
        saved = 1 - self.mean_cost(name) / full
        if self.full_model_first:
            saved[0] = 0.0  # the full model runs alone, without early exits
        return saved

    def confirmed(self, risk: str | None, loss: str | None) -> "RiskCurve":
        """Return the curve if it has this risk and loss; an unnamed loss takes the name."""
        if risk not in (None, self.risk_name):
            raise ValueError(f"`risk` must be the curve's own, {self.risk_name}, but got {risk!r}.")
        if loss not in (None, self.loss_name) and self.loss_name != UNNAMED:
            raise ValueError(f"`loss` must be the curve's own, {self.loss_name}, but got {loss!r}.")
        return replace(self, loss_name=loss or self.loss_name)

    def refuse_own(self, given: Mapping[str, Any]) -> None:
        """Raise if an argument is given that a curve already determines."""
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"`{name}` is the RiskCurve's own; leave it out.")

    def zero_bounded(self) -> "RiskCurve":
        """Return the curve of max(0, loss), Eq. 16 of the paper: an upper bound of this one.

        For a 0-1 gap it is 0 or 1, so the binomial test applies.
        """
        if self.loss_range.low >= 0:
            return self
        return replace(
            self,
            loss_range=self.loss_range.zero_bounded(),
            risk_name=ZERO_BOUNDED + self.risk_name,
            data=self._mapped(lambda losses: np.maximum(losses, 0.0)),
        )

    def shuffled(self, seed: int) -> "RiskCurve":
        """Return the curve with its samples shuffled by `seed`.

        Betting tests depend on the order of the samples. The curve's own seed, `order.seed`, is
        drawn at random unless one was given, so that tests are valid even for sorted samples. With
        any other fixed seed, the samples must be in random order. Never choose among seeds.
        """
        if self.shuffled_with == checks.count("seed", seed, 0):
            return self
        order = self.rows_in_order(seed)
        per_sample = [name for name, costs in self.costs.items() if costs.ndim == 2]
        alone = {k: np.asarray(v) for k, v in self.full_costs.items() if np.ndim(v)}
        tables = [self.data.values, self.data.confidences, *(self.costs[k] for k in per_sample)]
        values, confidences, *costs = self.storage.taken(order, *tables, *alone.values())
        full_costs = costs[len(per_sample) :]
        return replace(
            self,
            costs={**self.costs, **dict(zip(per_sample, costs, strict=False))},
            full_costs={**self.full_costs, **dict(zip(alone, full_costs, strict=True))},
            weights=None if self.weights is None else self.weights.take(order),
            sizes=None if self.sizes is None else self.sizes[order],
            members=None if self.members is None else self.members.take(order),
            shuffled_with=seed,
            order=self.order.replaced_by(seed),
            data=self.data._replace(values=values, confidences=confidences),
        )

    def rows_in_order(self, seed: int) -> Rows:
        """Return the row indices shuffled by `seed`; see `shuffled`."""
        checks.count("seed", seed, 0)
        if self.shuffled_with == seed:
            return self.storage.arange(self.n)
        if self.shuffled_with is not None:
            raise ValueError(
                f"The curve was shuffled with seed {self.shuffled_with}; start from the record for"
                f" seed {seed}."
            )
        # A separate random stream, so that a caller who sampled with the same seed gets an
        # independent order.
        return self.storage.permutation(self.n, np.random.default_rng([seed, SHUFFLE_STREAM]))

    def fingerprint(self) -> str:
        """Return a hash of everything that a control uses."""
        digest = hashlib.sha256()
        for array in (self.thresholds, self.data.values, self.data.confidences):
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        digest.update(f"{self.loss_range}{self.data.strict}{self.data.min_exit}".encode())
        if self.weights is not None:
            digest.update(f"{self.max_group_size}".encode())
            digest.update(np.ascontiguousarray(self.weights).data)
        if self.sizes is not None:
            digest.update(np.ascontiguousarray(self.sizes).data)
        return f"sha256:{digest.hexdigest()}"

    def _rows(self, rows: Rows | None) -> Rows:
        if rows is None:
            return self.storage.arange(self.n)
        if rows.size and (rows.min() < 0 or rows.max() >= self.n):  # kernels do not look
            raise IndexError(f"`rows` must be in [0, {self.n}), but go up to {rows.max()}.")
        return rows


def _declared_size(declared: int | None, names: NDArray[Any], sizes: Rows) -> int:
    """Return the declared largest group size; raise if a group is larger."""
    if declared is None:
        raise ValueError(
            "`average='sample'` needs `max_group_size`, the largest number of samples that a group"
            " can have, declared before the data are seen."
        )
    largest = checks.count("max_group_size", declared)
    found = int(sizes.argmax())
    if sizes[found] > largest:
        raise ValueError(
            f"`max_group_size` must be at least the size of every group, but it is {largest:,} and"
            f" group {names[found]!s} has {sizes[found]:,} samples. Declare the largest size that"
            " can occur, and calibrate on other samples."
        )
    return largest


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
