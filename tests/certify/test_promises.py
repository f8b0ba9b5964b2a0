"""Promises beyond the mean of all samples: tails, those that exit, costs, weights."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.curves.sampling import Sampling
from swiftsure.curves.transforms import worst_mean
from swiftsure.study.simulate import Population
from tests.builders import refused, request_of, table_curve

PATH = ss.Path.logit_grid(step=0.25)


@pytest.fixture(scope="module")
def record():
    sample = Population(n_exits=4, overconfidence=2.5).sample(1000, seed=1)
    return ss.ExitRecord.from_logits(sample.logits, sample.labels, costs={"flops": [1, 2, 3, 5]})


def exits_at(record, policy):
    return ss.exits.exit_indices(record.confidences["top1"], policy.threshold)


# ------------------------------------------------------------------------------------------- tails


def test_a_tail_is_how_often_the_loss_is_above_a_limit(record):
    policy = request_of(loss="brier", epsilon=0.1, above=0.2, path=PATH).run(record)
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
    tail = ss.Promise("rouge_l", epsilon=0.35, above=0.1)
    mean = ss.Promise("rouge_l", epsilon=0.12)
    policy = ss.calibrate(record, [tail, mean])
    assert policy.threshold == 0.5
    assert [p.calibration_risk for p in policy.certificate.promises] == pytest.approx([0.25, 0.075])
    strict = ss.Promise("rouge_l", epsilon=0.2, above=0.1)
    assert ss.calibrate(record, [strict, mean]).threshold is None
    grown = ss.Calibration([tail, mean]).start(horizon=200)
    grown.update(record)
    assert grown.policy().certificate.promises[0].above == 0.1


def test_limits_of_tails_are_checked(record):
    for above in (-0.1, 1.0, float("nan")):
        with refused("above"):
            request_of(loss="zero_one", epsilon=0.1, above=above).run(record)


@pytest.mark.parametrize("average", [{}, {"average": "sample", "max_size": 2}])
def test_a_tail_of_groups_is_averaged_over_them(record, average):
    groups = record.grouped(np.arange(1000) // 2, **average)
    policy = request_of(loss="brier", epsilon=0.15, above=0.2, path=PATH).run(groups)
    promise = policy.certificate.promises[0]
    gaps = record.losses["brier"] - record.losses["brier"][:, -1:]
    here = gaps[np.arange(1000), exits_at(record, policy)]
    assert (policy.certificate.samples.n, policy.certificate.samples.unit) == (500, "groups")
    assert promise.calibration_risk == pytest.approx((here > 0.2).mean())
    assert policy.evaluate(groups).risk == pytest.approx(promise.calibration_risk)
    assert "that the brier gap to the full model is above 0.2" in str(policy)


def test_the_mean_of_the_worst_share(record):
    policy = request_of(loss="brier", epsilon=0.3, worst=0.2, path=PATH).run(record)
    promise = policy.certificate.promises[0]
    gaps = record.losses["brier"] - record.losses["brier"][:, -1:]
    here = gaps[np.arange(1000), exits_at(record, policy)]
    assert promise.calibration_risk == pytest.approx(np.maximum(here, 0).mean() / 0.2)
    worst = np.sort(here)[-200:].mean()
    assert worst <= promise.calibration_risk + 1e-12 <= 0.3
    assert (promise.worst, promise.loss_range) == (0.2, (0.0, 10.0))
    text = "the mean brier gap to the full model of the worst 20 % of samples is at most 0.3"
    assert text in str(policy)
    assert "no brier gap exceeds 2." in str(policy)
    assert policy.evaluate(record).risk == pytest.approx(promise.calibration_risk)
    curve = record.curve(loss="brier", path=PATH)
    cut = float(np.quantile(here, 0.8))
    index = policy.certificate.index
    assert worst_mean(curve, 0.2, max(cut, 0.0)).risk_at(index) >= worst - 1e-9
    for wrong in ({"worst": 0.0}, {"worst": 1.0}, {"worst": 0.1, "above": 2.0}):
        with pytest.raises(ValueError, match=r"`(worst|above)`"):
            request_of(loss="brier", epsilon=0.3, **wrong).run(record)


# --------------------------------------------------------------------------------- those that exit


def test_the_risk_of_those_that_exit(record):
    asked = {"risk": "consistency", "loss": "zero_one", "epsilon": 0.12, "path": PATH}
    policy = request_of(among="exits", **asked).run(record)
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
    everyone = ss.calibrate(record, **asked)
    assert policy.threshold > everyone.threshold  # the promise is stronger


def test_the_curve_of_those_that_exit(record):
    promise = ss.Promise("brier", epsilon=0.1, among="exits")
    curve = promise.curve(record, ss.ExitRule(), PATH)
    for k in (0, 40, 80):
        exits = ss.exits.exit_indices(record.confidences["top1"], PATH.thresholds[k])
        gaps = (record.losses["brier"] - record.losses["brier"][:, -1:])[np.arange(1000), exits]
        left = exits < 3
        expected = gaps[left].mean() if left.any() else 0.0
        assert curve.risk()[k] == pytest.approx(expected)
        assert curve.risk_at(k) == pytest.approx(expected)
        assert curve.left_at(k).tolist() == left.tolist()


def test_what_does_not_go_with_those_that_exit(record):
    promise = {"among": "exits", "loss": "zero_one", "epsilon": 0.1}
    for control in ("crc", "empirical", ss.Control("ltt", correction="bonferroni")):
        with pytest.raises(ValueError, match="ucb, or ltt in fixed sequence"):
            request_of(**promise, control=control).run(record)
    with pytest.raises(ValueError, match=r"there is no test here of a .* restricted mean"):
        request_of(**promise).run(record.drawn_from(5000))
    with refused("path"):  # starts that depend on the samples
        request_of(**promise, path="breakpoints").run(record)
    losses = {"rouge_l": np.zeros((200, 2))}
    with pytest.raises(ValueError, match="needs a record of exits"):
        request_of(among="exits", epsilon=0.1).run(ss.ThresholdRecord([1.0, 0.5], losses=losses))


def test_those_that_exit_with_a_promise_about_all(record):
    """Their walks share δ."""
    left = ss.Promise("zero_one", risk="consistency", epsilon=0.12, among="exits")
    mean = ss.Promise("brier", epsilon=0.1)
    policy = ss.calibrate(record, [left, mean], path=PATH)
    alone = [ss.calibrate(record, each, path=PATH, delta=0.05) for each in (left, mean)]
    assert policy.threshold == max(each.threshold for each in alone)
    assert policy.certificate.delta == 0.1
    assert [p.among for p in policy.certificate.promises] == ["exits", "all"]
    with refused("control"):
        ss.calibrate(record, [left, mean], path=PATH, control="crc")


@pytest.mark.parametrize("average", [{}, {"average": "sample", "max_size": 2}])
def test_those_that_exit_in_groups(record, average):
    groups = record.grouped(np.arange(1000) // 2, **average)
    request = request_of(
        among="exits", risk="consistency", loss="zero_one", epsilon=0.15, path=PATH
    )
    policy = request.run(groups)
    exits = exits_at(record, policy)
    apart = record.inconsistencies["zero_one"][np.arange(1000), exits]
    assert policy.certificate.samples.unit == "groups"
    # Σy / Σz with groups of one size: the mean over the samples that exit.
    risk = policy.certificate.promises[0].calibration_risk
    assert risk == pytest.approx(apart[exits < 3].mean())
    assert risk <= 0.15
    spent = record.costs["flops"][exits].mean()  # of all samples, whether they exit early or not
    assert policy.certificate.costs.means["flops"] == (5, pytest.approx(spent))
    found = policy.evaluate(groups)
    assert (found.risk, found.saving) == (pytest.approx(risk), pytest.approx(1 - spent / 5))


def test_those_that_exit_grow(record):
    promise = ss.Promise("zero_one", risk="consistency", epsilon=0.15, among="exits")
    grown = ss.Calibration(promise, path=PATH).start(horizon=1000)
    for rows in np.array_split(np.arange(1000), 4):
        grown.update(record.take(rows))
    policy = grown.policy()
    exits = exits_at(record, policy)
    apart = record.inconsistencies["zero_one"][np.arange(1000), exits][exits < 3]
    assert policy.certificate.promises[0].calibration_risk == pytest.approx(apart.mean())
    assert apart.mean() <= 0.15


# -------------------------------------------------------------------------------------------- costs


def test_risk_and_cost_together(record):
    promise, limit = ss.Promise("zero_one", epsilon=0.05), ss.CostPromise("flops", at_most=3.0)
    policy = ss.calibrate(record, [promise, limit], path=PATH)
    alone = ss.calibrate(record, loss="zero_one", epsilon=0.05, delta=0.05, path=PATH)
    assert policy.threshold == alone.threshold is not None
    assert policy.certificate.delta == 0.1
    assert "is at most 0.05 and the mean flops is at most 3" in str(policy)
    assert "the samples were tested in an order drawn at random" in str(policy)
    here = policy.certificate.costs.means["flops"][1]
    limit = ss.CostPromise("flops", at_most=here + 0.01)
    close = ss.calibrate(record, [promise, limit], path=PATH)
    assert close.runs_full_model  # the mean is below the limit, but that may be chance
    assert "and the mean flops within" in str(close)


def test_a_certificate_says_by_which_seed_costs_were_tested(record):
    promises = [ss.Promise("zero_one", epsilon=0.05), ss.CostPromise("flops", at_most=3.0)]
    in_order, groups = replace(record, order=5), np.arange(record.n) // 2
    made = ss.calibrate(in_order, promises, path=PATH).certificate
    assert (made.promises[0].bound, made.provenance.seed, made.provenance.seed_drawn) == (
        "trinomial",
        5,
        False,
    )
    made = ss.calibrate(in_order.grouped(groups), promises, path=PATH).certificate
    assert [each for each in made.conditions if each.key == "order"] == [
        in_order.order.condition("groups")
    ]


def test_limits_of_costs_are_checked(record):
    promise = ss.Promise("zero_one", epsilon=0.05)
    for name, limit, word in (
        ("gflops", 1.0, "cost"),
        ("flops", 5.0, "at_most"),
        ("flops", -1.0, "at_most"),
    ):
        with refused(word):
            ss.calibrate(record, [promise, ss.CostPromise(name, at_most=limit)])
    limit = ss.CostPromise("flops", at_most=3.0)
    each = replace(record, costs={"flops": np.tile([1.0, 2, 3, 5], (1000, 1))})
    with pytest.raises(ValueError, match="CostPromise needs a cost per exit or setting"):
        ss.calibrate(each, [promise, limit])
    with refused("control"):
        ss.calibrate(record, [promise, limit], control="crc")
    with pytest.raises(ValueError, match="or a cost without replacement"):
        ss.calibrate(record.drawn_from(5000), [promise, limit])


def test_costs_are_promised_where_labels_are_missing(record):
    """Costs need no labels: the walk for them begins at the end of the whole path."""
    losses = record.losses["zero_one"].copy()
    losses[::2] = np.nan
    labels = replace(record, losses={"zero_one": losses})
    request = request_of(
        ss.CostPromise("flops", at_most=4.9),
        loss="zero_one",
        epsilon=0.3,
        missing="stop",
        path=PATH,
    )
    policy = request.run(labels)
    assert policy.certificate.stopped_at is not None
    assert policy.certificate.costs.means["flops"][1] < 4.9
    rows = labels.needs_label(path=PATH)
    asked = []

    def labeller(ids):
        asked.extend(ids.tolist())
        return np.zeros(len(ids), int)

    found = replace(request, missing=ss.Ask(labeller, 100)).run(labels)
    assert 0 < len(asked) <= 100 < len(rows)
    assert found.certificate.max_costs == {"flops": 4.9}


def test_the_mean_cost_of_weighted_samples_and_of_groups(record):
    promise, limit = ss.Promise("zero_one", epsilon=0.08), ss.CostPromise("flops", at_most=3.0)
    weights = np.where(np.arange(1000) % 2, 1.5, 0.5)
    for facts in (
        record.weighted(weights, max_weight=1.5),
        record.grouped(np.arange(1000) // 2),
        record.grouped(np.arange(1000) // 2, average="sample", max_size=2),
        record.grouped(np.arange(1000) // 4).weighted(weights, max_weight=1.5),
    ):
        policy = ss.calibrate(facts, [promise, limit], path=PATH)
        assert policy.certificate.costs.means["flops"][1] < 3.0
        exits = exits_at(record, policy)
        spent = record.costs["flops"][exits]
        counted = weights if facts.sampling.weights is not None else np.ones(1000)
        mean = (counted * spent).sum() / counted.sum()
        assert policy.certificate.costs.means["flops"][1] == pytest.approx(mean)
        close = ss.CostPromise("flops", at_most=mean + 0.001)
        assert ss.calibrate(facts, [promise, close], path=PATH).threshold != policy.threshold


# ------------------------------------------------------------------------------------------ weights


def test_weights_move_the_promise_to_another_distribution(record):
    weights = np.where(np.arange(1000) % 2, 1.5, 0.5)
    weighted = record.weighted(weights, max_weight=1.5)
    policy = ss.calibrate(weighted, loss="zero_one", epsilon=0.08, path=PATH)
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
        record.weighted(weights, max_weight=1.5, estimated=True), loss="zero_one", epsilon=0.08
    )
    assert "(they were estimated, and the promise holds as far as they are exact)" in str(estimated)


def test_weights_by_slice(record):
    slices = np.where(np.arange(1000) % 2, "night", "day")
    by_name = {"night": 1.5, "day": 0.5}
    options = {"loss": "zero_one", "epsilon": 0.08, "path": PATH}
    sliced = ss.calibrate(record.sliced(slices).weighted(by_name, max_weight=1.5), **options)
    weights = np.where(slices == "night", 1.5, 0.5)
    listed = ss.calibrate(record.weighted(weights, max_weight=1.5), **options)
    assert sliced.certificate.promises == listed.certificate.promises
    with refused("weights"):
        record.sliced(slices).weighted({"night": 1.0}, max_weight=1.5)
    with refused("weights"):
        record.weighted(by_name, max_weight=1.5)


def test_weights_of_one_change_nothing_but_the_test(record):
    curve = record.curve(loss="brier", path=PATH)
    part = Sampling(weights=np.tile([1.0, 0.5], 500), max_weight=1.0, part=True).applied(curve)
    np.testing.assert_allclose(
        part.take(np.arange(0, 1000, 2)).risk(), curve.risk(np.arange(0, 1000, 2))
    )
    same = Sampling(weights=np.ones(1000), max_weight=1.0).applied(curve)
    assert np.array_equal(same.losses(), curve.losses())
    assert same.loss_range == curve.loss_range


def test_weights_are_checked(record):
    for weights, most in ((np.full(1000, 2.0), 1.5), (np.full(1000, -1.0), 1.5), (np.ones(9), 1.5)):
        with refused("weights"):
            record.weighted(weights, max_weight=most)
    with pytest.raises(TypeError, match="max_weight"):
        record.weighted(np.ones(1000))
    with refused("max_weight"):
        record.weighted(np.ones(1000), max_weight=0.0)
    many = np.repeat([3.0, 0.5], [500, 500])  # in four groups, chance allows this mean of 1.75
    assert record.grouped(np.arange(1000) // 250).weighted(many, max_weight=3.0).n_units == 4
    with refused("weights"):
        record.weighted(many, max_weight=3.0)


def test_curves_take_rows():
    curve = table_curve([0, 20, 50], costs={"cost": [3.0, 2.0, 1.0]})
    part = curve.take(np.arange(50))
    assert part.n == 50
    assert np.array_equal(part.losses(), curve.losses()[:50])
    with refused("rows"):
        curve.shuffled(0).take(np.arange(3))


def test_two_limits_of_one_cost_are_refused():
    """The later one would take the place of the lower one without a word."""
    limits = [ss.CostPromise("flops", at_most=limit) for limit in (2.0, 3.0)]
    with pytest.raises(ValueError, match="limit each cost once"):
        ss.Calibration([ss.Promise("zero_one", epsilon=0.05), *limits])
