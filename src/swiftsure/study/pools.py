"""What studies draw from: the pool of one promise, and how often."""

from dataclasses import dataclass, replace
from typing import Any

from swiftsure._lib import checks
from swiftsure.certify.calibration import Ask, Calibration
from swiftsure.certify.promise import Promise
from swiftsure.certify.selection import refuse_own
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.pilots import without_pilots
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.records.labels import MissingLabelsError
from swiftsure.scores import LearnedScore

__all__ = ["Repeats", "as_request", "cost_name", "pool_curve", "without_pilot"]


@dataclass(frozen=True)
class Repeats:
    """How often a study splits and draws; for `splits=`.

    Parameters
    ----------
    splits : int
        Number of random splits into calibration and test part.
    draws : int, optional
        Number of calibration sets drawn with replacement, for the violation rate; `splits` by
        default.
    progress : bool, optional
        Show a progress bar; by default if standard error is a terminal.

    Examples
    --------
    >>> Repeats(100).n_draws, Repeats(1, draws=500).n_draws
    (100, 500)
    """

    splits: int = 100
    draws: int | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        checks.count("splits", self.splits)
        if self.draws is not None:
            checks.count("draws", self.draws)

    @classmethod
    def of(cls, given: "int | Repeats") -> "Repeats":
        """Return a number of splits as Repeats."""
        return given if isinstance(given, Repeats) else cls(given)

    @property
    def n_draws(self) -> int:
        """Number of draws."""
        return self.splits if self.draws is None else self.draws


def as_request(given: Promise | Calibration) -> Calibration:
    """Return a promise as a request; raise if it promises more than one risk everywhere."""
    request = given if isinstance(given, Calibration) else Calibration(given)  # type: ignore[arg-type]
    if len(request.promises) > 1 or request.risks[0].within is not None:
        raise ValueError(
            "This studies one promise over all samples; `request.evaluate` and `request.plan` study"
            " several together, costs, and slices."
        )
    return request


def without_pilot(record: Any, request: Calibration) -> tuple[Any, Calibration]:
    """Return a pool without the samples of its score's or router's pilot, both forgotten.

    Samples drawn from the pool get numbers of their own, so the request could not tell them apart.
    """
    record = without_pilots(record)
    score = request.rule.score
    if not isinstance(score, LearnedScore) or score.pilot is None:
        return record, request
    kept = replace(score, pilot=None)
    return score.left_out(record), replace(request, rule=replace(request.rule, score=kept))


def pool_curve(record: Any, request: Calibration) -> RiskCurve:
    """Return the curve of a request's one promise, over all samples of a record."""
    if not isinstance(record, ExitRecord | ThresholdRecord | ShardedRecord | RiskCurve):
        raise TypeError(
            "`record` must be an ExitRecord, a ThresholdRecord or a RiskCurve, but got"
            f" {type(record).__name__}."
        )
    if isinstance(record, RiskCurve):
        refuse_own(score=request.rule.score, path=request.path)
    elif not isinstance(request.path, None | str) and not hasattr(request.path, "thresholds"):
        raise ValueError(
            "`path` of a study must be known: `request.evaluate` learns one in each split."
        )
    missing = "raise" if isinstance(request.missing, Ask) else request.missing
    if missing == "stop":
        raise ValueError(
            "`missing='stop'` would stop where the pool lacks a label, not each calibration set:"
            " use `request.evaluate`, or a budget, `missing=Ask(None, budget=100)`."
        )
    promise = request.risks[0]
    try:
        return promise.curve(record, request.rule, request.path, missing)  # type: ignore[arg-type]
    except MissingLabelsError as error:  # some callers have no `missing`, but all take a curve
        lists = str(error).partition(" Label them")[0]
        raise ValueError(
            f'{lists} Label them, or pass `record.curve(..., missing="worst")` in place of the'
            " record, which assumes the worst loss for them."
        ) from None


def cost_name(curve: RiskCurve, cost: str | None) -> str:
    """Return the cost to plan with; raise if there is none."""
    name = curve.default_cost(cost)
    if name is None:
        raise ValueError("`record` must have costs: without them no saving is known.")
    return name
