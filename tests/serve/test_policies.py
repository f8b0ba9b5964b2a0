"""Policies that are installed while a server runs, fallbacks after an alarm, and late labels."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from swiftsure.certify.policy import Policy
from swiftsure.serve import (
    AuditLog,
    Limits,
    PolicyManager,
    PolicyStore,
    audit_monitor,
    create_app,
    start,
)
from tests.serve.builders import Adder, Client, policy_of
from tests.serve.test_audit_log import audited, wait_until

NOW = Limits(max_wait_ms=0)


@pytest.fixture(scope="module")
def policy():
    return policy_of()


@pytest.fixture(scope="module")
def safer():
    return policy_of(epsilon=0.02)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("swiftsure.serve.audit_log.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.audit_log.PAUSE", 0.02)


def watch_in(folder, **options):
    return lambda each, _: AuditLog(each, audit_monitor(each, 0.01, **options), folder)


def body_of(policy, tmp_path):
    policy.save(tmp_path / "sent.json")
    return (tmp_path / "sent.json").read_bytes()


def test_a_policy_is_installed_with_a_token_and_stays(tmp_path, policy, safer):
    engine, store = Adder(policy), PolicyStore(tmp_path / "state")
    app = create_app(engine, NOW, manager=PolicyManager(policy, store=store), token="secret")
    with start(app) as address:
        client = Client(address, "secret")
        assert client.get("/policy")[1]["number"] == 1
        body = body_of(safer, tmp_path)
        assert Client(address).send("POST", "/policy", body)[0] == 401
        status, found = client.send("POST", "/policy", body)
        assert (status, found["number"], found["sentence"]) == (200, 2, str(safer))
        assert client.send("POST", "/policy", body)[1]["number"] == 2  # it is in force already
        assert client.predict([1, 2, 3])[0] == 200
        assert engine.policy == safer
        for bad in (b"", b"{}", b"[1]", body.replace(b"0.02", b"0.01"), body[:-9]):
            status, found = client.send("POST", "/policy", bad)
            assert (status, "tmp" in found["error"]) == (422, False)
        other = body_of(policy_of(epsilon=0.6), tmp_path)
        assert client.send("POST", "/policy", other)[0] == 422  # the engine refuses it
        assert client.get("/health")[1]["policy_number"] == 2
    again = PolicyManager(policy, store=PolicyStore(tmp_path / "state"))
    assert (again.number, again.policy) == (2, safer)
    newest = policy_of(epsilon=0.03)  # a model folder with a policy that was never installed
    assert PolicyManager(newest, store=PolicyStore(tmp_path / "state")).number == 3


def test_no_policy_is_installed_without_a_token(tmp_path, policy, safer):
    with start(create_app(Adder(policy), NOW)) as address:
        assert Client(address).send("POST", "/policy", body_of(safer, tmp_path))[0] == 403
        assert Client(address).send("POST", "/resume")[0] == 403


def test_a_watched_file_is_installed_when_it_changes(tmp_path, policy, safer):
    file = tmp_path / "policy.json"
    policy.save(file)
    engine = Adder(policy)
    manager = PolicyManager(policy, store=PolicyStore(tmp_path / "state"), file=file)
    with start(create_app(engine, NOW, manager=manager)) as address:
        client = Client(address)
        safer.save(file)
        wait_until(lambda: client.get("/health")[1]["policy_number"] == 2)
        file.write_text("{")
        wait_until(lambda: client.get("/health")[1]["status"] == "degraded")
        assert client.predict([1, 2, 3])[0] == 200
        policy.save(file)
        wait_until(lambda: client.get("/health")[1]["policy_number"] == 3)
        assert client.get("/health")[1]["status"] == "ok"


def test_a_refused_policy_changes_nothing(tmp_path, policy, caplog):
    """Refuse a policy that cannot be watched, answer, and start again."""

    def manager(**options):
        store = PolicyStore(tmp_path / "state")
        return PolicyManager(policy, watch=watch_in(tmp_path / "state"), store=store, **options)

    caplog.set_level("INFO", "swiftsure.serve")
    file, gap_policy = tmp_path / "policy.json", policy_of("gap")
    engine = Adder(policy)
    with start(
        create_app(engine, NOW, manager=manager(file=file), audit_rate=1.0, token="t")
    ) as address:
        client = Client(address, "t")
        status, found = client.send("POST", "/policy", body_of(gap_policy, tmp_path))
        assert (status, "`epsilon`" in found["error"]) == (422, True)
        assert "a policy was refused: `epsilon`" in caplog.text
        health = client.get("/health")[1]
        assert (health["status"], health["policy_number"], health["fault"]) == ("ok", 1, None)
        assert client.get("/policy")[1]["sentence"] == str(policy)

        def made():
            return client.get("/status")[1]["monitor"]["n"]

        assert client.predict([1, 2, 3])[1]["full_model"] is False
        wait_until(lambda: made() == 1)  # audits go on
        gap_policy.save(file)  # and through the watched file
        wait_until(lambda: client.get("/health")[1]["status"] == "degraded")
        assert "not installed: `epsilon`" in client.get("/health")[1]["fault"]
        assert caplog.text.count("the policy was not installed: `epsilon`") == 1
        assert client.predict([1, 2, 3])[1]["full_model"] is False
        wait_until(lambda: made() == 2)
        assert client.get("/policy")[1]["number"] == 1
    assert engine.policy == policy
    again = manager()
    assert (again.state, again.number, again.policy) == ("ok", 1, policy)
    again.close()


def test_a_server_that_cannot_start_stores_no_policy(tmp_path, policy):
    store = PolicyStore(tmp_path)
    with pytest.raises(ValueError, match="`epsilon`"):
        PolicyManager(policy_of("gap"), watch=watch_in(tmp_path), store=store)
    assert store.newest() is None


def test_a_loss_that_audits_cannot_compute_is_refused_at_the_start(tmp_path, policy):
    def refuse(_loss):
        raise ValueError("`loss` cannot be computed")

    engine = Adder(policy)
    engine.check_loss = refuse
    manager = PolicyManager(policy, watch=watch_in(tmp_path))
    with pytest.raises(ValueError, match="cannot be computed"):
        create_app(engine, NOW, manager=manager, audit_rate=1.0)
    manager.close()
    create_app(engine, NOW)  # nothing is audited


def test_a_policy_that_cannot_be_stored_is_not_served(tmp_path, policy, safer, monkeypatch):
    manager = PolicyManager(policy, watch=watch_in(tmp_path), store=PolicyStore(tmp_path))

    def full(*_):
        raise OSError("full")

    monkeypatch.setattr(PolicyStore, "install", full)
    with pytest.raises(OSError, match="full"):
        manager.install(safer)
    assert (manager.number, manager.mode.policy, manager.audit_log.policy) == (1, policy, policy)
    manager.audit_log.audit(audited(), Adder(policy))
    manager.close()
    assert (manager.audit_log.monitor.n, manager.audit_log.fault) == (1, None)
    other = AuditLog(safer, audit_monitor(safer, 0.01), tmp_path)  # nobody holds its lock
    other.audit(audited(), Adder(safer))
    other.close()
    assert other.monitor.n == 1


def test_alarms_swaps_and_resumes_are_logged(tmp_path, policy, safer, caplog):
    caplog.set_level("INFO", "swiftsure.serve")
    engine = Adder(policy)
    engine.wrong = 1.0
    manager = PolicyManager(policy, watch=watch_in(tmp_path), fallback=safer)
    for rung, epsilon in (("fallback policy", 0.05), ("full model", 0.02)):
        for _ in range(200):
            manager.audit_log.audit(audited(), engine)
        wait_until(lambda rung=rung: manager.tick() or manager.state == rung)
        manager.tick()
        found = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
        assert found[-1].startswith("Alarm at loss")
        assert f"exceeds {epsilon}" in found[-1]
        assert found[-1].endswith(f"The {rung} answers from now on.")
    assert len(found) == 2  # one line per change
    manager.resume()
    assert "resumed: the alarm was put aside" in caplog.text
    manager.install(policy_of(epsilon=0.03))
    assert f"policy 2 ({manager.version}) is in force" in caplog.text
    manager.close()


def test_servers_that_share_a_folder_follow_each_other(tmp_path, policy, safer):
    one, two = (PolicyManager(policy, store=PolicyStore(tmp_path)) for _ in range(2))
    one.install(safer)
    two.tick()
    assert (two.number, two.mode.policy) == (2, safer)


def test_a_policy_of_another_server_that_cannot_be_watched_here_is_refused(
    tmp_path, policy, safer, caplog
):
    one = PolicyManager(policy, store=PolicyStore(tmp_path))
    two = PolicyManager(policy, watch=watch_in(tmp_path), store=PolicyStore(tmp_path))
    one.install(policy_of("gap"))
    for _ in range(3):
        two._due_at = 0.0
        two.tick()
    assert (two.number, two.mode.policy, two.state) == (1, policy, "degraded")
    assert caplog.text.count("the policy was not installed: `epsilon`") == 1
    one.install(safer)
    two._due_at = 0.0
    two.tick()
    assert (two.number, two.mode.policy, two.state) == (3, safer, "ok")
    two.close()


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_installing_survives_kills(tmp_path, policy, safer, kills):
    context = multiprocessing.get_context("fork")
    # Without a lock, which a process that is killed would never give back.
    acknowledged = context.Value("i", 0, lock=False)

    def work():
        store = PolicyStore(tmp_path)
        for k in range(1000):
            acknowledged.value = store.install([safer, policy][k % 2]).number

    rng = np.random.default_rng(0)
    for _ in range(kills):
        process = context.Process(target=work)
        process.start()
        time.sleep(float(rng.uniform(0.02, 0.1)))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        newest = PolicyStore(tmp_path).newest()
        assert newest is None or newest.number >= acknowledged.value
    for path in tmp_path.glob("policy-*.json"):
        assert Policy.load(path) in (policy, safer)


def test_an_alarm_leads_to_the_fallback_and_then_to_the_full_model(tmp_path, policy, safer):
    def manager():
        return PolicyManager(
            policy, watch=watch_in(tmp_path), fallback=safer, store=PolicyStore(tmp_path)
        )

    engine = Adder(policy)
    engine.wrong = 1.0
    with start(create_app(engine, NOW, manager=manager(), audit_rate=1.0)) as address:
        client = Client(address)
        for _ in range(600):
            client.predict([1, 2, 3])
            if engine.policy == safer:
                break
        assert client.get("/health")[1]["status"] == "fallback policy"
        assert "Alarm at loss" in client.get("/health")[1]["alarm"]
        assert client.predict([1, 2, 3])[1]["exit"] == 0
    again = manager()
    assert (again.state, again.mode.policy, again.mode.full) == ("fallback policy", safer, False)
    with start(create_app(engine, NOW, manager=again, audit_rate=1.0, token="t")) as address:
        client = Client(address, "t")
        for _ in range(600):
            if client.predict([1, 2, 3])[1]["full_model"]:
                break
        assert client.get("/health")[1]["status"] == "full model"
        assert client.predict([1, 2, 3])[1]["exit"] == 2
        engine.wrong = 0.0
        assert client.send("POST", "/resume")[1]["resumed"] is True
        assert client.predict([1, 2, 3])[1]["exit"] == 0
        assert client.get("/health")[1]["status"] == "ok"
        assert client.send("POST", "/resume")[1]["resumed"] is False
    fresh = manager()
    assert (fresh.state, fresh.audit_log.monitor.alarm) == ("ok", False)
    fresh.close()


def test_a_new_policy_ends_the_fallback(tmp_path, policy, safer):
    manager = PolicyManager(policy, watch=watch_in(tmp_path), store=PolicyStore(tmp_path))
    engine = Adder(policy)
    engine.wrong = 1.0
    for _ in range(200):
        manager.audit_log.audit(audited(), engine)
    wait_until(lambda: manager.tick() or manager.state == "full model")
    manager.install(safer)
    assert (manager.state, manager.mode.full) == ("ok", False)
    manager.install(policy)  # its alarm still holds
    assert (manager.state, manager.number) == ("full model", 3)
    manager.close()


def test_labels_feed_the_gap(tmp_path):
    gap_policy = policy_of("gap")
    engine = Adder(gap_policy)
    manager = PolicyManager(gap_policy, watch=watch_in(tmp_path, labels=True))
    with start(create_app(engine, NOW, manager=manager, audit_rate=1.0)) as address:
        client = Client(address)
        for k in range(10):
            engine.wrong = float(k < 4)  # the first four answers differ from the full model's
            client.predict([1, 2, 3], id=f"r{k}")
            wait_until(lambda k=k: manager.audit_log.made == k + 1)
        assert client.get("/labels")[1]["needed"] == ["r0", "r1", "r2", "r3"]
        wait_until(lambda: manager.audit_log.monitor.n == 0)
        sent = '{"labels": {"r0": 0, "r1": 1, "r9": 0, "other": 2}}'
        status, found = client.send("POST", "/labels", sent)
        assert status == 200
        assert found["results"] == {
            "r0": "added",
            "r1": "added",
            "r9": "known",
            "other": "not audited",
        }
        assert client.send("POST", "/labels", sent)[1]["results"]["r0"] == "known"
        for bad in (b"", b"[]", b'{"labels": {}}', b'{"labels": {"r2": 7}}', b'{"r2": 1}'):
            assert client.send("POST", "/labels", bad)[0] == 422
        wait_until(lambda: manager.audit_log.monitor.n == 2)  # the others wait for the third
    again = PolicyManager(gap_policy, watch=watch_in(tmp_path, labels=True))  # after a restart
    assert again.audit_log.unlabelled() == ["r2", "r3"]
    assert again.audit_log.label({"r2": 2, "r3": 0}) == {"r2": "added", "r3": "added"}
    again.close()
    monitor = again.audit_log.monitor
    # The full model says 0. Losses: r0 is 0 (gap 1), r1 is 1 (gap -1), r2 neither (0), r3 0 (1).
    assert (monitor.n, monitor.fault if hasattr(monitor, "fault") else None) == (10, None)
    assert monitor.mean == pytest.approx((1 - 1 + 0 + 1) / 10)


def test_a_label_is_for_all_audits_of_its_id(tmp_path):
    """A client that uses an id twice must not stop the monitor."""
    engine, manager = Adder(policy_of("gap")), PolicyManager(policy_of("gap"))
    audit_log = watch_in(tmp_path, labels=True)(manager.policy, 1.0)
    engine.wrong = 1.0
    for name in ("same", "same", "other", "same"):
        audit_log.audit(audited(request=name), engine)
    (log,) = audit_log.folder.glob("audits-*.jsonl")
    assert audit_log.unlabelled() == ["same", "other"]
    assert audit_log.label({"same": 0, "other": 1}) == {"same": "added", "other": "added"}
    assert audit_log.label({"same": 0}) == {"same": "known"}
    audit_log.audit(audited(request="same"), engine)  # another one, after its label
    assert audit_log.unlabelled() == ["same"]
    assert audit_log.label({"same": 0}) == {"same": "added"}
    audit_log.close()
    assert (audit_log.monitor.n, audit_log.fault) == (5, None)
    assert audit_log.monitor.mean == pytest.approx((4 - 1) / 5)
    with log.open("a") as file:  # damaged
        file.write('5\n{"served": 1}\n{"served": [1], "id": "a", "request": 5}\n')
    assert audit_log.unlabelled() == []


def test_labels_are_refused_where_none_is_needed(tmp_path, policy):
    manager = PolicyManager(policy, watch=watch_in(tmp_path))
    with start(create_app(Adder(policy), NOW, manager=manager, audit_rate=1.0)) as address:
        assert Client(address).send("POST", "/labels", b'{"labels": {"a": 1}}')[0] == 422
    with start(create_app(Adder(policy), NOW)) as address:
        assert Client(address).get("/labels")[0] == 409
    with pytest.raises(ValueError, match="promises one gap"):
        audit_monitor(policy, 0.01, labels=True)
