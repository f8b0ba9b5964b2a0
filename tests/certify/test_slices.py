"""Slices: one setting for all or one for each, by name, and what runs in full."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.builders import refused

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


def alone(record, slices, name, **options):
    return ss.calibrate(record.take(np.flatnonzero(slices == name)), **(OPTIONS | options))


def test_one_setting_is_the_safest_of_the_slices(case):
    record, slices = case
    policy = ss.calibrate_slices(record, slices=slices, **OPTIONS)
    single = [alone(record, slices, name) for name in ("easy", "hard")]
    assert policy["easy"] == policy["hard"]
    assert policy["easy"].threshold == max(each.threshold for each in single)
    assert single[0].threshold != single[1].threshold
    certificate = policy["easy"].certificate
    assert (certificate.samples.n, certificate.samples.slices) == (900, {"easy": 450, "hard": 450})
    exits = policy["easy"].exits(record.confidences["top1"])
    gaps = record.losses["zero_one"] - record.losses["zero_one"][:, -1:]
    mean = gaps[np.arange(900), exits].mean()
    assert certificate.promises[0].calibration_risk == pytest.approx(mean)
    text = str(policy)
    assert (
        "in each of the slices easy (450) and hard (450) at once, and so in every mixture" in text
    )
    assert "samples of each slice are independent draws of the slice's own distribution" in text


@pytest.mark.parametrize("together", [True, False])
def test_a_setting_for_each_slice(case, together):
    record, slices = case
    policy = ss.calibrate_slices(record, slices=slices, own=True, together=together, **OPTIONS)
    for name in ("easy", "hard"):
        chance = 0.05 if together else 0.1
        assert policy[name].threshold == alone(record, slices, name, delta=chance).threshold
        assert policy[name].certificate.delta == chance
        assert f"on samples of slice {name}, the expected" in str(policy[name])
    held = "all of these promises hold at once" if together else "each of these promises alone"
    assert f"{held}" in str(policy)


def test_small_slices_run_the_full_model_by_name(case):
    record, slices = case
    slices = slices.copy()
    slices[:20] = "tiny"
    policy = ss.calibrate_slices(record, slices=slices, **OPTIONS)
    assert policy.in_full == ("tiny",)
    assert policy["tiny"].threshold is None
    assert policy["easy"].certificate.samples.slices == {"easy": 430, "hard": 450}
    assert "on 20 calibration samples of slice tiny" in str(policy["tiny"])
    exits = policy.exits(record.confidences["top1"], slices)
    assert (exits[:20] == 3).all()
    expected = policy["easy"].exits(record.confidences["top1"])
    assert exits[20:].tolist() == expected[20:].tolist()
    unknown = policy.exits(record.confidences["top1"], np.full(900, "new"))
    assert (unknown == 3).all()
    for row in range(15, 40):
        confidences = record.confidences["top1"][row]
        left = [policy.leaves(k, float(confidences[k]), slices[row]) for k in range(3)]
        assert (left.index(True) if True in left else 3) == exits[row]
    assert not policy.leaves(0, 1.0, "new")
    assert policy.leaves(3, 0.0, "new")
    own = ss.calibrate_slices(record, slices=slices, own=True, **OPTIONS)
    assert own.in_full == ("tiny",)
    with refused("slices"):
        ss.calibrate_slices(record.take(range(20)), slices=slices[:20], **OPTIONS)


def test_datasets_are_slices(case):
    record, slices = case
    parts = {name: record.take(np.flatnonzero(slices == name)) for name in ("easy", "hard")}
    by_name = ss.calibrate_slices(parts, **OPTIONS)
    by_slice = ss.calibrate_slices(record, slices=slices, **OPTIONS)
    assert by_name["easy"].threshold == by_slice["easy"].threshold
    with refused("slices"):
        ss.calibrate_slices(parts, slices=slices, **OPTIONS)
    with refused("record"):
        ss.calibrate_slices({}, **OPTIONS)


def test_slices_are_kept_in_files(case, tmp_path):
    record, slices = case
    record = replace(record, slices=slices)
    record.save(tmp_path / "record.parquet")
    loaded = ss.ExitRecord.load(tmp_path / "record.parquet")
    assert loaded.slices.tolist() == slices.tolist()
    assert loaded.take([0, 899]).slices.tolist() == ["easy", "hard"]
    policy = ss.calibrate_slices(loaded, **OPTIONS)
    policy.save(tmp_path / "policy.json")
    assert ss.SlicedPolicy.load(tmp_path / "policy.json") == policy
    text = (tmp_path / "policy.json").read_text()
    (tmp_path / "policy.json").write_text(text.replace('"together": true', '"together": false'))
    with pytest.raises(ValueError, match=r"policy.json is damaged: it was changed after"):
        ss.SlicedPolicy.load(tmp_path / "policy.json")


def test_slices_of_thresholds():
    losses = np.column_stack([np.zeros(300), np.full(300, 0.02), np.full(300, 0.2)])
    losses[:100, 2] = 0.0
    record = ss.ThresholdRecord(
        [1.0, 0.5, 0.2], losses={"rouge_l": losses}, slices=np.repeat(["a", "b", "b"], 100)
    )
    policy = ss.calibrate_slices(record, epsilon=0.1)
    assert policy["a"].threshold == policy["b"].threshold == 0.5
    own = ss.calibrate_slices(record, epsilon=0.1, own=True)
    assert (own["a"].threshold, own["b"].threshold) == (0.2, 0.5)


def test_what_does_not_go_with_slices(case):
    record, slices = case
    with refused("together=False"):
        ss.calibrate_slices(record, slices=slices, together=False, **OPTIONS)
    for wrong in (
        {"pool": 5000},
        {"weights": np.ones(900), "max_weight": 1.0},
        {"max_costs": {"flops": 3.0}},
        {"control": "crc"},
        {"path": "breakpoints"},
        {"risk": "selective gap"},
    ):
        with pytest.raises(ValueError, match=r"slices|own=True"):
            ss.calibrate_slices(record, slices=slices, **(OPTIONS | wrong))
    with refused("slices"):
        ss.calibrate_slices(record, **OPTIONS)
    with refused("slices"):
        ss.calibrate_slices(record, slices=slices[:5], **OPTIONS)
    with refused("slices"):
        groups = replace(record, groups=np.arange(900) // 2)
        ss.calibrate_slices(groups, slices=slices, **OPTIONS)
    with refused("slice"):
        ss.calibrate_slices(record, slices=slices, **OPTIONS)["new"]


@pytest.mark.parametrize("own", [False, True])
def test_slices_do_not_learn_paths_of_their_own(own):
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
    with pytest.raises(ValueError, match="split"):
        ss.calibrate_slices(record, risk="consistency", epsilon=0.05, split=0.3, own=own)
