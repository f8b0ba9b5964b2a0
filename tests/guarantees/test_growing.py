"""Calibration that grows: δ holds for all moments together, however often one looks."""

from contextlib import suppress

import numpy as np
import pytest

import swiftsure as ss
from swiftsure._lib import kernels as _kernels
from swiftsure.certify.bounds import _bets, trinomial
from swiftsure.study.simulate import Population
from tests.guarantees.checkers import RefutedError, Task, check_rate, check_test
from tests.guarantees.sources import Sequences

TINY = 1e-6


def ever_certified(columns, epsilon, high, horizon, delta=0.1):
    """Return for each column of losses whether its bet ever reaches 1/δ."""
    n, draws = columns.shape
    losses = _kernels.Losses(
        np.ascontiguousarray(columns, np.float64),
        np.empty((n, 0), np.float32),
        np.empty((draws, 0), np.float32),
        False,
        0,
    )
    start = -np.log(delta), 0.0, 1.0, 0.25 * high**2
    sizes = np.empty((n, 0))  # all samples count the same
    thresholds = np.empty((0, draws), np.float32)
    test = _bets.GrowingTest(epsilon, float(high), horizon)
    return np.array(
        [_bets.grow(losses, sizes, thresholds, k, 0, n, start, test)[0] <= 0 for k in range(draws)]
    )


SEQUENCES = {
    "0 and 1": (Sequences([0, 1], 9), Task(0.3, 0.1)),
    "gaps": (Sequences([-1, 0, 1], 6), Task(0.5, 0.1, -1, 1)),
    "−1 and 1": (Sequences([-1, 1], 9), Task(0.3, 0.02, -1, 1)),
    "−2 and 2": (Sequences([-2, 2], 6), Task(0.2, 0.02, -2, 2)),
}


@pytest.mark.parametrize("horizon", [1, 3, 20])
@pytest.mark.parametrize(("sequences", "task"), SEQUENCES.values(), ids=SEQUENCES)
def test_ever_certifying_has_probability_at_most_delta_exactly(sequences, task, horizon):
    """Every sequence of losses is listed; bets end before, at and after their horizon."""

    def test(losses, task):
        column = np.asarray(losses, float)[:, None]
        return bool(ever_certified(column, task.epsilon, task.high, horizon, task.delta)[0])

    check_test(test, sequences, task)


CASES = {
    "rare losses": ([0.0, 1.0], [0.95 - TINY, 0.05 + TINY]),
    "gaps": ([1.0, -1.0, 0.0], [0.12 + TINY, 0.07, 0.81 - TINY]),
    "many small": ([0.05 + TINY + 0.02, 0.05 + TINY - 0.02], [0.5, 0.5]),
}


@pytest.mark.parametrize("horizon", [100, 1000])
@pytest.mark.parametrize(("values", "weights"), CASES.values(), ids=CASES)
def test_looking_after_every_sample_keeps_delta(values, weights, horizon):
    """3,000 samples at a risk just above ε, far past the horizon."""
    rng = np.random.default_rng(0)
    columns = rng.choice(values, (3000, 600), p=weights)
    check_rate(ever_certified(columns, 0.05, 1.0, horizon).sum(), 600, 0.1)


def test_looking_at_a_test_for_fixed_n_again_and_again_is_noticed():
    """The exact test of gaps, read after every tenth sample: the same check refutes it."""
    rng = np.random.default_rng(0)
    values, weights = CASES["gaps"]
    columns = rng.choice(values, (600, 600), p=weights)
    found = np.zeros(600, bool)
    for n in range(10, 601, 10):
        b, c = (columns[:n] > 0).sum(axis=0), (columns[:n] < 0).sum(axis=0)
        found |= b <= trinomial.certified_counts(n, 0.05, 0.1)[b + c]
    check_rate(ever_certified(columns, 0.05, 1.0, 300).sum(), 600, 0.1)
    with pytest.raises(RefutedError):
        check_rate(found.sum(), 600, 0.1)


@pytest.mark.slow
def test_bets_that_know_when_they_will_be_read_are_noticed():
    """STaR for a fixed n, whose stakes aim at the present n each time one looks."""
    rng = np.random.default_rng(0)
    values, weights = CASES["gaps"]
    found = 0
    for _ in range(400):
        losses = rng.choice(values, 600, p=weights)
        found += any(
            ss.bounds.certify(losses[:n], 0.05, bound="star", loss_range=(-1, 1))
            for n in range(4, 601, 4)
        )
    with pytest.raises(RefutedError):
        check_rate(found, 400, 0.1)


def test_stopping_when_the_answer_pleases_keeps_delta():
    """On a network with known risks: the fastest policy that was ever shown is within ε."""
    population = Population(n_exits=4, overconfidence=2.5, n_classes=5)
    path = ss.Path.logit_grid(step=0.2)
    true = population.risk(path.thresholds, "gap", "zero_one")
    rng = np.random.default_rng(0)
    violations, fast = 0, 0
    for _ in range(50):
        request = ss.Calibration(ss.Promise("zero_one", epsilon=0.06), path=path)
        calibration = request.start(horizon=200)
        shown = [0]
        for _ in range(12):
            sample = population.sample(50, rng)
            record = ss.ExitRecord.from_logits(sample.logits, sample.labels, losses="zero_one")
            calibration.update(record)
            shown.append(calibration.index or 0)
        violations += max(true[shown]) > 0.06
        fast += max(shown) > 0
    check_rate(violations, 50, 0.1)
    assert fast > 35


def test_samples_added_again_are_refused_by_ids_that_count_from_0():
    """Were they not, the same samples would certify a risk just above ε sooner or later."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(40):
        losses = np.column_stack([np.zeros(60), rng.random(60) < 0.1 + TINY])
        request = ss.Calibration(ss.Promise(epsilon=0.1, risk="consistency"))
        calibration = request.start(horizon=1000)
        with suppress(ValueError):
            for _ in range(20):
                tables = {"inconsistencies": {"zero_one": losses}, "ids": np.arange(60)}
                calibration.update(ss.ThresholdRecord([None, 0.5], **tables))
        found += calibration.index is not None
    check_rate(found, 40, 0.1)


def test_samples_added_again_break_delta():
    columns = np.random.default_rng(0).random((60, 100)) < 0.1 + TINY
    with pytest.raises(RefutedError):
        check_rate(ever_certified(np.tile(columns, (20, 1)), 0.1, 1.0, 1000).sum(), 100, 0.1)
