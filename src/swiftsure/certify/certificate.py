"""Certificates: what a policy promises, in numbers, and what the promise rests on."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass

from swiftsure.certify import wording
from swiftsure.certify.bounds import BOUNDS
from swiftsure.certify.control import CONTROLS
from swiftsure.certify.promise import Promise
from swiftsure.certify.wording import KnownCondition
from swiftsure.curves.measures import Measure
from swiftsure.curves.risks import RISKS

__all__ = [
    "BUDGET",
    "Certificate",
    "Costs",
    "PromiseResult",
    "Provenance",
    "Samples",
    "Selection",
]

BUDGET = "budget"
"""The control of a certificate whose setting was chosen by a compute budget."""

DATA = re.compile(r"(sha256:[0-9a-f]{64}( sha256:[0-9a-f]{64})*)?")
"""Fingerprints of the curves of all promises."""

Guarantee = Literal["probability", "expectation", "none"]


# Without control characters, which a terminal would obey.
Name = Annotated[str, Field(max_length=1_000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Count = Annotated[int, Field(ge=1, le=2**53)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _require(possible: bool, otherwise: str) -> None:
    if not possible:
        raise ValueError(otherwise)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class PromiseResult(Measure):
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
        least = min(low, 0.0)  # the full model loses nothing
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
            among=self.among,
            **self.measure_values,  # type: ignore[arg-type]
        )

    @property
    def selective(self) -> bool:
        """Whether the risk is the mean over the samples that exit early, and not over all."""
        return self.among == "exits"

    @property
    def auditable(self) -> bool:
        """Whether audits can watch it: they see all kinds of requests, and take one mean."""
        return not self.selective and self.reading.additive

    @property
    def name(self) -> str:
        """The loss and its bounded quantity, such as "zero_one gap" or "brier inconsistency"."""
        return wording.promise_name(self)

    def __str__(self) -> str:
        """Return the name in words, with the full model."""
        return wording.promise_words(self)


class Selection(_Frozen):
    """How a policy was chosen among several candidates; see `swiftsure.calibrate_best`."""

    method: Literal["pilot", "bonferroni"]
    candidates: tuple[Name, ...] = Field(min_length=1)
    chosen: Name
    cost: Name
    """The cost by which it was chosen."""
    n_pilot: Count | None = None
    """Number of pilot samples, or groups, that chose it, which calibrated nothing."""
    unit: Literal["samples", "groups"] = "samples"

    def __str__(self) -> str:
        """Return how it was chosen, as a clause."""
        return wording.selection_words(self)


class Samples(_Frozen):
    """How many samples calibrated a policy, and what is known of their draw."""

    n: Count
    unit: Literal["samples", "groups"]
    """What was drawn independently."""
    average: Literal["sample", "group"]
    """What has equal weight in risks and costs: every sample, or every group, whatever its size."""
    n_samples: Count
    max_group_size: Count | None = None
    """The declared largest group size, if risks of groups are averages over their samples."""
    population: Count | None = None
    """Size of the finite population that they were drawn from, which the promise is about."""
    max_weight: float | None = Field(default=None, ge=1)
    """The largest weight, if the promise is about another distribution given by weights."""
    slices: dict[Name, Count] | None = None
    """The slices that the promise is about, all at once, with their numbers of samples."""
    small_slices: dict[Name, Count] | None = None
    """Slices with too few samples for any promise, and how many they need; the full model runs."""
    labels: int | None = Field(default=None, ge=0)
    """How many of the samples have a label; None if the losses need none, or it is unknown."""
    pilot: Count | None = None
    """Number of separate samples, or groups, that the path was learned on, besides n."""
    horizon: Count | None = None
    """For a calibration that grows, valid at every moment: the samples its bets were tuned for."""

    def check(self) -> None:
        """Raise if the numbers cannot belong together."""
        grouped = self.unit == "groups"
        _require((self.average == "group") <= grouped, "average must be sample without groups")
        _require(
            (self.max_group_size is not None) == (grouped and self.average == "sample"),
            "max_group_size must be given for averages per sample of groups, and only there",
        )
        _require(self.n <= self.n_samples, "n must not exceed n_samples")
        _require(
            self.population is None or self.population >= self.n,
            f"population must hold all {self.unit}",
        )
        _require(
            self.labels is None or self.labels <= self.n_samples, "labels must not exceed n_samples"
        )
        inside = 0 if self.slices is None else sum(self.slices.values())
        _require(
            self.slices is None or inside == self.n or (grouped and inside > self.n),
            "slices must have n samples together",
        )


class Costs(_Frozen):
    """Mean costs on the calibration samples, and what they decided."""

    means: dict[str, tuple[float, float]]
    """Mean costs of the full model and of the policy."""
    baseline: Literal["full model", "first setting"] = "full model"
    """What the first number of each pair is the cost of."""
    exit_shares: tuple[float, ...] | None = None
    """Fraction of the calibration samples that take each exit."""
    deciding: Name | None = None
    """The cost that was named to decide whether the setting is worth it, if one was."""
    dearer: dict[Name, float] = Field(default_factory=dict)
    """Mean costs of a certified setting that exceed the full model's, which then runs instead."""

    @property
    def not_worth(self) -> bool:
        """Whether the certified setting costs more than the full model, which then runs instead."""
        return bool(self.dearer)

    def check(self) -> None:
        """Raise if the numbers cannot belong together."""
        _require(
            all(cost > self.means.get(k, (cost,))[0] for k, cost in self.dearer.items()),
            "dearer costs must exceed the full model's",
        )
        _require(
            all(cost >= 0 for pair in self.means.values() for cost in pair),
            "costs must not be negative",
        )
        shares = self.exit_shares
        _require(
            shares is None
            or (all(0 <= each <= 1 for each in shares) and abs(sum(shares) - 1) < 1e-6),
            "exit_shares must be shares that add up to 1",
        )


class Provenance(_Frozen):
    """Which data and model a certificate is about, and by which seed the samples were ordered."""

    data: str
    """Fingerprint of the calibration losses, confidences and settings."""
    model: str | None = None
    """Fingerprint of the model; None if the record has none."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of the order in which samples were tested; None if the order does not matter."""
    seed_drawn: bool | None = None
    """Whether the seed was drawn at random for these samples; False for one that was given."""

    def check(self) -> None:
        """Raise if the facts cannot belong together."""
        _require(self.seed_drawn is None or self.seed is not None, "seed_drawn must have a seed")
        _require(DATA.fullmatch(self.data) is not None, "data must be SHA-256 hashes")


class Certificate(_Frozen):
    """What a policy promises, in numbers, and what the promise rests on."""

    guarantee: Guarantee
    delta: float | None = Field(gt=0, lt=1)
    promises: tuple[PromiseResult, ...] = Field(min_length=1)
    max_costs: dict[Name, float] = Field(default_factory=dict)
    """Largest mean costs that are promised together with the risks."""
    conditions: tuple[KnownCondition, ...]
    control: Name
    """Name of the control that chose the setting, or "budget" if a compute budget did."""
    options: dict[str, Any]
    path: Name
    n_settings: Count
    index: int | None = Field(ge=0)
    stopped_at: Count | None = None
    """The first setting that lacked a label, where the walk stopped; None if it never had to."""
    selection: Selection | None = None
    """How the policy was chosen among several candidates, if it was."""
    samples: Samples
    costs: Costs
    provenance: Provenance

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The conditions in words."""
        return wording.condition_texts(self)

    def check(self, edited: bool = False) -> None:
        """Raise if the numbers cannot belong together; an edited level need not be certified."""
        for promise in self.promises:
            promise.check(self.by_budget)
            if self.index is not None and not edited:
                self._check_certified(promise)
        control = (*CONTROLS, BUDGET)
        _require(self.control in control, f"control must be one of {', '.join(control)}")
        _require(
            self.index != 0 or self.costs.baseline == "first setting",
            "index must not be that of the full model, which nothing certifies",
        )
        _require(
            not self.costs.not_worth or self.index is None,
            "index must be null if the full model costs less",
        )
        _require(
            self.delta is not None or self.guarantee != "probability",
            "delta must be given for a guarantee with a probability",
        )
        _require(self.index is None or self.index < self.n_settings, "index must be a setting")
        if self.stopped_at is not None:
            _require(self.stopped_at < self.n_settings, "stopped_at must be a setting")
            _require((self.index or 0) < self.stopped_at, "index must be before stopped_at")
        self.samples.check()
        self.costs.check()
        self.provenance.check()
        self._check_shares()
        self._check_conditions()
        self._check_scope()

    def _check_shares(self) -> None:
        """Raise if counts, shares and costs cannot be those of the same samples."""
        samples, costs, shares = self.samples, self.costs, self.costs.exit_shares
        _require(
            samples.unit == "groups" or samples.n == samples.n_samples or self.by_budget,
            "n must be n_samples without groups",
        )
        if shares is not None and samples.unit == "samples" and samples.max_weight is None:
            total = samples.n_samples
            _require(
                all(abs(each - round(each * total) / total) < 1e-9 for each in shares),
                "exit_shares must be shares of n_samples",
            )
        _require(
            costs.deciding is None or costs.deciding in costs.means,
            "deciding must be one of the costs",
        )

    def _check_scope(self) -> None:
        """Raise if no calibration makes a promise of this scope."""
        for promise in self.promises:
            fits = promise.reading.fits(promise, promise.loss_range, self.samples.max_weight)
            _require(fits, f"loss_range cannot be {promise.loss_range} with {promise.measure}")
            _require(
                promise.within is None or self.samples.slices is not None,
                "slices must be given where a promise holds within them",
            )
        restricted = self.samples.slices is not None or any(
            not each.auditable for each in self.promises
        )
        _require(
            self.samples.population is None or (self.samples.max_weight is None and not restricted),
            "population cannot be combined with weights, slices, worst shares or exits",
        )
        _require(
            all(k in self.costs.means and limit > 0 for k, limit in self.max_costs.items()),
            "max_costs must be limits of known costs",
        )
        _require(
            self.samples.horizon is None
            or (
                self.samples.population is None
                and all(each.bound == "star" for each in self.promises)
            ),
            "horizon must be null for other tests than bets",
        )

    def _check_conditions(self) -> None:
        """Raise for names in conditions that the certificate does not know, or if all are gone."""
        _require(
            self.guarantee == "none" or len(self.conditions) > 0,
            "conditions must be given where a guarantee is",
        )
        losses = {each.loss for each in self.promises}
        for condition in self.conditions:
            facts = dict(condition.facts)
            _require(facts.get("loss") in (None, *losses), "conditions must be about its losses")
            known = (None, *self.costs.means)
            _require(facts.get("cost") in known, "conditions must be about its costs")

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
            rough = (high - low) * 0.05 / math.sqrt(self.samples.n) if in_order else 0.0
            _require(
                not inverts or promise.upper_bound <= level + rough + slack,
                "upper_bound must not exceed epsilon where a setting was certified",
            )
        if (
            self.guarantee == "probability"
            and self.samples.population is None
            and self.delta is not None
        ):
            # A test that certifies some losses also certifies the lowest, and those come with this
            # probability although the risk is ε.
            chance = (
                self.samples.n * math.log((high - level) / (high - low))
                if level < high
                else -math.inf
            )
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
