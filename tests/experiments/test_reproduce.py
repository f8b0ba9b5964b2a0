"""`python -m experiments.reproduce`: every experiment of the paper, with one command."""

import csv
import json

import numpy as np
import pytest

import swiftsure as ss
from experiments import reproduce
from experiments.bild.reproduce import bild
from experiments.calm.reproduce import calm
from experiments.calm_cnndm.reproduce import calm_cnndm
from experiments.diffusion.reproduce import diffusion
from experiments.segmentation.reproduce import SCORES
from swiftsure.study.simulate import Population
from swiftsure_zoo.records import BILD

CNNDM_FILES = {"calm_cnndm.png", "calm_cnndm_layers.csv", "calm_cnndm_summary.csv"}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Small records of every experiment."""
    folder = tmp_path_factory.mktemp("records")
    sample = Population(n_exits=4, overconfidence=1.5).sample(800, 0)
    record = ss.ExitRecord.from_logits(
        sample.logits, sample.labels, costs={"flops": [1e9, 2e9, 3e9, 5e9]}
    )
    record.save(folder / "record.parquet")
    ss.ExitRecord(
        dict.fromkeys(SCORES, record.confidences["top1"]),
        losses=dict.fromkeys(("miou", "pixel_brier"), record.losses["zero_one"]),
        inconsistencies=dict.fromkeys(
            ("miscoverage", "pixel_brier"), record.inconsistencies["zero_one"]
        ),
        costs={"flops": record.costs["flops"]},
        groups=np.arange(record.n) % 3,
    ).save(folder / "scenes.parquet")
    rng = np.random.default_rng(1)
    quality = 0.4 - 0.1 * np.linspace(0, 1, 6) + 0.05 * rng.normal(size=(1100, 6))
    np.savez(
        folder / "calm_cnndm.npz",
        thresholds=np.linspace(1, 0.5, 6),
        mean_layers=np.linspace(15, 5, 6),
        rouge_l=np.clip(quality, 0, 1),
    )
    distances = np.abs(0.2 * rng.normal(size=(520, 5))) * np.linspace(0, 1, 5)
    ss.ThresholdRecord(
        [None, 0.9, 0.8, 0.7, 0.6],
        inconsistencies={name: np.clip(distances, 0, 1) for name in ("lpips", "mse")},
        costs={"layers": np.linspace(9, 1, 5), "flops": np.linspace(9, 2, 5)},
    ).save(folder / "pairs.parquet")
    ss.ThresholdRecord(
        [0.0, 0.6, 2.0, 5.0],
        dial="rollback",
        losses={"bleu": np.clip(0.6 + 0.1 * rng.normal(size=(600, 4)), 0, 1)},
        costs={"large_passes": [1.0, 0.6, 0.4, 0.3], "flops": [9.0, 6.0, 4.0, 3.0]},
    ).save(folder / "drafts.parquet")
    (folder / "sweeps").mkdir()
    for score in ("softmax", "saturation"):
        ss.ThresholdRecord(
            [None, 0.9, 0.6, 0.3],
            losses={"rouge_l": np.clip(0.5 + 0.1 * rng.normal(size=(1200, 4)), 0, 1)},
            costs={"layers": np.linspace(8, 2, 4)},
        ).save(folder / "sweeps" / f"t5_{score}.parquet")
    return folder


@pytest.fixture
def run(files, tmp_path, monkeypatch, capsys):
    """Run the command where the records are; return its exit status, output and errors."""
    monkeypatch.chdir(files)

    def command(*arguments):
        capsys.readouterr()
        try:
            status = reproduce.main([*map(str, arguments), "--output", str(tmp_path)])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return command


def rows(file):
    with file.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_one_task_prints_its_tables_and_writes_its_files(run, tmp_path):
    status, out, err = run("calm_cnndm", "--data", "calm_cnndm.npz", "--splits", 3)
    assert (status, err) == (0, "")
    assert {path.name for path in (tmp_path / "calm_cnndm").iterdir()} == CNNDM_FILES
    header, *cells = [line.split("\t") for line in out.splitlines() if "\t" in line]
    table = calm_cnndm("calm_cnndm.npz", splits=3).table()
    assert header == list(table[0])
    assert len(cells) == len(table) == 12
    assert cells[0][2:] == [f"{table[0][name]:.4g}" for name in header[2:]]
    assert out.count("Wrote ") == 3


def test_options_reach_the_experiment(run, tmp_path):
    given = ("--data", "calm_cnndm.npz", "--splits", 3, "--seed", 2, "--delta", 0.2)
    assert run("calm_cnndm", *given)[0] == 0
    expected = calm_cnndm("calm_cnndm.npz", splits=3, seed=2, delta=0.2).table([0.05])
    found = rows(tmp_path / "calm_cnndm" / "calm_cnndm_layers.csv")
    assert [float(row["ε=0.05"]) for row in found] == [row["ε=0.05"] for row in expected]


def test_all_tasks_run_without_a_name(run, monkeypatch, tmp_path):
    seen = []

    class Result:
        def tables(self):
            return {}

        def write(self, folder):
            return [folder / "file"]

    def record_call(task):
        def experiment(loss=None, splits=100):
            seen.append((task, loss, splits))
            return Result()

        return experiment

    monkeypatch.setattr(reproduce, "TASKS", {task: record_call(task) for task in reproduce.TASKS})
    status, out, _ = run("--splits", 7)
    assert status == 0
    # CALM has the paper's two losses.
    assert [task for task, *_ in seen] == [
        "image_classification", "segmentation", "calm", "calm", "calm_cnndm", "diffusion", "bild",
        "llm_pairs", "reasoning", "learned_score", "crc",
    ]  # fmt: skip
    assert [loss for task, loss, _ in seen if task == "calm"] == ["bleu", "rouge_l"]
    assert {splits for *_, splits in seen} == {7}
    assert f"Wrote {tmp_path / 'calm' / 'file'}" in out


def test_results_go_beside_the_experiment_by_default(monkeypatch, capsys):
    folders = []
    monkeypatch.setattr(reproduce, "_reproduce", lambda task, given, folder: folders.append(folder))
    assert reproduce.main(["calm"]) == 0
    assert [folder.parts[-3:] for folder in folders] == [("experiments", "calm", "results")]


def test_a_task_without_its_data_is_skipped_by_name(run, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.calm_cnndm.reproduce.DATA_FOLDER", tmp_path / "absent")
    status, out, err = run("calm_cnndm", "diffusion", "--splits", 2)
    assert (status, err) == (0, "")
    assert out.startswith("Skipped calm_cnndm: ")
    assert "SWIFTSURE_DATA" in out.splitlines()[0]
    assert (tmp_path / "diffusion" / "diffusion.png").is_file()
    # Asked for by itself, it must not pass for done.
    assert run("calm_cnndm")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calm_cnndm", "--data", "absent.npz"], "absent.npz"),
        (["calm_cnndm", "--data", "record.parquet"], "record.parquet"),
        (["segmentation", "--data", "record.parquet"], "lacks"),
        (["bild", "--data", "pairs.parquet", "--n", "300", "--splits", "2"], "large_passes"),
        (["diffusion", "--data", "absent.parquet"], "absent.parquet"),
        (["calm", "--data", "."], "NAME_SCORE.parquet"),
        (["clam"], "there is no task 'clam'"),
        (["calm", "--n", "3"], "calm does not take n_calibration"),
        (["--data", "record.parquet", "calm", "bild"], "exactly one TASK"),
    ],
)
def test_bad_usage_is_named(run, arguments, words):
    status, _, err = run(*arguments)
    assert status == 2
    assert words in err
    assert "Traceback" not in err


def test_segmentation_writes_the_papers_tables(run, tmp_path):
    status, out, err = run("segmentation", "--data", "scenes.parquet", "--splits", 2, "--draws", 2)
    assert status == 0, err
    for gain in ("exit", "flops"):
        assert len(rows(tmp_path / "segmentation" / f"table_{gain}.csv")) == 9
    assert "Mean, Top-1" in out
    assert (tmp_path / "segmentation" / "by_video.csv").is_file()


def test_segmentation_has_a_record_of_its_own(run):
    status, out, err = run("segmentation", "--splits", 2, "--draws", 2)
    assert status == 0, err
    # Every cell has the table's three levels, of which 186 images cannot certify the first.
    row = next(line for line in out.splitlines() if line.startswith("Mean, Top-1"))
    assert all(cell.startswith("– / ") and cell.count("/") == 2 for cell in row.split("\t")[1:])


def test_calm_has_records_of_its_own(tmp_path):
    result = calm(splits=2)
    layers = {
        row["score"]: row["ε=0.05"]
        for row in result.table()
        if (row["control"], row["n"]) == ("UCB (STaR)", 1000)
    }
    assert list(layers) == ["softmax", "shortlist", "saturation", "meta"]
    assert all(1 <= found < 4 for found in layers.values())
    assert "saved, ε=0.05" in result.table()[0]


def test_calm_compares_confidence_measures(run, files, tmp_path):
    assert run("calm", "--data", "sweeps", "--loss", "rouge_l", "--splits", 3)[0] == 0
    assert {path.name for path in (tmp_path / "calm").iterdir()} == {
        "calm_rouge_l.png",
        "calm_scores_rouge_l.png",
        "calm_layers_rouge_l.csv",
        "calm_summary_rouge_l.csv",
    }
    table = calm(files / "sweeps", loss="rouge_l", splits=3).table()
    assert {row["score"] for row in table} == {"softmax", "saturation"}
    assert {row["n"] for row in table} == {100, 1000}
    assert all(2 <= row["ε=0.1"] <= 8 for row in table)


def test_bild_counts_passes_of_the_large_model(run, tmp_path):
    given = ("--data", "drafts.parquet", "--n", 300, "--splits", 3)
    status, out, err = run("bild", *given)
    assert status == 0, err
    found = rows(tmp_path / "bild" / "bild_costs.csv")
    assert "LTT (HB, zero-bounded)" in {row["control"] for row in found}
    assert all(0.3 <= float(row["passes of the large model"]) <= 1.0 for row in found)
    assert "UCB (STaR)" in out


def test_bild_tells_sentences_a_second_where_they_were_timed(files, tmp_path):
    rates = [row["sentences a second"] for row in bild(splits=4).table()]
    beside = json.loads(BILD.with_suffix(".seconds.json").read_text())
    assert all(1 / beside["seconds"][0] < rate <= 1 / min(beside["seconds"]) for rate in rates)
    own = ss.ThresholdRecord.load(BILD)
    assert "seconds" not in own.costs  # no policy made from it mentions a machine's time
    drafts = tmp_path / "drafts.parquet"
    drafts.symlink_to(files / "drafts.parquet")
    given = {"n_calibration": 300, "splits": 4}
    assert "sentences a second" not in bild(drafts, **given).table()[0]
    wrong = {"thresholds": [0.0, 1.0], "seconds": [2.0, 1.0]}
    (tmp_path / "drafts.seconds.json").write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match="time the pair again"):
        bild(drafts, **given)


def test_the_loss_of_diffusion_can_be_chosen(run, tmp_path):
    given = ("--data", "pairs.parquet", "--n", 300, "--splits", 2, "--loss", "mse")
    assert run("diffusion", *given)[0] == 0
    expected = diffusion("pairs.parquet", loss="mse", n_calibration=300, splits=2).table([0.05])
    found = rows(tmp_path / "diffusion" / "diffusion_costs.csv")
    risks = [float(row["test risk"]) for row in found if row["ε"] == "0.05"]
    assert risks == [row["test risk"] for row in expected]
