"""Section 5.2 of the paper from a record: tables in its layout, figures, and what videos change."""

import csv
from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from experiments.figures import exits_figure
from experiments.segmentation.reproduce import (
    EPSILONS,
    RISKS,
    SCORES,
    TABLE_LEVELS,
    published,
    segmentation,
)
from experiments.segmentation.scenes import camvid_labels, scenes_figure
from swiftsure.report import study_figure
from swiftsure_zoo.records import SEGMENTATION

N, EXITS = 300, 4


@pytest.fixture(scope="module")
def record():
    """Images of two videos, one of them harder than it looks; losses fall from exit to exit."""
    rng = np.random.default_rng(0)
    video = np.repeat(["easy", "hard"], [200, 100])
    looks = rng.beta(2, 4, N)
    hardness = looks + 0.3 * (video == "hard")
    fall = np.asarray([1.0, 0.6, 0.4, 0.3])
    miou = np.clip(hardness[:, None] * fall + rng.normal(0, 0.02, (N, EXITS)), 0, 1)
    away = np.clip(hardness[:, None] * (fall - 0.3), 0, 1)
    sure = np.clip(1 - 0.5 * looks[:, None] * fall[:3] + rng.normal(0, 0.02, (N, 3)), 0, 1)
    return ss.ExitRecord(
        {score: sure**power for power, score in enumerate(SCORES, start=1)},
        losses={"miou": miou, "pixel_brier": 1.5 * miou},
        inconsistencies={"miscoverage": away, "pixel_brier": 1.5 * away},
        costs={"flops": np.asarray([1.0, 2.0, 5.0, 10.0])},
        groups=video,
    )


@pytest.fixture(scope="module")
def result(record):
    levels = [0.01, 0.05, 0.1]
    return segmentation(record, splits=8, draws=20, epsilons=levels, progress=False)


def test_the_table_has_the_papers_layout(result):
    for gain in ("exit", "flops"):
        ours, theirs = result.table(gain), published("cityscapes", gain)
        assert [row["score"] for row in ours] == [row["score"] for row in theirs]
        assert list(ours[0]) == list(theirs[0])
        assert len(ours) == 9
        assert len(ours[0]) == 13


def test_every_level_of_the_tables_is_studied_by_default():
    assert set(TABLE_LEVELS) <= set(EPSILONS.tolist())


def test_figures_say_what_they_show(result, record):
    quality, pixels = exits_figure({"ADP-C": record}).axes[:2]
    assert quality.get_ylabel() == "mean mIoU of an image"
    np.testing.assert_allclose(quality.lines[0].get_ydata(), 1 - record.losses["miou"].mean(axis=0))
    assert pixels.get_ylabel() == "Brier score of pixels"
    np.testing.assert_allclose(
        pixels.lines[0].get_ydata(), record.losses["pixel_brier"].mean(axis=0)
    )
    # Columns of several risks share no name of one.
    assert study_figure(dict(result.studies["mean_top1"])).axes[0].get_ylabel() == "test risk"


def test_own_record_comes_with_the_library():
    record = ss.ExitRecord.load(SEGMENTATION)
    assert (record.n, record.n_exits) == (233, 4)
    assert set(record.confidences) == set(SCORES)
    assert set(record.groups) == {"0001TP", "Seq05VD"}
    assert (np.diff(record.losses["miou"].mean(axis=0)) < 0).all()
    assert record.fingerprint is not None


def test_cells_are_the_mean_gain_or_say_that_nothing_is_certified(result):
    study = result.studies["patch_entropy"]["gap, mIoU"]
    row = result.table()[-1]
    for j, level in enumerate((0.01, 0.05, 0.1)):
        cell = row[f"gap, mIoU, ε={level:g}"]
        if np.isinf(study.thresholds["UCB (WSR)"][:, j]).all():
            assert cell == "–"
        else:
            assert cell == round(float(study.gain["UCB (WSR)"][:, j].mean()), 1)
    assert row["gap, mIoU, ε=0.01"] == "–"
    assert row["gap, mIoU, ε=0.1"] > 0
    assert result.table("flops")[-1]["gap, mIoU, ε=0.1"] != row["gap, mIoU, ε=0.1"]


def test_published_figures_are_the_papers():
    city, gta = published("cityscapes"), published("gta5", "flops")
    assert city[0]["score"] == "Mean, Top-1"
    assert city[0]["gap, mIoU, ε=0.1"] == 53.5
    assert city[8]["consistency, Brier, ε=0.1"] == 57.1
    assert gta[0]["gap, mIoU, ε=0.01"] == 62.8


def test_a_threshold_from_one_video_may_fail_on_another(result, record):
    rows = {row["video"]: row for row in result.by_group(epsilon=0.1)}
    assert {name: row["frames"] for name, row in rows.items()} == {"easy": 200, "hard": 100}
    assert set(rows["easy"]) == {"video", "frames", *RISKS}
    # What was certified in easy scenes does not hold in hard ones.
    assert rows["hard"]["gap, mIoU"] > 0.1 > rows["easy"]["gap, mIoU"]


def test_a_single_video_has_no_others_to_certify_on(result, record, tmp_path):
    frames = replace(record, groups=np.asarray(["only"] * N))
    alone = replace(result, record=frames)
    assert alone.by_group() == []
    assert tmp_path / "by_video.csv" not in alone.write(tmp_path)


def test_the_table_tells_of_no_level_that_was_not_studied(record):
    few = segmentation(record, splits=2, draws=2, epsilons=[0.05, 0.2], progress=False)
    assert list(few.table()[0]) == ["score", *(f"{risk}, ε=0.05" for risk in RISKS)]


def test_images_that_stay_are_those_the_last_exit_changes_most(result):
    parts = result.brier_by_exit(epsilon=0.08)
    assert sum(map(len, parts)) == N
    assert parts[0].mean() < parts[-1].mean()


def test_files_are_written(result, tmp_path):
    scenes = {}
    for kind in ("early", "late"):
        scenes[f"{kind}_label"] = np.zeros((9, 12), np.uint8)
        scenes[f"{kind}_predictions"] = np.zeros((EXITS, 9, 12), np.uint8)
        scenes[f"{kind}_confidences"] = np.full((EXITS, 9, 12), 200, np.uint8)
    files = replace(result, scenes=scenes).write(tmp_path)
    assert all(file.stat().st_size > 100 for file in files)
    names = {file.name for file in files}
    assert {"table_exit.md", "table_flops.csv", "curves.png", "scenes.png"} <= names
    with (tmp_path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(SCORES) * len(RISKS) * 2 * 3
    assert "by_video.csv" in names


@pytest.mark.parametrize(("labelled", "panels"), [(True, 5), (False, 4)])
def test_labels_are_drawn_where_they_are_at_hand(labelled, panels):
    scenes = {}
    for kind in ("early", "late"):
        scenes[f"{kind}_predictions"] = scenes[f"{kind}_confidences"] = np.zeros((2, 9, 12), "u1")
        if labelled:
            scenes[f"{kind}_label"] = np.zeros((9, 12), np.uint8)
    figure = scenes_figure([np.ones(3), np.zeros(0)], scenes)
    assert len(figure.axes) == 1 + 2 * panels
    assert ("label" in {axis.get_title(loc="left") for axis in figure.axes}) == labelled


def test_labels_come_from_camvid_alone(monkeypatch, tmp_path):
    record = ss.ExitRecord.load(SEGMENTATION)
    monkeypatch.setattr("experiments.segmentation.scenes.DATA_FOLDER", tmp_path)
    assert camvid_labels(record) == {}


def test_the_figure_needs_no_scenes():
    assert len(scenes_figure([np.ones(3), np.zeros(0)]).axes) == 1


def test_the_figure_shows_exits_that_none_took():
    (axis,) = scenes_figure([np.zeros(0), np.zeros(0), np.ones(3)]).axes
    assert axis.get_xlim() == (0.5, 3.5)


def test_a_record_without_the_scores_is_refused(record):
    with pytest.raises(ValueError, match="lacks mean_top_diff"):
        segmentation(replace(record, confidences={"mean_top1": record.confidences["mean_top1"]}))
