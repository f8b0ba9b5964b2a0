"""Repeated splits, recomputed by hand; and what their rates mean."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import binomtest

import swiftsure as ss
from swiftsure._lib import progress
from swiftsure.study.evaluation import Rates
from swiftsure.study.simulate import Population

GRID = [0.999, 0.99, 0.97, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.3]
SETTINGS = np.float32([np.inf, *GRID])
EPSILONS = np.array([0.02, 0.05, 0.1, 0.2])
MEASURES = ("test_risk", "test_exceedance", "mean_cost", "gain", "flops_gain")
PROMISE = ss.Promise("zero_one", epsilon=0.05)
LAYERS = ss.Calibration(PROMISE, path=GRID, cost="layers")
CONTROLS = {
    "empirical": ss.Control("empirical"),
    "crc": ss.Control("crc"),
    "paper": ss.Control("crc", selection="paper"),
    "crc by ucb": ss.Control("crc", method="ucb"),
    "star": ss.Control("ucb", bound="star"),
    "wsr": ss.Control("ucb", bound="wsr"),
    "hb": ss.Control("ltt", bound="hoeffding_bentkus", zero_bounded=True),
    "exact": ss.Control("ucb", zero_bounded=True),
    "bonferroni": ss.Control("ltt", bound="hoeffding", correction="bonferroni"),
}


def make_record(n=600, seed=0, overconfidence=1.5, **arguments):
    """A record whose FLOPs differ from sample to sample."""
    sample = Population(n_exits=4, overconfidence=overconfidence).sample(n, seed)
    costs = {
        "layers": [3.0, 6.0, 9.0, 12.0],
        "flops": np.random.default_rng(seed).uniform(1, 2, (n, 4)).cumsum(axis=1),
    }
    return ss.ExitRecord.from_logits(
        sample.logits, sample.labels, losses=["zero_one"], costs=costs, **arguments
    )


def rows_of(record, rows):
    """The record of some rows, which may repeat."""
    return ss.ExitRecord(
        record.confidences["top1"][rows],
        losses={"zero_one": record.losses["zero_one"][rows]},
        costs={"layers": record.costs["layers"], "flops": record.costs["flops"][rows]},
    )


def leaving_at(record, threshold):
    """The exit each sample takes, in plain words."""
    confident = record.confidences["top1"] >= threshold
    return np.where(confident.any(axis=1), confident.argmax(axis=1), record.n_exits - 1)


def outcome(record, threshold, rows):
    """Mean gap, layers and FLOPs of some rows at a threshold."""
    each = np.arange(record.n)
    exits = leaving_at(record, threshold)
    losses = record.losses["zero_one"]
    gap = losses[each, exits] - losses[each, -1]
    flops = record.costs["flops"][each, exits]
    return gap[rows].mean(), record.costs["layers"][exits][rows].mean(), flops[rows].mean()


def chosen_thresholds(control, record, rows, delta, path):
    """What a control chooses on these rows, given to it as a record of their own."""
    curve = rows_of(record, rows).curve("gap", "zero_one", path=path)
    return curve.thresholds[np.maximum(control.indices(curve, EPSILONS, delta), 0)]


@pytest.fixture(scope="module")
def record():
    return make_record()


@pytest.fixture(scope="module")
def study(record):
    return ss.evaluate(
        record,
        risk=LAYERS,
        controls=CONTROLS,
        epsilons=EPSILONS,
        delta=0.15,
        n_calibration=250,
        splits=ss.Repeats(12, draws=15),
        seed=3,
    )


# ----------------------------------------------------------------------------------- the numbers


def test_shapes_and_labels(study):
    assert study.labels == tuple(CONTROLS)
    assert dict(study.controls) == CONTROLS
    assert (study.n_calibration, study.n_pool, study.splits, study.draws) == (250, 600, 12, 15)
    assert (study.about.statistic.risk, study.about.statistic.loss, study.cost) == (
        "gap",
        "zero_one",
        "layers",
    )
    assert study.full_cost == 12.0
    assert study.delta == 0.15
    np.testing.assert_array_equal(study.epsilons, EPSILONS)
    for label in CONTROLS:
        for name in (*MEASURES, "thresholds"):
            assert getattr(study, name)[label].shape == (12, 4)
        assert study.test_exceedance[label].dtype == bool
        assert study.pool_risk[label].shape == (15, 4)
        assert study.violations[label].shape == (4,)


def test_controls_are_labelled_by_what_they_are(record):
    mixed = ["crc", ss.Control("ltt", bound="hoeffding_bentkus", zero_bounded=True)]
    labels = ss.evaluate(record, controls=mixed, splits=1, path=GRID).labels
    assert labels == ("crc", "ltt (hoeffding_bentkus, zero_bounded=True)")
    assert ss.evaluate(record, controls="crc", splits=1, path=GRID).labels == ("crc",)
    assert ss.evaluate(record, splits=1, path=GRID).labels == ("crc", "ucb", "ltt")


@pytest.mark.parametrize("label", CONTROLS)
def test_splits_agree_with_calibrating_and_testing_by_hand(record, study, label):
    rng = np.random.default_rng(3)
    for split in range(12):
        order = rng.permutation(600)
        chosen = chosen_thresholds(CONTROLS[label], record, order[:250], 0.15, GRID)
        np.testing.assert_array_equal(study.thresholds[label][split], chosen)
        test = order[250:]
        _, full_layers, full_flops = outcome(record, np.inf, test)
        for level, threshold in enumerate(chosen):
            risk, layers, flops = outcome(record, threshold, test)
            here = (split, level)
            assert study.test_risk[label][here] == pytest.approx(risk, abs=1e-12)
            assert study.test_exceedance[label][here] == (risk > EPSILONS[level] + 1e-12)
            assert study.mean_cost[label][here] == pytest.approx(layers)
            gain = 100 * (1 - layers / full_layers)
            assert study.gain[label][here] == pytest.approx(gain, abs=1e-9)
            flops_gain = 100 * (1 - flops / full_flops)
            assert study.flops_gain[label][here] == pytest.approx(flops_gain, abs=1e-9)


@pytest.mark.parametrize("label", CONTROLS)
def test_violations_draw_with_replacement_and_look_at_the_whole_pool(record, study, label):
    rng = np.random.default_rng(3)
    for _ in range(12):
        rng.permutation(600)
    everyone = np.arange(600)
    broken = np.zeros(4, int)
    for draw in range(15):
        rows = rng.integers(0, 600, 250)
        chosen = chosen_thresholds(CONTROLS[label], record, rows, 0.15, GRID)
        risks = np.array([outcome(record, threshold, everyone)[0] for threshold in chosen])
        np.testing.assert_allclose(study.pool_risk[label][draw], risks, atol=1e-12)
        broken += risks > EPSILONS + 1e-12
    np.testing.assert_array_equal(np.asarray(study.violations[label]), broken / 15)
    np.testing.assert_array_equal(study.violations[label].low, Rates.of(broken, 15).low)


def test_the_controls_are_told_apart(study):
    """Else the tests above would compare one choice with itself."""
    chosen = {label: tuple(study.thresholds[label].ravel()) for label in CONTROLS}
    assert len(set(chosen.values())) >= len(CONTROLS) - 1
    assert any(0 < rate < 1 for rate in np.asarray(study.violations["empirical"]))


@pytest.mark.parametrize("control", ["crc", "empirical"])
def test_one_split_agrees_with_calibrate(record, control):
    found = ss.evaluate(record, controls=[control], epsilons=[0.05], splits=1, seed=8)
    rows = np.random.default_rng(8).permutation(600)[:100]
    policy = ss.calibrate(record.take(rows), control=control, epsilon=0.05)
    assert policy.threshold is not None
    assert found.thresholds[control][0, 0] == np.float32(policy.threshold)


def test_the_full_model_has_no_risk_and_no_gain(record):
    """At so low a level nothing is certified."""
    request = replace(LAYERS, path=None)
    found = ss.evaluate(
        record, risk=request, controls=["ucb"], epsilons=[1e-4], splits=3, n_calibration=50
    )
    assert np.isposinf(found.thresholds["ucb"]).all()
    for name in ("test_risk", "gain", "flops_gain"):
        np.testing.assert_allclose(getattr(found, name)["ucb"], 0, atol=1e-9)
    np.testing.assert_allclose(found.mean_cost["ucb"], 12.0)
    assert not found.test_exceedance["ucb"].any()
    assert not np.asarray(found.violations["ucb"]).any()


def test_doing_better_than_the_full_model_is_no_exceedance():
    losses = np.zeros((200, 2))
    losses[::2, 1] = -1.0
    curve = ss.RiskCurve.from_losses([1.0, 0.5], losses)
    found = ss.evaluate(curve, controls=["ucb"], epsilons=[0.1], splits=5)
    assert (found.test_risk["ucb"] < -0.3).all()
    assert not found.test_exceedance["ucb"].any()
    assert not np.asarray(found.violations["ucb"]).any()


def test_rounding_is_no_exceedance():
    """Every loss is 0.1 = ε; some means of tenths come out a hair above it."""
    above = 0
    for n in range(20, 60):
        curve = ss.RiskCurve.from_losses([1.0, 0.5], np.tile([0.0, 0.1], (n, 1)))
        found = ss.evaluate(
            curve, controls=["empirical"], epsilons=[0.1], n_calibration=1, splits=2
        )
        assert (found.thresholds["empirical"] == 0.5).all()
        above += (found.test_risk["empirical"] > 0.1).any()
        assert not found.test_exceedance["empirical"].any()
        assert not np.asarray(found.violations["empirical"]).any()
    assert above  # else the test has shown nothing


# ------------------------------------------------------------------------------ kinds of records


def test_costs_of_each_sample_are_those_of_the_test_part(record):
    """Half of the samples cost nothing; a mean over the pool would not notice which."""
    costs = np.zeros((600, 4))
    costs[:300] = [1, 2, 3, 4]
    mine = ss.ExitRecord(
        record.confidences, losses=record.losses, costs={"layers": costs, "flops": 2 * costs}
    )
    request = replace(LAYERS, path=None)
    found = ss.evaluate(
        mine, risk=request, controls=["ucb"], epsilons=[0.2], splits=6, n_calibration=550
    )
    rng = np.random.default_rng(0)
    for split in range(6):
        test = rng.permutation(600)[550:]
        exits = leaving_at(mine, found.thresholds["ucb"][split, 0])[test]
        here = costs[test, exits].mean()
        assert found.mean_cost["ucb"][split, 0] == pytest.approx(here)
        gain = 100 * (1 - here / costs[test, -1].mean())
        assert found.gain["ucb"][split, 0] == pytest.approx(gain)
        assert found.flops_gain["ucb"][split, 0] == pytest.approx(gain)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({"money": [1, 2, 3, 4], "layers": [2, 4, 6, 8]}, "money"),
        ({"money": [1, 2, 3, 4]}, "money"),
        ({"seconds": [1, 2, 3, 4]}, "seconds"),
        ({}, "exit"),
    ],
)
def test_the_first_cost_comes_before_the_exit_number(record, costs, expected):
    mine = ss.ExitRecord(record.confidences, losses=record.losses, costs=costs)
    found = ss.evaluate(mine, controls=["crc"], epsilons=[0.1], splits=1)
    assert found.cost == expected
    assert np.isnan(found.flops_gain["crc"]).all()


def threshold_record(n=300, K=7, per_sample=False, **arguments):
    rng = np.random.default_rng(5)
    losses = np.clip(0.3 + np.linspace(0, 0.15, K) + 0.1 * rng.normal(size=(n, K)), 0, 1)
    layers = np.linspace(12, 3, K)
    if per_sample:
        layers = layers * rng.uniform(0.5, 1.5, (n, 1))
    return ss.ThresholdRecord(
        np.linspace(1, 0.4, K), losses={"rouge_l": losses}, costs={"layers": layers}, **arguments
    )


@pytest.mark.parametrize("per_sample", [False, True])
def test_threshold_records(per_sample):
    record = threshold_record(per_sample=per_sample)
    found = ss.evaluate(record, controls=["crc", "ucb"], epsilons=[0.05, 0.1], splits=8, seed=2)
    losses = record.losses["rouge_l"] - record.losses["rouge_l"][:, :1]
    layers = np.broadcast_to(record.costs["layers"], losses.shape)
    rng = np.random.default_rng(2)
    for split in range(8):
        order = rng.permutation(300)
        curve = record.take(order[:100]).curve()
        test = order[100:]
        for label in ("crc", "ucb"):
            index = ss.Control(label).indices(curve, found.epsilons, 0.1)
            columns = np.maximum(index, 0)
            np.testing.assert_array_equal(
                found.thresholds[label][split], record.thresholds[columns]
            )
            risk = losses[test].mean(axis=0)[columns]
            np.testing.assert_allclose(found.test_risk[label][split], risk, atol=1e-12)
            cost = layers[test].mean(axis=0)
            np.testing.assert_allclose(found.mean_cost[label][split], cost[columns])
            gain = 100 * (1 - cost[columns] / cost[0])
            np.testing.assert_allclose(found.gain[label][split], gain, atol=1e-9)
    assert (found.gain["ucb"] > 0).any()


def test_seconds_are_told_where_a_record_has_them():
    record = threshold_record()
    options = {"controls": ["ucb"], "epsilons": [0.05, 0.1], "splits": 3}
    untimed = ss.evaluate(record, **options)
    assert (untimed.seconds, np.isnan(untimed.full_seconds)) == ({}, True)
    alone = replace(record, costs={"seconds": record.costs["layers"], "calls": [1.0] * 7})
    assert ss.evaluate(alone, **options).cost == "calls"
    seconds = 0.1 + np.random.default_rng(0).random((record.n, len(record.thresholds)))
    for each in (seconds, seconds.mean(axis=0)):
        timed = replace(record, costs={**record.costs, "seconds": each})
        found = ss.evaluate(timed, **options)
        assert found.full_seconds == pytest.approx(seconds[:, 0].mean())
        np.testing.assert_array_equal(found.mean_cost["ucb"], untimed.mean_cost["ucb"])
        rng = np.random.default_rng(0)
        for split in range(3):
            test = rng.permutation(record.n)[100:]
            mean = np.broadcast_to(each, seconds.shape)[test].mean(axis=0)
            levels = found.thresholds["ucb"][split]
            columns = [int(np.flatnonzero(record.thresholds == level)[0]) for level in levels]
            np.testing.assert_allclose(found.seconds["ucb"][split], mean[columns])


def test_a_curve_gives_what_its_record_gives(record):
    arguments = {"controls": ["crc", "ucb"], "epsilons": EPSILONS, "splits": 4, "seed": 6}
    of_record = ss.evaluate(record, risk="gap", loss="zero_one", path=GRID, **arguments)
    of_curve = ss.evaluate(record.curve("gap", "zero_one", path=GRID), **arguments)
    for name in (*MEASURES, "pool_risk"):
        for label in ("crc", "ucb"):
            np.testing.assert_array_equal(
                getattr(of_record, name)[label], getattr(of_curve, name)[label]
            )


def test_a_curve_without_costs_has_no_gain():
    losses = np.zeros((200, 3))
    losses[::10, 2] = 1.0
    curve = ss.RiskCurve.from_losses([1.0, 0.5, 0.2], losses)
    found = ss.evaluate(curve, controls=["ucb"], epsilons=[0.2], splits=3)
    assert found.cost is None
    for name in ("mean_cost", "gain", "flops_gain"):
        assert getattr(found, name)["ucb"].shape == (3, 1)
        assert np.isnan(getattr(found, name)["ucb"]).all()


def test_groups_are_the_units():
    """Splitting and drawing groups is splitting and drawing their means."""
    labels = np.random.default_rng(0).integers(0, 150, 600)
    record = make_record().grouped(labels)
    arguments = {
        "controls": ["crc", "ucb"],
        "epsilons": EPSILONS,
        "n_calibration": 60,
    }
    found = ss.evaluate(record, risk=LAYERS, splits=5, **arguments)
    names = np.unique(labels)
    assert found.n_pool == len(names) < 600

    each = np.arange(600)
    losses, layers = record.losses["zero_one"], record.costs["layers"]
    exits = np.array([leaving_at(record, threshold) for threshold in SETTINGS]).T
    gap = losses[each[:, None], exits] - losses[:, -1:]
    means = np.array([gap[labels == name].mean(axis=0) for name in names])
    costs = np.array([layers[exits][labels == name].mean(axis=0) for name in names])
    curve = ss.RiskCurve.from_losses(SETTINGS, means, {"layers": costs})
    by_hand = ss.evaluate(curve, splits=5, **arguments)
    for label in ("crc", "ucb"):
        for name in ("test_risk", "mean_cost", "gain", "pool_risk"):
            np.testing.assert_allclose(
                getattr(found, name)[label], getattr(by_hand, name)[label], atol=1e-9
            )
    assert (found.gain["crc"] > 0).any()


def test_breakpoints_are_those_of_the_calibration_part(record):
    found = ss.evaluate(
        record,
        risk=replace(LAYERS, path="breakpoints"),
        controls={label: CONTROLS[label] for label in ("star", "hb")},
        epsilons=EPSILONS,
        n_calibration=250,
        splits=4,
        seed=11,
    )
    rng = np.random.default_rng(11)
    parts = [rng.permutation(600) for _ in range(4)]
    draws = [rng.integers(0, 600, 250) for _ in range(4)]
    for label in ("star", "hb"):
        for split, order in enumerate(parts):
            rows, test = order[:250], order[250:]
            chosen = chosen_thresholds(CONTROLS[label], record, rows, 0.1, "breakpoints")
            np.testing.assert_array_equal(found.thresholds[label][split], chosen)
            assert set(chosen) <= {np.inf, *record.confidences["top1"][rows].ravel()}
            for level, threshold in enumerate(chosen):
                risk, layers, _ = outcome(record, threshold, test)
                assert found.test_risk[label][split, level] == pytest.approx(risk, abs=1e-12)
                assert found.mean_cost[label][split, level] == pytest.approx(layers)
        for draw, rows in enumerate(draws):
            chosen = chosen_thresholds(CONTROLS[label], record, rows, 0.1, "breakpoints")
            risks = [outcome(record, threshold, np.arange(600))[0] for threshold in chosen]
            np.testing.assert_allclose(found.pool_risk[label][draw], risks, atol=1e-12)
    assert np.isfinite(found.thresholds["star"]).any()


def test_per_exit_thresholds(record):
    path = ss.Path.family([[0.99, 0.95, 0.9], [0.9, 0.8, 0.7]])
    found = ss.evaluate(record, controls=["crc"], epsilons=[0.05, 0.2], splits=3, path=path)
    assert found.thresholds["crc"].shape == (3, 2, 3)


def test_consistency_needs_no_labels():
    sample = Population().sample(400, 0)
    record = ss.ExitRecord.from_logits(sample.logits, losses=["zero_one"])
    found = ss.evaluate(record, risk="consistency", controls=["ucb"], epsilons=[0.1], splits=3)
    assert found.about.statistic.risk == "consistency"
    assert (found.test_risk["ucb"] >= 0).all()


# -------------------------------------------------------------------------- kinds of promises

KINDS = {
    "tail": replace(PROMISE, above=0.5, epsilon=0.1),
    "worst share": replace(PROMISE, worst=0.25, epsilon=0.4),
    "exits": replace(PROMISE, among="exits", epsilon=0.1),
}
DRAWN = {
    "plain": lambda r: r,
    "groups": lambda r: r.grouped(np.arange(r.n) // 2),
    "samples of groups": lambda r: r.grouped(np.arange(r.n) // 2, average="sample", max_size=3),
    "weights": lambda r: r.weighted(np.tile([1.5, 0.5], r.n // 2), max_weight=1.5),
    "weighted groups": lambda r: r.weighted(
        np.tile([1.5, 1.5, 0.5, 0.5], r.n // 4), max_weight=1.5
    ).grouped(np.arange(r.n) // 2, average="sample", max_size=2),
}


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("promise", KINDS.values(), ids=KINDS)
def test_any_promise_on_any_record(record, promise, drawn):
    """Test risks are those of the promise's own curve on the test part."""
    pool = drawn(record)
    found = ss.evaluate(
        pool, risk=promise, controls=["ucb"], n_calibration=200, splits=2, seed=3, path=GRID
    )
    curve = promise.curve(pool, ss.ExitRule(), GRID)
    np.testing.assert_array_equal(found.epsilons, [promise.epsilon])
    rng = np.random.default_rng(3)
    for split in range(2):
        order = rng.permutation(curve.n)
        level = np.array([promise.epsilon])
        index = int(ss.Control("ucb").indices(curve, level, 0.1, order[:200])[0])
        expected = curve.risk(order[200:])[index] if index >= 0 else 0.0
        assert found.test_risk["ucb"][split, 0] == pytest.approx(expected, abs=1e-12)
    assert str(found.about) in str(found)


# ------------------------------------------------------------------------- order, seeds and sizes


def test_the_order_of_levels_makes_no_difference(record):
    arguments = {"controls": CONTROLS, "splits": 4, "n_calibration": 250, "path": GRID}
    order = [2, 0, 3, 1]
    plain = ss.evaluate(record, epsilons=EPSILONS, **arguments)
    mixed = ss.evaluate(record, epsilons=EPSILONS[order], **arguments)
    np.testing.assert_array_equal(mixed.epsilons, EPSILONS[order])
    for label in CONTROLS:
        for name in (*MEASURES, "thresholds", "pool_risk"):
            np.testing.assert_array_equal(
                getattr(mixed, name)[label], getattr(plain, name)[label][:, order]
            )
        np.testing.assert_array_equal(
            np.asarray(mixed.violations[label]), np.asarray(plain.violations[label])[order]
        )


def test_one_level_may_be_a_number(record):
    found = ss.evaluate(record, controls=["crc"], epsilons=0.1, splits=2, path=GRID)
    assert found.test_risk["crc"].shape == (2, 1)


def test_a_seed_fixes_everything_and_touches_nothing_else(record):
    arguments = {"controls": ["ucb"], "epsilons": EPSILONS, "splits": 5, "path": GRID}
    before = np.random.get_state()[1].copy()  # noqa: NPY002 (to see that it stays)
    first = ss.evaluate(record, seed=1, **arguments)
    again = ss.evaluate(record, seed=1, **arguments)
    other = ss.evaluate(record, seed=2, **arguments)
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    for name in ("test_risk", "pool_risk"):
        np.testing.assert_array_equal(getattr(first, name)["ucb"], getattr(again, name)["ucb"])
        assert (getattr(first, name)["ucb"] != getattr(other, name)["ucb"]).any()


def test_a_share_of_the_pool_calibrates(record):
    arguments = {"controls": ["crc"], "epsilons": [0.1], "splits": 2, "path": GRID}
    share = ss.evaluate(record, n_calibration=0.25, **arguments)
    count = ss.evaluate(record, n_calibration=150, **arguments)
    assert share.n_calibration == 150
    np.testing.assert_array_equal(share.test_risk["crc"], count.test_risk["crc"])
    assert ss.evaluate(record, n_calibration=1e-9, **arguments).n_calibration == 1


def test_draws_are_as_many_as_splits_unless_said(record):
    arguments = {"controls": ["crc"], "epsilons": [0.1], "path": GRID}
    assert ss.evaluate(record, splits=3, **arguments).draws == 3
    found = ss.evaluate(record, splits=ss.Repeats(3, draws=7), **arguments)
    assert (found.splits, found.draws) == (3, 7)
    assert found.pool_risk["crc"].shape == (7, 1)


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_calibration": 600}, "`n_calibration` must leave test samples.*below 600.*got 600"),
        ({"n_calibration": 601}, "`n_calibration` must leave test samples"),
        ({"n_calibration": 0}, "`n_calibration` must be at least 1"),
        ({"n_calibration": 10.0}, "`n_calibration` must be a whole number"),
        ({"n_calibration": 1.5}, "`n_calibration` must be a whole number"),
        ({"controls": ["ubc"]}, "`control` must be one of.*'ubc'.*Did you mean 'ucb'"),
        ({"controls": []}, "`controls` must not be empty"),
        ({"controls": {}}, "`controls` must not be empty"),
        ({"controls": ["crc", "crc"]}, "`controls` must differ"),
        ({"controls": ["crc", ss.Control("crc")]}, "`controls` must differ"),
        ({"epsilons": [0.05, 1.0]}, r"`epsilons` must be in \(0, 1\), but got 1"),
        ({"epsilons": [0.0]}, r"`epsilons` must be in \(0, 1\)"),
        ({"epsilons": [np.nan]}, r"`epsilons` must be in \(0, 1\)"),
        ({"epsilons": ["a"]}, "`epsilons` must hold real numbers"),
        ({"delta": 0.0}, r"`delta` must be in \(0, 1\)"),
        ({"delta": 1.0}, r"`delta` must be in \(0, 1\)"),
        ({"splits": 0}, "`splits` must be at least 1"),
        ({"loss": "brier"}, "`loss` must be one of: zero_one"),
        ({"risk": "gaps"}, "`risk` must be one of.*Did you mean 'gap'"),
        (
            {"risk": replace(LAYERS, rule="entropy")},
            "`score` must be one of: top1",
        ),
        ({"risk": LAYERS, "loss": "zero_one"}, "`loss` is the promise's own"),
        ({"risk": LAYERS, "path": GRID}, "`path` is the request's own"),
        ({"risk": ss.Calibration([PROMISE, PROMISE])}, "`request.evaluate` and `request.plan`"),
        ({"risk": replace(PROMISE, within="slices")}, "`request.evaluate` and `request.plan`"),
        ({"path": ss.Path.learn(50)}, "`request.evaluate` learns one in each split"),
        ({"risk": replace(LAYERS, missing="stop")}, "missing='stop'"),
        ({"path": "logits"}, "`path` must be one of.*Did you mean 'logit'"),
    ],
)
def test_errors(record, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ss.evaluate(record, **{"splits": 1, **arguments})


def test_levels_reach_up_to_the_bound_of_the_loss():
    sample = Population().sample(300, 0)
    record = ss.ExitRecord.from_logits(sample.logits, sample.labels, losses=["brier"])
    ss.evaluate(record, controls=["ucb"], epsilons=[1.5], splits=1)
    with pytest.raises(ValueError, match=r"`epsilons` must be in \(0, 2\), but got 2"):
        ss.evaluate(record, controls=["ucb"], epsilons=[2.0], splits=1)


def test_a_curve_has_its_choices_already(record):
    curve = record.curve(path=GRID)
    scored = ss.Calibration(replace(PROMISE, loss=None), rule="top1")
    for arguments in ({"risk": scored}, {"path": GRID}):
        with pytest.raises(ValueError, match="leave it out"):
            ss.evaluate(curve, splits=1, **arguments)
    for arguments in ({"loss": "other"}, {"risk": "consistency"}):
        with pytest.raises(ValueError, match="must be the curve's own"):
            ss.evaluate(curve, splits=1, **arguments)
    named = {"risk": curve.statistic.risk, "loss": curve.statistic.loss}
    assert ss.evaluate(curve, **named, splits=1).about.statistic.loss == curve.statistic.loss


def test_losses_must_be_relative_to_the_full_model():
    curve = ss.RiskCurve.from_losses([1.0, 0.5], np.full((200, 2), 0.1), relative=False)
    with pytest.raises(ValueError, match="relative to the full model"):
        ss.evaluate(curve, splits=1)


def test_a_full_model_that_is_not_on_the_path_has_no_risk():
    losses = np.tile([0.1, 0.3], (200, 1))
    curve = ss.RiskCurve.from_losses([1.0, 0.5], losses, [4.0, 1.0])
    study = ss.evaluate(
        curve, controls=["ucb", "crc"], epsilons=[0.05, 0.2, 0.9], n_calibration=150, splits=3
    )
    for label in ("ucb", "crc"):
        assert study.test_risk[label] == pytest.approx(np.tile([0.0, 0.1, 0.3], (3, 1)))
        assert study.pool_risk[label] == pytest.approx(np.tile([0.0, 0.1, 0.3], (3, 1)))
        assert study.gain[label].tolist() == [[0.0, 0.0, 75.0]] * 3  # setting 0 costs as much
        assert study.thresholds[label].tolist() == [[np.inf, 1.0, 0.5]] * 3


def test_there_must_be_a_level(record):
    with pytest.raises(ValueError, match="`epsilons`"):
        ss.evaluate(record, epsilons=[], splits=1)


def test_a_mapping_may_name_controls(record):
    assert ss.evaluate(record, controls={"mine": "ucb"}, splits=1).labels == ("mine",)


def test_breakpoints_of_groups_are_refused_in_plain_words():
    record = make_record().grouped(np.arange(600) // 2)
    with pytest.raises(ValueError, match="group"):
        ss.evaluate(record, loss="zero_one", path="breakpoints", splits=1)


def test_records_only():
    with pytest.raises(TypeError, match="`record` must be"):
        ss.evaluate(np.zeros((300, 3)), splits=1)


# ----------------------------------------------------------------------------------------- tables


def test_the_table_is_tidy(study):
    table = study.to_arrow()
    assert isinstance(table, pa.Table)
    assert table.column_names == ["control", "split", "epsilon", *MEASURES, "average"]
    rows = table.to_pylist()
    assert len(rows) == len(CONTROLS) * 12 * 4
    assert len({(row["control"], row["split"], row["epsilon"]) for row in rows}) == len(rows)
    for row in rows:
        level = int(np.flatnonzero(row["epsilon"] == EPSILONS)[0])
        assert row["average"] == "sample"
        for name in MEASURES:
            assert row[name] == getattr(study, name)[row["control"]][row["split"], level]


@pytest.mark.parametrize(("average", "size"), [("group", None), ("sample", 2)])
def test_the_table_says_what_is_averaged(average, size):
    losses = np.zeros((40, 2))
    losses[::4, 1] = 1.0
    record = ss.ThresholdRecord([None, 0.5], {"a": losses})
    record = record.grouped(np.arange(40) // 2, average=average, max_size=size)
    found = ss.evaluate(record, n_calibration=10, splits=2, epsilons=[0.4])
    assert set(found.to_arrow()["average"].to_pylist()) == {average}


def test_the_data_frame_is_the_table(study):
    pd = pytest.importorskip("pandas")
    frame = study.to_pandas()
    assert frame["test_exceedance"].dtype == bool
    means = frame.groupby(["control", "epsilon"])["gain"].mean()
    for label in CONTROLS:
        np.testing.assert_allclose(means[label].to_numpy(), study.gain[label].mean(axis=0))
    pd.testing.assert_frame_equal(frame, study.to_arrow().to_pandas())


def test_without_pandas_the_error_says_what_to_install(study, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"swiftsure\[pandas\].*`to_arrow` does not"):
        study.to_pandas()


def test_a_study_says_what_it_is_in_words(study):
    text = str(study)
    assert f"under {', '.join(study.labels)}, at {len(EPSILONS)} levels" in text
    assert f"n = {study.n_calibration:,}" in text
    assert "summary()" in text


def test_the_summary_holds_means_spreads_and_intervals(study):
    rows = study.summary()
    assert [(row["control"], row["epsilon"]) for row in rows] == [
        (label, epsilon) for label in CONTROLS for epsilon in EPSILONS
    ]
    for row in rows:
        label, level = row["control"], int(np.flatnonzero(row["epsilon"] == EPSILONS)[0])
        for name in ("test_risk", "mean_cost", "gain", "flops_gain", "test_exceedance"):
            assert row[name] == pytest.approx(getattr(study, name)[label][:, level].mean())
        assert row["test_risk_sd"] == pytest.approx(study.test_risk[label][:, level].std())
        assert row["gain_sd"] == pytest.approx(study.gain[label][:, level].std())
        pool = study.pool_risk[label][:, level]
        assert row["mean_risk"] == pytest.approx(pool.mean())
        assert row["mean_risk_se"] == pytest.approx(pool.std() / np.sqrt(15))
        violated = round(15 * row["violations"])
        interval = binomtest(violated, 15).proportion_ci(method="exact")
        assert row["violations"] == float(study.violations[label][level])
        assert (row["violations_low"], row["violations_high"]) == pytest.approx(interval)
        assert all(type(value) in (float, str) for value in row.values())


def test_a_study_prints_in_a_few_lines(study):
    """The arrays are not in it."""
    assert "test_risk=" not in repr(study)
    assert "n_calibration=250" in repr(study)


# ------------------------------------------------------------------------------------------ rates


@pytest.mark.parametrize("trials", [1, 2, 17, 400])
def test_intervals_are_those_of_clopper_and_pearson(trials):
    counts = np.unique(np.linspace(0, trials, 9).astype(int))
    rates = Rates.of(counts, trials)
    np.testing.assert_array_equal(rates.rate, counts / trials)
    for j, count in enumerate(counts):
        expected = binomtest(int(count), trials).proportion_ci(0.95, method="exact")
        assert rates.low[j] == pytest.approx(expected.low, abs=1e-12)
        assert rates.high[j] == pytest.approx(expected.high, abs=1e-12)


def test_rates_count_as_an_array():
    rates = Rates.of(np.array([3, 0, 20]), 100)
    values = np.array([0.03, 0.0, 0.2])
    np.testing.assert_array_equal(np.asarray(rates), values)
    np.testing.assert_array_equal(np.asarray(rates, np.float32), values.astype(np.float32))
    np.testing.assert_array_equal(rates <= 0.1, [True, True, False])
    np.testing.assert_array_equal(np.less(0.1, rates), [False, False, True])
    np.testing.assert_array_equal(rates < np.array([0.1, 0.0, 0.3]), [True, False, True])
    np.testing.assert_array_equal(rates != 0, [True, False, True])
    np.testing.assert_array_equal(1 - rates, 1 - values)
    np.testing.assert_array_equal(rates + rates, 2 * values)
    np.testing.assert_array_equal(np.sqrt(rates), np.sqrt(values))
    assert np.max(rates) == 0.2
    assert np.mean(rates) == pytest.approx(values.mean())
    assert (len(rates), rates.shape) == (3, (3,))
    assert [float(rate) for rate in rates] == values.tolist()


def test_a_rate_keeps_its_interval():
    rates = Rates.of(np.array([3, 0, 20]), 100)
    assert (float(rates[2]), rates[2].low, rates[2].high) == (0.2, rates.low[2], rates.high[2])
    np.testing.assert_array_equal(rates[:2].high, rates.high[:2])
    np.testing.assert_array_equal(rates[np.array([True, False, True])].rate, [0.03, 0.2])
    assert rates[0] <= 0.1
    assert rates[0].shape == ()


def test_an_array_of_rates_is_a_copy_when_asked_for_one():
    rates = Rates.of(np.array([3, 0]), 100)
    np.array(rates)[0] = 9.0
    assert rates.rate[0] == 0.03


def test_rates_are_equal_element_by_element():
    rates = Rates.of(np.array([3, 0]), 100)
    np.testing.assert_array_equal(rates == 0.03, [True, False])


def test_a_rate_can_be_formatted():
    assert f"{Rates.of(np.array([3, 0]), 100)[0]:.1%}" == "3.0%"


# --------------------------------------------------------------------------------------- progress


def test_progress_is_told_each_step(record, monkeypatch):
    seen = []

    class Bar:
        def __enter__(self):
            return lambda: seen.append("step")

        def __exit__(self, *_):
            seen.append("end")

    def steps(title, total, shown):
        seen.append((title, total, shown))
        return Bar()

    monkeypatch.setattr("swiftsure.study.evaluation.steps", steps)
    arguments = {"controls": ["crc"], "epsilons": [0.1], "path": GRID}
    ss.evaluate(record, splits=ss.Repeats(3, draws=2, progress=True), **arguments)
    assert seen == [("evaluating", 5, True), *["step"] * 5, "end"]
    seen.clear()
    ss.evaluate(record, splits=ss.Repeats(3, draws=2), **arguments)
    assert seen[0] == ("evaluating", 5, None)


@pytest.mark.parametrize(
    ("shown", "terminal", "expected"),
    [(True, False, True), (False, True, False), (None, True, True), (None, False, False)],
)
def test_a_bar_is_shown_if_wished_or_in_a_terminal(monkeypatch, capsys, shown, terminal, expected):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with progress.steps("counting", 2, shown) as advance:
        advance()
        advance()
    assert bool(capsys.readouterr().err) == expected


def test_no_progress_bar_in_a_pipe():
    program = (
        "import numpy as np, swiftsure as ss\n"
        "curve = ss.RiskCurve.from_losses([1.0, 0.5], np.zeros((200, 2)))\n"
        "ss.evaluate(curve, controls=['crc'], epsilons=[0.1], splits=2)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


# ----------------------------------------------------------------- what the two rates are, and mean


@pytest.mark.parametrize("control", ["ucb", "ltt"])
def test_exceedance_is_not_the_violation_rate(control):
    """A small test part exceeds ε by its own noise, far more often than δ; the promise holds."""
    record = make_record(1000, seed=1, overconfidence=3.0)
    found = ss.evaluate(
        record,
        loss="zero_one",
        controls=[control],
        epsilons=[0.05],
        delta=0.1,
        n_calibration=900,
        splits=800,
    )
    exceeded = int(found.test_exceedance[control].sum())
    violated = round(800 * float(found.violations[control][0]))
    assert binomtest(exceeded, 800, 0.1, alternative="greater").pvalue < 1e-6
    assert binomtest(violated, 800, 0.1, alternative="greater").pvalue > 1e-6
    assert found.violations[control][0].high < exceeded / 800


def test_violations_are_seen_where_they_are():
    """The naive rule keeps no promise: about half of its choices truly exceed ε."""
    record = make_record(1000, seed=1, overconfidence=3.0)
    repeats = ss.Repeats(1, draws=300)
    found = ss.evaluate(record, controls=["empirical"], epsilons=[0.05], splits=repeats)
    violated = round(300 * float(found.violations["empirical"][0]))
    assert binomtest(violated, 300, 0.1, alternative="greater").pvalue < 1e-6
