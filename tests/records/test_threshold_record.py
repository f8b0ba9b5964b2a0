"""ThresholdRecord: systems that run anew at each threshold."""

import math
from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from tests.builders import refused

LOSSES = np.asarray([[0.25, 0.5, 0.75], [0.5, 0.25, 0.5]])
DISTANCES = np.asarray([[0.0, 0.1, 0.2], [0.0, 0.0, 1.0]])


def small(**changes):
    arguments = {"thresholds": [1.0, 0.5, 0.25], "losses": {"rouge_l": LOSSES}}
    return ss.ThresholdRecord(**{**arguments, **changes})


def test_the_gap_is_the_loss_less_that_of_column_zero():
    curve = small().curve()
    assert curve.losses().tolist() == [[0, 0.25, 0.5], [0, -0.25, 0]]
    assert curve.loss_range == ss.LossRange(-1, 1)
    assert curve.statistic.relative
    assert curve.thresholds.tolist() == [1.0, 0.5, 0.25]
    assert (curve.statistic.risk, curve.statistic.loss) == ("gap", "rouge_l")


def test_consistency_is_the_loss_as_recorded():
    curve = small(inconsistencies={"rouge_l": DISTANCES}).curve("consistency")
    assert np.array_equal(curve.losses(), DISTANCES)
    assert curve.loss_range == ss.LossRange(0, 1)
    assert curve.statistic.risk == "consistency"


def test_zero_bounded():
    curve = small().curve("zero-bounded gap")
    assert curve.losses().tolist() == [[0, 0.25, 0.5], [0, 0, 0]]
    assert curve.loss_range == ss.LossRange(0, 1)


def test_float32_losses_keep_their_precision_and_column_zero_stays_exact():
    record = small(losses={"rouge_l": (LOSSES / 3).astype(np.float32)})
    assert record.losses["rouge_l"].dtype == np.float32
    assert (record.curve().loss_at(0) == 0.0).all()


def test_costs_are_one_a_threshold_or_one_a_run():
    own = [[4, 2, 1], [8, 2, 1]]
    curve = small(costs={"layers": [8, 4, 2], "flops": own}).curve()
    assert curve.mean_cost("layers").tolist() == [8, 4, 2]
    assert curve.mean_cost("flops").tolist() == [6, 2, 1]


@pytest.mark.parametrize("thresholds", [[0, 4, 8], [None, 0.9, 0.5], [1, 0, 1]])
def test_the_dial_may_run_any_way(thresholds):
    expected = [math.inf if t is None else t for t in thresholds]
    assert small(thresholds=thresholds).thresholds.tolist() == expected


def test_defaults():
    record = small()
    assert (record.n, record.dial, dict(record.settings)) == (2, "threshold", {})
    assert record.ids.tolist() == [0, 1]
    assert record.costs == {}
    assert record.groups is None
    assert record.loss_ranges == {"rouge_l": ss.LossRange(0, 1)}


@pytest.mark.parametrize("option", [{"score": "top1"}, {"path": [0.5]}])
def test_score_and_path_are_those_of_the_recorded_run(option):
    known = replace(small(), settings={"score": "softmax"})
    with refused(next(iter(option))):
        known.curve(**option)
    assert known.curve(score="softmax").n == small().curve().n
    with refused("score"):  # nobody knows which score this run had
        small().curve(score="softmax")


def test_gaps_of_single_precision_are_taken_in_double():
    losses = np.random.default_rng(0).random((50, 3)).astype(np.float32)
    curve = ss.ThresholdRecord([1.0, 0.5, 0.2], {"x": losses}).curve("gap", "x")
    exact = losses.astype(np.float64) - losses[:, :1].astype(np.float64)
    np.testing.assert_array_equal(curve.losses(), exact)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"risk": "gapp"}, "`risk` must be one of: gap, consistency, .* Did you mean 'gap'"),
        ({"loss": "rouge"}, "`loss` must be one of: rouge_l; .* Did you mean 'rouge_l'"),
        ({"risk": "consistency"}, "no inconsistencies, .* ask for the risk 'gap'"),
    ],
)
def test_unknown_names_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        small().curve(**arguments)


def test_groups_make_their_means_the_unit():
    curve = small(groups=["a", "a"]).curve()
    assert curve.units.grouped
    assert curve.losses().tolist() == [[0, 0, 0.25]]


def test_zero_bounded_group_means_are_those_of_an_exit_record():
    gap = np.asarray([[0.5, 0.0], [-0.5, 0.0]])
    exits = ss.ExitRecord([[0.9], [0.9]], losses={"a": gap + 0.5}, groups=[0, 0]).curve(
        "zero-bounded gap", path=[0.5]
    )
    runs = ss.ThresholdRecord([None, 0.5], losses={"a": gap[:, ::-1] + 0.5}, groups=[0, 0]).curve(
        "zero-bounded gap"
    )
    assert exits.losses().tolist() == [[0.0, 0.25]]
    assert runs.losses().tolist() == exits.losses().tolist()


def test_take_selects_by_position():
    record = small(
        inconsistencies={"rouge_l": DISTANCES},
        costs={"own": LOSSES, "shared": [3, 2, 1]},
        ids=["a", "b"],
        groups=[4, 5],
        dial="rollback",
        settings={"fallback": 0.4},
        fingerprint="abc",
    )
    part = record.take([1])
    assert part.losses["rouge_l"].tolist() == LOSSES[1:].tolist()
    assert part.inconsistencies["rouge_l"].tolist() == DISTANCES[1:].tolist()
    assert part.costs["own"].tolist() == LOSSES[1:].tolist()
    assert part.costs["shared"].tolist() == [3, 2, 1]
    assert (part.ids.tolist(), part.groups.tolist()) == (["b"], [5])
    assert (part.dial, part.settings, part.fingerprint) == ("rollback", {"fallback": 0.4}, "abc")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"thresholds": []}, "thresholds"),
        ({"thresholds": ["a", "b", "c"]}, "thresholds"),
        ({"thresholds": [1.0, math.nan, 0.0]}, "thresholds"),
        ({"thresholds": [1.0, 0.5, math.inf]}, "thresholds"),
        ({"thresholds": [-math.inf, 0.5, 0.0]}, "thresholds"),
        ({"losses": {}}, "losses"),
        ({"losses": {"a": LOSSES[:, :2]}}, "losses"),
        ({"losses": {"a": LOSSES[0]}}, "losses"),
        ({"losses": {"a": LOSSES[:0]}}, "losses"),
        ({"losses": {"a": 0.5}}, "losses"),
        ({"losses": {"a": LOSSES, "b": LOSSES[:1]}}, "losses"),
        ({"losses": {"a": LOSSES + 1}}, "losses"),
        ({"losses": {"a": LOSSES + math.nan}}, "losses"),
        ({"losses": {"a": [["x", "y", "z"]]}}, "losses"),
        ({"inconsistencies": {"a": LOSSES}}, "inconsistencies"),
        ({"inconsistencies": {"a": DISTANCES[:, ::-1]}}, "inconsistencies"),
        ({"inconsistencies": {"a": DISTANCES[:1]}}, "inconsistencies"),
        ({"costs": {"flops": [1, 2]}}, "costs"),
        ({"costs": {"flops": [3, 2, -1]}}, "costs"),
        ({"ids": [1, 1]}, "ids"),
        ({"groups": [1]}, "groups"),
        ({"loss_ranges": {"rouge_l": (0, 0)}}, "loss_range"),
    ],
)
def test_bad_input_is_refused_by_name(changes, name):
    with refused(name):
        small(**changes)


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path):
    settings = {"draft": np.int64(4), "fallback": np.float32(0.5)}
    record = ss.ThresholdRecord([1.0, 0.5], losses={"x": np.zeros((3, 2))}, settings=settings)
    record.save(tmp_path / "record.parquet")
    assert ss.ThresholdRecord.load(tmp_path / "record.parquet").settings == {
        "draft": 4,
        "fallback": 0.5,
    }
