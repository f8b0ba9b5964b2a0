"""Policies: a threshold with its certificate, in one JSON file and one plain sentence."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from swiftsure._lib import checks
from swiftsure._lib.files import json_checksum, read_json, validation_message, write_text
from swiftsure._lib.html import html_card
from swiftsure._lib.signing import proofs, refuse_unsigned
from swiftsure._version import __version__
from swiftsure.certify.bounds import BOUNDS, minimum_samples
from swiftsure.certify.calibration import Calibration
from swiftsure.certify.control import CONTROLS
from swiftsure.certify.promise import Promise
from swiftsure.certify.tracking import log_to_mlflow
from swiftsure.curves import paths
from swiftsure.curves.curve import GIVEN_SETTINGS, RiskCurve
from swiftsure.curves.dials import setting_key
from swiftsure.curves.risks import RISKS, risk_noun
from swiftsure.exits import ExitRule, exit_indices, threshold_array
from swiftsure.losses import LossRange
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.records.checks import (
    COLDEST,
    DTYPES,
    HOTTEST,
    confidence_array,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "BUDGET",
    "Certificate",
    "Metadata",
    "Policy",
    "PolicyEvaluation",
    "PromiseResult",
    "Selection",
    "average_sentence",
    "average_words",
    "fewest_samples",
    "percent",
    "promise_sentence",
    "risk_words",
    "sentence_parts",
    "setting_words",
]

VERSION = 1
"""Version of the policy file; newer versions are refused."""

DATA = re.compile(r"(sha256:[0-9a-f]{64}( sha256:[0-9a-f]{64})*)?")
"""Fingerprints of the curves of all promises."""

BUDGET = "budget"
"""The control of a certificate whose setting was chosen by a compute budget."""

UNBOUND = "not bound to a particular model, because its record has no fingerprint of one"

AVERAGES = {
    "group": (
        "average of group averages",
        "Risks and costs are averages over groups of each group's average: every group counts the"
        " same, whatever its size.",
    ),
    "sample": (
        "average per sample of groups",
        "Risks and costs are averages per sample: every sample counts the same, whatever its"
        " group.",
    ),
}
"""What is averaged for grouped samples, in a few words and in a sentence."""

Guarantee = Literal["probability", "expectation", "none"]


# Without control characters, which a terminal would obey.
Name = Annotated[str, Field(max_length=1_000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Count = Annotated[int, Field(ge=1, le=2**53)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _require(possible: bool, otherwise: str) -> None:
    if not possible:
        raise ValueError(otherwise)


Request = Annotated[
    Calibration,
    PlainValidator(
        lambda value: value if isinstance(value, Calibration) else Calibration.from_json(value)
    ),
    PlainSerializer(lambda value: value.to_json()),
]
"""A Calibration, as JSON in files."""


class PromiseResult(_Frozen):
    """One promise of a policy in numbers, and its value in calibration."""

    risk: Name
    loss: Name
    epsilon: float
    loss_range: tuple[float, float]
    bound: Name | None
    calibration_risk: float
    """Mean loss at the chosen setting, over the calibration samples or groups (`average`)."""
    upper_bound: float | None
    """Upper bound at δ, for display, as if this setting had been fixed beforehand."""

    relative: bool = True
    """Whether losses are relative to the full model."""

    above: float | None = Field(default=None, ge=0)
    """If the risk is the probability of a loss above a limit, and not its mean: that limit."""

    worst: float | None = Field(default=None, gt=0, lt=1)
    """If the risk is the mean of the worst share of the losses: that share."""

    among: Literal["all", "exits"] = "all"
    """Whether the loss of all samples counts, or that of those that exit early."""

    within: Literal["slices", "each slice"] | None = None
    """Whether it holds over all samples, or in every slice."""

    def check(self, by_budget: bool = False) -> None:
        """Raise if the numbers cannot belong together."""
        low, high = self.loss_range
        _require(low < high and high > 0, f"loss_range must be (low, high), not {(low, high)}")
        if by_budget:
            _require(low <= self.epsilon <= high, f"epsilon must lie in [{low:g}, {high:g}]")
        else:
            _require(0 < self.epsilon < high, f"epsilon must lie in (0, {high:g})")
        slack = 1e-6 * high
        least = 0.0 if self.worst is not None else low  # the full model loses nothing
        inside = least - slack <= self.calibration_risk <= high + slack
        _require(inside, f"calibration_risk must lie in [{low:g}, {high:g}]")
        upper = self.upper_bound
        _require(upper is None or low <= upper <= high + slack, f"upper_bound cannot be {upper}")
        known = self.bound is None or self.bound in BOUNDS
        _require(known, f"bound must be one of {', '.join(BOUNDS)}")

    @property
    def asked(self) -> Promise:
        """The promise itself, about all the samples that it is given."""
        return Promise(
            self.loss,
            epsilon=self.epsilon,
            risk=self.risk if self.risk in RISKS else "gap",
            above=self.above,
            worst=self.worst,
            among=self.among,
        )

    @property
    def selective(self) -> bool:
        """Whether the risk is the mean over the samples that exit early, and not over all."""
        return self.among == "exits"

    @property
    def auditable(self) -> bool:
        """Whether audits can watch it: they see all kinds of requests, and take one mean."""
        return not self.selective and self.worst is None

    @property
    def name(self) -> str:
        """The loss and its bounded quantity, such as "zero_one gap" or "brier inconsistency"."""
        words = risk_words(self.loss, self.risk, self.above, self.worst)
        return words + " of exits" * self.selective

    def __str__(self) -> str:
        """Return the name in words, with the full model."""
        kind = RISKS.get(self.risk)
        whose = " of the samples that exit early" * self.selective
        if not self.relative or kind is None:
            return f"{self.loss}{whose}"
        return f"{self.loss} {kind.phrase}{whose}"


class Selection(_Frozen):
    """How a policy was chosen among several candidates; see `swiftsure.calibrate_best`."""

    method: Literal["pilot", "bonferroni"]
    candidates: tuple[Name, ...] = Field(min_length=1)
    chosen: Name
    cost: Name
    """The cost by which it was chosen."""
    n_pilot: Count | None = None
    """Number of pilot samples that chose it, which calibrated nothing."""

    def __str__(self) -> str:
        """Return how it was chosen, as a clause."""
        k = len(self.candidates)
        if self.method == "pilot":
            how = f"on {self.n_pilot:,} pilot samples that were not used to calibrate"
        else:
            how = f"each tested at δ / {k}, so that all their promises hold at once"
        return f"chosen for its {self.cost} among {k} candidates, {how}"


class Certificate(_Frozen):
    """A policy's promise in numbers, and its conditions."""

    guarantee: Guarantee
    delta: float | None = Field(gt=0, lt=1)
    promises: tuple[PromiseResult, ...] = Field(min_length=1)
    control: Name
    """Name of the control that chose the setting, or "budget" if a compute budget did."""
    options: dict[str, Any]
    n: Count
    unit: Literal["samples", "groups"]
    """What was drawn independently."""
    average: Literal["sample", "group"]
    """What has equal weight in risks and costs: every sample, or every group, whatever its size."""
    max_group_size: Count | None = None
    """The declared largest group size, if risks of groups are averages over their samples."""
    n_samples: Count
    path: Name
    n_settings: Count
    index: int | None = Field(ge=0)
    seed: int | None = Field(ge=0)
    """Seed of the order in which samples were tested; None if the order does not matter."""
    pool: Count | None
    assumptions: tuple[Annotated[Name, Field(min_length=1)], ...]
    costs: dict[str, tuple[float, float]]
    """Mean costs of the full model and of the policy, on the calibration samples."""
    exit_shares: tuple[float, ...] | None
    """Fraction of the calibration samples that take each exit."""
    data: str
    """Fingerprint of the calibration losses, confidences and settings."""
    model: str | None = None
    """Fingerprint of the model; None if the record has none."""
    seed_drawn: bool | None = None
    """Whether the seed was drawn at random for these samples; False for one that was given."""
    baseline: Literal["full model", "first setting"] = "full model"
    """What the first number of each pair in `costs` is the cost of."""
    labels: int | None = Field(default=None, ge=0)
    """How many of the samples have a label; None if the losses need none, or it is unknown."""
    stopped_at: Count | None = None
    """The first setting that lacked a label, where the walk stopped; None if it never had to."""
    max_weight: float | None = Field(default=None, ge=1)
    """The largest weight, if the promise is about another distribution given by weights."""
    max_costs: dict[Name, float] = Field(default_factory=dict)
    """Largest mean costs that are promised together with the risks."""
    slices: dict[Name, Count] | None = None
    """The slices that the promise is about, all at once, with their numbers of samples."""
    small_slices: dict[Name, Count] | None = None
    """Slices with too few samples for any promise, and how many they need; the full model runs."""
    horizon: Count | None = None
    """For a calibration that grows, valid at every moment: the samples its bets were tuned for."""
    pilot: Count | None = None
    """Number of separate samples, or groups, that the path was learned on, besides n."""
    not_worth: bool = False
    """Whether the certified setting costs more than the full model, which then runs instead."""
    dearer_costs: dict[Name, float] = Field(default_factory=dict)
    """If so, the mean costs of that setting that decided this, on the calibration samples."""
    cost: Name | None = None
    """The cost that was named to decide this, if one was."""
    selection: Selection | None = None
    """How the policy was chosen among several candidates, if it was."""

    def check(self, edited: bool = False) -> None:
        """Raise if the numbers cannot belong together; an edited level need not be certified."""
        for promise in self.promises:
            promise.check(self.by_budget)
            if self.index is not None and not edited:
                self._check_certified(promise)
        control = (*CONTROLS, BUDGET)
        _require(self.control in control, f"control must be one of {', '.join(control)}")
        _require(
            self.index != 0 or self.baseline == "first setting",
            "index must not be that of the full model, which nothing certifies",
        )
        _require(not self.not_worth or self.index is None, "index must be null if not_worth")
        dearer = self.dearer_costs.items()
        _require(
            all(self.not_worth and cost > self.costs.get(k, (cost,))[0] for k, cost in dearer),
            "dearer_costs must exceed the full model's, where a setting was not_worth it",
        )
        _require(
            (self.average == "group") <= (self.unit == "groups"),
            "average must be sample without groups",
        )
        _require(
            (self.max_group_size is not None)
            == (self.unit == "groups" and self.average == "sample"),
            "max_group_size must be given for averages per sample of groups, and only there",
        )
        _require(
            self.delta is not None or self.guarantee != "probability",
            "delta must be given for a guarantee with a probability",
        )
        _require(self.n <= self.n_samples, "n must not exceed n_samples")
        _require(self.pool is None or self.pool >= self.n, f"pool must hold all {self.unit}")
        _require(self.index is None or self.index < self.n_settings, "index must be a setting")
        _require(
            self.labels is None or self.labels <= self.n_samples, "labels must not exceed n_samples"
        )
        if self.stopped_at is not None:
            _require(self.stopped_at < self.n_settings, "stopped_at must be a setting")
            _require((self.index or 0) < self.stopped_at, "index must be before stopped_at")
        _require(
            all(cost >= 0 for pair in self.costs.values() for cost in pair),
            "costs must not be negative",
        )
        shares = self.exit_shares
        _require(
            shares is None
            or (all(0 <= each <= 1 for each in shares) and abs(sum(shares) - 1) < 1e-6),
            "exit_shares must be shares that add up to 1",
        )
        _require(
            self.unit == "groups" or self.n == self.n_samples or self.by_budget,
            "n must be n_samples without groups",
        )
        if shares is not None and self.unit == "samples" and self.max_weight is None:
            _require(
                all(
                    abs(each - round(each * self.n_samples) / self.n_samples) < 1e-9
                    for each in shares
                ),
                "exit_shares must be shares of n_samples",
            )
        _require(self.seed_drawn is None or self.seed is not None, "seed_drawn must have a seed")
        _require(self.cost is None or self.cost in self.costs, "cost must be one of the costs")
        _require(DATA.fullmatch(self.data) is not None, "data must be SHA-256 hashes")
        _require(
            self.guarantee == "none" or len(self.assumptions) > 0,
            "assumptions must be given where a guarantee is",
        )
        self._check_scope()

    def _check_scope(self) -> None:
        """Raise if no calibration makes a promise of this scope."""
        weight = 1.0 if self.max_weight is None else self.max_weight
        for promise in self.promises:
            tail = promise.above is not None and promise.worst is None
            _require(
                not tail or promise.loss_range in ((0.0, weight), (0.0, 1.0)),
                "loss_range must be that of a tail",
            )
            _require(
                promise.worst is None
                or promise.loss_range[0] == promise.above
                or (promise.loss_range[0] == 0.0 and self.max_weight is not None),
                "above must be the lowest loss where worst is given",
            )
            _require(
                promise.within is None or self.slices is not None,
                "slices must be given where a promise holds within them",
            )
        restricted = self.slices is not None or any(not each.auditable for each in self.promises)
        _require(
            self.pool is None or (self.max_weight is None and not restricted),
            "pool does not go with weights, slices, worst shares or the samples that exit",
        )
        inside = 0 if self.slices is None else sum(self.slices.values())
        _require(
            self.slices is None or inside == self.n or (self.unit == "groups" and inside > self.n),
            "slices must have n samples together",
        )
        _require(
            all(k in self.costs and limit > 0 for k, limit in self.max_costs.items()),
            "max_costs must be limits of known costs",
        )
        _require(
            self.horizon is None
            or (self.pool is None and all(each.bound == "star" for each in self.promises)),
            "horizon must go with bets",
        )

    def _check_certified(self, promise: PromiseResult) -> None:
        """Raise if no calibration can have certified this level."""
        (low, high), level = promise.loss_range, promise.epsilon
        slack = 1e-6 * (high - low)
        bound = None if promise.bound is None else BOUNDS.get(promise.bound)
        in_order = bound is None or bound.uses_order
        if self.by_budget:
            found = promise.upper_bound
            _require(found is None or abs(found - level) <= slack, "epsilon must be upper_bound")
        elif self.guarantee == "probability" and promise.upper_bound is not None:
            # The upper bound inverts the test, for many samples roughly; the trinomial one does not
            inverts = bound is not None and bound.name != "trinomial"
            rough = (high - low) * 0.05 / math.sqrt(self.n) if in_order else 0.0
            _require(
                not inverts or promise.upper_bound <= level + rough + slack,
                "upper_bound must not exceed epsilon where a setting was certified",
            )
        if self.guarantee == "probability" and self.pool is None and self.delta is not None:
            # A test that certifies some losses also certifies the lowest, and those come with this
            # probability although the risk is ε.
            chance = self.n * math.log((high - level) / (high - low)) if level < high else -math.inf
            _require(chance <= math.log(self.delta) + 1e-9, "n is too small for epsilon and delta")
        if not in_order and (self.delta or 1.0) <= 0.25 and promise.upper_bound is not None:
            _require(
                promise.upper_bound >= promise.calibration_risk - slack,
                "upper_bound must not be below calibration_risk",
            )
        # Betting may end before the last sample, so that the mean of all may be above ε.
        at_most = self.guarantee == "expectation" and self.options.get("method") != "ucb"
        if self.guarantee == "probability" and not self.by_budget and not in_order:
            at_most = (self.delta or 1.0) <= 0.25
        _require(
            not at_most or promise.calibration_risk <= level + slack,
            "calibration_risk must not exceed epsilon where a setting was certified",
        )

    @property
    def by_budget(self) -> bool:
        """Whether a compute budget chose the setting; ε is then the upper bound of its risk."""
        return self.control == BUDGET


class Metadata(_Frozen):
    """Who made a policy, when, and with which version of the library."""

    name: str | None = None
    author: str | None = None
    notes: str | None = None
    date: str = Field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    swiftsure: str = __version__
    """Version of the library."""


class PolicyEvaluation(NamedTuple):
    """Risk and saving of a policy on samples other than the calibration samples.

    Attributes
    ----------
    risk : float
        Risk of the policy's first promise, as it is promised: a mean over samples or groups, a
        weighted mean, a tail, or the largest of the risks of the promise's slices.
    risks : tuple of float
        The same for each promise.
    saving : float
        Fraction of the full model's cost that is saved, negative if more is needed: FLOPs if the
        record has them; else the price of a cascade, against its last model alone (the first of
        `full_costs` besides FLOPs and seconds); else the record's first cost, seconds after others,
        or the exit number if it has no other. The library means this cost wherever none is named.
    savings : dict
        The same for every cost in the record.
    exit_shares : (n_exits,) or None
        Fraction of the samples that take each exit; None for systems without exits.
    n : int
    """

    risk: float
    risks: tuple[float, ...]
    saving: float
    savings: dict[str, float]
    exit_shares: NDArray[np.float64] | None
    n: int


class Policy(_Frozen):
    """A threshold, with a certificate of what it guarantees.

    `threshold=None` means that the full model always runs. `str(policy)` states the promise in one
    sentence; `policy.certificate` holds the numbers.
    """

    format: Literal["swiftsure-policy"] = "swiftsure-policy"
    version: int = Field(VERSION, ge=1, le=VERSION)
    threshold: float | tuple[float | None, ...] | None
    """One for all exits, or one per exit; None if the full model always runs.

    For several dials, the number of their setting in the record; its values are in `settings`.
    """
    score: Name | None
    n_exits: int | None = Field(ge=1, le=10_000)
    strict: bool = False
    min_exit: int = Field(0, ge=0, le=10_000)
    temperatures: tuple[Annotated[float, Field(ge=COLDEST, le=HOTTEST)], ...] | None = None
    dtype: Name | None = None
    settings: dict[str, Any]
    """Every dial by name; at its safe end if nothing was certified."""
    dials: tuple[Name, ...] | None = None
    """Names of the dials that were certified together, if there are several."""
    certificate: Certificate
    calibration: Request | None = None
    """The request that made the policy; with the level found, if a compute budget chose it."""
    metadata: Metadata = Field(default_factory=Metadata)

    def check(self, edited: bool = False) -> None:
        """Raise if the fields cannot belong together, as those of a damaged file."""
        certificate, n_exits, threshold = self.certificate, self.n_exits, self.threshold
        certificate.check(edited)
        _require(
            threshold is None or certificate.index is not None or certificate.guarantee == "none",
            "threshold must be null where no setting was certified",
        )
        _require(
            threshold is None or not certificate.not_worth, "threshold must be null if not_worth"
        )
        for dial in self.dials or ():
            _require(dial in self.settings, f"settings must hold the dial {dial}")
        _require(self.dials is None or n_exits is None, "dials must be null for exits")
        _require(
            self.dtype is None or self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}"
        )
        if n_exits is None:
            _require(not isinstance(threshold, tuple), "threshold must be one number without exits")
        else:
            _require(
                not isinstance(threshold, tuple) or len(threshold) == n_exits - 1,
                "threshold must be one per exit but the last",
            )
            _require(
                self.settings == self.settings | self._exit_settings(),
                "settings must hold the threshold",
            )
            _require(self.min_exit < n_exits, "min_exit must be an exit")
            _require(bool(self.score), "score must be named")
            low, high = (0.0, 1.0) if certificate.path in paths.WITHIN_SCORES else (-3e38, 3e38)
            values = threshold if isinstance(threshold, tuple) else (threshold,)
            _require(
                all(each is None or low <= each <= high for each in values),
                f"threshold must lie in [{low:g}, {high:g}]",
            )
            for promise in certificate.promises:
                _require(promise.risk in RISKS, f"risk must be one of {', '.join(RISKS)}")
            shares = certificate.exit_shares
            _require(shares is None or len(shares) == n_exits, "exit_shares must be one per exit")
            _require(
                not any((shares or ())[: self.min_exit]), "exit_shares must be 0 before min_exit"
            )
        _require(
            self.temperatures is None or len(self.temperatures) == n_exits,
            "temperatures must be one per exit",
        )

    def _exit_settings(self) -> dict[str, Any]:
        """Return the settings of a policy for exits, as JSON holds them."""
        several = isinstance(self.threshold, tuple)
        return {"threshold": list(self.threshold) if several else self.threshold}  # type: ignore[arg-type]

    @property
    def runs_full_model(self) -> bool:
        """Whether the full model always runs, because nothing faster was certified."""
        return self.threshold is None

    @property
    def thresholds(self) -> NDArray[np.float32] | None:
        """One threshold per exit except the last, infinity for never; None without exits."""
        if self.n_exits is None:
            return None
        values = threshold_array(self.threshold if self.threshold is not None else np.inf)
        return np.broadcast_to(values, (self.n_exits - 1,)).copy()

    @property
    def rule(self) -> ExitRule:
        """When samples exit under this policy: score, threshold, strict and min_exit."""
        return ExitRule(self.score, self.threshold, self.strict, self.min_exit)

    def _exit_thresholds(self) -> NDArray[np.float32]:
        if self.thresholds is None:
            raise ValueError("This policy sets a threshold of a whole run, not of exits.")
        return self.thresholds

    def exits(self, confidences: ArrayLike) -> NDArray[np.int64]:
        """Return the exit that each sample takes under this policy.

        Parameters
        ----------
        confidences : (n, n_exits - 1)
        """
        thresholds = self._exit_thresholds()
        scores = checks.numbers("confidences", confidences)
        n_early = len(thresholds)
        if scores.ndim != 2 or scores.shape[1] != n_early:
            raise ValueError(
                f"`confidences` must have shape (n, {n_early}), one column per exit except the"
                f" last, but got {checks.shape_text(scores.shape)}."
            )
        scores = confidence_array("confidences", scores, None)
        return exit_indices(scores, thresholds, strict=self.strict, min_exit=self.min_exit)

    def leaves(self, exit_index: int, confidence: float) -> bool:
        """Return whether a request with this confidence exits here; `exit_index` starts at 0.

        This is the same rule as `exits`, for code that runs one request at a time: call it at each
        exit, and stop at the first True. At the last exit it is always True.
        """
        thresholds = self._exit_thresholds()
        checks.count("exit_index", exit_index, 0)
        if exit_index >= len(thresholds):
            return True
        one = confidence_array("confidence", [[confidence]], None)
        allowed = exit_index >= self.min_exit
        return bool(
            allowed and exit_indices(one, thresholds[exit_index], strict=self.strict)[0] == 0
        )

    def log_to_mlflow(self, *, prefix: str = "", artifact: str = "policy.json") -> str:
        """Log the policy to the active MLflow run, or to a new one; return the id of the run.

        What was fixed and chosen becomes parameters; risks, upper bounds, costs and savings become
        metrics; the promise in words and the fingerprints of model and data become tags; and the
        policy's file becomes an artifact, which `Policy.load` reads.

        Parameters
        ----------
        prefix : str
            Put before every name, if a run logs several policies.
        artifact : str
            Name of the policy's file among the artifacts of the run.

        Raises
        ------
        ImportError
            If MLflow is missing; the error gives the command that installs its client.
        """
        return log_to_mlflow(self, prefix=prefix, artifact=artifact)

    def evaluate(self, record: ExitRecord | ThresholdRecord | ShardedRecord) -> PolicyEvaluation:
        """Return risk, saving and exit shares of this policy on a record of other samples.

        These are estimates, not a guarantee, of what is promised: score, exit rule, averaging,
        slices and transformed losses are the policy's own. Of a promise about slices, only samples
        of these slices count, and the risk is that of the worst slice.

        If the promise is about weighted samples, the record must say its weights
        (`record.weighted`); samples drawn in production have the weight 1.

        Examples
        --------
        >>> import swiftsure as ss
        >>> sample = ss.simulate.Population().sample(3000, seed=0)
        >>> record = ss.ExitRecord.from_logits(sample.logits, sample.labels)
        >>> calibration, rest = record.split(1000, seed=0)
        >>> policy = ss.calibrate(calibration, loss="zero_one", epsilon=0.05)
        >>> policy.evaluate(rest).risk < 0.08
        True
        """
        record = self._counted(record)
        promises = self.certificate.promises
        curve = self._curve(record, promises[0])
        index = self._index(curve, record)
        alone = self._alone(record)
        risks = tuple(
            max(self._curve(each, promise).risk_at(index) for each in alone) for promise in promises
        )
        savings = {}
        for name in curve.costs:
            full = curve.full_cost(name)
            here = full if self.runs_full_model else float(curve.mean_cost(name)[index])
            savings[name] = 1 - here / full if full else 0.0
        first = curve.default_cost()
        return PolicyEvaluation(
            risk=risks[0],
            risks=risks,
            saving=savings[first] if first is not None else math.nan,
            savings=savings,
            exit_shares=curve.exit_shares()[index] if curve.has_exits else None,
            n=curve.n,
        )

    def _counted(self, record: Any) -> Any:
        """Return the samples that the promise is about, grouped as it counts them."""
        certificate = self.certificate
        slices = certificate.slices
        if slices is not None:
            labels = getattr(record, "slices", None)
            if labels is None:
                raise ValueError(
                    f"`record` must hold the slice of each sample, because the promise is about"
                    f" {_slice_names(slices)}: record.sliced(...)."
                )
            inside = np.isin(labels.astype(str), list(slices))
            if not inside.any():
                raise ValueError(f"`record` must hold samples of {_slice_names(slices)}.")
            record = record if inside.all() else record.take(np.flatnonzero(inside))
            # In a slice the mean weight need not be 1.
            record = replace(record, sampling=replace(record.sampling, part=True))
        weighted = record.sampling.weights is not None
        if weighted != (certificate.max_weight is not None):
            raise ValueError(
                "`record` must not have weights, because the promise is not about weighted samples."
                if weighted
                else "`record` must have weights, because the promise is about weighted samples:"
                " `record.weighted(...)`, with weights of 1 if it was drawn in production."
            )
        if isinstance(record, ShardedRecord):
            return record
        groups, sampling = record.groups, replace(record.sampling, population=None)
        if certificate.unit == "samples":
            groups = None
        elif groups is None and certificate.average == "group":
            raise ValueError(
                "`record` must have groups, because the promise is about the average of group"
                " averages: record.grouped(...)."
            )
        average, largest = None, None
        if groups is not None:
            average = certificate.average
            largest = int(np.unique(groups, return_counts=True)[1].max())
        largest = largest if average == "sample" else None
        sampling = replace(sampling, average=average, max_size=largest)
        return replace(record, groups=groups, sampling=sampling)

    def _alone(self, record: Any) -> list[Any]:
        """Return the samples of each slice that the promise is about, or all samples."""
        if self.certificate.slices is None:
            return [record]
        names = record.slices.astype(str)
        return [record.take(np.flatnonzero(names == name)) for name in np.unique(names)]

    def _curve(
        self,
        record: ExitRecord | ThresholdRecord | ShardedRecord,
        promise: PromiseResult,
    ) -> RiskCurve:
        """Return the curve of one promise on a record, along this policy's setting alone."""
        asked = promise.asked
        if isinstance(record, ThresholdRecord):
            self._check_settings(record)
            return asked.curve(record, ExitRule())
        if self.n_exits != record.n_exits:
            raise ValueError(
                f"`record` must have the policy's number of exits, {self.n_exits}, but has"
                f" {record.n_exits}."
            )
        path = paths.Path(np.full((1, record.n_exits - 1), np.inf), "the policy's setting")
        if self.thresholds is not None and not self.runs_full_model:
            path = paths.Path.family([self.thresholds])
        return asked.curve(record, replace(self.rule, threshold=None), path)

    def _check_settings(self, record: ThresholdRecord) -> None:
        """Raise if a record is of a system with other settings, such as another score."""
        for name, value in record.settings.items():
            if name not in self.settings or setting_key([self.settings[name]]) != setting_key(
                [value]
            ):
                raise ValueError(
                    f"`record` must be of the system that the policy is for, with {name} ="
                    f" {self.settings.get(name)}, but it was recorded with {name} = {value}."
                )

    def _index(self, curve: RiskCurve, record: ExitRecord | ThresholdRecord | ShardedRecord) -> int:
        """Return the setting of a curve that this policy runs at."""
        if self.runs_full_model:
            return 0
        if self.dials is not None:
            if not isinstance(record, ThresholdRecord) or set(record.dials) != set(self.dials):
                raise ValueError(f"`record` must have the policy's dials, {', '.join(self.dials)}.")
            return record.number_of(self.settings)
        if curve.path_kind != GIVEN_SETTINGS:  # made for this policy, after the full model
            return 1
        found = np.flatnonzero(curve.thresholds == self.threshold)
        if not found.size:
            raise ValueError(
                f"`record` must hold the policy's setting, {self.threshold}, among its thresholds."
            )
        return int(found[0])

    def plot(self, record: ExitRecord | ThresholdRecord) -> "Figure":
        """Plot a record's risk and saving along its default path, averaged as promised."""
        from swiftsure.report import policy_figure

        promise = self.certificate.promises[0]
        if self.certificate.max_weight is not None:
            raise ValueError("`plot` cannot show a promise about weighted samples.")
        record = self._counted(record)
        if len(self._alone(record)) > 1:
            raise ValueError(
                "`plot` shows the risk of one slice, but the promise is about each of several: pass"
                " the samples of one, with `record.take`."
            )
        rule = replace(self.rule, threshold=None)
        if not isinstance(record, ExitRecord):
            self._check_settings(record)
            rule = ExitRule()
        return policy_figure(promise.asked.curve(record, rule), self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy as JSON with a checksum, atomically.

        With a key in the environment (`SWIFTSURE_POLICY_KEY`, or a file with it in
        `SWIFTSURE_POLICY_KEY_FILE`), the file is also signed.

        Raises
        ------
        ValueError
            If `load` would refuse the file, because the policy was edited to what no calibration
            can have certified.
        """
        try:
            self.check()
        except ValueError as error:
            raise ValueError(
                f"This policy could not be loaded again: {error}. Was it edited? Calibrate again."
            ) from None
        content = self.model_dump(mode="json")
        write_text(path, json.dumps(content | proofs(content), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, accept_edited: bool = False) -> "Policy":
        """Read a policy; every field is checked.

        Parameters
        ----------
        accept_edited : bool
            Accept a file that was changed after it was written, so that its checksum does not
            match. The certificate then describes the policy before the change. Saving the policy
            writes a new checksum. A signature is never waived.

        Raises
        ------
        ValueError
            If the file is not a policy, was edited, is damaged, or comes from a newer version; if
            there is a key in the environment (see `save`) and the file is not signed with it.
        """
        content = read_json(path, "a Swiftsure policy", "swiftsure-policy", VERSION)
        checksum, signature = content.pop("checksum", None), content.pop("signature", None)
        try:
            policy = cls.model_validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            raise ValueError(f"{path} is a damaged policy: {validation_message(error)}.") from None
        edited = checksum != json_checksum(content)
        if edited and not accept_edited:
            raise ValueError(
                f"{path} was changed after it was written: its checksum does not match, so its"
                " certificate may not be about this setting. Calibrate again, or accept the change"
                " with `accept_edited=True` (--accept-edited)."
            )
        refuse_unsigned(path, content, signature)
        if edited and policy.n_exits is not None:  # the threshold was edited where it stands first
            settings = policy.settings | policy._exit_settings()
            policy = policy.model_copy(update={"settings": settings})
        try:
            policy.check(edited)
        except ValueError as error:
            raise ValueError(f"{path} is a damaged policy: {error}.") from None
        return policy

    def __str__(self) -> str:
        """Return one sentence that says what the policy does and promises."""
        return "".join(sentence_parts(self))

    def __repr__(self) -> str:
        """Return a one-line summary of the policy."""
        promises = ", ".join(f"{p.name} ≤ {p.epsilon:g}" for p in self.certificate.promises)
        return f"Policy({self._dial_text()}, {promises})"

    def _dial_text(self) -> str:
        """Return the threshold, or the value of each dial if there are several."""
        if self.dials is None:
            return f"threshold={_number(self.threshold)}"
        return ", ".join(f"{name}={_dial(self.settings[name])}" for name in self.dials)

    def _repr_html_(self) -> str:
        certificate = self.certificate
        names = self.dials or ("threshold",)
        facts = {
            **{name: _dial(self.settings.get(name, self.threshold)) for name in names},
            **{f"{p.name} at most": f"{p.epsilon:g}" for p in certificate.promises},
            "calibrated on": f"{certificate.n:,} {certificate.unit}",
            **{
                f"{name} saved": percent(1 - here / full)
                for name, (full, here) in certificate.costs.items()
                if full
            },
        }
        return html_card("Policy", facts, str(self))


def risk_words(loss: str, risk: str, above: float | None = None, worst: float | None = None) -> str:
    """Return a loss and its bounded quantity.

    Examples
    --------
    >>> risk_words("brier", "gap", above=0.1), risk_words("brier", "gap", above=0.0, worst=0.1)
    ('brier gap > 0.1', 'brier gap, worst 10 %')
    """
    tail = "" if above is None else f" > {_rounded_up(above)}"
    if worst is not None:
        tail = f", worst {_share(worst)}"
    return f"{loss} {risk_noun(risk)}{tail}"


def percent(share: float) -> str:
    """Return a fraction as a percentage without needless digits.

    Examples
    --------
    >>> percent(0.9), percent(0.333)
    ('90 %', '33.3 %')
    """
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def sentence_parts(policy: Policy) -> tuple[str, str]:
    """Return the two parts of a policy's sentence: its promise and its conditions.

    Joined, they are the sentence; separately, they can be styled differently.
    """
    certificate = policy.certificate
    best = certificate.selection
    if policy.runs_full_model:
        reason = _budget_in_full if certificate.by_budget else _nothing_certified
        among = "" if best is None else f" of the candidate {best.chosen!r} ({best})"
        return f"Always runs the full model{among}: {reason(certificate)}.", ""
    among = "" if best is None else f", in the candidate {best.chosen!r} ({best})"
    promise = f"{_action(policy)}{among}{_saving(certificate)}: {promise_sentence(certificate)}"
    if certificate.guarantee == "none":
        return promise, f"; it is {UNBOUND}." if certificate.model is None else "."
    conditions = list(certificate.assumptions)
    if certificate.model is None:
        conditions.append(f"the model is the one these samples came from (the policy is {UNBOUND})")
    return promise, f", provided that {_listed(conditions)}." if conditions else "."


def promise_sentence(certificate: Certificate) -> str:
    """Return the probability statement of a certificate."""
    risks = _risks(certificate)
    if certificate.guarantee == "none":
        return f"no guarantee is made (the aim was that {risks})"
    over = f"over the draw of the {certificate.n:,} calibration {certificate.unit}"
    if certificate.horizon is not None:
        over = (
            f"over the draw of all calibration {certificate.unit}, at every moment of a calibration"
            f" that may grow for ever ({certificate.n:,} {certificate.unit} so far)"
        )
    if certificate.pilot is not None:
        over += f" (the path was learned on {certificate.pilot:,} others)"
    labels = certificate.labels
    if labels is not None and labels < certificate.n_samples:
        whose = "of which" if certificate.unit == "samples" else "in which"
        over += f" ({whose} {_labelled(labels, certificate.unit)})"
    if certificate.pool is not None:
        over += f" from a pool of {certificate.pool:,}, on that pool"
    where = _where(certificate)
    if certificate.guarantee == "expectation":
        return f"on average {over}, {where}{risks}"
    return f"with probability at least {_surety(certificate)} {over}, {where}{risks}"


def _where(certificate: Certificate) -> str:
    """Return on which slices the promise holds, as the beginning of a clause."""
    slices = certificate.slices
    if slices is None:
        return ""
    if len(slices) == 1:
        return f"on samples of {_slice_names(slices)}, "
    listed = _and([f"{name} ({n:,})" for name, n in slices.items()])
    return f"in each of the slices {listed} at once, and so in every mixture of them, "


def _slice_names(slices: Mapping[str, int]) -> str:
    """Return which slices a promise is about."""
    return f"{'slice' if len(slices) == 1 else 'the slices'} {_and(list(slices))}"


def _labelled(labels: int, unit: str) -> str:
    """Return how many are labelled, as a clause.

    Examples
    --------
    >>> _labelled(100, "samples"), _labelled(1, "groups")
    ('100 are labelled', '1 sample is labelled')
    """
    number = "none" if labels == 0 else f"{labels:,}"
    what = "" if unit == "samples" else " sample" if labels == 1 else " samples"
    return f"{number}{what} {'is' if labels == 1 else 'are'} labelled"


def _risks(certificate: Certificate) -> str:
    text = " and ".join(
        f"{_averaged(certificate, p, 'the expected')} is at most {_rounded_up(p.epsilon)}"
        for p in certificate.promises
    )
    return text + _mean_costs(certificate)


def _mean_costs(certificate: Certificate) -> str:
    """Return the promise about mean costs, as the end of a clause."""
    limits = [f"the mean {k} is at most {_rounded_up(v)}" for k, v in certificate.max_costs.items()]
    return f" and {' and '.join(limits)}" if limits else ""


def _averaged(certificate: Certificate, promise: PromiseResult, article: str = "the") -> str:
    """Return the quantity that is bounded; for groups, with what has equal weight."""
    weighted = " under the distribution that the weights describe" * (
        certificate.max_weight is not None
    )
    counted = ""
    if certificate.unit == "groups":
        counted = (
            " (every group counts the same, whatever its size)"
            if certificate.average == "group"
            else " (every sample counts the same, whatever its group: the expected sum of a group"
            " over the expected size of a group)"
        )
    if promise.worst is not None:
        share = _share(promise.worst)
        return f"the mean {promise} of the worst {share} of samples{weighted}{counted}"
    if promise.above is not None:
        limit = _rounded_up(promise.above)
        return f"the probability{weighted} that the {promise} is above {limit}{counted}"
    if certificate.unit == "samples":
        return f"{article} {promise}{weighted}"
    if certificate.average == "group":
        return f"the average over groups of each group's average {promise}{weighted}{counted}"
    return f"the average {promise} per sample{weighted}{counted}"


def average_words(unit: str, average: str) -> str:
    """Return how groups are averaged, for tables; "" for plain samples.

    Examples
    --------
    >>> average_words("groups", "group"), average_words("groups", "sample")
    ('average of group averages', 'average per sample of groups')
    """
    return "" if unit == "samples" else AVERAGES[average][0]


def average_sentence(unit: str, average: str) -> str:
    """Return a sentence on how groups are averaged; "" for plain samples."""
    return "" if unit == "samples" else AVERAGES[average][1]


def setting_words(settings: Mapping[str, Any]) -> str:
    """Return the dials in words; for a dial with a name and details, only the name."""
    return ", ".join(f"{name} = {_dial(value)}" for name, value in settings.items())


def _dial(value: Any) -> str:
    if not isinstance(value, Mapping):
        return _number(value)
    return str(value["name"]) if "name" in value else f"({setting_words(value)})"


def _action(policy: Policy) -> str:
    if policy.n_exits is None:
        return f"Runs at {setting_words(policy.settings)}"
    sign = "above" if policy.strict else "at least"
    score = "" if policy.score == "confidence" else f"{policy.score} "
    later = f", from exit {policy.min_exit + 1} on," if policy.min_exit else ""
    if policy.threshold == 0 and not policy.strict:
        return f"Always takes exit {policy.min_exit + 1} of {policy.n_exits}{_better(policy)}"
    if isinstance(policy.threshold, tuple):
        thresholds = "(" + ", ".join(_number(value) for value in policy.threshold) + ")"
        return (
            f"Exits at the first exit{later} whose {score}confidence is {sign} its own of"
            f" {thresholds}"
        )
    return (
        f"Exits at the first of {policy.n_exits} exits{later} whose {score}confidence is"
        f" {sign} {_number(policy.threshold)}"
    )


def _better(policy: Policy) -> str:
    """Return by how much an exit that is always taken is better than the last, if it is."""
    promise = policy.certificate.promises[0]
    plain = promise.risk == "gap" and promise.above is None and not policy.certificate.max_weight
    if not plain or promise.calibration_risk >= 0:
        return ""
    return (
        f", which is better than the last (its mean {promise.loss} is lower by"
        f" {-promise.calibration_risk:.3g} on the calibration {policy.certificate.unit})"
    )


def _number(value: object) -> str:
    return "never" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _saving(certificate: Certificate) -> str:
    saved, added = [], []
    for name, (full, here) in certificate.costs.items():
        if full > 0:
            unit = "exits" if name == "exit" else name
            if here <= full:
                saved.append(f"{percent(1 - here / full)} of {unit}")
            else:  # checking the exits costs more than exiting saves
                added.append(f"{percent(here / full - 1)} more {unit}")
    found = {"saving": saved, "needing": added}
    texts = [f"{verb} {_and(parts)}" for verb, parts in found.items() if parts]
    where = "on the calibration samples"
    if certificate.by_budget:
        where = f"on all {certificate.n_samples:,} samples of the record"
    if certificate.baseline == "first setting":
        where = f"against the first setting of the path, {where}"
    if certificate.average == "group":
        where = "on average over the calibration groups"
    if certificate.max_weight is not None:
        where += ", by their weights"
    return f", {' but '.join(texts)} {where}" if texts else ""


def _and(texts: list[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def _listed(clauses: list[str]) -> str:
    """Join "that" clauses, which have commas of their own."""
    *most, last = clauses
    return "; that ".join(most) + f"; and that {last}" if most else last


def _budget_in_full(certificate: Certificate) -> str:
    promise = certificate.promises[0]
    if promise.upper_bound is None:  # nothing was tested
        return "the budget allows it"
    return (
        f"for the setting that meets the budget, no level of {_averaged(certificate, promise)}"
        f" below {promise.epsilon:g} was certified with probability at least"
        f" {_surety(certificate)} on {certificate.n:,} calibration {certificate.unit}"
    )


def _nothing_certified(certificate: Certificate) -> str:
    if certificate.not_worth:
        costs = certificate.costs
        dearer = [
            f"{here:.4g} {name} instead of {full:.4g}"
            + (f", {percent(here / full - 1)} more" if full else "")
            for name, here in certificate.dearer_costs.items()
            for full in (costs[name][0],)
        ]
        numbers = f" ({_and(dearer)}, on the calibration {certificate.unit})" if dearer else ""
        return f"the setting that was certified costs more than the full model alone{numbers}"
    goals = " and ".join(
        f"{_averaged(certificate, p)} within {p.epsilon:g}" for p in certificate.promises
    )
    goals += "".join(f" and the mean {k} within {v:g}" for k, v in certificate.max_costs.items())
    verb = "found" if certificate.guarantee == "none" else "certified"
    text = f"nothing faster was {verb} to keep {goals}"
    if certificate.guarantee == "probability":
        text += f" with probability at least {_surety(certificate)}"
    text += f" on {certificate.n:,} calibration {certificate.unit}"
    if certificate.slices is not None:
        text += f" of {_slice_names(certificate.slices)}"
    if certificate.small_slices:
        few = _and([f"{name} ({n:,})" for name, n in certificate.small_slices.items()])
        text += (
            f", because too few samples are of {few}, with the numbers needed if every loss were 0"
            " (add samples, leave these slices out, or give each slice a setting of its own)"
        )
    fewest = fewest_samples(certificate)
    if fewest > certificate.n:
        text += f" (even if every loss were 0, the tests here would need at least {fewest:,})"
    if not all(promise.relative for promise in certificate.promises):
        text += "; no promise is made about the full model"
    if certificate.stopped_at is not None:
        have = _labelled(certificate.labels or 0, certificate.unit)
        return f"{text}, of which {have}; label more, or allow a larger loss"
    return f"{text}; allow a larger loss, or calibrate on more {certificate.unit}"


def fewest_samples(certificate: Certificate) -> int:
    """Return how many samples the tests here need even if every loss is 0; 0 if unknown."""
    return max(_needed(certificate, promise) for promise in certificate.promises)


def _surety(certificate: Certificate) -> str:
    """Return 1 − δ with all its digits: rounding must not promise more."""
    return f"{100 * (1 - (certificate.delta or 0)):.12g} %"


def _share(share: float) -> str:
    """Return a share with all its digits: the mean of a smaller worst share is larger.

    Examples
    --------
    >>> _share(0.1), _share(0.1004)
    ('10 %', '10.04 %')
    """
    return f"{100 * share:.12g} %"


def _rounded_up(epsilon: float) -> str:
    """Return a level in up to 6 digits, rounded up: rounding must not promise more.

    Examples
    --------
    >>> _rounded_up(0.05), _rounded_up(0.01111051), _rounded_up(-0.01111059)
    ('0.05', '0.0111106', '-0.0111105')
    """
    if float(f"{epsilon:g}") >= epsilon:
        return f"{epsilon:g}"
    unit = 10.0 ** (math.floor(math.log10(abs(epsilon))) - 5)
    return f"{math.ceil(epsilon / unit) * unit:g}"


def _needed(certificate: Certificate, promise: PromiseResult) -> int:
    without_pool = certificate.guarantee == "probability" and certificate.pool is None
    if without_pool and certificate.delta is not None:
        declared = LossRange(*promise.loss_range)
        return minimum_samples(promise.epsilon, certificate.delta, declared) or 0
    if certificate.guarantee == "expectation" and certificate.options.get("method") != "ucb":
        return math.ceil(promise.loss_range[1] / promise.epsilon * (1 - 1e-14)) - 1
    return 0
