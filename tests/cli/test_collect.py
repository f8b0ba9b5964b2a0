"""`swiftsure collect`: functions of the current folder, a record, and errors of one line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import swiftsure as ss

torch = pytest.importorskip("torch")

# -P: the current folder is not on the path unless the command puts it there, as in a shell
COMMAND = [sys.executable, "-P", "-c", "from swiftsure.cli import main; main()"]

MODULE = """
import torch
from torch import nn

from swiftsure.torch import Staged

torch.set_num_threads(1)
SIZE = 3


def build():
    torch.manual_seed(0)
    stages = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
    return Staged.from_sequential(stages, [nn.Linear(8, 3) for _ in stages]).eval()


def training():
    return build().train()


def calibration():
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        x = torch.randn(40, 4, generator=generator)
        yield x, x[:, :3].argmax(dim=1)


def with_nan():
    x = torch.zeros(8, 4)
    x[3] = torch.nan
    return [(x, torch.zeros(8, dtype=torch.long))]


def breaking():
    yield next(calibration())
    raise OSError("the disk is gone")


def others():
    yield torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)


def refusing():
    raise ValueError("no data today")


def failing():
    raise RuntimeError("out of memory")


def failing_at_once():
    yield failing()


def nothing():
    pass


def data_of_a_neighbour():
    yield from calibration()
    import mynetneighbour  # only now, while batches are collected


def with_a_neighbour():
    import mynetneighbour

    return mynetneighbour.build()


def unwanted():
    raise SystemExit("the data should not have been asked for")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module in it; whatever is imported from there is forgotten."""
    (tmp_path / "mynet.py").write_text(MODULE)
    (tmp_path / "mynetneighbour.py").write_text("from mynet import build\n")
    (tmp_path / "needy.py").write_text("import absent_dependency\n")
    (tmp_path / "flawed.py").write_text("import math\nmath.absent\n\n\ndef build(): ...\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("mynet", "mynetneighbour", "needy", "flawed"):
        sys.modules.pop(name, None)


@pytest.fixture
def made(folder):
    before = set(folder.iterdir())

    def names():
        return {path.name for path in set(folder.iterdir()) - before} - {"__pycache__"}

    return names


def shell(*arguments):
    """Run a command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def assert_refused(done, *words):
    """One line that says what is wrong, and nothing else."""
    assert done.status == 2, done.err
    assert done.out == ""
    assert re.fullmatch(r"swiftsure: [^\n]+\n", done.err), done.err
    for word in words:
        assert word in done.err


COLLECT = ("collect", "--model", "mynet:build", "--data", "mynet:calibration")


# ------------------------------------------------------------------------------------ the record


def test_from_a_model_to_a_policy(run, folder, made):
    done = shell(*COLLECT, "-o", "mine.parquet", "--scores", "top1, entropy", "--seconds")
    assert (done.returncode, done.stderr) == (0, "")
    header, *lines = [line.split("\t") for line in done.stdout.splitlines()[:-1]]
    assert header == ["exit", "mean zero_one", "mean brier", "flops", "seconds"]
    record = ss.ExitRecord.load("mine.parquet")
    assert (record.n, record.n_exits) == (400, 3)
    assert set(record.confidences) == {"top1", "entropy"}
    assert record.fingerprint is not None
    for k, line in enumerate(lines):
        assert line[0] == str(k + 1)
        assert float(line[1]) == pytest.approx(record.losses["zero_one"][:, k].mean(), rel=1e-3)
        assert float(line[3]) == pytest.approx(record.costs["flops"][k], rel=1e-3)
    assert done.stdout.splitlines()[-1] == "Wrote mine.parquet"
    arguments = ("--loss", "zero_one", "--epsilon", "0.3", "-o", "policy.json", "--json")
    done = run("calibrate", "mine.parquet", *arguments)
    assert (done.status, done.err) == (0, "")
    policy = ss.Policy.load("policy.json")
    assert policy.certificate.provenance.model == record.fingerprint
    assert not policy.runs_full_model
    assert json.loads(done.out)["threshold"] == policy.threshold
    assert made() == {"mine.parquet", "policy.json"}


def test_json(run, folder, made):
    done = run(*COLLECT, "--json")
    assert (done.status, done.err) == (0, "")
    shown = json.loads(done.out)
    record = ss.ExitRecord.load("record.parquet")
    assert shown["samples"] == record.n == 400
    assert shown["file"] == "record.parquet"
    assert [row["exit"] for row in shown["exits"]] == [1, 2, 3]
    for k, row in enumerate(shown["exits"]):
        assert row["mean brier"] == record.losses["brier"][:, k].mean()
        assert row["flops"] == record.costs["flops"][k]
    assert made() == {"record.parquet"}


def test_it_is_the_librarys_own_record(run, folder):
    run(*COLLECT, "--losses", "brier", "--scores", "top_diff", "--dtype", "bfloat16")
    found = ss.ExitRecord.load("record.parquet")
    sys.path.insert(0, str(folder))
    import mynet

    sys.path.remove(str(folder))
    from swiftsure.torch import collect

    expected = collect(
        mynet.build(), mynet.calibration(), ["brier"], ["top_diff"], dtype="bfloat16"
    )
    assert np.array_equal(found.confidences["top_diff"], expected.confidences["top_diff"])
    assert np.array_equal(found.losses["brier"], expected.losses["brier"])
    assert (found.fingerprint, found.dtype) == (expected.fingerprint, "bfloat16")


def test_shards(run, folder, made):
    arguments = ("collect", "--model", "mynet:build", "--shards", "parts", "--data")
    broken = run(*arguments, "mynet:breaking")
    assert "40 of them are kept in parts, where the same command resumes" in broken.err
    assert made() == {"parts"}
    other = run(*arguments, "mynet:others")
    assert other.status == 2
    assert "it gives only 8: pass the same data, or choose another folder" in other.err
    assert made() == {"parts"}
    done = run(*arguments, "mynet:calibration")
    assert done.status == 0, done.err
    assert ss.ExitRecord.load("record.parquet").n == 400
    assert made() == {"parts", "record.parquet"}


def test_the_path_is_left_as_it_was(run):
    before = list(sys.path)
    run(*COLLECT)
    assert sys.path == before


def test_a_function_may_import_its_neighbours(run):
    done = run("collect", "--model", "mynet:with_a_neighbour", "--data", "mynet:calibration")
    assert (done.status, done.err) == (0, "")
    sys.modules.pop("mynetneighbour")
    done = run("collect", "--model", "mynet:build", "--data", "mynet:data_of_a_neighbour")
    assert (done.status, done.err) == (0, "")


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mynet", ["`--model` must be module:function, but got 'mynet'"]),
        ("mynet:", ["`--model` must be module:function"]),
        (":build", ["`--model` must be module:function"]),
        (".:build", ["`--model`"]),
        ("mynett:build", ["`--model`: cannot import 'mynett'"]),
        ("needy:build", ["`--model`: cannot import 'needy'", "absent_dependency"]),
        ("mynet:built", ["`--model`: 'mynet' has no function 'built'"]),
        ("mynet:SIZE", ["`--model`", "SIZE"]),
        ("mynet:training", ["evaluation mode"]),
        ("mynet:refusing", ["no data today"]),
        ("mynet:failing", ["RuntimeError: out of memory"]),  # the model's fault, not the library's
    ],
)
def test_models_that_are_none(run, made, model, words):
    assert_refused(run("collect", "--model", model, "--data", "mynet:calibration"), *words)
    assert not made()


def test_a_function_that_returns_no_model(run, made):
    done = run("collect", "--model", "mynet:nothing", "--data", "mynet:calibration")
    assert_refused(done, "`model` must have a method `begin`, but NoneType has none")
    assert not made()


def test_what_was_collected_is_kept_only_in_shards(run, made):
    """The error says how to keep it, and where it is kept."""
    arguments = ("collect", "--model", "mynet:build", "--data", "mynet:breaking")
    assert_refused(run(*arguments), "after 40 samples", "with --shards they would be kept")
    assert not made()
    done = run(*arguments, "--shards", "parts")
    assert_refused(done, "after 40 samples", "kept in parts")
    assert made() == {"parts"}


def test_an_error_of_the_module_itself_is_not_hidden(run, made):
    """The function is there: what is wrong is another name."""
    done = run("collect", "--model", "flawed:build", "--data", "mynet:calibration")
    assert_refused(done, "absent")
    assert not made()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("mynet", ["`--data` must be module:function"]),
        ("absent:data", ["`--data`: cannot import 'absent'"]),
        ("mynet:absent", ["`--data`: 'mynet' has no function 'absent'"]),
        ("mynet:refusing", ["no data today"]),
        ("mynet:failing", ["RuntimeError: out of memory"]),
        ("mynet:failing_at_once", ["RuntimeError: out of memory"]),
        ("mynet:with_nan", ["exit 1 is NaN or infinite for sample 3"]),
        ("mynet:breaking", ["the disk is gone"]),
    ],
)
def test_data_that_are_none(run, made, data, words):
    assert_refused(run("collect", "--model", "mynet:build", "--data", data), *words)
    assert not made()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--losses", "zero_won"), ["Did you mean 'zero_one'?"]),
        (("--scores", "topp1"), ["Did you mean 'top1'?"]),
        (("--dtype", "float15"), ["`dtype`", "Did you mean 'float16'?"]),
        (("--device", "gpu"), ["gpu"]),
    ],
)
def test_arguments(run, made, arguments, words):
    assert_refused(run(*COLLECT, *arguments), *words)
    assert not made()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device here")
def test_a_device_that_is_not_there(run, made):
    assert_refused(run(*COLLECT, "--device", "cuda"), "CUDA")
    assert not made()


def test_the_output_folder_is_looked_for_first(run, made):
    """Not after hours of collecting."""
    arguments = ("--model", "mynet:build", "--data", "mynet:unwanted", "-o", "no/record.parquet")
    done = run("collect", *arguments)
    assert_refused(done, "existing folder", "no")
    assert not made()


def test_options_that_must_be_given(run):
    for arguments in (("collect",), ("collect", "--model", "mynet:build")):
        done = run(*arguments)
        assert done.status == 2
        assert "Missing option" in done.err


def test_a_program_of_its_own(folder, made):
    """An error as a shell sees it."""
    done = shell("collect", "--model", "mynet:built", "--data", "mynet:calibration")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "swiftsure: `--model`: 'mynet' has no function 'built'.\n"
    assert not made()


def test_help_shows_an_example(run):
    done = run("collect", "--help")
    assert done.status == 0
    assert "swiftsure collect --model nets:build --data sets:calibration" in " ".join(
        done.out.split()
    )
    assert Path("mynet.py").exists()
