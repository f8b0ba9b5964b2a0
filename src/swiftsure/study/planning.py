"""Planning: how many samples a promise needs, and what more of them would save."""

from dataclasses import dataclass
from functools import cache
from math import ceil

import numpy as np
from numpy.typing import NDArray
from scipy import special

from swiftsure._lib import checks
from swiftsure.certify import bounds
from swiftsure.certify.bounds import trinomial
from swiftsure.certify.calibration import Calibration
from swiftsure.certify.promise import Promise
from swiftsure.curves.curve import RiskCurve
from swiftsure.losses import LossRange
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.study.budgets import Budget, BudgetPlan, lowest_epsilon
from swiftsure.study.pools import as_request, cost_name, pool_curve
from swiftsure.study.unlabelled import PoolPlan, unlabelled_pool

__all__ = [
    "Budget",
    "BudgetPlan",
    "GainPlan",
    "PoolPlan",
    "SamplePlan",
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
        curve = pool_curve(pilot, as_request(Promise(loss, epsilon=epsilon)))
        if curve.statistic.selective:
            raise ValueError("`pilot` must not be a curve of the samples that exit.")
        if curve.units.weights is not None:
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
    saved = 100 * curve.saving(cost_name(curve, request.cost))
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
        unit=curve.units.name,
        average=curve.units.average,
    )
