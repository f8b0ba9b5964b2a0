"""Audits off the request path, and an alarm that makes the full model answer and stays."""

import multiprocessing
import os
import resource
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
from scipy.stats import binomtest

from swiftsure.monitor import Monitor, Watch
from swiftsure.serve import (
    AuditLog,
    Batcher,
    Limits,
    PolicyManager,
    audit_monitor,
    create_app,
    start,
)
from swiftsure.serve.audit_log import resume
from swiftsure.serve.audits import Audited, Mode
from swiftsure.serve.engine import Answer
from tests.serve.builders import Adder, Client, lines, manager_of, policy_of, wait_until


@pytest.fixture(scope="module")
def policy():
    return policy_of()


def audit_log_of(engine, folder, alpha=0.01):
    return AuditLog(engine.policy, audit_monitor(engine.policy, alpha), folder)


@contextmanager
def full_disk(room=0):
    """Limit the size of files; Python turns the signal into an error."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def audited(exit_=0, request="same"):
    return Audited(request, np.zeros(3), Answer({}, exit_, 0.5, 0.0), None)


def test_an_alarm_falls_back_to_the_full_model_also_after_a_restart(tmp_path, policy, monkeypatch):
    monkeypatch.setattr("swiftsure.serve.audit_log.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.audit_log.PAUSE", 0.05)
    engine = Adder(policy)
    audit_log = audit_log_of(engine, tmp_path)
    limits = Limits(max_wait_ms=0)
    app = create_app(engine, limits, manager=manager_of(audit_log), audit_rate=1.0)
    with start(app) as address:
        client = Client(address)
        for _ in range(20):
            assert client.predict([1, 2, 3])[1]["exit"] == 0
        wait_until(lambda: audit_log.monitor.n == 20)
        assert client.get("/health")[1]["status"] == "ok"
        engine.wrong = 1.0  # the data change
        for _ in range(400):
            answer = client.predict([1, 2, 3])[1]
            if answer["full_model"]:
                break
        assert (answer["exit"], audit_log.monitor.alarm) == (2, True)
        health = client.get("/health")[1]
        assert health["status"] == "full model"
        assert "Alarm at loss" in health["alarm"]
        text = client.get("/metrics")[1]
        assert "swiftsure_alarm 1.0" in text
        assert "swiftsure_full_model 1.0" in text
        assert 'swiftsure_audits_total{result="failed"} 0.0' in text
        wait_until(lambda: app.state.service.batcher.audits.empty)
        made = audit_log.made
        client.predict([1, 2, 3])
    assert audit_log.made <= made + 1  # what the full model answered is not audited
    again = audit_log_of(engine, tmp_path)
    with start(create_app(engine, limits, manager=manager_of(again), audit_rate=1.0)) as address:
        assert Client(address).predict([1, 2, 3])[1]["exit"] == 2
        with pytest.raises(ValueError, match="locked"):
            resume(policy, tmp_path)
    assert audit_log_of(Adder(policy_of(epsilon=0.04)), tmp_path).fallback is None
    aside = resume(policy, tmp_path)
    assert (aside / "fallback.json").exists()
    fresh = audit_log_of(engine, tmp_path)
    assert (fresh.fallback, fresh.monitor.n) == (None, 0)


def test_a_damaged_fallback_still_falls_back(tmp_path, policy):
    audit_log = audit_log_of(Adder(policy), tmp_path)
    (audit_log.folder / "fallback.json").write_text("{")
    audit_log.close()
    assert "cannot be read" in audit_log_of(Adder(policy), tmp_path).fallback["reason"]


def test_failed_audits_count_as_the_largest_loss(tmp_path, policy):
    engine = Adder(policy)
    audit_log = audit_log_of(engine, tmp_path)
    audit_log.audit(audited(), engine)
    # Neither model answers the second request; the third, only the policy does not answer.
    audit_log.audit(Audited("invalid", -np.ones(3), None, None), engine)
    audit_log.audit(Audited("lost", np.zeros(3), None, None), engine)
    engine.audit_fails = True
    audit_log.audit(audited(), engine)
    audit_log.close()
    assert [line["loss"] for line in lines(audit_log.folder)] == [0.0, 0.0, 1.0, 1.0]
    assert (audit_log.made, audit_log.failed, audit_log.monitor.n) == (3, 1, 4)
    assert len({line["id"] for line in lines(audit_log.folder)}) == 4  # whatever clients call them


def test_a_failed_audit_of_a_gap_is_never_a_gain(tmp_path):
    engine = Adder(policy_of("gap"))
    audit_log = AuditLog(engine.policy, audit_monitor(engine.policy, 0.01, labels=True), tmp_path)
    engine.audit_fails = True
    audit_log.audit(audited(), engine)
    audit_log.audit(Audited("invalid", -np.ones(3), None, None), engine)
    audit_log.close()
    assert [line["loss"] for line in lines(audit_log.folder)] == [1.0, 0.0]


def test_audits_that_all_fail_raise_an_alarm_that_says_so(tmp_path, policy):
    engine = Adder(policy)
    engine.audit_fails = True
    audit_log = audit_log_of(engine, tmp_path)
    for _ in range(50):
        audit_log.audit(audited(), engine)
    audit_log.close()
    assert "50 audits failed in this server" in audit_log.fallback["reason"]


def test_an_alarm_holds_although_nothing_is_audited(tmp_path, policy):
    engine = Adder(policy)
    engine.wrong = 1.0
    audit_log = audit_log_of(engine, tmp_path)
    for _ in range(200):
        audit_log.audit(audited(), engine)
    audit_log.close()
    (audit_log.folder / "monitor.json").unlink()
    manager = PolicyManager(policy, watch=lambda each, _: AuditLog(each, None, tmp_path))
    assert (manager.state, manager.audit_log.monitor) == ("full model", None)
    with start(create_app(engine, manager=manager)) as address:
        client = Client(address)
        assert client.predict([1, 2, 3])[1]["full_model"]
        assert client.get("/status")[1]["monitor"] is None
        assert client.get("/metrics")[0] == 200
        assert client.get("/labels")[0] == 409
    with pytest.raises(ValueError, match="needs a manager that watches"):
        create_app(engine, manager=manager, audit_rate=0.5)
    assert manager.resume()
    assert (manager.state, manager.alarm) == ("ok", None)
    manager.close()


@pytest.mark.parametrize(
    "line",
    [
        *(b"5", b"[]", b"null", b'{"served": 5}', b'{"request": "a", "served": []}'),
        *(b"[" * 100_000, b"\xff", b'{"id": [], "loss": 0}'),
    ],
)
def test_a_damaged_line_does_not_hide_what_needs_a_label(tmp_path, line):
    engine = Adder(policy_of("gap"))
    engine.wrong = 1.0
    audit_log = AuditLog(engine.policy, audit_monitor(engine.policy, 0.01, labels=True), tmp_path)
    (audit_log.folder / "audits-0.jsonl").write_bytes(line + b"\n")
    audit_log.audit(audited(request="r"), engine)
    assert audit_log.unlabelled() == ["r"]
    assert audit_log.label({"r": 1}) == {"r": "added"}
    audit_log.close()
    assert audit_log.fault is not None  # and it is seen


def test_processes_share_one_monitor(tmp_path, policy):
    engine = Adder(policy)
    one, two = audit_log_of(engine, tmp_path), audit_log_of(engine, tmp_path)
    for _ in range(5):
        one.audit(audited(), engine)
        two.audit(audited(), engine)
    two.close()  # does not hold the lock, so only the first one folds
    assert two.monitor.n == 0
    one.close()
    assert one.monitor.n == 10
    three = audit_log_of(engine, tmp_path)
    assert three.monitor.n == 10
    three.close()


def test_an_alarm_of_another_process_is_obeyed(tmp_path, policy):
    engine = Adder(policy)
    one, two = audit_log_of(engine, tmp_path), audit_log_of(engine, tmp_path)
    engine.wrong = 1.0
    for _ in range(200):
        two.audit(audited(), engine)
    one.close()
    assert two.fallback is None
    two.close()
    assert two.fallback == one.fallback != None  # noqa: E711
    assert two.monitor.alarm


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_lose_no_acknowledged_audit_and_double_none(tmp_path, policy, monkeypatch, kills):
    monkeypatch.setattr("swiftsure.serve.audit_log.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.audit_log.PAUSE", 0.005)
    context = multiprocessing.get_context("fork")
    # Without a lock, which a process that is killed would never give back.
    acknowledged = context.Value("i", 0, lock=False)

    def work():
        engine = Adder(policy)
        audit_log = audit_log_of(engine, tmp_path)
        for _ in range(1000):
            audit_log.audit(audited(), engine)
            acknowledged.value += 1
            audit_log.tick()

    rng = np.random.default_rng(0)
    for _ in range(kills):
        process = context.Process(target=work)
        process.start()
        time.sleep(float(rng.uniform(0.02, 0.15)))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    audit_log = audit_log_of(Adder(policy), tmp_path)
    audit_log.close()
    written = len(lines(audit_log.folder))
    assert audit_log.fault is None
    assert acknowledged.value <= written <= acknowledged.value + kills
    assert audit_log.monitor.n == written > 0
    assert Watch.load(audit_log.folder / "monitor.json").monitor.n == written


def test_audits_are_dropped_by_load_alone_and_counted(policy):
    """Chosen and dropped when a request is accepted, before anything is known about it."""
    engine, seen = Adder(policy), []
    batcher = Batcher(
        engine,
        Limits(max_batch=4, max_queue=500, max_audits=10),
        audit_rate=0.5,
        on_audit=lambda audited, _: seen.append(audited),
    )
    engine.gate.clear()
    futures = [batcher.submit(str(k), np.full(3, k, np.float32)) for k in range(400)]
    dropped = batcher.dropped
    engine.gate.set()
    batcher.close()
    assert all(
        future.result().answer.content["outputs"] == 3 * k for k, future in enumerate(futures)
    )
    assert [int(each.request) for each in seen] == sorted(int(each.request) for each in seen)
    assert len(seen) == 10
    assert dropped == batcher.dropped
    assert binomtest(len(seen) + dropped, 400, 0.5).pvalue > 1e-6


def test_an_audit_under_way_when_its_policy_is_replaced_leaves_no_file_open(policy, tmp_path):
    engine = Adder(policy)
    audit_log = audit_log_of(engine, tmp_path)
    audit_log.close()
    sample = np.zeros(3, np.float32)
    answer = engine.answer([sample], full=False)[0]
    audit_log.audit(Audited("late", sample, answer, Mode(policy)), engine)
    assert audit_log._log is None
    assert [line["id"] for line in lines(audit_log.folder)]


def test_an_audit_that_raises_does_not_end_the_service(policy, caplog):
    def broken(*_):
        raise TypeError("a bug")

    batcher = Batcher(Adder(policy), audit_rate=1.0, on_audit=broken, on_idle=broken)
    for k in range(3):
        assert (
            batcher.submit(str(k), np.zeros(3, np.float32)).result(5).answer.content["outputs"] == 0
        )
    batcher.close()
    assert "a bug" in caplog.text


def test_withdrawn_requests_give_their_place_back(policy):
    engine, seen = Adder(policy), []
    batcher = Batcher(
        engine,
        Limits(max_batch=1, max_audits=2),
        audit_rate=1.0,
        on_audit=lambda audited, _: seen.append(audited),
    )
    engine.gate.clear()
    first = batcher.submit("0", np.zeros(3, np.float32))
    wait_until(lambda: batcher.depth == 0)
    assert batcher.submit("1", np.zeros(3, np.float32)).cancel()
    engine.gate.set()
    first.result()
    wait_until(lambda: len(seen) == 1)
    batcher.submit("2", np.zeros(3, np.float32)).result()
    batcher.submit("3", np.zeros(3, np.float32)).result()
    batcher.close()
    assert [each.request for each in seen] == ["0", "2", "3"]
    assert batcher.dropped == 0


def test_false_alarms_are_rare_through_logs_and_monitor(tmp_path, policy):
    """Losses at exactly ε, read from a log by the audit log, at α = 0.2."""
    rng, alarms, runs = np.random.default_rng(0), 0, 40
    for run in range(runs):
        engine = Adder(policy)
        audit_log = audit_log_of(engine, tmp_path / str(run), alpha=0.2)
        path = audit_log.folder / "audits-0.jsonl"
        losses = rng.random(400) < audit_log.monitor.epsilon
        path.write_text("".join(f'{{"loss": {int(loss)}}}\n' for loss in losses))
        audit_log.close()
        assert audit_log.monitor.n == audit_log.monitor.alarm_at or audit_log.monitor.n == 400
        alarms += audit_log.fallback is not None
    assert binomtest(alarms, runs, 0.2, alternative="greater").pvalue > 1e-6


def test_what_is_watched():
    gap = policy_of("gap")
    with pytest.raises(ValueError, match="`epsilon`, the largest inconsistency"):
        audit_monitor(gap, 0.01)
    monitor = audit_monitor(gap, 0.01, 0.2)
    assert (monitor.epsilon, monitor.risk, monitor.loss_range.low) == (0.2, "consistency", 0.0)
    with pytest.raises(ValueError, match="`epsilon` must not be given"):
        audit_monitor(policy_of(), 0.01, 0.2)


@pytest.mark.parametrize(("risk", "labels"), [("consistency", False), ("gap", True)])
@pytest.mark.parametrize(
    ("kind", "words"), [({"among": "exits"}, "samples that exit early"), ({"worst": 0.5}, "worst")]
)
def test_promises_that_audits_cannot_watch_are_refused(tmp_path, risk, labels, kind, words):
    """Audits see requests that run in full too, and one mean says nothing of a worst share."""
    policy = policy_of(risk, 0.3, **kind)
    with pytest.raises(ValueError, match=words):
        audit_monitor(policy, 0.01, labels=labels)

    def watch(each, _):
        return AuditLog(each, audit_monitor(each, 0.01, labels=labels), tmp_path)

    watchable = policy_of(risk)
    manager = PolicyManager(watchable, watch=watch)
    with pytest.raises(ValueError, match=words):
        manager.install(policy)
    assert manager.policy == watchable
    manager.close()


def test_a_failed_audit_of_a_tail_is_above_its_limit(tmp_path):
    engine = Adder(policy_of(loss="brier", epsilon=0.1, above=1.2))
    engine.audit_fails = True
    audit_log = audit_log_of(engine, tmp_path)
    audit_log.audit(audited(), engine)
    audit_log.close()
    assert (audit_log.monitor.n, audit_log.monitor.mean) == (1, 1.0)


def test_an_audit_that_the_disk_cuts_short_does_not_count_and_spoils_no_other(tmp_path, policy):
    engine = Adder(policy)
    audit_log = audit_log_of(engine, tmp_path)
    audit_log.audit(audited(), engine)
    (log,) = audit_log.folder.glob("audits-*.jsonl")
    with full_disk(log.stat().st_size + 10):
        audit_log.audit(audited(), engine)  # ten bytes of it fit
    assert (audit_log.made, audit_log.failed) == (1, 1)
    assert "no room" in audit_log.fault
    audit_log._look(time.time())  # which works: the audit is lost all the same
    assert "no room" in audit_log.fault
    audit_log.audit(audited(), engine)
    assert (audit_log.made, audit_log.failed, audit_log.fault) == (2, 1, None)
    assert all(line.startswith(b'{"id"') for line in log.read_bytes().splitlines())
    audit_log.close()
    assert (audit_log.monitor.n, audit_log.fault) == (2, None)


def test_another_risk_in_the_same_folder_is_a_fault(tmp_path, policy):
    engine = Adder(policy)
    audit_log = audit_log_of(engine, tmp_path)
    audit_log.audit(audited(), engine)
    audit_log.close()
    other = AuditLog(policy, Monitor(0.3, risk="consistency", loss="zero_one"), tmp_path)
    assert "watches another risk" in other.fault


def test_an_alarm_takes_effect_although_it_cannot_be_stored(tmp_path, policy):
    engine = Adder(policy)
    manager = PolicyManager(policy, watch=lambda *_: audit_log_of(engine, tmp_path))
    audit_log, engine.wrong = manager.audit_log, 1.0
    for _ in range(200):
        audit_log.audit(audited(), engine)
    with full_disk():
        audit_log._look(time.time())
        manager.tick()
        assert (manager.state, manager.mode.full) == ("full model", True)
        assert "Alarm at loss" in manager.alarm
        assert "could not be written" in manager.fault
    audit_log._look(time.time())
    assert manager.fault is None
    assert (audit_log.folder / "fallback.json").exists()
    saved = Watch.load(audit_log.folder / "monitor.json").monitor
    assert (saved.n, saved.alarm) == (audit_log.monitor.n, True)
    manager.close()


def test_a_state_that_was_not_saved_is_saved_without_new_lines(tmp_path, policy):
    engine = Adder(policy)
    audit_log = audit_log_of(engine, tmp_path)
    audit_log.audit(audited(), engine)
    with full_disk():
        audit_log._look(time.time())
    assert not (audit_log.folder / "monitor.json").exists()
    audit_log.close()
    assert Watch.load(audit_log.folder / "monitor.json").monitor.n == 1


@pytest.mark.parametrize("wrong", [86_400.0, -86_400.0])
def test_a_clock_that_steps_delays_no_alarm(tmp_path, policy, monkeypatch, wrong):
    """A day ahead or back for some audits, also if the monitor read them by that clock."""
    engine, real = Adder(policy), time.time
    for read in (False, True):
        audit_log = audit_log_of(engine, tmp_path / str(read))
        for k in range(11):
            with monkeypatch.context() as patch:
                if k >= 10:
                    patch.setattr(time, "time", lambda: real() + wrong)
                audit_log.audit(audited(), engine)
                if read:
                    audit_log._look(time.time())
        engine.wrong = 1.0
        for _ in range(200):
            audit_log.audit(audited(), engine)
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: real() + 3.0)
            audit_log._look(time.time() - 2.0)
        assert audit_log.monitor.alarm
        audit_log.close()
        again = audit_log_of(engine, tmp_path / str(read))
        assert again.monitor.alarm
        again.close()
        engine.wrong = 0.0


def test_lines_that_nobody_reads_are_a_fault_of_every_server(tmp_path, policy, monkeypatch):
    monkeypatch.setattr("swiftsure.serve.audit_log.LATE", 0.1)
    engine = Adder(policy)
    one, two, idle = (audit_log_of(engine, tmp_path) for _ in range(3))  # the first holds the lock
    two.audit(audited(), engine)
    with next(two.folder.glob("audits-*.jsonl")).with_name("audits-cut.jsonl").open("w") as file:
        file.write('{"id": "cut short by a ki')
    for audit_log in (two, idle):
        audit_log._look(time.time())
        assert audit_log.fault is None  # not yet
    time.sleep(0.15)
    for audit_log in (two, idle):
        audit_log._look(time.time())
        assert "lines of the logs have waited" in audit_log.fault
    one._look(time.time())  # it goes on
    for audit_log in (one, two, idle):
        audit_log._look(time.time())
        assert audit_log.fault is None
        time.sleep(0.06)
    assert two.monitor.n == 1
    one.close()
    two.close()


def test_audits_that_fail_in_a_row_are_a_fault(tmp_path, policy):
    engine = Adder(policy)
    audit_log, engine.audit_fails = audit_log_of(engine, tmp_path), True
    for k in range(3):
        assert audit_log.fault is None
        audit_log.audit(audited(), engine)
        assert audit_log.failed == k + 1
    assert "the last 3 audits failed" in audit_log.fault
    engine.audit_fails = False
    audit_log.audit(audited(), engine)
    assert audit_log.fault is None
    audit_log.close()


def test_a_model_that_hangs_is_a_fault(tmp_path, policy, monkeypatch, caplog):
    monkeypatch.setattr("swiftsure.serve.audit_log.LATE", 0.5)
    monkeypatch.setattr("swiftsure.serve.audit_log.PAUSE", 0.05)
    engine = Adder(policy)
    engine.lanes = 2
    manager = manager_of(audit_log_of(engine, tmp_path))
    app = create_app(engine, Limits(max_batch=1, timeout=0.2), manager=manager, audit_rate=1.0)
    with start(app) as address:
        client = Client(address)
        engine.gate.clear()
        assert client.predict([1, 2, 3])[0] == 504  # one lane hangs, and its audit never comes
        wait_until(lambda: "audits have waited" in (client.get("/health")[1]["fault"] or ""))
        assert client.get("/status")[1]["headline"] == "The monitor does not work."
        client.predict([1, 2, 3])  # the other one too
        wait_until(lambda: "the monitor has not run" in (client.get("/health")[1]["fault"] or ""))
        assert "swiftsure_monitor_fault 1.0" in client.get("/metrics")[1]
        wait_until(lambda: "the monitor has not run" in caplog.text)
        assert "audits have waited" in caplog.text
        engine.gate.set()
        wait_until(lambda: client.get("/health")[1]["status"] == "ok")


def test_only_the_server_that_holds_the_monitor_resumes(tmp_path, policy, monkeypatch):
    monkeypatch.setattr("swiftsure.serve.audit_log.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.audit_log.PAUSE", 0.02)
    engine = Adder(policy)
    holder, other = (
        PolicyManager(
            policy, watch=lambda each, _: AuditLog(each, audit_monitor(each, 0.01), tmp_path)
        )
        for _ in range(2)
    )
    app = create_app(engine, Limits(), manager=other, audit_rate=1.0, token="t")
    with start(app) as address:
        client, engine.wrong = Client(address, "t"), 1.0
        while not client.predict([1, 2, 3])[1]["full_model"]:
            holder.tick()
        status, found = client.send("POST", "/resume")
        assert (status, "locked by another process" in found["error"]) == (409, True)
        assert client.get("/health")[1]["status"] == "full model"
        engine.wrong = 0.0
        assert holder.resume()
        wait_until(lambda: client.get("/health")[1]["status"] == "ok")
        made = other.audit_log.made
        client.predict([1, 2, 3])
        wait_until(lambda: other.audit_log.made == made + 1)
        wait_until(lambda: holder.tick() or holder.audit_log.monitor.n == 1)
        assert (other.fault, holder.fault) == (None, None)
    holder.close()


def test_an_audit_that_is_not_json_is_lost_and_seen(tmp_path, policy, monkeypatch):
    engine = Adder(policy)
    audit_log = audit_log_of(engine, tmp_path)
    monkeypatch.setattr(audit_log, "_found", lambda _: {"loss": np.ones(3)})
    audit_log.audit(audited(), engine)
    assert (audit_log.made, audit_log.failed) == (0, 1)
    assert "an audit was lost" in audit_log.fault
    audit_log.close()


def test_a_log_that_was_deleted_is_a_fault(tmp_path, policy):
    engine = Adder(policy)
    audit_log = audit_log_of(engine, tmp_path)
    audit_log.audit(audited(), engine)
    audit_log._look(time.time())
    next(audit_log.folder.glob("audits-*.jsonl")).unlink()
    audit_log.audit(audited(), engine)
    audit_log._look(time.time())
    assert "is not the log that was read before" in audit_log.fault
    audit_log.close()
