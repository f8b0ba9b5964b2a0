"""Several risks at once: all of them hold together, without a correction."""

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.guarantees.checkers import check_not_above, check_rate

TINY = 1e-6


def record_of(losses):
    """A record of several losses at the same settings."""
    settings = np.arange(next(iter(losses.values())).shape[1])[::-1]
    return ss.ThresholdRecord(settings, inconsistencies=losses)


@pytest.mark.parametrize("control", ["ucb", "ltt"])
@pytest.mark.parametrize("bound", ["star", "binomial", "hoeffding_bentkus"])
def test_two_risks_that_fail_at_different_settings(control, bound):
    """Each of two settings is just unsafe for one risk and harmless for the other."""
    rng = np.random.default_rng(0)
    epsilon, count, draws = 0.1, 0, 600
    risks = [ss.Risk("consistency", name, epsilon) for name in ("first", "second")]
    for draw in range(draws):
        first, second = np.zeros((2, 60, 3))
        first[:, 1] = rng.random(60) < epsilon + TINY
        second[:, 2] = rng.random(60) < epsilon + TINY
        policy = ss.calibrate(
            record_of({"first": first, "second": second}),
            risks=risks,
            control=control,
            bound=bound,
            delta=0.1,
            seed=draw,
        )
        count += policy.threshold is not None
    check_rate(count, draws, 0.1)


def test_ten_unsafe_risks_violate_no_more_often_than_one():
    """The more risks, the rarer a violation: a setting must pass them all."""
    rng = np.random.default_rng(0)
    names = [f"loss {j}" for j in range(10)]
    risks = [ss.Risk("consistency", name, 0.1) for name in names]
    count, draws = 0, 200
    for draw in range(draws):
        losses = {}
        for name in names:
            losses[name] = np.zeros((60, 2))
            losses[name][:, 1] = rng.random(60) < 0.1 + TINY
        count += ss.calibrate(record_of(losses), risks=risks, seed=draw).threshold is not None
    check_rate(count, draws, 0.1)


@pytest.mark.parametrize("control", ["ucb", "crc"])
def test_gap_and_consistency_hold_together_on_a_simulated_classifier(control):
    """0-1 gap and Brier inconsistency of one classifier, B = 1 and B = 2, on one path."""
    population = Population(n_exits=4, overconfidence=2.5)
    path = ss.Path.logit_grid(step=0.2)
    wanted = [ss.Risk("gap", "zero_one", 0.03), ss.Risk("consistency", "brier", 0.06)]
    true = [population.risk(path.thresholds, each.risk, each.loss) for each in wanted]
    rng = np.random.default_rng(0)
    count, draws = 0, 120
    found = np.zeros((draws, 2))
    for draw in range(draws):
        sample = population.sample(300, rng)
        record = ss.ExitRecord.from_logits(sample.logits, sample.labels)
        policy = ss.calibrate(record, risks=wanted, control=control, path=path, seed=draw)
        index = policy.certificate.index or 0
        found[draw] = [risk[index] for risk in true]
        count += any(risk[index] > each.epsilon for risk, each in zip(true, wanted, strict=True))
    if control == "ucb":
        check_rate(count, draws, 0.1)
    else:
        for j, each in enumerate(wanted):
            check_not_above(found[:, j], each.epsilon)


def test_the_joint_choice_is_the_safest_of_the_single_ones():
    """On one path the first failure of any risk ends the sequence."""
    rng = np.random.default_rng(3)
    losses = {name: np.zeros((400, 8)) for name in ("a", "b")}
    for name, rate in (("a", 0.01), ("b", 0.03)):
        losses[name][:, 1:] = rng.random((400, 7)) < rate * np.arange(1, 8)
    record = record_of(losses)
    single = [
        ss.calibrate(record, risk="consistency", loss=name, epsilon=level).certificate.index or 0
        for name, level in (("a", 0.1), ("b", 0.12))
    ]
    both = ss.calibrate(
        record, risks=[ss.Risk("consistency", "a", 0.1), ss.Risk("consistency", "b", 0.12)]
    )
    assert 0 < min(single) < max(single)
    assert both.certificate.index == min(single)


@pytest.mark.parametrize(
    ("control", "options"),
    [
        ("crc", {"selection": "paper"}),
        ("crc", {"selection": "contiguous"}),
        ("ltt", {"correction": "bonferroni"}),
    ],
)
def test_controls_without_a_proof_for_several_risks_are_refused(control, options):
    """Across gaps the safest of several choices may be unsafe for each."""
    losses = {"a": np.zeros((50, 3)), "b": np.zeros((50, 3))}
    risks = [ss.Risk("consistency", "a", 0.1), ss.Risk("consistency", "b", 0.1)]
    with pytest.raises(ValueError, match="several risks"):
        ss.calibrate(record_of(losses), risks=risks, control=control, **options)
