"""A confidence interval for the risk of a stream that is valid at every moment.

Let X lie in [0, 1] with mean m given the past. Then E[exp(λX)] ≤ exp(m(exp(λ) - 1)) for every λ, as
for a Poisson variable. So with θ = exp(λ), S the sum of the X and V the sum of their means,
θ^S exp(-V(θ - 1)) does not grow on average. Mixing θ over a gamma distribution with shape and rate
`PRIOR` keeps this true and gives

    M(V) = exp(V) PRIOR^PRIOR Γ(PRIOR + S) / (Γ(PRIOR) (PRIOR + V)^(PRIOR + S)).

By Ville's inequality, M at the true V ever reaches 1/α with probability at most α. The V with
M(V) < 1/α form an interval, because log M is convex with its minimum, at most 0, at V = S.
"""

import math

from scipy.optimize import brentq

from swiftsure._lib import checks
from swiftsure.losses import LossRange

__all__ = ["risk_interval"]

PRIOR = 5.0
"""Tightest where the expected sum of losses is a few times this, so for some tens of errors."""


def risk_interval(
    n: int, total: float, loss_range: LossRange | tuple[float, float], alpha: float = 0.05
) -> tuple[float, float]:
    """Return an interval for the mean risk of n losses with this sum.

    Parameters
    ----------
    n : int
        Number of losses; 0 gives the whole range.
    total : float
        Sum of the losses.
    loss_range : (low, high)
        Range of each loss. The interval is tight if most losses are at its low end, so for losses
        that are rarely positive, and wide for gaps, whose range is symmetric.
    alpha : float
        Probability that the interval ever misses.

    Notes
    -----
    **Guarantee.** Let mᵢ be the mean of loss i given the past. With probability at least 1 - α the
    interval contains (m₁ + … + mₙ)/n at every n at once, however often one looks and whether or
    not the risk changes.

    Examples
    --------
    >>> low, high = risk_interval(1000, 20.0, (0, 1))
    >>> print(f"{low:.4f} to {high:.4f}")
    0.0086 to 0.0365
    """
    within = LossRange.of(loss_range)
    checks.between("alpha", alpha, 0.0, 1.0)
    if n == 0:
        return within.low, within.high
    width = within.high - within.low
    seen = min(max((total - n * within.low) / width, 0.0), float(n))
    needed = math.log(1 / alpha)

    def excess(expected: float) -> float:
        gain = PRIOR * math.log(PRIOR) + math.lgamma(PRIOR + seen) - math.lgamma(PRIOR)
        return expected + gain - (PRIOR + seen) * math.log(PRIOR + expected) - needed

    least = brentq(excess, 0.0, seen) if excess(0.0) > 0 else 0.0
    most = brentq(excess, seen, float(n)) if excess(float(n)) > 0 else float(n)
    return within.low + width * least / n, within.low + width * most / n
