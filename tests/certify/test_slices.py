"""Slices: one setting for all or one for each, by name, and what runs in full."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.builders import refused, request_of

PATH = ss.Path.logit_grid(step=0.25)
OPTIONS = {"loss": "zero_one", "epsilon": 0.06, "path": PATH}


def easy_and_hard(n=900, seed=0):
    """A record whose second half is of a harder population, with its slices."""
    parts = [
        Population(n_exits=4, overconfidence=k, difficulty=d).sample(n // 2, seed)
        for k, d in ((1.5, 0.3), (3.0, 0.5))
    ]
    return ss.ExitRecord.from_logits(
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.labels for part in parts]),
        costs={"flops": [1, 2, 3, 5]},
    ), np.repeat(["easy", "hard"], n // 2)


@pytest.fixture(scope="module")
def case():
    return easy_and_hard()


def sliced(within, record, **changes):
    return request_of(within=within, **(OPTIONS | changes)).run(record)


def alone(record, slices, name, **options):
    return ss.calibrate(record.take(np.flatnonzero(slices == name)), **(OPTIONS | options))


def test_one_setting_is_the_safest_of_the_slices(case):
    record, slices = case
    policy = sliced("slices", record.sliced(slices))
    single = [alone(record, slices, name) for name in ("easy", "hard")]
    assert policy.threshold == max(each.threshold for each in single)
    assert single[0].threshold != single[1].threshold
    certificate = policy.certificate
    assert (certificate.samples.n, certificate.samples.slices) == (900, {"easy": 450, "hard": 450})
    assert certificate.delta == 0.1
    exits = policy.exits(record.confidences["top1"])
    gaps = record.losses["zero_one"] - record.losses["zero_one"][:, -1:]
    mean = gaps[np.arange(900), exits].mean()
    assert certificate.promises[0].calibration_risk == pytest.approx(mean)
    text = str(policy)
    assert (
        "in each of the slices easy (450) and hard (450) at once, and so in every mixture" in text
    )
    assert "samples of each slice are independent draws of the slice's own distribution" in text


def test_a_setting_for_each_slice(case):
    record, slices = case
    policy = sliced("each slice", record.sliced(slices))
    for name in ("easy", "hard"):
        assert policy[name].threshold == alone(record, slices, name, delta=0.05).threshold
        assert policy[name].certificate.delta == 0.05
        assert f"on samples of slice {name}, the expected" in str(policy[name])
    assert "all of these promises hold at once" in str(policy)


def test_small_slices_run_the_full_model_by_name(case):
    record, slices = case
    slices = slices.copy()
    slices[:20] = "tiny"
    policy = sliced("each slice", record.sliced(slices))
    assert policy.in_full == ("tiny",)
    assert policy["tiny"].threshold is None
    assert policy["easy"].certificate.samples.slices == {"easy": 430}
    assert "on 20 calibration samples of slice tiny" in str(policy["tiny"])
    exits = policy.exits(record.confidences["top1"], slices)
    assert (exits[:20] == 3).all()
    for name in ("easy", "hard"):
        expected = policy[name].exits(record.confidences["top1"])[slices == name]
        assert exits[slices == name].tolist() == expected.tolist()
    unknown = policy.exits(record.confidences["top1"], np.full(900, "new"))
    assert (unknown == 3).all()
    for row in range(15, 40):
        confidences = record.confidences["top1"][row]
        left = [policy.leaves(k, float(confidences[k]), slices[row]) for k in range(3)]
        assert (left.index(True) if True in left else 3) == exits[row]
    assert not policy.leaves(0, 1.0, "new")
    assert policy.leaves(3, 0.0, "new")


def test_one_setting_is_not_certified_for_a_slice_that_is_too_small(case):
    """No loss of these slices can be certified, so the full model runs, and it is said why."""
    record, slices = case
    slices = slices.copy()
    slices[:20] = "tiny"
    policy = sliced("slices", record.sliced(slices), risk="consistency", epsilon=0.1)
    certificate = policy.certificate
    assert policy.runs_full_model
    assert certificate.samples.slices == {"easy": 430, "hard": 450, "tiny": 20}
    assert certificate.samples.small_slices == {"tiny": 22}
    assert "too few samples are of tiny (22)" in str(policy)
    without = record.sliced(slices).take(np.arange(20, 900))
    assert not sliced("slices", without, risk="consistency", epsilon=0.1).runs_full_model


def test_datasets_are_slices(case):
    record, slices = case
    parts = {name: record.take(np.flatnonzero(slices == name)) for name in ("easy", "hard")}
    joined = ss.joined_datasets(parts)
    assert joined.slices.tolist() == slices.tolist()
    by_name, by_slice = sliced("slices", joined), sliced("slices", record.sliced(slices))
    assert by_name.threshold == by_slice.threshold
    with refused("records"):
        ss.joined_datasets({})
    with refused("records"):
        ss.joined_datasets({"a": record, "b": record.curve(loss="zero_one")})


def test_slices_are_kept_in_files(case, tmp_path):
    record, slices = case
    record = record.sliced(slices)
    record.save(tmp_path / "record.parquet")
    loaded = ss.ExitRecord.load(tmp_path / "record.parquet")
    assert loaded.slices.tolist() == slices.tolist()
    assert loaded.take([0, 899]).slices.tolist() == ["easy", "hard"]
    policy = sliced("each slice", loaded)
    policy.save(tmp_path / "policy.json")
    assert ss.SlicedPolicy.load(tmp_path / "policy.json") == policy
    text = (tmp_path / "policy.json").read_text()
    (tmp_path / "policy.json").write_text(text.replace('"delta": 0.1', '"delta": 0.09', 1))
    with pytest.raises(ValueError, match=r"policy.json is damaged: it was changed after"):
        ss.SlicedPolicy.load(tmp_path / "policy.json")


def test_slices_of_thresholds():
    losses = np.column_stack([np.zeros(300), np.full(300, 0.02), np.full(300, 0.2)])
    losses[:100, 2] = 0.0
    record = ss.ThresholdRecord(
        [1.0, 0.5, 0.2], losses={"rouge_l": losses}, slices=np.repeat(["a", "b", "b"], 100)
    )
    assert request_of(within="slices", epsilon=0.1).run(record).threshold == 0.5
    own = request_of(within="each slice", epsilon=0.1).run(record)
    assert (own["a"].threshold, own["b"].threshold) == (0.2, 0.5)


def test_what_does_not_go_with_slices(case):
    record, slices = case[0].sliced(case[1]), case[1]
    for within in ("slices", "each slice"):
        with refused("control"):
            sliced(within, record, control="crc")
        with refused("epsilon"):
            sliced(within, record, epsilon=1.5)
        with refused("within"):
            sliced(within, case[0])
        with pytest.raises(ValueError, match="finite population"):
            sliced(within, record.drawn_from(5000))
    with refused("path"):
        sliced("slices", record, path="breakpoints")
    assert len(sliced("each slice", record, path="breakpoints")) == 2
    own = ss.Promise("zero_one", epsilon=0.1, within="each slice")
    with pytest.raises(ValueError, match="every Promise must ask for it"):
        ss.calibrate(record, [own, ss.Promise("brier", epsilon=0.1)])
    with refused("slices"):
        case[0].sliced(slices[:5])
    with refused("slice"):
        sliced("each slice", record)["new"]


FACTS = {
    "weights": lambda record: record.weighted(np.tile([1.5, 0.5], 450), max_weight=1.5),
    "groups": lambda record: record.grouped(np.arange(900) // 2),
    "groups by sample": lambda record: record.grouped(
        np.arange(900) // 2, average="sample", max_size=3
    ),
    "weights and groups": lambda record: record.grouped(np.arange(900) // 2).weighted(
        np.tile([1.5, 0.5], 450), max_weight=1.5
    ),
}


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize(
    "promise",
    [
        {"epsilon": 0.15},
        {"among": "exits", "epsilon": 0.3},
        {"loss": "brier", "above": 0.2, "epsilon": 0.3},
        {"loss": "brier", "worst": 0.5, "epsilon": 0.6},
    ],
    ids=str,
)
def test_slices_go_with_every_draw_and_promise(case, fact, promise):
    """One setting is the safest of those that are certified in each slice alone."""
    record = FACTS[fact](case[0].sliced(case[1]))
    policy = sliced("slices", record, **promise)
    single = [
        ss.Calibration(ss.Promise(**({"loss": "zero_one"} | promise)), path=PATH).run(
            replace(part, sampling=replace(part.sampling, part=True))
        )
        for part in (record.take(np.flatnonzero(case[1] == name)) for name in ("easy", "hard"))
    ]
    assert all(each.threshold is not None for each in single)
    assert policy.threshold == max(each.threshold for each in single)
    own = sliced("each slice", record, **promise)
    assert own["easy"].threshold >= single[0].threshold
    for name, found in own.evaluate(record).items():
        asked = own[name].certificate.promises[0]
        assert found.risk == pytest.approx(asked.calibration_risk)
    assert policy.evaluate(record).risk <= promise["epsilon"]


@pytest.mark.parametrize("within", ["slices", "each slice"])
def test_costs_go_with_slices(case, within):
    record = case[0].sliced(case[1])
    promises = [
        ss.Promise("zero_one", epsilon=0.1, within=within),
        ss.CostPromise("flops", at_most=4.5),
    ]
    policy = ss.calibrate(record, promises, path=PATH)
    assert not policy.runs_full_model
    each = policy.policies.values() if within == "each slice" else [policy]
    assert all(one.certificate.max_costs == {"flops": 4.5} for one in each)


@pytest.mark.parametrize("fact", FACTS)
def test_slices_grow(case, fact):
    record = FACTS[fact](case[0].sliced(case[1]))
    request = request_of(within="slices", **(OPTIONS | {"epsilon": 0.2}))
    grown = request.start(horizon=400)
    mixed = np.random.default_rng(0).permutation(450)
    pairs = np.sort(np.concatenate([2 * mixed[:225], 2 * mixed[:225] + 1]))
    for rows in (pairs, np.setdiff1d(np.arange(900), pairs)):
        grown.update(record.take(rows))
    policy = grown.policy()
    assert policy.threshold is not None
    assert set(policy.certificate.samples.slices) == {"easy", "hard"}
    assert policy.evaluate(record).risk <= 0.2


@pytest.mark.parametrize("within", ["slices", "each slice"])
def test_slices_do_not_learn_paths_of_their_own(within):
    """Setting 1 is bad in one slice, setting 2 in the other: no index means the same in both."""
    rng, first = np.random.default_rng(0), np.arange(1200) % 2 == 0
    losses = np.zeros((1200, 3))
    losses[first, 1] = rng.random(600) < 0.5
    losses[~first, 2] = rng.random(600) < 0.5
    record = ss.ThresholdRecord(
        dials={"x": [0, 1, 2], "y": [0, 0, 1]},
        inconsistencies={"mse": losses},
        costs={"seconds": [9.0, 3.0, 3.0]},
        slices=np.where(first, "a", "b"),
    )
    request = request_of(within=within, risk="consistency", epsilon=0.05, path=ss.Path.learn(0.3))
    if within == "each slice":
        with pytest.raises(ValueError, match="split"):
            request.run(record)
        return
    policy = request.run(record)
    assert policy.threshold is None
    assert policy.certificate.samples.pilot == 360
