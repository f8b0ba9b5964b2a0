"""The paper's figure for diffusion, from a record."""

import csv

import numpy as np
import pytest

import swiftsure as ss
from experiments.diffusion.reproduce import CONTROLS, diffusion
from swiftsure_zoo.records import DIFFUSION

LEVELS = np.array([0.05, 0.1, 0.2, 0.3])


def pairs(n=300, K=8, seed=0):
    rng = np.random.default_rng(seed)
    fast = np.linspace(0, 1, K)
    distances = np.clip(0.4 * fast**2 * rng.gamma(2.0, 0.5, size=(n, K)), 0, 1)
    layers = np.clip(9 - 8 * fast + 0.3 * fast * rng.normal(size=(n, K)), 1, 9)
    return ss.ThresholdRecord(
        [None, *np.linspace(0.95, 0.5, K - 1)],
        inconsistencies={"lpips": distances, "mse": distances / 4},
        costs={"layers": layers, "flops": 1e9 * (layers + 1)},
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "small.parquet"
    pairs().save(path)
    return path


@pytest.fixture(scope="module")
def result(saved):
    return diffusion(saved, n_calibration=150, splits=20, epsilons=LEVELS, seed=4)


def test_risks_and_layers_are_those_of_the_record(result):
    """Every split chose some threshold, and its test part has that one's risk and layers."""
    losses, layers = pairs().inconsistencies["lpips"], pairs().costs["layers"]
    rng = np.random.default_rng(4)
    for split in range(20):
        test = rng.permutation(300)[150:]
        for label in CONTROLS:
            for level in range(len(LEVELS)):
                chosen = result.study.thresholds[label][split, level]
                column = int(np.argmin(np.abs(pairs().thresholds - min(chosen, 1e9))))
                column = 0 if np.isinf(chosen) else column
                expected = losses[test, column].mean()
                assert result.study.test_risk[label][split, level] == pytest.approx(expected)
                expected = layers[test, column].mean()
                assert result.study.mean_cost[label][split, level] == pytest.approx(expected)


def test_valid_controls_keep_the_level(result):
    for label in ("UCB (WSR)", "UCB (STaR)", "CRC (monotone)"):
        assert (result.study.test_risk[label].mean(axis=0) <= LEVELS).all()
        assert (result.study.gain[label].mean(axis=0) > 10).all()


def test_the_table_and_the_files(result, tmp_path):
    table = result.table()
    assert [row["ε"] for row in table] == [0.05, 0.1, 0.2, 0.3] * len(CONTROLS)
    assert result.table(LEVELS) == table
    first = table[0]
    assert first["control"] == "CRC (paper's rule): no guarantee"
    label = next(iter(CONTROLS))
    assert first["layers"] == pytest.approx(result.study.mean_cost[label][:, 0].mean())
    assert first["layers saved, %"] == pytest.approx(result.study.gain[label][:, 0].mean())
    assert first["FLOPs saved, %"] < first["layers saved, %"]
    files = result.write(tmp_path / "new")
    assert [file.name for file in files] == [
        "diffusion.png",
        "diffusion_costs.csv",
        "diffusion_summary.csv",
    ]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    with files[1].open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert float(rows[0]["layers"]) == first["layers"]
    assert result.title == "lpips, 300 pairs, n = 150"


def test_lpips_of_enlarged_images_comes_first_where_it_was_recorded(saved):
    small = pairs()
    both = ss.ThresholdRecord(
        small.thresholds,
        inconsistencies={**small.inconsistencies, "lpips_64": small.inconsistencies["lpips"]},
        costs=small.costs,
    )
    asked = {"n_calibration": 150, "splits": 2, "epsilons": LEVELS}
    assert diffusion(both, **asked).study.about.statistic.loss == "lpips_64"
    assert diffusion(both, loss="lpips", **asked).study.about.statistic.loss == "lpips"
    assert diffusion(saved, **asked).study.about.statistic.loss == "lpips"


def test_our_own_record_is_of_real_pairs():
    own = ss.ThresholdRecord.load(DIFFUSION)
    assert own.n >= 1000
    assert len(own.thresholds) > 15
    assert {"lpips", "lpips_64", "ssim", "mse"} <= set(own.inconsistencies)
    result = diffusion(splits=5)
    table = result.table()
    assert table == diffusion(own, splits=5).table()
    valid = [row for row in table if "paper" not in row["control"]]
    assert all(row["test risk"] <= row["ε"] for row in valid)
    assert all(row["layers saved, %"] > 15 for row in valid)
    assert result.study.about.statistic.loss == "lpips_64"
