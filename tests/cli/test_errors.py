"""Bad usage and bad input: one line on standard error, status 2, and no file touched."""

import json
import os
import pty
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

COMMAND = [sys.executable, "-c", "from swiftsure.cli import main; main()"]
CALIBRATE = ("calibrate", "record.parquet", "--loss", "zero_one", "--epsilon", "0.05")
THRESHOLDS = ("calibrate", "thresholds.parquet", "--epsilon", "0.05")
PLAN = ("plan", "--epsilon", "0.05")
EVALUATE = ("evaluate", "record.parquet", "--loss", "zero_one", "--splits", "1")
BUDGET = ("plan", "record.parquet", "--loss", "zero_one", "--cost", "exit", "--saving", "0.4")


def assert_refused(done, *words):
    """One line that says what is wrong, and nothing else."""
    assert done.status == 2
    assert done.out == ""
    assert re.fullmatch(r"swiftsure: [^\n]+\n", done.err), done.err
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


# ------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*CALIBRATE, "--epsilon", "1.3"), ["`epsilon` must be in (0, 1), but got 1.3"]),
        ((*CALIBRATE, "--epsilon", "0"), ["`epsilon` must be in (0, 1), but got 0"]),
        ((*CALIBRATE, "--epsilon", "nan"), ["`epsilon`"]),
        ((*CALIBRATE, "--delta", "1"), ["`delta` must be in (0, 1), but got 1"]),
        ((*CALIBRATE, "--control", "ubc"), ["'ubc'", "Did you mean 'ucb'?"]),
        ((*CALIBRATE, "--control", "ucb:bound=starr"), ["'starr'", "Did you mean 'star'?"]),
        (
            (*CALIBRATE, "--control", "crc:methd=ucb"),
            ["`option of crc`", "monotone, method, selection, delta_prime", "'methd'", "'method'?"],
        ),
        ((*CALIBRATE, "--control", "crc:correction=bonferroni"), ["`option of crc`", "method"]),
        ((*CALIBRATE, "--control", "empirical:bound=wsr"), ["`option of empirical`"]),
        ((*CALIBRATE, "--control", "crc:"), ["`option of crc`", "''"]),
        ((*CALIBRATE, "--control", "crc:method"), ["`method` must be one of: crc, ucb"]),
        ((*CALIBRATE, "--control", "crc:method=ucb:monotone"), ["`method='ucb'`", "`monotone`"]),
        (
            (*CALIBRATE, "--control", "crc:bound=wsr"),
            ["`bound` is not used by crc without its method=ucb"],
        ),
        ((*CALIBRATE, "--control", "crc:delta_prime=x"), ["`delta_prime` must be a number", "'x'"]),
        ((*CALIBRATE, "--control", "crc:delta_prime=2"), ["`delta_prime` must be in (0, 1)"]),
        ((*CALIBRATE, "--control", "ucb:zero_bounded=1"), ["must be one of: true, false", "'1'"]),
        ((*CALIBRATE, "--control", "ltt:correction=holm"), ["fixed_sequence, bonferroni"]),
        ((*CALIBRATE, "--rule", ":min_exit=-1"), ["`min_exit` must be at least 0"]),
        ((*CALIBRATE, "--rule", ":min_exit=x"), ["`min_exit` must be a number", "'x'"]),
        ((*CALIBRATE, "--rule", "top1:strikt"), ["`option of --rule`", "Did you mean 'strict'?"]),
        ((*THRESHOLDS, "--rule", ":strict"), ["`strict`", "ExitRecord"]),
        ((*THRESHOLDS, "--missing", "worst"), ["`missing`", "ExitRecord"]),
        ((*CALIBRATE, "--risk", "gaps"), ["Did you mean 'gap'?"]),
        ((*CALIBRATE, "--rule", "top2"), ["Did you mean 'top1'?"]),
        ((*CALIBRATE, "--path", "logits"), ["`--path`", "'logits'"]),
        ((*CALIBRATE, "--path", "0.9,x"), ["`--path`", "'0.9,x'"]),
        ((*CALIBRATE[:2], "-p", "gap brierr <= 0.1"), ["Did you mean 'brier'?"]),
        ((*CALIBRATE[:2], "-p", "gap brier <= 2"), ["`epsilon` must be in (0, 2), but got 2"]),
        ((*CALIBRATE[:2], "-p", "cost flops <= 1"), ["`promises` must hold at least one Promise"]),
        (
            ("convert", "record.parquet", "--population", "10"),
            ["`population` must be at least 800"],
        ),
        ((*CALIBRATE, "--control", "ucb:bound=bentkus"), ["'bentkus' needs losses of at least 0"]),
        (("calibrate", "record.parquet"), ["`--epsilon` must be given"]),
        ((*CALIBRATE[:2], "--epsilon", "0.1"), ["`loss` must be given", "zero_one, brier"]),
        ((*CALIBRATE, "--loss", "zero_on"), ["Did you mean 'zero_one'?"]),
        ((*THRESHOLDS, "--path", "0.9"), ["ThresholdRecord"]),
        ((*EVALUATE, "-n", "800"), ["`n_calibration` must leave test samples", "800"]),
        ((*EVALUATE, "-n", "0"), ["`n_calibration`"]),
        ((*EVALUATE, "--epsilons", "0.1,a"), ["`--epsilons`", "'a'"]),
        ((*EVALUATE, "--epsilons", "0.1,1"), ["`epsilons` must be in (0, 1), but got 1"]),
        ((*EVALUATE, "--controls", "crc,ubc"), ["Did you mean 'ucb'?"]),
        ((*EVALUATE, "--controls", "crc,crc"), ["`controls` must differ"]),
        (
            (*EVALUATE, "--controls", "crc,ucb:bond=wsr"),
            ["`option of ucb`", "Did you mean 'bound'?"],
        ),
        ((*EVALUATE, "--controls", "ucb:bound=starr"), ["Did you mean 'star'?"]),
        ((*EVALUATE, "--controls", ""), ["`control`"]),
        ((*EVALUATE, "--draws", "0"), ["`draws` must be at least 1"]),
        ((*EVALUATE[:-1], "0"), ["`splits` must be at least 1"]),
        (("plan", "--epsilon", "1.3"), ["`epsilon` must be in (0, 1), but got 1.3"]),
        (("plan",), ["`--epsilon` must be given"]),
        ((*PLAN, "--true-risk", "0.05"), ["`risk` must be in [0, epsilon)"]),
        ((*PLAN, "--power", "1"), ["`power`"]),
        ((*PLAN, "--max-loss", "0"), ["`loss_range`"]),
        ((*BUDGET[:-1], "40"), ["`saving` must be in (0, 1), but got 40"]),
        ((*BUDGET[:3], "zero_one", "--saving", "0.4", "--cost", "flop"), ["Did you mean 'flops'?"]),
        ((*BUDGET[:4], "--saving", "0.9", "--cost", "flop"), ["Did you mean 'flops'?"]),
        ((*BUDGET, "--control", "ucb:bound=starr"), ["Did you mean 'star'?"]),
    ],
)
def test_arguments(run, made, arguments, words):
    assert_refused(run(*arguments), *words)
    assert not made()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("calibrat",), ["calibrat", "Did you mean 'calibrate'?"]),
        (("calibrate",), ["record"]),
        ((*CALIBRATE, "--los", "brier"), ["--los", "--loss"]),
        ((*CALIBRATE, "--epsilon", "much"), ["--epsilon"]),
        ((*EVALUATE, "--draws", "1.5"), ["--draws"]),
        ((*EVALUATE, "another.parquet"), ["another.parquet"]),
    ],
)
def test_usage(run, made, arguments, words):
    done = run(*arguments)
    assert done.status == 2
    assert done.out == ""
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err
    assert not made()


def test_seeds(run):
    assert_refused(run("convert", "record.parquet", "--seed", "-1"), "seed")


def test_missing_is_checked(run):
    assert_refused(run(*CALIBRATE, "--missing", "worse"), "Did you mean 'worst'?")


def test_sizes_that_are_no_numbers(run):
    assert_refused(run(*EVALUATE, "-n", "nan"), "n_calibration")


# ------------------------------------------------------------------------------------------ files


def truncated(source, name, share):
    content = Path(source).read_bytes()
    Path(name).write_bytes(content[: int(share * len(content))])
    return name


def foreign_parquet():
    pq.write_table(pa.table({"a": [1, 2]}), "foreign.parquet")
    return "foreign.parquet"


def not_a_number(record):
    confidences = record.confidences["top1"].copy()
    confidences[3, 1] = np.nan
    np.savez(
        "nan.npz", **{"confidences": confidences, "losses.zero_one": record.losses["zero_one"]}
    )
    return "nan.npz"


def out_of_range(record):
    losses = record.losses["zero_one"].copy()
    losses[5, 0] = 1.5
    np.savez("large.npz", **{"confidences": record.confidences["top1"], "losses.zero_one": losses})
    return "large.npz"


def twice(record):
    ids = np.arange(record.n)
    ids[1] = 0
    losses = record.losses["zero_one"]
    np.savez(
        "ids.npz",
        **{"confidences": record.confidences["top1"], "losses.zero_one": losses, "ids": ids},
    )
    return "ids.npz"


def other_arrays():
    np.savez("other.npz", weights=np.zeros(3))
    return "other.npz"


def text(name):
    Path(name).write_text("not a record")
    return name


def newer(record):
    record.save("newer.parquet")
    table = pq.read_table("newer.parquet")
    header = json.loads(table.schema.metadata[b"swiftsure"]) | {"version": 99}
    pq.write_table(
        table.replace_schema_metadata({b"swiftsure": json.dumps(header)}), "newer.parquet"
    )
    return "newer.parquet"


BAD_FILES = {
    "absent": (lambda _: "absent.parquet", ["absent.parquet", "existing file"]),
    "absent npz": (lambda _: "absent.npz", ["absent.npz", "existing file"]),
    "folder": (lambda _: ".", ["existing file"]),
    "empty": (lambda _: truncated("record.parquet", "cut.parquet", 0), ["cut.parquet"]),
    "half parquet": (lambda _: truncated("record.parquet", "cut.parquet", 0.5), ["cut.parquet"]),
    "most parquet": (lambda _: truncated("record.parquet", "cut.parquet", 0.99), ["cut.parquet"]),
    "half npz": (lambda _: truncated("logits.npz", "cut.npz", 0.5), ["cut.npz"]),
    "foreign": (lambda _: foreign_parquet(), ["foreign.parquet", "not a Swiftsure record"]),
    "text": (lambda _: text("words.parquet"), ["words.parquet", "not a readable"]),
    "text npz": (lambda _: text("words.npz"), ["words.npz", "not a readable"]),
    "other arrays": (lambda _: other_arrays(), ["other.npz", "'weights'"]),
    "newer": (newer, ["newer.parquet", "newer Swiftsure", "upgrade"]),
    "nan": (not_a_number, ["confidences['top1']", "nan at index (3, 1)"]),
    "out of range": (out_of_range, ["losses['zero_one']", "[0, 1]", "1.5 at index (5, 0)"]),
    "ids": (twice, ["`ids` must be unique", "0 is used 2 times"]),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("verb", ["calibrate", "evaluate", "plan"])
@pytest.mark.parametrize("case", BAD_FILES)
def test_files(run, record, made, verb, case):
    make, words = BAD_FILES[case]
    name = make(record)
    before = made()
    level = ["--epsilon", "0.05"]
    options = {"calibrate": [*level, "-o", "p.json"], "evaluate": ["--figure", "f.png"]}
    assert_refused(run(verb, name, *options.get(verb, level)), *words)
    assert made() == before


def damaged(name):
    """An archive whose directory is whole, but not its arrays."""
    with zipfile.ZipFile("logits.npz") as archive:
        offset = archive.getinfo("logits.npy").header_offset
    content = bytearray(Path("logits.npz").read_bytes())
    content[offset + 5000] ^= 0xFF
    Path(name).write_bytes(content)


def test_damaged_arrays(run):
    damaged("bad.npz")
    assert_refused(run("calibrate", "bad.npz", *CALIBRATE[2:]), "bad.npz")


def test_one_array_is_no_archive(run):
    with Path("one.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    assert_refused(run("calibrate", "one.npz", *CALIBRATE[2:]), "one.npz")


# --------------------------------------------------------------------------------- output files


@pytest.mark.parametrize(
    "arguments",
    [
        (*CALIBRATE, "--epsilon", "2", "-o", "policy.json", "--figure", "figure.png"),
        (
            "calibrate",
            "absent.parquet",
            "--epsilon",
            "0.1",
            "-o",
            "policy.json",
            "--figure",
            "figure.png",
        ),
        (*BUDGET[:-1], "0.99", "-o", "policy.json"),
        (*EVALUATE, "-n", "5000", "--figure", "figure.png"),
    ],
)
def test_older_files_stay_as_they_were(run, made, arguments):
    for name in ("policy.json", "figure.png"):
        Path(name).write_text("older")
    assert_refused(run(*arguments))
    assert made() == {"policy.json", "figure.png"}
    for name in ("policy.json", "figure.png"):
        assert Path(name).read_text() == "older"


@pytest.mark.parametrize(
    "arguments",
    [
        (*CALIBRATE, "-o", "nowhere/policy.json"),
        (*CALIBRATE, "--figure", "nowhere/figure.png"),
        (*BUDGET, "-o", "nowhere/policy.json"),
        (*EVALUATE, "--figure", "nowhere/figure.png"),
    ],
)
def test_output_folders_must_exist(run, made, arguments):
    assert_refused(run(*arguments), "existing folder", "nowhere")
    assert not made()


@pytest.mark.parametrize("command", [CALIBRATE, EVALUATE])
def test_figures_of_other_formats(run, made, command):
    assert_refused(run(*command, "--figure", "figure.bmp"), "figure.bmp", ".png, .pdf or .svg")
    assert not made()


@pytest.mark.parametrize("figure", ["figure.bmp", "nowhere/figure.png"])
def test_a_refused_figure_leaves_the_policy_alone(run, figure):
    Path("policy.json").write_text("older")
    assert_refused(run(*CALIBRATE, "-o", "policy.json", "--figure", figure))
    assert Path("policy.json").read_text() == "older"


def test_a_refused_policy_leaves_the_figure_alone(run):
    Path("figure.png").write_text("older")
    assert_refused(run(*CALIBRATE, "-o", "nowhere/policy.json", "--figure", "figure.png"))
    assert Path("figure.png").read_text() == "older"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folders_that_may_not_be_written(run, folder):
    (folder / "locked").mkdir(mode=0o500)
    assert_refused(run(*CALIBRATE, "-o", "locked/policy.json"), "locked")


def test_a_folder_is_no_output_file(run, folder, made):
    (folder / "here").mkdir()
    assert_refused(run(*CALIBRATE, "-o", "here"))
    assert made() == {"here"}
    assert not list((folder / "here").iterdir())


# ---------------------------------------------------------------------- the program as it is run


def test_a_program_of_its_own(folder):
    """Errors and statuses as a shell sees them."""
    done = subprocess.run(
        [*COMMAND, "calibrate", "record.parquet", "--loss", "zero_on", "--epsilon", "0.1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"swiftsure: [^\n]+Did you mean 'zero_one'\?\n", done.stderr)
    done = subprocess.run(
        [*COMMAND, "calibrate", "tiny.parquet", *CALIBRATE[2:], "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["threshold"] is None


def test_an_error_that_nobody_foresaw_is_no_broken_promise(run, monkeypatch):
    """It is told from the status 1, is shown whole, and asks to be reported."""

    def flawed(*_, **__):
        return {}["absent"]

    monkeypatch.setattr("swiftsure.Calibration.run", flawed)
    done = run(*CALIBRATE)
    assert (done.status, done.out) == (70, "")
    *shown, last = done.err.splitlines()
    assert shown[0].startswith("Traceback")
    assert shown[-1] == "KeyError: 'absent'"
    assert last.startswith("swiftsure: this is a bug in swiftsure")
    assert "report" in last


def in_terminal(*arguments, columns=100):
    """Run a command in a terminal; return its status and what the terminal was sent."""
    import fcntl
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    return process.wait(), b"".join(parts).decode()


def test_a_terminal_gets_tables(folder):
    status, shown = in_terminal(*CALIBRATE)
    assert status == 0
    assert "\t" not in shown
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()
    assert any(re.match(r"zero_one gap +0\.05 ", line) for line in lines)
    assert {"Risks", "Costs"} <= {line.strip() for line in lines}
    assert max(map(len, lines)) <= 100


def test_80_columns_cut_nothing(run):
    """Headers break at blanks, and cells stay whole."""
    row, *_ = json.loads(run(*EVALUATE, "--controls", "empirical", "--json").out)
    status, shown = in_terminal(*EVALUATE, "--controls", "empirical", columns=80)
    assert status == 0
    assert "…" not in shown
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()
    assert max(len(line.rpartition("\r")[2]) for line in lines) <= 80
    (first,) = (line.split() for line in lines if line.startswith("empirical  0.01 "))
    assert first[2] == f"{row['test_risk']:.4f}"
    assert first[-1] == f"{row['gain']:.1f}"
    assert {"control", "violations", "%"} <= set(" ".join(lines).split())


def test_a_terminal_names_controls_that_promise_nothing(folder):
    _, shown = in_terminal(*EVALUATE, "--controls", "crc:selection=paper,ucb", columns=200)
    assert "No promise: crc (selection=paper)." in shown
    assert "No promise" not in in_terminal(*EVALUATE, columns=200)[1]


def test_a_terminal_tells_the_promise_from_its_conditions(folder):
    _, shown = in_terminal(*CALIBRATE)
    bold, dim = (re.findall(rf"\x1b\[{code}m(.*?)\x1b\[0m", shown) for code in (1, 2))
    assert "90 % sure" in " ".join(bold)
    assert "independent draws" in " ".join(dim)
    assert "independent draws" not in " ".join(bold)


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("arguments", [PLAN, (*CALIBRATE, "--json"), ("--help",)])
def test_a_reader_that_has_gone_ends_it_quietly(folder, arguments, buffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=environment,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_gets_a_progress_bar_that_goes_away(folder):
    status, shown = in_terminal(*EVALUATE[:-1], "30")
    assert status == 0
    assert "evaluating" in shown
    bar, _, table = shown.rpartition("\x1b[?25h")  # the cursor is back
    assert "60/60" in bar
    assert "evaluating" not in table
    assert "violations" in table
