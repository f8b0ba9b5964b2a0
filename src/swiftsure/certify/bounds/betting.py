"""The betting bounds WSR and STaR: bets against "the risk is at least ε".

A bet sees the losses one by one. If the risk is ε or more, the mean of its wealth is at most 1, so
it reaches 1/δ with probability at most δ (Ville's inequality).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import kernels as _kernels
from swiftsure.certify.bounds import _bets
from swiftsure.certify.bounds.base import BOUNDS, Bound, smallest_certified
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.worst_share import followed

__all__ = ["BettingBound"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

WSR_DELTA = 0.1
"""The failure probability that the bets behind WSR's p-value are tuned for."""

MANY = 20_000
"""Above this many samples, upper bounds are only accurate to 3 % of 1/√n, to save passes."""

OUT_OF_REACH = 1e300
"""A goal that no bet reaches, so that it runs through all samples."""


@dataclass(frozen=True)
class BettingBound(Bound):
    """A bet against "the risk is at least ε", sample by sample; it needs only losses ≤ B."""

    star: bool = True

    def p_values(self, curve: RiskCurve, rows: Rows, epsilon: float, pool: int = 0) -> Floats:
        """Return a p-value for each setting, (K,)."""
        settings = range(curve.n_settings)
        return np.asarray([self._p(curve, rows, k, epsilon, pool) for k in settings])

    def select(
        self, curve: RiskCurve, rows: Rows, epsilons: Floats, delta: float, start: int, pool: int
    ) -> NDArray[np.int64]:
        """Walk the path with one bet per setting, each stopped as soon as it is decided."""
        if curve.units.in_tests is not None or curve.follows:
            return self._select_weighted(curve, rows, epsilons, delta, start)
        seen = curve.data, _kernels.inclusive_thresholds(curve.data), rows
        test = self._test(curve, 0.0, delta, pool)
        if pool:  # these bets may not be monotone in ε, so each ε walks from the start
            single = np.split(epsilons, len(epsilons))
            return np.concatenate(
                [_bets.select_by_betting(*seen, epsilon, test, start) for epsilon in single]
            )
        selected: NDArray[np.int64]
        if curve.has_exits and len(rows) >= _bets.MIN_PARALLEL:
            selected = _bets.select_side_by_side(*seen, epsilons, test, start)
        else:
            selected = _bets.select_by_betting(*seen, epsilons, test, start)
        return selected

    def passes(
        self, curve: RiskCurve, rows: Rows, epsilon: float, delta: float, pool: int = 0
    ) -> NDArray[np.bool_]:
        """Return whether each setting is certified on its own, (K,): one bet per setting."""
        settings = range(curve.n_settings)
        return np.asarray([self._certifies(curve, rows, k, epsilon, delta, pool) for k in settings])

    def _select_weighted(
        self, curve: RiskCurve, rows: Rows, epsilons: Floats, delta: float, start: int
    ) -> NDArray[np.int64]:
        selected = np.empty(len(epsilons), np.int64)
        last = start - 1
        for j, epsilon in enumerate(epsilons):
            while last + 1 < curve.n_settings and self._certifies(
                curve, rows, last + 1, epsilon, delta, 0
            ):
                last += 1
            selected[j] = last
        return selected

    def upper(self, curve: RiskCurve, rows: Rows, setting: int, delta: float, pool: int) -> float:
        """Invert the test, which is monotone in ε, by bisection."""
        # Copy the column in test order, so that memory access is linear.
        order = curve.storage.arange(len(rows))
        alone = followed if curve.follows else RiskCurve.only
        curve, rows, setting = alone(curve, setting, rows), order, 0

        def certified(epsilon: float) -> bool:
            return self._certifies(curve, rows, setting, epsilon, delta, pool)

        if len(rows) <= MANY:
            return smallest_certified(certified, curve.loss_range)
        mean = float(curve.risk(rows)[setting])
        return smallest_certified(certified, curve.loss_range, mean, 3e-2 / np.sqrt(len(rows)))

    def _p(self, curve: RiskCurve, rows: Rows, setting: int, epsilon: float, pool: int) -> float:
        if curve.follows:
            curve, rows, setting = followed(curve, setting, rows), np.arange(len(rows)), 0
        if not self.star:  # the largest wealth of bets tuned for one fixed δ
            least = self._deficit(curve, rows, setting, epsilon, WSR_DELTA, OUT_OF_REACH, pool)
            return float(min(1.0, np.exp(least - np.log(OUT_OF_REACH))))
        # STaR's tests are nested in δ, so the smallest δ that certifies is a p-value.
        low, high = -700.0, 0.0  # log δ
        while high - low > 1e-10:
            middle = 0.5 * (low + high)
            delta = float(np.exp(middle))
            certified = self._certifies(curve, rows, setting, epsilon, delta, pool)
            low, high = (low, middle) if certified else (middle, high)
        return float(np.exp(high))

    def _certifies(
        self, curve: RiskCurve, rows: Rows, setting: int, epsilon: float, delta: float, pool: int
    ) -> bool:
        return self._deficit(curve, rows, setting, epsilon, delta, 1 / delta, pool) <= 0

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
        """Return the smallest log(goal / wealth) of a bet; at most 0 if the goal was reached."""
        if curve.follows:
            curve, rows, setting = followed(curve, setting, rows), np.arange(len(rows)), 0
        test = self._test(curve, epsilon, delta, pool)
        if curve.units.in_tests is not None:
            groups = curve.data.values, curve.units.in_tests, rows
            return float(_bets.log_deficit_weighted(*groups, setting, goal, test))
        seen = curve.data, _kernels.inclusive_thresholds(curve.data), rows
        return float(_bets.log_deficit(*seen, setting, goal, test))

    def _test(self, curve: RiskCurve, epsilon: float, delta: float, pool: int) -> _bets.Test:
        high = float(curve.loss_range.high)
        return _bets.Test(float(epsilon), float(delta), high, self.star, pool)


for _name, _star in (("wsr", False), ("star", True)):
    BOUNDS.register(
        BettingBound(
            _name,
            uses_order=True,
            pools=True,
            weighs=True,
            star=_star,
        )
    )
