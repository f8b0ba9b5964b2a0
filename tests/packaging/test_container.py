"""The container's steps, in an environment of their own: Docker itself need not be here."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.request
import venv
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]


def instructions():
    """The lines of the Dockerfile: their names and arguments."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [each for each in text.splitlines() if each and not each.startswith("#")]
    return [tuple(each.split(maxsplit=1)) for each in lines]


def arguments(name):
    return [argument for each, argument in instructions() if each == name]


def service():
    return yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"][
        "swiftsure"
    ]


def test_only_what_the_image_needs_is_sent_to_docker():
    sources = {each for copied in arguments("COPY") for each in copied.split()[:-1]}
    assert all((ROOT / each).exists() for each in sources)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {each.removeprefix("!") for each in ignored if each.startswith("!")} == sources


def test_the_image_is_of_a_python_that_the_library_supports():
    (image,) = arguments("FROM")
    version = re.fullmatch(r"python:(3\.\d+)-slim", image)[1]
    assert f'"Programming Language :: Python :: {version}"' in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def image(tmp_path):
    """A folder in which the steps were run, and the variables of the environment."""
    pytest.importorskip("hatchling")
    pytest.importorskip("torch")
    folder, app = tmp_path / "environment", tmp_path / "app"
    venv.create(folder, with_pip=True)
    # An old setuptools would hide the one that PyTorch depends on.
    pip = (folder / "bin" / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")
    subprocess.run(pip, check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    app.mkdir()
    for copied in arguments("COPY"):
        *sources, _ = copied.split()
        for each in sources:
            if (ROOT / each).is_dir():
                shutil.copytree(ROOT / each, app / each)
            else:
                shutil.copy(ROOT / each, app)
    given = dict(each.split("=", 1) for each in arguments("ARG"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {key: value.strip('"') for key, value in given.items()}
    environment |= {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",  # what it depends on is in the environment that runs the tests
        "PIP_NO_BUILD_ISOLATION": "0",  # which means no isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    install, state = arguments("RUN")
    assert state == "mkdir -p /state && chown nobody /state"
    steps = ["bash", "-c", install]
    done = subprocess.run(steps, cwd=app, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return app, environment


@pytest.mark.slow
def test_the_steps_serve_the_demonstration(image, tmp_path):
    app, environment = image
    shutil.rmtree(app / "src")  # what runs is what was installed
    (entry,) = map(json.loads, arguments("ENTRYPOINT"))
    command = [
        str(tmp_path / "state") if each == "/state" else each for each in service()["command"]
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    running = subprocess.Popen(
        [*entry, *command, "--host", "127.0.0.1", "--port", port], cwd=app, env=environment
    )
    try:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 120
        while True:
            try:
                health = json.load(urllib.request.urlopen(f"{address}/health", timeout=10))
                break
            except OSError:
                assert running.poll() is None
                assert time.monotonic() < end
                time.sleep(0.2)
        assert health["status"] == "ok"
        document = json.load(urllib.request.urlopen(f"{address}/openapi.json", timeout=10))
        assert "/predict" in document["paths"]
        (check,) = arguments("HEALTHCHECK")
        probe = shlex.split(check.removeprefix("CMD ").replace("8000", port))
        subprocess.run(probe, env=environment, check=True)
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) in (0, -signal.SIGTERM)  # which uvicorn raises again
    assert any((tmp_path / "state").iterdir())
