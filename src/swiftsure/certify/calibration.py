"""`Calibration`: the request to calibrate, as one frozen value; and `calibrate`, its front door."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure._lib.files import shortened
from swiftsure.certify.control import Control
from swiftsure.certify.promise import CostPromise, Promise
from swiftsure.curves.paths import Path, PathLike
from swiftsure.curves.pilots import PilotPath
from swiftsure.exits import ExitRule
from swiftsure.scores import LearnedScore

if TYPE_CHECKING:
    import os

    from swiftsure.certify.anytime.calibration import GrowingCalibration
    from swiftsure.certify.policy import Metadata, Policy
    from swiftsure.certify.slices import SlicedPolicy
    from swiftsure.study.requests import RequestPlan, RequestStudy

__all__ = ["Ask", "Calibration", "Labeller", "calibrate", "stated_promises"]

DELTA = 0.1
"""The failure probability if none is given."""

Labeller = Callable[[NDArray[Any]], Any]
"""(ids of samples, (m,)) -> their labels, (m,); None or a negative number where unknown.

Or a mapping of their losses against the labels, (m, n_exits), by name; NaN where unknown.
"""


@dataclass(frozen=True)
class Ask:
    """Ask for missing labels while the walk needs them; for `missing=`.

    Labels that stay unknown (None, or a negative number), or that the budget does not reach, count
    as the worst loss in tests for which that is always valid: those of 0-1 gaps, and `crc`. Bets
    stop at the first setting that lacks a label. A policy's file does not keep the labeller.

    Parameters
    ----------
    labeller : callable
        (ids of samples, (m,)) -> their labels, (m,), as in `ExitRecord.with_labels`, or a mapping
        of their losses against the labels, (m, n_exits), by name.
    budget : int, optional
        The largest number of labels to ask for.
    """

    labeller: Labeller | None = field(compare=False, repr=False)
    budget: int | None = None

    def __post_init__(self) -> None:
        """Check the budget."""
        if self.labeller is not None and not callable(self.labeller):
            raise TypeError("`labeller` must be a function of ids that returns labels.")
        if self.budget is not None:
            checks.count("budget", self.budget, 0)

    def shared(self) -> "Callable[[], Ask]":
        """Return a function that gives each of several calibrations what is left of the budget.

        Stopping early is valid, whatever decided it.
        """
        asked = 0

        def labels(ids: NDArray[Any]) -> Any:
            nonlocal asked
            asked += len(ids)
            return self.labeller(ids)  # type: ignore[misc]

        budget = self.budget
        if self.labeller is None or budget is None:
            return lambda: self
        return lambda: Ask(labels, budget - asked)


Missing = Literal["raise", "worst", "stop"] | Ask
"""What to do where a needed label is missing."""


@checks.suggesting
@dataclass(frozen=True)
class Calibration:
    """What to promise, and how to look for the fastest setting that keeps it.

    Frozen before the calibration losses are seen, and stored in the policy, so that
    `policy.calibration.run(record)` calibrates again in the same way.

    **Guarantee**: for controls "ucb" and "ltt", all promises hold together on new samples with
    probability at least 1 − δ over the draw of the calibration record; for "crc", each holds on
    average over that draw. This needs calibration and new samples that are independent draws of one
    distribution (or what the record says of its draw), and that everything here, and the number of
    samples, were fixed before the calibration losses were seen. Running it again with other values
    until a result pleases voids the guarantee.

    Parameters
    ----------
    promises : Promise, CostPromise, or a sequence of them
    delta : float
        Failure probability.
    control : {"ucb", "ltt", "crc", "empirical"} or Control
    bound : str
        Among `swiftsure.bounds.BOUNDS`, or "auto".
    path : None, "logit", "breakpoints", thresholds, Path or PilotPath
        Settings from safest to fastest; `Path.learn(pilot=200)` sets samples aside to learn it.
    rule : ExitRule, LearnedScore or str
        When samples exit, apart from the threshold; a score stands for a rule with it.
    missing : {"raise", "worst", "stop"} or Ask
        What to do where a needed label is missing; see `ExitRecord.curve`.
    cost : str, optional
        The cost that must not exceed the full model's: if the certified setting needs more of it,
        the policy runs the full model, and says so. By default the price of a cascade; else a
        setting must save at least one of the record's costs.

    Examples
    --------
    >>> from swiftsure.study.simulate import Population
    >>> from swiftsure.records import ExitRecord
    >>> sample = Population().sample(1000, seed=0)
    >>> record = ExitRecord.from_logits(sample.logits, sample.labels)
    >>> request = Calibration([Promise("zero_one", epsilon=0.05), Promise("brier", epsilon=0.05)])
    >>> policy = request.run(record)
    >>> policy.calibration == request
    True
    """

    promises: tuple[Promise | CostPromise, ...]
    delta: float = DELTA
    control: Control = Control("ucb")  # noqa: RUF009 (frozen)
    bound: str = "auto"
    path: Path | PilotPath | str | None = None
    rule: ExitRule = ExitRule()  # noqa: RUF009 (frozen)
    missing: Missing = "raise"
    cost: str | None = None

    def __post_init__(self) -> None:
        """Check and normalise every field, so that equal requests are equal."""
        control = _control(self.control, self.bound)
        rule: Any = self.rule
        rule = rule if isinstance(rule, ExitRule) else ExitRule(rule)
        if not isinstance(rule, ExitRule) or rule.threshold is not None:
            raise ValueError(
                "`rule` must be an ExitRule without a threshold, which is to be found."
            )
        if not isinstance(self.cost, str | None):
            raise TypeError(f"`cost` must be the name of a cost, but got {self.cost!r}.")
        if not isinstance(self.missing, Ask):
            checks.choice("missing", self.missing, ["raise", "worst", "stop"])
        values = {
            "promises": _promises(self.promises),
            "delta": checks.failure_probability(self.delta),
            "control": control,
            "bound": control.bound,
            "path": _path(self.path),
            "rule": rule,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if control.guarantee != "probability" and self.delta != DELTA:
            raise ValueError(
                f"`delta` is not used by {control.label}, which makes no promise with a"
                ' probability: leave it out, or use control="ucb" or "ltt".'
            )
        if control.bound != "auto" and not control.uses_bound:
            raise ValueError(
                f"`bound` is not used by {control.name}: leave it out, or use "
                + ('method="ucb".' if control.name == "crc" else 'control="ucb" or "ltt".')
            )

    @property
    def risks(self) -> tuple[Promise, ...]:
        """The promises about risks."""
        return tuple(each for each in self.promises if isinstance(each, Promise))

    @property
    def limits(self) -> dict[str, float]:
        """The promised limits of mean costs, by name."""
        return {e.cost: e.at_most for e in self.promises if isinstance(e, CostPromise)}

    def run(
        self, record: Any, *, metadata: "Metadata | Mapping[str, str] | None" = None
    ) -> "Policy | SlicedPolicy":
        """Find and certify the fastest setting that keeps the promises, on calibration samples.

        Returns a Policy, with `threshold=None` if nothing faster than the full model was certified;
        or a SlicedPolicy, if a promise holds within each slice with a setting of its own.
        """
        from swiftsure.certify.selection import run

        return run(self, record, metadata)

    def start(
        self, horizon: int = 1000, state: "str | os.PathLike[str] | None" = None
    ) -> "GrowingCalibration":
        """Start a calibration on samples that arrive over time, valid at every moment."""
        from swiftsure.certify.anytime.calibration import GrowingCalibration

        return GrowingCalibration(self, horizon=horizon, state=state)

    def evaluate(
        self,
        record: Any,
        *,
        n_calibration: int | float = 100,
        splits: int = 100,
        draws: int | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> "RequestStudy":
        """Run the request on repeated splits of a record; see `swiftsure.evaluate`."""
        from swiftsure.study.requests import evaluate_request

        return evaluate_request(
            self,
            record,
            n_calibration=n_calibration,
            splits=splits,
            draws=draws,
            seed=seed,
            progress=progress,
        )

    def plan(
        self,
        pilot: Any,
        *,
        sizes: Sequence[int] = (100, 200, 300, 500, 1000, 2000, 5000),
        power: float = 0.8,
        draws: int = 50,
        seed: int = 0,
        progress: bool | None = None,
    ) -> "RequestPlan":
        """Return how many samples the promises need, by a pilot that is not used to calibrate.

        Parameters
        ----------
        sizes : sequence of int
            Numbers of samples, or of groups, to try.
        power : float
            How likely a calibration must be to certify something faster than the full model.
        draws : int
            Calibration sets that are drawn from the pilot at each size, with replacement.
        seed : int
            Of these draws.
        progress : bool, optional
            Show progress; by default in a terminal.
        """
        from swiftsure.study.requests import plan_request

        return plan_request(
            self, pilot, sizes=sizes, power=power, draws=draws, seed=seed, progress=progress
        )

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON, as policy files hold it."""
        missing: Any = self.missing
        if isinstance(missing, Ask):
            missing = {"ask": missing.budget}
        path: Any = self.path
        return {
            "promises": [
                {k: v for k, v in asdict(each).items() if v is not None} for each in self.promises
            ],
            "delta": self.delta,
            "control": {"name": self.control.name, "bound": self.bound, **self.control.options()},
            "path": path if path is None or isinstance(path, str) else path.to_json(),
            "rule": _rule_json(self.rule),
            "missing": missing,
            "cost": self.cost,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Calibration":
        """Return the request that `to_json` wrote."""
        known = {each.name for each in fields(cls)} - {"bound"}
        given = set(content) if isinstance(content, Mapping) else set()  # type: ignore[redundant-expr]
        if given != known:
            raise ValueError(f"a calibration must have {', '.join(sorted(known))}")
        path, missing = content["path"], content["missing"]
        try:
            if not (path is None or isinstance(path, str | Mapping)):
                raise TypeError("its path must be a name or what was fixed")
            if isinstance(path, Mapping):
                path = (PilotPath if "share" in path else Path).from_json(path)
            if isinstance(missing, Mapping):
                missing = Ask(None, missing["ask"])
            return cls(
                promises=tuple(
                    (CostPromise if "cost" in each else Promise)(**each)
                    for each in content["promises"]
                ),
                delta=content["delta"],
                control=Control(**content["control"]),
                path=path,
                rule=_rule(content["rule"]),
                missing=missing,
                cost=content["cost"],
            )
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"its calibration is damaged: {shortened(error)}") from None

    def __str__(self) -> str:
        """Return the promises in short."""
        surety = f"{100 * (1 - self.delta):.12g} %"
        return f"{' and '.join(map(str, self.promises))}, with probability {surety}"


def _rule_json(rule: ExitRule) -> dict[str, Any]:
    """Return what an exit rule of a request says, as JSON."""
    score = rule.score
    said = {
        "score": {"learned": score.to_json()} if isinstance(score, LearnedScore) else score,
        "strict": rule.strict,
        "min_exit": rule.min_exit,
    }
    return {name: value for name, value in said.items() if value not in (None, False, 0)}


def _rule(content: Mapping[str, Any]) -> ExitRule:
    """Return the rule that `_rule_json` wrote."""
    score = content.get("score")
    if isinstance(score, Mapping):
        score = LearnedScore.from_json(score["learned"])
    return ExitRule(**{**content, "score": score})


def _promises(given: Any) -> tuple[Promise | CostPromise, ...]:
    promises = tuple(given) if isinstance(given, list | tuple) else (given,)
    for each in promises:
        if not isinstance(each, Promise | CostPromise):
            raise TypeError(
                "`promises` must be Promise or CostPromise values, like"
                f" Promise('zero_one', epsilon=0.01), but got {each!r}."
            )
    if not any(isinstance(each, Promise) for each in promises):
        raise ValueError("`promises` must hold at least one Promise.")
    costs = [each.cost for each in promises if isinstance(each, CostPromise)]
    if len(set(costs)) < len(costs):
        raise ValueError("`promises` must limit each cost once; keep the lower limit.")
    return promises


def _control(given: Any, bound: str) -> Control:
    if isinstance(given, str):
        return Control(given, bound)
    if not isinstance(given, Control):
        raise TypeError(f"`control` must be a name or a Control, but got {given!r}.")
    if given.bound == "auto" and bound != "auto":
        return replace(given, bound=bound)
    if bound not in ("auto", given.bound):
        raise ValueError("`bound` is the Control's own; leave it out here.")
    return given


def _path(given: Any) -> Path | PilotPath | str | None:
    if isinstance(given, str):
        checks.choice("path", given, ["logit", "breakpoints"])
        return None if given == "logit" else given
    if given is None or isinstance(given, Path | PilotPath):
        return given
    return Path.of(given, np.empty((0, 0)))


@checks.suggesting
def calibrate(
    record: Any,
    loss: str | Promise | CostPromise | Sequence[Promise | CostPromise] | None = None,
    *,
    epsilon: float | None = None,
    risk: str | None = None,
    delta: float = DELTA,
    control: str | Control = "ucb",
    bound: str = "auto",
    path: PathLike | PilotPath = None,
    score: str | LearnedScore | None = None,
    missing: Missing = "raise",
) -> "Policy":
    """Find and certify the fastest setting whose risk is at most ε.

    `calibrate(record, loss="zero_one", epsilon=0.01)` makes one promise about a mean. Others, and
    several at once, are values: `calibrate(record, [Promise(...), CostPromise(...)])`. For another
    exit rule use `Calibration(promises, rule=ExitRule(min_exit=1)).run(record)`.

    **Guarantee**: that of `Calibration`.

    Parameters
    ----------
    record : ExitRecord, ThresholdRecord, ShardedRecord or RiskCurve
        The calibration samples. The record says how they were drawn: see `record.grouped`,
        `record.weighted`, `record.drawn_from`. A curve does not know its score, exits and model, so
        a policy made from one cannot be checked against a model, and the runtimes refuse it.
    loss : str, Promise, CostPromise, or several promises
        The name of a loss, whose mean is to be at most ε; or whole promises, which hold together.
        You may omit it if the record has just one loss.
    epsilon, risk
        Of the one promise about a named loss; the risk is "gap" by default, or the curve's own.
    delta, control, bound, path, missing
        As in `Calibration`.
    score : str or LearnedScore, optional
        What decides, chosen before the losses are seen; by default the record's only score, or
        top1.

    Returns
    -------
    policy : Policy
        With `threshold=None` if nothing faster than the full model was certified.

    Examples
    --------
    >>> from swiftsure.study.simulate import Population
    >>> from swiftsure.records import ExitRecord
    >>> sample = Population().sample(1000, seed=0)
    >>> record = ExitRecord.from_logits(sample.logits, sample.labels)
    >>> policy = calibrate(record, loss="zero_one", epsilon=0.05)
    >>> policy.threshold is not None
    True
    """
    request = Calibration(
        stated_promises(loss, epsilon, risk),
        delta=delta,
        control=control,  # type: ignore[arg-type]
        bound=bound,
        path=path,  # type: ignore[arg-type]
        rule=ExitRule(score),
        missing=missing,
    )
    return request.run(record)  # type: ignore[return-value]


def stated_promises(loss: Any, epsilon: float | None, risk: str | None) -> Any:
    """Return the promise about a named loss; or the promises given in its place, as they are."""
    if loss is None or isinstance(loss, str):
        return Promise(loss, epsilon=epsilon, risk=risk or "gap")  # type: ignore[arg-type]
    for name, value in {"epsilon": epsilon, "risk": risk}.items():
        if value is not None:
            raise ValueError(f"`{name}` is each Promise's own; leave it out here.")
    return loss
