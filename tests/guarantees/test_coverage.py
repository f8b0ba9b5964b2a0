"""Upper bounds cover: P(risk ≤ bound) ≥ 1 − δ, for losses of many shapes and either sign."""

import numpy as np
import pytest
from scipy import stats

import swiftsure as ss
from tests.guarantees.checkers import check_rate
from tests.guarantees.rules import ANY_LOSS, NON_NEGATIVE

# By name: (how to draw n losses, their mean, low, high).
LOSSES = {
    "rare and large": (lambda n, rng: 1.0 * (rng.random(n) < 0.03), 0.03, 0, 1),
    "half and half": (lambda n, rng: 1.0 * (rng.random(n) < 0.5), 0.5, 0, 1),
    "skewed, up to 2": (lambda n, rng: 2 * rng.beta(0.1, 0.9, n), 0.2, 0, 2),
    "even": (lambda n, rng: rng.random(n), 0.5, 0, 1),
    "mostly 0.1": (lambda n, rng: np.where(rng.random(n) < 0.02, 1.0, 0.1), 0.118, 0, 1),
    "0-1 gap": (lambda n, rng: rng.choice([1.0, -1.0, 0.0], n, p=[0.08, 0.04, 0.88]), 0.04, -1, 1),
    "gap below 0": (lambda n, rng: rng.choice([1.0, -1.0], n, p=[0.2, 0.8]), -0.6, -1, 1),
    "Brier gap": (lambda n, rng: 4 * rng.beta(20, 19, n) - 2, 4 * 20 / 39 - 2, -2, 2),
    "Brier gap, heavy": (
        lambda n, rng: rng.choice([2.0, -2.0, 0.01], n, p=[0.05, 0.04, 0.91]),
        0.0291,
        -2,
        2,
    ),
}  # fmt: skip

CASES = [
    pytest.param(bound, *case, id=f"{bound}-{name}")
    for name, case in LOSSES.items()
    for bound in (NON_NEGATIVE if case[2] == 0 else ANY_LOSS)
] + [
    pytest.param("trinomial", *LOSSES[name], id=f"trinomial-{name}")
    for name in ("0-1 gap", "gap below 0")
]


def check(bound, draw, mean, low, high, n, draws, delta):
    rng = np.random.default_rng(0)
    misses = sum(
        ss.bounds.upper_bound(draw(n, rng), delta, bound=bound, loss_range=(low, high)) < mean
        for _ in range(draws)
    )
    check_rate(misses, draws, delta)


@pytest.mark.parametrize(("bound", "draw", "mean", "low", "high"), CASES)
def test_upper_bounds_cover_the_mean(bound, draw, mean, low, high):
    """A hundred losses, δ = 0.1."""
    check(bound, draw, mean, low, high, n=100, draws=250, delta=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "draw", "mean", "low", "high"), CASES)
@pytest.mark.parametrize(("n", "delta"), [(8, 0.2), (50, 0.1), (1000, 0.05)])
def test_upper_bounds_cover_the_mean_in_many_draws(bound, draw, mean, low, high, n, delta):
    """From 8 losses to 1000."""
    check(bound, draw, mean, low, high, n=n, draws=1500, delta=delta)


def test_the_binomial_bound_is_clopper_pearson_s():
    """Solved by bisection, it is the quantile of a Beta distribution."""
    for n, k in ((1, 0), (10, 3), (230, 0), (400, 399)):
        losses = np.r_[np.ones(k), np.zeros(n - k)]
        exact = stats.beta.ppf(0.9, k + 1, n - k)
        found = ss.bounds.upper_bound(losses, 0.1, bound="binomial")
        assert found == pytest.approx(exact, abs=1e-8)
