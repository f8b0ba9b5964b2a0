"""`swiftsure plan`."""

import json
from dataclasses import replace

import pytest

import swiftsure as ss
from swiftsure.certify.policy import Policy
from swiftsure.losses import LossRange
from swiftsure.study.budgets import Budget, lowest_epsilon
from swiftsure.study.planning import gain_by_samples, samples_needed

ZERO_ONE = ("--loss", "zero_one")


def test_samples_from_the_promise_alone(run, made):
    done = run("plan", "--epsilon", "0.01")
    assert (done.status, done.err) == (0, "")
    count, losses, floor = done.out.splitlines()
    assert count.startswith("230 calibration samples certify a risk of at most 0.01 (δ = 0.1)")
    assert "losses of 0 or 1" in losses
    assert floor.startswith("Even if every loss were 0, the tests here would need 230 samples")
    assert "--disagreement" in floor
    assert not made()


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ([], {}),
        (["--epsilon", "0.1", "--delta", "0.05"], {"epsilon": 0.1, "delta": 0.05}),
        (["--true-risk", "0.02", "--power", "0.7"], {"risk": 0.02, "power": 0.7}),
        (["--epsilon", "0.1", "--max-loss", "2"], {"epsilon": 0.1, "loss_range": (0, 2)}),
        (
            ["--disagreement", "0.04", "--true-risk", "0.01"],
            {"risk": 0.01, "loss_range": LossRange(-1, 1, whole=True), "disagreement": 0.04},
        ),
    ],
)
def test_samples_as_json(run, options, arguments):
    level = () if "--epsilon" in options else ("--epsilon", "0.05")
    done = run("plan", "--json", *level, *options)
    assert json.loads(done.out) == vars(samples_needed(**{"epsilon": 0.05, **arguments}))
    assert (done.status, done.err) == (0, "")


def test_gains_of_a_pilot(run, thresholds):
    options = ("--cost", "layers", "--epsilon", "0.08", "--target", "30", "--seed", "2")
    done = run("plan", "thresholds.parquet", *options)
    assert (done.status, done.err) == (0, "")
    header, *rows, reached, caution = [line.split("\t") for line in done.out.splitlines()]
    assert caution[0].startswith("This estimate")
    assert reached == ["200 samples reach a saving of 30 % with 90 % chance."]
    assert header == ["samples", "saved on average", "certify anything", "save 30 %"]
    wanted = ss.Calibration(ss.Promise(epsilon=0.08), cost="layers")
    plan = gain_by_samples(thresholds, wanted, target=30.0, seed=2)
    assert 0 < plan.reached[1] < plan.reached[-1]
    assert [int(cells[0].replace(",", "")) for cells in rows] == plan.sizes.tolist()
    assert [cells[1] for cells in rows] == [f"{gain:.1f} %" for gain in plan.gain]
    assert [cells[3] for cells in rows] == [f"{100 * share:.0f} %" for share in plan.reached]
    shown = json.loads(run("plan", "thresholds.parquet", *options, "--json").out)
    assert shown["gain"] == plan.gain.tolist()
    assert shown["sizes"] == plan.sizes.tolist()


def test_a_request_is_planned_as_a_whole(run, record):
    texts = ("gap zero_one <= 0.1", "consistency zero_one <= 0.2")
    promises = [word for text in texts for word in ("--promise", text)]
    done = run("plan", "record.parquet", *promises, "--json")
    request = ss.Calibration(
        [
            ss.Promise("zero_one", epsilon=0.1),
            ss.Promise("zero_one", risk="consistency", epsilon=0.2),
        ]
    )
    plan = request.plan(record, power=0.9, progress=False)
    shown = json.loads(done.out)
    assert (shown["n"], shown["certified"]) == (plan.n, plan.certified.tolist())
    header, *_, enough, _ = run("plan", "record.parquet", *promises).out.splitlines()
    assert header == "samples\tsaved on average\tcertify anything"
    assert enough == f"{plan.n:,} certify anything with 90 % chance."
    assert run("plan", "record.parquet", *promises, "--target", "30").status == 2


def test_no_target_no_column(run):
    header = run("plan", "thresholds.parquet", "--epsilon", "0.05").out.splitlines()[0]
    assert header == "samples\tsaved on average\tcertify anything"


def test_the_size_that_reaches_the_target_is_said(run):
    done = run("plan", "thresholds.parquet", "--epsilon", "0.1", "--target", "30", "--json")
    assert "n" in json.loads(done.out)


def test_the_lowest_level_of_a_budget(run, record, made):
    options = (*ZERO_ONE, "--cost", "exit", "--saving", "0.4", "--delta", "0.2")
    replace(record, order=3).save("ordered.parquet")
    done = run("plan", "ordered.parquet", *options, "-o", "policy.json")
    assert (done.status, done.err) == (0, "")
    budget = Budget(saving=0.4, cost="exit")
    plan = lowest_epsilon(replace(record, order=3), budget, loss="zero_one", delta=0.2)
    saved = 100 * (1 - plan.cost / plan.full_cost)
    first, *rest = done.out.splitlines()
    assert first.startswith(f"Saving {saved:.1f} %, the lowest certified level is")
    assert f"ε = {plan.epsilon:.4g} (threshold {plan.threshold:.4g})" in first
    assert saved >= 40
    assert rest == [*str(plan.policy).splitlines(), "Wrote policy.json"]
    assert Policy.load("policy.json") == plan.policy
    assert made() == {"ordered.parquet", "policy.json"}


def test_the_lowest_level_as_json(run, thresholds):
    done = run(
        "plan",
        "thresholds.parquet",
        "--saving",
        "0.4",
        "--control",
        "ucb:bound=hoeffding",
        "--json",
    )
    plan = lowest_epsilon(thresholds, saving=0.4, bound="hoeffding")
    shown = json.loads(done.out)
    assert shown.pop("sentence") == str(plan.policy)
    assert shown == {key: value for key, value in vars(plan).items() if key != "policy"}


def test_no_level_is_status_1(run, record):
    record.take(range(8)).save("few.parquet")
    options = (
        *ZERO_ONE,
        "--saving",
        "0.4",
        "--cost",
        "exit",
        "--control",
        "ucb:bound=empirical_bernstein",
    )
    done = run("plan", "few.parquet", *options, "-o", "policy.json")
    assert done.status == 1
    assert done.err == ""
    assert "No level can be certified" in done.out
    assert Policy.load("policy.json").runs_full_model
    shown = json.loads(run("plan", "few.parquet", *options, "--json").out)
    assert (shown["epsilon"], shown["threshold"]) == (None, None)


def test_an_impossible_saving_is_refused(run, made):
    options = (*ZERO_ONE, "--cost", "exit", "--saving", "0.9")
    done = run("plan", "record.parquet", *options, "-o", "p.json")
    assert done.status == 2
    assert "`saving` must be at most 0.75" in done.err
    assert "saves 75 % of exits, but got 0.9" in done.err
    assert not made()


def test_a_plan_that_falls_short_says_so(run, record):
    """Four samples bound little, and may save less than the one that chose the setting."""
    budget = Budget(saving=0.7, cost="exit")
    command = ("plan", "few.parquet", *ZERO_ONE, "--cost", "exit", "--saving", "0.7")
    seen = set()
    for seed in range(6):
        few = replace(record.take(range(5)), order=seed)
        few.save("few.parquet")
        plan = lowest_epsilon(few, budget, loss="zero_one")
        shown = run(*command).out
        less, little = plan.cost / plan.full_cost > 0.3005, (plan.epsilon or 0) > 0.5
        assert (
            "That is less than the 70 % asked for: the setting was chosen on 1 sample," in shown
        ) is less
        assert ("is hardly a promise: no loss exceeds 1 anyway" in shown) is little
        seen |= {("less", less), ("little", little)}
    assert len(seen) == 4  # both were seen, and not seen


@pytest.mark.parametrize(
    "arguments",
    [
        ("--saving", "0.4"),
        ("-o", "policy.json"),
        ("thresholds.parquet", "-o", "policy.json"),
        ("thresholds.parquet", "--true-risk", "0.01"),
        ("thresholds.parquet",),
        ("record.parquet", "--promise", "gap zero_one <= 0.1", "--saving", "0.4"),
        ("record.parquet", *ZERO_ONE, "--control", "crc", "--saving", "0.4"),
        ("--loss", "brier"),
        ("record.parquet", "--labels", "9"),
        ("record.parquet", "--labels", "9", "--epsilon", "0.1", "--power", "0.9"),
        ("thresholds.parquet", "--saving", "0.3", "--epsilon", "0.05"),
        ("thresholds.parquet", "--saving", "0.3", "--power", "0.8"),
    ],
)
def test_options_that_do_not_belong_are_refused(run, arguments):
    assert run("plan", *arguments).status == 2


def test_the_policy_runs(run, record):
    """What `plan` writes is what `EarlyExit` and `Policy.exits` take."""
    run("plan", "record.parquet", *ZERO_ONE, "--cost", "exit", "--saving", "0.4", "-o", "p.json")
    exits = ss.Policy.load("p.json").exits(record.confidences["top1"])
    assert 1 - (exits.mean() + 1) / 4 == pytest.approx(0.4, abs=0.06)


def test_plans_of_groups_count_groups_and_say_what_is_averaged(run):
    command = ["plan", "users.parquet", "--loss", "zero_one", "--cost", "flops"]
    level = ("--epsilon", "0.05")
    done = run(*command, *level)
    assert done.out.startswith("groups\t")
    assert "each group's average" in done.out
    options = ["--groups-average", "sample", "--max-group-size", "4"]
    assert run("convert", "users.parquet", *options, "-o", "counted.parquet").status == 0
    command[1] = "counted.parquet"
    found = json.loads(run(*command, *level, "--json").out)
    assert (found["unit"], found["average"]) == ("groups", "sample")
    done = run(*command, "--saving", "0.3")
    assert "per sample (every sample counts the same" in done.out
    assert "other groups chose the setting" in done.out


def test_the_seed_drawn_for_a_budget_is_named(run):
    budget = ("--loss", "zero_one", "--cost", "flops", "--saving", "0.2")
    done = run("plan", "arrays.npz", *budget, "-o", "policy.json")
    seed = Policy.load("policy.json").certificate.provenance.seed
    assert f"convert arrays.npz --seed {seed} -o" in done.out
    assert "convert" not in run("plan", "record.parquet", *budget).out
