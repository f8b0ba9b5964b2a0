"""`swiftsure evaluate`."""

import json

import pytest

import swiftsure as ss
from swiftsure import Repeats

QUICK = ("--loss", "zero_one", "--splits", "4")


def test_a_pipe_gets_lines_with_tabs(run, record, made):
    done = run("evaluate", "record.parquet", *QUICK, "-n", "300", "--epsilons", "0.05, 0.1")
    assert (done.status, done.err) == (0, "")
    header, *rows = [line.split("\t") for line in done.out.splitlines()]
    assert header[:4] == ["control", "ε", "test risk", "± sd"]
    assert {len(cells) for cells in rows} == {len(header)}
    study = ss.evaluate(
        record,
        risk="gap",
        loss="zero_one",
        controls=["crc", "ucb"],
        epsilons=[0.05, 0.1],
        delta=0.1,
        n_calibration=300,
        splits=4,
    )
    found = study.summary()
    assert len(rows) == len(found) == 4
    for cells, row in zip(rows, found, strict=True):
        shown = dict(zip(header, cells, strict=True))
        assert (shown["control"], shown["ε"]) == (row["control"], f"{row['epsilon']:g}")
        assert shown["test risk"] == f"{row['test_risk']:.4f}"
        assert shown["± sd"] == f"{row['test_risk_sd']:.4f}"
        assert shown["test > ε"] == f"{100 * row['test_exceedance']:.0f} %"
        rate, interval = shown["violations"].split(" % ")
        assert rate == f"{100 * row['violations']:.1f}"
        low, high = interval.strip("()").split("–")
        assert float(low) == pytest.approx(100 * row["violations_low"], abs=0.051)
        assert float(high) == pytest.approx(100 * row["violations_high"], abs=0.051)
        assert shown[f"mean {study.cost}"] == f"{row['mean_cost']:.3g}"
        assert shown["saved %"] == f"{row['gain']:.1f}"
    assert not made()


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ([], {}),
        (["--controls", "ltt, empirical"], {"controls": ["ltt", "empirical"]}),
        (["--delta", "0.3"], {"delta": 0.3}),
        (["-n", "0.25"], {"n_calibration": 200}),
        (["--n-calibration", "250"], {"n_calibration": 250}),
        (["--draws", "7"], {"splits": Repeats(4, 7)}),
        (["--seed", "5"], {"seed": 5}),
        (["--epsilons", "0.1"], {"epsilons": [0.1]}),
        (["--path", "0.99,0.9,0.5"], {"path": [0.99, 0.9, 0.5]}),
        (["--path", "breakpoints"], {"path": "breakpoints"}),
        (["--risk", "consistency"], {"risk": "consistency"}),
        (
            ["--controls", "crc,crc:method=ucb, ucb:bound=wsr,ltt:zero_bounded"],
            {
                "controls": [
                    "crc",
                    ss.Control("crc", method="ucb"),
                    ss.Control("ucb", "wsr"),
                    ss.Control("ltt", zero_bounded=True),
                ]
            },
        ),
    ],
)
def test_json_is_the_summary_and_nothing_else(run, record, options, arguments):
    done = run("evaluate", "record.parquet", *QUICK, "--json", *options)
    assert (done.status, done.err) == (0, "")
    usual = {"controls": ["crc", "ucb"], "epsilons": [0.01, 0.02, 0.05, 0.1], "splits": 4}
    study = ss.evaluate(record, loss="zero_one", **{**usual, **arguments})
    assert json.loads(done.out) == study.summary()


def test_a_promise_brings_its_level(run, record):
    text = "P(gap brier > 0.1) <= 0.2"
    done = run("evaluate", "record.parquet", "--promise", text, "--splits", "4", "--json")
    promise = ss.Promise("brier", above=0.1, epsilon=0.2)
    study = ss.evaluate(record, risk=promise, controls=["crc", "ucb"], splits=4)
    assert json.loads(done.out) == study.summary()
    rule = ("--rule", "top1:strict", "--cost", "exit", "--controls", "ltt")
    done = run("evaluate", "record.parquet", "--promise", text, *rule, "--splits", "4", "--json")
    asked = ss.Calibration(promise, rule=ss.ExitRule("top1", strict=True), cost="exit")
    study = ss.evaluate(record, risk=asked, controls=["ltt"], splits=4)
    assert json.loads(done.out) == study.summary()


def test_promises_are_studied_together(run, record, folder):
    texts = ("gap zero_one <= 0.1", "cost flops <= 4.5e9")
    options = [word for text in texts for word in ("--promise", text)]
    sizes = ("-n", "300", "--splits", "3", "--draws", "2")
    done = run("evaluate", "record.parquet", *options, *sizes, "--json")
    promises = [ss.Promise("zero_one", epsilon=0.1), ss.CostPromise("flops", at_most=4.5e9)]
    request = ss.Calibration(promises)
    rows = request.evaluate(record, n_calibration=300, splits=3, draws=2, progress=False).summary()
    assert json.loads(done.out) == [{"control": "ucb", **row} for row in rows]
    header, row, *_ = [
        line.split("\t")
        for line in run("evaluate", "record.parquet", *options, *sizes).out.splitlines()
    ]
    assert (header[0], row[:2]) == ("control", ["ucb", rows[0]["promise"]])
    slices = ("--promise", "gap zero_one within slices <= 0.1")
    assert run("evaluate", "tenants.parquet", *slices, *sizes).status == 0
    done = run("evaluate", "record.parquet", *options, "--figure", "f.png")
    assert (done.status, "`--figure` is for one promise" in done.err) == (2, True)
    run("calibrate", "record.parquet", *options, "-o", "policy.json")
    again = run("evaluate", "record.parquet", "--request", "policy.json", *sizes, "--json")
    assert [{**row, "control": "ucb"} for row in rows] == json.loads(again.out)


def test_what_is_not_known_is_null(run):
    """NaN is not JSON; a record of thresholds knows no FLOPs."""
    done = run("evaluate", "thresholds.parquet", "--splits", "2", "--json")
    rows = json.loads(done.out, parse_constant=pytest.fail)
    assert all(row["flops_gain"] is None for row in rows)
    assert all(row["gain"] is not None for row in rows)


def test_a_figure_is_drawn(run, folder, made):
    done = run("evaluate", "record.parquet", *QUICK, "--figure", "study.pdf")
    assert done.out.splitlines()[-1] == "Wrote study.pdf"
    assert (folder / "study.pdf").read_bytes().startswith(b"%PDF")
    assert made() == {"study.pdf"}
    done = run("evaluate", "record.parquet", *QUICK, "--figure", "study.png", "--json")
    assert len(json.loads(done.out)) == 8
    assert made() == {"study.pdf", "study.png"}


def test_the_cost_has_its_name(run, thresholds):
    assert "\tmean layers\tsaved %\n" in run("evaluate", "thresholds.parquet", *QUICK[2:]).out
    ss.ThresholdRecord(thresholds.thresholds, losses=thresholds.losses).save("bare.parquet")
    done = run("evaluate", "bare.parquet", *QUICK[2:])
    assert {tuple(line.split("\t")[-2:]) for line in done.out.splitlines()[1:]} == {("–", "–")}


def test_samples_are_whole(run):
    assert run("evaluate", "record.parquet", *QUICK, "-n", "100.7").status == 2


def test_the_table_says_what_is_averaged_over_groups(run):
    command = ["evaluate", "users.parquet", "--loss", "zero_one", "--splits", "3"]
    assert "test risk (average of group averages)" in run(*command).out
    options = ["--groups-average", "sample", "--max-group-size", "4"]
    assert run("convert", "users.parquet", *options, "-o", "counted.parquet").status == 0
    command[1] = "counted.parquet"
    assert "test risk (average per sample of groups)" in run(*command).out
    rows = json.loads(run(*command, "--json").out)
    assert {(row["unit"], row["average"]) for row in rows} == {("groups", "sample")}
