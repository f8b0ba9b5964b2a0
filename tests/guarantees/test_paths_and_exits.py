"""The guarantees along other paths than a falling grid, and for other exit rules."""

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.guarantees.checkers import check_rate

POPULATION = Population(n_exits=4, overconfidence=2.5)


def violations(path, true, *, n=250, draws=150, epsilon=0.05, delta=0.1, bound="star"):
    """Count violations along a path of known risks, and hold them to δ."""
    rng = np.random.default_rng(0)
    count, reached = 0, 0
    for draw in range(draws):
        sample = POPULATION.sample(n, rng)
        record = ss.ExitRecord.from_logits(sample.logits, sample.labels, losses=("zero_one",))
        curve = record.curve("consistency", path=path)
        index = ss.control.ucb(curve, epsilon, delta, bound, seed=draw).index
        count += index is not None and true[index] > epsilon
        reached += index is not None
    assert reached > 0
    return check_rate(count, draws, delta)


@pytest.mark.parametrize("bound", ["star", "wsr", "binomial", "hoeffding_bentkus"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_family_of_per_exit_thresholds_in_any_order_keeps_its_promise(bound, seed):
    """Thresholds of each exit that rise and fall along the path, risks with them."""
    rng = np.random.default_rng(seed)
    centre = np.linspace(0.999, 0.8, 30)[:, None]
    path = ss.Path.family(np.clip(centre + rng.uniform(-0.1, 0.1, (30, 3)), 0, 1))
    true = POPULATION.risk(path.thresholds, "consistency", "zero_one")
    assert (np.diff(true) < 0).any()
    assert true.max() > 0.05
    violations(path, true, bound=bound)


@pytest.mark.parametrize("bound", ["star", "binomial"])
def test_a_path_in_the_wrong_order_is_slow_but_safe(bound):
    """Fastest first: nothing or little is chosen, and what is chosen holds."""
    path = ss.Path(np.asarray([np.inf, 0.99, 0.9, 0.97, 0.2, 0.999], np.float32), "shuffled")
    true = POPULATION.risk(path.thresholds, "consistency", "zero_one")
    violations(path, true, bound=bound)


@pytest.mark.parametrize("strict", [False, True])
def test_a_jump_of_the_risk_at_one_confidence_is_not_passed(strict):
    """Half of the samples share one confidence: the risk jumps there from 0 to just above ε.

    With `≥` the setting at that confidence is unsafe, with `>` it is still safe.
    """
    rng = np.random.default_rng(0)
    epsilon, atom, count, draws = 0.1, np.float32(0.7), 0, 800
    for draw in range(draws):
        crowd = rng.random(60) < 0.5
        confidences = np.where(crowd, atom, rng.uniform(0.8, 1.0, 60))[:, None]
        wrong = crowd & (rng.random(60) < 2 * epsilon + 1e-6)
        record = ss.ExitRecord(
            confidences, losses={"zero_one": np.column_stack([wrong, np.zeros(60)])}
        )
        curve = record.curve(path="breakpoints", rule=ss.ExitRule(strict=strict))
        threshold = ss.control.ucb(curve, epsilon, 0.1, seed=draw).threshold
        if threshold is not None:
            count += threshold < atom if strict else threshold <= atom
    check_rate(count, draws, 0.1)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("min_exit", [0, 1, 2])
@pytest.mark.parametrize("path", [None, "breakpoints", "family"])
def test_the_policy_loses_what_the_curve_said_it_would(strict, min_exit, path):
    """Running the policy's own exits gives the very losses of the setting that was certified."""
    rng = np.random.default_rng(0)
    sample = POPULATION.sample(600, rng)
    record = ss.ExitRecord.from_logits(sample.logits, sample.labels)
    if path == "family":
        path = np.linspace(0.99, 0.5, 20)[:, None] * rng.uniform(0.9, 1, (20, 3))
    options = {"path": path, "rule": ss.ExitRule(strict=strict, min_exit=min_exit)}
    promise = ss.Promise("zero_one", risk="consistency", epsilon=0.3)
    policy = ss.Calibration(promise, **options).run(record)
    assert policy.threshold is not None
    curve = record.curve("consistency", "zero_one", **options)
    exits = policy.exits(record.confidences["top1"])
    taken = record.inconsistencies["zero_one"][np.arange(record.n), exits]
    np.testing.assert_array_equal(taken, curve.loss_at(policy.certificate.index))


def test_thresholds_given_in_double_precision_are_those_that_the_policy_runs_at():
    """A path of float64 thresholds: calibration and policy must exit alike (0.7 is the case)."""
    record = ss.ExitRecord(
        np.full((300, 1), 0.7, np.float32),
        losses={"zero_one": np.column_stack([np.ones(300), np.zeros(300)])},
    )
    path = ss.Path(np.asarray([np.inf, 0.7]), "given")
    policy = ss.calibrate(record, path=path, epsilon=0.05)
    exits = policy.exits(record.confidences["top1"])
    risk = record.losses["zero_one"][np.arange(300), exits].mean()
    assert risk <= 0.05


def test_an_exit_that_is_never_taken_may_stand_in_a_family():
    """Per-exit thresholds may be `None`; the policy keeps them and runs at them."""
    record = ss.ExitRecord(
        np.full((300, 2), 0.9),
        losses={"zero_one": np.column_stack([np.ones(300), *[np.zeros(300)] * 2])},
    )
    policy = ss.calibrate(record, path=[[None, 0.8], [None, 0.5]], epsilon=0.05)
    assert (policy.exits(record.confidences["top1"]) == 1).all()


def test_a_path_of_the_full_model_alone_certifies_nothing():
    """There is nothing to choose, with any control."""
    curve = ss.RiskCurve.from_losses([None], np.zeros((500, 1)))
    for name in ("empirical", "crc", "ucb", "ltt"):
        assert ss.Control(name).run(curve, 0.1).index is None
    assert ss.Control("ltt", correction="bonferroni").run(curve, 0.1).index is None


@pytest.mark.parametrize("bound", ["star", "wsr"])
def test_breakpoints_begin_where_no_calibration_sample_exits(bound):
    """Thresholds above every calibration confidence are settings too, which new samples may pass.

    Exit 2 improves each sample (−1), but exit 1, as confident but for a hair, ruins it (+1). So the
    risk at λ is very nearly P(confidence > λ). The safest breakpoint sees one sample exit, with a
    loss of −1: with two samples that is certified, although all losses 0 are not, and the true
    risk is above 0.6 with probability 0.4² = 0.16.
    """
    rng = np.random.default_rng(0)
    epsilon, delta, draws, hair, count = 0.6, 0.1, 2000, 1e-4, 0
    for _ in range(draws):
        late = rng.random((2, 1))
        record = ss.ExitRecord(
            np.hstack([np.maximum(late - hair, 0), late]),
            inconsistencies={"change": np.tile([1.0, -1.0, 0.0], (2, 1))},
            inconsistency_ranges={"change": (-1, 1)},
        )
        curve = record.curve("consistency", path="breakpoints")
        threshold = ss.control.ucb(curve, epsilon, delta, bound).threshold
        count += threshold is not None and (1 - threshold - hair) - hair > epsilon
    check_rate(count, draws, delta)


def test_breakpoints_reach_the_largest_confidence_that_float32_has():
    """Above 1 there is no confidence, so nothing is between "never" and a breakpoint at 1."""
    confidences = np.asarray([[1.0], [0.5]], np.float32)
    assert ss.Path.breakpoints(confidences).thresholds.tolist() == [np.inf, 1.0, 0.5]
    below = np.nextafter(np.float32(1), np.float32(0))
    assert ss.Path.breakpoints([[below]]).thresholds.tolist() == [np.inf, 1.0, below]


def test_breakpoints_may_end_at_the_setting_that_nobody_uses():
    """Where only "nobody exits" is certified, the policy's threshold lies above all samples."""
    record = ss.ExitRecord(np.full((60, 1), 0.5), losses={"zero_one": np.tile([1.0, 0.0], (60, 1))})
    policy = ss.calibrate(record, epsilon=0.1, path="breakpoints")
    assert policy.threshold == float(np.nextafter(np.float32(0.5), np.float32(1)))
    assert policy.certificate.costs.means["exit"] == (2.0, 2.0)
