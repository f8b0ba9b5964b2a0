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

from swiftsure import _bets, _kernels, _trinomial, checks, tails
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

EVERY = slice(None)
"""All settings."""

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
    needs : {"any", "non-negative", "binary", "ternary"}
        Which losses it is valid for.
    weighs : bool
        Whether it can test averages over the samples of groups that differ in size: its p-value is
        then monotone in ε, at every setting.
    """

    name: str
    assumes: str
    needs: str = "any"
    uses_order: bool = False
    pools: bool = False
    weighs: bool = False

    def refuse(self, loss_range: LossRange) -> None:
        """Raise if the bound is not valid for losses of this declared range."""
        low, high = loss_range.low, loss_range.high
        if self.needs == "binary" and not loss_range.binary:
            raise ValueError(
                f"`bound` '{self.name}' needs losses declared 0/1, but these are declared to lie in"
                f" [{low:g}, {high:g}]; use 'star', or declare binary losses."
            )
        if self.needs == "ternary" and not loss_range.ternary:
            raise ValueError(
                f"`bound` '{self.name}' needs losses declared to be -1, 0 or 1, but these are"
                f" declared to lie in [{low:g}, {high:g}]; use 'star', or declare whole losses."
            )
        if self.needs == "non-negative" and low < 0:
            raise ValueError(
                f"`bound` '{self.name}' needs losses of at least 0, but these may be as low as"
                f" {low:g}; use 'star', or the zero-bounded risk (`zero_bounded=True`)."
            )

    @abstractmethod
    def p_values(self, curve: RiskCurve, rows: Rows, epsilon: float, pool: int = 0) -> Floats:
        """Return a p-value of "the risk is at least ε" for each setting, (K,)."""

    def passes(
        self, curve: RiskCurve, rows: Rows, epsilon: float, delta: float, pool: int = 0
    ) -> NDArray[np.bool_]:
        """Return whether each setting is certified on its own, (K,)."""
        return np.asarray(self.p_values(curve, rows, epsilon, pool) <= delta)

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
        totals = curve.level_totals(rows)(epsilon, EVERY)
        return self._p(totals, len(rows), epsilon, curve.loss_range, pool)

    def select(
        self, curve: RiskCurve, rows: Rows, epsilons: Floats, delta: float, start: int, pool: int
    ) -> NDArray[np.int64]:
        """Walk the path on p-values, a stretch at a time.

        They fall as ε rises, so each level goes on where the one before it stopped.
        """
        totals = curve.level_totals(rows)
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
        totals, here = curve.level_totals(rows), slice(setting, setting + 1)

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


@dataclass(frozen=True)
class TrinomialBound(Bound):
    """The exact test for losses of −1, 0 and 1, by how many there are of each."""

    def p_values(self, curve: RiskCurve, rows: Rows, epsilon: float, pool: int = 0) -> Floats:  # noqa: ARG002
        """Return a p-value for each setting, (K,)."""
        counts = zip(*(each.tolist() for each in self._counts(curve, rows)), strict=True)
        return np.asarray([_trinomial.p_value(b, c, len(rows), epsilon) for b, c in counts])

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
        return np.asarray(b <= _trinomial.certified_counts(len(rows), epsilon, delta)[b + c])

    def select(
        self,
        curve: RiskCurve,
        rows: Rows,
        epsilons: Floats,
        delta: float,
        start: int,
        pool: int,  # noqa: ARG002
    ) -> NDArray[np.int64]:
        """Walk the path for each level: p-values need not fall as ε grows."""
        b, c = self._counts(curve, rows)
        tests = (_trinomial.certified_counts(len(rows), float(e), delta) for e in epsilons)
        return np.asarray([last_before_failure(b <= test[b + c], start) for test in tests])

    def upper(self, curve: RiskCurve, rows: Rows, setting: int, delta: float, pool: int) -> float:  # noqa: ARG002
        """Return an upper bound of the risk at a setting."""
        b, c = (int(each[setting]) for each in self._counts(curve, rows))
        return _trinomial.upper_bound(b, c, len(rows), delta)

    @staticmethod
    def _counts(curve: RiskCurve, rows: Rows) -> tuple[Rows, Rows]:
        """Return how many losses are +1, and how many −1, at each setting."""
        sums, squares = (np.rint(each).astype(np.int64) for each in curve.totals(rows))
        return (squares + sums) // 2, (squares - sums) // 2


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
        if curve.weights is not None:
            return self._select_weighted(curve, rows, epsilons, delta, start)
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

    def passes(
        self, curve: RiskCurve, rows: Rows, epsilon: float, delta: float, pool: int = 0
    ) -> NDArray[np.bool_]:
        """Return whether each setting is certified on its own, (K,): one bet per setting."""

        def certified(setting: int) -> bool:
            return self._deficit(curve, rows, setting, epsilon, delta, 1 / delta, pool) <= 0

        return np.asarray([certified(setting) for setting in range(curve.n_settings)])

    def _select_weighted(
        self, curve: RiskCurve, rows: Rows, epsilons: Floats, delta: float, start: int
    ) -> NDArray[np.int64]:
        selected = np.empty(len(epsilons), np.int64)
        last = start - 1
        for j, epsilon in enumerate(epsilons):
            while last + 1 < curve.n_settings:
                if not self._deficit(curve, rows, last + 1, epsilon, delta, 1 / delta, 0) <= 0:
                    break
                last += 1
            selected[j] = last
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
        if curve.weights is not None:
            groups = curve._losses.values, curve.weights, rows
            test = delta, goal, curve.loss_range.high, self.star
            return float(_bets.log_deficit_weighted(*groups, setting, epsilon, *test))
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
        TrinomialBound(
            "trinomial", f"{_IID}; losses of -1, 0 or 1; exact whatever their order", "ternary"
        ),
        SummaryBound(
            "hoeffding", f"{_IID}; bounded losses", weighs=True, p_of_summary=tails.hoeffding_p
        ),
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
            weighs=True,
            p_of_summary=tails.empirical_bernstein_p,
        ),
        BettingBound(
            "wsr",
            f"{_IID}, in an order fixed beforehand; losses of at most B",
            uses_order=True,
            pools=True,
            weighs=True,
            star=False,
        ),
        BettingBound(
            "star",
            f"{_IID}, in an order fixed beforehand; losses of at most B",
            uses_order=True,
            pools=True,
            weighs=True,
            star=True,
        ),
    )
}
"""Bounds by name."""


TRINOMIAL_LARGEST = 50_000
"""Samples up to which "auto" is the exact trinomial test; finding its cut-off then takes seconds.

Beyond, STaR loses little against it.
"""


def auto(loss_range: LossRange, n: int | None = None, pool: int | None = None) -> Bound:
    """Return the tightest bound for what the loss declares, and for the number of samples.

    Exact tests for losses of 0 and 1, and of −1, 0 and 1 (0-1 gaps); otherwise STaR. Nothing that
    was observed plays a part.
    """
    if loss_range.binary:
        return BOUNDS["binomial"]
    few = n is None or n <= TRINOMIAL_LARGEST
    return BOUNDS["trinomial" if loss_range.ternary and few and pool is None else "star"]


def resolve(
    bound: str, loss_range: LossRange, n: int | None = None, pool: int | None = None
) -> Bound:
    """Return a bound by name, refused if it is not valid for the declared losses."""
    if bound == "auto":
        return auto(loss_range, n, pool)
    chosen = BOUNDS[checks.known("bound", bound, ["auto", *BOUNDS])]
    chosen.refuse(loss_range)
    return chosen


def refuse_weights(bound: Bound, curve: RiskCurve, pool: int | None = None) -> None:
    """Raise if a curve averages over the samples of groups, and the bound or a pool cannot."""
    if curve.weights is None:
        return
    if not bound.weighs:
        names = ", ".join(name for name, other in BOUNDS.items() if other.weighs)
        raise ValueError(
            f"`bound` '{bound.name}' does not go with `average='sample'` of groups: its p-value is"
            f" not monotone in ε for groups that differ in size. Use one of {names}."
        )
    if pool is not None:
        raise ValueError(
            "`pool` does not go with `average='sample'` of groups; use `average='group'`."
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
    chosen = resolve(bound, declared, curve.n, pool)
    return curve, chosen, pool_size(pool, curve.n, chosen)


def declared_for(bound: str, declared: LossRange) -> LossRange:
    """Return the range, declared whole where the bound asked for needs that.

    Requesting the binomial test declares losses in [0, 1] to be 0 or 1, and requesting the
    trinomial test declares those in [-1, 1] to be -1, 0 or 1; the values are then checked.
    """
    whole = {"binomial": (0.0, 1.0), "trinomial": (-1.0, 1.0)}.get(bound)
    if whole == (declared.low, declared.high):
        return LossRange(*whole, whole=True)
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
