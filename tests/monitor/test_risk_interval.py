"""The interval for the risk of a stream holds at every moment at once."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from swiftsure import Monitor
from swiftsure.monitor.interval import risk_interval

ALPHA = 0.2
LOOKS = np.unique(np.geomspace(1, 3000, 60).astype(int))


def misses(intervals, draw, runs=1500):
    """How many streams have an interval that ever misses the mean of the conditional means."""
    rng = np.random.default_rng(0)
    count = 0
    for _ in range(runs):
        losses, means = draw(rng)
        totals, true = losses.cumsum()[LOOKS - 1], means.cumsum()[LOOKS - 1] / LOOKS
        count += any(
            not low <= at <= high
            for at, (low, high) in zip(true, map(intervals, LOOKS, totals), strict=True)
        )
    return binomtest(count, runs, ALPHA, "greater").pvalue


def rare(rng):
    return (rng.random(3000) < 0.03).astype(float), np.full(3000, 0.03)


def changing(rng):
    """The mean depends on the past: it rises after a loss of 1."""
    losses, means = np.empty(3000), np.empty(3000)
    mean = 0.02
    for i, draw in enumerate(rng.random(3000)):
        means[i], losses[i] = mean, draw < mean
        mean = 0.05 if losses[i] else 0.02
    return losses, means


def half(n, total):
    return risk_interval(n, total, (0, 1), ALPHA)


@pytest.mark.parametrize("draw", [rare, changing])
def test_the_interval_holds_at_all_looks(draw):
    assert misses(half, draw, 400 if draw is changing else 1500) > 1e-6


def test_an_interval_for_one_look_fails():
    def fixed(n, total):
        spread = math.sqrt(total / n * (1 - total / n) / n) * 1.282
        return total / n - spread, total / n + spread

    assert misses(fixed, rare, 300) < 1e-6


def test_the_interval_of_gaps_and_of_a_monitor():
    monitor = Monitor(0.1, loss_range=(-1, 1))
    assert monitor.interval() == (-1, 1)
    monitor.update_many(np.tile([1.0, 0.0, -1.0, 0.0], 500))
    low, high = monitor.interval()
    assert -0.2 < low < 0 < high < 0.2
    assert (low, high) == risk_interval(2000, 0.0, (-1, 1))
    wider = monitor.interval(0.001)
    assert wider[0] < low
    assert wider[1] > high


@pytest.mark.parametrize(("n", "total"), [(1, 0.0), (1, 1.0), (50, 0.0), (50, 50.0), (10**9, 1e7)])
def test_the_interval_contains_the_mean_within_the_range(n, total):
    low, high = risk_interval(n, total, (0, 1))
    assert 0 <= low <= total / n <= high <= 1
