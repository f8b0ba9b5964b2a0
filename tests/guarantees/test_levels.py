"""Smaller ε or δ never certify more; several levels at once are answered like one at a time."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import swiftsure as ss
from tests.guarantees.checkers import Task
from tests.guarantees.rules import NON_NEGATIVE, UP_TO_ONE, curve_of
from tests.guarantees.strategies import (
    ANY_DELTA,
    EPSILONS,
    deltas,
    levels,
    properties,
    sequences,
    tables,
)

pytestmark = ANY_DELTA

RULES = {
    **{f"ucb {bound}": ss.Control("ucb", bound) for bound in NON_NEGATIVE},
    "ltt bonferroni": ss.Control("ltt", "hoeffding_bentkus", correction="bonferroni"),
    "ltt bonferroni star": ss.Control("ltt", "star", correction="bonferroni"),
    "crc": ss.Control("crc"),
    "crc by test": ss.Control("crc", method="ucb"),
    "empirical": ss.Control("empirical"),
}

UNIT = Task(0.5)


def chosen(rule, curve, epsilon, delta=0.1):
    """Index of the choice, with 0 for the full model."""
    return rule.run(curve, epsilon, delta, seed=1).index or 0


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(losses=tables(), pair=st.tuples(levels, levels), delta=deltas)
@properties()
def test_a_smaller_epsilon_never_chooses_a_faster_setting(rule, losses, pair, delta):
    """For every control and bound."""
    curve = curve_of(losses, UNIT)
    assert chosen(rule, curve, min(pair), delta) <= chosen(rule, curve, max(pair), delta)


# WSR's stakes are tuned to δ: its tests are valid at each δ, but nothing makes them nested.
NESTED = {name: rule for name, rule in RULES.items() if name != "ucb wsr"}


@pytest.mark.parametrize("rule", NESTED.values(), ids=NESTED)
@given(losses=tables(), epsilon=levels, pair=st.tuples(deltas, deltas))
@properties()
def test_a_smaller_delta_never_chooses_a_faster_setting(rule, losses, epsilon, pair):
    """For every control and bound but WSR."""
    curve = curve_of(losses, UNIT)
    assert chosen(rule, curve, epsilon, min(pair)) <= chosen(rule, curve, epsilon, max(pair))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(losses=tables(), several=st.sets(levels, min_size=2, max_size=8), delta=deltas)
@properties()
def test_several_levels_at_once_are_answered_like_one_at_a_time(rule, losses, several, delta):
    """A walk that goes on from the level before must end where a walk of its own ends."""
    curve = curve_of(losses, UNIT)
    rising = np.asarray(sorted(several))
    at_once = rule.indices(curve, rising, delta)
    alone = [rule.indices(curve, rising[j : j + 1], delta)[0] for j in range(len(rising))]
    np.testing.assert_array_equal(at_once, alone)


def test_levels_out_of_order_are_refused_or_answered_as_if_alone():
    """A level must never be given what only a higher one certifies."""
    losses = np.zeros((200, 3))
    losses[:, 1] = np.arange(200) % 50 == 0
    losses[:, 2] = np.arange(200) % 3 == 0
    curve = curve_of(losses, UNIT)
    falling = np.asarray([0.5, 0.01])
    for bound in ("star", "wsr"):
        rule = ss.Control("ucb", bound)
        alone = [rule.indices(curve, falling[j : j + 1], 0.1)[0] for j in range(2)]
        try:
            at_once = rule.indices(curve, falling, 0.1)
        except ValueError:
            continue
        np.testing.assert_array_equal(at_once, alone)


# ------------------------------------------------------------------------------------- STaR

GAPS = (-1, 1)


def star(losses, epsilon, delta, bound="star"):
    return ss.bounds.certify(losses, epsilon, delta, bound=bound, loss_range=GAPS)


@pytest.mark.parametrize("bound", ["star", "wsr"])
@given(losses=sequences(), pair=st.tuples(levels, levels), delta=deltas)
@properties(200)
def test_betting_tests_are_monotone_in_epsilon(bound, losses, pair, delta):
    """What is certified at ε is certified at any larger ε, whatever the sequence."""
    if star(losses, min(pair), delta, bound):
        assert star(losses, max(pair), delta, bound)


@given(losses=sequences(), epsilon=levels, pair=st.tuples(deltas, deltas))
@properties(200)
def test_star_is_nested_in_delta(losses, epsilon, pair):
    """What is certified at δ is certified at any larger δ, so its smallest δ is a p-value."""
    if star(losses, epsilon, min(pair)):
        assert star(losses, epsilon, max(pair))


def check_levels_one_by_one(seed, walks):
    """Compare a walk over rising levels with one walk a level, on sequences of many shapes."""
    rng = np.random.default_rng(seed)
    for _ in range(walks):
        n, K = int(rng.integers(1, 300)), 12
        losses = np.zeros((n, K))
        some = rng.random((n, K)) < rng.uniform(0, 0.5)
        losses[some] = rng.uniform(-1, 1, some.sum())
        losses[rng.random((n, K)) < rng.uniform(0, 0.1)] = 1.0
        losses[: rng.integers(1, 20)] = rng.choice([-1.0, 0.0, 1.0])
        losses[:, 0] = 0.0
        curve = curve_of(losses, Task(0.5, low=-1))
        rising = np.sort(rng.uniform(0.001, 0.999, 20))
        delta = 10 ** -rng.uniform(0.1, 8)
        for bound in ("star", "wsr"):
            rule = ss.Control("ucb", bound)
            at_once = rule.indices(curve, rising, delta)
            alone = [rule.indices(curve, rising[j : j + 1], delta)[0] for j in range(20)]
            np.testing.assert_array_equal(at_once, alone)


def test_random_walks_at_several_levels_are_answered_like_one_at_a_time():
    """The same on long sequences with levels of many digits."""
    check_levels_one_by_one(0, walks=400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_random_walks_at_several_levels_are_answered_like_one_at_a_time(seed):
    """The same, many more."""
    check_levels_one_by_one(seed, walks=8000)


def test_a_wealth_that_was_lost_whole_is_not_regained_through_rounding():
    """All is staked on one sample, and it has the largest loss: no level may recover from that.

    1/(B − ε) · (ε − B) is −1, but rounds to a little more for some levels. Were the remaining
    1e-16 of the wealth kept, 60 losses of 0 would bring it back, at those levels alone.
    """
    losses = np.zeros(153)
    losses[19] = 1.0
    answers = {
        ss.bounds.certify(losses, epsilon, 1e-12, bound="star", loss_range=(0, 1))
        for epsilon in np.linspace(0.55, 0.61, 200)
    }
    assert answers == {False}


# ---------------------------------------------------------------------------------- p-values


@pytest.mark.parametrize("bound", [name for name in UP_TO_ONE if name != "wsr"])
@given(data=st.data(), epsilon=levels, delta=deltas)
@properties(100)
def test_a_p_value_of_at_most_delta_is_a_certificate_and_the_reverse(bound, data, epsilon, delta):
    """p ≤ δ exactly where the test certifies (WSR's p-value belongs to stakes of its own)."""
    losses = data.draw(sequences(low=0.0))
    if bound == "binomial":
        losses = np.rint(losses)
    p = ss.bounds.p_value(losses, epsilon, bound=bound)
    assume(abs(p - delta) > 1e-9 * delta)  # a p-value by bisection is known that well
    assert (p <= delta) == ss.bounds.certify(losses, epsilon, delta, bound=bound)


@pytest.mark.parametrize("bound", [name for name in UP_TO_ONE if name != "binomial"])
@given(losses=sequences(low=0.0), delta=deltas)
@properties(50)
def test_an_upper_bound_is_the_smallest_level_that_is_certified(bound, losses, delta):
    """Levels above it are certified and levels below it are not."""
    upper = ss.bounds.upper_bound(losses, delta, bound=bound)
    for epsilon in EPSILONS[::6]:
        if abs(epsilon - upper) > 1e-6:
            certified = ss.bounds.certify(losses, epsilon, delta, bound=bound)
            assert certified == (epsilon > upper)
