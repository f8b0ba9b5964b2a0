"""Records from tables, CSV files and npz files of probabilities, and warnings about them."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

import swiftsure as ss
from tests.builders import random_logits, random_record

N = 300
LOGITS, LABELS = random_logits(N)
P = ss.scores.probabilities(LOGITS)
RECORD = ss.ExitRecord.from_logits(LOGITS, LABELS, losses="zero_one")
NAMES = np.asarray(["ant", "bee", "cat", "dog", "eel"])


def columns(names=NAMES):
    """What a table of a classifier's answers holds."""
    table = {f"confidence.{k + 1}": RECORD.confidences["top1"][:, k] for k in range(3)}
    table |= {f"prediction.{k + 1}": names[RECORD.predictions[:, k]] for k in range(4)}
    return {"id": RECORD.ids + 7, **table, "label": names[LABELS]}


@pytest.mark.parametrize("kind", ["mapping", "arrow", "pandas", "csv"])
@pytest.mark.parametrize("names", [NAMES, np.arange(5)])
def test_a_table_of_answers_is_a_record(kind, names, tmp_path):
    given = columns(names)
    if kind == "mapping":
        made = ss.ExitRecord.from_frame(given)
    elif kind == "arrow":
        made = ss.ExitRecord.from_frame(pa.table(given))
    else:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame(given)
        made = ss.ExitRecord.from_frame(frame)
        if kind == "csv":
            frame.to_csv(tmp_path / "record.csv", index=False)
            made = ss.load_record(tmp_path / "record.csv")
    np.testing.assert_array_equal(made.losses["zero_one"], RECORD.losses["zero_one"])
    soft = RECORD.inconsistencies["zero_one"]
    np.testing.assert_array_equal(made.inconsistencies["zero_one"], soft)
    np.testing.assert_allclose(made.confidences["top1"], RECORD.confidences["top1"], atol=1e-7)
    assert made.ids.tolist() == list(range(7, 7 + N))
    one, other = (
        ss.calibrate(replace(each, order=0), loss="zero_one", epsilon=0.3)
        for each in (made, RECORD)
    )
    assert one.threshold == other.threshold


def test_a_table_holds_all_that_a_record_holds(tmp_path):
    (tmp_path / "record.csv").write_text(
        "confidence.entropy.1,loss.brier.1,loss.brier.2,inconsistency.brier.1,"
        "inconsistency.brier.2,cost.usd.1,cost.usd.2,full_cost.usd,group,slice\n"
        "0.5,0.25,0,0.5,0,1,4,3,a,night\n0.25,1,0.5,0.5,0,1,4,3,b,day\n"
    )
    made = ss.ExitRecord.load(tmp_path / "record.csv")
    assert made.confidences["entropy"].tolist() == [[0.5], [0.25]]
    assert made.losses["brier"].tolist() == [[0.25, 0], [1, 0.5]]
    assert made.inconsistencies["brier"].tolist() == [[0.5, 0], [0.5, 0]]
    assert made.costs["usd"].tolist() == [[1, 4], [1, 4]]
    assert made.full_costs["usd"].tolist() == [3, 3]
    assert (made.groups.tolist(), made.slices.tolist()) == (["a", "b"], ["night", "day"])


def test_empty_labels_are_missing(tmp_path):
    (tmp_path / "record.csv").write_text(
        "confidence.1,prediction.1,prediction.2,label\n0.5,3,3,\n0.25,1,2,2\n"
    )
    made = ss.ExitRecord.load(tmp_path / "record.csv")
    np.testing.assert_array_equal(made.losses["zero_one"], [[np.nan, np.nan], [1, 0]])
    assert made.predictions.tolist() == [[3, 3], [1, 2]]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"top1": [0.5]}, "unknown column 'top1'; known are confidence.K"),
        ({"confidence.0": [0.5]}, "unknown column 'confidence.0'"),
        ({"loss.1": [0.5]}, "unknown column 'loss.1'"),
        ({"confidence.1": [0.5], "label": [1]}, "must have columns prediction.K"),
        ({"confidence.1": [0.5], "confidence.3": [0.5]}, "lacks the column confidence.2"),
        ({"loss.brier.1": [0.5]}, "must have columns confidence.K"),
        (3, "`frame` must be a data frame"),
    ],
)
def test_tables_of_something_else_are_refused(table, message):
    with pytest.raises((ValueError, TypeError), match=message.replace(".", r"\.")):
        ss.ExitRecord.from_frame(table)


def test_npz_files_of_probabilities(tmp_path):
    more = {"slices": NAMES[LABELS], "costs.usd": [1, 2, 3, 4], "full_costs.usd": 3.5}
    np.savez(tmp_path / "p.npz", probabilities=P, labels=LABELS, **more)
    made = ss.load_record(tmp_path / "p.npz")
    np.testing.assert_array_equal(made.losses["zero_one"], RECORD.losses["zero_one"])
    assert (made.full_costs, made.slices.tolist()) == ({"usd": 3.5}, NAMES[LABELS].tolist())
    np.savez(tmp_path / "wrong.npz", confidences=P[:, :3, 0], labels=LABELS)
    with pytest.raises(ValueError, match=r"unknown array 'labels'.*or probabilities") as refused:
        ss.load_record(tmp_path / "wrong.npz")
    assert "Did you mean 'labels'" not in str(refused.value)
    np.savez(tmp_path / "both.npz", logits=LOGITS, probabilities=P)
    with pytest.raises(ValueError, match="but holds both"):
        ss.load_record(tmp_path / "both.npz")


def test_outputs_take_costs_of_the_full_model():
    more = {"costs": {"usd": [1, 2, 3, 4]}, "full_costs": {"usd": 3.5}}
    for made in (
        ss.ExitRecord.from_logits(LOGITS, LABELS, **more),
        ss.ExitRecord.from_probabilities(P, LABELS, **more),
    ):
        assert made.full_costs == {"usd": 3.5}


def test_accuracies_in_place_of_losses_warn():
    right = 1 - RECORD.losses["zero_one"]
    assert right[:, -1].mean() > 0.7
    with pytest.warns(UserWarning, match="if these are accuracies, pass 1 minus them"):
        ss.ExitRecord(RECORD.confidences, losses={"zero_one": right})
    with pytest.warns(UserWarning, match="if these are accuracies"):
        ss.ThresholdRecord([1.0, 0.5], {"exact": right[:, [-1, 0]]})
    random_record(losses="zero_one")  # losses do not warn


def test_the_large_model_first_warns():
    with pytest.warns(UserWarning, match="give the cheapest model first"):
        replace(RECORD, costs={"usd": [5.0, 6, 7, 8]}, full_costs={"usd": 1.0})
    replace(RECORD, costs={"usd": [0.5, 6, 7, 8]}, full_costs={"usd": 1.0})


def test_probabilities_as_logits_warn():
    with pytest.warns(UserWarning, match="look like probabilities"):
        ss.ExitRecord.from_logits(P, LABELS)
