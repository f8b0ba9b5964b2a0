"""`compare`: the cheapest of several models is certified by their scores."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import swiftsure as ss
from swiftsure.comparing import Columns
from swiftsure.losses import LossRange

BITS = {"full": 16, "8": 8, "6": 6, "4": 4}
F1 = ss.Promise("f1", epsilon=0.05)


@pytest.fixture(scope="module")
def columns():
    rng = np.random.default_rng(0)
    full = rng.beta(4, 2, size=400)
    lost = {"8": 0.0, "6": 0.01, "4": 0.3}
    return {"full": full, **{name: np.clip(full - each, 0, 1) for name, each in lost.items()}}


def test_the_cheapest_that_is_good_enough_is_chosen(columns):
    policy = ss.compare(columns, F1, costs=BITS, seed=0)
    assert policy.settings == {"model": "6"}
    assert policy.certificate.costs.means["cost"] == (16, 6)
    assert str(policy).startswith("Its mean F1 is at most 5 points lower than the full model's")
    assert "It runs at model = 6" in str(policy)


def test_a_measure_without_words_of_its_own_is_named_as_a_loss(columns):
    policy = ss.compare(columns, ss.Promise("judge", epsilon=0.05), costs=BITS)
    assert str(policy).startswith("Its mean 1 - judge is at most 0.05 higher than the full")
    others = Columns.of(columns).record("judge", costs=BITS)
    assert policy.evaluate(others).saving == pytest.approx(1 - 6 / 16)


def test_models_are_tested_from_the_dearest_to_the_cheapest(columns):
    shuffled = {name: columns[name] for name in ("4", "full", "6", "8")}
    policy = ss.compare(shuffled, F1, full="full", costs=BITS, seed=0)
    assert policy == ss.compare(columns, F1, costs=BITS, seed=0)


def test_without_costs_the_given_order_holds(columns):
    assert ss.compare(columns, F1, seed=0).settings == {"model": "6"}
    worst_first = {name: columns[name] for name in ("full", "4", "8", "6")}
    assert ss.compare(worst_first, F1, seed=0).runs_full_model


def test_with_bonferroni_one_bad_model_stops_nothing(columns):
    worst_first = {name: columns[name] for name in ("full", "4", "8", "6")}
    policy = ss.compare(worst_first, F1, correction="bonferroni", seed=0)
    assert policy.settings == {"model": "6"}


@pytest.mark.parametrize("table", [pd.DataFrame, pa.table, dict, Columns.of])
def test_tables_of_every_kind(columns, table):
    found = Columns.of(table({**columns, "id": np.arange(400), "group": np.arange(400) // 2}))
    assert found.names == ("full", "8", "6", "4")
    record = found.record("f1", costs=BITS)
    assert record.n_units == 200
    assert record.has_ids


def test_every_promise_goes_with_it(columns):
    table = {**columns, "slice": np.where(np.arange(400) < 200, "a", "b")}
    for promise in (
        ss.Promise("f1", epsilon=0.1, above=0.1),
        ss.Promise("f1", epsilon=0.1, worst=0.2),
        ss.Promise("f1", epsilon=0.05, within="slices"),
    ):
        assert ss.compare(table, promise, costs=BITS).settings["model"] == "6"
    both = ss.Calibration([F1, ss.CostPromise("cost", at_most=7)])
    assert ss.compare(columns, both, costs=BITS).settings["model"] == "6"


def test_measures_of_0_and_1_are_tested_exactly():
    right = np.random.default_rng(0).random(300) < 0.8
    promise = ss.Promise("exact_match", epsilon=0.05)
    policy = ss.compare({"a": right, "b": right}, promise)
    assert policy.certificate.promises[0].bound == "trinomial"
    declared = ss.compare({"a": right, "b": right}, F1, values=LossRange(0, 1, whole=True))
    assert declared.certificate.promises[0].bound == "trinomial"
    assert ss.compare({"a": right, "b": right}, F1).certificate.promises[0].bound == "star"


def test_scores_of_another_range(columns):
    percent = {name: 100 * each for name, each in columns.items()}
    promise = ss.Promise("f1", epsilon=5)
    policy = ss.compare(percent, promise, costs=BITS, values=(0, 100), seed=0)
    assert policy.settings == {"model": "6"}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"full": "none"}, "`full` must be"),
        ({"costs": {"full": 1}}, "`costs` must name every model, but lacks 8, 6, 4"),
        ({"costs": {**BITS, "3": 1}}, "`costs` must be"),
        ({"correction": "holm"}, "`correction` must be"),
        ({"values": (0, 0.5)}, "`columns` must"),
        ({"request": ss.Promise(epsilon=0.05)}, "`request` must name what the scores measure"),
        ({"request": ss.Calibration(F1, control="crc"), "correction": "bonferroni"}, "`control`"),
        ({"columns": {"full": [1.0]}}, "`columns` must have two models"),
        ({"columns": {"full": [1.0, 0.5], "b": [1.0]}}, "shape"),
        ({"columns": {"full": [1.0, np.nan], "b": [1.0, 0.0]}}, "finite|NaN|nan"),
    ],
)
def test_what_is_refused(columns, change, error):
    given = {"columns": columns, "request": F1, **change}
    with pytest.raises(ValueError, match=error):
        ss.compare(given.pop("columns"), given.pop("request"), **given)
