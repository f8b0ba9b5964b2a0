"""`swiftsure simulate`."""

import json

import pytest

from swiftsure.certify.policy import Policy

QUICK = ("--n", "300", "--draws", "12")


def test_it_runs_and_leaves_policy_and_figure(run, folder, made):
    done = run("simulate", *QUICK)
    assert (done.status, done.err) == (0, "")
    assert made() == {"results"}
    output = folder / "results" / "simulation"
    assert {path.name for path in output.iterdir()} == {"policy.json", "policy.png"}
    assert (output / "policy.png").read_bytes().startswith(b"\x89PNG")
    policy = Policy.load(output / "policy.json")
    assert policy.threshold is not None
    assert str(policy) in done.out
    assert done.out.rstrip().endswith(
        "Wrote results/simulation/policy.json and results/simulation/policy.png"
    )


def test_a_pipe_gets_lines_with_tabs(run):
    lines = run("simulate", *QUICK, "-o", "here").out.splitlines()
    assert "ε\tthreshold\tsaved %\ttrue risk\t≤ ε" in lines
    assert "rule\ttrue risk > ε\tmean true risk" in lines
    rows = [line.split("\t") for line in lines if "\t" in line]
    assert [cells[0] for cells in rows[1:5]] == ["0.01", "0.02", "0.05", "0.1"]
    assert len(rows) == 1 + 4 + 1 + 4


def test_json_and_nothing_else(run, folder):
    done = run("simulate", *QUICK, "--epsilon", "0.03", "-o", "here", "--json")
    assert (done.status, done.err) == (0, "")
    shown = json.loads(done.out)
    policy = Policy.load(folder / "here" / "policy.json")
    assert shown["sentence"] == str(policy)
    assert shown["threshold"] == policy.threshold
    assert policy.certificate.promises[0].epsilon == 0.03
    assert policy.certificate.samples.n == 300
    levels = [row["epsilon"] for row in shown["tradeoff"]]
    assert levels == [0.01, 0.02, 0.03, 0.05, 0.1]
    saved = [row["saved"] for row in shown["tradeoff"]]
    assert saved == sorted(saved)  # a higher level never certifies less
    assert len(shown["violations"]) == len(shown["mean_risk"]) == 4
    assert all(0 <= share <= 1 for share in shown["violations"].values())


def test_it_shows_what_it_is_meant_to_show(run):
    """Trust and the naive rule break the promise; crc and ucb keep theirs."""
    shown = json.loads(run("simulate", "--n", "400", "--draws", "60", "--json").out)
    trust, naive, _, certified = shown["violations"].values()
    assert trust == 1.0
    assert naive > 0.25
    assert certified <= 0.2
    *_, on_average, _ = shown["mean_risk"].values()
    assert on_average <= 0.05


def test_a_risk_above_its_level_is_marked_and_explained(run):
    above = ("simulate", "--n", "1000", "--draws", "2", "--seed", "0")
    row = json.loads(run(*above, "--json").out)["tradeoff"][1]
    assert row["true_risk"] > row["epsilon"]  # else another seed must be found for this test
    assert not row["within_epsilon"]
    lines = run(*above).out.splitlines()
    assert [line[-3:] for line in lines if line.startswith("0.02\t")] == ["\tno"]
    (note,) = (line for line in lines if line.startswith('"no": '))
    assert "at most 10 % of calibration sets (δ = 0.1)" in note
    kept = run("simulate", "--n", "30", "--draws", "2").out
    assert "\tno" not in kept
    assert '"no"' not in kept


def test_too_few_samples_certify_nothing_and_break_nothing(run, folder):
    done = run("simulate", "--n", "8", "--draws", "12", "--json")
    shown = json.loads(done.out)
    assert done.status == 0
    assert shown["threshold"] is None
    assert Policy.load(folder / "results" / "simulation" / "policy.json").runs_full_model
    assert all(row["true_risk"] == row["saved"] == 0 for row in shown["tradeoff"][:-1])
    *_, certified = shown["violations"].values()
    assert certified == 0


def test_a_seed_fixes_it(run):
    first, again, other = (
        json.loads(run("simulate", *QUICK, "--seed", seed, "--json").out) for seed in (1, 1, 2)
    )
    assert first == again
    assert first["tradeoff"] != other["tradeoff"]
    trust, *drawn = first["mean_risk"]
    assert first["mean_risk"][trust] == other["mean_risk"][trust]  # it draws nothing
    assert all(first["mean_risk"][rule] != other["mean_risk"][rule] for rule in drawn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epsilon", "2"], "`epsilon` must be in (0, 1), but got 2"),
        (["--delta", "0"], "`delta` must be in (0, 1)"),
        (["--n", "0"], "`n` must be at least 1"),
    ],
)
def test_errors_leave_nothing(run, made, options, message):
    done = run("simulate", *options)
    assert done.status == 2
    assert message in done.err
    assert not made()


def test_draws_are_checked(run, made):
    done = run("simulate", "--n", "100", "--draws", "0")
    assert done.status == 2
    assert "draws" in done.err
    assert not made()
