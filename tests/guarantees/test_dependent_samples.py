"""Rows that depend on each other: `groups=` makes a group the unit of the guarantee."""

import numpy as np
import pytest

import swiftsure as ss
from guarantees.checkers import RefutedError, Task, check_rate, check_violations
from guarantees.sources import two_settings

COPIES = 20
"""Rows of one group that all have the same loss: dependence at its worst."""


def copied(grouped, bound):
    """A rule that sees every sample many times, with or without being told."""

    def choose(losses, task, seed):
        rows = np.repeat(losses, COPIES, axis=0)
        groups = np.repeat(np.arange(len(losses)), COPIES) if grouped else None
        curve = ss.RiskCurve.from_losses(
            [1.0, 0.5], rows, loss_range=(0, 1), relative=True, groups=groups
        )
        return ss.control.ucb(curve, task.epsilon, task.delta, bound, seed=seed).index

    return choose


@pytest.mark.parametrize("bound", ["star", "wsr", "hoeffding", "hoeffding_bentkus"])
def test_groups_keep_the_failure_probability(bound):
    """Groups of identical rows, tested by their means."""
    source, task = two_settings(0.1 + 1e-6), Task(0.1, 0.1)
    check_violations(copied(True, bound), source, task, n=40, draws=1000)


@pytest.mark.parametrize("bound", ["star", "wsr", "binomial", "hoeffding", "hoeffding_bentkus"])
def test_without_groups_the_same_rows_break_it(bound):
    """Copies taken for independent samples, shuffled or not, make the promise false."""
    source, task = two_settings(0.1 + 1e-6), Task(0.1, 0.1)
    with pytest.raises(RefutedError):
        check_violations(copied(False, bound), source, task, n=40, draws=300)


def test_groups_of_unequal_size_count_alike():
    """The risk of groups is the mean of their means, and it is that which is kept."""
    rng = np.random.default_rng(0)
    epsilon, count, draws = 0.1, 0, 600
    for draw in range(draws):
        sizes = np.where(rng.random(50) < 0.5, 1, 30)
        # Small groups lose more: the mean over rows is far below the mean over groups.
        rate = np.where(sizes == 1, 2 * epsilon + 1e-6, 0.0)
        lost = np.repeat(rng.random(50) < rate, sizes)
        groups = np.repeat(np.arange(50), sizes)
        curve = ss.RiskCurve.from_losses(
            [1.0, 0.5],
            np.column_stack([np.zeros(len(lost)), lost]),
            loss_range=(0, 1),
            relative=True,
            groups=groups,
        )
        assert curve.n == 50
        count += ss.control.ucb(curve, epsilon, 0.1, "star", seed=draw).index is not None
    check_rate(count, draws, 0.1)


def test_records_with_groups_are_tested_by_group():
    """A record's groups reach the curve, and with them the certificate."""
    rng = np.random.default_rng(0)
    losses = np.column_stack([rng.random(400) < 0.02, np.zeros(400)])
    record = ss.ExitRecord(
        rng.random((400, 1)), losses={"zero_one": losses}, groups=np.arange(400) // 4
    )
    policy = ss.calibrate(record, epsilon=0.1)
    assert (policy.certificate.unit, policy.certificate.n) == ("groups", 100)
    assert policy.certificate.n_samples == 400


def test_means_of_groups_are_not_taken_for_counts():
    """The binomial test of group means is refused: they are not 0 or 1."""
    losses = np.column_stack([np.zeros(4), [1.0, 0.0, 0.0, 0.0]])
    curve = ss.RiskCurve.from_losses(
        [1.0, 0.5], losses, binary=True, relative=True, groups=[0, 0, 1, 1]
    )
    assert not curve.loss_range.binary
    with pytest.raises(ValueError, match="whole"):
        ss.control.ucb(curve, 0.1, bound="binomial")
