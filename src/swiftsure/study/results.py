"""What a study found: rates with their intervals, and results by control."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray
from scipy import special

from swiftsure._lib.html import html_card
from swiftsure.certify.control import Control
from swiftsure.certify.wording import average_sentence, average_words, risk_words
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.statistic import Statistic

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from matplotlib.figure import Figure

__all__ = ["ROUNDING", "SECONDS", "Outcomes", "Rates", "Studied", "Study"]

Floats = NDArray[np.float64]

ROUNDING = 1e-12
"""How far rounding alone may carry a risk above ε."""

SECONDS = "seconds"
"""Name of the cost that is a time."""


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
    statistic : Statistic
        The risk.
    unit, average
        What was split and drawn ("samples" or "groups"), and what has equal weight in risks and
        costs ("sample" or "group").
    weighted : bool
        Whether risks, costs and gains are those of production, by the samples' weights.
    n_labels : int or None
        The budget of labels for each calibration set, if there is one.
    """

    statistic: Statistic
    unit: str = "samples"
    average: str = "sample"
    weighted: bool = False
    n_labels: int | None = None

    @classmethod
    def of(cls, pool: RiskCurve, n_labels: int | None) -> "Studied":
        """Return what a study of this pool is about."""
        return cls(
            statistic=pool.statistic,
            unit=pool.units.name,
            average=pool.units.average,
            weighted=pool.units.max_weight is not None,
            n_labels=n_labels,
        )

    def __str__(self) -> str:
        """Return the loss and the risk, and how samples or groups are averaged."""
        held = self.statistic
        words = risk_words(held.loss, held.risk, held)
        words += " of exits" * held.selective
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
