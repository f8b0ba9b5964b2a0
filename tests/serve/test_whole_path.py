"""False alarms and delays through the whole path: servers, audits, logs, monitor."""

import asyncio
import json

import numpy as np
import pytest
from scipy.stats import binomtest

from swiftsure.monitor import Monitor, Watch
from swiftsure.serve import Comparison, Limits, audit_monitor, create_app
from swiftsure.serve.audit_log import AuditLog
from tests.serve.builders import Adder, manager_of, policy_of

ALPHA = 0.2


class Drawing(Adder):
    """An engine whose early answers are wrong at random."""

    def __init__(self, policy, rate, rng):
        super().__init__(policy)
        self.rate, self.rng = rate, rng

    def compare(self, sample, answer, loss):
        return Comparison(float(self.rng.random() < self.rate))


class Picky(Drawing):
    """Broken on purpose: half of the audits of right answers are left out for the next one."""

    def compare(self, sample, answer, loss):
        while not (found := super().compare(sample, answer, loss)).inconsistency:
            if self.rng.random() < 0.5:
                break
        return found


@pytest.fixture(scope="module")
def policy():
    return policy_of(epsilon=0.1)


def serve(engines, folder, n, monkeypatch):
    """Send n requests to two servers with one folder in turn; return their audit_logs."""
    monkeypatch.setattr("swiftsure.serve.audit_log.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.audit_log.PAUSE", 0.0)
    monkeypatch.setattr("swiftsure.serve.audit_log.os.fsync", lambda _: None)  # for speed
    audit_logs = [
        AuditLog(engine.policy, audit_monitor(engine.policy, ALPHA), folder) for engine in engines
    ]
    limits = Limits(max_wait_ms=0, max_audits=8)

    async def send():
        apps = [
            create_app(engine, limits, manager=manager_of(audit_log), audit_rate=0.7)
            for engine, audit_log in zip(engines, audit_logs, strict=True)
        ]
        first, second = (app.router.lifespan_context(app) for app in apps)
        async with first, second:
            for _ in range(0, n, 8):
                found = await asyncio.gather(*(post(apps[j % 2]) for j in range(8)))
                assert all(status == 200 for status, _ in found)
                if any(content["full_model"] for _, content in found):
                    break

    asyncio.run(send())
    return audit_logs


async def post(app):
    """Send one request without a socket; return (status, content)."""
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers}
    scope |= {"query_string": b"", "app": app}
    sent = []

    async def receive():
        return {"type": "http.request", "body": b'{"inputs": [1, 2, 3]}', "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def alarms(kind, rate, runs, n, tmp_path, policy, monkeypatch):
    rng, count = np.random.default_rng(1), 0
    for run in range(runs):
        engines = [kind(policy, rate, rng) for _ in range(2)]
        audit_logs = serve(engines, tmp_path / str(run), n, monkeypatch)
        assert all(audit_log.fault is None for audit_log in audit_logs)
        count += any(audit_log.monitor.alarm for audit_log in audit_logs)
    return binomtest(count, runs, ALPHA, alternative="greater").pvalue


@pytest.mark.slow
def test_false_alarms_through_the_whole_path(tmp_path, policy, monkeypatch):
    assert alarms(Drawing, 0.1, 150, 400, tmp_path, policy, monkeypatch) > 1e-6


@pytest.mark.slow
def test_audits_that_choose_by_their_result_are_found_out(tmp_path, policy, monkeypatch):
    assert alarms(Picky, 0.1, 40, 400, tmp_path, policy, monkeypatch) < 1e-6


def test_the_alarm_comes_as_in_a_monitor_alone(tmp_path, policy, monkeypatch):
    rng = np.random.default_rng(2)
    engines = [Drawing(policy, 0.5, rng) for _ in range(2)]
    audit_logs = serve(engines, tmp_path, 2000, monkeypatch)
    folded = Watch.load(audit_logs[0].folder / "monitor.json").monitor
    assert folded.alarm
    alone = Monitor(policy.certificate.promises[0].epsilon, ALPHA)
    for line in ordered_losses(audit_logs[0].folder):
        if alone.update(line):
            break
    assert folded.alarm_at == alone.alarm_at
    assert folded.evidence == alone.evidence


def ordered_losses(folder):
    lines = [
        json.loads(line)
        for file in folder.glob("audits-*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return [each["loss"] for each in sorted(lines, key=lambda each: (each["time"], each["id"]))]
