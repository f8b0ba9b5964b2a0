"""The alarm drill of the docs: noisy images raise an alarm, and the full model answers."""

import json
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from swiftsure import demo
from swiftsure.serve import AuditLog, Limits, audit_monitor, create_app, drill, start
from tests.serve.builders import Client, manager_of


def demo_engine():
    from swiftsure.serve.loading import demo_engine as load_demo

    torch.set_num_threads(1)
    return load_demo()


@pytest.mark.slow
def test_noisy_images_raise_an_alarm_and_the_server_falls_back(tmp_path, monkeypatch):
    from swiftsure.demo.network import prepared

    monkeypatch.setattr("swiftsure.serve.audit_log.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.audit_log.PAUSE", 0.05)
    engine = demo_engine()
    audit_log = AuditLog(engine.policy, audit_monitor(engine.policy, 0.01), tmp_path)
    app = create_app(engine, Limits(max_wait_ms=0), manager=manager_of(audit_log), audit_rate=1.0)
    images = prepared(demo.sample_images().images).numpy()
    with start(app) as address:
        found = drill(address, images, clean=100, most=3000)
        assert found.fallback_after is not None
        assert 0 < found.fallback_after < 2000
        assert Client(address).get("/health")[1]["status"] == "full model"
        assert Client(address).predict(images[0].tolist())[1]["exit"] == 3


@pytest.mark.slow
def test_the_command_serves_and_ends_on_a_signal(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code = "from swiftsure.cli import main; main()"
    options = ["serve", "--demo", "--port", str(port), "--audit", "1", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        client = Client(f"http://127.0.0.1:{port}")
        answer = None
        for _ in range(300):
            try:
                answer = client.predict([[[0.0] * 28] * 28] * 3)
                break
            except ConnectionError:
                assert process.poll() is None
                time.sleep(0.1)
        assert answer is not None
        assert answer[0] == 200
        assert len(answer[1]["outputs"]) == 10
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    started = json.loads(out)
    assert started["alarm"] is None
    # The audit was made before the end.
    (log,) = (tmp_path / "serving").glob("*/audits-*.jsonl")
    assert json.loads(log.read_text())["request"] == answer[1]["id"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("folder", "--demo"),
        ("folder", "--drift"),
        ("no folder",),
        ("--demo", "--max-batch", "0"),
        ("--demo", "--max-wait-ms", "-1"),
        ("--demo", "--timeout", "0"),
        ("--demo", "--audit", "2"),
    ],
)
def test_bad_usage(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from typer.testing import CliRunner

    from swiftsure.cli.app import app

    done = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(done.exception, ValueError)


def test_without_its_extra_the_error_says_what_to_install():
    code = "import sys; sys.modules['starlette'] = None\nimport swiftsure.serve"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "pip install 'swiftsure[serve]'" in done.stderr
