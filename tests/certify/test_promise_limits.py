"""What promises say to the last digit, what they are not combined with, and what files may hold."""

import json

import numpy as np
import pytest

import swiftsure as ss
from swiftsure._lib.files import json_checksum
from swiftsure.curves.sampling import Sampling
from swiftsure.curves.transforms import tail
from swiftsure.study.simulate import Population
from tests.builders import refused, request_of

PATH = ss.Path.logit_grid(step=0.25)
OPTIONS = {"loss": "zero_one", "epsilon": 0.05, "path": PATH}


@pytest.fixture(scope="module")
def record():
    sample = Population(n_exits=4, overconfidence=2.5).sample(1000, seed=1)
    return ss.ExitRecord.from_logits(sample.logits, sample.labels, costs={"flops": [1, 2, 3, 5]})


def test_limits_and_shares_are_not_rounded_towards_a_stronger_promise(record):
    tail = request_of(loss="brier", epsilon=0.1, above=0.2000004, path=PATH).run(record)
    assert "is above 0.200001 is at most 0.1" in str(tail)
    assert tail.certificate.promises[0].name == "brier gap > 0.200001"
    worst = request_of(loss="brier", epsilon=0.4, worst=0.2004, path=PATH).run(record)
    assert "of the worst 20.04 % of samples" in str(worst)
    assert worst.certificate.promises[0].name == "brier gap, worst 20.04 %"


def test_a_tail_under_weights_names_their_distribution_and_largest_weight(record):
    weighted = record.weighted(np.ones(1000), max_weight=2)
    policy = request_of(loss="brier", epsilon=0.2, above=0.2, path=PATH).run(weighted)
    text = "the probability under the distribution that the weights describe that the brier gap"
    assert text in str(policy)
    assert "no weight exceeds 2" in str(policy)


def test_weights_must_be_able_to_be_a_ratio_of_densities(record):
    """Weights of a half would halve the risk; they are no densities' ratio, whose mean is 1."""
    with refused("max_weight"):
        record.weighted(np.full(1000, 0.5), max_weight=0.5)
    with refused("weights"):
        record.weighted(np.full(1000, 0.5), max_weight=2.0)
    drawn = np.random.default_rng(0).choice([1.6, 0.4], 1000)
    assert record.weighted(drawn, max_weight=1.6).sampling.max_weight == 1.6


def test_a_curve_is_transformed_once(record):
    """The limit in a certificate would otherwise be another than that of the losses."""
    curve = record.curve(loss="brier", path=PATH)
    with refused("above"):
        request_of(epsilon=0.05, above=0.1).run(tail(curve, 0.5))
    with refused("worst"):
        request_of(epsilon=0.05, worst=0.1).run(tail(curve, 0.5))
    groups, weighted = np.arange(1000) // 2, Sampling(weights=np.ones(1000), max_weight=2.0)
    for drawn in (
        weighted.applied(curve),
        curve.grouped(groups),
        weighted.applied(curve, groups),
    ):
        with refused("groups"):
            drawn.grouped(groups)
        with refused("above"):
            request_of(epsilon=0.05, above=0.1).run(drawn)


def test_combinations_without_a_proof_are_refused(record):
    pool = record.drawn_from(5000)
    with pytest.raises(ValueError, match=r"there is no test here of a weighted .* mean"):
        ss.calibrate(pool.weighted(np.ones(1000), max_weight=2.0), **OPTIONS)
    for restricted in ({"worst": 0.1}, {"among": "exits"}, {"within": "slices"}):
        with pytest.raises(ValueError, match=r"there is no test here of a weighted or restricted"):
            request_of(**OPTIONS, **restricted).run(pool.sliced(np.arange(1000) % 2))
    with pytest.raises(ValueError, match=r"`Path\.learn` cannot set a pilot aside"):
        ss.calibrate(pool, **(OPTIONS | {"path": ss.Path.learn(200)}))
    asking = ss.Ask(lambda ids: 1 / 0)  # which is not asked before the refusal
    with pytest.raises(ValueError, match="without replacement"):
        request_of(**OPTIONS, worst=0.1, missing=asking).run(pool)


def test_a_policy_keeps_the_request_that_made_it(record, tmp_path):
    """Whoever calibrates again asks the same, about the samples that exit as of all."""
    policy = request_of(among="exits", **(OPTIONS | {"epsilon": 0.1})).run(record)
    assert policy.certificate.promises[0].selective
    policy.save(tmp_path / "policy.json")
    assert ss.Policy.load(tmp_path / "policy.json").calibration.run(record) == policy


def test_figures_show_bounds_of_what_is_promised_only(record):
    """A bound for all samples is none for those that exit, nor for a calibration that grows."""
    tail = request_of(above=0.2, **(OPTIONS | {"loss": "brier", "epsilon": 0.1})).run(record)
    left = request_of(among="exits", **(OPTIONS | {"epsilon": 0.1})).run(record)
    grown = request_of(**OPTIONS).start()
    grown.update(record)
    for policy, bounded in ((tail, True), (left, False), (grown.policy(), False)):
        axis = policy.plot(record).axes[0]
        assert axis.get_ylabel() == policy.certificate.promises[0].name
        labels = [str(line.get_label()) for line in axis.lines]
        assert any("upper bound" in label for label in labels) == bounded
    weighted = ss.calibrate(record.weighted(np.ones(1000), max_weight=2.0), **OPTIONS)
    with pytest.raises(ValueError, match="weighted"):
        weighted.plot(record)


def test_a_worst_share_that_begins_above_0_is_kept_in_full(record, tmp_path):
    small = record.take(np.arange(20))
    request = request_of(loss="brier", epsilon=0.3, worst=0.1, above=0.05, path=PATH)
    policy = request.run(small)
    assert policy.runs_full_model
    policy.save(tmp_path / "policy.json")
    assert ss.Policy.load(tmp_path / "policy.json") == policy


def changed(path, *keys, value):
    """Write a value into a policy file, with a checksum that fits."""
    content = json.loads(path.read_text())
    for proof in ("checksum", "signature"):
        content.pop(proof, None)
    holder = content
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    path.write_text(json.dumps(content | {"checksum": json_checksum(content)}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("horizon", 500),
        ("max_weight", 0.5),
        ("max_costs", {"flops": -1.0}),
        ("max_costs", {"watts": 1.0}),
        ("slices", {"night": 10}),
        ("slices", {}),
        ("unit", "groups"),
    ],
)
def test_certificates_of_an_impossible_scope_are_refused(record, tmp_path, field, value):
    file = tmp_path / "policy.json"
    request = request_of(above=0.2, **(OPTIONS | {"loss": "brier", "epsilon": 0.1}))
    request.run(record).save(file)
    changed(file, "certificate", field, value=value)
    with pytest.raises(ValueError, match="damaged"):
        ss.Policy.load(file)


@pytest.mark.parametrize(("field", "value"), [("above", 0.2), ("worst", 0.1)])
def test_a_mean_cannot_be_edited_into_a_tail(record, tmp_path, field, value):
    file = tmp_path / "policy.json"
    ss.calibrate(record, **OPTIONS).save(file)
    changed(file, "certificate", "promises", 0, field, value=value)
    with pytest.raises(ValueError, match="damaged"):
        ss.Policy.load(file)


def test_policies_of_slices_are_signed_and_hold_together(record, tmp_path, monkeypatch):
    sliced = record.sliced(np.where(np.arange(1000) % 2, "night", "day"))
    file = tmp_path / "sliced.json"
    policy = request_of(within="each slice", **OPTIONS).run(sliced)
    policy.save(file)
    monkeypatch.setenv("SWIFTSURE_POLICY_KEY", "secret")
    with pytest.raises(ValueError, match="is not signed"):
        ss.SlicedPolicy.load(file)
    policy.save(file)
    assert ss.SlicedPolicy.load(file) == policy
    monkeypatch.delenv("SWIFTSURE_POLICY_KEY")
    changed(file, "delta", value=0.05)
    with pytest.raises(ValueError, match="delta must cover"):
        ss.SlicedPolicy.load(file)
    policy.save(file)
    day = json.loads(file.read_text())["policies"]["day"]
    changed(file, "policies", "night", value=day)
    with pytest.raises(ValueError, match="night must be about that slice"):
        ss.SlicedPolicy.load(file)


def test_datasets_with_one_name_are_not_pooled(record):
    halves = {1: record.take(np.arange(500)), "1": record.take(np.arange(500, 1000))}
    with refused("records"):
        ss.joined_datasets(halves)


def test_a_promise_in_all_slices_rests_on_the_conditions_of_each():
    """The safest slice has all labels, and another one stopped where they end."""
    sample = Population(n_exits=4, overconfidence=2.5).sample(1000, seed=1)
    pool = ss.ExitRecord.from_logits(sample.logits)
    night = np.arange(1000) >= 200
    wanted = pool.needs_label("zero_one", path=PATH)  # in the order of the walk
    rows = np.union1d(np.flatnonzero(~night), wanted[:-50])
    labelled = pool.with_labels(rows, sample.labels[rows])
    slices = np.where(night, "night", "day")
    request = request_of(within="slices", missing="stop", **OPTIONS)
    policy = request.run(labelled.sliced(slices))
    day = ss.calibrate(labelled.take(np.flatnonzero(~night)), missing="stop", **OPTIONS)
    assert policy.threshold == day.threshold is not None
    assert policy.certificate.stopped_at is not None
    assert "was fixed before the model was run on them" in str(policy)
