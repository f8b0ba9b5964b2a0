"""The ends of every range: one sample, losses of 0 and of B, levels near 0 and B."""

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.certify.bounds import BOUNDS
from tests.guarantees.checkers import Task
from tests.guarantees.rules import ANY_LOSS, NON_NEGATIVE, UP_TO_ONE, curve_of

LEVELS = [1e-12, 1e-6, 0.01, 0.5, 0.99, 1 - 1e-9]


def certify(losses, epsilon, delta, bound, low=0.0, high=1.0):
    losses = np.asarray(losses, float)
    return ss.bounds.certify(losses, epsilon, delta, bound=bound, loss_range=(low, high))


# -------------------------------------------------------------------------- what n allows


@pytest.mark.parametrize("bound", UP_TO_ONE)
def test_a_hundred_losses_of_zero_do_not_certify_one_percent(bound):
    """0.99¹⁰⁰ = 0.37: a risk above 1 % often shows no loss in 100 samples."""
    assert not certify(np.zeros(100), 0.01, 0.1, bound)


@pytest.mark.parametrize("bound", UP_TO_ONE)
@pytest.mark.parametrize("epsilon", [0.003, 0.01, 0.05, 0.5])
@pytest.mark.parametrize("delta", [0.01, 0.1])
def test_no_bound_certifies_with_fewer_samples_than_can_be_enough(bound, epsilon, delta):
    """Losses of 0 certify ε only if (1 − ε)ⁿ ≤ δ; with one sample less no bound does."""
    least = ss.bounds.minimum_samples(epsilon, delta, ss.LossRange(0, 1))
    assert (1 - epsilon) ** least <= delta < (1 - epsilon) ** (least - 1)
    assert least == 1 or not certify(np.zeros(least - 1), epsilon, delta, bound)


@pytest.mark.parametrize("bound", ["binomial", "hoeffding_bentkus"])
def test_the_least_number_of_samples_is_enough_for_an_exact_test(bound):
    """230 losses of 0 certify 1 %, 229 do not."""
    assert certify(np.zeros(230), 0.01, 0.1, bound)
    assert not certify(np.zeros(229), 0.01, 0.1, bound)


@pytest.mark.parametrize("bound", ["auto", "star", "binomial"])
def test_the_policy_says_how_many_samples_are_needed(bound):
    """Nothing certified with 100 samples: the sentence names 230."""
    curve = ss.RiskCurve.from_losses([1.0, 0.5], np.zeros((100, 2)), loss_range=(0, 1))
    policy = ss.calibrate(curve, epsilon=0.01, delta=0.1, bound=bound)
    assert policy.threshold is None
    assert "230" in str(policy)


def test_the_policy_never_claims_certainty():
    """A probability of 0.9996 is not to be called 100 %."""
    curve = ss.RiskCurve.from_losses([1.0, 0.5], np.zeros((3000, 2)), loss_range=(0, 1))
    policy = ss.calibrate(curve, epsilon=0.05, delta=4e-4)
    assert policy.threshold == 0.5
    assert "at least 100 %" not in str(policy)


# ----------------------------------------------------------------------- one sample, all alike


@pytest.mark.parametrize("bound", UP_TO_ONE)
def test_one_sample_certifies_only_what_one_sample_can(bound):
    """n = 1 at any level: a loss of 0 needs 1 − ε ≤ δ, a loss of B certifies nothing."""
    for epsilon in LEVELS:
        for delta in (0.001, 0.1, 0.6):
            if 1 - epsilon > delta:
                assert not certify([0.0], epsilon, delta, bound)
            assert not certify([1.0], epsilon, delta, bound)


@pytest.mark.parametrize("bound", NON_NEGATIVE)
@pytest.mark.parametrize("high", [1.0, 2.0])
@pytest.mark.parametrize("n", [1, 2, 1000])
def test_losses_of_the_largest_size_are_never_certified(bound, high, n):
    """All losses B: no level below B, however near, is certified."""
    for level in LEVELS:
        assert not certify(np.full(n, high), level * high, 0.5, bound, high=high)


@pytest.mark.parametrize("bound", UP_TO_ONE)
def test_losses_equal_to_epsilon_are_never_certified(bound):
    """All losses ε: nothing speaks against the risk being ε."""
    for epsilon in (0.125, 0.5, 0.875) if bound != "binomial" else ():
        assert not certify(np.full(2000, epsilon), epsilon, 0.5, bound)


@pytest.mark.parametrize("bound", NON_NEGATIVE)
def test_losses_a_little_below_epsilon_are_certified_by_enough_samples(bound):
    """All losses 0.3, ε = 0.4, n = 2000."""
    assert certify(np.full(2000, 0.3), 0.4, 0.01, bound)


@pytest.mark.parametrize("bound", ANY_LOSS)
@pytest.mark.parametrize("high", [1.0, 2.0])
def test_losses_of_the_smallest_size_are_certified(bound, high):
    """All losses −B: fewer samples are needed than for losses of 0."""
    assert certify(np.full(200, -high), 0.01 * high, 0.1, bound, low=-high, high=high)


@pytest.mark.parametrize("bound", UP_TO_ONE)
@pytest.mark.parametrize("n", [1, 3, 500])
def test_answers_are_numbers_at_the_ends_of_every_range(bound, n):
    """p-values lie in [0, 1] and upper bounds in the range, with no NaN and no warning."""
    for value in (0.0, 1.0):
        losses = np.full(n, value)
        for epsilon in LEVELS:
            assert 0.0 <= ss.bounds.p_value(losses, epsilon, bound=bound) <= 1.0
        for delta in (1e-12, 0.1, 1 - 1e-12):
            assert 0.0 <= ss.bounds.upper_bound(losses, delta, bound=bound) <= 1.0


@pytest.mark.parametrize("control", ["ucb", "ltt", "crc", "empirical"])
@pytest.mark.parametrize("n", [1, 2, 50])
def test_controls_choose_nothing_where_every_setting_loses_everything(control, n):
    """All losses B at every setting but the full model."""
    curve = curve_of(np.tile([0.0, 1.0, 1.0], (n, 1)), Task(0.5))
    assert ss.Control(control).run(curve, 0.9, 0.3).index is None


@pytest.mark.parametrize("control", ["ucb", "ltt", "crc", "empirical"])
def test_controls_choose_the_fastest_where_nothing_is_lost(control):
    """All losses 0, enough samples: the last setting."""
    curve = curve_of(np.zeros((500, 7)), Task(0.5))
    assert ss.Control(control).run(curve, 0.05).index == 6


def test_crc_needs_n_plus_one_times_epsilon_to_reach_the_bound():
    """With losses of 0, (0 + B)/(n + 1) ≤ ε decides: 99 samples for 1 %, 199 for B = 2."""
    for high, enough in ((1.0, 99), (2.0, 199)):
        for n, index in ((enough, 1), (enough - 1, None)):
            curve = curve_of(np.zeros((n, 2)), Task(0.5, high=high))
            assert ss.control.crc(curve, 0.01).index == index


# ----------------------------------------------------------------------- what voids a guarantee


@pytest.mark.parametrize("value", [1.01, -1.01, np.nan, np.inf])
def test_a_loss_outside_its_declared_range_is_refused(value):
    """Its bound is what every guarantee rests on."""
    losses = np.zeros((10, 2))
    losses[3, 1] = value
    with pytest.raises(ValueError, match="losses"):
        ss.RiskCurve.from_losses([1.0, 0.5], losses)


@pytest.mark.parametrize("bound", ["binomial", "bentkus", "hoeffding_bentkus"])
def test_bounds_for_losses_from_zero_on_refuse_gaps(bound):
    """A gap may be negative: these bounds are for zero-bounded risks only."""
    curve = curve_of(np.zeros((50, 2)), Task(0.5, low=-1))
    with pytest.raises(ValueError, match=bound):
        ss.control.ucb(curve, 0.1, bound=bound)


def test_the_binomial_test_refuses_losses_that_are_not_zero_or_one():
    """Half a loss is no count."""
    curve = curve_of(np.tile([0.0, 0.5], (50, 1)), Task(0.5))
    with pytest.raises(ValueError, match="whole"):
        ss.control.ucb(curve, 0.6, bound="binomial")


def test_the_automatic_bound_follows_what_is_declared_not_what_is_seen():
    """0-1 gaps that happen to be 0 or 1 are still gaps."""
    losses = np.zeros((300, 2))
    assert ss.control.ucb(curve_of(losses, Task(0.5, low=-1)), 0.1).bound == "star"
    assert ss.control.ucb(curve_of(losses, Task(0.5)), 0.1).bound == "star"
    assert ss.control.ucb(curve_of(losses, Task(0.5, binary=True)), 0.1).bound == "binomial"


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 1.3, -0.1, np.nan])
def test_levels_outside_the_open_range_are_refused(epsilon):
    """ε lies in (0, B)."""
    curve = curve_of(np.zeros((50, 2)), Task(0.5))
    with pytest.raises(ValueError, match="`epsilon`"):
        ss.control.ucb(curve, epsilon)


# ------------------------------------------------------------------------------- rounding


def cancelling_record():
    """Six samples that lose at the second exit and nothing at the first.

    Sums along the path rise and come back to 0, or to −4e-16 in floating point.
    """
    confidences = np.float32(
        [[0.3, 0.9], [0.3, 0.8], [0.3, 0.9], [0.3, 0.7], [0.3, 0.7], [0.3, 0.7]]
    )
    losses = np.zeros((6, 3))
    losses[:, 1] = [0.9, 0.9, 0.2, 0.2, 0.2, 0.7]
    return ss.ExitRecord(confidences, inconsistencies={"some": losses})


@pytest.mark.parametrize("bound", NON_NEGATIVE)
def test_a_sum_that_rounding_made_negative_certifies_nothing(bound):
    """Six losses of 0 do not certify 5 %, though their sum may read −4e-16."""
    curve = cancelling_record().curve("consistency", path=[0.9, 0.8, 0.7, 0.3])
    rule = ss.Control("ltt", bound, correction="bonferroni")
    assert rule.run(curve, 0.05, 0.1).index is None
    rows = np.arange(curve.n)
    p = BOUNDS[bound].p_values(curve, rows, 0.05)[-1]
    assert p > 0.7  # 0.95⁶ = 0.735 is the least that a valid test can say
    assert BOUNDS[bound].upper(curve, rows, 4, 0.1, 0) > 0.3
