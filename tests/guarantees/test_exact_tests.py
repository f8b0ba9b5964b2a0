"""Every test of one setting, by listing all outcomes: no randomness, so no doubt."""

import numpy as np
import pytest
from scipy.stats import binom

import swiftsure as ss
from swiftsure.certify.bounds import BOUNDS
from tests.guarantees.checkers import (
    ROUNDING,
    RefutedError,
    Task,
    check_coverage,
    check_p_values,
    check_test,
)
from tests.guarantees.rules import (
    ANY_LOSS,
    GAPS,
    NON_NEGATIVE,
    ORDER_FREE,
    POOLS,
    UP_TO_ONE,
    certifies,
    p_value,
    upper_bound,
)
from tests.guarantees.sources import Sequences

BINARY = Sequences([0, 1], 9)
GAP = Sequences([-1, 0, 1], 6)
WIDE_GAP = Sequences([-2, 0.5, 2], 6)
WIDE = Sequences([0, 0.5, 2], 6)

CASES = [
    *(pytest.param(name, BINARY, 0, 1, id=f"{name}-binary") for name in UP_TO_ONE),
    *(pytest.param(name, WIDE, 0, 2, id=f"{name}-up to 2") for name in NON_NEGATIVE),
    *(pytest.param(name, GAP, -1, 1, id=f"{name}-gap") for name in GAPS),
    *(pytest.param(name, WIDE_GAP, -2, 2, id=f"{name}-gap up to 2") for name in ANY_LOSS),
]


@pytest.mark.parametrize(("bound", "sequences", "low", "high"), CASES)
@pytest.mark.parametrize("share", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("delta", [0.02, 0.2])
def test_a_risk_of_epsilon_or_more_is_certified_with_probability_at_most_delta(
    bound, sequences, low, high, share, delta
):
    """P(certified) ≤ δ for every distribution on the support with risk ε or more, in any order."""
    check_test(certifies(bound), sequences, Task(share * high, delta, low, high))


@pytest.mark.parametrize("bound", ["binomial", "star", "wsr", "hoeffding_bentkus"])
def test_the_exact_check_is_not_passed_by_never_certifying(bound):
    """Somewhere on the grid each test spends a good part of δ."""
    used = [
        check_test(certifies(bound), BINARY, Task(share, delta)) / delta
        for share in (0.3, 0.5, 0.9)
        for delta in (0.01, 0.1, 0.5)
    ]
    assert max(used) > 0.3


@pytest.mark.parametrize("bound", ORDER_FREE)
@pytest.mark.parametrize("n", [1, 2, 10, 50, 229, 230, 1000])
def test_binary_losses_of_any_number_are_certified_with_probability_at_most_delta(bound, n):
    """P(certified | R) ≤ δ for n 0/1 losses and risks from ε on, over grids of ε and δ."""
    k = np.arange(n + 1)
    losses = (np.arange(n)[:, None] < k).astype(float)  # column k holds k losses of 1
    curve = ss.RiskCurve.from_losses(k, losses, binary=True, relative=False)
    for epsilon in (1e-3, 0.01, 0.05, 0.3, 0.5, 0.9, 0.999):
        p = BOUNDS[bound].p_values(curve, np.arange(n), epsilon)
        for risk in np.unique(np.concatenate([[epsilon], np.linspace(epsilon, 1, 9)])):
            mass = binom.pmf(k, n, risk)
            below = np.asarray([mass[p <= u].sum() for u in p])
            assert (below <= p + ROUNDING).all(), (epsilon, risk)


@pytest.mark.parametrize(("bound", "sequences", "low", "high"), CASES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_p_values_are_super_uniform(bound, sequences, low, high, share):
    """P(p ≤ u) ≤ u for every u and every distribution on the support with risk ε or more."""
    check_p_values(p_value(bound), sequences, Task(share * high, low=low, high=high))


@pytest.mark.parametrize(("bound", "sequences", "low", "high"), CASES)
@pytest.mark.parametrize("delta", [0.1, 0.4])
def test_upper_bounds_cover(bound, sequences, low, high, delta):
    """P(risk ≤ upper bound) ≥ 1 − δ for every distribution on the support, negative risks too."""
    check_coverage(upper_bound(bound), sequences, Task(0.5, delta, low, high))


@pytest.mark.parametrize("bound", GAPS)
@pytest.mark.parametrize("n", [4, 8, 10])
def test_upper_bounds_cover_losses_at_both_ends(bound, n):
    """Losses of −B and B alone leave the least room: bounds must cover means of either sign."""
    for delta in (0.05, 0.1, 0.3):
        check_coverage(upper_bound(bound), Sequences([-1, 1], n), Task(0.5, delta, -1, 1))


# ------------------------------------------------------------------- without replacement

SIZES = [(8, 3), (8, 6), (9, 8), (7, 7), (9, 9)]
"""(size of the pool, samples drawn from it); the last two draw all of it."""


@pytest.mark.parametrize("bound", POOLS)
@pytest.mark.parametrize(("pool", "n"), SIZES)
def test_a_pool_above_epsilon_is_certified_with_probability_at_most_delta(bound, pool, n):
    """P(certified) ≤ δ over draws without replacement from every 0/1 pool with risk above ε."""
    sequences = Sequences([0, 1], n)
    for epsilon in (0.1, 0.25, 0.3, 0.5, 0.7, 0.9):
        for delta in (0.01, 0.1, 0.3):
            certified = [certifies(bound, pool)(r, Task(epsilon, delta)) for r in sequences.rows]
            for bad in range(pool + 1):
                if bad / pool > epsilon:
                    chance = sequences.probability_in_pool(certified, (pool - bad, bad))
                    assert chance <= delta + ROUNDING, (epsilon, delta, bad)


@pytest.mark.parametrize("bound", ["star", "wsr"])
@pytest.mark.parametrize(("pool", "n"), [(7, 4), (6, 6)])
def test_a_pool_of_gaps_above_epsilon_is_certified_with_probability_at_most_delta(bound, pool, n):
    """The same for pools of losses −1, 0 and 1, and of −2, 0 and 2."""
    sequences = Sequences([-1, 0, 1], n)
    for high in (1, 2):
        for epsilon in (0.1 * high, 0.4 * high, 0.8 * high):
            for delta in (0.05, 0.2):
                task = Task(epsilon, delta, -high, high)
                test = certifies(bound, pool)
                certified = [test(high * row, task) for row in sequences.rows]
                for better in range(pool + 1):
                    for worse in range(pool + 1 - better):
                        if high * (worse - better) / pool > epsilon:
                            counts = (better, pool - better - worse, worse)
                            chance = sequences.probability_in_pool(certified, counts)
                            assert chance <= delta + ROUNDING, (high, epsilon, delta, counts)


@pytest.mark.parametrize("bound", POOLS)
@pytest.mark.parametrize(("pool", "n"), SIZES)
def test_p_values_of_a_pool_are_super_uniform(bound, pool, n):
    """P(p ≤ u) ≤ u for pools whose risk is ε or more, ε itself included."""
    sequences = Sequences([0, 1], n)
    for bad in range(1, pool):
        for epsilon in (bad / pool, 0.7 * bad / pool):
            p = np.asarray([p_value(bound, pool)(r, Task(epsilon)) for r in sequences.rows])
            for u in np.unique(p):
                chance = sequences.probability_in_pool(p <= u, (pool - bad, bad))
                assert chance <= u + ROUNDING, (epsilon, bad, u)


@pytest.mark.parametrize("bound", POOLS)
@pytest.mark.parametrize(("pool", "n"), [(8, 5), (7, 7)])
def test_upper_bounds_of_a_pool_cover(bound, pool, n):
    """P(pool's risk ≤ upper bound) ≥ 1 − δ over draws without replacement."""
    sequences = Sequences([0, 1], n)
    for delta in (0.1, 0.3):
        upper = np.asarray([upper_bound(bound, pool)(r, Task(0.5, delta)) for r in sequences.rows])
        for bad in range(pool + 1):
            miss = sequences.probability_in_pool(upper < bad / pool - 1e-8, (pool - bad, bad))
            assert miss <= delta + ROUNDING, (delta, bad)


def test_a_pool_that_was_seen_whole_is_certified_where_its_risk_is_plainly_below_epsilon():
    """With pool = n nothing is left to chance, and no loss at all is certified at any level."""
    for bound in ("binomial", "star", "wsr"):
        assert certifies(bound, 20)(np.zeros(20), Task(0.1, 0.01)), bound


def test_taking_independent_samples_for_a_whole_pool_is_noticed():
    """A test that calls n independent samples a pool of n certifies far too often."""
    sequences = Sequences([0, 1], 9)
    with pytest.raises(RefutedError):
        check_test(certifies("star", pool=9), sequences, Task(0.3, 0.1))
