"""Promises beyond the mean: each keeps its failure probability, and known errors are noticed."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.certify.bounds import BOUNDS
from swiftsure.curves.sampling import Sampling
from swiftsure.curves.statistic import Statistic
from swiftsure.curves.transforms import among_exits, tail, worst_mean
from tests.guarantees.checkers import RefutedError, check_rate

TINY = 1e-6
DRAWS = 1000


def certified(curve, epsilon, bound):
    """How many of a curve's settings, which are independent draws here, are certified."""
    return int(BOUNDS[bound].passes(curve, np.arange(curve.n), epsilon, 0.1).sum())


def columns(losses, high=1.0):
    return ss.RiskCurve.from_losses(
        np.arange(losses.shape[1]), losses, loss_range=(-high, high), relative=False
    )


# ------------------------------------------------------------------------------------- tails


def test_tails_keep_their_failure_probability_and_means_do_not():
    """A loss of 0.5 in 10 % of the samples: the mean is within 0.1, its tail above 0.2 is not."""
    rng = np.random.default_rng(0)
    losses = 0.5 * (rng.random((150, DRAWS)) < 0.1 + TINY)
    curve = columns(losses)
    check_rate(certified(tail(curve, 0.2), 0.1, "binomial"), DRAWS, 0.1)
    with pytest.raises(RefutedError):  # a test of the mean does not see tails
        check_rate(certified(curve, 0.1, "star"), DRAWS, 0.1)


def test_the_mean_of_the_worst_share_keeps_its_failure_probability():
    """A loss of 1 in 1 % of the samples: the worst tenth loses 0.1 on average."""
    rng = np.random.default_rng(0)
    losses = (rng.random((300, DRAWS)) < 0.01 + TINY).astype(float)
    check_rate(certified(worst_mean(columns(losses), 0.1), 0.1, "star"), DRAWS, 0.1)
    observed = np.sort(losses, axis=0)[-30:].mean(axis=0)
    with pytest.raises(RefutedError):  # the worst tenth of the samples that were seen
        check_rate(int((observed <= 0.1).sum()), DRAWS, 0.1)


HALF = 0.5
"""The share whose mean loss is bounded here."""


def uniform(rng, size, worst):
    """Losses of which the worse half loses `worst` on average, and a bit."""
    return rng.random(size) * worst / 0.75 * (1 + 1e-4)


def counted_from(losses, cuts):
    """Losses that count from given points, which are divided by the share."""
    return columns(HALF * cuts + np.maximum(losses / HALF - cuts, 0.0), high=1 / HALF)


def row_before(losses):
    """As cuts, the losses of the row before: earlier samples decide them, not earlier groups."""
    return np.vstack([np.zeros(losses.shape[1]), losses[:-1]]) / HALF


def test_the_worst_share_counts_from_earlier_samples():
    """At the null it errs with probability at most δ; cuts that know the sample itself do not."""
    rng = np.random.default_rng(0)
    losses = uniform(rng, (150, DRAWS), 0.6)
    for bound in ("star", "wsr"):
        check_rate(certified(worst_mean(columns(losses), HALF), 0.6, bound), DRAWS, 0.1)
    check_rate(certified(counted_from(losses, row_before(losses)), 0.6, "star"), DRAWS, 0.1)
    with pytest.raises(RefutedError):
        check_rate(certified(counted_from(losses, losses / HALF), 0.6, "star"), DRAWS, 0.1)
    assert certified(worst_mean(columns(uniform(rng, (150, 50), 0.3)), HALF), 0.6, "star") > 15


def test_the_worst_share_of_groups_counts_from_earlier_groups():
    """Ten rows of a group have one loss: a cut that any of them decides knows the others'."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(100), 10)
    losses = np.repeat(uniform(rng, (100, 300), 0.6), 10, axis=0)
    curve = worst_mean(columns(losses), HALF).grouped(groups)
    check_rate(certified(curve, 0.6, "star"), 300, 0.1)
    known = counted_from(losses, row_before(losses)).grouped(groups)
    with pytest.raises(RefutedError):
        check_rate(certified(known, 0.6, "star"), 300, 0.1)
    better = worst_mean(columns(np.repeat(uniform(rng, (100, 50), 0.3), 10, axis=0)), HALF)
    assert certified(better.grouped(groups), 0.6, "star") > 15


def test_a_worst_share_of_rare_losses_is_certified_from_earlier_cuts_only():
    """The worst tenth loses .2: at .26 counting from 0 certifies nothing, whatever n."""
    losses = np.minimum(np.random.default_rng(0).exponential(0.06, (1000, 20)), 1.0)
    assert certified(worst_mean(columns(losses), 0.1), 0.26, "star") > 10
    assert certified(worst_mean(columns(losses), 0.1, 0.0), 0.26, "star") == 0


def test_the_empirical_worst_share_is_the_mean_of_the_largest_losses():
    """For plain samples, in groups of equal size, and with weights that count samples twice."""
    rng = np.random.default_rng(0)
    losses = rng.random((100, 3))
    largest = np.sort(losses, axis=0)[-20:].mean(axis=0)
    worst = worst_mean(columns(losses), 0.2)
    np.testing.assert_allclose(worst.risk(), largest)
    np.testing.assert_allclose(worst.grouped(np.arange(100) // 5).risk(), largest)
    twice = np.r_[np.full(40, 1.25), np.full(20, 2.5), np.zeros(40)]
    weighted = Sampling(weights=twice, max_weight=2.5).applied(worst)
    rows = np.r_[np.arange(60), np.arange(40, 60)]
    np.testing.assert_allclose(weighted.risk(), np.sort(losses[rows], axis=0)[-16:].mean(axis=0))
    assert weighted.risk_at(1) == pytest.approx(weighted.risk()[1])


# ----------------------------------------------------------------------------------- weights


def test_weights_keep_the_promise_in_production():
    """Half of the calibration samples are hard, and 80 % in production, where the risk is ε."""
    rng = np.random.default_rng(0)
    hard = rng.random((200, DRAWS)) < 0.5
    losses = (hard & (rng.random((200, DRAWS)) < 0.125 + TINY)).astype(float)  # 0.1 in production
    weights = np.where(hard, 1.6, 0.4)
    weighted = columns(losses * weights, high=1.6)
    check_rate(certified(weighted, 0.1, "star"), DRAWS, 0.1)
    single = Sampling(weights=weights[:, 0], max_weight=1.6).applied(columns(losses[:, :1]))
    assert np.array_equal(single.losses(), (losses * weights)[:, :1])
    assert single.loss_range == weighted.loss_range
    with pytest.raises(RefutedError):  # without weights, the promise is about calibration samples
        check_rate(certified(columns(losses), 0.1, "star"), DRAWS, 0.1)


def test_a_bound_that_forgets_the_largest_weight_is_noticed():
    """Stakes for losses up to 1, although weighted losses reach 20."""
    rng = np.random.default_rng(0)
    rare = rng.random((60, DRAWS)) < 0.005 + TINY
    check_rate(certified(columns(20.0 * rare, high=20.0), 0.1, "star"), DRAWS, 0.1)
    with pytest.raises(RefutedError):
        check_rate(certified(columns(1.0 * rare, high=1.0), 0.1, "star"), DRAWS, 0.1)


# --------------------------------------------------------------------------- those that exit


LEVELS = np.linspace(0.95, 0.05, 19)


def leaving(n, rate, rng):
    """Two exits; confidences are uniform, and exits differ at the same rate at all of them."""
    confidences = rng.random((n, 1))
    apart = np.column_stack([rng.random(n) < rate, np.zeros(n)]).astype(float)
    return ss.ExitRecord(confidences, inconsistencies={"zero_one": apart})


def selective(record, epsilon):
    return ss.calibrate(record, exits_promise(epsilon), path=LEVELS).threshold


def exits_promise(epsilon):
    return ss.Promise(epsilon=epsilon, risk="consistency", among="exits")


def everyone(record, epsilon):
    """Broken: counts the samples that stay as exits without a loss."""
    return ss.calibrate(record, risk="consistency", epsilon=epsilon, path=LEVELS).threshold


def every_start_at_delta(record, epsilon):
    """Broken: each start of the walk has all of δ."""
    curve = record.curve("consistency", path=LEVELS)
    single = ss.Control("ucb", "binomial")
    for k in range(1, curve.n_settings):
        rows = np.flatnonzero(curve.left_at(k))
        alone = ss.RiskCurve.from_losses([0.5], curve.loss_at(k)[rows][:, None], binary=True)
        if rows.size and single.run(alone, epsilon).index is not None:
            return 0.5
    return None


@pytest.mark.parametrize("bound", ["auto", "star"])
def test_the_risk_of_those_that_exit_keeps_its_failure_probability(bound):
    """At every setting the risk of those that exit is ε + 1e-6."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(200):
        record = leaving(150, 0.1 + TINY, rng)
        policy = ss.calibrate(record, exits_promise(0.1), path=LEVELS, bound=bound)
        found += policy.threshold is not None
    check_rate(found, 200, 0.1)


@pytest.mark.parametrize("broken", [everyone, every_start_at_delta])
def test_errors_about_those_that_exit_are_noticed(broken):
    """The same check refutes a mean over all samples, and starts that do not share δ."""
    rng = np.random.default_rng(0)
    found = sum(broken(leaving(150, 0.1 + TINY, rng), 0.1) is not None for _ in range(200))
    with pytest.raises(RefutedError):
        check_rate(found, 200, 0.1)


def apart_exits(n, risk, rng):
    """A curve of 8 settings at which different samples exit, with this conditional risk at each."""
    thresholds = np.full((9, 8), np.inf)
    thresholds[np.arange(1, 9), np.arange(8)] = 0.5
    confidences = np.eye(8, dtype=np.float32)[rng.integers(8, size=n)]
    apart = np.hstack([rng.random((n, 8)) < risk, np.zeros((n, 1), bool)]).astype(float)
    record = ss.ExitRecord(confidences, inconsistencies={"zero_one": apart})
    curve = record.curve("consistency", path=ss.Path(thresholds, "apart"))
    return among_exits(curve)


def test_where_labels_end_does_not_change_the_shares_of_those_that_exit():
    """Somebody who knows all losses ends the path where that certifies most."""
    rng = np.random.default_rng(0)
    rule, found = ss.Control("ucb", "binomial"), 0
    for _ in range(600):
        curve = apart_exits(1600, 0.1 + TINY, rng)
        found += any(rule.run(curve.cut(k), 0.1).index is not None for k in range(2, 10))
    check_rate(found, 600, 0.1)


def share_passed_on_by_failures(curve, epsilon):
    """Broken: a start hands its share of δ on even if a setting fails before the next start."""
    rule, found = BOUNDS["binomial"], False
    for k in range(1, 9):
        rows = np.flatnonzero(curve.left_at(k))
        alone = replace(curve, statistic=Statistic()).only(k, rows)
        found |= rule.passes(alone, np.arange(len(rows)), epsilon, k * 0.1 / 8)[0]
    return found


def test_the_starts_of_those_that_exit_pass_their_share_of_delta_on():
    """Seven starts without a loss hand all of δ to the last, whose risk is ε + 1e-6."""
    rng = np.random.default_rng(0)
    rule, bad = ss.Control("ucb", "binomial"), 0.1 + TINY
    last = np.r_[np.zeros(7), bad]
    found = sum(rule.run(apart_exits(1600, last, rng), 0.1).index == 8 for _ in range(600))
    check_rate(found, 600, 0.1)
    assert found > 600 * 0.1 / 8 * 2  # δ / 8 alone would allow 1.25 %
    curves = [apart_exits(1600, bad, rng) for _ in range(300)]
    check_rate(sum(rule.run(curve, 0.1).index is not None for curve in curves), 300, 0.1)
    with pytest.raises(RefutedError):
        check_rate(sum(share_passed_on_by_failures(curve, 0.1) for curve in curves), 300, 0.1)


def slices_apart(n, rng):
    """Four slices of exits: the risk of each is ε + 1e-6 at a setting of its own, 0 elsewhere."""
    return [apart_exits(n, np.where(np.arange(8) == k, 0.1 + TINY, 0.0), rng) for k in range(4, 8)]


def each_slice_alone(curves):
    """Broken: the settings that all slices certify, each in a walk of its own."""
    found = [set(ss.Control("ucb", "binomial").run(curve, 0.1).certified) for curve in curves]
    return set.intersection(*found)


def test_slices_of_those_that_exit_walk_together():
    """All slices must pass at a setting; in walks of their own, each makes mistakes of its own."""
    rng = np.random.default_rng(0)
    rule, levels = ss.Control("ucb", "binomial"), [0.1] * 4
    draws = [slices_apart(1600, rng) for _ in range(200)]
    mistakes = [set(rule.among_exits(each, levels, 0.1)) & {5, 6, 7, 8} for each in draws]
    check_rate(sum(map(bool, mistakes)), 200, 0.1)
    alone = [each_slice_alone(each) & {5, 6, 7, 8} for each in draws]
    with pytest.raises(RefutedError):
        check_rate(sum(map(bool, alone)), 200, 0.1)
    fine = [apart_exits(1600, 0.02, rng) for _ in range(4)]
    assert 8 in rule.among_exits(fine, levels, 0.1)


def test_those_that_exit_are_certified_where_they_can_be():
    rng = np.random.default_rng(0)
    assert all(selective(leaving(300, 0.02, rng), 0.1) is not None for _ in range(20))


# ------------------------------------------------------------------------------------ slices


def slices_of(n, rates, rng):
    """Slices of equal size that differ in how often exits disagree, at the only setting."""
    names = np.repeat([f"slice {k}" for k in range(len(rates))], n)
    wrong = rng.random(len(names)) < np.repeat(rates, n)
    losses = np.column_stack([np.zeros(len(names)), wrong]).astype(float)
    return ss.ThresholdRecord([None, 0.5], losses={"zero_one": losses}, slices=names)


def check_slices(calibrate, rates, draws=100):
    rng = np.random.default_rng(0)
    wrong = np.asarray(rates) > 0.1
    found = 0
    for _ in range(draws):
        fast = calibrate(slices_of(80, rates, rng))
        found += bool((wrong & fast).any())
    check_rate(found, draws, 0.1)


def fast_slices(within):
    def calibrate(record):
        policy = ss.calibrate(record, ss.Promise(epsilon=0.1, within=within))
        if within == "slices":
            return np.full(len(np.unique(record.slices)), policy.threshold is not None)
        return np.array([policy[name].threshold is not None for name in policy])

    return calibrate


def fast_alone(record):
    """Each slice calibrated by itself, at the whole of δ."""
    rows = [record.slices == name for name in np.unique(record.slices)]
    alone = [ss.calibrate(record.take(np.flatnonzero(each)), epsilon=0.1) for each in rows]
    return np.array([policy.threshold is not None for policy in alone])


UNSAFE = 0.1 + TINY


@pytest.mark.parametrize("rates", [[0.0, UNSAFE], [UNSAFE] * 5, [0.0, 0.02, UNSAFE, 0.3]])
@pytest.mark.parametrize("within", ["slices", "each slice"])
def test_every_slice_is_within_the_level_at_once(rates, within):
    check_slices(fast_slices(within), rates)


def test_each_slice_alone_keeps_its_own_failure_probability():
    rng = np.random.default_rng(0)
    found = np.zeros(4)
    for _ in range(100):
        found += fast_alone(slices_of(80, [UNSAFE] * 4, rng))
    for count in found:
        check_rate(count, 100, 0.1)


def test_pooling_slices_is_noticed():
    """One calibration of all samples promises nothing about a slice."""

    def pooled(record):
        fast = ss.calibrate(record, epsilon=0.1).threshold is not None
        return np.full(len(np.unique(record.slices)), fast)

    with pytest.raises(RefutedError):
        check_slices(pooled, [0.0, 0.0, 0.15])


def test_slices_that_do_not_share_delta_are_noticed():
    """Settings for each slice at δ are not all within ε at once."""
    with pytest.raises(RefutedError):
        check_slices(fast_alone, [UNSAFE] * 8)


def test_small_slices_are_chosen_by_their_size_alone():
    """What is too small is the same whatever the losses, and then nothing is certified."""
    rng = np.random.default_rng(0)
    consistency = ss.Promise(epsilon=0.1, risk="consistency", within="slices")
    for rate in (0.0, 0.01, 0.5):
        apart = np.column_stack([np.zeros(100), rng.random(100) < rate])
        record = ss.ThresholdRecord([None, 0.5], inconsistencies={"zero_one": apart})
        policy = ss.calibrate(record.sliced(np.repeat(["large", "small"], [80, 20])), consistency)
        assert policy.threshold is None
        assert policy.certificate.samples.small_slices == {"small": 22}
        assert "small (22)" in str(policy)


# ------------------------------------------------------------------------------------- costs


def exits_half(n, share, rng):
    """Two exits that cost 1 and 2; at the only setting, a share of the samples exits early."""
    confidences = np.where(rng.random((n, 1)) < share, 0.9, 0.1)
    apart = np.zeros((n, 2))
    return ss.ExitRecord(
        confidences, inconsistencies={"zero_one": apart}, costs={"flops": [1.0, 2.0]}
    )


def test_mean_costs_keep_their_failure_probability():
    """The mean cost is b + 1e-6; the risk is 0."""
    rng = np.random.default_rng(0)
    certified, plugged = 0, 0
    for _ in range(150):
        record = exits_half(200, 0.5 - TINY, rng)
        promises = [ss.Promise(epsilon=0.1, risk="consistency")]
        plugged += (
            ss.calibrate(record, promises, path=[0.5]).certificate.costs.means["flops"][1] <= 1.5
        )
        promises.append(ss.CostPromise("flops", at_most=1.5))
        certified += not ss.calibrate(record, promises, path=[0.5]).runs_full_model
    check_rate(certified, 150, 0.05)
    with pytest.raises(RefutedError):  # the mean of the calibration samples is no promise
        check_rate(plugged, 150, 0.1)


def test_mean_costs_are_certified_where_they_can_be():
    rng = np.random.default_rng(0)
    promises = [
        ss.Promise(epsilon=0.1, risk="consistency"),
        ss.CostPromise("flops", at_most=1.5),
    ]
    records = [exits_half(300, 0.65, rng) for _ in range(20)]
    policies = [ss.calibrate(each, promises, path=[0.5]) for each in records]
    assert sum(not policy.runs_full_model for policy in policies) > 15
