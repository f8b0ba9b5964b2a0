"""The e-process behind the alarm: bets against "the risk is at most ε", started again and again.

A bet with stake ν turns its wealth into wealth · (1 + ν(ℓ - ε)) at each loss ℓ. As long as the mean
of ℓ, given the past, is at most ε, wealth does not grow on average. Before each loss t a bit wₜ of
a unit budget is put on every bet, so that a change finds wealth that earlier good days have not
eaten up. The evidence is all wealth and the budget not yet spent: it starts at 1 and does not grow
on average either, so it ever reaches 1/α with probability at most α (Ville's inequality).
"""

import numpy as np
from numpy.typing import NDArray

from swiftsure._compile import compiled

__all__ = [
    "ALARM_AT",
    "BETS",
    "FAR",
    "PEAK",
    "RECENT",
    "TOTAL",
    "WEALTH",
    "N",
    "fold",
    "fold_one",
    "new_state",
    "stakes",
    "unspent",
]

Floats = NDArray[np.float64]

BETS = 12
"""Number of stakes; each gets an equal share of the budget."""

LARGEST = 0.75
"""The largest stake, in parts of the one at which the least possible loss would ruin it."""

RATIO = 0.5
"""Of a stake to the next larger one."""

AT_ONCE = 0.5
"""Share of the budget that is staked at the first loss, for a risk that is too high already."""

PACE = 1000.0
"""The rest is spent so slowly that after t losses 1/√(1 + t/PACE) of it is left."""

FAR = 1e200
"""Wealth is cut to this after an alarm, long before it overflows; less wealth is always allowed."""

MEMORY = 1000.0
"""How many losses count as recent, roughly; a description, on which no alarm rests."""

N, TOTAL, RECENT, PEAK, ALARM_AT, WEALTH = 0, 1, 2, 3, 4, 5
"""Places in a state: losses so far, their sum, mean of recent ones, largest evidence, when the
alarm was (0: none), and from there on the wealth of each bet."""


def new_state() -> Floats:
    """Return the state before the first loss, (WEALTH + BETS,)."""
    state = np.zeros(WEALTH + BETS)
    state[PEAK] = 1.0
    return state


def stakes(epsilon: float, low: float) -> Floats:
    """Return the stakes, largest first: geometric, since the best depends on an unknown risk."""
    found: Floats = LARGEST / (epsilon - low) * np.power(RATIO, np.arange(BETS), dtype=np.float64)
    return found


@compiled
def unspent(n):  # type: ignore[no-untyped-def]
    """Return the part of the budget that is left after n losses."""
    return (1.0 - AT_ONCE) / np.sqrt(1.0 + n / PACE) if n > 0 else 1.0


@compiled
def fold_one(state, stakes, epsilon, goal, loss):  # type: ignore[no-untyped-def]
    """Fold one loss into a state, in place."""
    n = state[N]
    left = unspent(n + 1.0)
    # The difference of two near numbers is exact, so the budget is never overspent by rounding.
    fresh = (unspent(n) - left) / BETS
    surprise = loss - epsilon
    evidence = left
    for j in range(BETS):
        wealth = (state[WEALTH + j] + fresh) * (1.0 + stakes[j] * surprise)
        state[WEALTH + j] = min(wealth, FAR)
        evidence += wealth
    state[N] = n + 1.0
    state[TOTAL] += loss
    state[RECENT] += (loss - state[RECENT]) / min(n + 1.0, MEMORY)
    state[PEAK] = max(state[PEAK], min(evidence, FAR))
    if evidence >= goal and state[ALARM_AT] == 0.0:
        state[ALARM_AT] = n + 1.0


@compiled
def fold(state, stakes, epsilon, goal, losses):  # type: ignore[no-untyped-def]
    """Fold losses into a state, in place and in order."""
    for loss in losses:
        fold_one(state, stakes, epsilon, goal, loss)
