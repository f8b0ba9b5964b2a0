"""Planning: how many samples a promise needs, and which ε a compute budget allows."""

from dataclasses import dataclass, replace
from functools import cache
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray
from scipy import special

from swiftsure._lib import checks
from swiftsure.certify import bounds
from swiftsure.certify.bounds import trinomial
from swiftsure.certify.calibration import Calibration
from swiftsure.certify.certificate import make_policy
from swiftsure.certify.control import ControlResult
from swiftsure.certify.policy import BUDGET, Policy, percent
from swiftsure.certify.promise import Promise
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import BREAKPOINTS, PathLike
from swiftsure.exits import ExitRule
from swiftsure.losses import LossRange
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.study.pools import as_request, pool_curve
from swiftsure.study.unlabelled import PoolPlan, unlabelled_pool

__all__ = [
    "Budget",
    "BudgetPlan",
    "GainPlan",
    "PoolPlan",
    "SamplePlan",
    "budget_policy",
    "gain_by_samples",
    "lowest_epsilon",
    "samples_needed",
    "unlabelled_pool",
]

Record = ExitRecord | ThresholdRecord | ShardedRecord | RiskCurve

MOST_SAMPLES, MOST_SIMULATED = 10_000_000, 200_000
"""Largest numbers of samples to plan for, by an exact formula and by simulation."""

PLAN_DRAWS, PLAN_BLOCK = 1600, 200
"""Number of calibration sets drawn to estimate a power, in total and at once."""


@dataclass(frozen=True)
class SamplePlan:
    """The number of calibration samples needed to certify ε.

    Attributes
    ----------
    n : int
        Samples needed to certify a setting with risk `risk` with probability `power`.
    floor : int or None
        Samples needed even if every loss is 0; None if losses can be negative.
    bound : str
        The test that was planned for, which is the one that calibration will run.
    disagreement : float or None
        For gaps, how often the setting does better or worse than the full model.
    """

    n: int
    floor: int | None
    epsilon: float
    delta: float
    risk: float
    power: float
    bound: str
    disagreement: float | None = None


def samples_needed(
    epsilon: float,
    delta: float = 0.1,
    *,
    risk: float | None = None,
    power: float = 0.9,
    loss_range: LossRange | tuple[float, float] | None = None,
    disagreement: float | None = None,
    pilot: Record | None = None,
    loss: str | None = None,
    bound: str = "auto",
) -> SamplePlan:
    """Return how many calibration samples a promise needs, before any are drawn.

    The power is that of the test that calibration will run: exact for losses of 0 and 1 and for
    0-1 gaps, by simulation (with a margin of one standard error) for all others. Without a pilot,
    losses are assumed to be 0 or B, or −B, 0 or B: these have the largest variance for their mean
    and rate of disagreement.

    Parameters
    ----------
    epsilon, delta : float
        The promise: risk at most ε with probability 1 − δ.
    risk : float, optional
        The expected true risk of the setting to certify, below ε; 0 by default. With a pilot, the
        largest risk of that setting; half of ε by default.
    power : float
        Probability of certifying that setting.
    loss_range : (low, high) or LossRange, optional
        By default losses are 0 or 1.
    disagreement : float, optional
        For losses that can be negative: how often the setting's loss differs from the full model's.
        The number of samples depends on it: gaps of +1 and −1 cancel in the risk, but not in the
        variance.
    pilot : record or RiskCurve, optional
        Replaces `loss_range` and `disagreement`: the losses are those of its fastest setting with
        at most the given risk. Do not calibrate on the samples of the pilot.
    loss : str, optional
        Which loss of the pilot, if it has several.
    bound : str
        As in `calibrate`.

    Examples
    --------
    >>> samples_needed(0.01).n, samples_needed(0.05, risk=0.02).n
    (230, 258)
    >>> gap = LossRange(-1, 1, whole=True)
    >>> [samples_needed(0.05, risk=0.02, loss_range=gap, disagreement=r).n for r in (0.03, 0.1)]
    [307, 769]
    """
    if pilot is not None:
        if loss_range is not None or disagreement is not None:
            raise ValueError("`pilot` has its own `loss_range` and `disagreement`; leave them out.")
        curve = pool_curve(pilot, _request(None, loss, epsilon))
        if curve.selective:
            raise ValueError("`pilot` must not be a curve of the samples that exit.")
        if curve.weights is not None:
            raise ValueError(
                "`pilot` must not average over the samples of groups (`average='sample'`): the"
                " number of groups depends on how their sizes vary; use `gain_by_samples`."
            )
        declared = curve.loss_range
        level = checks.between("epsilon", epsilon, 0.0, declared.high)
        values = _pilot_losses(curve, 0.5 * level if risk is None else risk)
        weights = np.full(len(values), 1 / len(values))
    else:
        declared = LossRange.of(LossRange(0, 1, whole=True) if loss_range is None else loss_range)
        level = checks.between("epsilon", epsilon, 0.0, declared.high)
        values, weights = _assumed_losses(declared, level, risk or 0.0, disagreement)
    checks.failure_probability(delta)
    checks.between("power", power, 0.0, 1.0)
    expected = float(values @ weights)
    declared = bounds.declared_for(bound, declared)
    bounds.resolve(bound, declared)  # raises early if the bound is not valid for the losses
    if declared.binary and bound in ("auto", "binomial"):
        rate = expected / declared.high
        lossless = bounds.minimum_samples(level, delta, declared)
        n = lossless if rate == 0 else _fewest_samples(level, delta, rate, power)
    else:
        n = _samples_by_power(level, delta, values, weights, declared, power, bound)
    if n is None:
        raise ValueError(
            f"`risk` of {expected:g} is too close to epsilon = {epsilon:g}: more samples would be"
            " needed than can be planned for."
        )
    return SamplePlan(
        n=n,
        floor=bounds.minimum_samples(level, delta, declared),
        epsilon=level,
        delta=delta,
        risk=expected,
        power=power,
        bound=bounds.resolve(bound, declared, n).name,
        disagreement=float(weights[values != 0].sum()) if declared.low < 0 else None,
    )


def _pilot_losses(curve: RiskCurve, risk: float) -> NDArray[np.float64]:
    """Return the losses of a pilot's fastest setting with at most this risk."""
    fits = np.flatnonzero(curve.risk() <= risk)
    if not fits.size:
        raise ValueError(f"`pilot` has no setting with a risk of at most {risk:g}.")
    return curve.loss_at(int(fits[-1]))


def _assumed_losses(
    declared: LossRange, epsilon: float, risk: float, disagreement: float | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the values and probabilities of the losses with the largest variance."""
    high = declared.high
    if declared.low >= 0:
        if disagreement is not None:
            raise ValueError("`disagreement` is for losses that can be negative.")
        if not 0 <= risk < epsilon:
            raise ValueError(f"`risk` must be in [0, epsilon), but got {risk:g}.")
        return np.asarray([0.0, high]), np.asarray([1 - risk / high, risk / high])
    if disagreement is None:
        raise ValueError(
            "`disagreement` must be given for losses that can be negative: how often the setting"
            " does better or worse than the full model. A `pilot` tells it too."
        )
    low = max(-high, declared.low)
    if not disagreement * low <= risk < epsilon:
        raise ValueError(f"`risk` must be in [{disagreement * low:g}, epsilon), but got {risk:g}.")
    if not risk / high <= disagreement <= 1:
        raise ValueError(
            f"`disagreement` must be in [{max(risk / high, risk / low):g}, 1] for this risk, but"
            f" got {disagreement:g}."
        )
    worse = min(disagreement, (risk - disagreement * low) / (high - low))
    better = disagreement - worse
    values = np.asarray([high, low, 0.0])
    return values, np.asarray([worse, better, 1 - disagreement])


def _samples_by_power(
    epsilon: float,
    delta: float,
    values: NDArray[np.float64],
    weights: NDArray[np.float64],
    declared: LossRange,
    power: float,
    bound: str,
) -> int | None:
    """Return about the fewest samples with this power: a normal approximation, then bisection."""

    def enough(n: int) -> bool:
        chosen = bounds.resolve(bound, declared, n)
        if chosen.name == "trinomial":
            plus, minus = float(weights[values > 0].sum()), float(weights[values < 0].sum())
            return trinomial.power(n, epsilon, delta, plus, minus) >= power
        rng = np.random.default_rng(n)
        passed = 0
        for _ in range(0, PLAN_DRAWS, PLAN_BLOCK):
            losses = rng.choice(values, (n, PLAN_BLOCK), p=weights)
            drawn = RiskCurve.from_losses(
                np.arange(PLAN_BLOCK), losses, loss_range=declared, relative=False
            )
            passed += int(chosen.passes(drawn, np.arange(n), epsilon, delta).sum())
        share = passed / PLAN_DRAWS
        return bool(share - np.sqrt(power * (1 - power) / PLAN_DRAWS) >= power)

    spread = np.sqrt(values**2 @ weights) / (epsilon - values @ weights)
    n = max(8, ceil((spread * (special.ndtri(1 - delta) + special.ndtri(power))) ** 2))
    if n > MOST_SIMULATED:
        return None
    few = n
    while few > 1 and enough(few):
        few, n = few * 4 // 5, few
    while few == n or not enough(n):
        few, n = n, n * 5 // 4
        if n > MOST_SIMULATED:
            return None
    while n - few > max(1, n // (200 if n < 5000 else 40)):
        middle = (few + n) // 2
        few, n = (few, middle) if enough(middle) else (middle, n)
    return n


def _fewest_samples(epsilon: float, delta: float, rate: float, power: float) -> int | None:
    """Return the fewest samples that certify ε with this power; None beyond ten million.

    The power is a sawtooth in n: it falls until one more loss is allowed. So it is highest at the
    first n that allows c losses, and the search is over c = 0, 1, 2, … rather than n.
    """

    @cache
    def size(losses: int) -> int:
        n = max(losses + 1, ceil(special.bdtrin(losses, delta, epsilon)))
        if n > MOST_SAMPLES:
            return n
        while special.bdtr(losses, n, epsilon) > delta:  # the inverse is slightly inexact
            n += 1
        while n > losses + 1 and special.bdtr(losses, n - 1, epsilon) <= delta:
            n -= 1
        return n

    def first(start: int, stop: int) -> int | None:
        # Upper bound on the power over a range: its last number of losses, its first sample size.
        if special.bdtr(stop - 1, size(start), rate) < power:
            return None
        if stop - start == 1:
            return start
        middle = (start + stop) // 2
        found = first(start, middle)
        return first(middle, stop) if found is None else found

    start, stop, found = 0, 1, None
    while found is None and size(start) <= MOST_SAMPLES:
        found = first(start, stop)
        start, stop = stop, 2 * stop
    return None if found is None or size(found) > MOST_SAMPLES else size(found)


@dataclass(frozen=True)
class GainPlan:
    """Estimated savings for calibration sets of several sizes, from a pilot record.

    Attributes
    ----------
    sizes : (m,)
    gain : (m,)
        Mean percentage saved.
    certified : (m,)
        Fraction of calibration sets that certify any setting.
    reached : (m,)
        Fraction of all sets that save at least `target` per cent; 1 without a target.
    unit, average
        What `sizes` count ("samples" or "groups"), and what is weighted equally in risks and
        savings ("sample" or "group").
    """

    sizes: NDArray[np.int64]
    gain: NDArray[np.float64]
    certified: NDArray[np.float64]
    reached: NDArray[np.float64]
    target: float
    power: float
    unit: str = "samples"
    average: str = "sample"

    @property
    def n(self) -> int | None:
        """Smallest size at and above which the target is reached with `power`, or None."""
        order = np.argsort(self.sizes)
        short = np.flatnonzero(self.reached[order] < self.power)
        first = int(short[-1]) + 1 if short.size else 0
        return int(self.sizes[order][first]) if first < len(order) else None


def gain_by_samples(
    pilot: Record,
    request: Promise | Calibration,
    *,
    target: float = 0.0,
    power: float = 0.9,
    sizes: tuple[int, ...] = (50, 100, 200, 500, 1000, 2000, 5000),
    draws: int = 200,
    seed: int = 0,
) -> GainPlan:
    """Estimate what more calibration samples would save, by resampling a pilot with replacement.

    This is not a guarantee, and only as good as the pilot. Do not calibrate on the pilot's
    samples at an ε or size that was chosen with it.

    Parameters
    ----------
    pilot : record or RiskCurve
        With groups, sizes count groups.
    request : Promise or Calibration
        What is to be promised, of one risk; a request also says δ, control, path, exit rule and
        the cost to save.
    target : float
        The percentage to save.
    power : float
        The share of calibration sets that must reach the target.

    Examples
    --------
    >>> from swiftsure.study.simulate import Population
    >>> sample = Population().sample(500, seed=0)
    >>> pilot = ExitRecord.from_logits(sample.logits, sample.labels)
    >>> promise = Promise("zero_one", epsilon=0.05)
    >>> plan = gain_by_samples(pilot, promise, sizes=(100, 1000), draws=20)
    >>> bool(plan.gain[0] < plan.gain[1])
    True
    """
    request = as_request(request)
    curve = pool_curve(pilot, request)
    rule, delta = request.control, request.delta
    epsilon = request.risks[0].epsilon
    level = np.asarray([checks.between("epsilon", epsilon, 0.0, curve.loss_range.high)])
    checks.between("power", power, 0.0, 1.0)
    checks.count("draws", draws)
    if not sizes:
        raise ValueError("`sizes` must not be empty.")
    saved = 100 * curve.saving(_cost_name(curve, request.cost))
    rng = np.random.default_rng(seed)
    gains = np.zeros((len(sizes), draws))
    certified = np.zeros((len(sizes), draws), bool)
    for i, size in enumerate(sizes):
        for j in range(draws):
            rows = rng.integers(0, curve.n, checks.count("sizes", size))
            index = rule.indices(curve, level, delta, rows)[0]
            gains[i, j] = saved[max(index, 0)]
            certified[i, j] = index >= 0
    return GainPlan(
        sizes=np.asarray(sizes),
        gain=gains.mean(axis=1),
        certified=certified.mean(axis=1),
        reached=(gains >= target).mean(axis=1),
        target=target,
        power=power,
        unit="groups" if curve.grouped else "samples",
        average=curve.average,
    )


@dataclass(frozen=True)
class Budget:
    """How much a setting may cost, for `lowest_epsilon`.

    Parameters
    ----------
    at_most : float, optional
        Largest mean cost, in the unit of `cost`.
    saving : float, optional
        Instead: the smallest fraction of the full model's cost to save, in (0, 1).
    cost : str, optional
        Which cost; by default the one that `policy.evaluate` reports.
    choice : float
        Fraction of the samples, or groups, used to choose the setting.
    """

    at_most: float | None = None
    saving: float | None = None
    cost: str | None = None
    choice: float = 0.25

    def __post_init__(self) -> None:
        """Raise unless there is one limit."""
        if (self.at_most is None) == (self.saving is None):
            raise ValueError("`budget` or `saving` must be given, and not both.")
        if self.at_most is not None:
            checks.between("budget", self.at_most, 0.0, np.inf)
        if self.saving is not None:
            checks.between("saving", self.saving, 0.0, 1.0)
        checks.between("choice", self.choice, 0.0, 1.0)


@dataclass(frozen=True)
class BudgetPlan:
    """The lowest ε that can be certified within a compute budget.

    Attributes
    ----------
    epsilon : float or None
        The level; None if none below the largest loss is certified.
    threshold
        The setting that meets the budget; None for the full model.
    cost, full_cost : float
        Mean cost at that setting and of the full model, on the samples not used to choose it.
    policy : Policy
        Ready to run, with `epsilon` in its certificate.
    """

    epsilon: float | None
    threshold: float | tuple[float | None, ...] | None
    budget: float
    cost: float
    full_cost: float
    n_choice: int
    n_bound: int
    policy: Policy


def lowest_epsilon(
    record: Record,
    budget: float | Budget | None = None,
    risk: str | None = None,
    loss: str | None = None,
    *,
    saving: float | None = None,
    delta: float = 0.1,
    bound: str = "auto",
    path: PathLike = None,
    rule: ExitRule | None = None,
) -> BudgetPlan:
    """Return the lowest ε that can be certified within a compute budget.

    The setting is the safest one whose mean cost on a random part of the record meets the budget;
    ε is the upper bound of its risk on the rest. If the cost of each setting is known beforehand,
    no part is needed for the choice.

    **Guarantee**: P(risk of the setting ≤ ε) ≥ 1 − δ over the draw of the record, for the ε that is
    returned. Choosing the setting and bounding its risk on the same samples would void it. The
    budget holds for the mean cost as estimated; `cost` is an unbiased estimate.

    Parameters
    ----------
    record : record or RiskCurve
        Its order fixes which samples choose the setting, and the order of the others for betting
        bounds.
    budget : float or Budget
        Largest mean cost; a Budget also says of which cost.
    saving : float
        Instead of `budget`: the smallest fraction of the full model's cost to save, in (0, 1).
    risk, loss, delta, bound, path, rule
        As in `Calibration`.

    Examples
    --------
    >>> from swiftsure.study.simulate import Population
    >>> sample = Population().sample(4000, seed=0)
    >>> record = ExitRecord.from_logits(sample.logits, sample.labels)
    >>> plan = lowest_epsilon(record, saving=0.5, loss="zero_one")
    >>> plan.epsilon < 0.01
    True
    """
    if isinstance(budget, Budget) and saving is not None:
        raise ValueError("`budget` or `saving` must be given, and not both.")
    if not isinstance(budget, Budget):
        budget = Budget(budget, saving)
    request = replace(_request(risk, loss, 0.5, delta, bound, path, rule), cost=budget.cost)
    curve = pool_curve(record, request)
    if not curve.relative:
        raise ValueError("`lowest_epsilon` needs losses relative to the full model.")
    if curve.selective:
        raise ValueError("`lowest_epsilon` does not know the risk of the samples that exit.")
    if curve.branches is not None:
        raise ValueError("`lowest_epsilon` needs a path without branches.")
    if curve.path_kind == BREAKPOINTS and curve.strict:
        raise ValueError(
            "`path` must not be the breakpoints where exits are strict: the samples that bound the"
            " risk would then choose the setting too. Give a grid of thresholds."
        )
    name = _cost_name(curve, budget.cost)
    unit = "group" if curve.grouped else "sample"
    order = curve.order
    ordered = curve.shuffled(order.seed)
    known = not curve.has_exits and curve.costs[name].ndim == 1
    size = 0 if known else max(1, round(budget.choice * curve.n))
    if size >= curve.n:
        raise ValueError(f"`record` must hold more than {size} {unit}s for this `choice`.")
    part, rest = np.split(np.arange(curve.n), [size])
    mean_cost = curve.mean_cost(name) if known else ordered.mean_cost(name, part)
    full = ordered.full_cost(name, None if known else part)
    limit = budget.at_most if budget.saving is None else full * (1 - budget.saving)
    affordable = np.flatnonzero(mean_cost <= limit)
    if not affordable.size:
        fastest = float(mean_cost.min())
        if budget.saving is not None:
            most = floor(1000 * (1 - fastest / full) + 1e-6) / 1000
            raise ValueError(
                f"`saving` must be at most {most:g}, since the fastest setting saves"
                f" {percent(most)} of {'exits' if name == 'exit' else name}, but got"
                f" {budget.saving:g}."
            )
        raise ValueError(
            f"`budget` must be at least {fastest:g}, the cost of the fastest setting, but got"
            f" {limit:g}."
        )
    index = int(affordable[0])
    policy = budget_policy(record, request, index, size)
    level = policy.certificate.promises[0].epsilon
    outcome = ordered.mean_cost(name, rest)
    return BudgetPlan(
        epsilon=level if level < curve.loss_range.high else None,
        threshold=policy.threshold,
        budget=limit,
        cost=float(outcome[index]),
        full_cost=ordered.full_cost(name, rest),
        n_choice=size,
        n_bound=len(rest),
        policy=policy,
    )


def budget_policy(record: Record, request: Calibration, index: int | None, n_choice: int) -> Policy:
    """Return the policy of a setting that a compute budget chose; its level bounds the risk there.

    Parameters
    ----------
    index : int or None
        The setting; None if no level below the largest loss is certified.
    n_choice : int
        How many samples, or groups, chose it; the others bound its risk.
    """
    curve, control = pool_curve(record, request), request.control
    order, high = curve.order, curve.loss_range.high
    prepared = control.prepare(curve.shuffled(order.seed))
    rest = np.arange(n_choice, curve.n)
    bound = bounds.resolve(request.bound, prepared.loss_range, len(rest))
    tested = index is None or index > 0 or not curve.full_model_first
    level = high if index is None else 0.0
    if tested and index is not None:
        level = bound.upper(prepared, rest, index, request.delta, 0)
    certified = tested and level < high
    used = order if n_choice or bound.uses_order else None
    rests = control.assumptions(curve, bound, order=used)
    name, unit = _cost_name(curve, request.cost), "group" if curve.grouped else "sample"
    source = f"{n_choice:,} other {unit}{'s' if n_choice > 1 else ''}"
    result = ControlResult(
        index=index if certified else None,
        threshold=curve.threshold_at(index) if certified and index is not None else None,
        guarantee="probability",
        epsilon=level,
        delta=request.delta,
        control=BUDGET,
        bound=bound.name,
        n=len(rest),
        seed=None if used is None else used.seed,
        seed_drawn=None if used is None else used.drawn,
        assumptions=(
            rests[0],
            f"{name} costs of {source if n_choice else 'each setting'} chose the setting, and its"
            " risk's upper bound is the level",
            "path, losses, budget and method were fixed before the calibration losses were seen",
            *rests[2:],
        ),
    )
    promised = replace(request.risks[0], epsilon=level)
    return make_policy(
        replace(request, promises=(promised,)),
        record,
        [curve],
        [result],
        result,
        upper=level if tested else None,
    )


def _cost_name(curve: RiskCurve, cost: str | None) -> str:
    """Return the cost to plan with; raise if there is none."""
    name = curve.default_cost(cost)
    if name is None:
        raise ValueError("`record` must have costs: without them no saving is known.")
    return name


def _request(
    risk: str | None,
    loss: str | None,
    epsilon: float,
    delta: float = 0.1,
    bound: str = "auto",
    path: PathLike = None,
    rule: ExitRule | None = None,
) -> Calibration:
    """Return the request that tests one mean risk."""
    return Calibration(
        Promise(loss, epsilon=epsilon, risk=risk or "gap"),  # type: ignore[arg-type]
        delta=delta,
        bound=bound,
        path=path,  # type: ignore[arg-type]
        rule=rule or ExitRule(),
    )
