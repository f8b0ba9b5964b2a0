"""`swiftsure report`."""

import json
import re

import pytest

import swiftsure as ss

OWN = "0.99,0.98"
REPORT = ("report", "record.parquet", "deployed.json", "-o", "page.html")


def refused(done, *words):
    assert done.status == 2
    assert done.out == ""
    assert re.fullmatch(r"swiftsure: [^\n]+\n", done.err), done.err
    for word in words:
        assert word in done.err


def test_a_page_is_written_and_the_promise_said(run, record, folder, made):
    done = run(*REPORT)
    policy = ss.Policy.load("deployed.json")
    assert (done.status, done.err) == (0, "")
    assert done.out == f"{policy}\nWrote page.html\n"
    assert made() == {"page.html"}
    assert (folder / "page.html").read_text(encoding="utf-8") == ss.report.policy_page(
        record, policy
    )


def test_json_is_the_pages_numbers_and_nothing_else(run, made):
    done = run(*REPORT, "--json")
    shown = json.loads(done.out)
    policy = ss.Policy.load("deployed.json")
    assert (done.status, done.err) == (0, "")
    assert shown["sentence"] == str(policy)
    assert shown["policy"]["threshold"] == policy.threshold
    assert shown["cost"] == "flops"
    assert len(shown["by_epsilon"][0]["epsilons"]) == len(shown["by_epsilon"][0]["settings"])
    own = shown["settings"][str(shown["chosen"])]
    assert own["threshold"] == policy.threshold
    assert made() == {"page.html"}


def test_the_cost_can_be_chosen(run):
    assert json.loads(run(*REPORT, "--cost", "exit", "--json").out)["cost"] == "exit"
    refused(run(*REPORT, "--cost", "flop"), "Did you mean 'flops'?")


def test_a_policy_that_certifies_nothing_is_shown_with_status_1(run, made):
    run("calibrate", "tiny.parquet", "--loss", "zero_one", "--epsilon", "0.01", "-o", "none.json")
    done = run("report", "tiny.parquet", "none.json")
    assert (done.status, done.err) == (1, "")
    assert done.out.startswith("Always runs the full model")
    assert made() == {"none.json", "report.html"}


def test_records_of_thresholds(run):
    run("calibrate", "thresholds.parquet", "--epsilon", "0.05", "-o", "t.json")
    assert run("report", "thresholds.parquet", "t.json").status == 0


def test_thresholds_of_ones_own(run):
    run(
        "calibrate",
        "record.parquet",
        "--loss",
        "zero_one",
        "--epsilon",
        "0.05",
        "--path",
        OWN,
        "-o",
        "own.json",
    )
    assert run("report", "record.parquet", "own.json").status == 0


def test_the_policy_of_a_budget(run):
    budget = ("--saving", "0.3", "--loss", "zero_one", "--cost", "flops")
    assert run("plan", "record.parquet", *budget, "-o", "budget.json").status == 0
    done = run("report", "record.parquet", "budget.json", "--json")
    assert json.loads(done.out)["by_epsilon"] is None
    assert json.loads(done.out)["policy"]["certificate"]["control"] == "budget"


def test_an_edited_level_is_one_line_and_no_page(run, folder, made):
    content = json.loads((folder / "deployed.json").read_text(encoding="utf-8"))
    content["certificate"]["promises"][0]["epsilon"] /= 50
    (folder / "edited.json").write_text(json.dumps(content), encoding="utf-8")
    done = run("report", "record.parquet", "edited.json")
    refused(done, "edited.json was changed after it was written", "--accept-edited")
    done = run("report", "record.parquet", "edited.json", "--accept-edited")
    refused(done, "not what this record gives", "epsilon`", "Calibrate again")
    assert made() == {"edited.json"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tiny.parquet", "deployed.json"), ["n_samples` is 800", "but 20", "Give the"]),
        (("thresholds.parquet", "deployed.json"), ["a network with exits", "a whole run"]),
        (("record.parquet", "record.parquet"), ["not a JSON file"]),
        (("record.parquet", "missing.json"), ["missing.json is not one"]),
        (("missing.parquet", "deployed.json"), ["missing.parquet"]),
        (("record.parquet", "deployed.json", "-o", "no/page.html"), ["existing folder"]),
        (("record.parquet", "deployed.json", "-o", "."), ["is a folder"]),
    ],
)
def test_bad_input_is_one_line_and_no_file(run, made, arguments, words):
    refused(run("report", *arguments), *words)
    assert made() == set()


def test_a_policy_of_several_dials_is_shown(run, made):
    run(
        "calibrate",
        "dials.parquet",
        "--risk",
        "consistency",
        "--epsilon",
        "0.05",
        "-o",
        "policy.json",
    )
    done = run("report", "dials.parquet", "policy.json")
    assert (done.status, done.err) == (0, "")
    assert made() == {"policy.json", "report.html"}
