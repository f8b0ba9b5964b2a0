"""Labels are needed only where some exit disagrees with the full model."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

import swiftsure as ss
from tests.builders import exit_cases, first_exits, random_logits, refused


def partly_labelled(seed=0, n=400):
    """A record with all labels, and one without those of samples on which all exits agree."""
    logits, labels = random_logits(n, seed=seed)
    full = ss.ExitRecord.from_logits(logits, labels)
    disagree = full.inconsistencies["zero_one"].any(axis=1)
    assert 0 < disagree.sum() < n
    return full, ss.ExitRecord.from_logits(logits, np.where(disagree, labels, -1)), disagree


def unlabelled(confidences, inconsistencies, **changes):
    inconsistencies = np.asarray(inconsistencies, float)
    return ss.ExitRecord(
        confidences,
        losses={"zero_one": np.full(inconsistencies.shape, math.nan)},
        inconsistencies={"zero_one": inconsistencies},
        **changes,
    )


@pytest.mark.parametrize("missing", [-1, -7, math.nan])
def test_negative_labels_and_nan_are_missing(missing):
    record = ss.ExitRecord.from_logits(np.zeros((3, 2, 2)), [0, missing, 1])
    assert np.isnan(record.losses["zero_one"]).all(axis=1).tolist() == [False, True, False]


def test_losses_that_need_every_label_are_left_out():
    _, partly, _ = partly_labelled()
    assert list(partly.losses) == ["zero_one"]
    assert set(partly.inconsistencies) == {"zero_one", "brier"}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"path": "breakpoints"},
        {"rule": ss.ExitRule(strict=True)},
        {"rule": ss.ExitRule(min_exit=1)},
    ],
)
def test_agreeing_samples_need_no_label(arguments):
    full, partly, _ = partly_labelled()
    expected = full.curve(loss="zero_one", **arguments)
    curve = partly.curve(loss="zero_one", **arguments)
    assert np.array_equal(curve.losses(), expected.losses())
    assert np.array_equal(curve.risk(), expected.risk())
    assert curve.loss_range == expected.loss_range


def test_calibration_is_the_same_without_them():
    full, partly, _ = partly_labelled()
    for control in ("ucb", "crc"):
        same = [
            ss.calibrate(replace(r, order=0), loss="zero_one", epsilon=0.1, control=control)
            for r in (full, partly)
        ]
        assert same[0].threshold == same[1].threshold is not None
        assert same[0].certificate.promises == same[1].certificate.promises
    assert partly.needs_label().tolist() == []


def test_a_label_that_matters_is_missed():
    logits, labels = random_logits(400)
    labels[:100] = -1
    record = ss.ExitRecord.from_logits(logits, labels, ids=np.arange(400) + 1000)
    wanted = record.needs_label()
    assert 0 < len(wanted) < 100
    with pytest.raises(
        ValueError, match=rf"^{len(wanted)} missing label\(s\) matter: .*needs_label"
    ):
        record.curve(loss="zero_one")
    assert set(wanted) <= set(range(1000, 1100))


@given(exit_cases())
def test_needs_label_against_every_setting(case):
    confidences, _, path, costs, _ = case
    inconsistencies = (costs > 5).astype(float)
    inconsistencies[:, -1] = 0.0
    record = unlabelled(confidences, inconsistencies)
    wanted = []
    for setting in path.per_exit(record.n_exits).tolist():
        exits = first_exits(confidences, setting)
        differ = np.flatnonzero(inconsistencies[np.arange(len(exits)), exits]).tolist()
        wanted += [row for row in differ if row not in wanted]
    matters = np.isin(np.arange(len(confidences)), wanted)
    assert record.needs_label(path=path).tolist() == wanted  # in the order of the walk
    assert record.needs_label(path=path, budget=2).tolist() == wanted[:2]
    if matters.any():
        with pytest.raises(ValueError, match=rf"^{matters.sum()} missing label\(s\) matter"):
            record.curve(path=path)
    else:
        assert (record.curve(path=path).losses() == 0).all()


def test_needs_label_asks_for_no_label_that_is_there():
    logits, labels = random_logits(100)
    assert ss.ExitRecord.from_logits(logits, labels).needs_label().tolist() == []
    without = ss.ExitRecord.from_logits(logits)
    disagree = without.inconsistencies["zero_one"].any(axis=1)
    # An exit that disagrees may never be taken, as an earlier one always is.
    assert set(without.needs_label(path="breakpoints")) <= set(np.flatnonzero(disagree))
    assert len(without.needs_label(path="breakpoints")) > 0


def test_needs_label_down_to_a_threshold():
    record = unlabelled([[0.9], [0.6], [0.3]], [[1, 0]] * 3, ids=["a", "b", "c"])
    path = [0.9, 0.6, 0.3]
    assert record.needs_label(path=path).tolist() == ["a", "b", "c"]
    assert record.needs_label(path=path, threshold=0.6).tolist() == ["a", "b"]
    assert record.needs_label(path=path, threshold=0.95).tolist() == []
    rows = unlabelled([[0.9, 0.1], [0.3, 0.3]], [[1, 0, 0]] * 2)
    assert rows.needs_label(path=[[0.8, 0.7], [0.2, 0.7]], threshold=0.5).tolist() == [0]


def test_needs_label_of_a_loss_that_needs_them_all_is_refused():
    with refused("loss"):
        partly_labelled()[1].needs_label(loss="brier")
    with refused("score"):
        partly_labelled()[1].needs_label(score="top2")


@pytest.mark.parametrize(
    ("confidences", "path", "rule"),
    [
        ([[0.9, 0.5]], None, ss.ExitRule(min_exit=1)),
        ([[0.8, 0.85]], [0.9, 0.8], ss.ExitRule(strict=True)),
    ],
)
def test_needs_label_lists_what_the_curve_misses(confidences, path, rule):
    record = unlabelled(confidences, [[0, 1, 0]])
    with pytest.raises(ValueError, match="1 missing label"):
        record.curve(path=path, rule=rule)
    assert record.needs_label(path=path, rule=rule).tolist() == [0]


def test_the_worst_is_the_largest_gap_where_exits_disagree():
    record = unlabelled([[0.9, 0.5], [0.9, 0.5]], [[0, 0, 0], [0, 1, 0]])
    curve = record.curve(path=[[0.9, 0.9], [None, 0.4]], missing="worst")
    assert curve.losses().tolist() == [[0, 0, 0], [0, 0, 1]]
    assert curve.loss_range == ss.LossRange(-1, 1, whole=True)


def test_the_worst_holds_more_than_the_truth():
    logits, labels = random_logits(400)
    full = ss.ExitRecord.from_logits(logits, labels).curve(loss="zero_one")
    some = ss.ExitRecord.from_logits(logits, np.where(np.arange(400) < 50, -1, labels))
    worst = some.curve(loss="zero_one", missing="worst")
    assert (worst.losses() >= full.losses()).all()
    assert np.array_equal(worst.losses()[50:], full.losses()[50:])


def test_the_worst_does_not_depend_on_the_memory_layout():
    inconsistencies = np.asarray([[0.0, 1.0, 0.0]] * 2)
    record = ss.ExitRecord(
        [[0.9, 0.5], [0.2, 0.7]],
        losses={"zero_one": np.asfortranarray(np.full((2, 3), math.nan))},
        inconsistencies={"zero_one": inconsistencies},
    )
    assert record.curve(path=[0.6], missing="worst").risk().tolist() == [0.0, 0.5]


def test_missing_is_checked():
    record = unlabelled([[0.9]], [[1, 0]])
    with pytest.raises(
        ValueError, match=r"`missing` must be one of: raise, worst, stop; .*'worst'"
    ):
        record.curve(missing="worse")


@pytest.mark.parametrize(
    ("losses", "inconsistencies", "message"),
    [
        ({"zero_one": [[math.nan] * 2]}, {}, "NaN in row 0.*`inconsistencies`"),
        ({"brier": [[math.nan] * 2]}, {"brier": [[1, 0]]}, "NaN in row 0"),
        ({"mine": [[math.nan] * 2]}, {"mine": [[1, 0]]}, "NaN in row 0"),
        ({"zero_one": [[math.nan, 0]]}, {"zero_one": [[1, 0]]}, "whole rows, but row 0"),
        (
            {"zero_one": [[math.nan]]},
            {"zero_one": [[1, 0]]},
            r"\(n=1, n_exits=2\), but got \(1, 1\)",
        ),
    ],
)
def test_nan_elsewhere_is_refused(losses, inconsistencies, message):
    with pytest.raises(ValueError, match=message):
        ss.ExitRecord([[0.5]], losses=losses, inconsistencies=inconsistencies)


def test_missing_labels_survive_taking_and_saving(tmp_path):
    _, partly, _ = partly_labelled()
    expected = partly.curve(loss="zero_one").losses()
    partly.save(tmp_path / "record.parquet")
    loaded = ss.ExitRecord.load(tmp_path / "record.parquet")
    assert np.array_equal(loaded.curve(loss="zero_one").losses(), expected)
    assert np.array_equal(partly.take([3, 1]).curve(loss="zero_one").losses(), expected[[3, 1]])
