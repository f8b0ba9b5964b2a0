"""`swiftsure calibrate`."""

import json
import stat
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.certify.policy import Policy
from tests.builders import random_record

LOSS = ("--loss", "zero_one")
ZERO_ONE = (*LOSS, "--epsilon", "0.05")


def table(lines):
    """The cells of lines with tabs."""
    return [line.split("\t") for line in lines]


def test_a_policy_is_written_and_said(run, record, made):
    done = run("calibrate", "record.parquet", *LOSS, "--epsilon", 0.02, "-o", "policy.json")
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.02)
    assert not policy.runs_full_model
    assert (done.status, done.err) == (0, "")
    assert Policy.load("policy.json") == policy
    assert done.out.startswith(f"{policy}\n")
    assert done.out.splitlines()[-1] == "Wrote policy.json"
    assert made() == {"policy.json"}


def test_a_folder_of_shards_is_a_record(run, record, tmp_path):
    (tmp_path / "shards").mkdir()
    for number, rows in enumerate(np.array_split(np.arange(record.n), 3)):
        record.take(rows).save(tmp_path / "shards" / f"{number}.parquet")
    shards = tmp_path / "shards"
    whole = run("calibrate", "record.parquet", *ZERO_ONE, "--json")
    done = run("calibrate", shards, *ZERO_ONE, "--json", "--figure", tmp_path / "risk.svg")
    found, expected = (json.loads(each.out) | {"metadata": None} for each in (done, whole))
    assert found == expected
    studied = [run("evaluate", each, *ZERO_ONE) for each in (shards, "record.parquet")]
    assert studied[0].out == studied[1].out
    assert run("calibrate", shards, *ZERO_ONE, "--path", "breakpoints").status == 0


def test_a_pipe_gets_lines_with_tabs(run, record):
    done = run("calibrate", "record.parquet", *ZERO_ONE)
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.05)
    promise = policy.certificate.promises[0]
    assert done.out.startswith(f"{policy}\n")
    rest = done.out.removeprefix(f"{policy}\n").splitlines()
    risks, costs = table(rest[:2]), table(rest[2:])
    assert risks == [
        ["risk", "level", "on calibration", "upper bound", "bound"],
        [
            "zero_one gap",
            "0.05",
            f"{promise.calibration_risk:.4g}",
            f"{promise.upper_bound:.4g}",
            "trinomial",
        ],
    ]
    assert costs[0] == ["cost", "full model", "policy", "saved"]
    assert [cells[0] for cells in costs[1:]] == ["exit", "flops"]
    full, here = policy.certificate.costs.means["flops"]
    assert costs[2][1:] == ["5e+09", f"{here:.4g}", f"{100 * (1 - here / full):.1f} %"]
    assert "\x1b" not in done.out


def test_json_is_the_policy_and_nothing_else(run, record, made):
    done = run(
        "calibrate", "record.parquet", *ZERO_ONE, "--json", "-o", "p.json", "--figure", "f.png"
    )
    shown = json.loads(done.out)
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.05)
    assert shown.pop("sentence") == str(policy)
    assert Policy.model_validate(shown, strict=False) == policy == Policy.load("p.json")
    assert (done.status, done.err) == (0, "")
    assert made() == {"p.json", "f.png"}


@pytest.mark.parametrize("name", ["record.parquet", "arrays.npz", "logits.npz"])
def test_every_format_gives_the_same_policy(run, record, name):
    assert run("convert", name, "--seed", 0, "-o", "ordered.parquet").status == 0
    done = run("calibrate", "ordered.parquet", *ZERO_ONE, "--json")
    policy = ss.calibrate(replace(record, order=0), loss="zero_one", epsilon=0.05)
    assert json.loads(done.out)["threshold"] == policy.threshold
    assert json.loads(done.out)["certificate"]["samples"]["n"] == 800


def test_a_record_with_one_loss_needs_no_name(run):
    assert run("calibrate", "arrays.npz", "--epsilon", "0.05").status == 0


GAP = ss.Promise("zero_one", epsilon=0.05)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--delta", "0.01"], {"delta": 0.01}),
        (["--control", "crc"], {"control": "crc"}),
        (["--control", "ltt:bound=wsr"], {"control": "ltt", "bound": "wsr"}),
        (["--control", "empirical"], {"control": "empirical"}),
        (["--path", "breakpoints"], {"path": "breakpoints"}),
        (["--path", "logit"], {"path": "logit"}),
        (["--path", "0.99,0.9,0.8"], {"path": [0.99, 0.9, 0.8]}),
        (["--rule", "top1"], {"rule": "top1"}),
        (["--missing", "worst"], {"missing": "worst"}),
        (["--cost", "flops"], {"cost": "flops"}),
        (["--rule", ":strict"], {"rule": ss.ExitRule(strict=True)}),
        (["--rule", "top1:min_exit=2"], {"rule": ss.ExitRule("top1", min_exit=2)}),
        (["--control", "ucb:zero_bounded"], {"control": ss.Control("ucb", zero_bounded=True)}),
        (["--control", "ucb:zero_bounded=false"], {}),
        (["--control", "crc:method=ucb"], {"control": ss.Control("crc", method="ucb")}),
        (
            ["--control", "crc:method=ucb:delta_prime=0.01:bound=wsr"],
            {"control": ss.Control("crc", "wsr", method="ucb", delta_prime=0.01)},
        ),
        (["--control", "crc:monotone=false"], {"control": ss.Control("crc", monotone=False)}),
        (["--control", "crc:selection=paper"], {"control": ss.Control("crc", selection="paper")}),
        (
            ["--control", "ltt:correction=bonferroni:bound=hoeffding"],
            {"control": ss.Control("ltt", "hoeffding", correction="bonferroni")},
        ),
    ],
)
def test_options_reach_the_library(run, record, options, fields):
    done = run("calibrate", "record.parquet", *ZERO_ONE, *options, "--json")
    shown = json.loads(done.out)
    del shown["sentence"]
    policy = ss.Calibration(GAP, **fields).run(record)
    assert Policy.model_validate(shown, strict=False) == policy
    assert done.status == (1 if policy.runs_full_model else 0)
    run("calibrate", "record.parquet", *ZERO_ONE, *options, "-o", "policy.json")
    again = json.loads(run("calibrate", "record.parquet", "--request", "policy.json", "--json").out)
    del again["sentence"]
    assert again == shown | {"metadata": again["metadata"]}


def test_facts_of_the_draw_reach_the_record(run, record):
    run("convert", "record.parquet", "--population", "900", "-o", "finite.parquet")
    done = run("calibrate", "finite.parquet", *ZERO_ONE, "--json")
    shown = json.loads(done.out)
    del shown["sentence"]
    policy = ss.calibrate(record.drawn_from(900), GAP)
    assert Policy.model_validate(shown, strict=False) == policy
    run("convert", "record.parquet", "--seed", "7", "-o", "ordered.parquet")
    done = run("calibrate", "ordered.parquet", *ZERO_ONE, "--json")
    assert (
        json.loads(done.out)["threshold"] == ss.calibrate(replace(record, order=7), GAP).threshold
    )


PROMISES = {
    "gap zero_one <= 0.05": GAP,
    "gap zero_one ≤ 5%": GAP,
    "consistency brier <= 0.1": ss.Promise("brier", risk="consistency", epsilon=0.1),
    "zero-bounded gap brier <= .1": ss.Promise("brier", risk="zero-bounded gap", epsilon=0.1),
    "P(gap brier > 0.2) <= 0.1": ss.Promise("brier", above=0.2, epsilon=0.1),
    "worst 10% of gap brier <= 0.5": ss.Promise("brier", worst=0.1, epsilon=0.5),
    "worst 10% of gap brier above 0.05 <= 0.5": ss.Promise(
        "brier", worst=0.1, above=0.05, epsilon=0.5
    ),
    "gap zero_one among exits <= 0.08": ss.Promise("zero_one", among="exits", epsilon=0.08),
}


@pytest.mark.parametrize("text", PROMISES)
def test_a_promise_is_a_sentence(run, record, text):
    shown = json.loads(run("calibrate", "record.parquet", "--promise", text, "--json").out)
    del shown["sentence"]
    assert Policy.model_validate(shown, strict=False) == ss.calibrate(record, PROMISES[text])


def test_promises_hold_together_and_are_all_shown(run, record):
    texts = ("gap zero_one <= 0.05", "consistency brier <= 0.2", "cost flops <= 4e9")
    options = [word for text in texts for word in ("--promise", text)]
    done = run("calibrate", "record.parquet", *options)
    rows = [cells[:2] for cells in table(done.out.splitlines())]
    start = rows.index(["risk", "level"])
    assert rows[start + 1 : start + 3] == [
        ["zero_one gap", "0.05"],
        ["brier inconsistency", "0.2"],
    ]
    shown = json.loads(run("calibrate", "record.parquet", *options, "--json").out)
    assert shown["certificate"]["max_costs"] == {"flops": 4e9}
    promises = [GAP, ss.Promise("brier", risk="consistency", epsilon=0.2)]
    both = ss.calibrate(record, [*promises, ss.CostPromise("flops", at_most=4e9)])
    assert shown["threshold"] == both.threshold


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "`--epsilon` must be given"),
        (("--promise", "gap zero_one <= 1", "--loss", "brier"), "`--loss` is each --promise's own"),
        (("--request", "request.toml", "--delta", "0.1"), "`--delta` is in the file of --request"),
        (("--request", "unknown.toml"), "`field` must be one of"),
        (("--request", "bare.toml"), "`promises` must be given"),
        (("--request", "typed.toml"), "`delta` must be a number"),
        (("--request", "record.parquet"), "is not a TOML file"),
        (("--request", "none.toml"), "No such file"),
    ],
)
def test_requests_that_cannot_be(run, folder, options, message):
    (folder / "request.toml").write_text('promises = ["gap zero_one <= 0.05"]\n')
    (folder / "unknown.toml").write_text('promise = ["gap zero_one <= 0.05"]\n')
    (folder / "bare.toml").write_text("delta = 0.2\n")
    (folder / "typed.toml").write_text('promises = ["gap zero_one <= 0.05"]\ndelta = "0.2"\n')
    done = run("calibrate", "record.parquet", *options)
    assert (done.status, done.out) == (2, "")
    assert message in done.err


def test_nothing_certified_is_status_1_and_the_full_model(run, made):
    done = run("calibrate", "tiny.parquet", *ZERO_ONE, "-o", "policy.json", "--figure", "f.png")
    assert done.status == 1
    assert done.err == ""
    assert done.out.startswith("Always runs the full model: nothing faster was certified")
    assert Policy.load("policy.json").runs_full_model
    assert made() == {"policy.json", "f.png"}
    done = run("calibrate", "tiny.parquet", *ZERO_ONE, "--json")
    assert done.status == 1
    assert json.loads(done.out)["threshold"] is None


def test_a_policy_of_any_option_can_be_reported(run, folder):
    given = ("--control", "ltt:zero_bounded", "--rule", ":strict:min_exit=1")
    made = ("-o", "policy.json", "--figure", "f.png")
    assert run("calibrate", "record.parquet", *ZERO_ONE, *given, *made).status == 0
    done = run("report", "record.parquet", "policy.json")
    assert (done.status, done.err) == (0, "")


def test_the_figure_draws_the_exits_that_may_be_taken(run, record, monkeypatch):
    drawn = []
    from swiftsure.report import figures

    monkeypatch.setattr(figures, "policy_figure", lambda curve, *_, **__: drawn.append(curve))
    rule = ss.ExitRule(strict=True, min_exit=2)
    given = ("--rule", ":strict:min_exit=2")
    run("calibrate", "record.parquet", *ZERO_ONE, *given, "--figure", "f.png")
    wanted = record.curve("gap", "zero_one", rule=rule)
    assert [curve.fingerprint() for curve in drawn] == [wanted.fingerprint()]
    assert wanted.fingerprint() != record.curve("gap", "zero_one").fingerprint()


@pytest.mark.parametrize("name", ["f.png", "f.pdf", "f.svg"])
@pytest.mark.parametrize("source", ["arrays.npz", "thresholds.parquet"])
def test_a_figure_is_drawn(run, folder, source, name):
    done = run("calibrate", source, "--epsilon", "0.05", "--figure", name)
    assert done.status in (0, 1)
    assert done.out.splitlines()[-1] == f"Wrote {name}"
    assert (folder / name).stat().st_size > 5000


def test_threshold_records_have_their_own_dial(run, thresholds):
    done = run("calibrate", "thresholds.parquet", "--epsilon", 0.1)
    assert done.status == 0
    chosen = ss.calibrate(thresholds, epsilon=0.1).threshold
    assert f"It runs at threshold = {chosen:.4g}, and needs " in " ".join(done.out.split())


def test_a_figure_without_costs(run, thresholds, folder):
    ss.ThresholdRecord(thresholds.thresholds, losses=thresholds.losses).save("bare.parquet")
    done = run("calibrate", "bare.parquet", "--epsilon", 0.1, "--figure", "f.png")
    assert done.status in (0, 2)
    assert "Traceback" not in done.err


def test_missing_labels_that_matter(run, sample):
    labels = np.where(np.arange(800) % 3, sample.labels, -1)
    np.savez("some.npz", logits=sample.logits, labels=labels)
    done = run("calibrate", "some.npz", *ZERO_ONE)
    assert done.status == 2
    assert "missing label(s) matter" in done.err
    assert run("calibrate", "some.npz", *ZERO_ONE, "--missing", "worst").status in (0, 1)


def test_an_older_policy_is_replaced(run, folder):
    (folder / "policy.json").write_text("older")
    assert run("calibrate", "record.parquet", *ZERO_ONE, "-o", "policy.json").status == 0
    assert Policy.load("policy.json").threshold is not None


def test_groups_are_named_in_words_and_numbers(run):
    done = run("calibrate", "users.parquet", *ZERO_ONE)
    assert "the average over groups of each group's average zero_one gap" in done.out
    assert "zero_one gap (average of group averages)" in done.out
    assert "every group counts the same, whatever its size." in done.out
    options = ["--groups-average", "sample", "--max-group-size", "4"]
    assert run("convert", "users.parquet", *options, "-o", "counted.parquet").status == 0
    figure = ("--figure", "curve.png")
    done = run("calibrate", "counted.parquet", *ZERO_ONE, *figure, "-o", "policy.json")
    assert (done.status, done.err) == (0, "")
    assert "zero_one gap (average per sample of groups)" in done.out
    assert "Risks and costs are averages per sample" in done.out
    done = run("calibrate", "counted.parquet", *ZERO_ONE, "--json")
    found = json.loads(done.out)
    assert found["certificate"]["samples"]["average"] == "sample"
    assert found["certificate"]["samples"]["max_group_size"] == 4
    assert "per sample (every sample counts the same" in found["sentence"]
    done = run("report", "users.parquet", "policy.json", "-o", "page.html")
    assert "`certificate.samples.average` is sample in the policy, but group" in done.err
    assert "with the same groups, weights, population and order" in done.err
    assert run("report", "counted.parquet", "policy.json", "-o", "page.html").status == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("users", ["--groups-average", "sample"], "`max_size` must be given"),
        ("users", ["--groups-average", "sample", "--max-group-size", "3"], "has 4 samples"),
        ("users", ["--groups-average", "user"], "`average` must be one of: group, sample"),
        ("record", ["--groups-average", "group"], "need a record with groups"),
    ],
)
def test_averages_that_make_no_sense_are_refused(run, name, options, message):
    done = run("convert", f"{name}.parquet", *options, "-o", "other.parquet")
    assert done.status == 2
    assert message in done.err


def test_the_seed_drawn_for_a_file_that_keeps_none_is_named(run):
    star = ("--control", "ucb:bound=star")  # the exact test of gaps needs no order
    done = run("calibrate", "arrays.npz", *ZERO_ONE, *star, "-o", "first.json")
    policy = Policy.load("first.json")
    seed = policy.certificate.provenance.seed
    assert policy.certificate.provenance.seed_drawn
    said = next(line for line in done.out.splitlines() if "drawn at random, with" in line)
    assert f"with seed {seed}, which arrays.npz does not keep" in said
    assert f"`swiftsure convert arrays.npz --seed {seed} -o arrays.parquet`" in said
    assert run("convert", "arrays.npz", "--seed", seed, "-o", "arrays.parquet").status == 0
    again = run("calibrate", "arrays.parquet", *ZERO_ONE, *star, "-o", "again.json")
    assert "drawn at random, with seed" not in again.out
    repeated = Policy.load("again.json")
    assert (repeated.threshold, repeated.certificate.provenance.seed) == (policy.threshold, seed)
    assert not repeated.certificate.provenance.seed_drawn
    assert "or the seed was itself drawn at random, once" in str(repeated)


def test_nothing_is_said_of_a_seed_that_the_file_keeps_or_nobody_uses(run):
    for source, bound in [("record.parquet", "star"), ("arrays.npz", "hoeffding")]:
        done = run(
            "calibrate", source, *LOSS, "--epsilon", "0.2", "--control", f"ucb:bound={bound}"
        )
        assert "drawn at random, with seed" not in done.out


def test_one_file_gives_one_policy(run):
    for name in ("first.json", "second.json"):
        run("calibrate", "record.parquet", *ZERO_ONE, "-o", name)
    assert Policy.load("first.json") == Policy.load("second.json")


# ------------------------------------------------------------------------------ where output goes


CALIBRATE = [sys.executable, *["-m", "swiftsure", "calibrate", "record.parquet"]]
CALIBRATE += ["--loss", "zero_one", "--epsilon", "0.3"]


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_a_policy_goes_to_standard_output(tmp_path, output):
    record = random_record(n=300)
    record.save(tmp_path / "record.parquet")
    done = subprocess.run(
        [*CALIBRATE, "-o", output],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    (tmp_path / "policy.json").write_text(done.stdout)
    ss.Policy.load(tmp_path / "policy.json")
    assert "Wrote" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"record.parquet", "policy.json"}


def test_devices_and_links_are_written_through(tmp_path):
    random_record(n=300).save(tmp_path / "record.parquet")
    (tmp_path / "link").symlink_to("real.json")
    (tmp_path / "null").symlink_to("/dev/null")
    for output in ("link", "null"):
        subprocess.run(
            [*CALIBRATE, "-o", output],
            cwd=tmp_path,
            capture_output=True,
            check=True,
        )
        assert (tmp_path / output).is_symlink()
    ss.Policy.load(tmp_path / "real.json")
    assert stat.S_ISCHR((tmp_path / "null").stat().st_mode)


def test_a_calibration_that_grows(run, folder, record):
    """Every call adds a record, and the promise holds at every moment."""
    parts = [record.take(range(k, k + 400)) for k in (0, 400)]
    for name, part in zip(("monday", "tuesday"), parts, strict=True):
        part.save(folder / f"{name}.parquet")
    options = ("--loss", "zero_one", "--epsilon", "0.1", "--state", "growing.state", "--json")
    first = json.loads(run("calibrate", "monday.parquet", *options).out)
    done = run("calibrate", "tuesday.parquet", *options, "-o", "policy.json")
    assert (done.status, done.err) == (0, "")
    second = json.loads(done.out)
    assert [each["certificate"]["samples"]["n"] for each in (first, second)] == [400, 800]
    assert first["certificate"]["index"] <= second["certificate"]["index"]
    assert "at every moment" in second["sentence"]
    assert ss.Policy.load(folder / "policy.json").certificate.samples.horizon == 1000
    again = run("calibrate", "tuesday.parquet", *options)
    assert "holds tuesday.parquet already; nothing was added" in again.err
    assert json.loads(again.out) == second


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("arrays.npz", "--state", "a.state"), "swiftsure convert arrays.npz"),
        (("record.parquet", "--state", "a.state", "--control", "crc"), "`control`"),
        (("finite.parquet", "--state", "a.state"), "finite population"),
        (("record.parquet", "--horizon", "10"), "`--horizon` goes with --state"),
        (("record.parquet", "--state", "a.state", "--path", "breakpoints"), "`path`"),
        (("record.parquet", "--state", "a.state", "--figure", "f.png"), "`--figure`"),
        (("seeded.parquet", "--state", "a.state"), "adding it twice is not noticed"),
    ],
)
def test_what_does_not_go_with_growing(run, folder, arguments, why):
    replace(random_record(n=50), order=0).save(folder / "seeded.parquet")
    random_record(n=50).drawn_from(9000).save(folder / "finite.parquet")
    done = run("calibrate", *arguments, *ZERO_ONE)
    assert done.status == 2
    assert why in done.err
    assert not (folder / "a.state").exists()


def test_weights_by_slice(run, record):
    weights = ("--weights", "north=1.6,south=0.64,estimated")
    assert run("convert", "tenants.parquet", *weights, "-o", "weighted.parquet").status == 0
    done = run("calibrate", "weighted.parquet", *LOSS, "--epsilon", "0.1")
    assert done.status == 0
    assert "(they were estimated, and the promise holds as far as they are exact)" in done.out
    shown = json.loads(
        run("calibrate", "weighted.parquet", *LOSS, "--epsilon", "0.1", "--json").out
    )
    known = ss.load_record("tenants.parquet").weighted(
        {"north": 1.6, "south": 0.64}, max_weight=1.6, estimated=True
    )
    assert shown["threshold"] == ss.calibrate(known, loss="zero_one", epsilon=0.1).threshold
    drawn = run("calibrate", "weighted.parquet", *ZERO_ONE, "--figure", "figure.png")
    assert (drawn.status, "`--figure`" in drawn.err) == (2, True)
    assert run("convert", "tenants.parquet", "--weights", "north").status == 2


def test_slices(run, folder):
    within = ("--promise", "gap zero_one within slices <= 0.05")
    done = run("calibrate", "tenants.parquet", *within, "-o", "policy.json")
    assert done.status == 0
    assert "in each of the slices north (300) and south (500) at once" in done.out
    shared = ss.Policy.load(folder / "policy.json")
    assert shared.certificate.samples.slices == {"north": 300, "south": 500}
    each = ("--promise", "gap zero_one within each slice <= 0.05")
    done = run("calibrate", "tenants.parquet", *each, "-o", "policies.json")
    assert done.status == 0
    assert [row[:2] for row in table(done.out.splitlines())[:3]] == [
        ["slice", "samples"],
        ["north", "300"],
        ["south", "500"],
    ]
    own = ss.SlicedPolicy.load(folder / "policies.json")
    assert sorted(own) == ["north", "south"]
    shown = json.loads(run("calibrate", "tenants.parquet", *each, "--json").out)
    assert sorted(shown["policies"]) == ["north", "south"]
    for wrong in (("--figure", "f.png"), ("--horizon", "9")):
        assert run("calibrate", "tenants.parquet", *within, *wrong).status == 2
    assert run("calibrate", "record.parquet", *within).status == 2


def test_several_datasets(run, folder, record):
    for name, rows in (("monday", range(400)), ("tuesday", range(400, 800))):
        record.take(rows).save(folder / f"{name}.parquet")
    days = ("monday.parquet", "tuesday.parquet")
    done = run("calibrate", *days, "--promise", "gap zero_one within slices <= 0.05")
    assert done.status == 0
    assert "in each of the slices monday (400) and tuesday (400) at once" in done.out
    done = run("calibrate", *days, *ZERO_ONE)
    assert (done.status, "must say `within slices`" in done.err) == (2, True)
    twice = ("monday.parquet", "./monday.parquet")
    assert run("calibrate", *twice, "--promise", "gap within slices <= 0.05").status == 2


def test_a_path_learned_on_a_pilot(run):
    done = run("calibrate", "record.parquet", *ZERO_ONE, "--path", "pilot.parquet", "--json")
    assert json.loads(done.out)["certificate"]["path"].startswith("learned on a pilot: ")
    same = run("calibrate", "record.parquet", *ZERO_ONE, "--path", "./record.parquet")
    assert (same.status, "not the same file" in same.err) == (2, True)


def test_a_score_learned_on_a_pilot(run):
    done = run("calibrate", "record.parquet", *ZERO_ONE, "--rule", "pilot.parquet", "--json")
    assert json.loads(done.out)["score"].startswith("learned-")
    same = run("calibrate", "record.parquet", *ZERO_ONE, "--rule", "record.parquet")
    assert (same.status, "pilot that the score was learned on" in same.err) == (2, True)


DIALS = ("dials.parquet", "--risk", "consistency", "--epsilon", 0.05)


@pytest.mark.parametrize(
    ("options", "path", "cost", "settings"),
    [
        (["--path", "learn:200"], 200, None, (200, 0.2)),
        (["--path", "learn:0.25"], 0.25, None, (150, 0.2)),
        (["--path", "learn:200", "--cost", "money"], 200, "money", (200, 0.5)),
    ],
)
def test_a_part_of_the_record_learns_the_path(run, dials, options, path, cost, settings):
    done = run("calibrate", *DIALS, *options, "-o", "policy.json", "--figure", "risk.svg")
    policy = Policy.load("policy.json")
    promise = ss.Promise(risk="consistency", epsilon=0.05)
    wanted = ss.Calibration(promise, path=ss.Path.learn(path, cost=cost), cost=cost)
    assert policy == wanted.run(dials)
    assert (done.status, done.err) == (0, "")
    pilot, fallback = settings
    assert (policy.certificate.samples.pilot, policy.certificate.samples.n) == (pilot, 600 - pilot)
    assert policy.settings["fallback"] == fallback
    assert f"the path was learned on {pilot} others" in done.out


def test_a_pilot_of_dials_is_a_file(run, dials):
    replace(dials.take(np.arange(200)), ids=np.arange(600, 800)).save("others.parquet")
    done = run("calibrate", *DIALS, "--path", "others.parquet", "--json")
    shown = json.loads(done.out)
    assert (shown["certificate"]["samples"]["pilot"], shown["settings"]["fallback"]) == (200, 0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--path", "learn:1.5"], "must be in (0, 1)"),
        (["--path", "learn:600"], "must be at least 2 samples, and leave at least 1"),
        (["--path", "learn:some"], "`--path` must be learn:NUMBER"),
        (["--path", "learn:200", "--state", "growing.state"], "`path` must be fixed"),
        (["--path", "learn:200", "--cost", "pases"], "passes"),
    ],
)
def test_pilots_that_cannot_be(run, made, options, message):
    done = run("calibrate", *DIALS, *options, "-o", "policy.json")
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert not made()


@pytest.mark.parametrize("options", [("--control", "crc:bound=wsr"), ("--delta", "0.05")])
def test_what_a_control_does_not_use_is_refused(run, options):
    control = () if "--control" in options else ("--control", "crc")
    done = run("calibrate", "record.parquet", *ZERO_ONE, *control, *options)
    assert done.status == 2
    assert "is not used by crc" in done.err
