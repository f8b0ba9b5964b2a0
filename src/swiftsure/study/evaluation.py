"""`evaluate`: runs controls on repeated splits of a record and checks their promises.

It answers two different questions:

- *Test risk and exceedance*: calibrate on one part of the pool and test on the rest. The fraction
  of test risks above ε includes the test part's noise, so it can exceed δ for a valid control.
- *Violations*: draw calibration sets with replacement and compare the whole pool's risk, which is
  then the true risk, with ε. δ bounds this rate.

With `labels`, it also compares ways to spend a budget of labels.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure._lib.progress import steps
from swiftsure.certify.calibration import Ask, Calibration
from swiftsure.certify.control import Control
from swiftsure.certify.labels import LabelBudget
from swiftsure.certify.promise import Promise
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import Path, PathLike
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.study.pools import Repeats, as_request, pool_curve, without_pilot
from swiftsure.study.results import SECONDS, Outcomes, Rates, Studied, Study

__all__ = ["Rates", "Study", "calibration_size", "evaluate"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Controls = str | Control | Iterable[str | Control] | Mapping[str, str | Control]

LARGEST_POOL = 1_000_000
"""Number of samples that are drawn of a record on the disk."""

EPSILONS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Levels that are compared where no promise names one."""


@checks.suggesting
def evaluate(
    record: ExitRecord | ThresholdRecord | ShardedRecord | RiskCurve,
    *,
    risk: str | Promise | Calibration | None = None,
    loss: str | None = None,
    controls: Controls = ("crc", "ucb", "ltt"),
    epsilons: ArrayLike | None = None,
    delta: float | None = None,
    n_calibration: int | float = 100,
    splits: int | Repeats = 100,
    seed: int = 0,
    path: PathLike = None,
) -> "Study":
    """Split a record at random many times, calibrate on one part and test on the other.

    To study several promises together, costs and slices, use `Calibration.evaluate`.

    Parameters
    ----------
    record : ExitRecord, ThresholdRecord, ShardedRecord or RiskCurve
        The pool; with groups, whole groups are split and drawn. Of a `ShardedRecord`, the pool is
        at most a million samples, drawn at random with `seed`.
    risk : str, Promise or Calibration, optional
        The name of a risk of `loss`; or a promise, such as that of a tail; or a request, which also
        has the exit rule, the path, δ, and the cost for `mean_cost` and `gain`: by default the one
        that `policy.evaluate` reports. A request with `missing=Ask(None, budget=60)` gives each
        calibration set a budget of labels, spent as `needs_label` says. For comparison, the study
        then also holds each control with that many samples, all labelled ("ucb, random labels"),
        and with all samples labelled ("ucb, all labels").
    loss, path
        As in `record.curve`; leave them out for a RiskCurve, or a request.
    controls : names, Controls, or a mapping of labels to Controls
        They take the place of a request's own.
    epsilons : (m,)
        Levels, in (0, B); by default that of the promise, or .01 to .2.
    delta : float, optional
        Failure probability of `ucb` and `ltt`; by default the request's, or 0.1.
    n_calibration : int, or a fraction of the pool
    splits : int or Repeats
        Number of random splits into calibration and test part. `Repeats(splits, draws, progress)`
        also says how many calibration sets are drawn for the violation rate.

    Returns
    -------
    study : Study
        Gains are relative to running the full model alone, which is also chosen where the
        certified setting would cost more.

    Examples
    --------
    >>> from swiftsure.study.simulate import Population
    >>> sample = Population().sample(2000, seed=0)
    >>> record = ExitRecord.from_logits(sample.logits, sample.labels)
    >>> study = evaluate(record, loss="zero_one", controls=["ucb"], epsilons=[0.05], splits=20)
    >>> study.test_risk["ucb"].shape
    (20, 1)
    """
    named = risk is None or isinstance(risk, str)
    request = _request(risk, loss, path)
    if isinstance(record, ShardedRecord):
        record = record.sample(LARGEST_POOL, seed)
    breakpoints = request.path == "breakpoints"
    if breakpoints and getattr(record, "groups", None) is not None:
        raise ValueError("`path` must be a grid for records with groups, not breakpoints.")
    record, request = without_pilot(record, request)
    pool = pool_curve(record, request)
    if not pool.statistic.relative:
        raise ValueError("`evaluate` needs losses relative to the full model.")
    chosen = _named(controls)
    budget = None
    if isinstance(request.missing, Ask) and request.missing.budget is not None:
        budget = LabelBudget.of(record, pool, request.missing.budget, request.rule)
        chosen = budget.compared(chosen)
    if epsilons is None:
        epsilons = EPSILONS if named else request.risks[0].epsilon
    levels = np.atleast_1d(checks.numbers("epsilons", epsilons, np.float64))
    checks.of_shape("epsilons", levels, {"m": None})
    for level in levels:
        checks.between("epsilons", level, 0.0, pool.loss_range.high)
    chance = checks.failure_probability(request.delta if delta is None else delta)
    repeats = Repeats.of(splits)
    n = calibration_size(n_calibration, pool.n)
    rng = np.random.default_rng(seed)
    if budget is not None and budget.labels > n:
        raise ValueError(
            f"The budget of labels in `missing` must be at most `n_calibration`, {n:,}, but is"
            f" {budget.labels:,}."
        )
    runs = _Runs(
        pool,
        chosen,
        levels,
        chance,
        breakpoints=breakpoints,
        cost=request.cost,
        budget=budget,
    )
    with steps("evaluating", repeats.splits + repeats.n_draws, repeats.progress) as advance:
        for _ in range(repeats.splits):
            order = rng.permutation(pool.n)
            runs.split(order[:n], order[n:])
            advance()
        for _ in range(repeats.n_draws):
            runs.draw(rng.integers(0, pool.n, n))
            advance()
    return runs.study(chance, n)


def _request(
    risk: str | Promise | Calibration | None, loss: str | None, path: PathLike
) -> Calibration:
    """Return what is studied, as a request."""
    if risk is None or isinstance(risk, str):
        # Any level will do, for those that are studied take its place.
        promise = Promise(loss, epsilon=EPSILONS[0], risk=risk or "gap")
        return Calibration(promise, path=path)  # type: ignore[arg-type]
    if loss is not None:
        raise ValueError("`loss` is the promise's own; leave it out.")
    request = as_request(risk)
    if path is None:
        return request
    if isinstance(risk, Calibration):
        raise ValueError("`path` is the request's own; leave it out.")
    return replace(request, path=path)  # type: ignore[arg-type]


class _Runs:
    """Collects the results of splits and draws."""

    def __init__(
        self,
        pool: RiskCurve,
        controls: Mapping[str, Control],
        epsilons: Floats,
        delta: float,
        *,
        breakpoints: bool,
        cost: str | None,
        budget: LabelBudget | None,
    ) -> None:
        self.pool = pool
        self.budget = budget
        self.controls = controls
        self.epsilons = epsilons
        self.delta = delta
        self.breakpoints = breakpoints
        self.cost = pool.default_cost(cost)
        self.deciding = pool.deciding_costs(cost)
        # Each control tests its own form of the curve (zero-bounded, …), prepared once.
        self.views = {label: control.prepare(pool) for label, control in controls.items()}
        self.rules = {k: replace(c, zero_bounded=False) for k, c in controls.items()}
        # In fixed sequence, ltt chooses what ucb chooses with the same bound.
        self.kinds = {
            label: replace(control, name="ucb")
            if control.name == "ltt" and control.correction == "fixed_sequence"
            else control
            for label, control in controls.items()
        }
        self.everything = np.arange(pool.n)
        self.pool_means = self._means(pool, self.everything)
        self.found: dict[str, dict[str, list[NDArray[Any]]]] = {label: {} for label in controls}

    def split(self, calibration: Rows, test: Rows) -> None:
        curve = self._along(self.pool, calibration)
        pool = self._means(curve, self.everything) if self.breakpoints else self.pool_means
        part = self._means(curve, calibration)
        # What is not in the calibration part is in the test part.
        total, inside = self._sizes(curve, self.everything), self._sizes(curve, calibration)
        means = {}
        for name in pool:
            outside = np.asarray(total[name] - inside[name])
            sums = total[name] * pool[name] - inside[name] * part[name]
            means[name] = np.where(outside > 0, sums / np.where(outside > 0, outside, 1.0), 0.0)
        if curve.follows:  # the worst share of a whole is not made of those of its parts
            means["risk"] = curve.risk(test)
        full = {name: self._full(name, curve, test) for name in means}
        full_part = {name: self._full(name, curve, calibration) for name in means}
        for label, chosen in self._choices(calibration).items():
            index = np.where(self._saves_nothing(part, full_part, chosen), -1, chosen)
            row = self.found[label]
            row.setdefault("threshold", []).append(self._thresholds(curve, index))
            for name, values in means.items():
                row.setdefault(name, []).append(_at(values, index, full[name]))
                row.setdefault(f"full {name}", []).append(np.full(len(index), full[name]))

    def _sizes(self, curve: RiskCurve, rows: Rows) -> dict[str, Floats | float]:
        """Return what a sum over rows is divided by, for the risk and each cost."""
        weight = curve.weight(rows)
        return {name: curve.counted(rows) if name == "risk" else weight for name in self.names}

    def _full(self, name: str, curve: RiskCurve, rows: Rows) -> float:
        """Return the risk, or a cost, of the full model alone."""
        return 0.0 if name == "risk" else curve.full_cost(name.removeprefix("cost "), rows)

    def _saves_nothing(
        self, means: Mapping[str, Floats], full: Mapping[str, float], index: NDArray[np.int64]
    ) -> Any:
        """Return where a setting costs more than the full model, which `calibrate` would refuse."""
        names = [f"cost {name}" for name in self.deciding]
        dearer = [means[name][np.maximum(index, 0)] > full[name] for name in names]
        return np.all(dearer, axis=0) if dearer else np.zeros(len(index), bool)

    def draw(self, calibration: Rows) -> None:
        risk = self.pool_means["risk"]
        if self.breakpoints:
            risk = self._along(self.pool, calibration).risk(self.everything)
        for label, index in self._choices(calibration).items():
            self.found[label].setdefault("pool_risk", []).append(_at(risk, index, full=0.0))

    @property
    def names(self) -> list[str]:
        """The risk and the costs that are measured."""
        costs = [self.cost, *(name for name in ("flops", SECONDS) if name in self.pool.costs)]
        costs += self.deciding
        return ["risk", *(f"cost {name}" for name in dict.fromkeys(costs) if name)]

    def _means(self, curve: RiskCurve, rows: Rows) -> dict[str, Floats]:
        """Return mean loss and mean costs at each setting."""
        return {
            name: curve.risk(rows)
            if name == "risk"
            else curve.mean_cost(name.removeprefix("cost "), rows)
            for name in self.names
        }

    def _choices(self, rows: Rows) -> dict[str, NDArray[np.int64]]:
        """Return the choice of each control; equivalent controls are run once."""
        if self.budget is not None:
            return {
                label: self.budget.indices(
                    label, rule, self.views[label], self.epsilons, self.delta, rows
                )
                for label, rule in self.rules.items()
            }
        found: dict[Control, NDArray[np.int64]] = {}
        for label, rule in self.kinds.items():
            if rule not in found:
                curve = self._along(self.views[label], rows)
                found[rule] = self.rules[label].indices(curve, self.epsilons, self.delta, rows)
        return {label: found[rule] for label, rule in self.kinds.items()}

    def _thresholds(self, curve: RiskCurve, index: NDArray[np.int64]) -> NDArray[Any]:
        """Return the chosen thresholds; infinity for a full model that is not on the path."""
        chosen = curve.thresholds[np.maximum(index, 0)]
        if not curve.full_model_first:
            chosen[index < 0] = np.inf
        return chosen

    def _along(self, curve: RiskCurve, rows: Rows) -> RiskCurve:
        """Return the curve along the breakpoints of these calibration samples, if requested."""
        if not self.breakpoints:
            return curve
        return curve.along(Path.breakpoints(curve.confidences[rows]))

    def study(self, delta: float, n: int) -> Study:
        costs = [name.removeprefix("cost ") for name in self.names if name != "risk"]
        return Study(
            controls=self.controls,
            epsilons=self.epsilons,
            delta=delta,
            n_calibration=n,
            n_pool=self.pool.n,
            about=Studied.of(self.pool, None if self.budget is None else self.budget.labels),
            cost=self.cost,
            full_costs={name: self.pool.full_cost(name) for name in costs},
            outcomes={label: self._outcomes(row, costs) for label, row in self.found.items()},
        )

    def _outcomes(self, row: Mapping[str, list[NDArray[Any]]], costs: list[str]) -> Outcomes:
        stacked = {name: np.array(each) for name, each in row.items()}
        gains = {}
        for name in costs:
            full = stacked[f"full cost {name}"]
            gains[name] = 100 * (1 - stacked[f"cost {name}"] / np.where(full > 0, full, np.nan))
        return Outcomes(
            thresholds=stacked["threshold"],
            test_risk=stacked["risk"],
            costs={name: stacked[f"cost {name}"] for name in costs},
            gains=gains,
            pool_risk=stacked["pool_risk"],
        )


def _at(values: Floats, index: NDArray[np.int64], full: float) -> Floats:
    """Return values at settings; -1 is the full model, which has the value `full`."""
    return np.where(index < 0, full, values[np.maximum(index, 0)])


def _named(controls: Controls) -> dict[str, Control]:
    if isinstance(controls, str | Control):
        controls = [controls]
    if isinstance(controls, Mapping):
        chosen = {k: c if isinstance(c, Control) else Control(c) for k, c in controls.items()}
    else:
        each = [c if isinstance(c, Control) else Control(c) for c in controls]
        chosen = {control.label: control for control in each}
        if len(chosen) < len(each):
            raise ValueError("`controls` must differ, or be a mapping with a label for each.")
    if not chosen:
        raise ValueError("`controls` must not be empty.")
    return chosen


def calibration_size(n_calibration: int | float, n_pool: int) -> int:
    """Return the number of calibration samples: itself, or a share of the pool."""
    if isinstance(n_calibration, float) and 0 < n_calibration < 1:
        n_calibration = max(1, round(n_calibration * n_pool))
    if isinstance(n_calibration, float):
        raise ValueError(
            "`n_calibration` must be a whole number, or a share in (0, 1), but got"
            f" {n_calibration:g}."
        )
    size = checks.count("n_calibration", n_calibration)
    if size >= n_pool:
        raise ValueError(
            f"`n_calibration` must leave test samples: it must be below {n_pool}, but got {size}."
        )
    return size
