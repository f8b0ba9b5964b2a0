"""A policy in LiteLLM, whose newest release needs other versions: in an environment of its own."""

import json
import os
import site
import subprocess
import venv
from pathlib import Path

import pytest

from swiftsure.serve import start
from tests.serve.upstreams import Upstream

PYTHON = "SWIFTSURE_LITELLM_PYTHON"
"""An interpreter with LiteLLM, in place of a new environment."""

SCRIPT = Path(__file__).parent / "litellm_script.py"

pytestmark = pytest.mark.slow


def truth(text):
    return "odd" if int(text.split()[-1]) % 2 else "even"


def small_answer(text):
    unsure = int(text.split()[-1]) % 5 == 0
    return truth(f"{int(text.split()[-1]) + unsure}"), 0.4 if unsure else 0.95


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return an interpreter with LiteLLM and, after it, all that is installed here."""
    if PYTHON in os.environ:
        return os.environ[PYTHON]
    folder = tmp_path_factory.mktemp("litellm")
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    install = [found, "-m", "pip", "install", "--quiet", "litellm"]
    if subprocess.run(install, capture_output=True, check=False).returncode:
        pytest.skip("LiteLLM cannot be installed here")
    (own,) = (folder / "lib").glob("python*/site-packages")
    more = [*site.getsitepackages(), str(Path(__file__).parents[2] / "src")]
    (own / "others.pth").write_text("\n".join(more) + "\n")
    return str(found)


@pytest.fixture(scope="module")
def found(python):
    """Return what the script printed, and what the two models were asked."""
    small = Upstream(small_answer, "small")
    large = Upstream(lambda text: (truth(text), 0.99), "large")
    with start(small.app) as one, start(large.app) as two:
        ran = subprocess.run(
            [python, SCRIPT, f"{one}/v1", f"{two}/v1"],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"},
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_litellms_models_make_a_cascade(found):
    assert found["record"] == 200
    assert 0.4 < found["threshold"] <= 0.95
    assert found["decisions"] == [["odd", 0], ["odd", 1]]


@pytest.mark.parametrize("way", ["completion", "acompletion", "router"])
def test_a_cascade_is_a_provider(found, way):
    assert found[way]["texts"] == ["odd", "odd", "even"]
    assert found[way]["models"] == ["small", "large", "small"]


def test_litellm_counts_the_whole_bill(found):
    both, small = found["costs"]
    assert both > 5 * small > 0


def test_streams(found):
    assert found["stream"] == "odd"


def test_other_parameters_and_messages_go_to_the_last_model(found):
    assert found["other"] == ["large", "large", "small"]
