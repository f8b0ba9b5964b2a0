"""RiskCurve: each sample's loss and cost at each setting of a path, the input to controls."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure._lib import kernels as _kernels
from swiftsure._lib.storage import MEMORY, Storage, blocks
from swiftsure.curves.branches import Branches
from swiftsure.curves.checks import cost_array, dial_array, in_range
from swiftsure.curves.conditions import Condition
from swiftsure.curves.costs import deciding_costs, default_cost
from swiftsure.curves.paths import GIVEN_SETTINGS, Path
from swiftsure.curves.sample_order import SampleOrder, shuffling
from swiftsure.curves.statistic import UNNAMED, Statistic
from swiftsure.curves.units import Average, Units
from swiftsure.curves.worst_share import worst_share
from swiftsure.exits import ExitRule
from swiftsure.losses import LossRange

__all__ = ["RiskCurve"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class RiskCurve:
    """Losses (relative to the full model) and costs of n samples along a path of settings.

    Make one with `record.curve(...)`, or with `RiskCurve.from_losses` from plain arrays. In exit
    form it holds one loss per exit and the path's thresholds, and looks up the loss at a setting
    when it is needed. Only `losses()` makes an (n, K) matrix.

    A promise bounds E[y] / E[z], with y a unit's loss at a setting, at most `loss_range.high`, and
    z its size (`units`), at most 1. Everything that tests, plans or reports reads only these.

    Attributes
    ----------
    thresholds : (K,) or (K, n_exits - 1)
        The settings, safest first.
    data : Losses
        The arrays, as the compiled kernels take them.
    loss_range : LossRange
        The declared range of the losses.
    statistic : Statistic
        Which risk the losses measure.
    units : Units
        What was drawn, and how much each row counts.
    full_model_first : bool
        Whether setting 0 is the full model, which needs no test. If not, setting 0 is tested like
        any other, and "nothing certified" means the full model, which is not on the path.
    costs : mapping
        Costs by name, per exit (or setting), or per sample and exit (or setting).
    full_costs : mapping
        Cost of running the full model alone, by name, if it differs from the cost of setting 0:
        a number, or one per sample, (n,).
    path : Path or None
        The path, whole; None for settings that came with the losses.
    cut_from : int or None
        Number of settings on the path if the curve holds only the first of them; see `cut`.
    order : SampleOrder
        Seed of the order in which betting tests see the samples; drawn at random by default.
    shuffled_with : int or None
        The seed that the rows were shuffled with; see `shuffled`.
    conditions : tuple of Condition
        Assumptions of a promise made from these losses, besides those that every promise has.
    n_labels : int or None
        How many samples have a label, if the losses need labels.
    storage : Storage
        Where arrays with a row per sample are made: in memory, or in temporary files.
    """

    thresholds: NDArray[Any]
    data: _kernels.Losses = field(repr=False)
    loss_range: LossRange
    statistic: Statistic = Statistic()  # noqa: RUF009 (frozen)
    units: Units = Units()  # noqa: RUF009 (frozen)
    full_model_first: bool = True
    costs: Mapping[str, Floats] = field(default_factory=dict)
    full_costs: Mapping[str, float | Floats] = field(default_factory=dict)
    path: Path | None = field(repr=False, default=None)
    cut_from: int | None = None
    order: SampleOrder = field(default_factory=SampleOrder.draw)
    shuffled_with: int | None = None
    conditions: tuple[Condition, ...] = ()
    n_labels: int | None = None
    storage: Storage = field(repr=False, compare=False, default=MEMORY)

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
        risk, loss : str
            Their names, for certificates.
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
        named = costs if isinstance(costs, Mapping) else {} if costs is None else {"cost": costs}
        return cls(
            thresholds=settings,
            data=_kernels.Losses(
                np.ascontiguousarray(values),
                np.empty((len(values), 0), np.float32),
                np.empty((len(settings), 0), np.float32),
                False,
                0,
            ),
            loss_range=declared,
            statistic=Statistic(risk, loss, relative=relative is not False),
            full_model_first=full_model_first,
            costs={k: cost_array(k, v, values.shape, "K") for k, v in named.items()},
            order=SampleOrder.of(order, "order"),
        )

    @classmethod
    def from_exits(
        cls,
        confidences: NDArray[np.float32],
        losses: Floats,
        path: Path,
        loss_range: LossRange,
        *,
        rule: ExitRule = ExitRule(),  # noqa: B008 (frozen)
        statistic: Statistic = Statistic(),  # noqa: B008 (frozen)
        costs: Mapping[str, Floats] | None = None,
        full_costs: Mapping[str, float | Floats] | None = None,
        order: SampleOrder | int | None = None,
    ) -> "RiskCurve":
        """Make a curve from a record's checked arrays.

        Relative losses are (n, n_exits), the last column 0; costs are (n_exits,) or (n, n_exits).
        """
        curve = cls(
            thresholds=path.thresholds,
            data=_kernels.Losses(
                np.ascontiguousarray(losses),
                np.ascontiguousarray(confidences),
                np.empty((0, confidences.shape[1]), np.float32),
                bool(rule.strict),
                int(rule.min_exit),
            ),
            loss_range=loss_range,
            statistic=statistic,
            costs=costs or {},
            full_costs=full_costs or {},
            order=SampleOrder.of(order, "order"),
        )
        return curve.along(path)

    def along(self, path: Path) -> "RiskCurve":
        """Return the same samples along another path."""
        if not self.has_exits:
            raise ValueError("A curve made from losses at each setting has no other path.")
        thresholds = path.per_exit(self.data.values.shape[1])
        return replace(
            self,
            thresholds=path.thresholds,
            units=self.units.along(thresholds),
            data=self.data._replace(thresholds=thresholds),
            path=path,
        )

    def grouped(
        self, groups: ArrayLike, *, average: Average = "group", max_size: int | None = None
    ) -> "RiskCurve":
        """Return the curve of groups of dependent rows, as `record.grouped`.

        Examples
        --------
        >>> curve = RiskCurve.from_losses([1.0, 0.5], [[0, 1], [0, 0], [0, 1]])
        >>> curve.grouped(["ann", "ann", "bob"]).losses()
        array([[0. , 0.5],
               [0. , 1. ]])
        """
        from swiftsure.curves.sampling import Sampling

        return Sampling(average, max_size).applied(self, groups)

    @property
    def n(self) -> int:
        """Number of samples, or of groups."""
        return len(self.data.values)

    @property
    def n_pilot(self) -> int | None:
        """Number of samples, or of groups, that the path was learned on."""
        pilot = None if self.path is None else self.path.pilot
        return None if pilot is None else pilot.count(self.units.grouped)

    @property
    def path_kind(self) -> str:
        """How the path was made."""
        return GIVEN_SETTINGS if self.path is None else self.path.kind

    @property
    def branches(self) -> Branches | None:
        """Sequences of settings that share δ, if there are several; see `Path.branching`."""
        return None if self.path is None else self.path.branches

    @property
    def rule(self) -> ExitRule:
        """When samples exit, apart from score and threshold."""
        return ExitRule(strict=bool(self.data.strict), min_exit=int(self.data.min_exit))

    @cached_property
    def _nested(self) -> bool:
        """Whether thresholds fall along the path, so that samples only move to earlier exits."""
        thresholds = self.data.thresholds
        return self.has_exits and bool((thresholds[1:] <= thresholds[:-1]).all())

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
            units=self.units.take(np.arange(self.n), kept),
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
    def confidences(self) -> NDArray[np.float32]:
        """Confidences of a curve in exit form, (n, n_exits - 1); no columns otherwise."""
        return self.data.confidences

    def risk(self, rows: Rows | None = None) -> Floats:
        """Return the mean loss at each setting, (K,).

        It is over samples or groups, as `units.average` says; if it is selective, over the samples
        that exit early, and 0 where none does. Of a worst share, it is the mean over that share.
        """
        if self.follows:
            chosen = self._rows(rows)
            return np.asarray([self._worst_share(k, chosen) for k in range(self.n_settings)])
        counted = np.asarray(self.counted(rows))
        risk: Floats = self.totals(rows)[0] / np.where(counted > 0, counted, 1.0)
        return risk

    def counted(self, rows: Rows | None = None) -> Floats | float:
        """Return what turns sums of losses into risks.

        The weight of the rows, or of those that exit at each setting, (K,), if the risk is theirs.
        """
        sizes = self.units.sizes
        if sizes is not None:
            exiting: Floats = (sizes if rows is None else sizes[rows]).sum(axis=0)
            return exiting
        if self.statistic.selective:
            left: Floats = np.rint((1 - self.exit_shares(rows)[:, -1]) * self.weight(rows))
            return left
        return self.weight(rows)

    def risk_at(self, index: int) -> float:
        """Return the mean loss at one setting: of the samples that exit early, if selective."""
        if self.follows:
            return self._worst_share(index, self._rows(None))
        total = self.loss_at(index).sum()
        if self.units.sizes is not None:
            return float(total / (self.units.sizes[:, index].sum() or 1.0))
        if self.statistic.selective:
            return float(total / max(1, self.left_at(index).sum()))
        return float(total / self.weight())

    @property
    def follows(self) -> bool:
        """Whether a worst share counts from where the samples themselves cut it off."""
        units, statistic = self.units, self.statistic
        plain = not units.grouped and units.max_weight is None
        known = plain or units.members is not None
        return known and statistic.worst is not None and statistic.above is None

    def _worst_share(self, index: int, rows: Rows) -> float:
        part = 1.0 if self.statistic.worst is None else self.statistic.worst
        if self.units.members is not None:
            values, weights, _ = self.units.members.column(index, rows)
            return worst_share(values, weights, part)
        if self.statistic.selective:
            rows = rows[self.left_at(index)[rows]]
        return worst_share(self._column(index, rows)[:, 0], np.ones(len(rows)), part)

    def left_at(self, index: int) -> NDArray[np.bool_]:
        """Return which samples exit early at one setting, (n,)."""
        last = self.confidences.shape[1]
        return self.storage.mapped(lambda some: self._exits(some, index) < last, self.confidences)

    def _exits(self, confidences: NDArray[np.float32], index: int) -> Rows:
        """Return the exit that each sample takes at one setting."""
        exits: Rows = _kernels.exit_indices(
            confidences, self.data.thresholds[index], self.data.strict, self.data.min_exit
        )
        return exits

    def take(self, rows: Rows) -> "RiskCurve":
        """Return the curve of some samples only, in that order."""
        if self.units.grouped or self.shuffled_with is not None:
            raise ValueError("`rows` of a curve can be taken only before grouping and shuffling.")
        chosen = self._rows(np.asarray(rows))
        return replace(
            self,
            costs={k: v if v.ndim == 1 else v[chosen] for k, v in self.costs.items()},
            full_costs={k: v if np.ndim(v) == 0 else v[chosen] for k, v in self.full_costs.items()},  # type: ignore[index]
            data=self.data._replace(
                values=self.data.values[chosen], confidences=self.data.confidences[chosen]
            ),
            units=self.units.take(chosen),
        )

    def mapped(self, function: Callable[..., Floats], *more: Floats) -> _kernels.Losses:
        """Return the data with a function of the losses, and of other arrays, for the losses."""
        return self.data._replace(values=self.storage.mapped(function, self.data.values, *more))

    def weight(self, rows: Rows | None = None) -> float:
        """Return the divisor that turns a sum over rows into a mean."""
        weights = self.units.weights
        if weights is None:
            return self.n if rows is None else len(rows)
        return float((weights if rows is None else weights[rows]).sum())

    def losses(self, rows: Rows | None = None) -> Floats:
        """Return the loss of every sample at every setting, (n, K); this can be large.

        For groups it is their mean loss, or their total loss divided by the largest size.
        """
        return np.asarray(_kernels.gather(self.data, self._rows(rows), 0, self.n_settings))

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
            units=self.units.take(rows, slice(index, index + 1)),
            data=_kernels.Losses(column, *nothing, *self.data[3:]),
        )

    def totals(self, rows: Rows | None = None, monotone: bool = False) -> tuple[Floats, Floats]:
        """Return the sum and the sum of squares of the losses at each setting.

        With `monotone=True` each sample's loss is replaced by its running maximum from the safe
        end, starting at the full model's 0.
        """
        kernel = _kernels.totals_nested if self._nested else _kernels.totals_scan
        sums: tuple[Floats, Floats] = kernel(self.data, self._rows(rows), monotone)
        return sums

    def first_loss(self, rows: Rows | None = None) -> Rows:
        """Return the first setting at which each sample's loss is not 0; K if there is none."""
        return np.asarray(_kernels.first_marked(self.data, self._rows(rows), self._nested))

    def exit_shares(self, rows: Rows | None = None) -> Floats:
        """Return the fraction of samples that take each exit, (K, n_exits)."""
        if not self.has_exits:
            raise ValueError("A curve made from losses at each setting has no exits.")
        selected = self._rows(rows)
        return np.asarray(_kernels.exit_counts(self.data, selected, self._nested) / len(selected))

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
        if cost is None and self.path is not None and self.path.cost in self.costs:
            cost = self.path.cost
        return default_cost(self.costs, self.full_costs, cost)

    def _costs_as_losses(self, values: Floats) -> "RiskCurve":
        """Return a curve with costs in place of losses; costs are means over all samples."""
        return replace(
            self,
            statistic=replace(self.statistic, selective=False, worst=None),
            units=replace(self.units, sizes=None),
            data=self.data._replace(values=values),
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
            units=self.units.take(order),
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
        return self.storage.permutation(self.n, shuffling(seed))

    def fingerprint(self) -> str:
        """Return a hash of everything that a control uses."""
        digest = hashlib.sha256()
        for array in (self.thresholds, self.data.values, self.data.confidences):
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        digest.update(f"{self.loss_range}{self.data.strict}{self.data.min_exit}".encode())
        if self.units.weights is not None:
            digest.update(f"{self.units.max_size}".encode())
            digest.update(np.ascontiguousarray(self.units.weights).data)
        if self.units.sizes is not None:
            digest.update(np.ascontiguousarray(self.units.sizes).data)
        return f"sha256:{digest.hexdigest()}"

    def _rows(self, rows: Rows | None) -> Rows:
        if rows is None:
            return self.storage.arange(self.n)
        if rows.size and (rows.min() < 0 or rows.max() >= self.n):  # kernels do not look
            raise IndexError(f"`rows` must be in [0, {self.n}), but go up to {rows.max()}.")
        return rows
