"""`swiftsure reproduce`."""

import json

import pytest

import swiftsure as ss
from swiftsure import assets
from swiftsure.reproduce import calm_cnndm

FILES = {"calm_cnndm.png", "calm_cnndm_layers.csv", "calm_cnndm_summary.csv"}
CALM = ("reproduce", "calm-cnndm", "--data", "calm_cnndm.npz", "--splits", "3")


def test_table_and_files(run, folder, made):
    done = run(*CALM)
    assert (done.status, done.err) == (0, "")
    output = folder / "results" / "calm_cnndm"
    assert {path.name for path in output.iterdir()} == FILES
    lines = done.out.splitlines()
    header, *rows = [line.split("\t") for line in lines if "\t" in line]
    assert header == ["control", "n", "ε=0.03", "ε=0.05", "ε=0.1"]
    table = calm_cnndm("calm_cnndm.npz", splits=3).table()
    assert len(rows) == len(table) == 12
    for cells, row in zip(rows, table, strict=True):
        assert cells[:2] == [row["control"], f"{row['n']:,}"]
        assert cells[2:] == [f"{row[level]:.2f}" for level in header[2:]]
    assert lines[-3:] == [f"Wrote results/calm_cnndm/{name}" for name in sorted(FILES)]
    assert made() == {"results"}


def test_json_and_nothing_else(run, folder):
    done = run(*CALM, "-o", "here", "--seed", "2", "--delta", "0.2", "--json")
    shown = json.loads(done.out)
    assert (done.status, done.err) == (0, "")
    expected = calm_cnndm("calm_cnndm.npz", splits=3, seed=2, delta=0.2).table()
    assert shown["table"] == expected
    assert {path.name for path in (folder / "here").iterdir()} == FILES
    assert [path.rpartition("/")[2] for path in shown["files"]] == sorted(FILES)


@pytest.mark.parametrize("data", ["absent.npz", "logits.npz", "record.parquet"])
def test_other_files_are_refused(run, made, data):
    done = run("reproduce", "calm-cnndm", "--data", data)
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("swiftsure: ")
    assert done.err.count("\n") == 1
    assert not made()


def test_data_must_be_given(run):
    done = run("reproduce", "calm-cnndm")
    assert done.status == 2
    assert "--data" in done.err


def test_segmentation_writes_the_papers_tables(run, tmp_path):
    done = run("reproduce", "segmentation", "--record", "scenes.parquet", "--splits", "4",
               "--draws", "5", "-o", str(tmp_path), "--json")  # fmt: skip
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert [len(found["tables"][gain]) for gain in ("exit", "flops")] == [9, 9]
    assert (tmp_path / "table_exit.md").is_file()
    shown = run("reproduce", "segmentation", "--record", "scenes.parquet", "--splits", "2",
                "--draws", "2", "-o", str(tmp_path))  # fmt: skip
    assert "Mean, Top-1" in shown.out
    assert "independent" in shown.out
    assert run("reproduce", "segmentation", "--record", "record.parquet").status == 2


def test_segmentation_and_calm_have_records_of_their_own(run, tmp_path):
    done = run("reproduce", "segmentation", "--splits", "2", "--draws", "2", "-o", str(tmp_path))
    assert done.status == 0, done.err
    # Every cell has the table's three levels, of which 186 images cannot certify the first.
    row = next(line for line in done.out.splitlines() if line.startswith("Mean, Top-1"))
    assert all(cell.startswith("– / ") and cell.count("/") == 2 for cell in row.split("\t")[2:])
    assert (tmp_path / "by_video.csv").is_file()
    done = run("reproduce", "calm", "--splits", "2", "-o", str(tmp_path), "--json")
    assert done.status == 0, done.err
    layers = {
        row["score"]: row["ε=0.05"]
        for row in json.loads(done.out)["table"]
        if (row["control"], row["n"]) == ("UCB (STaR)", 1000)
    }
    assert list(layers) == ["softmax", "shortlist", "saturation", "meta"]
    assert all(1 <= found < 4 for found in layers.values())
    row = json.loads(done.out)["table"][0]
    shown = run("reproduce", "calm", "--splits", "2", "-o", str(tmp_path)).out.splitlines()[1]
    cells = [f"{row[e]:.2f}, {row[f'saved, {e}']:.0f} %" for e in ("ε=0.02", "ε=0.05", "ε=0.1")]
    assert shown.split("\t") == [row["score"], row["control"], "100", *cells]


def test_calm_compares_confidence_measures(run, folder, made):
    done = run("reproduce", "calm", "--records", "sweeps", "--loss", "rouge_l", "--splits", "3",
               "-o", "out", "--json")  # fmt: skip
    assert done.status == 0, done.err
    table = json.loads(done.out)["table"]
    assert {row["score"] for row in table} == {"softmax", "saturation"}
    assert {row["n"] for row in table} == {100, 1000}
    assert all(2 <= row["ε=0.1"] <= 8 for row in table)
    assert {path.name for path in (folder / "out").iterdir()} == {
        "calm.png", "calm_scores.png", "calm_layers.csv", "calm_summary.csv"
    }  # fmt: skip
    none = run("reproduce", "calm", "--records", "out")
    assert none.status == 2
    assert "NAME_SCORE.parquet" in none.err


def test_bild_counts_passes_of_the_large_model(run, folder, made):
    given = ("--n", "300", "--splits", "3", "-o", "out")
    done = run("reproduce", "bild", "--record", "drafts.parquet", *given, "--json")
    assert done.status == 0, done.err
    table = json.loads(done.out)["table"]
    assert "LTT (HB, zero-bounded)" in {row["control"] for row in table}
    assert all(0.3 <= row["passes of the large model"] <= 1.0 for row in table)
    assert {path.name for path in (folder / "out").iterdir()} == {
        "bild.png", "bild_costs.csv", "bild_summary.csv"
    }  # fmt: skip
    assert "UCB (STaR)" in run("reproduce", "bild", "--record", "drafts.parquet", *given).out
    other = run("reproduce", "bild", "--record", "pairs.parquet", *given)
    assert (other.status, "large_passes" in other.err) == (2, True)


def test_bild_tells_sentences_a_second_where_they_were_timed(run, folder, made):
    given = ("--splits", "4", "-o", "out", "--json")
    timed = json.loads(run("reproduce", "bild", *given).out)["table"]
    rates = [row["sentences a second"] for row in timed]
    beside = json.loads(assets.BILD.with_suffix(".seconds.json").read_text())
    assert all(1 / beside["seconds"][0] < rate <= 1 / min(beside["seconds"]) for rate in rates)
    own = ss.ThresholdRecord.load(assets.BILD)
    assert "seconds" not in own.costs  # no policy of it speaks of a machine's time
    options = ("--record", "drafts.parquet", "--n", "300")
    untimed = json.loads(run("reproduce", "bild", *options, *given).out)["table"]
    assert "sentences a second" not in untimed[0]
    wrong = {"thresholds": [0.0, 1.0], "seconds": [2.0, 1.0]}
    (folder / "drafts.seconds.json").write_text(json.dumps(wrong))
    refused = run("reproduce", "bild", *options, *given)
    assert (refused.status, "time the pair anew" in refused.err) == (2, True)


@pytest.mark.parametrize("what", ["bild", "diffusion"])
def test_what_is_named_is_studied_and_else_the_librarys_own(run, made, what):
    shown = " ".join(run("reproduce", what, "--help").out.replace("│", " ").split())
    assert "the library's own by default" in shown
    given = ("--splits", "2", "-o", "out", "--json")
    own = run("reproduce", what, *given)
    assert own.status == 0, own.err
    record = {"bild": "drafts.parquet", "diffusion": "pairs.parquet"}[what]
    other = run("reproduce", what, "--record", record, "--n", "300", *given)
    assert json.loads(own.out)["table"] != json.loads(other.out)["table"]
    absent = run("reproduce", what, "--record", "absent.parquet")
    assert (absent.status, "absent.parquet" in absent.err) == (2, True)
