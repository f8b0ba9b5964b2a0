"""Bounds that need only the sum and the sum of squares of the losses.

A p-value function takes the sums and the sums of squares at several settings, the number of samples
n, ε and the declared range of the losses.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from swiftsure.certify.bounds.base import BOUNDS, Bound, last_before_failure, smallest_certified
from swiftsure.curves.curve import RiskCurve
from swiftsure.losses import LossRange

__all__ = ["SummaryBound", "level_totals"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

STRETCH = 16
"""Number of settings whose p-values are computed at once."""

EVERY = slice(None)
"""All settings."""

PValue = Callable[[Floats, Floats, int, float, LossRange], Floats]


@dataclass(frozen=True)
class SummaryBound(Bound):
    """A bound that needs only the sum and the sum of squares of the losses."""

    p_of_summary: PValue | None = None
    p_of_pool: Callable[[Floats, int, float, int], Floats] | None = None

    def p_values(self, curve: RiskCurve, rows: Rows, epsilon: float, pool: int = 0) -> Floats:
        """Return a p-value for each setting, (K,)."""
        totals = level_totals(curve, rows)(epsilon, EVERY)
        return self._p(totals, len(rows), epsilon, curve.loss_range, pool)

    def select(
        self, curve: RiskCurve, rows: Rows, epsilons: Floats, delta: float, start: int, pool: int
    ) -> NDArray[np.int64]:
        """Walk the path by p-values, `STRETCH` settings at a time.

        They fall as ε rises, so each ε continues where the one before it stopped.
        """
        totals = level_totals(curve, rows)
        selected = np.empty(len(epsilons), np.int64)
        last = start - 1
        for j, epsilon in enumerate(epsilons):
            while last + 1 < curve.n_settings:
                ahead = slice(last + 1, last + 1 + STRETCH)
                ahead_totals = totals(float(epsilon), ahead)
                p = self._p(ahead_totals, len(rows), float(epsilon), curve.loss_range, pool)
                passed = last_before_failure(p <= delta, 0) + 1
                last += passed
                if passed < len(p):
                    break
            selected[j] = last
        return selected

    def upper(self, curve: RiskCurve, rows: Rows, setting: int, delta: float, pool: int) -> float:
        """Invert the p-value, which falls as ε grows, by bisection."""
        totals, here = level_totals(curve, rows), slice(setting, setting + 1)

        def certified(epsilon: float) -> bool:
            p = self._p(totals(epsilon, here), len(rows), epsilon, curve.loss_range, pool)
            return bool(p[0] <= delta)

        return smallest_certified(certified, curve.loss_range)

    def _p(
        self, totals: tuple[Floats, Floats], n: int, epsilon: float, declared: LossRange, pool: int
    ) -> Floats:
        if pool and self.p_of_pool is not None:
            return self.p_of_pool(totals[0], n, epsilon, pool)
        if self.p_of_summary is None:
            raise TypeError(f"bound {self.name!r} has no p-value")
        return np.minimum(1.0, self.p_of_summary(*totals, n, epsilon, declared))


def level_totals(curve: RiskCurve, rows: Rows) -> Callable[[float, slice], tuple[Floats, Floats]]:
    """Return a function from ε and settings to the sums and sums of squares that are tested at ε.

    They depend on ε only for averages over samples of groups, because groups are filled up to the
    largest size with losses of ε; see `Sampling.applied`.
    """
    sums, squares = curve.totals(rows)
    counted = curve.units.in_tests
    if counted is None:
        return lambda _, settings: (sums[settings], squares[settings])
    missing = 1.0 - counted[rows]  # (n, 1), or (n, K)
    crossed = (missing * curve.losses(rows)).sum(axis=0)
    filled = np.broadcast_to(missing.sum(axis=0), crossed.shape)
    filled_squares = np.broadcast_to((missing * missing).sum(axis=0), crossed.shape)

    def totals(epsilon: float, settings: slice) -> tuple[Floats, Floats]:
        more = 2.0 * epsilon * crossed[settings] + epsilon**2 * filled_squares[settings]
        return sums[settings] + epsilon * filled[settings], squares[settings] + more

    return totals


def _count(sums: Floats, high: float) -> Floats:
    """Return ⌈sum / B⌉, with a tolerance for floating-point error."""
    return np.maximum(0.0, np.ceil(sums / high * (1 - 1e-14) - 1e-12))


def binomial_p(sums: Floats, _: Floats, n: int, epsilon: float, __: LossRange) -> Floats:
    """Return P(Binomial(n, ε) ≤ number of losses)."""
    return np.asarray(special.bdtr(np.rint(sums), n, epsilon))


def binomial_pool_p(sums: Floats, n: int, epsilon: float, pool: int) -> Floats:
    """Return P(at most this many losses) for the fewest losses that make the pool's risk ε."""
    from scipy.stats import hypergeom  # a slow import, rarely needed

    bad = int(np.ceil(pool * epsilon * (1 - 1e-14)))
    return np.asarray(hypergeom.cdf(np.rint(sums), pool, bad, n))


def hoeffding_p(sums: Floats, _: Floats, n: int, epsilon: float, declared: LossRange) -> Floats:
    """Return exp(−2 n (ε − mean)² / width²)."""
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
    risk = epsilon / declared.high
    mean = np.clip(sums / (n * declared.high), 0.0, risk)  # sums of 0 may be rounded below 0
    distance = special.rel_entr(mean, risk) + special.rel_entr(1 - mean, 1 - risk)
    hoeffding: Floats = np.exp(-n * distance)
    return np.minimum(hoeffding, bentkus_p(sums, squares, n, epsilon, declared))


def empirical_bernstein_p(
    sums: Floats, squares: Floats, n: int, epsilon: float, declared: LossRange
) -> Floats:
    """Return p such that mean + √(2 V t / n) + 7 width t / (3 (n − 1)) = ε with t = log(2/p).

    Maurer and Pontil's bound, with V the sample variance.
    """
    if n < 2:
        return np.ones_like(sums)
    mean = sums / n
    variance = np.maximum(0.0, (squares - n * mean**2) / (n - 1))
    slack = np.maximum(0.0, epsilon - mean)
    linear = 7.0 * (declared.high - declared.low) / (3.0 * (n - 1))
    root = np.sqrt(2.0 * variance / n)
    t = ((np.sqrt(root**2 + 4.0 * linear * slack) - root) / (2.0 * linear)) ** 2
    return np.minimum(1.0, 2.0 * np.exp(-t))


BOUNDS.register(
    SummaryBound(
        "binomial",
        needs="binary",
        pools=True,
        monotone=True,
        p_of_summary=binomial_p,
        p_of_pool=binomial_pool_p,
    )
)
BOUNDS.register(SummaryBound("hoeffding", weighs=True, monotone=True, p_of_summary=hoeffding_p))
for _name, _p in (("bentkus", bentkus_p), ("hoeffding_bentkus", hoeffding_bentkus_p)):
    BOUNDS.register(SummaryBound(_name, "non-negative", monotone=True, p_of_summary=_p))
BOUNDS.register(
    SummaryBound("empirical_bernstein", weighs=True, p_of_summary=empirical_bernstein_p)
)
