"""The studies of several dials, on records that are small or known."""

import numpy as np
import pytest

import swiftsure as ss
from experiments.several_dials.compare import compare, compare_exits, drawn
from experiments.several_dials.gains import cascade
from experiments.several_dials.resolution import resolutions

GRID = ss.dial_grid({"a": [1, 2], "b": [1, 2]}, full={"a": 0, "b": 1})
RISKS = np.array([0, 0.01, 0.4, 0.01, 0.4])
COSTS = np.array([1, 0.8, 0.7, 0.5, 0.3])


def test_two_dials_find_what_one_cannot():
    losses = (np.random.default_rng(0).random((900, 5)) < RISKS).astype(float)
    record = ss.ThresholdRecord(
        dials=GRID, inconsistencies={"mse": losses}, costs={"passes": 4 * COSTS}
    )
    options = {"along": "a", "one": {"b": 1}, "cost": "passes", "loss": "mse", "draws": 5, "n": 400}
    rows = compare(record, epsilon=0.1, risk="consistency", pilots=(100,), **options)
    found = {row["way"]: row for row in rows}
    assert list(found) == ["one dial", "pilot of 100", "branches, δ flows", "best in hindsight"]
    costs = [row["cost, %"] for row in rows]
    assert costs == pytest.approx([80, 50, 50, 50])
    assert all(row["risk"] < 0.03 and row["risk above ε, %"] == 0 for row in rows)


@pytest.mark.parametrize(("size", "n"), [(30, 10), (30, 100)])
def test_what_calibrates_does_not_check(size, n):
    rows, test = drawn(size, n, np.random.default_rng(0))
    assert len(rows) == n
    assert not set(rows) & set(test)
    assert len(set(rows)) == min(n, 15)


def test_small_images_are_a_dial():
    record = resolutions(30)
    assert set(record.dials) == {"threshold", "size"}
    assert record.setting(0) == {"threshold": None, "size": 28}
    flops = record.costs["flops"]
    never = record.number_of({"threshold": None, "size": 20})
    assert (flops[:, never] > flops[:, 0]).all()  # the small image is seen in vain
    always = record.number_of({"threshold": 0.0, "size": 20})
    assert (flops[:, always] < 0.2 * flops[:, 0]).all()
    np.testing.assert_array_equal(
        record.losses["zero_one"][:, never], record.losses["zero_one"][:, 0]
    )


def test_a_cascade_of_networks_is_compared_with_its_last():
    record = cascade()
    assert record.n_exits == 3
    assert record.full_costs["flops"] < record.costs["flops"][-1]
    rows = compare_exits(record.take(np.arange(1500)), epsilon=0.1, n=500, pilots=(100,), draws=1)
    assert [row["way"] for row in rows] == ["one dial", "pilot of 100"]
