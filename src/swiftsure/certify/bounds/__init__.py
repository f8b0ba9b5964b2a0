"""Bounds: each has a test of whether a risk is at most ε, a p-value, and an upper bound.

Selection uses only the test. Upper bounds invert the tests and are for display.

| module | bounds | what they compute from |
|---|---|---|
| `counting` | binomial, Hoeffding, Bentkus, empirical Bernstein | sum and sum of squares |
| `trinomial` | the exact test for losses of −1, 0 and 1 | the count of each |
| `betting` | WSR, STaR | individual losses, in order |
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.certify.bounds.base import BOUNDS, Bound
from swiftsure.certify.bounds.betting import BettingBound
from swiftsure.certify.bounds.counting import SummaryBound
from swiftsure.certify.bounds.trinomial import TrinomialBound
from swiftsure.curves.curve import RiskCurve
from swiftsure.losses import LossRange

__all__ = [
    "BOUNDS",
    "BettingBound",
    "Bound",
    "SummaryBound",
    "TrinomialBound",
    "auto",
    "certify",
    "minimum_samples",
    "p_value",
    "resolve",
    "upper_bound",
]


TRINOMIAL_LARGEST = 50_000
"""Largest n for which "auto" uses the exact trinomial test, whose cut-off then takes seconds.

Above it, STaR is almost as powerful.
"""


def auto(loss_range: LossRange, n: int | None = None, pool: int | None = None) -> Bound:
    """Return the tightest bound for a declared loss range and a number of samples.

    Exact tests for losses of 0 and 1, and of −1, 0 and 1 (0-1 gaps); otherwise STaR. The choice
    does not depend on the observed losses.
    """
    if loss_range.binary:
        return BOUNDS["binomial"]
    few = n is None or n <= TRINOMIAL_LARGEST
    return BOUNDS["trinomial" if loss_range.ternary and few and pool is None else "star"]


def resolve(
    bound: str, loss_range: LossRange, n: int | None = None, pool: int | None = None
) -> Bound:
    """Return a bound by name; raise if it is not valid for the declared losses."""
    if bound == "auto":
        return auto(loss_range, n, pool)
    chosen = BOUNDS[checks.choice("bound", bound, ["auto", *BOUNDS])]
    chosen.refuse(loss_range)
    return chosen


def refuse_weights(bound: Bound, curve: RiskCurve, pool: int | None = None) -> None:
    """Raise if units of a curve count differently, which the bound or a finite pool cannot do."""
    if curve.units.in_tests is None:
        return
    if not bound.weighs:
        names = ", ".join(name for name, other in BOUNDS.items() if other.weighs)
        raise ValueError(
            f"`bound` '{bound.name}' cannot test a mean over units that count differently (groups"
            " by their samples, weights within groups or slices): its p-value is not monotone in ε"
            f" there. Use one of {names}."
        )
    if pool is not None:
        raise ValueError(
            "A finite population needs units that count the same: there is no test here of a"
            " weighted mean without replacement. Use `average='group'`."
        )


def certify(
    losses: ArrayLike,
    epsilon: float,
    delta: float = 0.1,
    *,
    bound: str = "auto",
    loss_range: LossRange | tuple[float, float] = (0, 1),
    pool: int | None = None,
) -> bool:
    """Return whether the losses certify that their mean risk is at most ε.

    **Guarantee**: if the risk is above ε, this is True with probability at most δ over the draw of
    the losses, for ε, δ and bound fixed beforehand.

    Parameters
    ----------
    losses : (n,)
        In an order that does not depend on their values (betting bounds).
    pool : int, optional
        Size of the finite pool that the losses were drawn from without replacement.

    Examples
    --------
    >>> certify([0.0] * 100, 0.05)
    True
    >>> certify([0.0] * 100, 0.01)
    False
    """
    chosen, curve, rows, size = _single(losses, bound, loss_range, pool)
    epsilon = checks.between("epsilon", epsilon, 0.0, curve.loss_range.high)
    checks.between("delta", delta, 0.0, 1.0)
    return bool(chosen.select(curve, rows, np.asarray([epsilon]), delta, 0, size)[0] == 0)


def p_value(
    losses: ArrayLike,
    epsilon: float,
    *,
    bound: str = "auto",
    loss_range: LossRange | tuple[float, float] = (0, 1),
    pool: int | None = None,
) -> float:
    """Return a p-value of the hypothesis that the risk is ε or more.

    **Guarantee**: if the risk is at least ε, P(p ≤ u) ≤ u for every u in (0, 1).

    Examples
    --------
    >>> round(p_value([0, 0, 0, 1], 0.5, loss_range=LossRange(0, 1, whole=True)), 4)
    0.3125
    """
    chosen, curve, rows, size = _single(losses, bound, loss_range, pool)
    epsilon = checks.between("epsilon", epsilon, 0.0, curve.loss_range.high)
    return float(chosen.p_values(curve, rows, epsilon, size)[0])


def upper_bound(
    losses: ArrayLike,
    delta: float = 0.1,
    *,
    bound: str = "auto",
    loss_range: LossRange | tuple[float, float] = (0, 1),
    pool: int | None = None,
) -> float:
    """Return a value that the risk exceeds with probability at most δ.

    **Guarantee**: P(risk ≤ bound) ≥ 1 − δ over the draw of the losses.

    Examples
    --------
    >>> round(upper_bound([0] * 100, 0.1, loss_range=LossRange(0, 1, whole=True)), 4)
    0.0228
    """
    chosen, curve, rows, size = _single(losses, bound, loss_range, pool)
    return chosen.upper(curve, rows, 0, checks.between("delta", delta, 0.0, 1.0), size)


def _single(
    losses: ArrayLike, bound: str, loss_range: LossRange | tuple[float, float], pool: int | None
) -> tuple[Bound, RiskCurve, NDArray[np.int64], int]:
    """Return the bound, a curve of one setting with these losses, its rows and the pool's size."""
    values = checks.numbers("losses", losses, np.float64)
    checks.of_shape("losses", values, {"n": None})
    declared = declared_for(bound, LossRange.of(loss_range))
    curve = RiskCurve.from_losses([0.0], values[:, None], loss_range=declared, relative=False)
    chosen = resolve(bound, declared, curve.n, pool)
    return chosen, curve, np.arange(curve.n), pool_size(pool, curve.n, chosen)


def minimum_samples(epsilon: float, delta: float, loss_range: LossRange) -> int | None:
    """Return how many samples are needed to certify ε even if every loss is 0.

    Non-negative losses are certified only if (1 − ε/B)ⁿ ≤ δ: fewer samples may all have loss 0 by
    chance, and these tests are not randomised. None for losses that can be negative, which may need
    fewer, and for ε outside (0, B).

    Examples
    --------
    >>> minimum_samples(0.01, 0.1, LossRange(0, 1))
    230
    """
    if loss_range.low < 0 or not 0 < epsilon < loss_range.high:
        return None
    return int(np.ceil(np.log(delta) / np.log1p(-epsilon / loss_range.high) * (1 - 1e-14)))


def declared_for(bound: str, declared: LossRange) -> LossRange:
    """Return the range, declared whole if the requested bound needs that.

    Requesting the binomial test declares losses in [0, 1] to be 0 or 1, and requesting the
    trinomial test declares those in [-1, 1] to be -1, 0 or 1; the values are then checked.
    """
    whole = {"binomial": (0.0, 1.0), "trinomial": (-1.0, 1.0)}.get(bound)
    if whole == (declared.low, declared.high):
        return LossRange(*whole, whole=True)
    return declared


def pool_size(pool: int | None, n: int, bound: Bound) -> int:
    """Return the size of a finite pool, 0 for none; raise if the bound does not support pools."""
    if pool is None:
        return 0
    if not bound.pools:
        names = ", ".join(name for name, other in BOUNDS.items() if other.pools)
        raise ValueError(f"`pool` must go with one of the bounds {names}, but got '{bound.name}'.")
    return checks.count("pool", pool, n)
