"""Promises beyond the mean of all samples: tails, those that exit, costs, weights."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.builders import refused, table_curve

PATH = ss.Path.logit_grid(step=0.25)


@pytest.fixture(scope="module")
def record():
    sample = Population(n_exits=4, overconfidence=2.5).sample(1000, seed=1)
    return ss.ExitRecord.from_logits(sample.logits, sample.labels, costs={"flops": [1, 2, 3, 5]})


def exits_at(record, policy):
    return ss.exits.exit_indices(record.confidences["top1"], policy.threshold)


# ------------------------------------------------------------------------------------------- tails


def test_a_tail_is_how_often_the_loss_is_above_a_limit(record):
    policy = ss.calibrate(record, loss="brier", epsilon=0.1, above=0.2, path=PATH)
    promise = policy.certificate.promises[0]
    gaps = record.losses["brier"] - record.losses["brier"][:, -1:]
    here = gaps[np.arange(1000), exits_at(record, policy)]
    assert promise.calibration_risk == pytest.approx((here > 0.2).mean())
    assert (promise.above, promise.bound, promise.loss_range) == (0.2, "binomial", (0, 1))
    text = str(policy)
    assert (
        "the probability that the brier gap to the full model is above 0.2 is at most 0.1" in text
    )
    assert "brier gap is 0 or 1" not in text
    again = policy.evaluate(record)
    assert again.risk == promise.calibration_risk
    assert repr(policy).endswith("brier gap > 0.2 ≤ 0.1)")


def test_tails_of_thresholds_and_with_other_risks():
    losses = np.column_stack([np.zeros(200), np.tile([0.3, 0.0, 0.0, 0.0], 50)])
    record = ss.ThresholdRecord([1.0, 0.5], losses={"rouge_l": losses})
    tail = ss.Risk("gap", "rouge_l", epsilon=0.35, above=0.1)
    mean = ss.Risk("gap", "rouge_l", epsilon=0.12)
    policy = ss.calibrate(record, risks=[tail, mean])
    assert policy.threshold == 0.5
    assert [p.calibration_risk for p in policy.certificate.promises] == pytest.approx([0.25, 0.075])
    strict = ss.Risk("gap", "rouge_l", epsilon=0.2, above=0.1)
    assert ss.calibrate(record, risks=[strict, mean]).threshold is None
    grown = ss.calibrate.start(risks=[tail, mean], horizon=200)
    grown.update(record)
    assert grown.policy().certificate.promises[0].above == 0.1


def test_limits_of_tails_are_checked(record):
    for above in (-0.1, 1.0, float("nan")):
        with refused("above"):
            ss.calibrate(record, loss="zero_one", epsilon=0.1, above=above)
    with refused("above"):
        ss.calibrate(record, risks=[ss.Risk("gap", "brier", 0.1)], above=0.1)
    groups = replace(record, groups=np.arange(1000) // 2)
    with refused("above"):
        ss.calibrate(groups, loss="brier", epsilon=0.1, above=0.1)


def test_the_mean_of_the_worst_share(record):
    policy = ss.calibrate(record, loss="brier", epsilon=0.3, worst=0.2, path=PATH)
    promise = policy.certificate.promises[0]
    gaps = record.losses["brier"] - record.losses["brier"][:, -1:]
    here = gaps[np.arange(1000), exits_at(record, policy)]
    assert promise.calibration_risk == pytest.approx(np.maximum(here, 0).mean() / 0.2)
    worst = np.sort(here)[-200:].mean()
    assert worst <= promise.calibration_risk + 1e-12 <= 0.3
    assert (promise.worst, promise.loss_range) == (0.2, (0.0, 10.0))
    text = "the mean brier gap to the full model of the worst 20 % of samples is at most 0.3"
    assert text in str(policy)
    assert "no brier gap exceeds 2;" in str(policy)
    assert policy.evaluate(record).risk == pytest.approx(promise.calibration_risk)
    curve = record.curve(loss="brier", path=PATH)
    cut = float(np.quantile(here, 0.8))
    index = policy.certificate.index
    assert curve.worst_mean(0.2, max(cut, 0.0)).risk_at(index) >= worst - 1e-9
    for wrong in ({"worst": 0.0}, {"worst": 1.0}, {"worst": 0.1, "above": 2.0}):
        with pytest.raises(ValueError, match=r"`(worst|above)`"):
            ss.calibrate(record, loss="brier", epsilon=0.3, **wrong)


# --------------------------------------------------------------------------------- those that exit


def test_the_risk_of_those_that_exit(record):
    policy = ss.calibrate(
        record, risk="selective consistency", loss="zero_one", epsilon=0.12, path=PATH
    )
    promise = policy.certificate.promises[0]
    exits = exits_at(record, policy)
    left = exits < 3
    apart = record.inconsistencies["zero_one"][np.arange(1000), exits]
    assert 0.1 < left.mean() < 1
    assert promise.calibration_risk == pytest.approx(apart[left].mean())
    assert promise.calibration_risk <= 0.12
    assert policy.evaluate(record).risk == pytest.approx(promise.calibration_risk)
    text = "the expected zero_one inconsistency with the full model of the samples that exit early"
    assert f"{text} is at most 0.12" in str(policy)
    everyone = ss.calibrate(record, risk="consistency", loss="zero_one", epsilon=0.12, path=PATH)
    assert policy.threshold > everyone.threshold  # the promise is stronger


def test_the_curve_of_those_that_exit(record):
    curve = record.curve("selective gap", "brier", path=PATH)
    for k in (0, 40, 80):
        exits = ss.exits.exit_indices(record.confidences["top1"], PATH.thresholds[k])
        gaps = (record.losses["brier"] - record.losses["brier"][:, -1:])[np.arange(1000), exits]
        left = exits < 3
        expected = gaps[left].mean() if left.any() else 0.0
        assert curve.risk()[k] == pytest.approx(expected)
        assert curve.risk_at(k) == pytest.approx(expected)
        assert curve.left_at(k).tolist() == left.tolist()


def test_what_does_not_go_with_those_that_exit(record):
    risk = {"risk": "selective gap", "loss": "zero_one", "epsilon": 0.1}
    for wrong in (
        {"control": "crc"},
        {"control": "empirical"},
        {"control": "ltt", "correction": "bonferroni"},
        {"pool": 5000},
    ):
        with refused("risk"):
            ss.calibrate(record, **risk, **wrong)
    with refused("risk"):
        ss.calibrate(
            record,
            risks=[ss.Risk("selective gap", "zero_one", 0.1), ss.Risk("gap", "brier", 0.1)],
        )
    with refused("risk"):
        ss.calibrate(replace(record, groups=np.arange(1000) // 2), **risk)
    with refused("evaluate"):
        ss.evaluate(record, risk="selective gap", loss="zero_one")
    with refused("labeller"):
        ss.calibrate(record, **risk, labeller=lambda ids: ids)
    with refused("risk"):
        ss.calibrate.start(**risk).update(record)
    with refused("policy"):
        ss.Monitor.from_policy(ss.calibrate(record, **risk))


# -------------------------------------------------------------------------------------------- costs


def test_risk_and_cost_together(record):
    policy = ss.calibrate(
        record, loss="zero_one", epsilon=0.05, max_costs={"flops": 3.0}, path=PATH
    )
    alone = ss.calibrate(record, loss="zero_one", epsilon=0.05, delta=0.05, path=PATH)
    assert policy.threshold == alone.threshold is not None
    assert policy.certificate.delta == 0.1
    assert "is at most 0.05 and the mean flops is at most 3" in str(policy)
    assert "the samples were tested in an order drawn at random" in str(policy)
    here = policy.certificate.costs.means["flops"][1]
    close = ss.calibrate(
        record, loss="zero_one", epsilon=0.05, max_costs={"flops": here + 0.01}, path=PATH
    )
    assert close.runs_full_model  # the mean is below the limit, but that may be chance
    assert "and the mean flops within" in str(close)


def test_limits_of_costs_are_checked(record):
    for wrong in ({"gflops": 1.0}, {"flops": 5.0}, {"flops": -1.0}, {}):
        with refused("max_costs"):
            ss.calibrate(record, loss="zero_one", epsilon=0.05, max_costs=wrong)
    each = replace(record, costs={"flops": np.tile([1.0, 2, 3, 5], (1000, 1))})
    with refused("max_costs"):
        ss.calibrate(each, loss="zero_one", epsilon=0.05, max_costs={"flops": 3.0})
    labels = replace(record, losses={"zero_one": record.losses["zero_one"].copy()})
    labels.losses["zero_one"][::2] = np.nan
    weights = {"weights": np.ones(1000), "max_weight": 1.0}
    for options in ({"control": "crc"}, {"missing": "stop"}, weights):
        with refused("max_costs"):
            ss.calibrate(
                labels if "missing" in options else record,
                loss="zero_one",
                epsilon=0.05,
                max_costs={"flops": 3},
                **options,
            )


# ------------------------------------------------------------------------------------------ weights


def test_weights_move_the_promise_to_another_distribution(record):
    weights = np.where(np.arange(1000) % 2, 1.5, 0.5)
    policy = ss.calibrate(
        record, loss="zero_one", epsilon=0.08, weights=weights, max_weight=1.5, path=PATH
    )
    exits = exits_at(record, policy)
    gaps = (record.losses["zero_one"] - record.losses["zero_one"][:, -1:])[np.arange(1000), exits]
    promise = policy.certificate.promises[0]
    assert promise.calibration_risk == pytest.approx((weights * gaps).mean())
    assert (promise.loss_range, promise.bound) == ((-1.5, 1.5), "star")
    assert policy.certificate.samples.max_weight == 1.5
    text = str(policy)
    assert "gap to the full model under the distribution that the weights describe" in text
    assert "production samples of another whose density, relative to the first, is the" in text
    assert "estimated" not in text
    estimated = ss.calibrate(
        record,
        loss="zero_one",
        epsilon=0.08,
        weights=weights,
        max_weight=1.5,
        estimated_weights=True,
    )
    assert "(they were estimated, and the promise holds as far as they are exact)" in str(estimated)


def test_weights_by_slice(record):
    slices = np.where(np.arange(1000) % 2, "night", "day")
    by_name = {"night": 1.5, "day": 0.5}
    options = {"loss": "zero_one", "epsilon": 0.08, "max_weight": 1.5, "path": PATH, "seed": 0}
    sliced = ss.calibrate(replace(record, slices=slices), weights=by_name, **options)
    listed = ss.calibrate(record, weights=np.where(slices == "night", 1.5, 0.5), **options)
    assert sliced.certificate.promises == listed.certificate.promises
    with refused("weights"):
        ss.calibrate(replace(record, slices=slices), weights={"night": 1.0}, **options)
    with refused("weights"):
        ss.calibrate(record, weights=by_name, **options)


def test_weights_of_one_change_nothing_but_the_test(record):
    curve = record.curve(loss="brier", path=PATH)
    same = curve.weighted(np.ones(1000), 1.0)
    assert np.array_equal(same.losses(), curve.losses())
    assert same.loss_range == curve.loss_range


def test_weights_are_checked(record):
    options = {"loss": "zero_one", "epsilon": 0.05}
    for weights, most in ((np.full(1000, 2.0), 1.5), (np.full(1000, -1.0), 1.5), (np.ones(9), 1.5)):
        with refused("weights"):
            ss.calibrate(record, **options, weights=weights, max_weight=most)
    with refused("weights"):
        ss.calibrate(record, **options, weights=np.ones(1000))
    with refused("max_weight"):
        ss.calibrate(record, **options, weights=np.ones(1000), max_weight=0.0)


def test_curves_take_rows():
    curve = table_curve([0, 20, 50], costs={"cost": [3.0, 2.0, 1.0]})
    part = curve.take(np.arange(50))
    assert part.n == 50
    assert np.array_equal(part.losses(), curve.losses()[:50])
    with refused("rows"):
        curve.shuffled(0).take(np.arange(3))
