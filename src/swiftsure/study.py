"""What repeated splits found: risks, savings, and rates with their intervals."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray
from scipy import special

from swiftsure.control import Control
from swiftsure.policy import average_sentence, average_words

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["Rates", "Study"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Rates(NDArrayOperatorsMixin):
    """Rates with their 95 % (Clopper-Pearson) intervals; counts as an array of the rates.

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
    """What `evaluate` found. Arrays by control label; splits first, then levels.

    Attributes
    ----------
    unit, average
        What was split and drawn ("samples" or "groups"), and what counts the same in every risk and
        cost ("sample" or "group").
    test_risk : {label: (splits, epsilons)}
        Mean loss of the test part.
    test_exceedance : {label: (splits, epsilons)}
        Whether it is above ε. Not the violation rate: the test part has noise of its own.
    exit_layer, gain, flops_gain : {label: (splits, epsilons)}
        Mean cost of the test part (layers, if the record has them), the saving against the full
        model in per cent, and the same in FLOPs.
    thresholds : {label: (splits, epsilons)} or with one an exit last
        What was chosen; infinity for the full model.
    pool_risk : {label: (draws, epsilons)}
        True risk, in the pool, of what calibration sets drawn with replacement chose.
    violations : {label: Rates of (epsilons,)}
        How often that was above ε: at most δ for `ucb` and `ltt`. `crc` promises the mean only.
    seconds : {label: (splits, epsilons)}
        Mean time of an answer in the test part, where the record has a cost of that name; else
        empty. `full_seconds` is that of the full model.
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
    exit_layer: Mapping[str, Floats] = field(repr=False)
    gain: Mapping[str, Floats] = field(repr=False)
    flops_gain: Mapping[str, Floats] = field(repr=False)
    thresholds: Mapping[str, NDArray[Any]] = field(repr=False)
    pool_risk: Mapping[str, Floats] = field(repr=False)
    violations: Mapping[str, Rates] = field(repr=False)
    seconds: Mapping[str, Floats] = field(default_factory=dict, repr=False)
    full_seconds: float = float("nan")
    unit: str = "samples"
    average: str = "sample"

    def __str__(self) -> str:
        """Say what was studied, and where its numbers are."""
        return (
            f"Study of the {self.risk_words} under {', '.join(self.labels)}, at"
            f" {len(self.epsilons)} level{'s' * (len(self.epsilons) > 1)} ε: {self.splits} splits"
            f" of {self.n_pool:,} {self.unit}, n = {self.n_calibration:,}."
            f" {average_sentence(self.unit, self.average)}".rstrip()
            + " Its numbers: summary(), a row a control and level; to_pandas(), a row a split."
        )

    @property
    def risk_words(self) -> str:
        """Loss and risk, and what is averaged where samples come in groups."""
        how = average_words(self.unit, self.average)
        return f"{self.loss} {self.risk} ({how})" if how else f"{self.loss} {self.risk}"

    def legend(self, label: str) -> str:
        """Return a control's label, with a warning where it promises nothing."""
        promised = self.controls[label].guarantee != "none"
        return label if promised else f"{label}: no guarantee"

    def summary(self) -> list[dict[str, Any]]:
        """Return one row a control and level: means, spreads over splits, rates with intervals."""
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
                        "exit_layer": float(self.exit_layer[label][:, j].mean()),
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
        """Return a tidy table: one row a control, split and level."""
        import pyarrow as pa

        columns: dict[str, list[Any]] = {"control": [], "split": [], "epsilon": []}
        measures = ("test_risk", "test_exceedance", "exit_layer", "gain", "flops_gain")
        for label in self.labels:
            shape = self.test_risk[label].shape
            columns["control"].append(np.full(shape[0] * shape[1], label))
            columns["split"].append(np.repeat(np.arange(shape[0]), shape[1]))
            columns["epsilon"].append(np.tile(self.epsilons, shape[0]))
            for name in measures:
                columns.setdefault(name, []).append(getattr(self, name)[label].ravel())
        return pa.table({name: np.concatenate(parts) for name, parts in columns.items()})

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
