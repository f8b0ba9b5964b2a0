"""Rules and tests with one error each, most of them found in published code.

None of them may pass the checkers: see `test_broken_variants.py`.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, rel_entr

from swiftsure.certify.bounds import BOUNDS
from swiftsure.certify.control import Control
from tests.guarantees.checkers import Task, Test
from tests.guarantees.rules import curve_of, rule

Floats = NDArray[np.float64]
Step = Callable[[float, float, float, float, int], float]


# ------------------------------------------------------------------------------ selection


def plug_in(losses: Floats, task: Task, seed: int) -> int | None:
    """The paper's naive rule (Eq. 9): trusts the calibration mean."""
    return rule("empirical")(losses, task, seed)


def first_failure(losses: Floats, task: Task, seed: int) -> int | None:
    """Off by one: returns the first setting that was not certified."""
    last = rule("ucb", bound="star")(losses, task, seed) or 0
    return min(last + 1, losses.shape[1] - 1)


def last_success(losses: Floats, task: Task, seed: int) -> int | None:
    """Tests each setting at δ, and takes the fastest that passes, across failures."""
    curve = curve_of(losses, task)
    p = BOUNDS["hoeffding_bentkus"].p_values(curve, np.arange(curve.n), task.epsilon)
    passes = np.flatnonzero(p[1:] <= task.delta) + 1
    return int(passes[-1]) if passes.size else None


def unshuffled(bound: str) -> Callable[[Floats, Task, int], int | None]:
    """A betting rule that takes the samples in the order in which they come."""

    def choose(losses: Floats, task: Task, seed: int) -> int | None:
        curve = curve_of(losses, task)
        levels = np.asarray([task.epsilon])
        index = int(Control("ucb", bound).indices(curve, levels, task.delta)[0])
        return None if index < 0 else index

    return choose


def best_of_seeds(losses: Floats, task: Task, seed: int) -> int | None:
    """Tries twenty orders of the samples, and takes the one that pleases."""
    chosen = [rule("ucb", bound="star")(losses, task, 20 * seed + j) or 0 for j in range(20)]
    return max(chosen) or None


def first_reversed(losses: Floats, task: Task, seed: int) -> int | None:
    """Tests from the fast end, and takes the first success."""
    for index in range(losses.shape[1] - 1, 0, -1):
        if rule("ucb", bound="star")(losses[:, [0, index]], task, seed):
            return index
    return None


# -------------------------------------------------------------------------- in expectation


def crc_without_the_bound(losses: Floats, task: Task, seed: int) -> int | None:
    """CRC that forgets the B of the next sample: the plug-in rule for running maxima."""
    means = np.maximum.accumulate(losses, axis=1).mean(axis=0)
    passes = np.flatnonzero(means[1:] <= task.epsilon)
    return int(passes[-1]) + 1 if passes.size else None


def crc_with_bound_one(losses: Floats, task: Task, seed: int) -> int | None:
    """CRC that takes B = 1 whatever the losses."""
    sums = np.maximum.accumulate(losses, axis=1).sum(axis=0)
    passes = np.flatnonzero((sums[1:] + 1) / (len(losses) + 1) <= task.epsilon)
    return int(passes[-1]) + 1 if passes.size else None


# ------------------------------------------------------------------------- tests by summary


def binomial_short_of_one(losses: Floats, task: Task) -> bool:
    """P(X < k) for P(X ≤ k)."""
    return bool(bdtr(losses.sum() - 1, len(losses), task.epsilon) <= task.delta)


def binomial_on_net_gaps(losses: Floats, task: Task) -> bool:
    """The binomial test on the sum of 0-1 gaps, which is not a count."""
    return bool(bdtr(max(0.0, losses.sum()), len(losses), task.epsilon) <= task.delta)


def hoeffding_bentkus(count: float, n: int, mean: float, epsilon: float) -> float:
    """Hoeffding-Bentkus for losses in [0, 1], as it is usually written."""
    mean = min(mean, epsilon)
    distance = rel_entr(mean, epsilon) + rel_entr(1 - mean, 1 - epsilon)
    return float(min(np.exp(-n * distance), np.e * bdtr(count, n, epsilon)))


def ltt_ignoring_the_bound(losses: Floats, task: Task) -> bool:
    """Hoeffding-Bentkus of losses in [0, B] as if they lay in [0, 1]."""
    count = np.ceil(losses.sum())
    p = hoeffding_bentkus(count, len(losses), losses.mean(), task.epsilon)
    return p <= task.delta


def hoeffding_bentkus_of_float_mean(count: int, n: int, epsilon: float) -> float:
    """Hoeffding-Bentkus with ⌈n · mean⌉ in floating point, where the count is known."""
    mean = count / n
    return hoeffding_bentkus(np.ceil(n * mean), n, mean, epsilon)


def hoeffding_for_one_sign(losses: Floats, task: Task) -> bool:
    """Hoeffding's test of losses in [−B, B] as if they lay in [0, B]."""
    below = max(0.0, task.epsilon - losses.mean()) / task.high
    return bool(np.exp(-2 * len(losses) * below**2) <= task.delta)


def bernstein_of_the_observed_variance(losses: Floats, task: Task) -> float:
    """Upper bound of Bernstein's form with the sample variance and no price for estimating it."""
    spread = np.sqrt(2 * losses.var() * np.log(1 / task.delta) / len(losses))
    return float(min(task.high, losses.mean() + spread))


# ------------------------------------------------------------------------- tests by betting


def bets(losses: Floats, task: Task, stake: Step, *, peek: bool = False) -> bool:
    """A betting test, written plainly; `peek` lets a stake see the loss that it is placed on."""
    n, wealth, total, deviations = len(losses), 1.0, 0.0, 0.25 * task.high**2
    for i, loss in enumerate(losses):
        seen = deviations
        total += loss
        deviations += (loss - (0.5 * task.high + total) / (i + 2)) ** 2
        variance = deviations / (i + 2) if peek else seen / (i + 1)
        missing = -np.log(task.delta * wealth)
        amount = stake(missing, variance, task.epsilon, task.high, n - i)
        wealth *= 1 - amount * (loss - task.epsilon)
        if wealth >= 1 / task.delta:
            return True
        if wealth <= 0:
            return False
    return False


def star_stake(missing: float, variance: float, epsilon: float, high: float, horizon: int) -> float:
    """STaR's stake."""
    return min(1 / (high - epsilon), np.sqrt(2 * missing / (horizon * variance)))


def star_by_hand(losses: Floats, task: Task) -> bool:
    """Not broken: STaR without its rounding guards, to show that `bets` is sound."""
    return bets(losses, task, star_stake)


def star_that_peeks(losses: Floats, task: Task) -> bool:
    """STaR whose stake is not predictable: its variance counts the loss that it bets on."""
    return bets(losses, task, star_stake, peek=True)


def star_with_the_cap_of_one(losses: Floats, task: Task) -> bool:
    """STaR with stakes up to 1/(1 − ε) although losses reach B = 2."""

    def stake(missing: float, variance: float, epsilon: float, high: float, horizon: int) -> float:
        return min(1 / (1 - epsilon), np.sqrt(2 * missing / (horizon * variance)))

    return bets(losses, task, stake)


def root_in_the_unit_interval(losses: Floats, task: Task) -> bool:
    """A bound that is sought in (0, 1) only, so that it never exceeds 1, although B = 2."""
    curve = curve_of(np.column_stack([np.zeros_like(losses), losses]), task)
    upper = BOUNDS["wsr"].upper(curve, np.arange(curve.n), 1, task.delta, 0)
    return min(upper, 1.0) <= task.epsilon


def as_rule(test: Test) -> Callable[[Floats, Task, int], int | None]:
    """Fixed sequence of a test: the last setting before the first failure."""

    def choose(losses: Floats, task: Task, seed: int) -> int | None:
        last: int | None = None
        for index in range(1, losses.shape[1]):
            if not test(losses[:, index], task):
                break
            last = index
        return last

    return choose
