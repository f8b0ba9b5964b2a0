"""The workflow of docs/guides/compare.md stops a pull request whose model is worse."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "compare.md"


@pytest.fixture(scope="module")
def script():
    """The script of the workflow's last step."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    *_, last = yaml.safe_load(block)["jobs"]["compare"]["steps"]
    return last["run"]


@pytest.fixture
def status(script, tmp_path):
    """Run the script as a runner does, on logs of two models; return its exit status."""
    (tmp_path / "evals").mkdir()
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "swiftsure"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m swiftsure "$@"\n')
    command.chmod(0o755)

    def run(main, new):
        for name, right in {"main": main, "new": new}.items():
            lines = [{"doc_id": k, "exact_match": float(each)} for k, each in enumerate(right)]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (tmp_path / "evals" / f"{name}.jsonl").write_text(text)
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(shell, cwd=tmp_path, env={**os.environ, "PATH": path}, check=False)
        assert (tmp_path / "policy.json").exists()
        return done.returncode

    return run


def test_a_model_that_is_as_good_passes(status):
    right = np.random.default_rng(0).random(900) < 0.8
    assert status(right, right) == 0


def test_a_model_that_is_worse_fails(status):
    rng = np.random.default_rng(0)
    right = rng.random(900) < 0.8
    assert status(right, right & (rng.random(900) < 0.95)) == 1
