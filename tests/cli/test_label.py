"""`swiftsure label`: asks for the labels that matter, in the terminal or through CSV files."""

import csv
import io
import json

import numpy as np
import pytest

import swiftsure as ss

EPSILON = ("--epsilon", "0.05")


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


@pytest.mark.parametrize("rows", ["7,1\n7,1", "7,99999999999999999999999", "999999,1", ",1"])
def test_a_wrong_file_of_labels_is_named(run, folder, rows):
    (folder / "wrong.csv").write_text(f"id,label\n{rows}\n")
    done = run("label", "pool.parquet", "--read", "wrong.csv", "-o", "labelled.parquet")
    assert done.status == 2
    assert "wrong.csv" in done.err


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
    done = run("label", "pool.parquet", *EPSILON, "-o", "asked.parquet")
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
    done = run("label", "pool.parquet", *EPSILON, "-o", "asked.parquet", "--json")
    assert done.status == 0
    assert json.loads(done.out)["asked"] == 3
    assert "must be a class number or name, but got 'what'" in done.err
    saved = ss.ExitRecord.load(folder / "asked.parquet")
    assert (~np.isnan(saved.losses["zero_one"]).any(axis=1)).sum() == 3


def test_a_second_labeller_of_the_same_record_waits(run, folder, sample, monkeypatch):
    """Both would read the record, add their labels, and the last to save would win."""
    pool = folder / "pool.parquet"
    content = pool.read_bytes()
    pool.unlink()
    pool.write_bytes(content)  # a file, not a link to that of all tests
    (folder / "same.parquet").symlink_to(pool)
    wanted = ss.ExitRecord.load(pool).needs_label("zero_one").tolist()
    (folder / "theirs.csv").write_text(f"id,label\n{wanted[5]},{sample.labels[wanted[5]]}\n")
    lines = iter([*sample.labels[wanted[:3]].tolist(), ""])
    others = []

    class First:
        """Types labels; while it does, the record is labelled from elsewhere."""

        def readline(self):
            if not others:
                others.append(run("label", "same.parquet", "--read", "theirs.csv"))
                others.append(run("label", "pool.parquet", *EPSILON))
            return f"{next(lines)}\n"

    monkeypatch.setattr("sys.stdin", First())
    assert run("label", "pool.parquet", *EPSILON).status == 0
    assert [each.status for each in others] == [2, 2]
    assert "same.parquet is being labelled by another process: wait for it to end" in others[0].err
    again = run("label", "pool.parquet", "--read", "theirs.csv")
    assert again.out.startswith("1 labels added; ")
    known = ~np.isnan(ss.ExitRecord.load(pool).losses["zero_one"]).any(axis=1)
    assert set(np.flatnonzero(known)) == {*wanted[:3], wanted[5]}
    assert not list(folder.glob(".*"))


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


def cascade_logs(folder, n=200):
    """Logs of two models that differ about every fifth question."""
    for model in ("cheap", "dear"):
        lines = [
            {
                "id": f"q{k}",
                "prompt": f"What is {k}?",
                "answer": f"number {k + (k % 5 == 0 and model == 'cheap')}",
                "confidence": 0.5 if k % 5 == 0 else 0.9,
                "cost": {"cheap": 1.0, "dear": 9.0}[model],
            }
            for k in range(n)
        ]
        (folder / f"{model}.jsonl").write_text("\n".join(map(json.dumps, lines)))


@pytest.fixture
def cascade(run, folder):
    cascade_logs(folder)
    assert run("record", "cheap.jsonl", "dear.jsonl", "-o", "cascade.parquet").status == 0
    return ("label", "cascade.parquet", "--answers", "cheap.jsonl", "--answers", "dear.jsonl")


def test_a_cascade_shows_questions_and_answers(run, folder, cascade, answers):
    answers(*[f"Number {k}" for k in range(0, 200, 5)])
    done = run(*cascade, "--epsilon", "0.1", "-o", "asked.parquet", "--json")
    assert done.status == 0
    assert json.loads(done.out)["asked"] > 5
    shown = "q0\n  question: What is 0?\n  cheap: number 1\n  dear: number 0\n  right answer: "
    assert shown in done.err
    saved = ss.ExitRecord.load(folder / "asked.parquet")
    known = saved.losses["exact_match"][~np.isnan(saved.losses["exact_match"]).any(axis=1)]
    assert known.tolist() == [[1.0, 0.0]] * len(known)
    assert "exact_match" in json.loads(done.out)["sentence"]


def test_a_cascades_labels_there_and_back(run, folder, cascade):
    assert run(*cascade, "--write", "todo.csv").status == 0
    rows = listed(folder / "todo.csv")
    assert {row["id"] for row in rows} == {f"q{k}" for k in range(0, 200, 5)}
    assert rows[0]["question"] == f"What is {rows[0]['id'][1:]}?"
    assert rows[0]["cheap"] != rows[0]["dear"] == f"number {rows[0]['id'][1:]}"
    lines = [f"{row['id']},{row['dear']}" for row in rows[:8]]
    (folder / "mine.csv").write_text("\n".join(["id,label", *lines]) + "\n")
    for added in (8, 0):
        done = run(*cascade, "--read", "mine.csv", "--json")
        assert (done.status, json.loads(done.out)["added"]) == (0, added)
    (folder / "mine.csv").write_text(f"id,label\n{rows[0]['id']},another\n")
    assert "other labels than the record" in run(*cascade, "--read", "mine.csv").err


def test_a_cascade_from_a_folder_of_answers(run, folder, answers):
    def model(shift):
        def answer(question):
            number = int(question.split()[-1][:-1])
            wrong = shift * (number % 5 == 0)
            sure = 0.99 if not shift else 0.5 if number % 5 == 0 else 0.9
            return ss.cascade.Answer(f"number {number + wrong}", confidence=sure, cost=1.0)

        return answer

    questions = [f"What is {k}?" for k in range(200)]
    pair = ss.Cascade({"cheap": model(1), "dear": model(0)})
    record = pair.collect(questions, folder=folder / "kept", progress=False)
    record.save(folder / "own.parquet")
    (folder / "questions.txt").write_text("\n".join(questions))
    answers("number 0", "")
    start = ("label", "own.parquet", "--answers", "kept", "--questions", "questions.txt")
    done = run(*start, *EPSILON, "--models", "cheap,dear", "-o", "asked.parquet", "--json")
    assert (done.status, json.loads(done.out)["asked"]) == (0, 1)
    assert "  cheap: number 1\n  dear: number 0\n" in done.err
    start = (*start, *EPSILON)
    done = run(*start, "--models", "dear,cheap")
    assert done.status == 2
    assert "must be those that the record was made from" in done.err
    assert "must be one of the models" in run(*start, "--models", "cheap,huge").err
    assert "needs --questions" in run(*start[:4], *EPSILON, "--models", "cheap,dear").err


def test_a_cascade_without_answers_is_refused(run, folder, cascade):
    done = run("label", "cascade.parquet", *EPSILON)
    assert done.status == 2
    assert "`--answers` must be given" in done.err
    assert run("label", "cascade.parquet", "--write", "ids.csv").status == 0
    done = run(*cascade, "--loss", "zero_one")
    assert done.status == 2
    assert "exact_match" in done.err
    lines = (folder / "cheap.jsonl").read_text().replace("number 1", "number 7")
    (folder / "cheap.jsonl").write_text(lines)
    assert "must be those that the record was made from" in run(*cascade, *EPSILON).err


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
