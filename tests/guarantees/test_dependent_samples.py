"""Rows that depend on each other: `groups=` makes a group the unit of the guarantee."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import swiftsure as ss
from swiftsure.curves.sampling import Sampling
from tests.guarantees.checkers import (
    RefutedError,
    Task,
    check_not_above,
    check_rate,
    check_violations,
)
from tests.guarantees.sources import two_settings
from tests.guarantees.strategies import ANY_DELTA, deltas, levels, properties, tables

pytestmark = ANY_DELTA

COPIES = 20
"""Rows of one group that all have the same loss: dependence at its worst."""


def copied(grouped, bound):
    """A rule that sees every sample many times, with or without being told."""

    def choose(losses, task, seed):
        rows = np.repeat(losses, COPIES, axis=0)
        curve = ss.RiskCurve.from_losses([1.0, 0.5], rows, loss_range=(0, 1), relative=True)
        if grouped:
            curve = curve.grouped(np.repeat(np.arange(len(losses)), COPIES))
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
        ).grouped(groups)
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
    assert (policy.certificate.samples.unit, policy.certificate.samples.n) == ("groups", 100)
    assert policy.certificate.samples.n_samples == 400


def test_means_of_groups_are_not_taken_for_counts():
    """The binomial test of group means is refused: they are not 0 or 1."""
    losses = np.column_stack([np.zeros(4), [1.0, 0.0, 0.0, 0.0]])
    curve = ss.RiskCurve.from_losses([1.0, 0.5], losses, binary=True, relative=True).grouped(
        [0, 0, 1, 1]
    )
    assert not curve.loss_range.binary
    with pytest.raises(ValueError, match="whole"):
        ss.control.ucb(curve, 0.1, bound="binomial")


# ------------------------------------------------------------- groups that differ in size


WEIGHS = [name for name, bound in ss.bounds.BOUNDS.items() if bound.weighs]
"""Bounds that test averages over the samples of groups."""


@dataclass(frozen=True)
class Users:
    """Users who send one request each, but for a share `heavy` of them, who send `most`.

    At setting k a share of the heavy users, `hurt[k]`, loses every request; all other requests are
    as good as with the full model. So a few groups hold nearly all requests.
    """

    hurt: tuple[float, ...]
    heavy: float = 0.05
    most: int = 200

    @property
    def risk(self):
        """Expected loss per request at each setting."""
        requests = self.heavy * self.most + 1 - self.heavy
        return np.asarray(self.hurt) * self.heavy * self.most / requests

    @classmethod
    def with_risk(cls, *risks, heavy=0.05, most=200):
        """Return the users whose requests have these risks, after the full model's 0."""
        share = (heavy * most + 1 - heavy) / (heavy * most)
        return cls((0.0, *(risk * share for risk in risks)), heavy, most)

    def sample(self, n, rng):
        """Draw n users: the losses of their requests, (requests, K), and the user of each."""
        sizes = np.where(rng.random(n) < self.heavy, self.most, 1)
        lost = (sizes > 1)[:, None] & (rng.random((n, 1)) < np.asarray(self.hurt))
        users = np.repeat(np.arange(n), sizes)
        return lost[users].astype(float), users

    def curve(self, n, rng, **average):
        """Return the curve of n users."""
        losses, users = self.sample(n, rng)
        settings = np.arange(losses.shape[1])[::-1]
        return ss.RiskCurve.from_losses(
            settings, losses, loss_range=(-1, 1), relative=True
        ).grouped(users, **average)


def violations(users, task, n, draws, bound, **average):
    """Check how often a setting is certified whose risk per request is above ε."""
    rng = np.random.default_rng(0)
    count = 0
    for draw in range(draws):
        curve = users.curve(n, rng, **average)
        index = ss.control.ucb(curve, task.epsilon, task.delta, bound, seed=draw).index
        count += index is not None and users.risk[index] > task.epsilon
    return check_rate(count, draws, task.delta)


def test_the_default_says_that_groups_are_averaged():
    """Group averages of .03 are certified at .05 though .55 of all requests are hurt, and said."""
    losses, users = Users((0.0, 0.6)).sample(4000, np.random.default_rng(0))
    record = ss.ThresholdRecord([None, 0.5], losses={"zero_one": losses}, groups=users)
    assert losses[:, 1].mean() > 0.5
    policy = ss.calibrate(record, epsilon=0.05)
    assert policy.threshold == 0.5
    assert (policy.certificate.samples.unit, policy.certificate.samples.average) == (
        "groups",
        "group",
    )
    assert policy.certificate.promises[0].calibration_risk < 0.04
    assert (
        "the average over groups of each group's average zero_one gap to the full model (every"
        " group counts the same, whatever its size) is at most 0.05" in str(policy)
    )
    assert "expected zero_one gap" not in str(policy)
    assert "every group counts the same, whatever its size" in str(policy)


def test_per_sample_the_same_users_are_not_certified():
    """And the certificate says per sample, with the declared largest group."""
    losses, users = Users((0.0, 0.6)).sample(4000, np.random.default_rng(0))
    record = ss.ThresholdRecord([None, 0.5], losses={"zero_one": losses})
    record = record.grouped(users, average="sample", max_size=200)
    policy = ss.calibrate(record, epsilon=0.05)
    assert policy.runs_full_model
    assert "zero_one gap to the full model per sample" in str(policy)
    allowed = ss.calibrate(record, epsilon=0.8)
    certificate = allowed.certificate
    assert (certificate.samples.unit, certificate.samples.average) == ("groups", "sample")
    assert certificate.samples.max_group_size == 200
    promise = certificate.promises[0]
    assert promise.calibration_risk == pytest.approx(losses[:, 1].mean())
    assert promise.calibration_risk < promise.upper_bound <= 0.8
    assert any("more than 200 samples" in text for text in certificate.assumptions)
    assert "every sample counts the same, whatever its group" in str(allowed)


FEW_HEAVY = {"users": Users.with_risk(0.05 + 1e-6), "task": Task(0.05), "n": 1200}
MANY_HEAVY = {
    "users": Users.with_risk(0.5 + 1e-6, heavy=0.4, most=10),
    "task": Task(0.5, 0.3),
    "n": 60,
}
WORLDS = {"few heavy users": FEW_HEAVY, "many heavy users": MANY_HEAVY}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("bound", WEIGHS)
def test_the_risk_per_sample_keeps_the_failure_probability(bound, world):
    """P(certified) ≤ δ for a risk per request just above ε."""
    most = world["users"].most
    violations(**world, draws=500, bound=bound, average="sample", max_size=most)


@pytest.mark.parametrize("bound", ["star", "wsr", "empirical_bernstein"])
def test_group_means_break_a_promise_per_sample(bound):
    """What is certified about group averages says nothing about requests."""
    with pytest.raises(RefutedError):
        violations(**FEW_HEAVY, draws=100, bound=bound, average="group")


def test_hoeffding_s_group_means_break_a_promise_per_sample_too():
    """It needs more users for it."""
    with pytest.raises(RefutedError):
        violations(**FEW_HEAVY | {"n": 4000}, draws=60, bound="hoeffding", average="group")


@pytest.mark.parametrize("bound", WEIGHS)
def test_settings_of_low_risk_per_sample_are_certified(bound):
    """The tests are not vacuous: a risk of 0 is certified with enough users."""
    users, rng = Users((0.0, 0.0), heavy=0.5, most=20), np.random.default_rng(0)
    curve = users.curve(600, rng, average="sample", max_size=20)
    assert ss.control.ucb(curve, 0.2, 0.1, bound).index == 1


CRC_USERS = Users.with_risk(*np.linspace(0.01, 0.4, 40), heavy=0.2, most=20)


def crc_mean_risk(draws, options, **average):
    """Check the mean risk per request of crc's choices."""
    rng, risks = np.random.default_rng(0), np.zeros(draws)
    for draw in range(draws):
        curve = CRC_USERS.curve(300, rng, **average)
        index = ss.control.crc(curve, 0.1, seed=draw, **options).index
        risks[draw] = CRC_USERS.risk[index or 0]
    return check_not_above(risks, 0.1)


@pytest.mark.parametrize("options", [{}, {"method": "ucb"}], ids=["monotone", "ucb"])
def test_crc_keeps_the_mean_risk_per_sample(options):
    """E[risk per request] ≤ ε; running maxima, which lose nothing here, use most of it."""
    mean = crc_mean_risk(800, options, average="sample", max_size=20)
    assert mean > (0.08 if not options else 0.0)


def test_crc_of_group_means_breaks_the_mean_risk_per_sample():
    """Here the risk per request is about five times that of groups."""
    with pytest.raises(RefutedError):
        crc_mean_risk(100, {}, average="group")


SMALL_AND_LARGE = ((1, 0.0), (1, 1.0), (4, 0.0), (4, 1.0))
"""Kinds of groups: size, and the loss of each sample."""


def chances_with_risk(epsilon):
    """Distributions over these kinds whose risk per sample is ε."""
    for large, lost in itertools.product(np.linspace(0.05, 0.95, 19), np.linspace(0, 1, 21)):
        rest = (epsilon * (4 * large + 1 - large) - 4 * large * lost) / (1 - large)
        if 0 <= rest <= 1:
            small = 1 - large
            yield [small * (1 - rest), small * rest, large * (1 - lost), large * lost]


@pytest.mark.parametrize("bound", WEIGHS)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.3), (0.3, 0.4), (0.7, 0.1)])
def test_every_outcome_of_six_groups(bound, epsilon, delta):
    """P(certified) ≤ δ with no randomness, for many distributions of risk ε."""
    kinds = ss.RiskCurve.from_losses(
        [1.0, 0.5],
        [[0, loss] for size, loss in SMALL_AND_LARGE for _ in range(size)],
        loss_range=(0, 1),
        relative=True,
    ).grouped([0, 1, *[2] * 4, *[3] * 4], average="sample", max_size=4)
    outcomes = np.asarray(list(itertools.product(range(4), repeat=6)))
    test, levels_ = ss.bounds.BOUNDS[bound], np.asarray([epsilon])
    certified = [test.select(kinds, rows, levels_, delta, 1, 0)[0] == 1 for rows in outcomes]
    chances = np.asarray(list(chances_with_risk(epsilon)))
    assert len(chances) > 20
    probability = np.prod(chances[:, outcomes], axis=2) @ certified
    assert probability.max() <= delta + 1e-9


RULES = {
    **{f"ucb {bound}": ss.Control("ucb", bound) for bound in WEIGHS},
    "ltt bonferroni": ss.Control("ltt", "hoeffding", correction="bonferroni"),
    "crc": ss.Control("crc"),
    "crc by test": ss.Control("crc", method="ucb"),
    "crc as in the paper": ss.Control("crc", selection="paper"),
    "empirical": ss.Control("empirical"),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(losses=tables(), epsilon=levels, size=st.integers(1, 4), delta=deltas)
@properties()
def test_equal_sizes_make_both_promises_the_same(rule, losses, epsilon, size, delta):
    """Groups of the declared size: choice, risk and upper bound are those of group means."""
    rows = np.repeat(losses, size, axis=0)
    groups = np.repeat(np.arange(len(losses)), size)
    by_group, by_sample = (
        ss.RiskCurve.from_losses(
            np.arange(losses.shape[1])[::-1],
            rows,
            loss_range=(0, 1),
            relative=True,
        ).grouped(groups, average=average, max_size=size if average == "sample" else None)
        for average in ("group", "sample")
    )
    assert rule.run(by_group, epsilon, delta).index == rule.run(by_sample, epsilon, delta).index
    np.testing.assert_array_equal(by_group.risk(), by_sample.risk())
    for name in WEIGHS:
        everything = np.arange(by_group.n)
        upper = [
            ss.bounds.BOUNDS[name].upper(curve, everything, losses.shape[1] - 1, delta, 0)
            for curve in (by_group, by_sample)
        ]
        assert upper[0] == pytest.approx(upper[1], abs=1e-8)


@st.composite
def unequal(draw):
    """A curve of groups of one to five samples, per sample."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=2, max_size=30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from([0.0, 0.02, 0.1, 0.5]))
    lost = np.repeat(rng.random((len(sizes), 3)) < share, sizes, axis=0)
    losses = np.column_stack([np.zeros(len(lost)), lost * rng.choice([-1, 1, 1], lost.shape)])
    return ss.RiskCurve.from_losses(
        [3, 2, 1, 0],
        losses,
        loss_range=(-1, 1),
        relative=True,
    ).grouped(
        np.repeat(np.arange(len(sizes)), sizes),
        average="sample",
        max_size=draw(st.integers(5, 12)),
    )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(curve=unequal(), pair=st.tuples(levels, levels), delta=deltas)
@properties()
def test_per_sample_a_smaller_epsilon_never_chooses_a_faster_setting(rule, curve, pair, delta):
    """What is tested depends on ε, and the choice still moves one way."""
    low, high = (rule.run(curve, epsilon, delta).index or 0 for epsilon in sorted(pair))
    assert low <= high
    at_once = rule.indices(curve, np.sort(pair), delta)
    if rule.name in ("empirical", "crc") and not rule.uses_bound:
        assert np.maximum(at_once, 0).tolist() == [low, high]


@pytest.mark.parametrize("bound", WEIGHS)
@given(curve=unequal())
@properties()
def test_p_values_per_sample_fall_as_epsilon_rises(bound, curve):
    """Upper bounds, which invert them by bisection, rest on it."""
    rows = np.arange(curve.n)
    p = [ss.bounds.BOUNDS[bound].p_values(curve, rows, e) for e in np.linspace(0.02, 0.98, 25)]
    assert (np.diff(p, axis=0) <= 1e-9).all()


def test_stakes_that_know_epsilon_would_not_be_monotone():
    """Plain STaR on groups filled up with ε certifies .72 to .86 here, but not .88."""
    rng = np.random.default_rng(83059)
    n, most = int(rng.integers(60, 200)), 1000
    sizes = np.where(rng.random(n) < 0.05, most, 1)
    lost = rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.8, 0.1], size=n)
    losses = np.repeat(np.column_stack([np.zeros(n), lost]), sizes, axis=0)
    curve = ss.RiskCurve.from_losses(
        [1.0, 0.5],
        losses,
        relative=True,
    ).grouped(np.repeat(np.arange(n), sizes), average="sample", max_size=most)
    epsilons, rows = np.linspace(0.02, 0.98, 49), np.arange(n)
    share = sizes / most
    filled = [
        ss.bounds.certify(share * lost + e * (1 - share), e, bound="star", loss_range=(-1, 1))
        for e in epsilons
    ]
    assert (np.diff(np.asarray(filled, int)) < 0).any()
    star = ss.bounds.BOUNDS["star"]
    certified = [star.select(curve, rows, epsilons[[j]], 0.1, 1, 0)[0] for j in range(49)]
    assert (np.diff(certified) >= 0).all()
    assert certified[-1] == 1
    upper = star.upper(curve, rows, 1, 0.1, 0)
    assert np.array_equal(np.asarray(certified) == 1, epsilons >= upper)


def test_a_study_per_sample_compares_the_pool_s_risk_per_sample():
    """Splits and draws are of whole groups; risks and costs are ratios, by hand."""
    losses, users = Users.with_risk(0.02, 0.1, 0.3, heavy=0.2, most=10).sample(
        400, np.random.default_rng(1)
    )
    rng = np.random.default_rng(2)
    costs = np.column_stack([np.full(len(losses), 4.0), rng.random((len(losses), 3))])
    record = ss.ThresholdRecord(
        [None, 0.9, 0.5, 0.1],
        losses={"zero_one": losses},
        costs={"layers": costs},
    ).grouped(users, average="sample", max_size=10)
    controls = {"crc": ss.Control("crc"), "ucb": ss.Control("ucb")}
    epsilons, n, splits = np.asarray([0.05, 0.2]), 150, 6
    study = ss.evaluate(
        record, controls=controls, epsilons=epsilons, n_calibration=n, splits=splits
    )
    assert (study.about.unit, study.about.average, study.n_pool) == ("groups", "sample", 400)
    assert "every sample counts the same" in str(study)
    assert {row["average"] for row in study.summary()} == {"sample"}

    curve, rng = record.curve(), np.random.default_rng(0)
    for split in range(splits):
        order = rng.permutation(400)
        for label, control in controls.items():
            index = np.maximum(control.indices(curve, epsilons, 0.1, order[:n]), 0)
            tested = np.isin(users, order[n:])
            np.testing.assert_allclose(
                study.test_risk[label][split], losses[tested].mean(axis=0)[index], atol=1e-12
            )
            np.testing.assert_allclose(
                study.mean_cost[label][split], costs[tested].mean(axis=0)[index], atol=1e-12
            )
    for draw in range(splits):
        rows = rng.integers(0, 400, n)
        for label, control in controls.items():
            index = np.maximum(control.indices(curve, epsilons, 0.1, rows), 0)
            np.testing.assert_allclose(
                study.pool_risk[label][draw], losses.mean(axis=0)[index], atol=1e-12
            )
    for label in controls:
        rate = (study.pool_risk[label] > epsilons + 1e-12).mean(axis=0)
        np.testing.assert_allclose(study.violations[label].rate, rate)


def test_a_study_shows_what_group_averages_hide():
    """The group promise holds in its own terms; in those of requests it would be broken."""
    losses, users = Users.with_risk(0.3).sample(2000, np.random.default_rng(0))
    record = ss.ThresholdRecord([None, 0.5], losses={"zero_one": losses}, groups=users)
    shared = {"controls": ["ucb"], "epsilons": [0.05], "n_calibration": 400, "splits": 20}
    by_group = ss.evaluate(record, **shared)
    assert by_group.pool_risk["ucb"].max() < 0.05
    assert by_group.about.average == "group"
    assert "average of group averages" in str(by_group)
    per_sample = record.grouped(users, average="sample", max_size=200)
    by_sample = ss.evaluate(per_sample, **shared)
    assert by_sample.pool_risk["ucb"].max() == 0.0  # the full model
    curve = per_sample.curve()
    assert curve.risk()[1] == pytest.approx(losses[:, 1].mean())
    assert curve.risk()[1] > 0.15


def grouped_curve(**options):
    """Three groups of 1, 2 and 3 samples."""
    losses = np.column_stack([np.zeros(6), [1, 0, 1, 0, 0, 1.0]])
    curve = ss.RiskCurve.from_losses([1.0, 0.5], losses, loss_range=(0, 1), relative=True)
    return curve.grouped([7, 8, 8, 9, 9, 9], **options)


def test_a_group_larger_than_declared_is_refused():
    """The limit is declared beforehand, and never taken from the data."""
    with pytest.raises(ValueError, match="it is 2 and group 9 has 3 samples"):
        grouped_curve(average="sample", max_size=2)
    with pytest.raises(ValueError, match="`max_size` must be given"):
        grouped_curve(average="sample")
    curve = grouped_curve(average="sample", max_size=3)
    assert curve.risk().tolist() == [0.0, 0.5]
    assert grouped_curve().risk()[1] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average": "user"}, "`average` must be one of"),
        ({"average": "group", "max_size": 3}, "is for `average='sample'`"),
        ({"average": "sample", "max_size": 0}, "`max_size` must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    """In words that say what is missing."""
    with pytest.raises(ValueError, match=message):
        grouped_curve(**options)


def test_samples_without_groups_are_averaged_per_sample():
    """Nothing needs to be said for it."""
    units = ss.RiskCurve.from_losses([1.0, 0.5], [[0.0, 1.0]]).units
    assert (units.grouped, units.average, units.weights) == (False, "sample", None)


@pytest.mark.parametrize("bound", ["binomial", "bentkus", "hoeffding_bentkus"])
def test_bounds_that_are_not_monotone_per_sample_are_refused(bound):
    """Their p-values count whole losses, which groups filled up with ε do not hold."""
    lossless = ss.RiskCurve.from_losses(
        [1.0, 0.5],
        np.zeros((6, 2)),
        loss_range=(0, 1),
        relative=True,
    ).grouped([7, 8, 8, 9, 9, 9], average="sample", max_size=3)
    with pytest.raises(ValueError, match=r"groups by their samples.*Use one of .*star"):
        ss.control.ucb(lossless, 0.5, bound=bound)
    with pytest.raises(ValueError, match=r"A finite population.*average='group'"):
        ss.control.ucb(lossless, 0.5, pool=10)


def test_a_curve_keeps_its_own_average():
    """Calls that take a curve do not average it again, nor can anybody else."""
    curve = grouped_curve(average="sample", max_size=3)
    certificate = ss.calibrate(curve, epsilon=0.9).certificate
    assert (certificate.samples.unit, certificate.samples.average) == ("groups", "sample")
    assert (certificate.samples.n, certificate.samples.max_group_size) == (3, 3)
    study = ss.evaluate(curve, controls=["ucb"], epsilons=[0.5], n_calibration=2, splits=2)
    assert (study.about.unit, study.about.average) == ("groups", "sample")
    for again, groups in (
        (Sampling(), np.arange(3)),
        (Sampling("sample", 3), np.arange(3)),
        (Sampling(weights=np.ones(3), max_weight=1.0), None),
    ):
        with pytest.raises(ValueError, match="must be given once"):
            again.applied(curve, groups)


def test_branches_keep_the_failure_probability_per_sample():
    """Large groups come first by name: each group's losses must meet its own size in any order."""
    users = Users.with_risk(0.05 + 1e-6, 0.05 + 1e-6, heavy=0.4, most=10)
    rng, found = np.random.default_rng(0), 0
    for _ in range(100):
        losses, names = users.sample(800, rng)
        sizes = np.bincount(names)
        rank = np.argsort(np.argsort(-sizes, kind="stable"))
        record = ss.ThresholdRecord(
            dials={"a": [0, 1, 1], "b": [0, 1, 2]},
            losses={"zero_one": losses},
            costs={"time": [3.0, 2.0, 1.0]},
        ).grouped(rank[names], average="sample", max_size=10)
        path = ss.Path.branching([[1], [2]], record)
        policy = ss.calibrate(record, epsilon=0.05, path=path)
        found += policy.certificate.index is not None
    check_rate(found, 100, 0.1)
