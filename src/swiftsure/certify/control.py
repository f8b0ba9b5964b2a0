"""Controls: choose the fastest setting of a risk curve whose risk is at most ε.

| control | promise |
|---|---|
| `empirical` | none: the paper's naive rule (Eq. 9) |
| `crc` | E[risk] ≤ ε over the draw of the calibration set |
| `ucb`, `ltt` | P(risk ≤ ε) ≥ 1 − δ over the draw of the calibration set |

A control sees only the curve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure._lib.storage import blocks
from swiftsure.certify import bounds
from swiftsure.curves import transforms
from swiftsure.curves.checks import in_range
from swiftsure.curves.conditions import LABELS_MISSING, Condition, dropped
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import BREAKPOINTS, LEARNED
from swiftsure.curves.sample_order import SampleOrder

__all__ = ["CONTROLS", "OPTIONS", "Control", "ControlResult", "walk_starts"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

OPTIONS = {
    "empirical": ("zero_bounded",),
    "crc": ("zero_bounded", "monotone", "method", "selection", "delta_prime"),
    "ucb": ("zero_bounded",),
    "ltt": ("zero_bounded", "correction"),
}
CONTROLS = tuple(OPTIONS)

STARTS = 8
"""Settings at which walks for the samples that exit early begin, each with δ / 8 of its own."""

MOST_EXACT = 300
"""Largest number of samples for which "auto" tests gaps of those that exit early exactly.

The exact test needs a cut-off for each number of exits, which takes long for many samples.
"""


@dataclass(frozen=True)
class ControlResult:
    """The setting that a control chose, and what it promises.

    Attributes
    ----------
    index : int or None
        Position on the curve's path; None if nothing faster than the full model is certified.
    threshold : float, tuple of float, or None
        The threshold there; a tuple if each exit has its own.
    guarantee : {"probability", "expectation", "none"}
        The promise: P(risk ≤ ε) ≥ 1 − δ, E[risk] ≤ ε, or nothing.
    epsilon, delta
        The level, and the failure probability if there is one.
    control, bound : str
        Names of the control and the bound; `bound` is None for controls that use none.
    n : int
        Number of calibration samples, or groups.
    seed : int or None
        Seed of the order in which samples were tested; None if the order does not matter.
    seed_drawn : bool or None
        Whether that seed was drawn at random for these samples, rather than given.
    conditions : tuple of Condition
        What the promise rests on.
    certified : tuple of int
        Every certified setting, for the samples that exit early, whose walks have several starts.
    tested : (RiskCurve, rows) or None
        The curve that was tested, and its rows in the order of the test.
    """

    index: int | None
    threshold: float | tuple[float | None, ...] | None
    guarantee: Literal["probability", "expectation", "none"]
    epsilon: float
    delta: float | None
    control: str
    bound: str | None
    n: int
    seed: int | None
    conditions: tuple[Condition, ...] = ()
    seed_drawn: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    certified: tuple[int, ...] = field(default=(), repr=False)
    tested: tuple[RiskCurve, Rows] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Control:
    """A control with its options, for `calibrate` and `evaluate`.

    Parameters
    ----------
    name : {"empirical", "crc", "ucb", "ltt"}
    bound : str
        Name among `swiftsure.bounds.BOUNDS`, or "auto".
    zero_bounded : bool
        Test max(0, loss), Eq. 16 of the paper, whose mean is an upper bound of the risk. The
        promise is still about the risk itself; to promise more, use a zero-bounded risk.
    correction : {"fixed_sequence", "bonferroni"}
        For `ltt`: test settings in order and stop at the first failure, or test each at δ/K.
    monotone, method, selection, delta_prime
        For `crc`; see its documentation.
    """

    name: str
    bound: str = "auto"
    zero_bounded: bool = False
    correction: str = "fixed_sequence"
    monotone: bool | None = None
    method: str = "crc"
    selection: str | None = None
    delta_prime: float | None = None

    def __post_init__(self) -> None:
        """Refuse unknown names and options that contradict each other."""
        checks.choice("control", self.name, CONTROLS)
        checks.choice("bound", self.bound, ["auto", *bounds.BOUNDS])
        checks.choice("correction", self.correction, ["fixed_sequence", "bonferroni"])
        checks.choice("method", self.method, ["crc", "ucb"])
        if self.selection is not None:
            checks.choice("selection", self.selection, ["contiguous", "paper"])
        if self.delta_prime is not None:
            checks.between("delta_prime", self.delta_prime, 0.0, 1.0)
        if self.method == "ucb" and (self.monotone is not None or self.selection is not None):
            raise ValueError("`method='ucb'` of crc takes neither `monotone` nor `selection`.")
        for option in self.options():
            if option not in OPTIONS[self.name]:
                raise ValueError(f"`{option}` is not an option of {self.name}.")

    @property
    def label(self) -> str:
        """Name and options, for tables and figures."""
        extras = [f"{key}={value}" for key, value in self.options().items()]
        if self.bound != "auto":
            extras.insert(0, self.bound)
        return f"{self.name} ({', '.join(extras)})" if extras else self.name

    @property
    def is_monotone(self) -> bool:
        """Whether crc takes the running maximum of losses: yes, unless a selection is named."""
        return self.selection is None if self.monotone is None else self.monotone

    @property
    def can_stop(self) -> bool:
        """Whether stopping anywhere on the path keeps the promise."""
        return self.guarantee != "none" and self.correction == "fixed_sequence"

    @property
    def guarantee(self) -> Literal["probability", "expectation", "none"]:
        """What the control promises."""
        if self.name in ("ucb", "ltt"):
            return "probability"
        if self.name == "crc" and (self.method == "ucb" or self.is_monotone):
            return "expectation"
        return "none"

    def indices(
        self,
        curve: RiskCurve,
        epsilons: Floats,
        delta: float,
        rows: Rows | None = None,
        pool: int | None = None,
    ) -> NDArray[np.int64]:
        """Return the setting chosen at each ε; -1 if none is.

        `rows` are the calibration samples in the order of the test, which must not depend on their
        losses.
        """
        rows = np.arange(curve.n) if rows is None else rows
        return self._indices(self.prepare(curve), epsilons, delta, rows, pool)

    def _indices(
        self, curve: RiskCurve, epsilons: Floats, delta: float, rows: Rows, pool: int | None
    ) -> NDArray[np.int64]:
        """Return the settings chosen on a prepared curve."""
        start = 1 if curve.full_model_first else 0  # the full model needs no test
        order = np.argsort(epsilons, kind="stable")  # each ε continues the walk of the one before
        epsilons = epsilons[order]
        if self.name == "empirical":
            risk = curve.risk(rows)[start:]
            chosen = np.asarray([_last(risk <= e) + start for e in epsilons], np.int64)
        elif self.name == "crc" and self.method == "crc":
            chosen = self._crc(curve, epsilons, rows, start)
        else:
            chosen = self._tested(curve, epsilons, delta, rows, start, pool)
        chosen[chosen < start] = -1
        selected = np.empty_like(chosen)
        selected[order] = chosen
        return selected

    def prepare(self, curve: RiskCurve) -> RiskCurve:
        """Return the curve that the control tests; raise if it cannot."""
        if self.zero_bounded:
            curve = transforms.zero_bounded(curve)
        if curve.cut_from is not None and not self.can_stop:
            raise ValueError(
                f"`missing='stop'` needs a control that walks along the path and may stop anywhere:"
                f" ucb, ltt in fixed sequence, or crc with its guarantee, but got {self.label}."
            )
        if self.name == "crc" and not curve.statistic.relative:
            raise ValueError(
                "`crc` needs losses relative to the full model, but these were declared not to be"
                " (`relative=False`)."
            )
        declared = bounds.declared_for(self.bound, curve.loss_range)
        if curve.branches is not None and self.guarantee != "probability":
            raise ValueError("`path` with branches needs ucb, or ltt in fixed sequence.")
        if curve.statistic.selective and self.name not in ("ucb", "ltt"):
            raise ValueError(
                "`control` must be ucb, or ltt in fixed sequence, for the samples that exit early,"
                f" but got {self.label}."
            )
        if declared != curve.loss_range:
            for part in blocks(curve.n, curve.data.values[:1].nbytes):
                place = f" from row {part.start:,} on" * (part.start > 0)
                in_range(f"losses{place}", curve.data.values[part], declared)
            curve = replace(curve, loss_range=declared)
        if self.uses_bound:
            bounds.refuse_weights(bounds.resolve(self.bound, curve.loss_range), curve)
        return curve

    def counts_missing(self, curve: RiskCurve, pool: int | None = None) -> bool:
        """Return whether a larger loss never certifies more, whichever sample has it.

        Labels that are missing may then count as the worst loss, whatever decided which are.
        """
        if not self.uses_bound:
            return self.guarantee != "none"
        known = self.prepare(curve)
        return self.bound_for(known, known.n, pool).monotone

    @property
    def uses_bound(self) -> bool:
        """Whether the control tests with a bound."""
        return self.name in ("ucb", "ltt") or (self.name == "crc" and self.method == "ucb")

    def bound_for(self, curve: RiskCurve, n: int, pool: int | None = None) -> bounds.Bound:
        """Return the bound that tests a curve; it does not depend on the observed losses."""
        exact = self.bound == "auto" and curve.statistic.selective and n > MOST_EXACT
        name = "star" if exact and curve.loss_range.ternary else self.bound
        return bounds.resolve(name, curve.loss_range, n, pool)

    def _crc(self, curve: RiskCurve, epsilons: Floats, rows: Rows, start: int) -> NDArray[np.int64]:
        sums, _ = curve.totals(rows, monotone=self.is_monotone)
        # For averages over samples of groups this is (ΣY + B) / (n + 1) ≤ ε solved for ε, where Y
        # are groups filled up with losses of ε (`RiskCurve.by_group`).
        inflated = (sums + curve.loss_range.high) / (curve.weight(rows) + 1)
        if self.selection == "paper":
            return np.asarray([_last(inflated <= e) for e in epsilons], np.int64)
        # The run of successes ends where the running maximum first exceeds the level.
        highest = np.maximum.accumulate(inflated[start:])
        return start - 1 + np.searchsorted(highest, epsilons, side="right")

    def _tested(
        self,
        curve: RiskCurve,
        epsilons: Floats,
        delta: float,
        rows: Rows,
        start: int,
        pool: int | None,
    ) -> NDArray[np.int64]:
        if curve.statistic.selective:
            found = [self.among_exits([curve], [e], delta, pool, rows) for e in epsilons.tolist()]
            return np.asarray([max(each, default=start - 1) for each in found], np.int64)
        bound = self.bound_for(curve, len(rows), pool)
        bounds.refuse_weights(bound, curve, pool)
        size = bounds.pool_size(pool, len(rows), bound)
        if self.name == "crc":
            chosen = np.full(len(epsilons), start - 1)
            for j, each in enumerate(epsilons):
                epsilon, delta = self.split_epsilon(each, curve.loss_range.high, len(rows))
                if epsilon > 0:
                    single = np.asarray([epsilon])
                    chosen[j] = bound.select(curve, rows, single, delta, start, size)[0]
            return chosen
        if curve.branches is not None:
            return self._branching(curve, epsilons, delta, rows, size)
        if self.correction == "bonferroni":
            if curve.path_kind == BREAKPOINTS:
                raise ValueError(
                    "`correction='bonferroni'` needs a path fixed beforehand, not breakpoints."
                )
            each = delta / max(1, curve.n_settings - start)
            passes = [bound.passes(curve, rows, e, each, size)[start:] for e in epsilons]
            return np.asarray([_last(p) + start for p in passes], np.int64)
        return bound.select(curve, rows, epsilons, delta, start, size)

    def _branching(
        self,
        curve: RiskCurve,
        epsilons: Floats,
        delta: float,
        rows: Rows,
        pool: int,
    ) -> NDArray[np.int64]:
        """Return the cheapest setting that is certified on any branch, at each ε; 0 for none.

        All certified settings hold at once with probability 1 − δ, so any rule may choose.
        """
        cost = curve.default_cost()
        if cost is None:
            raise ValueError("`path` with branches needs costs, to choose among the branches.")
        costs, chosen = curve.mean_cost(cost, rows), np.zeros(len(epsilons), np.int64)
        for j, epsilon in enumerate(epsilons.tolist()):
            passed = self.on_branches([curve], [epsilon], delta, pool or None, rows)
            chosen[j] = min(passed, key=lambda k: costs[k], default=0)
        return chosen

    def on_branches(
        self,
        curves: Sequence[RiskCurve],
        epsilons: Sequence[float],
        delta: float,
        pool: int | None = None,
        rows: Rows | None = None,
    ) -> list[int]:
        """Return the settings certified on any branch, tested with the risks' largest p-value."""
        branches = curves[0].branches
        if branches is None or self.name == "crc" or self.correction != "fixed_sequence":
            raise ValueError("`path` with branches needs ucb, or ltt in fixed sequence.")
        tests = []
        for curve, epsilon in zip(curves, epsilons, strict=True):
            known = self.prepare(curve)
            order = known.rows_in_order(known.order.seed) if rows is None else rows
            bound = self.bound_for(known, len(order), pool)
            size = bounds.pool_size(pool, len(order), bound)
            tests.append((known, order, bound, epsilon, size))

        @cache
        def p_value(setting: int) -> float:
            return max(
                float(
                    bound.p_values(
                        known.only(setting, order), np.arange(len(order)), epsilon, size
                    )[0]
                )
                for known, order, bound, epsilon, size in tests
            )

        return branches.certified(p_value, delta)

    def among_exits(
        self,
        curves: Sequence[RiskCurve],
        epsilons: Sequence[float],
        delta: float,
        pool: int | None = None,
        rows: Rows | None = None,
    ) -> list[int]:
        """Return the settings that are certified for the samples that exit early.

        Those that exit at a setting are independent draws of their own distribution, given which
        ones exit; so the usual tests apply to them. In groups, or with weights, all units are
        tested: E[z (ℓ − ε)] < 0, with z the weight of the samples that exit. At safe settings too
        few exit for any test to pass. The walk therefore has several starts, fixed beforehand, each
        with its share of δ; what reaches the next start takes its share along. Several risks are
        tested together: a setting passes if each of them does.
        """
        first = curves[0]
        if self.correction != "fixed_sequence" or pool is not None:
            raise ValueError(
                "`among='exits'` needs ucb, or ltt in fixed sequence, and no finite population."
            )
        if first.path_kind == BREAKPOINTS:
            raise ValueError(
                "`path` must be fixed beforehand for the samples that exit early, because their"
                " walk has several starts; it cannot be the breakpoints."
            )
        if first.branches is not None:
            raise ValueError("`among='exits'` needs a path that is one sequence, without branches.")
        tests = []
        for curve, epsilon in zip(curves, epsilons, strict=True):
            known = self.prepare(curve)
            order = known.rows_in_order(known.order.seed) if rows is None else rows
            tests.append((known, order, self.bound_for(known, len(order)), epsilon))

        def certified(k: int, share: float) -> bool:
            for curve, order, bound, epsilon in tests:
                among = order if curve.units.sizes is not None else order[curve.left_at(k)[order]]
                plain = replace(curve, statistic=replace(curve.statistic, selective=False))
                one_by_one = curve.storage.arange(len(among))
                if (
                    not among.size
                    or not bound.passes(plain.only(k, among), one_by_one, epsilon, share)[0]
                ):
                    return False
            return True

        found: list[int] = []
        starts = walk_starts(first, 1 if first.full_model_first else 0)
        share = 0.0
        for start, end in zip(starts, [*starts[1:], first.n_settings], strict=True):
            share += delta / len(starts)
            for k in range(start, end):
                if k >= first.n_settings or not certified(k, share):
                    share = 0.0
                    break
                found.append(k)
        return found

    def split_epsilon(self, epsilon: float, max_loss: float, n: int) -> tuple[float, float]:
        """Return (ε′, δ′) such that P(risk > ε′) ≤ δ′ implies E[risk] ≤ ε.

        ε = (1 − δ′) ε′ + δ′ B. By default δ′ is a tenth of ε / B, and less for many samples; on ten
        records this saved most. It does not depend on the observed losses.
        """
        delta = self.delta_prime
        if delta is None:
            delta = min(0.1, 3 / np.sqrt(n)) * epsilon / max_loss
        return (epsilon - delta * max_loss) / (1 - delta), float(delta)

    def run(
        self,
        curve: RiskCurve,
        epsilon: float,
        delta: float | None = 0.1,
        seed: int | None = None,
        pool: int | None = None,
    ) -> ControlResult:
        """Return the chosen setting; `seed=None` tests in the curve's own order."""
        if not isinstance(curve, RiskCurve):
            raise TypeError(
                "`curve` must be a RiskCurve, from record.curve(...) or RiskCurve.from_losses(...),"
                f" but got {type(curve).__name__}."
            )
        level = checks.between("epsilon", epsilon, 0.0, curve.loss_range.high)
        order = curve.order.replaced_by(seed)
        promises_probability = self.guarantee == "probability"
        chance = checks.between("delta", delta, 0.0, 1.0) if promises_probability else 0.5  # type: ignore[arg-type]
        if pool is not None and not promises_probability:
            raise ValueError(f"`pool` is for ucb and ltt, not for {self.name}.")
        if pool is not None and curve.units.max_weight is not None:
            raise ValueError(
                "`pool` needs samples without weights: there is no test here of a weighted mean"
                " without replacement."
            )
        prepared = self.prepare(curve)
        bound = None
        if self.uses_bound:
            bound = self.bound_for(prepared, prepared.n, pool)
        ordered = bound is not None and bound.uses_order
        rows = prepared.storage.arange(prepared.n)
        if ordered and prepared.has_exits:  # few columns: one sort is faster than indexed access
            prepared = prepared.shuffled(order.seed)
        elif ordered:
            rows = prepared.rows_in_order(order.seed)
        certified: tuple[int, ...] = ()
        if prepared.statistic.selective:
            certified = tuple(self.among_exits([prepared], [level], chance, pool, rows))
            index = max(certified, default=-1)
        else:
            index = int(self._indices(prepared, np.asarray([level]), chance, rows, pool)[0])
        return ControlResult(
            index=None if index < 0 else index,
            threshold=None if index < 0 else curve.threshold_at(index),
            guarantee=self.guarantee,
            epsilon=level,
            delta=chance if promises_probability else None,
            control=self.name,
            bound=None if bound is None else bound.name,
            n=curve.n,
            seed=order.seed if ordered else None,
            conditions=self.conditions(curve, bound, pool, order if ordered else None),
            seed_drawn=order.drawn if ordered else None,
            options=self.options(),
            certified=certified,
            tested=(prepared, rows),
        )

    def conditions(
        self,
        curve: RiskCurve,
        bound: bounds.Bound | None,
        pool: int | None = None,
        order: SampleOrder | None = None,
    ) -> tuple[Condition, ...]:
        """Return what the promise rests on; `order` if the test depends on it."""
        if self.guarantee == "none":
            return ()
        unit, draws = curve.units.name, curve.units.draws
        if pool is not None:
            draws = Condition.of("draws", kind="population", unit=unit)
        found = [draws, Condition.of("fixed beforehand", what="calibration")]
        found += self._loss_condition(curve, bound)
        found.append(Condition.of("number of samples", unit=unit))
        if curve.units.max_size is not None:
            found.append(Condition.of("group size", most=curve.units.max_size))
        if curve.path_kind.startswith(LEARNED):
            found.append(Condition.of("pilot", unit=unit))
        monotone = bound is None or bound.monotone
        found += dropped(curve.conditions, *[LABELS_MISSING.key] * monotone)
        found += curve.order.split_conditions(unit)
        if order is not None:
            found.append(order.condition(unit, bound is None or bound.uses_order))
        return tuple(found)

    def _loss_condition(self, curve: RiskCurve, bound: bounds.Bound | None) -> list[Condition]:
        """Return what the test takes for granted of the losses, if anything."""
        values = {"binary": "0 or 1", "ternary": "-1, 0 or 1"}
        (low, high), kind = (curve.loss_range.low, curve.loss_range.high), "at most"
        reading, weighted = curve.statistic.reading, curve.units.max_weight is not None
        if reading.any_loss:
            if not weighted:
                return []
            kind = "weight"
        elif curve.statistic.kind:
            high = reading.largest(curve.statistic, curve.loss_range)
        elif weighted:
            kind = "weighted"
        elif bound is not None and bound.needs in values:
            kind = values[bound.needs]
            if self.zero_bounded and low < 0:
                kind = "above 0 is 1"
        risk = curve.statistic.risk if curve.statistic.relative else ""
        return [
            Condition.of("loss", loss=curve.statistic.loss, risk=risk, kind=kind, most=float(high))
        ]

    def options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("name", "bound") and getattr(self, each.name) != each.default
        }


def walk_starts(curve: RiskCurve, start: int) -> list[int]:
    """Return where walks for the samples that exit early begin, each with its share of δ."""
    # Of the whole path: where labels end may depend on them, and must not change shares of δ.
    places = np.linspace(start, curve.n_path, STARTS, endpoint=False).astype(int)
    starts: list[int] = np.unique(places).tolist()
    return starts


def _last(passes: NDArray[np.bool_]) -> int:
    """Return the last index that passes, or -1."""
    found = np.flatnonzero(passes)
    return int(found[-1]) if found.size else -1
