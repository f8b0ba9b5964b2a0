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
from swiftsure.certify.calibration import curve_of
from swiftsure.certify.control import Control
from swiftsure.certify.labels import LabelBudget
from swiftsure.certify.policy import average_sentence, average_words, risk_words
from swiftsure.curves.curve import Average, RiskCurve
from swiftsure.curves.paths import Path, PathLike
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from matplotlib.figure import Figure

__all__ = ["Rates", "Study", "evaluate"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Controls = Iterable[str | Control] | Mapping[str, str | Control]

ROUNDING = 1e-12
"""How far rounding alone may carry a risk above ε."""

LARGEST_POOL = 1_000_000
"""Number of samples that are drawn of a record on the disk."""

SECONDS = "seconds"
"""Name of the cost that is a time."""


def evaluate(
    record: ExitRecord | ThresholdRecord | ShardedRecord | RiskCurve,
    *,
    risk: str | None = None,
    loss: str | None = None,
    controls: Controls = ("crc", "ucb", "ltt"),
    epsilons: ArrayLike = (0.01, 0.02, 0.05, 0.1, 0.2),
    delta: float = 0.1,
    n_calibration: int | float = 100,
    splits: int = 100,
    seed: int = 0,
    score: str | None = None,
    path: PathLike = None,
    cost: str | None = None,
    draws: int | None = None,
    progress: bool | None = None,
    average: Average | None = None,
    max_group_size: int | None = None,
    labels: int | None = None,
) -> "Study":
    """Split a record at random many times, calibrate on one part and test on the other.

    Parameters
    ----------
    record : ExitRecord, ThresholdRecord, ShardedRecord or RiskCurve
        The pool; with groups, whole groups are split and drawn. Of a `ShardedRecord`, the pool is
        at most a million samples, drawn at random with `seed`.
    risk, loss, score, path
        As in `record.curve`; leave them out for a RiskCurve.
    controls : names, Controls, or a mapping of labels to Controls
    epsilons : (m,)
        Levels, in (0, B).
    delta : float
        Failure probability of `ucb` and `ltt`.
    n_calibration : int, or a fraction of the pool
    splits : int
        Number of random splits into calibration and test part.
    cost : str, optional
        The cost for `mean_cost` and `gain`; by default the one that `policy.evaluate` reports:
        FLOPs, the price of a cascade, or the record's first. Gains are relative to running the full
        model alone, which is also chosen where the certified setting would cost more.
    draws : int, optional
        Number of calibration sets drawn with replacement, for the violation rate; `splits` by
        default.
    progress : bool, optional
        Show a progress bar; by default if standard error is a terminal.
    average, max_group_size
        For records with groups, as in `record.curve`.
    labels : int, optional
        A budget of labels for each calibration set of `n_calibration` samples, spent as
        `needs_label` says, with `missing="stop"`. For comparison, the study then also holds each
        control with that many samples, all labelled ("ucb, random labels"), and with all samples
        labelled ("ucb, all labels").

    Returns
    -------
    study : Study

    Examples
    --------
    >>> from swiftsure.study.simulate import Population
    >>> sample = Population().sample(2000, seed=0)
    >>> record = ExitRecord.from_logits(sample.logits, sample.labels)
    >>> study = evaluate(record, loss="zero_one", controls=["ucb"], epsilons=[0.05], splits=20)
    >>> study.test_risk["ucb"].shape
    (20, 1)
    """
    if isinstance(record, ShardedRecord):
        record = record.sample(LARGEST_POOL, seed)
    if getattr(record, "groups", None) is not None and _is_breakpoints(path):
        raise ValueError("`path` must be a grid for records with groups, not breakpoints.")
    pool = curve_of(record, risk, loss, score, path, average, max_group_size)
    if not pool.relative:
        raise ValueError("`evaluate` needs losses relative to the full model.")
    if pool.selective:
        raise ValueError("`evaluate` does not know the risk of the samples that exit.")
    chosen = _named(controls)
    budget = None
    if labels is not None:
        budget = LabelBudget.of(record, pool, labels, score)
        chosen = budget.compared(chosen)
    levels = np.atleast_1d(checks.numbers("epsilons", epsilons, np.float64))
    checks.of_shape("epsilons", levels, {"m": None})
    for level in levels:
        checks.between("epsilons", level, 0.0, pool.loss_range.high)
    checks.failure_probability(delta)
    checks.count("splits", splits)
    draws = splits if draws is None else checks.count("draws", draws)
    n = _calibration_size(n_calibration, pool.n)
    rng = np.random.default_rng(seed)
    if budget is not None and budget.labels > n:
        raise ValueError(f"`labels` must be at most `n_calibration`, {n:,}, but got {labels:,}.")
    runs = _Runs(pool, chosen, levels, delta, _is_breakpoints(path), cost, budget)
    with steps("evaluating", splits + draws, progress) as advance:
        for _ in range(splits):
            order = rng.permutation(pool.n)
            runs.split(order[:n], order[n:])
            advance()
        for _ in range(draws):
            runs.draw(rng.integers(0, pool.n, n))
            advance()
    return runs.study(delta, n)


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
class Study:
    """Results of `evaluate`: arrays by control label, with axes (splits, epsilons).

    Attributes
    ----------
    unit, average
        What was split and drawn ("samples" or "groups"), and what has equal weight in risks and
        costs ("sample" or "group").
    n_labels : int or None
        The budget of labels for each calibration set, if there is one.
    above, worst : float or None
        The limit or share, if the risk is that of a tail or of the worst share; see `RiskCurve`.
    weighted : bool
        Whether risks, costs and gains are those of production, by the samples' weights.
    test_risk : {label: (splits, epsilons)}
        Mean loss on the test part.
    test_exceedance : {label: (splits, epsilons)}
        Whether it is above ε. This is not the violation rate: it includes the test part's noise.
    mean_cost, gain, flops_gain : {label: (splits, epsilons)}
        Mean cost on the test part (of the cost that `cost` names), percentage of it saved relative
        to the full model, and percentage of FLOPs saved.
    thresholds : {label: (splits, epsilons) or (splits, epsilons, n_exits - 1)}
        The chosen thresholds; infinity for the full model.
    pool_risk : {label: (draws, epsilons)}
        True risk (the pool's) at the setting chosen on each set drawn with replacement.
    violations : {label: Rates of (epsilons,)}
        How often the true risk is above ε: at most δ for `ucb` and `ltt`; `crc` promises only that
        its mean is at most ε.
    seconds : {label: (splits, epsilons)}
        Mean time per answer in the test part, if the record has this cost; otherwise empty.
        `full_seconds` is that of the full model.
    """

    labels: tuple[str, ...]
    controls: Mapping[str, Control]
    epsilons: Floats
    delta: float
    n_calibration: int
    n_pool: int
    splits: int
    draws: int
    risk: str
    loss: str
    cost: str | None
    full_cost: float
    test_risk: Mapping[str, Floats] = field(repr=False)
    test_exceedance: Mapping[str, NDArray[np.bool_]] = field(repr=False)
    mean_cost: Mapping[str, Floats] = field(repr=False)
    gain: Mapping[str, Floats] = field(repr=False)
    flops_gain: Mapping[str, Floats] = field(repr=False)
    thresholds: Mapping[str, NDArray[Any]] = field(repr=False)
    pool_risk: Mapping[str, Floats] = field(repr=False)
    violations: Mapping[str, Rates] = field(repr=False)
    seconds: Mapping[str, Floats] = field(default_factory=dict, repr=False)
    full_seconds: float = float("nan")
    unit: str = "samples"
    average: str = "sample"
    n_labels: int | None = None
    above: float | None = field(default=None, repr=False)
    worst: float | None = field(default=None, repr=False)
    weighted: bool = field(default=False, repr=False)

    def __str__(self) -> str:
        """Return a summary of what was evaluated and which attributes hold the results."""
        return (
            f"Study of the {self.risk_words} under {', '.join(self.labels)}, at"
            f" {len(self.epsilons)} level{'s' * (len(self.epsilons) > 1)} ε: {self.splits} splits"
            f" of {self.n_pool:,} {self.unit}, n = {self.n_calibration:,}{self._budget_words}."
            f" {average_sentence(self.unit, self.average)}".rstrip()
            + " summary() has one row per control and ε, to_pandas() one per split."
        )

    @property
    def risk_words(self) -> str:
        """The loss and the risk, and how samples or groups are averaged."""
        words = risk_words(self.loss, self.risk, self.above, self.worst)
        how = "weighted" if self.weighted else average_words(self.unit, self.average)
        return words + (f" ({how})" if how else "")

    @property
    def _budget_words(self) -> str:
        return "" if self.n_labels is None else f" with {self.n_labels:,} labels"

    def plot(self) -> "Figure":
        """Plot test risk and mean cost against ε, with one line per control."""
        from swiftsure.report import study_figure

        return study_figure(self)

    def _repr_html_(self) -> str:
        facts = {
            "risk": self.risk_words,
            "controls": ", ".join(self.labels),
            "ε": ", ".join(f"{epsilon:g}" for epsilon in self.epsilons),
            "splits": f"{self.splits} of {self.n_pool:,} {self.unit}, n = {self.n_calibration:,}",
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
                        "unit": self.unit,
                        "average": self.average,
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
        columns["average"] = np.full(each * len(self.labels), self.average)
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
        total, inside, outside = (curve.weight(r) for r in (self.everything, calibration, test))
        means = {name: (total * pool[name] - inside * part[name]) / outside for name in pool}
        full = {name: self._full(name, curve, test) for name in means}
        full_part = {name: self._full(name, curve, calibration) for name in means}
        for label, chosen in self._choices(calibration).items():
            index = np.where(self._saves_nothing(part, full_part, chosen), -1, chosen)
            row = self.found[label]
            row.setdefault("threshold", []).append(self._thresholds(curve, index))
            for name, values in means.items():
                row.setdefault(name, []).append(_at(values, index, full[name]))
                row.setdefault(f"full {name}", []).append(np.full(len(index), full[name]))

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

    def _means(self, curve: RiskCurve, rows: Rows) -> dict[str, Floats]:
        """Return mean loss and mean costs at each setting."""
        names = [self.cost, *(name for name in ("flops", SECONDS) if name in self.pool.costs)]
        names += self.deciding
        costs = {f"cost {c}": curve.mean_cost(c, rows) for c in dict.fromkeys(names) if c}
        return {"risk": curve.risk(rows), **costs}

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

    def _stacked(self, label: str, name: str) -> Floats:
        """Return results by split and ε; NaN if there are none of this name."""
        row = self.found[label]
        missing = np.full((len(row["risk"]), len(self.epsilons)), np.nan)
        return np.array(row[name]) if name in row else missing

    def _saving(self, label: str, name: str | None) -> Floats:
        full = self._stacked(label, f"full cost {name}")
        cost = self._stacked(label, f"cost {name}")
        return np.asarray(100 * (1 - cost / np.where(full > 0, full, np.nan)))

    def study(self, delta: float, n: int) -> Study:
        found = self.found
        risk = {k: np.array(row["risk"]) for k, row in found.items()}
        pool_risk = {k: np.array(row["pool_risk"]) for k, row in found.items()}
        limit = self.epsilons + ROUNDING
        draws = len(next(iter(pool_risk.values())))
        return Study(
            labels=tuple(self.controls),
            controls=self.controls,
            epsilons=self.epsilons,
            delta=delta,
            n_calibration=n,
            n_pool=self.pool.n,
            splits=len(next(iter(risk.values()))),
            draws=draws,
            risk=self.pool.risk_name,
            loss=self.pool.loss_name,
            unit="groups" if self.pool.grouped else "samples",
            average=self.pool.average,
            n_labels=None if self.budget is None else self.budget.labels,
            above=self.pool.above,
            worst=self.pool.worst,
            weighted=self.pool.max_weight is not None,
            cost=self.cost,
            full_cost=self.pool.full_cost(self.cost) if self.cost else float("nan"),
            test_risk=risk,
            test_exceedance={k: values > limit for k, values in risk.items()},
            mean_cost={k: self._stacked(k, f"cost {self.cost}") for k in found},
            gain={k: self._saving(k, self.cost) for k in found},
            flops_gain={k: self._saving(k, "flops") for k in found},
            thresholds={k: np.array(row["threshold"]) for k, row in found.items()},
            pool_risk=pool_risk,
            violations={
                k: Rates.of((values > limit).sum(axis=0), draws) for k, values in pool_risk.items()
            },
            seconds={
                k: np.array(row[f"cost {SECONDS}"])
                for k, row in found.items()
                if f"cost {SECONDS}" in row
            },
            full_seconds=self.pool.full_cost(SECONDS) if SECONDS in self.pool.costs else np.nan,
        )


def _at(values: Floats, index: NDArray[np.int64], full: float) -> Floats:
    """Return values at settings; -1 is the full model, which has the value `full`."""
    return np.where(index < 0, full, values[np.maximum(index, 0)])


def _is_breakpoints(path: PathLike) -> bool:
    return isinstance(path, str) and path == "breakpoints"


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


def _calibration_size(n_calibration: int | float, n_pool: int) -> int:
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
