"""The paper's algorithms, written plainly, as references to measure the library against.

Jazbec, Timans et al., "Fast yet Safe: Early-Exiting with Risk Control" (NeurIPS 2024). Algorithm 2
is the Waudby-Smith-Ramdas bound, and Algorithm 1 chooses a threshold by it. Conformal risk control
and Learn-then-Test with Hoeffding-Bentkus p-values follow, as the paper compares them.
Settings run from the safest to the fastest; the first is the full model.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats
from scipy.optimize import brentq

__all__ = [
    "algorithm_1",
    "crc",
    "hoeffding_bentkus",
    "last_before_failure",
    "ltt",
    "ltt_at_once",
    "upper_bounds",
    "wsr",
]

Floats = NDArray[np.float64]


def wsr(losses: Floats, delta: float, max_loss: float = 1.0) -> float:
    """Algorithm 2: an upper bound of the mean of losses that are at most `max_loss`.

    The ε at which the largest wealth reaches 1/δ is found as a root, searched
    up to `max_loss`, which is 2 for the Brier score.
    """
    n = len(losses)
    count = np.arange(1, n + 1)
    mean = (max_loss / 2 + np.cumsum(losses)) / (count + 1)
    variance = (max_loss**2 / 4 + np.cumsum((losses - mean) ** 2)) / (count + 1)
    before = np.concatenate([[max_loss**2 / 4], variance[:-1]])
    stake = np.minimum(1 / max_loss, np.sqrt(2 * np.log(1 / delta) / (n * before)))

    def surplus(epsilon: float) -> float:
        return float(np.cumsum(np.log(1 - stake * (losses - epsilon))).max() + np.log(delta))

    lowest = 1e-12  # below it, a loss equal to `max_loss` would leave no wealth
    if surplus(lowest) >= 0:
        return lowest
    return max_loss if surplus(max_loss) <= 0 else float(brentq(surplus, lowest, max_loss))


def upper_bounds(losses: Floats, delta: float, max_loss: float = 1.0) -> Floats:
    """First half of Algorithm 1: the upper bound at each setting; `losses` is (n, K)."""
    return np.array([wsr(column, delta, max_loss) for column in losses.T])


def last_before_failure(passes: NDArray[np.bool_]) -> int:
    """Second half of Algorithm 1: the last setting before the first that fails."""
    failures = np.flatnonzero(~passes[1:])
    return int(failures[0]) if failures.size else len(passes) - 1


def algorithm_1(losses: Floats, epsilon: float, delta: float, max_loss: float = 1.0) -> int:
    """Index of the fastest setting that is safe; 0 is the full model."""
    return last_before_failure(upper_bounds(losses, delta, max_loss) < epsilon)


def crc(losses: Floats, epsilons: Floats, max_loss: float = 1.0) -> list[int]:
    """Conformal risk control on losses made monotone along the path."""
    monotone = np.maximum.accumulate(np.maximum(losses, 0), axis=1)
    inflated = (monotone.sum(axis=0) + max_loss) / (len(losses) + 1)
    return [last_before_failure(inflated <= epsilon) for epsilon in epsilons]


def hoeffding_bentkus(mean: float, n: int, epsilon: float) -> float:
    """P-value of "the risk is at least ε", for the mean of n losses in [0, 1]."""
    low = min(mean, epsilon)
    distance = (1 - low) * np.log((1 - low) / (1 - epsilon))
    if low > 0:
        distance += low * np.log(low / epsilon)
    bentkus = np.e * stats.binom.cdf(np.ceil(n * mean), n, epsilon)
    return float(min(1.0, np.exp(-n * distance), bentkus))


def ltt(losses: Floats, epsilons: Floats, delta: float, max_loss: float = 1.0) -> list[int]:
    """Learn-then-Test: test one setting after the other, up to the first failure."""
    n, means = len(losses), losses.mean(axis=0) / max_loss
    chosen = []
    for epsilon in epsilons:
        last = 0
        while last + 1 < len(means):
            if hoeffding_bentkus(means[last + 1], n, epsilon / max_loss) > delta:
                break
            last += 1
        chosen.append(last)
    return chosen


def ltt_at_once(losses: Floats, epsilons: Floats, delta: float, max_loss: float = 1.0) -> list[int]:
    """`ltt`, with the p-values of all settings computed at once."""
    n, means = len(losses), losses.mean(axis=0) / max_loss
    chosen = []
    for epsilon in epsilons / max_loss:
        low = np.minimum(means, epsilon)
        distance = special.rel_entr(low, epsilon) + special.rel_entr(1 - low, 1 - epsilon)
        bentkus = np.e * stats.binom.cdf(np.ceil(n * means), n, epsilon)
        chosen.append(last_before_failure(np.minimum(np.exp(-n * distance), bentkus) <= delta))
    return chosen
