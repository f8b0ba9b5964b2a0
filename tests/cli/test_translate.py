"""`swiftsure translate`: the translator that comes along, certified and run."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_it_translates_in_full_and_early(run):
    done = run("translate", "Ein Hund springt über einen Zaun.", "Eine Frau liest ein Buch.")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "It runs at threshold" in lines[0]
    table = lines.index("text\tin full\tearly exits\tlayers")
    german, full, early, layers = lines[table + 1].split("\t")
    assert german == "Ein Hund springt über einen Zaun."
    assert full.startswith("A dog")
    assert early.startswith("A dog")
    assert 1 <= float(layers) < 6
    assert lines[table + 2].startswith("Eine Frau liest ein Buch.\tA woman")
    assert lines[-1].endswith("times as many tokens per second.")


@pytest.mark.parametrize("score", ["softmax", "shortlist", "meta"])
def test_the_other_measures(run, score):
    text = "Ein Mann spielt Gitarre."
    done = run("translate", text, "--score", score, "--epsilon", "0.05", "--json")
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    (said,) = found["translations"]
    assert "guitar" in said["full"]
    assert said["layers"] < 4
    assert found["times_faster"] == pytest.approx(
        found["tokens_per_second"]["early"] / found["tokens_per_second"]["full"]
    )


def test_a_level_that_cannot_be_certified_runs_the_full_model(run):
    done = run("translate", "Ein Mann spielt Gitarre.", "--epsilon", "0.0001", "--json")
    assert done.status == 1
    (said,) = json.loads(done.out)["translations"]
    assert (said["layers"], said["early"]) == (8.0, said["full"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["  "], "must not be empty"),
        (["Ein Hund.", "--score", "metta"], "Did you mean 'meta'?"),
        (["Ein Hund.", "--epsilon", "2"], "`epsilon`"),
    ],
)
def test_bad_input(run, arguments, words):
    done = run("translate", *arguments)
    assert (done.status, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1


def test_without_transformers_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr("swiftsure.cli.translate.find_spec", lambda name: None)
    done = run("translate", "Ein Hund.")
    assert done.status == 2
    assert 'pip install "swiftsure[text]"' in done.err
