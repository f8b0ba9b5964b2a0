"""The sweep loop, on a system that costs one class."""

import numpy as np
import pytest

from swiftsure import RunOptions
from swiftsure.run import Runs, Sweep, sweep_grid


class Rounding(Sweep):
    """Rounds numbers up to 1 if they reach the threshold; 0 is the full model's answer."""

    def __init__(self, numbers, thresholds, *, batch_size=2, chunk_size=None):
        super().__init__(
            system="rounding",
            grid=sweep_grid(np.asarray(thresholds), np.inf),
            batch_size=batch_size,
            chunk_size=chunk_size,
        )
        self.numbers = np.asarray(numbers)
        self.runs = []

    def prepare(self, inputs):
        numbers = self.numbers[inputs]

        def run(rows, columns):
            self.runs += zip((inputs.start + rows).tolist(), columns.tolist(), strict=True)
            exits = numbers[rows] >= self.grid[columns]
            reached = self.grid <= numbers[rows][:, None]
            values = {"loss": exits.astype(float), "cost": 2.0 - exits}
            return Runs(values, reached == exits[:, None])

        return run

    def columns(self, inputs, tables):
        return {
            "inconsistencies": {"changed": tables["loss"]},
            "costs": {"steps": tables["cost"]},
            "ids": np.arange(inputs.start, inputs.stop),
        }

    def identity(self):
        return {"numbers": self.numbers.tolist()}


NUMBERS, GRID = [0.1, 0.9, 0.5, 0.7, 0.3], [0.8, 0.6, 0.4, 0.2]


@pytest.mark.parametrize("options", [{}, {"batch_size": 9}, {"chunk_size": 1}, {"chunk_size": 2}])
@pytest.mark.parametrize("shard_size", [2, 64])
def test_few_runs_fill_the_record(options, shard_size):
    system = Rounding(NUMBERS, GRID, **options)
    record = system.run(5, RunOptions(shard_size=shard_size))
    expected = np.asarray(NUMBERS)[:, None] >= system.grid
    np.testing.assert_array_equal(record.inconsistencies["changed"], expected)
    np.testing.assert_array_equal(record.costs["steps"], 2.0 - expected)
    assert record.ids.tolist() == [0, 1, 2, 3, 4]
    assert len(system.runs) == len(set(system.runs)) <= 10  # one or two per number, not five


def test_the_full_model_runs_first_and_alone():
    system = Rounding(NUMBERS, GRID, batch_size=3)
    system.run(5)
    assert system.runs[:5] == [(row, 0) for row in range(5)]
    assert all(column > 0 for _, column in system.runs[5:])


def test_shards_are_resumed_and_bound_to_the_data(tmp_path):
    first = Rounding(NUMBERS, GRID)
    whole = first.run(5, RunOptions(shards=tmp_path, shard_size=2))
    (tmp_path / "shard-00002.parquet").unlink()
    again = Rounding(NUMBERS, GRID)
    record = again.run(5, RunOptions(shards=tmp_path, shard_size=2))
    assert {row for row, _ in again.runs} == {4}
    np.testing.assert_array_equal(
        record.inconsistencies["changed"], whole.inconsistencies["changed"]
    )
    for other, named in [
        (Rounding([*NUMBERS[:4], 0.35], GRID), "numbers"),
        (Rounding(NUMBERS, GRID[:3]), "thresholds"),
    ]:
        with pytest.raises(ValueError, match=f"another run, with other {named}: choose another"):
            other.run(5, RunOptions(shards=tmp_path, shard_size=2))
        assert not other.runs


@pytest.mark.parametrize(
    ("levels", "full", "expected"),
    [
        ([0.9, 0.5], np.inf, [np.inf, 0.9, 0.5]),
        ([np.inf, 0.5], np.inf, [np.inf, 0.5]),
        ([0.5, 2.0], 0.0, [0.0, 0.5, 2.0]),
        ([0.0, 2.0], 0.0, [0.0, 2.0]),
    ],
)
def test_the_full_model_is_the_first_setting(levels, full, expected):
    assert sweep_grid(np.asarray(levels), full).tolist() == expected


@pytest.mark.parametrize(
    ("levels", "full", "message"),
    [
        ([], np.inf, "list of numbers"),
        ([0.5, 0.5], np.inf, "must fall"),
        ([0.5, 0.9], np.inf, "must fall"),
        ([2.0, 1.0], 0.0, "must rise"),
    ],
)
def test_settings_are_ordered(levels, full, message):
    with pytest.raises(ValueError, match=message):
        sweep_grid(np.asarray(levels), full)
