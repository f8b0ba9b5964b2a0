"""`swiftsure label`: asks for the labels that matter, in the terminal or through CSV files."""

import csv
import io
import json

import numpy as np
import pytest

import swiftsure as ss


def listed(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_there_and_back(run, folder, sample):
    done = run("label", "pool.parquet", "--budget", "50", "--write", "todo.csv")
    assert (done.status, done.out) == (0, "50 to label.\n")
    wanted = [int(row["id"]) for row in listed(folder / "todo.csv")]
    record = ss.ExitRecord.load(folder / "pool.parquet")
    assert wanted == record.needs_label("zero_one", budget=50).tolist()
    lines = [f"{row},{sample.labels[row]}" for row in wanted]
    (folder / "mine.csv").write_text("\n".join(["id,label", *lines]) + "\n")
    done = run("label", "pool.parquet", "--read", "mine.csv", "-o", "labelled.parquet")
    assert done.status == 0
    assert done.out.startswith("50 labels added; ")
    again = run("label", "labelled.parquet", "--read", "mine.csv")  # the same labels again
    assert again.out.startswith("0 labels added; ")
    labelled = ss.ExitRecord.load(folder / "labelled.parquet")
    expected = record.with_labels(wanted, sample.labels[wanted])
    assert np.array_equal(labelled.losses["zero_one"], expected.losses["zero_one"], equal_nan=True)
    done = run("calibrate", "labelled.parquet", "--missing", "stop", "--epsilon", "0.1", "--json")
    assert done.status == 0
    assert json.loads(done.out)["certificate"]["labels"] == 50


def test_other_labels_for_the_same_samples_are_refused(run, folder, sample):
    run("label", "pool.parquet", "--read", "done.csv", "-o", "one.parquet")
    (folder / "other.csv").write_text(f"id,label\n7,{(sample.labels[7] + 1) % 10}\n")
    done = run("label", "one.parquet", "--read", "other.csv")
    assert done.status == 2
    assert "other labels than the record" in done.err


@pytest.fixture
def answers(monkeypatch):
    """Say what is typed."""

    def typed(*lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return typed


def test_questions_in_the_terminal(run, folder, sample, answers):
    record = ss.ExitRecord.load(folder / "pool.parquet")
    wanted = record.needs_label("zero_one").tolist()
    answers(*sample.labels[wanted].tolist())
    done = run("label", "pool.parquet", "--epsilon", "0.05", "-o", "asked.parquet")
    assert done.status == 0
    asked = int(done.out.splitlines()[-1].split()[0])
    assert 0 < asked < len(wanted)
    assert f"({asked} labels" not in done.out
    assert f"of which {asked} are labelled" in done.out
    saved = ss.ExitRecord.load(folder / "asked.parquet")
    known = np.flatnonzero(~np.isnan(saved.losses["zero_one"]).any(axis=1))
    assert set(known) == set(wanted[:asked])
    assert f"{wanted[0]} (exits say" in done.err


def test_every_answer_is_saved_and_an_empty_one_ends(run, folder, sample, answers):
    record = ss.ExitRecord.load(folder / "pool.parquet")
    wanted = record.needs_label("zero_one").tolist()
    answers("what", *sample.labels[wanted[:3]].tolist(), "")
    done = run("label", "pool.parquet", "--epsilon", "0.05", "-o", "asked.parquet", "--json")
    assert done.status == 0
    assert json.loads(done.out)["asked"] == 3
    assert "must be a class number or name, but got 'what'" in done.err
    saved = ss.ExitRecord.load(folder / "asked.parquet")
    assert (~np.isnan(saved.losses["zero_one"]).any(axis=1)).sum() == 3


def test_names_of_classes(run, folder, sample, answers):
    names = [f"class-{k}" for k in range(10)]
    (folder / "names.txt").write_text("\n".join(names) + "\n")
    record = ss.ExitRecord.load(folder / "pool.parquet")
    first = record.needs_label("zero_one").tolist()[0]
    answers(names[sample.labels[first]], "")
    done = run(
        *("label", "pool.parquet", "--promise", "gap zero_one <= 0.05"),
        *("--classes", "names.txt", "-o", "asked.parquet"),
    )
    assert done.status == 0
    assert f"{first} (exits say class-" in done.err
    saved = ss.ExitRecord.load(folder / "asked.parquet")
    expected = record.with_labels([first], [sample.labels[first]])
    assert np.array_equal(saved.losses["zero_one"], expected.losses["zero_one"], equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("pool.parquet",), "`--epsilon` must be given"),
        (("pool.parquet", "--write", "a.csv", "--read", "done.csv"), "one at a time"),
        (("logits.npz",), "`--output` must be given"),
        (("thresholds.parquet",), "must hold an ExitRecord"),
    ],
)
def test_refusals(run, arguments, why):
    done = run("label", *arguments)
    assert done.status == 2
    assert why in done.err


def test_a_budget_is_evaluated(run):
    done = run(
        *("evaluate", "record.parquet", "--loss", "zero_one", "--controls", "ucb", "--json"),
        *("--labels", "40", "-n", "200", "--splits", "5", "--epsilons", "0.05"),
    )
    rows = json.loads(done.out)
    assert [row["control"] for row in rows] == ["ucb", "ucb, random labels", "ucb, all labels"]


def test_a_pool_is_planned(run):
    done = run("plan", "pool.parquet", "--labels", "40", "--epsilon", "0.1", "--json")
    found = json.loads(done.out)
    assert found["n"] in found["sizes"]
    assert found["labelled_pilot"] is False
    text = run("plan", "pool.parquet", "--labels", "40", "--epsilon", "0.1").out
    assert f"Take {found['n']:,} unlabelled samples that are not in the pilot." in text
    assert run("plan", "--labels", "40").status == 2
