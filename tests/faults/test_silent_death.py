"""An alarm must not die in silence: whatever hangs, fills up or steps, it or a fault is seen.

Seen means in `/health`, in the log and on the live page, within a minute. Here the intervals are
shorter, and so is the minute.
"""

import contextlib
import html
import http.client
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from swiftsure.certify.policy import Policy
from swiftsure.serve import (
    AuditLog,
    Comparison,
    Limits,
    PolicyManager,
    PolicyStore,
    WorkerEngine,
    audit_monitor,
    create_app,
    start,
)
from swiftsure.serve import (
    audit_log as audit_logs,
)
from tests.serve.builders import Adder, Client, policy_of, wait_until
from tests.serve.test_proxy import Setup
from tests.serve.upstreams import status

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("SWIFTSURE_SOAK_SECONDS", "60"))
SOON = 30.0
"""Seconds within which a fault must be seen; half a minute, for a busy machine."""
SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.faults import test_silent_death
test_silent_death.serve(sys.argv[2], int(sys.argv[3]))
"""
GONE = (OSError, http.client.HTTPException, ValueError)


class Told(Adder):
    """An engine whose early answers are as wrong as the request says."""

    def compare(self, sample, answer, loss):
        return Comparison(float(sample[0]))


def told():
    return Told(Policy.model_validate_json(os.environ["TOLD_POLICY"]))


def quicken():
    audit_logs.SETTLE, audit_logs.PAUSE, audit_logs.LATE = 0.2, 0.05, 1.0


def serve(folder, workers):
    """Serve until standard input ends; its lines set the clock ahead, in seconds."""
    quicken()
    ahead, real = [0.0], time.time
    time.time = lambda: real() + ahead[0]
    engines = [WorkerEngine(told, 1) for _ in range(workers)] or [told()]
    manager = PolicyManager(
        engines[0].policy,
        watch=lambda policy, _: AuditLog(policy, audit_monitor(policy, 1e-9), folder),
        store=PolicyStore(folder),
    )
    app = create_app(engines, Limits(timeout=1.0), manager=manager, audit_rate=1.0)
    with start(app) as address:
        print(address, *(engine.pid for engine in engines if workers), flush=True)
        for line in sys.stdin:
            ahead[0] = float(line)


class Server:
    """A server in a process of its own, with its log."""

    def __init__(self, folder, policy, workers=0):
        self.log = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(ROOT), str(folder), str(workers)],
            env=os.environ | {"TOLD_POLICY": policy.model_dump_json()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        address, *pids = self.process.stdout.readline().split() or [None]
        assert address, self.log
        self.client, self.pids = Client(address), [int(pid) for pid in pids]

    def _read(self):
        for line in self.process.stderr:
            self.log += line

    def predict(self, loss):
        with contextlib.suppress(*GONE):
            self.client.predict([loss, 0, 0])

    def set_clock(self, ahead):
        self.process.stdin.write(f"{ahead}\n")
        self.process.stdin.flush()

    def health(self):
        try:
            return self.client.get("/health")[1]
        except GONE:
            return {"status": "gone", "alarm": None, "fault": None, "policy": None}

    def shows(self):
        """What `/status`, the log and the page all show: an alarm, a fault, or nothing.

        `/health` shows the same without folders.
        """
        with contextlib.suppress(*GONE):
            status = self.client.get("/status")[1]
            found = status["alarm"] or status["fault"] or ""
            page = html.unescape(self.client.get("/")[1])
            health = self.health()
            if found in self.log and found in page and (health["alarm"] or health["fault"]):
                return found
        return ""

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        for pid in (self.process.pid, *self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(20)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()


class Disk:
    """A folder that can be filled: a small file system if possible, else a limit on files."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
        self.mounted = (
            shutil.which("mount") is not None
            and os.geteuid() == 0
            and subprocess.run(command, check=False, capture_output=True).returncode == 0
        )

    def fill(self, servers):
        if not self.mounted:
            self._limit(servers, 0)
            return
        with (
            contextlib.suppress(OSError),
            (self.folder / "junk").open("ab", buffering=0) as file,
        ):
            while file.write(bytes(1 << 16)) == 1 << 16:
                pass
            while file.write(b"0"):
                pass

    def free(self, servers):
        if not self.mounted:
            self._limit(servers, resource.RLIM_INFINITY)
        (self.folder / "junk").unlink(missing_ok=True)

    def _limit(self, servers, size):
        for server in servers:
            _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, hard))

    def close(self):
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)


@pytest.fixture
def disk(tmp_path):
    found = Disk(tmp_path / "state")
    yield found
    found.close()


@pytest.fixture(scope="module")
def policy():
    return policy_of()


@pytest.fixture
def servers():
    """A list of servers, which end with the test."""
    found = []
    yield found
    for server in found:
        server.end()


def wait_for(fact):
    wait_until(fact, SOON)


def test_a_stopped_server_that_holds_the_monitor(tmp_path, policy, servers):
    servers += [Server(tmp_path, policy) for _ in range(2)]
    holder, other = servers
    holder.signal(signal.SIGSTOP)
    for _ in range(100):
        other.predict(1.0)
    wait_for(lambda: "lines of the logs have waited" in other.shows())
    holder.signal(signal.SIGCONT)
    wait_for(lambda: all("Alarm at loss" in each.shows() for each in servers))


def test_a_server_that_is_stopped_and_killed_is_replaced(tmp_path, policy, servers):
    servers += [Server(tmp_path, policy) for _ in range(2)]
    holder, other = servers
    holder.signal(signal.SIGSTOP)
    for _ in range(100):
        other.predict(1.0)
    wait_for(other.shows)
    holder.signal(signal.SIGKILL)
    wait_for(lambda: "Alarm at loss" in other.shows())


def test_stopped_workers(tmp_path, policy, servers):
    servers.append(Server(tmp_path, policy, workers=2))
    (server,) = servers
    for count, words in ((1, "audits have waited"), (2, "the monitor has not run")):
        for pid in server.pids[:count]:
            os.kill(pid, signal.SIGSTOP)
        calls = [threading.Thread(target=server.predict, args=(0.0,)) for _ in range(40)]
        for call in calls:
            call.start()
        wait_for(lambda words=words: words in server.shows())
        for call in calls:
            call.join()
        for pid in server.pids:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: server.health()["status"] == "ok")


def test_a_full_disk_and_an_alarm_on_it(disk, policy, servers):
    servers.append(Server(disk.folder, policy))
    (server,) = servers
    for _ in range(5):
        server.predict(0.0)
    disk.fill(servers)
    for _ in range(30):
        server.predict(1.0)
    wait_for(lambda: "an audit was lost" in server.shows())
    disk.free(servers)
    for _ in range(100):
        server.predict(1.0)
    wait_for(lambda: "Alarm at loss" in server.shows())


@pytest.mark.parametrize("ahead", [86_400, -86_400, 30])
def test_clocks_that_step(tmp_path, policy, servers, ahead):
    servers += [Server(tmp_path, policy) for _ in range(2)]
    for server in servers:
        server.predict(0.0)
        server.set_clock(ahead)
        server.predict(0.0)
    servers[0].set_clock(0)
    for _ in range(60):
        for server in servers:
            server.predict(1.0)
    wait_for(lambda: all("Alarm at loss" in each.shows() for each in servers))


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_an_upstream_that(tmp_path, monkeypatch, caplog, fault):
    """Its audits wait, or are lost."""
    for name, value in (("SETTLE", 0.2), ("PAUSE", 0.05), ("LATE", 1.0)):
        monkeypatch.setattr(audit_logs, name, value)
    with ExitStack() as stack:
        setup = Setup(stack, tmp_path / "proxy", rate=1.0)
        if fault == "hangs":
            setup.large.delay = 5.0
        else:
            setup.large.faults["odd"] = status(500)
        for _ in range(4):
            setup.ask("Is it odd? 7")
        client = Client(setup.address)

        def seen():
            found = client.get("/health")[1]["fault"]
            page = html.unescape(client.get("/")[1])
            return found is not None and found in page and found in caplog.text

        wait_for(seen)
        setup.large.delay = 0.0
        setup.large.faults.clear()


def test_all_at_once(disk, policy, servers):
    """Rounds of random faults under load; set SWIFTSURE_SOAK_SECONDS=600 for ten minutes.

    A failed audit counts as the largest loss, but none of these faults makes one fail: it waits, or
    is lost, which is a fault. So losses stay as rare as the load has them, and there is no alarm.
    """
    rng, ended = np.random.default_rng(0), threading.Event()
    workers = (0, 0, 2)
    servers += [Server(disk.folder, policy, count) for count in workers]

    def load(k):
        """Load one server, since a stopped one must not hold up the load of the others."""
        draw = np.random.default_rng(k)
        while not ended.is_set():
            servers[k].predict(float(draw.random() < 0.01))  # a fifth of what is allowed
            time.sleep(0.005)

    def stop(k):
        servers[k].signal(signal.SIGSTOP)
        return lambda: servers[k].signal(signal.SIGCONT)

    def stop_worker(_):
        server = servers[2]
        pid = server.pids[rng.integers(2)]
        os.kill(pid, signal.SIGSTOP)
        return lambda: os.kill(pid, signal.SIGCONT)

    def kill(k):
        servers[k].end()

        def again():
            servers[k] = Server(disk.folder, policy, workers[k])

        return again

    def fill(_):
        disk.fill(servers)
        return lambda: disk.free(servers)

    def step(k):
        servers[k].set_clock(float(rng.choice([-86_400, -5, 5, 86_400])))
        return lambda: rng.random() < 0.5 and servers[k].set_clock(0.0)

    def well():
        return all(each.health()["status"] == "ok" for each in servers)

    threads = [threading.Thread(target=load, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    end, rounds = time.monotonic() + SECONDS, 0
    try:
        while time.monotonic() < end:
            faults = [
                fault for fault in (fill, stop, step, stop_worker, kill) if rng.random() < 0.5
            ]
            stopped, *rest = (int(k) for k in rng.permutation(2))
            undo, seen = [], {fill, stop_worker} & set(faults)
            for fault in faults:
                if fault is kill:  # one server is left in any case
                    undo.append(kill(rest[0]))
                else:
                    undo.append(fault(stopped if fault is stop else 2))
            if seen:
                wait_for(servers[2].shows)
            else:
                time.sleep(float(rng.uniform(0, 2)))
            for back in undo:
                back()
            wait_for(well)
            rounds += 1
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert rounds >= SECONDS / 60
    (folder,) = (each.parent for each in disk.folder.glob("*/monitor.json"))

    def settled():
        """Whether each complete line counts once."""
        written = sum(path.read_bytes().count(b"\n") for path in folder.glob("audits-*.jsonl"))
        return audit_logs.Watch.load(folder / "monitor.json").monitor.n == written > 0

    wait_for(settled)
    lines = [
        line for log in folder.glob("audits-*.jsonl") for line in log.read_bytes().splitlines()
    ]
    losses = [json.loads(line)["loss"] for line in lines]
    print(f"{rounds} rounds in {SECONDS:g} s, {len(losses)} audits, mean loss {np.mean(losses):g}")
    assert len(losses) > 20 * SECONDS
    assert np.mean(losses) < 0.02
    assert all(each.health()["alarm"] is None for each in servers)
    for _ in range(300):
        servers[rng.integers(3)].predict(1.0)
    wait_for(lambda: all("Alarm at loss" in each.shows() for each in servers))
