"""Bounds: is a risk at most ε? Each offers the test, a p-value, and an upper bound.

Selection only ever asks whether a risk is certified at ε, so a bound's heart is its test. Upper
bounds invert the tests and are for display.

Two kinds: those that need only the sum and the sum of squares of the losses, and bets, which see
the losses one by one. A bet's wealth has mean at most 1 wherever the risk is ε or more, so that it
then reaches 1/δ with probability at most δ (Ville's inequality).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure import _bets, _kernels, checks, tails
from swiftsure.curves import RiskCurve
from swiftsure.losses import LossRange

__all__ = [
    "BOUNDS",
    "Bound",
    "auto",
    "certify",
    "minimum_samples",
    "p_value",
    "resolve",
    "upper_bound",
]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

WSR_LEVEL = 0.1
"""The one fixed level that the bets behind WSR's p-value are tuned for."""

STRETCH = 16
"""Settings whose p-values are computed at once."""

OUT_OF_REACH = 1e300
"""A wealth that no bet reaches, so that it runs through all samples."""


@dataclass(frozen=True)
class Bound(ABC):
    """A way to certify that a risk is at most ε.

    Attributes
    ----------
    name : str
    assumes : str
        What its validity rests on, for certificates.
    needs : {"any", "non-negative", "binary"}
        Which losses it is valid for.
    """

    name: str
    assumes: str
    needs: str = "any"
    uses_order: bool = False
    pools: bool = False

    def refuse(self, loss_range: LossRange) -> None:
        """Raise if the bound is not valid for losses of this declared range."""
        low, high = loss_range.low, loss_range.high
        if self.needs == "binary" and not loss_range.binary:
            raise ValueError(
                f"`bound` '{self.name}' needs losses declared 0/1, but these are declared to lie in"
                f" [{low:g}, {high:g}]; use 'star', or declare binary losses."
            )
        if self.needs == "non-negative" and low < 0:
            raise ValueError(
                f"`bound` '{self.name}' needs losses of at least 0, but these may be as low as"
                f" {low:g}; use 'star', or the zero-bounded risk (`zero_bounded=True`)."
            )

    @abstractmethod
    def p_values(self, curve: RiskCurve, rows: Rows, epsilon: float, pool: int = 0) -> Floats:
        """Return a p-value of "the risk is at least ε" for each setting, (K,)."""

    @abstractmethod
    def select(
        self, curve: RiskCurve, rows: Rows, epsilons: Floats, delta: float, start: int, pool: int
    ) -> NDArray[np.int64]:
        """Walk the path from `start` while settings are certified; last success for each level.

        `epsilons` rise; `start - 1` stands for no success.
        """

    @abstractmethod
    def upper(self, curve: RiskCurve, rows: Rows, setting: int, delta: float, pool: int) -> float:
        """Return a value that the risk at a setting exceeds with probability at most δ."""


PValue = Callable[[Floats, Floats, int, float, LossRange], Floats]


@dataclass(frozen=True)
class SummaryBound(Bound):
    """A bound that needs only the sum and the sum of squares of the losses."""

    p_of_summary: PValue | None = None
    p_of_pool: Callable[[Floats, int, float, int], Floats] | None = None

    def p_values(self, curve: RiskCurve, rows: Rows, epsilon: float, pool: int = 0) -> Floats:
        """Return a p-value for each setting, (K,)."""
        return self._p(curve.totals(rows), len(rows), epsilon, curve.loss_range, pool)

    def select(
        self, curve: RiskCurve, rows: Rows, epsilons: Floats, delta: float, start: int, pool: int
    ) -> NDArray[np.int64]:
        """Walk the path on p-values, a stretch at a time.

        They fall as ε rises, so each level goes on where the one before it stopped.
        """
        sums, squares = curve.totals(rows)
        selected = np.empty(len(epsilons), np.int64)
        last = start - 1
        for j, epsilon in enumerate(epsilons):
            while last + 1 < len(sums):
                ahead = slice(last + 1, last + 1 + STRETCH)
                totals = sums[ahead], squares[ahead]
                p = self._p(totals, len(rows), float(epsilon), curve.loss_range, pool)
                passed = last_before_failure(p <= delta, 0) + 1
                last += passed
                if passed < len(p):
                    break
            selected[j] = last
        return selected

    def upper(self, curve: RiskCurve, rows: Rows, setting: int, delta: float, pool: int) -> float:
        """Invert the p-value, which falls as ε grows, by bisection."""
        sums, squares = curve.totals(rows)
        summary = (sums[setting : setting + 1], squares[setting : setting + 1])

        def certified(epsilon: float) -> bool:
            p = self._p(summary, len(rows), epsilon, curve.loss_range, pool)
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


@dataclass(frozen=True)
class BettingBound(Bound):
    """A bet against "the risk is at least ε", sample by sample; only B bounds the losses."""

    star: bool = True

    def p_values(self, curve: RiskCurve, rows: Rows, epsilon: float, pool: int = 0) -> Floats:
        """Return a p-value for each setting, (K,)."""
        p = [self._p(curve, rows, k, epsilon, pool) for k in range(curve.n_settings)]
        return np.asarray(p)

    def select(
        self, curve: RiskCurve, rows: Rows, epsilons: Floats, delta: float, start: int, pool: int
    ) -> NDArray[np.int64]:
        """Walk the path with one bet a setting, each stopped as soon as it is decided."""
        seen = curve._losses, _kernels.firing_levels(curve._losses), rows
        test = delta, curve.loss_range.high, self.star
        if pool:  # whether its bets are monotone in ε is not known: each level walks from the start
            single = np.split(epsilons, len(epsilons))
            walks = [_bets.select_by_betting(*seen, level, *test, pool, start) for level in single]
            return np.concatenate(walks)
        selected: NDArray[np.int64]
        if curve.has_exits and len(rows) >= _bets.LONG:
            selected = _bets.select_side_by_side(*seen, epsilons, *test, start)
        else:
            selected = _bets.select_by_betting(*seen, epsilons, *test, 0, start)
        return selected

    def upper(self, curve: RiskCurve, rows: Rows, setting: int, delta: float, pool: int) -> float:
        """Invert the test, which is monotone in ε, by bisection."""

        def certified(epsilon: float) -> bool:
            return self._deficit(curve, rows, setting, epsilon, delta, 1 / delta, pool) <= 0

        return smallest_certified(certified, curve.loss_range)

    def _p(self, curve: RiskCurve, rows: Rows, setting: int, epsilon: float, pool: int) -> float:
        if not self.star:  # the largest wealth of bets tuned at one fixed level
            least = self._deficit(curve, rows, setting, epsilon, WSR_LEVEL, OUT_OF_REACH, pool)
            return float(min(1.0, np.exp(least - np.log(OUT_OF_REACH))))
        # STaR's tests are nested in δ, so the smallest δ that certifies is a p-value.
        low, high = -700.0, 0.0  # log δ
        while high - low > 1e-10:
            middle = 0.5 * (low + high)
            delta = float(np.exp(middle))
            certified = self._deficit(curve, rows, setting, epsilon, delta, 1 / delta, pool) <= 0
            low, high = (low, middle) if certified else (middle, high)
        return float(np.exp(high))

    def _deficit(
        self,
        curve: RiskCurve,
        rows: Rows,
        setting: int,
        epsilon: float,
        delta: float,
        goal: float,
        pool: int,
    ) -> float:
        seen = curve._losses, _kernels.firing_levels(curve._losses), rows
        test = delta, goal, curve.loss_range.high, self.star
        return float(_bets.log_deficit(*seen, setting, epsilon, *test, pool))


def minimum_samples(epsilon: float, delta: float, loss_range: LossRange) -> int | None:
    """Return how many samples the tests here need to certify ε even if every loss is 0.

    Losses of 0 or more are certified only if (1 − ε/B)ⁿ ≤ δ: fewer samples may all have loss 0 by
    chance, and these tests are not randomised. None for losses that can be negative, which may need
    fewer.

    Examples
    --------
    >>> minimum_samples(0.01, 0.1, LossRange(0, 1))
    230
    """
    if loss_range.low < 0 or epsilon <= 0:
        return None
    return int(np.ceil(np.log(delta) / np.log1p(-epsilon / loss_range.high) * (1 - 1e-14)))


def last_before_failure(passes: NDArray[np.bool_], start: int) -> int:
    """Return the last index of the run of successes that begins at `start`; `start - 1` if none."""
    failures = np.flatnonzero(~passes[start:])
    return start - 1 + (int(failures[0]) if failures.size else len(passes) - start)


def smallest_certified(certified: Callable[[float], bool], loss_range: LossRange) -> float:
    """Return the smallest ε that is certified, from above; the bound itself if none is."""
    low, high = loss_range.low, loss_range.high
    if not certified(np.nextafter(high, low)):
        return high
    while high - low > 1e-9 * (loss_range.high - loss_range.low):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if certified(middle) else (middle, high)
    return high


_IID = "independent samples of one distribution"

BOUNDS: dict[str, Bound] = {
    bound.name: bound
    for bound in (
        SummaryBound(
            "binomial",
            f"{_IID}; losses of 0 or 1; exact",
            needs="binary",
            pools=True,
            p_of_summary=tails.binomial_p,
            p_of_pool=tails.binomial_pool_p,
        ),
        SummaryBound("hoeffding", f"{_IID}; bounded losses", p_of_summary=tails.hoeffding_p),
        SummaryBound(
            "bentkus", f"{_IID}; losses in [0, B]", "non-negative", p_of_summary=tails.bentkus_p
        ),
        SummaryBound(
            "hoeffding_bentkus",
            f"{_IID}; losses in [0, B]",
            "non-negative",
            p_of_summary=tails.hoeffding_bentkus_p,
        ),
        SummaryBound(
            "empirical_bernstein",
            f"{_IID}; bounded losses",
            p_of_summary=tails.empirical_bernstein_p,
        ),
        BettingBound(
            "wsr",
            f"{_IID}, in an order fixed beforehand; losses of at most B",
            uses_order=True,
            pools=True,
            star=False,
        ),
        BettingBound(
            "star",
            f"{_IID}, in an order fixed beforehand; losses of at most B",
            uses_order=True,
            pools=True,
            star=True,
        ),
    )
}
"""Bounds by name."""


def auto(loss_range: LossRange) -> Bound:
    """Return the tightest bound for what the loss declares: exact binomial, or STaR."""
    return BOUNDS["binomial" if loss_range.binary else "star"]


def resolve(bound: str, loss_range: LossRange) -> Bound:
    """Return a bound by name, refused if it is not valid for the declared losses."""
    if bound == "auto":
        return auto(loss_range)
    chosen = BOUNDS[checks.known("bound", bound, ["auto", *BOUNDS])]
    chosen.refuse(loss_range)
    return chosen


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
    curve, chosen, size = _single(losses, bound, loss_range, pool)
    level, delta = _levels(epsilon, delta, curve.loss_range)
    last = chosen.select(curve, np.arange(curve.n), np.asarray([level]), delta, 0, size)
    return bool(last[0] == 0)


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
    curve, chosen, size = _single(losses, bound, loss_range, pool)
    level, _ = _levels(epsilon, 0.5, curve.loss_range)
    return float(chosen.p_values(curve, np.arange(curve.n), level, size)[0])


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
    curve, chosen, size = _single(losses, bound, loss_range, pool)
    _, delta = _levels(curve.loss_range.high / 2, delta, curve.loss_range)
    return chosen.upper(curve, np.arange(curve.n), 0, delta, size)


def _single(
    losses: ArrayLike, bound: str, loss_range: LossRange | tuple[float, float], pool: int | None
) -> tuple[RiskCurve, Bound, int]:
    values = checks.numbers("losses", losses, np.float64)
    checks.of_shape("losses", values, {"n": None})
    declared = declared_for(bound, LossRange.of(loss_range))
    curve = RiskCurve.from_losses([0.0], values[:, None], loss_range=declared, relative=False)
    chosen = resolve(bound, declared)
    return curve, chosen, pool_size(pool, curve.n, chosen)


def declared_for(bound: str, declared: LossRange) -> LossRange:
    """Return the range, made whole where asking for the binomial test declares it.

    Who asks for the binomial test of losses in [0, 1] says that they are 0 or 1; the values are
    then checked to be so.
    """
    if bound == "binomial" and (declared.low, declared.high) == (0.0, 1.0):
        return LossRange(0, 1, whole=True)
    return declared


def pool_size(pool: int | None, n: int, bound: Bound) -> int:
    """Return the size of a finite pool, 0 for none, checked against the bound."""
    if pool is None:
        return 0
    if not bound.pools:
        names = ", ".join(name for name, other in BOUNDS.items() if other.pools)
        raise ValueError(f"`pool` must go with one of the bounds {names}, but got '{bound.name}'.")
    return checks.count("pool", pool, n)


def _levels(epsilon: float, delta: float, loss_range: LossRange) -> tuple[float, float]:
    return (
        checks.between("epsilon", epsilon, 0.0, loss_range.high),
        checks.between("delta", delta, 0.0, 1.0),
    )
