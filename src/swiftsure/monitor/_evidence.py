"""The e-process behind the alarm: bets against "the risk is at most ε", restarted at every loss.

A bet with stake ν multiplies its wealth by 1 + ν(ℓ - ε) at each loss ℓ. As long as the mean of ℓ,
given the past, is at most ε, wealth does not grow on average. Before each loss t every bet receives
a part wₜ of a unit budget, so that wealth lost while the risk was low does not delay an alarm after
a change. The evidence is the total wealth plus the unspent budget: it starts at 1 and does not grow
on average either, so the probability that it ever reaches 1/α is at most α (Ville's inequality).
"""

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib.compile import compiled

__all__ = [
    "ALARM_AT",
    "BETS",
    "MAX_WEALTH",
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
"""The largest stake, as a fraction of the one that the lowest possible loss would bankrupt."""

RATIO = 0.5
"""Ratio of each stake to the next larger one."""

AT_ONCE = 0.5
"""Share of the budget staked at the first loss, in case the risk is too high from the start."""

PACE = 1000.0
"""Of the rest of the budget, 1/√(1 + t/PACE) is left after t losses."""

MAX_WEALTH = 1e200
"""Wealth is clipped to this to avoid overflow; clipping keeps the guarantee."""

MEMORY = 1000.0
"""Approximate number of losses in the recent mean, which no alarm depends on."""

N, TOTAL, RECENT, PEAK, ALARM_AT, WEALTH = 0, 1, 2, 3, 4, 5
"""Indices into a state: number of losses, their sum, mean of recent ones, largest evidence, number
of losses at the alarm (0: none), and the wealth of each bet from WEALTH on."""


def new_state() -> Floats:
    """Return the state before the first loss, (WEALTH + BETS,)."""
    state = np.zeros(WEALTH + BETS)
    state[PEAK] = 1.0
    return state


def stakes(epsilon: float, low: float) -> Floats:
    """Return the stakes, largest first: geometric, since the best one depends on the true risk."""
    found: Floats = LARGEST / (epsilon - low) * np.power(RATIO, np.arange(BETS), dtype=np.float64)
    return found


@compiled
def unspent(n):  # type: ignore[no-untyped-def]
    """Return the part of the budget left after n losses."""
    return (1.0 - AT_ONCE) / np.sqrt(1.0 + n / PACE) if n > 0 else 1.0


@compiled
def fold_one(state, stakes, epsilon, goal, loss):  # type: ignore[no-untyped-def]
    """Update a state with one loss, in place."""
    n = state[N]
    left = unspent(n + 1.0)
    # The difference of two close floats is exact, so rounding never overspends the budget.
    fresh = (unspent(n) - left) / BETS
    surprise = loss - epsilon
    evidence = left
    for j in range(BETS):
        wealth = (state[WEALTH + j] + fresh) * (1.0 + stakes[j] * surprise)
        state[WEALTH + j] = min(wealth, MAX_WEALTH)
        evidence += wealth
    state[N] = n + 1.0
    state[TOTAL] += loss
    state[RECENT] += (loss - state[RECENT]) / min(n + 1.0, MEMORY)
    state[PEAK] = max(state[PEAK], min(evidence, MAX_WEALTH))
    if evidence >= goal and state[ALARM_AT] == 0.0:
        state[ALARM_AT] = n + 1.0


@compiled
def fold(state, stakes, epsilon, goal, losses):  # type: ignore[no-untyped-def]
    """Update a state with losses, in place and in order."""
    for loss in losses:
        fold_one(state, stakes, epsilon, goal, loss)
