"""Settings whose risk is 0, or just above ε: an error of one place violates every time."""

import numpy as np
import pytest

import swiftsure as ss
from tests.guarantees.checkers import (
    Task,
    check_not_above,
    check_rate,
    check_violations,
    check_violations_exactly,
)
from tests.guarantees.rules import ANY_LOSS, NON_NEGATIVE, ORDER_FREE, UP_TO_ONE, rule
from tests.guarantees.sources import Types, independent_columns, two_settings

TINY = 1e-6

CONTROLS = {
    "ucb": {},
    "ltt": {},
    "ltt-bonferroni": {"correction": "bonferroni"},
}


def chooser(control, bound):
    return rule(control.partition("-")[0], bound=bound, **CONTROLS[control])


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("bound", UP_TO_ONE)
def test_a_setting_just_above_epsilon_is_chosen_with_probability_at_most_delta(control, bound):
    """Two settings with risks 0 and ε + tiny."""
    task = Task(0.1, 0.1, binary=bound == "binomial")
    check_violations(chooser(control, bound), two_settings(0.1 + TINY), task, n=60, draws=1000)


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("bound", UP_TO_ONE)
def test_safe_settings_before_the_unsafe_ones_change_nothing(control, bound):
    """Five settings that lose nothing, then five that lose ε + tiny, independently."""
    source = independent_columns(*[0.0] * 5, *[0.1 + TINY] * 5)
    task = Task(0.1, 0.1, binary=bound == "binomial")
    check_violations(chooser(control, bound), source, task, n=60, draws=500)


@pytest.mark.parametrize("bound", NON_NEGATIVE)
def test_losses_up_to_two_are_held_below_epsilon(bound):
    """Losses of 0 or 2, ε on either side of 1."""
    for epsilon in (0.2, 1.2):
        source = independent_columns(0.0, epsilon + TINY, epsilon + TINY, high=2.0)
        task = Task(epsilon, 0.1, 0, 2)
        check_violations(rule("ucb", bound=bound), source, task, n=40, draws=600)


@pytest.mark.parametrize(
    ("bound", "high"),
    [*((bound, high) for bound in ANY_LOSS for high in (1.0, 2.0)), ("trinomial", 1.0)],
)
def test_gaps_of_both_signs_are_held_below_epsilon(bound, high):
    """Gaps of −B, 0 and B whose mean is just above ε."""
    vectors = high * np.asarray([[0, 0, -1], [0, 0, 0], [0, 0, 1]])
    for epsilon in (0.05 * high, 0.6 * high):
        up = (epsilon + TINY) / high
        for better in (0.0, 0.5 * (1 - up)):
            weights = np.asarray([better, 1 - up - 2 * better, up + better])
            source = Types(vectors, weights)
            task = Task(epsilon, 0.1, -high, high)
            check_violations(rule("ucb", bound=bound), source, task, n=50, draws=600)


@pytest.mark.parametrize("bound", ORDER_FREE)
def test_two_settings_exactly(bound):
    """Risks 0 and ε + tiny for every n up to 120: the probability is summed, not sampled."""
    choose = rule("ucb", bound=bound)
    for n in (1, 2, 5, 22, 40, 120):
        for epsilon in (0.1, 0.5):
            task = Task(epsilon, 0.1, binary=bound == "binomial")
            check_violations_exactly(choose, two_settings(epsilon + TINY), task, n)


@pytest.mark.parametrize("bound", ORDER_FREE)
@pytest.mark.parametrize("control", CONTROLS)
def test_three_dependent_settings_exactly(control, bound):
    """Two settings with dependent 0/1 losses, safe and unsafe in any combination, n = 13."""
    vectors = np.asarray([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]], float)
    task = Task(0.3, 0.2, binary=bound == "binomial")
    bad = task.epsilon + TINY
    for first, second, both in [
        (bad, bad, 0.0),  # as opposed as can be
        (bad, bad, bad),  # the same
        (bad, bad, bad**2),  # independent
        (bad, 0.05, 0.0),  # unsafe before safe: no monotonicity
        (0.05, bad, 0.05),
        (0.2, 0.6, 0.1),
    ]:
        weights = np.asarray([1 - first - second + both, second - both, first - both, both])
        check_violations_exactly(chooser(control, bound), Types(vectors, weights), task, n=13)


@pytest.mark.parametrize("bound", NON_NEGATIVE)
def test_a_setting_0_that_is_not_the_full_model_is_tested_too(bound):
    """Losses that are not relative to a full model: every setting just above ε, the first too."""
    rng = np.random.default_rng(0)
    count, draws = 0, 600
    for draw in range(draws):
        losses = (rng.random((60, 3)) < 0.1 + TINY).astype(float)
        curve = ss.RiskCurve.from_losses([2, 1, 0], losses, loss_range=(0, 1), relative=False)
        count += ss.control.ucb(curve, 0.1, 0.1, bound, seed=draw).index is not None
    check_rate(count, draws, 0.1)


@pytest.mark.parametrize("control", ["ucb", "ltt"])
def test_a_first_setting_without_losses_by_chance_is_tested(control):
    """Whether setting 0 is tested must not depend on its losses: exact, for a single sample.

    Setting 0 is not the full model. The third kind of sample loses nothing there by chance, as if
    it were, and gains much at setting 1. Skipping the test of setting 0 then violates with
    probability .172, since the second kind of sample, which gains at setting 0, certifies that.
    """
    kinds = np.asarray([[1.0, 1.0], [-4.2, 1.0], [0.0, -4.2]])
    probabilities = np.asarray([0.828, 0.078, 0.094])
    epsilon, delta = 0.5, 0.1
    assert (probabilities @ kinds > epsilon).all()
    violation = 0.0
    for losses, probability in zip(kinds, probabilities, strict=True):
        curve = ss.RiskCurve.from_losses([1.0, 0.5], losses[None], loss_range=(-4.2, 1))
        chosen = getattr(ss.control, control)(curve, epsilon, delta).index
        violation += probability * (chosen is not None)
    assert violation <= delta


def test_crc_holds_the_mean_where_the_full_model_is_not_on_the_path():
    """Relative losses of settings that are all early exits: the full model stands before them."""
    kinds = np.asarray([[1.0, 1.0, -1.0], [0, 1, 1], [0, 0, 1], [-1, 0, 0]])
    probabilities = np.asarray([0.08, 0.1, 0.1, 0.72])
    risk = probabilities @ kinds
    rng = np.random.default_rng(0)
    chosen, epsilon = [], 0.1
    for _ in range(2000):
        losses = kinds[rng.choice(4, 30, p=probabilities)]
        curve = ss.RiskCurve.from_losses([0.9, 0.8, 0.7], losses)
        chosen.append(ss.control.crc(curve, epsilon).index)
    assert {None, 0, 1} <= set(chosen)
    check_not_above(np.asarray([0.0 if k is None else risk[k] for k in chosen]), epsilon)
