"""`swiftsure export`, `swiftsure collect FOLDER` and `swiftsure demo --onnx`."""

import json
import sys

import pytest

pytest.importorskip("onnxscript")

from typer.testing import CliRunner

from swiftsure.cli.app import app
from swiftsure.torch import collect
from tests.torch.builders import inputs, labels, network

MODULE = """
from tests.torch.builders import inputs, labels, network
def build(): return network(n_exits=2)
def data(): return [(inputs(60, seed=1), labels(60)), (inputs(60, seed=2), labels(60))]
def none(): return []
"""


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_nets.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("own_nets", None)


def test_from_a_model_to_a_policy_of_what_runs(here):
    out = invoke(
        "export", "own_nets:build", "--data", "own_nets:data", "-o", "made", "--threads", 1
    )
    assert out.exit_code == 0, out.output
    assert "On 60 samples its outputs differ from PyTorch's by at most" in out.output
    out = invoke("collect", "made", "--data", "own_nets:data", "--losses", "brier", "--json")
    assert out.exit_code == 0, out.output
    assert json.loads(out.stdout)["samples"] == 120
    options = ["--risk", "consistency", "--loss", "brier", "--epsilon", 0.9]
    assert invoke("calibrate", "record.parquet", *options, "-o", "policy.json").exit_code == 0
    out = invoke("export", "made", "policy.json", "--triton", "repository", "--json")
    assert out.exit_code == 0, out.output
    assert json.loads(out.stdout)["check"]["samples"] == 60
    assert (here / "made" / "policy.json").is_file()
    assert (here / "repository" / "early_exit" / "1" / "model.py").is_file()
    # A policy of another network is refused.
    other = collect(network(n_exits=2, seed=5), [(inputs(200), labels(200))], losses=["brier"])
    other.save(here / "other.parquet")
    assert invoke("calibrate", "other.parquet", *options, "-o", "other.json").exit_code == 0
    with pytest.raises(ValueError, match="made for another model"):
        CliRunner().invoke(app, ["export", "made", "other.json"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "own_nets:build"], "`--output` and `--data` must be given"),
        (["export", "own_nets:build", "--data", "own_nets:none", "-o", "f"], "at least one batch"),
        (["export", ".", "--int8"], "takes a policy, --triton and --single-file"),
        (["collect", "--data", "own_nets:data"], "Pass either a folder"),
        (["collect", ".", "--data", "own_nets:data"], "has no manifest"),
    ],
)
def test_mistakes(here, arguments, message):
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.slow
def test_the_demo_runs_in_onnx_runtime(tmp_path):
    out = invoke("demo", "--onnx", "--n", 1000, "-o", tmp_path, "--json")
    assert out.exit_code in (0, 1), out.output
    content = json.loads(out.stdout)
    assert content["measured"]["accuracy"]["full"] > 0.5
    assert (tmp_path / "onnx" / "manifest.json").is_file()
