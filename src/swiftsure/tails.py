"""Tail probabilities: p-values of "the risk is at least ε" from sums of losses and of squares.

Each takes the sums at several settings, the number of samples n, ε and the declared range.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import special

from swiftsure.losses import LossRange

__all__ = [
    "bentkus_p",
    "binomial_p",
    "binomial_pool_p",
    "empirical_bernstein_p",
    "hoeffding_bentkus_p",
    "hoeffding_p",
]

Floats = NDArray[np.float64]


def _count(sums: Floats, high: float) -> Floats:
    """Number of full losses that a sum amounts to, rounded up past what rounding may have added."""
    return np.maximum(0.0, np.ceil(sums / high * (1 - 1e-14) - 1e-12))


def binomial_p(sums: Floats, _: Floats, n: int, epsilon: float, __: LossRange) -> Floats:
    """Return P(Binomial(n, ε) ≤ number of losses)."""
    return np.asarray(special.bdtr(np.rint(sums), n, epsilon))


def binomial_pool_p(sums: Floats, n: int, epsilon: float, pool: int) -> Floats:
    """P(as few losses or fewer) if the pool held the least number that makes its risk reach ε."""
    from scipy.stats import hypergeom  # a heavy import, and rarely needed

    bad = int(np.ceil(pool * epsilon * (1 - 1e-14)))
    return np.asarray(hypergeom.cdf(np.rint(sums), pool, bad, n))


def hoeffding_p(sums: Floats, _: Floats, n: int, epsilon: float, declared: LossRange) -> Floats:
    """exp(−2 n (ε − mean)² / width²)."""
    below = np.maximum(0.0, epsilon - sums / n) / (declared.high - declared.low)
    return np.exp(-2.0 * n * below**2)


def bentkus_p(sums: Floats, _: Floats, n: int, epsilon: float, declared: LossRange) -> Floats:
    """Return e P(Binomial(n, ε / B) ≤ ⌈sum / B⌉)."""
    tail = special.bdtr(_count(sums, declared.high), n, epsilon / declared.high)
    return np.minimum(1.0, np.e * np.asarray(tail))


def hoeffding_bentkus_p(
    sums: Floats, squares: Floats, n: int, epsilon: float, declared: LossRange
) -> Floats:
    """Return the smaller of Hoeffding's bound in its relative-entropy form and Bentkus's."""
    level = epsilon / declared.high
    mean = np.clip(sums / (n * declared.high), 0.0, level)  # sums of 0 may be off by a rounding
    distance = special.rel_entr(mean, level) + special.rel_entr(1 - mean, 1 - level)
    hoeffding: Floats = np.exp(-n * distance)
    return np.minimum(hoeffding, bentkus_p(sums, squares, n, epsilon, declared))


def empirical_bernstein_p(
    sums: Floats, squares: Floats, n: int, epsilon: float, declared: LossRange
) -> Floats:
    """Solve mean + √(2 V t / n) + 7 width t / (3 (n − 1)) = ε for t = log(2/p) (Maurer, Pontil)."""
    if n < 2:
        return np.ones_like(sums)
    mean = sums / n
    variance = np.maximum(0.0, (squares - n * mean**2) / (n - 1))
    slack = np.maximum(0.0, epsilon - mean)
    linear = 7.0 * (declared.high - declared.low) / (3.0 * (n - 1))
    root = np.sqrt(2.0 * variance / n)
    t = ((np.sqrt(root**2 + 4.0 * linear * slack) - root) / (2.0 * linear)) ** 2
    return np.minimum(1.0, 2.0 * np.exp(-t))
