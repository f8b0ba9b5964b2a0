"""Engines in worker processes: answers, errors, and workers that die."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from swiftsure.serve import Batcher, Limits, WorkerEngine, create_app, start
from swiftsure.serve.workers import Spare
from tests.serve.builders import Adder, Client, at_once, policy_of, wait_until


class Killer(Adder):
    """Ends its process on a sample that starts with 999; 5 takes a while."""

    def answer(self, samples, *, full, slices=()):
        if any(sample[0] == 999 for sample in samples):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(sample[0] == 5 for sample in samples):
            time.sleep(0.5)
        return super().answer(samples, full=full)

    def __getstate__(self):
        raise TypeError("an engine is never pickled")


def make(policy_json):
    from swiftsure.certify.policy import Policy

    return Killer(Policy.model_validate_json(policy_json))


def broken():
    raise ValueError("`folder` must exist.")


@pytest.fixture(scope="module")
def engines():
    worker = partial(make, policy_of().model_dump_json())
    found = [WorkerEngine(worker, 1) for _ in range(2)]
    yield found
    for each in found:
        each.close()
    wait_until(lambda: not any(each._worker.process.is_alive() for each in found))


@pytest.fixture
def client(engines):
    batcher_engines = [_Kept(each) for each in engines]
    with start(create_app(batcher_engines, Limits(max_batch=4, timeout=60))) as address:
        yield Client(address)


class _Kept:
    """A worker engine that an application does not close."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)


def test_workers_answer_and_refuse_as_the_engine_does(client, engines):
    assert engines[0].pid != engines[1].pid != os.getpid()
    assert client.predict([1, 2, 3])[1]["outputs"] == 6
    assert client.predict([-9, 0, 0])[0] == 422
    assert client.predict([666, 0, 0])[0] == 500
    assert client.predict([1, 2])[0] == 422


def test_a_request_that_ends_its_worker_fails_alone(client, engines):
    before = {each.pid for each in engines}
    calls = [lambda k=k: client.predict([k, 0, 0]) for k in range(10)]
    answers = at_once([*calls, lambda: client.predict([999, 0, 0])])
    assert [status for status, _ in answers] == [200] * 10 + [500]
    assert [content["outputs"] for _, content in answers[:10]] == list(range(10))
    assert {each.pid for each in engines} != before


def test_killed_workers_lose_no_request(client, engines):
    stop, killed = threading.Event(), []

    def kill():
        rng = np.random.default_rng(0)
        while not stop.wait(0.3):
            pid = engines[int(rng.integers(2))].pid
            with suppress(ProcessLookupError):  # its worker is still being replaced
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            if len(killed) == 2:
                return

    work = threading.Thread(target=kill)
    work.start()
    answers = []
    while work.is_alive() or len(answers) < 40:
        answers += at_once([lambda k=k: client.predict([k, 1, 0]) for k in range(8)])
    stop.set()
    work.join()
    assert {status for status, _ in answers} == {200}
    assert len(killed) == 2


def gated(policy_json, gate):
    """Return an engine once a file is gone."""
    wait_until(lambda: not gate.exists(), 60)
    return make(policy_json)


def test_a_spare_worker_answers_while_another_one_loads(tmp_path):
    gate = tmp_path / "gate"
    load = partial(gated, policy_of().model_dump_json(), gate)
    spare = Spare(load, 1)
    engine = WorkerEngine(load, 1, spare)
    wait_until(spare._next.has_loaded, 60)
    gate.touch()  # from now on no model is loaded
    first = engine.pid
    with start(create_app(engine, Limits(timeout=5))) as address:
        os.kill(first, signal.SIGKILL)
        assert Client(address).predict([1, 2, 3])[1]["outputs"] == 6
        assert engine.pid != first
        loading = spare._next.process
        os.kill(loading.pid, signal.SIGKILL)
        wait_until(lambda: not loading.is_alive())
        taken = spare.take()  # a spare that died is not used, and one that loads is not waited for
        assert taken.process.pid not in (loading.pid, spare._next.process.pid)
        gate.unlink()
        taken.loaded()
        taken.close()
        loading = spare._next.process
    wait_until(lambda: not loading.is_alive())


def test_batches_run_side_by_side(engines):
    batcher = Batcher(engines, Limits(max_batch=1))
    began = time.monotonic()
    found = [batcher.submit(str(k), np.array([5, 0, 0], np.float32)) for k in range(2)]
    assert [each.result(20).answer.content["outputs"] for each in found] == [5, 5]
    took = time.monotonic() - began
    batcher.close()
    assert took < 0.95


def test_a_worker_that_cannot_load_says_why():
    with pytest.raises(ValueError, match="must exist"):
        WorkerEngine(broken)


def test_ids_are_unique_across_servers(engines):
    seen = set()
    for _ in range(2):
        with start(create_app([_Kept(each) for each in engines])) as address:
            for _ in range(5):
                seen.add(Client(address).predict([1, 2, 3])[1]["id"])
    assert len(seen) == 10
    assert json.dumps(sorted(seen))


@pytest.mark.slow
def test_killed_workers_delay_no_request_while_others_load(tmp_path):
    """The first is replaced by the spare one; for the second, the other worker answers."""
    gate = tmp_path / "gate"
    load = partial(gated, policy_of().model_dump_json(), gate)
    engines = [WorkerEngine(load, 1) for _ in range(2)]
    spare = Spare(load, 1)
    for engine in engines:
        engine.spare = spare
    wait_until(spare._next.has_loaded, 60)
    gate.touch()  # from now on no model is loaded
    took, statuses, ended = [], set(), threading.Event()

    def ask(address):
        client = Client(address)
        while not ended.wait(0.02):
            began = time.monotonic()
            statuses.add(client.predict([1, 2, 3])[0])
            took.append(time.monotonic() - began)

    with start(create_app(engines, Limits(max_batch=4, timeout=60))) as address:
        clients = [threading.Thread(target=ask, args=(address,)) for _ in range(8)]
        for client in clients:
            client.start()
        for engine in engines:
            time.sleep(1.0)
            os.kill(engine.pid, signal.SIGKILL)
        wait_until(lambda: len(took) > 500)
        ended.set()
        for client in clients:
            client.join()
        gate.unlink()  # the end waits for what loads
    assert statuses == {200}
    assert max(took) < 3.0  # on a busy machine; loading takes as long as the gate is there
