"""Exact test of "the risk is at least ε" for losses of −1, 0 and 1, such as 0-1 gaps.

Only the counts matter: b losses of +1 and c of −1 among n. They are ordered by Tango's score,

    z(b, c) = (b − c − nε) / √(n (2q + ε − ε²)),

where q is the maximum-likelihood estimate of P(−1) under P(+1) = P(−1) + ε. The test certifies the
counts with z ≤ z*. This region is a staircase: a point stays in it when b falls or c grows. Hence,
over all distributions with a mean of ε or more, its probability is largest where P(+1) = q + ε and
P(−1) = q for some q; and for q in [q₁, q₂] it is at most that of P(+1) = q₁ + ε and P(−1) = q₂.
Branch and bound over q turns this into a proof that the region's probability is at most δ.

The order of the samples does not matter.

References
----------
Tango (1998), Equivalence test and confidence interval for the difference in proportions for the
paired-sample design. Berger and Boos (1994), P values maximized over a confidence set for the
nuisance parameter.
"""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import special

from swiftsure._lib.compile import compiled
from swiftsure._lib.files import write_text
from swiftsure.certify.bounds.base import BOUNDS, Bound, last_before_failure
from swiftsure.curves.curve import RiskCurve

__all__ = ["TrinomialBound", "certified_counts", "p_value", "power", "upper_bound"]

Counts = NDArray[np.int64]
Rows = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDING = 1e-14
"""Largest error of a computed probability, per sample.

The logarithms of factorials have errors that grow with n; 2.3e-15 n was the largest error found for
n up to 50,000. Terms beyond 8 standard deviations add less than 1e-14.
"""

KEPT_FROM = 1000
"""Number of samples from which cut-offs are cached on disk; below, they take milliseconds."""

VERSION = 1
"""Version of the cut-offs on disk."""

POINT_STEP, CELL_STEP, FINE_STEP = 0.2, 0.1, 0.02
"""Steps in q, in standard deviations of the mean loss: of a search, of the first cells of a proof,
and of the cells of an upper bound."""


@dataclass(frozen=True)
class TrinomialBound(Bound):
    """The exact test for losses of −1, 0 and 1, based on the count of each."""

    def p_values(self, curve: RiskCurve, rows: Rows, epsilon: float, pool: int = 0) -> Floats:  # noqa: ARG002
        """Return a p-value for each setting, (K,)."""
        counts = zip(*(each.tolist() for each in self._counts(curve, rows)), strict=True)
        return np.asarray([p_value(b, c, len(rows), epsilon) for b, c in counts])

    def passes(
        self,
        curve: RiskCurve,
        rows: Rows,
        epsilon: float,
        delta: float,
        pool: int = 0,  # noqa: ARG002
    ) -> NDArray[np.bool_]:
        """Return whether each setting is certified on its own, (K,)."""
        b, c = self._counts(curve, rows)
        return np.asarray(b <= certified_counts(len(rows), epsilon, delta)[b + c])

    def select(
        self,
        curve: RiskCurve,
        rows: Rows,
        epsilons: Floats,
        delta: float,
        start: int,
        pool: int,  # noqa: ARG002
    ) -> NDArray[np.int64]:
        """Walk the path from the start for each ε: p-values need not fall as ε grows."""
        b, c = self._counts(curve, rows)
        tests = (certified_counts(len(rows), float(e), delta) for e in epsilons)
        return np.asarray([last_before_failure(b <= test[b + c], start) for test in tests])

    def upper(self, curve: RiskCurve, rows: Rows, setting: int, delta: float, pool: int) -> float:  # noqa: ARG002
        """Return an upper bound of the risk at a setting."""
        b, c = (int(each[setting]) for each in self._counts(curve, rows))
        return upper_bound(b, c, len(rows), delta)

    @staticmethod
    def _counts(curve: RiskCurve, rows: Rows) -> tuple[Rows, Rows]:
        """Return how many losses are +1, and how many −1, at each setting."""
        sums, squares = (np.rint(each).astype(np.int64) for each in curve.totals(rows))
        return (squares + sums) // 2, (squares - sums) // 2


@lru_cache(maxsize=4096)
def certified_counts(n: int, epsilon: float, delta: float) -> Counts:
    """Return the test's region: the largest certified b for each number of losses b + c.

    **Guarantee**: whatever the distribution of the losses, if its mean is ε or more, then
    P(b ≤ region[b + c]) ≤ δ.

    Returns
    -------
    region : (n + 1,)
        −1 where no b is certified.
    """
    cut = _kept_cut(n, epsilon, delta)
    if cut is None:
        cut = _proven_cut(n, epsilon, delta)
        _keep_cut(n, epsilon, delta, cut)
    region: Counts = staircase(n, epsilon, cut)
    region.setflags(write=False)
    return region


def _proven_cut(n: int, epsilon: float, delta: float) -> float:
    """Return a cut-off z* whose region is proven to have probability at most δ.

    If δ is so small that rounding errors prevent a proof, it is −∞, which certifies nothing.
    """
    factorials = _log_factorials(n)
    limit = delta - ROUNDING * (n + 1)
    slack = 0.001 if n < 1000 else 0.004  # a tighter bound takes a longer proof
    while limit > 0 and slack < 1:
        cut = _largest_cut(n, epsilon, delta * (1 - slack), factorials)
        if supremum(staircase(n, epsilon, cut), factorials, epsilon, limit, 1e-4) <= limit:
            return cut
        slack *= 2
    return -math.inf


def _largest_cut(n: int, epsilon: float, delta: float, factorials: NDArray[np.float64]) -> float:
    """Return about the largest z* whose region has probability at most δ on a grid of q."""

    def fits(cut: float) -> bool:
        region = staircase(n, epsilon, cut)
        return bool(largest_at_points(region, factorials, epsilon, delta) <= delta)

    center = float(special.ndtri(delta))
    low, high, step = center - 0.5, center + 0.5, 1.0
    while not fits(low):
        low, step = low - step, 2 * step
    while fits(high) and high < score(n, 0, n, epsilon):
        high, step = high + step, 2 * step
    while high - low > 2e-6:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@lru_cache(maxsize=4096)
def p_value(b: int, c: int, n: int, epsilon: float) -> float:
    """Return the smallest δ at which the test certifies these counts, up to one part in 1000."""
    region = staircase(n, epsilon, score(b, c, n, epsilon) + 1e-9)
    largest = supremum(region, _log_factorials(n), epsilon, 0.0, 1e-3)
    return float(min(1.0, largest + ROUNDING * (n + 1)))


@lru_cache(maxsize=4096)
def upper_bound(b: int, c: int, n: int, delta: float) -> float:
    """Return a value that the mean loss exceeds with probability at most δ.

    For fixed counts the p-values of the test need not fall as ε grows, so they cannot be inverted.
    Here counts are ordered once for all ε, by the ε at which their score is that of δ; with the
    order fixed, p-values do fall. P(−1) is searched only within a confidence interval, whose
    failure probability is subtracted from δ (Berger and Boos).
    """
    cut = float(special.ndtri(delta))
    outside = 1e-3 * delta
    least = float(special.betaincinv(c, n - c + 1, 0.5 * outside)) if c > 0 else 0.0
    most = float(special.betaincinv(c + 1, n - c, 1 - 0.5 * outside)) if c < n else 1.0
    low, high = -1.0, 1.0
    for _ in range(60):  # the score falls as ε grows
        middle = 0.5 * (low + high)
        low, high = (low, middle) if score(b, c, n, middle) <= cut else (middle, high)
    region = staircase(n, high, cut)
    if b > region[b + c]:
        return 1.0
    factorials = _log_factorials(n)
    allowed = delta - outside - ROUNDING * (n + 1)

    def within(epsilon: float) -> bool:
        return bool(largest_between(region, factorials, epsilon, least, most) <= allowed)

    # A mean below −most needs P(−1) > most, which is not searched: the condition would hold there.
    return _smallest(within, -most, high)


def _smallest(holds: Callable[[float], bool], floor: float, guess: float) -> float:
    """Return about the smallest value in (floor, 1) at which a condition holds; 1 if none does.

    The condition must be monotone above `floor`. It is never evaluated at `floor` or below.
    """
    step = 1e-3
    low = high = max(guess, floor + 1e-6)
    while low > floor and holds(low):
        low, step = max(floor, low - step), 2 * step
    while not holds(high):
        low, high, step = high, high + step, 2 * step
        if high >= 1.0:
            return 1.0
    while high - low > 1e-4 * max(abs(high), 1e-2):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def power(n: int, epsilon: float, delta: float, plus: float, minus: float) -> float:
    """Return the probability that the test certifies ε, for given P(+1) and P(−1)."""
    region = certified_counts(n, epsilon, delta)
    return float(probability(region, _log_factorials(n), plus, minus))


def _kept_cut(n: int, epsilon: float, delta: float) -> float | None:
    """Return the cut-off that an earlier run cached on disk; None if there is no valid one.

    The file is trusted like compiled code in a cache. A damaged one is detected: it does not hold a
    number, or its region is too large.
    """
    try:
        cut = float(_cut_file(n, epsilon, delta).read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):
        return None
    if not math.isfinite(cut):
        return None
    at_points = largest_at_points(staircase(n, epsilon, cut), _log_factorials(n), epsilon, delta)
    return cut if at_points <= delta else None


def _keep_cut(n: int, epsilon: float, delta: float, cut: float) -> None:
    """Cache a cut-off that took long to compute; failures to write are ignored."""
    if n >= KEPT_FROM:
        with suppress(OSError, RuntimeError):
            file = _cut_file(n, epsilon, delta)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, f"{cut!r}\n")


def _cut_file(n: int, epsilon: float, delta: float) -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"{n}_{epsilon.hex()}_{delta.hex()}"
    return Path(folder) / "swiftsure" / f"trinomial-{VERSION}" / name


@lru_cache(maxsize=8)
def _log_factorials(n: int) -> NDArray[np.float64]:
    return np.asarray(special.gammaln(np.arange(n + 2) + 1.0))


@compiled
def score(b, c, n, epsilon):  # type: ignore[no-untyped-def]
    """Return Tango's score of counts against "the mean is ε"."""
    rest = n - b - c
    linear = b * (1.0 - epsilon) + c * (1.0 - 3.0 * epsilon) - 2.0 * rest * epsilon
    root = math.sqrt(max(0.0, linear * linear + 8.0 * n * c * epsilon * (1.0 - epsilon)))
    q = min(max((linear + root) / (4.0 * n), 0.0, -epsilon), 0.5 * (1.0 - epsilon))
    return (b - c - n * epsilon) / math.sqrt(n * (2.0 * q + epsilon - epsilon * epsilon))


@compiled
def staircase(n, epsilon, cut):  # type: ignore[no-untyped-def]
    """Return the region of counts with a score of at most `cut`: the largest b for each b + c.

    It grows by 0 or 1 per step whatever the scores, which is all that the proof needs.
    """
    region = np.empty(n + 1, np.int64)
    largest = -1
    for count in range(n + 1):
        if score(largest + 1, count - largest - 1, n, epsilon) <= cut:
            largest += 1
        region[count] = largest
    return region


@compiled
def log_binomial(factorials, k, n, log_p, log_rest):  # type: ignore[no-untyped-def]
    """Return log P(Binomial(n, p) = k)."""
    ways = factorials[n] - factorials[k] - factorials[n - k]
    return ways + k * log_p + (n - k) * log_rest


@compiled
def binomial_cdf(factorials, k, n, p):  # type: ignore[no-untyped-def]
    """Return P(Binomial(n, p) ≤ k), summed over the shorter tail."""
    if k >= n:
        return 1.0
    if k < 0 or p >= 1.0:
        return 0.0
    if p <= 0.0:
        return 1.0
    log_p, log_rest = math.log(p), math.log1p(-p)
    total = 0.0
    if k < n * p:
        term = math.exp(log_binomial(factorials, k, n, log_p, log_rest))
        while term > 1e-18 * total and k >= 0:
            total += term
            term *= k * (1.0 - p) / ((n - k + 1) * p)
            k -= 1
        return total
    k += 1
    term = math.exp(log_binomial(factorials, k, n, log_p, log_rest))
    while term > 1e-18 * total and k <= n:
        total += term
        term *= (n - k) * p / ((k + 1) * (1.0 - p))
        k += 1
    return 1.0 - total


@compiled
def probability(region, factorials, plus, minus):  # type: ignore[no-untyped-def]
    """Return the probability of a region for P(+1) = plus and P(−1) = minus.

    This is the sum over d = b + c of P(d) P(b ≤ region[d] | d). From d to d + 1 the binomial CDF
    changes by one or two terms, so each step takes constant time.
    """
    n = region.size - 1
    either = min(1.0, plus + minus)
    if either <= 0.0:
        return 1.0 if region[0] >= 0 else 0.0
    share = min(1.0, plus / either)
    if either >= 1.0:
        return binomial_cdf(factorials, region[n], n, share)
    spread = 8.0 * math.sqrt(n * either * (1.0 - either))
    first = max(0, int(n * either - spread - 20.0))
    last = min(n, int(n * either + spread + 30.0))
    while first <= last and region[first] < 0:
        first += 1
    if first > last:
        return 0.0
    log_either, log_neither = math.log(either), math.log1p(-either)
    log_share = math.log(share) if share > 0.0 else -np.inf
    log_rest = math.log1p(-share) if share < 1.0 else -np.inf
    # If `either` is 1 up to rounding, the first weights underflow, and so would all later ones.
    while first < last and log_binomial(factorials, first, n, log_either, log_neither) < -600.0:
        first += 1
    weight = math.exp(log_binomial(factorials, first, n, log_either, log_neither))
    below = binomial_cdf(factorials, region[first], first, share)
    total = 0.0
    for d in range(first, last + 1):
        total += weight * below
        if d == last:
            break
        weight *= (n - d) / (d + 1) * (either / (1.0 - either))
        k = region[d]
        if share <= 0.0:  # b is always 0, and `below` stays 1
            continue
        if share >= 1.0:
            below = 1.0 if region[d + 1] > d else 0.0
            continue
        below -= share * math.exp(log_binomial(factorials, k, d, log_share, log_rest))
        if region[d + 1] > k:
            below += math.exp(log_binomial(factorials, k + 1, d + 1, log_share, log_rest))
    return total


@compiled
def next_q(q, n, epsilon, step, stop):  # type: ignore[no-untyped-def]
    """Return q advanced by `step` standard deviations of the mean loss."""
    return min(stop, q + step * math.sqrt((2.0 * q + epsilon) / n))


@compiled
def largest_at_points(region, factorials, epsilon, enough):  # type: ignore[no-untyped-def]
    """Return the largest probability of a region on a grid of q; stop if it exceeds `enough`."""
    n = region.size - 1
    q, stop = 0.0, 0.5 * (1.0 - epsilon)
    largest = probability(region, factorials, q + epsilon, q)
    while q < stop and largest <= enough:
        q = next_q(q, n, epsilon, POINT_STEP, stop)
        largest = max(largest, probability(region, factorials, q + epsilon, q))
    return largest


@compiled
def supremum(region, factorials, epsilon, limit, tolerance):  # type: ignore[no-untyped-def]
    """Return an upper bound on the probability of a region over all q, by branch and bound.

    It is `limit` if the largest probability is proven to be below that; otherwise it is at most
    1 + `tolerance` times the largest, or some value above `limit`.
    """
    n = region.size - 1
    stop = 0.5 * (1.0 - epsilon)
    highest = largest_at_points(region, factorials, epsilon, limit if limit > 0.0 else 1.0)
    pending = np.empty((128, 2))
    start = 0.0
    while start < stop:
        if 0.0 < limit < highest:
            return highest
        pending[0, 0], pending[0, 1] = start, next_q(start, n, epsilon, CELL_STEP, stop)
        start = pending[0, 1]
        count = 1
        while count > 0:
            count -= 1
            low, high = pending[count]
            most = probability(region, factorials, low + epsilon, high)
            if most > max(limit, highest * (1.0 + tolerance)):
                middle = 0.5 * (low + high)
                at_middle = probability(region, factorials, middle + epsilon, middle)
                highest = max(highest, at_middle)
                pending[count] = middle, high
                pending[count + 1] = low, middle
                count += 2
    return max(limit, highest * (1.0 + tolerance))


@compiled
def largest_between(region, factorials, epsilon, least, most):  # type: ignore[no-untyped-def]
    """Return an upper bound on the probability of a region over all q in [least, most]."""
    n = region.size - 1
    low, stop = max(least, -epsilon, 0.0), min(most, 0.5 * (1.0 - epsilon))
    largest = 0.0
    while low < stop:
        high = next_q(low, n, epsilon, FINE_STEP, stop)
        largest = max(largest, probability(region, factorials, max(0.0, low + epsilon), high))
        low = high
    return largest


BOUNDS.register(TrinomialBound("trinomial", "ternary", monotone=True))
