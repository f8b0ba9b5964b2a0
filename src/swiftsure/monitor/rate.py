"""How many requests to audit, so that a risk is found within some number of them."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom

from swiftsure._lib import checks
from swiftsure.losses import LossRange
from swiftsure.monitor.risk import Monitor

__all__ = ["audit_rate"]

POWER = 0.9
"""Probability with which a risk is to be found in time."""
RUNS = 1000
"""Simulated streams, for each time of the change."""
QUIET = (0, 1000)
"""Audits before the risk rises: a change is found later after a quiet time than at the start."""


def audit_rate(
    epsilon: float,
    *,
    detect: float,
    within: int,
    alpha: float = 0.01,
    loss_range: LossRange | tuple[float, float] = (0.0, 1.0),
    power: float = POWER,
    seed: int = 0,
) -> float:
    """Return the lowest rate of audits at which a monitor finds a risk in time, by simulation.

    Parameters
    ----------
    epsilon, alpha, loss_range
        As in `Monitor`.
    detect : float
        The risk that is to be found; above `epsilon`.
    within : int
        In how many requests after it rose.
    power : float
        With which probability.
    seed : int
        Of the simulation.

    Returns
    -------
    rate : float
        In (0, 1].

    Raises
    ------
    ValueError
        If even auditing every request finds it too late; the message says in how many it would.

    Notes
    -----
    Losses are 0 or the largest possible, which vary most. Before the risk rises it is half of
    `epsilon`, for no audits or for 1,000; the later alarm counts. Other losses, or a risk that
    rises slowly, may be found sooner or later.

    Examples
    --------
    >>> rate = audit_rate(0.05, detect=0.10, within=2000)
    >>> 0.2 < rate < 0.6
    True
    """
    allowed = LossRange.of(loss_range)
    level = checks.between("detect", detect, max(epsilon, 0.0), allowed.high)
    within = checks.count("within", within)
    checks.between("power", power, 0.0, 1.0)
    rng = np.random.default_rng(seed)
    delays = [_delays(epsilon, alpha, allowed, level, within, quiet, rng) for quiet in QUIET]

    def found(rate: float) -> float:
        return min(float(binom.sf(each - 1, within, rate).mean()) for each in delays)

    if found(1.0) < power:
        raise ValueError(
            f"`detect` and `within`: a risk of {level:g} is found within {within:,} requests with"
            f" probability {found(1.0):.2f} even if all are audited, below {power:g}. Allow more"
            " requests, or detect a higher risk."
        )
    return float(min(1.0, brentq(lambda rate: found(rate) - power, 1e-6, 1.0, xtol=1e-4) + 1e-4))


def _delays(
    epsilon: float,
    alpha: float,
    allowed: LossRange,
    detect: float,
    most: int,
    quiet: int,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Return how many audits each simulated alarm takes after the change; inf for none in time."""
    found = np.full(RUNS, np.inf)
    for run in range(RUNS):
        monitor = Monitor(epsilon, alpha, allowed)
        before = max(epsilon, 0.0) / 2 / allowed.high
        monitor.update_many(allowed.high * (rng.random(quiet) < before))
        if monitor.alarm:
            continue  # a false alarm finds nothing
        monitor.update_many(allowed.high * (rng.random(most) < detect / allowed.high))
        if monitor.alarm_at is not None:
            found[run] = monitor.alarm_at - quiet
    return found
