"""Samples drawn without replacement from a finite pool; the promise is about that pool."""

import numpy as np
import pytest

import swiftsure as ss
from tests.guarantees.checkers import RefutedError, check_rate
from tests.guarantees.rules import ANY_LOSS, POOLS


def pool_of(size, ones):
    """Losses of a whole pool at two settings; the second one loses `ones` times."""
    losses = np.zeros((size, 2))
    losses[:ones, 1] = 1.0
    return losses


def violations(losses, epsilon, n, bound, draws, pool, loss_range=(0, 1), delta=0.1):
    """Hold draws without replacement from a pool above ε to δ."""
    assert losses[:, 1].mean() > epsilon
    rng = np.random.default_rng(0)
    count = 0
    for draw in range(draws):
        sample = losses[rng.permutation(len(losses))[:n]]
        curve = ss.RiskCurve.from_losses([1.0, 0.5], sample, loss_range=loss_range, relative=True)
        count += ss.control.ucb(curve, epsilon, delta, bound, seed=draw, pool=pool).index == 1
    return check_rate(count, draws, delta)


@pytest.mark.parametrize("bound", POOLS)
@pytest.mark.parametrize("n", [40, 150, 200])
def test_a_pool_just_above_epsilon_is_certified_with_probability_at_most_delta(bound, n):
    """A pool of 200 with 21 losses, ε = 0.1; the whole pool among the sizes drawn."""
    violations(pool_of(200, 21), 0.1, n, bound, draws=600, pool=200)


@pytest.mark.parametrize("bound", [name for name in POOLS if name in ANY_LOSS])
@pytest.mark.parametrize("n", [40, 200])
def test_a_pool_of_gaps_is_certified_with_probability_at_most_delta(bound, n):
    """Gaps of −2, 0 and 2 whose pool mean is just above ε."""
    losses = np.zeros((200, 2))
    losses[:60, 1], losses[60:109, 1] = 2.0, -2.0
    violations(losses, 0.1, n, bound, draws=600, pool=200, loss_range=(-2, 2))


@pytest.mark.parametrize("bound", ["wsr", "binomial"])
def test_knowing_the_pool_buys_certificates(bound):
    """Most of a pool certifies what as many independent samples would not."""
    sample = pool_of(180, 10)
    sample = sample[np.random.default_rng(0).permutation(180)]
    curve = ss.RiskCurve.from_losses([1.0, 0.5], sample, loss_range=(0, 1), relative=True)
    assert ss.control.ucb(curve, 0.1, 0.01, bound, pool=200).index == 1
    assert ss.control.ucb(curve, 0.1, 0.01, bound).index is None


@pytest.mark.parametrize("bound", POOLS)
def test_a_pool_said_to_be_smaller_than_it_is_breaks_the_promise(bound):
    """The size of the pool matters: 100 samples of 2000, called a pool of 101."""
    with pytest.raises(RefutedError):
        violations(pool_of(2000, 201), 0.1, 100, bound, draws=300, pool=101)


def test_a_pool_smaller_than_the_sample_is_refused():
    """Nobody draws 20 samples without replacement from 19."""
    curve = ss.RiskCurve.from_losses([1.0, 0.5], np.zeros((20, 2)), loss_range=(0, 1))
    with pytest.raises(ValueError, match="`pool`"):
        ss.control.ucb(curve, 0.1, pool=19)
    with pytest.raises(ValueError, match="`pool`"):
        ss.control.ucb(curve, 0.1, bound="hoeffding", pool=50)


def test_a_pool_s_shortfall_is_not_blamed_on_a_floor_for_independent_samples():
    """Of a pool of 200, 190 losses of 0 suffice at ε = 0.01: 230 samples are not needed."""
    enough, few = (
        ss.ThresholdRecord([1.0, 0.5], inconsistencies={"zero_one": np.zeros((n, 2))})
        for n in (190, 100)
    )
    options = {"risk": "consistency", "epsilon": 0.01, "bound": "binomial"}
    assert ss.calibrate(enough.drawn_from(200), **options).threshold is not None
    assert ss.calibrate(enough, **options).threshold is None
    assert "even if every loss" not in str(ss.calibrate(few.drawn_from(200), **options))
