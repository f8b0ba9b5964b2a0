"""Section 5.1 of the paper from records: figures, Table 2, and whether the promises were kept."""

import csv

import numpy as np
import pytest

import swiftsure as ss
from experiments.figures import exits_figure, models_figure
from experiments.image_classification.reproduce import (
    CONTROLS,
    RISKS,
    image_classification,
    load_records,
    published,
)
from swiftsure.study.simulate import Population


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("records")
    for seed, name in enumerate(("my_network", "msdnet_imagenet")):
        sample = Population(n_exits=4).sample(1500, seed)
        ss.ExitRecord.from_logits(sample.logits, sample.labels).save(path / f"{name}.parquet")
    return path


@pytest.fixture(scope="module")
def result(folder):
    levels = np.asarray([0.01, 0.05, 0.2])
    return image_classification(folder, sizes=(100, 600), splits=10, draws=60, epsilons=levels)


def test_own_records_come_with_the_library():
    records = load_records()
    assert len(records) == 5
    assert list(records)[:2] == ["MSDNet, CIFAR-10", "L2W-DEN, CIFAR-10"]
    assert {f"{name}, Tiny-ImageNet-100" for name in ("MSDNet", "DViT", "Dyn-Perc")} < set(records)
    for record in records.values():
        assert set(record.losses) == set(record.inconsistencies) == {"zero_one", "brier"}
        assert {"exit", "flops"} <= set(record.costs)
        assert set(record.confidences) == {"top1", "top_diff", "entropy"}
        assert record.fingerprint is not None
        # Exits improve on the whole: the paper's Eq. 2, which Fig. 1 shows.
        for loss in record.losses.values():
            mean = loss.mean(axis=0)
            assert (np.diff(mean) < 0.001).all()  # two exits of a network may be level
            assert mean[-1] < mean[0]
    accuracy = {name: 1 - each.losses["zero_one"][:, -1].mean() for name, each in records.items()}
    assert accuracy["MSDNet, CIFAR-10"] > 0.94
    assert accuracy["L2W-DEN, CIFAR-10"] > 0.94
    assert accuracy["MSDNet, Tiny-ImageNet-100"] > 0.65
    assert accuracy["Dyn-Perc, Tiny-ImageNet-100"] > 0.6


def test_every_size_risk_and_model_is_studied(result):
    assert list(result.studies) == [100, 600]
    for n, by_risk in result.studies.items():
        assert list(by_risk) == list(RISKS)
        for title, models in by_risk.items():
            assert list(models) == ["MSDNet, ImageNet", "my_network"]
            for study in models.values():
                assert (study.about.statistic.risk, study.about.statistic.loss) == RISKS[title]
                assert (study.n_calibration, study.draws, study.splits) == (n, 60, 10)
                assert study.labels == tuple(CONTROLS)


def test_table_2_has_the_papers_layout(result):
    rows = result.table()
    names = [name for name in rows[0] if "ε" in name]
    assert len(names) == 8
    ours = next(
        r
        for r in rows
        if (r["control"], r["n"], r["model"]) == ("CRC (monotone)", 600, "my_network")
    )
    study = result.studies[600]["gap, Brier"]["my_network"]
    assert ours["gap, Brier, ε=0.05"] == round(float(study.gain["CRC (monotone)"][:, 1].mean()), 2)
    theirs = [row for row in rows if row["model"].endswith("ImageNet (paper)")]
    assert {(row["control"], row["n"]) for row in theirs} == {
        ("UCB (WSR)", 100),
        ("CRC (paper's rule)", 100),
    }
    msdnet = next(row for row in theirs if row["model"].startswith("MSDNet"))
    assert [msdnet[name] for name in names] == [0.0, 42.51, 0.0, 30.62, 0.0, 34.21, 0.0, 30.47]


def test_the_papers_average_is_the_papers():
    """The text says about 46 % (UCB) and 61 % (CRC) at n = 100 for R^G(ŷ), ε = 0.05."""
    means = {
        control: np.mean(
            [
                row["gap, 0-1, ε=0.05"]
                for row in published()
                if (row["control"], row["n"]) == (control, 100)
            ]
        )
        for control in ("UCB (WSR)", "CRC (paper's rule)")
    }
    assert round(means["UCB (WSR)"]) == 46
    assert round(means["CRC (paper's rule)"]) == 61


def test_promises_are_named_and_kept(result):
    rows = result.promises()
    assert [(row["control"], row["n"]) for row in rows] == [
        (control, n) for n in (100, 600) for control in CONTROLS
    ]
    promised = {row["control"]: row["promise"] for row in rows}
    assert promised["UCB (WSR)"] == "risk > ε in at most 10 % of sets"
    assert promised["CRC (monotone)"] == "mean risk at most ε"
    assert promised["CRC (paper's rule)"] == "none"
    worst = min(row["margin"] for row in rows if row["promise"] != "none")
    assert worst > -0.1  # of many cells with 60 draws each
    study = result.studies[100]["gap, 0-1"]["my_network"]
    ucb = next(row for row in rows if (row["control"], row["n"]) == ("UCB (WSR)", 100))
    assert ucb["margin"] <= 0.1 - float(study.violations["UCB (WSR)"].rate.max()) + 1e-12


def test_files(result, tmp_path):
    files = result.write(tmp_path / "out")
    assert {file.name for file in files} == {
        "exits.png",
        "curves_n100.png",
        "curves_n600.png",
        "table2.md",
        "table2.csv",
        "promises.csv",
        "summary.csv",
    }
    assert all(file.is_file() for file in files)
    with (tmp_path / "out" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(RISKS) * 2 * len(CONTROLS) * 3
    text = (tmp_path / "out" / "table2.md").read_text()
    assert text.count("\n") == 2 + len(result.table())


def test_folders_that_hold_no_records(tmp_path):
    with pytest.raises(ValueError, match="`data` must be a folder of exit records"):
        image_classification(tmp_path / "no")
    with pytest.raises(ValueError, match="`data` must hold exit records"):
        image_classification(tmp_path)


def test_figure_1_shows_accuracy_and_brier(folder):
    records = load_records(folder)
    accuracy, brier = exits_figure(records).axes
    for axis, loss in ((accuracy, "zero_one"), (brier, "brier")):
        for line, record in zip(axis.lines, records.values(), strict=True):
            mean = record.losses[loss].mean(axis=0)
            np.testing.assert_allclose(line.get_ydata(), 1 - mean if loss == "zero_one" else mean)
            assert list(line.get_xdata()) == [1, 2, 3, 4]
    assert (accuracy.get_ylabel(), brier.get_ylabel()) == ("accuracy", "Brier score")


def test_figure_3_shows_risk_above_and_efficiency_below(result):
    figure = models_figure(result.studies[100], ["UCB (WSR)", "CRC (monotone)"])
    assert len(figure.axes) == 2 * len(RISKS)
    above, below = figure.axes[0], figure.axes[len(RISKS)]
    study = result.studies[100]["gap, 0-1"]["MSDNet, ImageNet"]
    np.testing.assert_allclose(
        above.lines[0].get_ydata(), study.test_risk["UCB (WSR)"].mean(axis=0)
    )
    np.testing.assert_allclose(
        below.lines[1].get_ydata(), 100 - study.gain["CRC (monotone)"].mean(axis=0)
    )
    assert len(above.lines) == 2 * 2 + 1  # and the diagonal
    assert len(figure.legends[0].get_texts()) == 4


def test_records_without_labels_have_no_figure_1():
    record = ss.ExitRecord(
        np.full((3, 1), 0.5), losses={}, inconsistencies={"x": np.asarray([[1.0, 0.0]] * 3)}
    )
    with pytest.raises(ValueError, match="losses against labels"):
        exits_figure({"a": record})
