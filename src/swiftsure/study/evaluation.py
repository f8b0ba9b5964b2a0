"""`evaluate`: runs controls on repeated splits of a record and checks their promises.

It answers two different questions:

- *Test risk and exceedance*: calibrate on one part of the pool and test on the rest. The fraction
  of test risks above ε includes the test part's noise, so it can exceed δ for a valid control.
- *Violations*: draw calibration sets with replacement and compare the whole pool's risk, which is
  then the true risk, with ε. δ bounds this rate.

With `labels`, it also compares ways to spend a budget of labels.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import ArrayLike, NDArray
from scipy import special

from swiftsure._lib import checks
from swiftsure._lib.html import html_card
from swiftsure._lib.progress import steps
from swiftsure.certify.calibration import Ask, Calibration
from swiftsure.certify.control import Control
from swiftsure.certify.labels import LabelBudget
from swiftsure.certify.policy import average_sentence, average_words, risk_words
from swiftsure.certify.promise import Promise
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import Path, PathLike
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.study.pools import Repeats, as_request, pool_curve

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from matplotlib.figure import Figure

__all__ = ["Outcomes", "Rates", "Studied", "Study", "calibration_size", "evaluate"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Controls = str | Control | Iterable[str | Control] | Mapping[str, str | Control]

ROUNDING = 1e-12
"""How far rounding alone may carry a risk above ε."""

LARGEST_POOL = 1_000_000
"""Number of samples that are drawn of a record on the disk."""

SECONDS = "seconds"
"""Name of the cost that is a time."""

EPSILONS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Levels that are compared where no promise names one."""


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
    pool = pool_curve(record, request)
    if not pool.relative:
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
            f"The budget of labels must be at most `n_calibration`, {n:,}, but is"
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


@dataclass(frozen=True, eq=False)
class Rates(NDArrayOperatorsMixin):
    """Rates with 95 % (Clopper-Pearson) intervals; NumPy treats it as the array of rates.

    Examples
    --------
    >>> rates = Rates.of(np.array([3, 0]), 100)
    >>> bool((rates <= 0.1).all()), rates.high.round(3).tolist()
    (True, [0.085, 0.036])
    """

    rate: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, counts: NDArray[Any], trials: int) -> "Rates":
        """Return the rates of `counts` out of `trials`."""
        k = np.asarray(counts, np.float64)
        with np.errstate(invalid="ignore"):
            low = special.betaincinv(k, trials - k + 1, 0.025)
            high = special.betaincinv(k + 1, trials - k, 0.975)
        return cls(k / trials, np.where(k == 0, 0.0, low), np.where(k == trials, 1.0, high))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Floats:
        return np.array(self.rate, dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [each.rate if isinstance(each, Rates) else each for each in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, index: Any) -> "Rates":
        return Rates(self.rate[index], self.low[index], self.high[index])

    def __len__(self) -> int:
        return len(self.rate)

    def __float__(self) -> float:
        return float(self.rate)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rates."""
        return self.rate.shape


@dataclass(frozen=True)
class Studied:
    """What a study is about.

    Attributes
    ----------
    risk, loss : str
    above, worst : float or None
        The limit or share, if the risk is that of a tail or of the worst share; see `RiskCurve`.
    selective : bool
        Whether it is the risk of the samples that exit early.
    unit, average
        What was split and drawn ("samples" or "groups"), and what has equal weight in risks and
        costs ("sample" or "group").
    weighted : bool
        Whether risks, costs and gains are those of production, by the samples' weights.
    n_labels : int or None
        The budget of labels for each calibration set, if there is one.
    """

    risk: str
    loss: str
    above: float | None = None
    worst: float | None = None
    selective: bool = False
    unit: str = "samples"
    average: str = "sample"
    weighted: bool = False
    n_labels: int | None = None

    @classmethod
    def of(cls, pool: RiskCurve, n_labels: int | None) -> "Studied":
        """Return what a study of this pool is about."""
        return cls(
            risk=pool.risk_name,
            loss=pool.loss_name,
            above=pool.above,
            worst=pool.worst,
            selective=pool.selective,
            unit="groups" if pool.grouped else "samples",
            average=pool.average,
            weighted=pool.max_weight is not None,
            n_labels=n_labels,
        )

    def __str__(self) -> str:
        """Return the loss and the risk, and how samples or groups are averaged."""
        words = risk_words(self.loss, self.risk, self.above, self.worst)
        words += " of exits" * self.selective
        how = "weighted" if self.weighted else average_words(self.unit, self.average)
        return words + (f" ({how})" if how else "")


@dataclass(frozen=True)
class Outcomes:
    """What one control chose, and how it came out: arrays with axes (splits, epsilons).

    Attributes
    ----------
    thresholds : (splits, epsilons) or (splits, epsilons, n_exits - 1)
        The chosen thresholds; infinity for the full model.
    test_risk : (splits, epsilons)
        Mean loss on the test part.
    costs, gains : {cost: (splits, epsilons)}
        Mean costs on the test part, and the percentage of the full model's that is saved.
    pool_risk : (draws, epsilons)
        True risk (the pool's) at the setting chosen on each set drawn with replacement.
    """

    thresholds: NDArray[Any]
    test_risk: Floats
    costs: Mapping[str, Floats]
    gains: Mapping[str, Floats]
    pool_risk: Floats


@dataclass(frozen=True)
class Study:
    """Results of `evaluate`: arrays by control label, with axes (splits, epsilons).

    Attributes
    ----------
    controls : {label: Control}
    epsilons : (m,)
    delta : float
    n_calibration, n_pool : int
        Samples, or groups, in each calibration set and in the pool.
    about : Studied
        The risk, and what is split and averaged.
    cost : str or None
        The cost of `mean_cost` and `gain`.
    full_costs : {cost: float}
        Mean costs of the full model alone, in the pool.
    outcomes : {label: Outcomes}
        What each control chose; the properties give it measure by measure.
    """

    controls: Mapping[str, Control]
    epsilons: Floats
    delta: float
    n_calibration: int
    n_pool: int
    about: Studied
    cost: str | None
    full_costs: Mapping[str, float]
    outcomes: Mapping[str, Outcomes] = field(repr=False)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the controls."""
        return tuple(self.controls)

    @property
    def splits(self) -> int:
        """Number of splits."""
        return len(next(iter(self.outcomes.values())).test_risk)

    @property
    def draws(self) -> int:
        """Number of calibration sets drawn with replacement."""
        return len(next(iter(self.outcomes.values())).pool_risk)

    @property
    def test_risk(self) -> dict[str, Floats]:
        """Mean loss on the test part."""
        return {label: each.test_risk for label, each in self.outcomes.items()}

    @property
    def test_exceedance(self) -> dict[str, NDArray[np.bool_]]:
        """Whether it is above ε. Not the violation rate: it includes the test part's noise."""
        limit = self.epsilons + ROUNDING
        return {label: each.test_risk > limit for label, each in self.outcomes.items()}

    @property
    def mean_cost(self) -> dict[str, Floats]:
        """Mean cost on the test part; NaN without costs."""
        return {label: self._of(each.costs, self.cost) for label, each in self.outcomes.items()}

    @property
    def gain(self) -> dict[str, Floats]:
        """Percentage of the full model's cost that is saved on the test part; NaN without costs."""
        return {label: self._of(each.gains, self.cost) for label, each in self.outcomes.items()}

    @property
    def flops_gain(self) -> dict[str, Floats]:
        """Percentage of FLOPs saved; NaN without them."""
        return {label: self._of(each.gains, "flops") for label, each in self.outcomes.items()}

    @property
    def seconds(self) -> dict[str, Floats]:
        """Mean time per answer in the test part; empty if the record has no such cost."""
        return {
            label: each.costs[SECONDS]
            for label, each in self.outcomes.items()
            if SECONDS in each.costs
        }

    @property
    def thresholds(self) -> dict[str, NDArray[Any]]:
        """The chosen thresholds; infinity for the full model."""
        return {label: each.thresholds for label, each in self.outcomes.items()}

    @property
    def pool_risk(self) -> dict[str, Floats]:
        """True risk (the pool's) at the setting chosen on each set drawn, (draws, epsilons)."""
        return {label: each.pool_risk for label, each in self.outcomes.items()}

    @property
    def violations(self) -> dict[str, Rates]:
        """How often the true risk is above ε, (epsilons,).

        At most δ for `ucb` and `ltt`; `crc` promises only that its mean is at most ε.
        """
        limit = self.epsilons + ROUNDING
        return {
            label: Rates.of((each.pool_risk > limit).sum(axis=0), len(each.pool_risk))
            for label, each in self.outcomes.items()
        }

    @property
    def full_cost(self) -> float:
        """Mean cost of the full model; NaN without costs."""
        return self.full_costs.get(self.cost or "", float("nan"))

    @property
    def full_seconds(self) -> float:
        """Mean time per answer of the full model; NaN if the record has no such cost."""
        return self.full_costs.get(SECONDS, float("nan"))

    def _of(self, values: Mapping[str, Floats], name: str | None) -> Floats:
        missing = np.full((self.splits, len(self.epsilons)), np.nan)
        return values.get(name or "", missing)

    def __str__(self) -> str:
        """Return a summary of what was evaluated and which attributes hold the results."""
        return (
            f"Study of the {self.about} under {', '.join(self.labels)}, at"
            f" {len(self.epsilons)} level{'s' * (len(self.epsilons) > 1)} ε: {self.splits} splits"
            f" of {self._size_words}{self._budget_words}."
            f" {average_sentence(self.about.unit, self.about.average)}".rstrip()
            + " summary() has one row per control and ε, to_pandas() one per split."
        )

    @property
    def _size_words(self) -> str:
        return f"{self.n_pool:,} {self.about.unit}, n = {self.n_calibration:,}"

    @property
    def _budget_words(self) -> str:
        labels = self.about.n_labels
        return "" if labels is None else f" with {labels:,} labels"

    def plot(self) -> "Figure":
        """Plot test risk and mean cost against ε, with one line per control."""
        from swiftsure.report import study_figure

        return study_figure(self)

    def _repr_html_(self) -> str:
        facts = {
            "risk": str(self.about),
            "controls": ", ".join(self.labels),
            "ε": ", ".join(f"{epsilon:g}" for epsilon in self.epsilons),
            "splits": f"{self.splits} of {self._size_words}",
            **{
                f"saved by {label} (%)": ", ".join(
                    f"{gain:.1f}" for gain in self.gain[label].mean(axis=0)
                )
                for label in self.labels
            },
        }
        return html_card("Study", facts)

    def legend(self, label: str) -> str:
        """Return a control's label, with a warning if it promises nothing."""
        promised = self.controls[label].guarantee != "none"
        return label if promised else f"{label}: no guarantee"

    def summary(self) -> list[dict[str, Any]]:
        """Return one row per control and ε: means, spreads over splits, rates, intervals."""
        rows = []
        for label in self.labels:
            for j, epsilon in enumerate(self.epsilons):
                exceeds = Rates.of(self.test_exceedance[label][:, j].sum(), self.splits)
                violated = self.violations[label][j]
                pool = self.pool_risk[label][:, j]
                rows.append(
                    {
                        "control": label,
                        "epsilon": float(epsilon),
                        "unit": self.about.unit,
                        "average": self.about.average,
                        "test_risk": float(self.test_risk[label][:, j].mean()),
                        "test_risk_sd": float(self.test_risk[label][:, j].std()),
                        "test_exceedance": float(exceeds),
                        "mean_cost": float(self.mean_cost[label][:, j].mean()),
                        "gain": float(self.gain[label][:, j].mean()),
                        "gain_sd": float(self.gain[label][:, j].std()),
                        "flops_gain": float(self.flops_gain[label][:, j].mean()),
                        "mean_risk": float(pool.mean()),
                        "mean_risk_se": float(pool.std() / np.sqrt(self.draws)),
                        "violations": float(violated),
                        "violations_low": float(violated.low),
                        "violations_high": float(violated.high),
                    }
                )
        return rows

    def to_arrow(self) -> "pa.Table":
        """Return a tidy table with one row per control, split and ε."""
        import pyarrow as pa

        measures = ("test_risk", "test_exceedance", "mean_cost", "gain", "flops_gain")
        n_epsilons = len(self.epsilons)
        each = self.splits * n_epsilons
        columns: dict[str, Any] = {
            "control": np.repeat(self.labels, each),
            "split": np.tile(np.repeat(np.arange(self.splits), n_epsilons), len(self.labels)),
            "epsilon": np.tile(self.epsilons, self.splits * len(self.labels)),
        }
        for name in measures:
            by_label = getattr(self, name)
            columns[name] = np.concatenate([by_label[label].ravel() for label in self.labels])
        columns["average"] = np.full(each * len(self.labels), self.about.average)
        return pa.table(columns)

    def to_pandas(self) -> "pd.DataFrame":
        """Return the tidy table as a data frame; needs pandas."""
        try:
            import pandas  # noqa: F401, ICN001 (only to say what is missing)
        except ImportError:
            raise ImportError(
                "`to_pandas` needs pandas: pip install 'swiftsure[pandas]'; `to_arrow` does not."
            ) from None
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame


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
        found: dict[tuple[Control, int], NDArray[np.int64]] = {}
        choices = {}
        for label, rule in self.kinds.items():
            tested = rows if self.budget is None else self.budget.rows(label, rows)
            key = rule, len(tested)
            if key not in found:
                found[key] = self._choose(label, tested)
            chosen = found[key]
            if self.budget is not None:
                chosen = self.budget.stopped(label, rows, chosen)
            choices[label] = chosen
        return choices

    def _choose(self, label: str, rows: Rows) -> NDArray[np.int64]:
        curve = self._along(self.views[label], rows)
        return self.rules[label].indices(curve, self.epsilons, self.delta, rows)

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
