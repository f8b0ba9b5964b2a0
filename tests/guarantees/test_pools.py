"""Samples drawn without replacement from a finite pool; the promise is about that pool."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
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


@pytest.mark.parametrize("bound", ["star", "wsr"])
def test_labels_are_asked_for_as_far_as_the_pool_certifies(bound):
    """Asking certifies what all labels do: the walk that asks knows the pool too."""
    sample = Population(n_exits=4, overconfidence=2.5).sample(200, seed=0)
    full, none = (
        replace(ss.ExitRecord.from_logits(sample.logits, labels, losses=("zero_one",)), order=0)
        for labels in (sample.labels, np.full(200, -1))
    )
    options = {"loss": "zero_one", "epsilon": 0.03, "bound": bound}
    known, alone = ss.calibrate(full.drawn_from(200), **options), ss.calibrate(full, **options)
    assert known.threshold < alone.threshold
    ask = ss.Ask(lambda ids: sample.labels[np.asarray(ids, int)])
    asked = ss.calibrate(none.drawn_from(200), missing=ask, **options)
    assert asked.threshold == known.threshold


SIZE, PILOT, SETTINGS = 200, 100, 60


def pool_of_costs(rng):
    """A pool of 60 settings that each lose 21 times; where a setting loses, it takes less time."""
    losses = np.zeros((SIZE, SETTINGS + 1))
    for k in range(1, SETTINGS + 1):
        losses[rng.permutation(SIZE)[:21], k] = 1.0
    time = np.where(losses > 0, 0.6, 1.06)
    time[:, 0] = 1.0
    return ss.ThresholdRecord(
        dials={"a": np.arange(SETTINGS + 1), "b": np.arange(SETTINGS + 1)[::-1]},
        inconsistencies={"zero_one": losses},
        costs={"time": time, "flops": np.linspace(1.0, 0.5, SETTINGS + 1)},
    )


def check_pilots(population, over, draws=60):
    """Hold paths learned on half of a pool, tested on the rest, to δ; `over` is (all, rest)."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(draws):
        record = pool_of_costs(rng)
        pilot, rest = record.split(PILOT)
        path = ss.Path.pareto(pilot, risk="consistency", cost="time")
        policy = ss.calibrate(
            rest.drawn_from(population),
            risk="consistency",
            epsilon=0.1,
            bound="binomial",
            path=path,
        )
        if policy.certificate.index is not None:
            column = path.columns[policy.certificate.index]
            found += over(record, rest).inconsistencies["zero_one"][:, column].mean() > 0.1
    return check_rate(found, draws, 0.1)


def test_a_pilot_of_the_same_pool_leaves_a_promise_about_the_others():
    """The samples that are left are draws of what the pilot left, not of the whole pool.

    A setting is on the path if it lost much in the pilot, and so loses less in the others.
    """
    check_pilots(SIZE - PILOT, lambda whole, rest: rest)
    with pytest.raises(RefutedError):
        check_pilots(SIZE, lambda whole, rest: whole)
    record = pool_of_costs(np.random.default_rng(0)).drawn_from(SIZE)
    with pytest.raises(ValueError, match="what the pilot left of it"):
        ss.calibrate(record, risk="consistency", epsilon=0.1, path=ss.Path.learn(PILOT))


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
