"""kill -9 of a whole server, with its workers, at random moments under load."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from swiftsure.certify.policy import Policy
from swiftsure.monitor import Watch
from swiftsure.serve import AuditLog, WorkerEngine, audit_monitor
from tests.serve.builders import Adder, Client, lines, policy_of, wait_until

ROOT = Path(__file__).parents[2]
SERVE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from tests.serve import test_kills
from swiftsure.cli import main
from swiftsure.serve import loading
loading.load_engines = test_kills.adders
main()
"""
GONE = (OSError, http.client.HTTPException, ValueError)


def adder():
    return Adder(Policy.model_validate_json(os.environ["ADDER_POLICY"]))


def adders(_folder, workers, _network):
    """Stand for `load_engines`: workers that start within a second."""
    return [WorkerEngine(adder, 1) for _ in range(workers)]


class Server:
    """`swiftsure serve` in a process group of its own, under load from three clients."""

    def __init__(self, folder, policy):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.client = Client(f"http://127.0.0.1:{port}")
        self.seen = set()  # requests whose audit the server reported
        self.made = self.n = 0
        options = ["--workers", "2", "--audit", "1", "--state", folder, "--port", str(port)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(ROOT), "serve", "--demo", "--json", *options],
            env=os.environ | {"ADDER_POLICY": policy.model_dump_json()},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.threads = [
            threading.Thread(target=work) for work in (self._ask, self._ask, self._ask, self._look)
        ]

    def load(self):
        """Wait for the server, then send requests until it is gone."""
        wait_until(self._answers, 60)
        for thread in self.threads:
            thread.start()

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()

    def _answers(self):
        assert self.process.poll() is None
        try:
            return self.client.get("/health")[0] == 200
        except GONE:
            return False

    def _ask(self):
        try:
            while True:
                assert self.client.predict([1, 2, 3])[0] == 200
        except GONE:
            pass

    def _look(self):
        try:
            while True:
                status, text = self.client.get("/status")[1], self.client.get("/metrics")[1]
                self.seen |= {each["request"] for each in status["recent"]}
                self.n = status["monitor"]["n"]
                made = re.search(r'audits_total{result="made"} (\S+)', text)
                self.made = int(float(made[1]))
                time.sleep(0.01)
        except GONE:
            pass


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_of_a_whole_server_lose_and_double_no_observation(tmp_path, kills):
    policy, rng = policy_of(), np.random.default_rng(0)
    seen, made, n = set(), 0, 0
    for kill in range(kills):
        server = Server(tmp_path, policy)
        try:
            if kill % 5 == 4:  # while it starts
                time.sleep(float(rng.uniform(0, 1.5)))
            else:
                server.load()
                time.sleep(float(rng.uniform(0, 0.8)))
        finally:
            server.kill()
        seen |= server.seen
        made, n = made + server.made, max(n, server.n)
        for path in tmp_path.glob("*/*.json"):  # no state file is broken
            json.loads(path.read_text())
    audit_log = AuditLog(policy, audit_monitor(policy, 0.01), tmp_path)
    audit_log.close()
    written = lines(audit_log.folder)
    assert (audit_log.fault, audit_log.fallback) == (None, None)
    assert seen <= {each["request"] for each in written}
    assert len({each["id"] for each in written}) == len(written) >= max(made, n, 1)
    assert audit_log.monitor.n == len(written)
    assert Watch.load(audit_log.folder / "monitor.json").monitor.n == len(written)
