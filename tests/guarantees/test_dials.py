"""Several dials keep δ: paths learned on a pilot, and branches that share δ."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.certify.control import Control
from swiftsure.curves.branches import Branches
from swiftsure.curves.pareto import pareto_order, upper_estimates
from swiftsure.curves.sampling import Sampling
from tests.guarantees.checkers import (
    ROUNDING,
    RefutedError,
    Task,
    check_rate,
    check_violations,
    check_violations_exactly,
)
from tests.guarantees.rules import curve_of
from tests.guarantees.sources import Types, independent_columns

ABOVE = 1e-6
"""How far above ε the risk of a setting that must not be chosen is."""

UCB = Control("ucb", "binomial")


def record_of(losses, order=0):
    """A record of two dials; the faster a setting, the higher its number."""
    n, size = losses.shape
    return ss.ThresholdRecord(
        dials={"a": np.arange(size), "b": np.arange(size)[::-1]},
        inconsistencies={"zero_one": losses},
        costs={"time": np.linspace(1.0, 0.1, size)},
        ids=np.arange(n) + 1_000_000 * order,
    )


def chosen(calibration, path, task):
    """The number of the setting that is chosen, None for the full model."""
    found = UCB.run(calibration.curve("consistency", path=path), task.epsilon, task.delta)
    return None if found.index is None else path.columns[found.index]


# ------------------------------------------------------------------------------------- pilots


def separate(pilot, calibration):
    """The library's way: the path comes from other samples."""
    return ss.Path.pareto(pilot)


def from_calibration(pilot, calibration):
    """Broken: the path comes from the calibration samples, and forgets it."""
    return replace(ss.Path.pareto(calibration), pilot=None)


def violations_with_a_pilot(learn, risks, n_pilot, n, task, draws, seed=0):
    """How often a setting with a risk above ε is chosen."""
    source, rng = independent_columns(*risks), np.random.default_rng(seed)
    found = 0
    for _ in range(draws):
        pilot = record_of(source.sample(n_pilot, rng), 1)
        calibration = record_of(source.sample(n, rng), 2)
        column = chosen(calibration, learn(pilot, calibration), task)
        found += column is not None and source.risk[column] > task.epsilon
    return found


TASK = Task(0.1)
BINARY = Task(0.1, binary=True)
SETTINGS = {
    "overfits": ([0.1 + ABOVE] * 60, 10, 60),  # a tiny pilot, many settings, none of them allowed
    "one allowed": ([0.0, *[0.1 + ABOVE] * 30], 20, 60),
    "rising": (np.linspace(0.0, 0.2, 21) + ABOVE, 50, 100),
    "unordered": (np.tile([0.02, 0.1 + ABOVE, 0.3], 8), 40, 150),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_path_learned_on_a_pilot_keeps_delta(name):
    risks, n_pilot, n = SETTINGS[name]
    found = violations_with_a_pilot(separate, risks, n_pilot, n, TASK, 400)
    check_rate(found, 400, TASK.delta)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_path_learned_on_a_pilot_keeps_delta_in_20000_calibrations(name):
    """By the functions that `Path.pareto` calls, which saves making 40,000 records."""
    risks, n_pilot, n = SETTINGS[name]
    source, rng = independent_columns(*risks), np.random.default_rng(0)
    costs = np.linspace(1.0, 0.1, len(source.risk))
    found = 0
    for _ in range(20_000):
        order = pareto_order(upper_estimates(source.sample(n_pilot, rng)), costs)
        curve = curve_of(source.sample(n, rng)[:, order], BINARY)
        index = UCB.run(curve, TASK.epsilon, TASK.delta, 0).index
        found += index is not None and source.risk[order[index]] > TASK.epsilon
    check_rate(found, 20_000, TASK.delta)


def test_a_path_learned_on_the_calibration_samples_is_refuted():
    risks, n_pilot, n = SETTINGS["overfits"]
    found = violations_with_a_pilot(from_calibration, risks, n_pilot, n, TASK, 200)
    with pytest.raises(RefutedError):
        check_rate(found, 200, TASK.delta)


PAIRS = Types(
    np.asarray([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]], float),
    np.asarray([0.49, 0.21, 0.21, 0.09]),  # both settings have risk 0.3
)


def exact_violation(path_of, n, task):
    """The probability that a setting with a risk above ε is chosen, over all outcomes."""
    total = 0.0
    for losses, probability in PAIRS.calibration_sets(n):
        calibration = record_of(losses, 2)
        column = chosen(calibration, path_of(calibration), task)
        total += probability * (column is not None and PAIRS.risk[column] > task.epsilon)
    return total


def test_a_pilot_keeps_delta_in_every_outcome():
    """Given any pilot, so on average over pilots too."""
    task = Task(0.3 - ABOVE, 0.1)
    for losses, _ in PAIRS.calibration_sets(2):
        path = ss.Path.pareto(record_of(losses, 1))
        assert exact_violation(lambda _, path=path: path, 8, task) <= task.delta + ROUNDING


def test_a_pilot_of_calibration_samples_breaks_delta_in_exact_probability():
    task = Task(0.3 - ABOVE, 0.1)
    found = exact_violation(lambda record: from_calibration(None, record), 7, task)
    assert found > task.delta + ROUNDING


def test_a_split_keeps_delta_even_for_sorted_files():
    """`Path.learn` draws the pilot at random, whatever the order of the samples."""
    rng, source = np.random.default_rng(0), independent_columns(*[0.1 + ABOVE] * 10)
    found = 0
    for _ in range(150):
        losses = source.sample(80, rng)
        losses = losses[np.argsort(losses.sum(axis=1))]
        record = record_of(losses)
        policy = ss.calibrate(record, risk="consistency", epsilon=0.1, path=ss.Path.learn(20))
        found += policy.threshold is not None
    check_rate(found, 150, 0.1)


def with_weights(losses, rng):
    """Half of the samples weigh 1.6, and only these lose anything."""
    heavy = rng.random(len(losses)) < 0.5
    return record_of(losses * heavy[:, None]).weighted(np.where(heavy, 1.6, 0.4), max_weight=1.6)


def with_copies(losses, rng):
    """Each sample is a group of four that have the same losses."""
    return record_of(np.repeat(losses, 4, axis=0)).grouped(np.repeat(np.arange(len(losses)), 4))


@pytest.mark.parametrize(
    ("draw", "scale"),
    [
        (with_weights, 1 / 0.8),
        (with_copies, 1.0),
    ],
)
def test_a_pilot_keeps_delta_whatever_the_record_says_of_its_draw(draw, scale):
    """The risk in production is just above ε; a record that forgets the fact is refuted."""
    source = independent_columns(*[(0.1 + ABOVE) * scale] * 4)

    def certified(change, draws=150):
        rng, found = np.random.default_rng(0), 0
        for _ in range(draws):
            record = change(draw(source.sample(300, rng), rng))
            path = ss.Path.learn(20)
            policy = ss.calibrate(record, risk="consistency", epsilon=0.1, bound="star", path=path)
            found += policy.certificate.index is not None
        return check_rate(found, draws, 0.1)

    def forgets(record):
        return replace(record, groups=None, sampling=Sampling())

    certified(lambda record: record)
    with pytest.raises(RefutedError):
        certified(forgets)


# ----------------------------------------------------------------------------------- branches


def along(branches):
    """The rule that tests these branches and takes the cheapest certified setting."""

    def choose(losses, task, seed):
        size = losses.shape[1]
        curve = curve_of(losses, task)
        path = ss.Path([None, *np.linspace(0.9, 0.1, size - 1)], "branches", branches=branches)
        curve = replace(curve, path=path, costs={"time": np.linspace(1, 0.1, size)})
        return UCB.run(curve, task.epsilon, task.delta, seed).index

    return choose


class WholeDelta(Branches):
    """Broken: every branch is tested at δ."""

    def certified(self, p_value, delta):
        return super().certified(p_value, delta * len(self.settings))


class CopiedDelta(Branches):
    """Broken: a branch that ended gives all of its δ to each of the others."""

    def _pass_on(self, shares, places, number):
        for k in range(len(self.settings)):
            shares[k] += shares[number] * (k != number)
        shares[number] = 0.0


class SkippingFailures(Branches):
    """Broken: a branch goes on after a failure."""

    def certified(self, p_value, delta):
        share = delta / len(self.settings)
        return [k for branch in self.settings for k in branch if p_value(k) <= share]


BAD = 0.1 + ABOVE
CHAINS = ((1, 2, 3), (4, 5, 6), (7, 8, 9))
SHARED = {
    "all just above": [BAD] * 9,
    "one branch allowed": [0, 0, 0, BAD, BAD, BAD, BAD, BAD, BAD],
    "two branches allowed": [0, 0, 0, 0, 0, 0, BAD, BAD, BAD],
    "late failures": [0, BAD, 0.3, 0, 0, BAD, 0, 0.05, BAD],
}


@pytest.mark.parametrize("flow", [True, False])
@pytest.mark.parametrize("name", SHARED)
def test_branches_keep_delta(name, flow):
    source = independent_columns(*SHARED[name])
    check_violations(along(Branches(CHAINS, flow)), source, BINARY, 80, 300)


@pytest.mark.slow
@pytest.mark.parametrize("flow", [True, False])
@pytest.mark.parametrize("name", SHARED)
def test_branches_keep_delta_in_20000_calibrations(name, flow):
    source = independent_columns(*SHARED[name])
    check_violations(along(Branches(CHAINS, flow)), source, BINARY, 80, 20_000)


def test_branches_without_a_split_of_delta_are_refuted():
    source = independent_columns(*[BAD] * 9)
    with pytest.raises(RefutedError):
        check_violations(along(WholeDelta(CHAINS, flow=False)), source, BINARY, 80, 300)


def test_branches_that_copy_delta_are_refuted():
    """Of twelve branches eight end, and each would give all of its δ to each of the others."""
    source = independent_columns(*[0] * 8, *[BAD] * 4)
    chains = (*((k,) for k in range(1, 9)), *((k,) for k in range(9, 13)))
    with pytest.raises(RefutedError):
        check_violations(along(CopiedDelta(chains)), source, BINARY, 80, 150)
    check_violations(along(Branches(chains)), source, BINARY, 80, 150)


def test_branches_that_skip_failures_are_refuted():
    source = independent_columns(*[BAD] * 40)
    rule = along(SkippingFailures((tuple(range(1, 41)),)))
    with pytest.raises(RefutedError):
        check_violations(rule, source, BINARY, 80, 300)


@pytest.mark.parametrize("flow", [True, False])
def test_branches_keep_delta_in_every_outcome(flow):
    task = Task(0.3 - ABOVE, 0.1, binary=True)
    for n in (8, 14):
        check_violations_exactly(along(Branches(((1,), (2,)), flow)), PAIRS, task, n)


def test_branches_without_a_split_of_delta_break_it_in_exact_probability():
    task = Task(0.3 - ABOVE, 0.1, binary=True)
    with pytest.raises(RefutedError):
        check_violations_exactly(along(WholeDelta(((1,), (2,)), flow=False)), PAIRS, task, 7)


def test_flow_is_the_graphical_procedure_of_bretz_et_al():
    """The same certified settings as the general algorithm of a weighted graph, written plainly."""
    rng = np.random.default_rng(0)
    branches = Branches(((1, 2), (3,), (4, 5, 6), (7,)))
    for _ in range(500):
        p = dict(enumerate(rng.random(7) ** 3 * 0.2, start=1))
        found = branches.certified(p.__getitem__, 0.1)
        assert sorted(found) == bretz(branches.settings, p, 0.1)


def bretz(branches, p, delta):
    """Bretz et al. (2009), algorithm 1, with edges along branches and from ends to other starts."""
    names = [k for branch in branches for k in branch]
    weight = dict.fromkeys(names, 0.0) | {branch[0]: 1 / len(branches) for branch in branches}
    edge = {(i, j): 0.0 for i in names for j in names}
    for branch in branches:
        for one, following in pairwise(branch):
            edge[one, following] = 1.0
        for other in branches:
            if other != branch:
                edge[branch[-1], other[0]] = 1 / (len(branches) - 1)
    left, rejected = list(names), []
    while True:
        passing = [k for k in left if weight[k] > 0 and p[k] <= weight[k] * delta * (1 + 1e-12)]
        if not passing:
            return sorted(rejected)
        i = passing[0]
        left.remove(i)
        rejected.append(i)
        for j in left:
            weight[j] += weight[i] * edge[i, j]
        new = {}
        for j in left:
            for k in left:
                loop = edge[j, i] * edge[i, j]
                through = edge[j, k] + edge[j, i] * edge[i, k]
                new[j, k] = through / (1 - loop) if j != k and loop < 1 else 0.0
        edge.update(new)
