"""The server over HTTP: answers, refusals, limits, shutdown; a bad request fails alone."""

import json
import socket
import threading
import time

import numpy as np
import pytest

from swiftsure.serve import Limits, create_app, start
from tests.serve.builders import Adder, Client, Closed, at_once, policy_of


@pytest.fixture(scope="module")
def policy():
    return policy_of()


@pytest.fixture
def engine(shared):
    shared.batches.clear()
    return shared


@pytest.fixture(scope="module")
def shared(policy):
    return Adder(policy)


@pytest.fixture(scope="module")
def client(shared):
    limits = Limits(max_batch=8, max_wait_ms=20, max_queue=8, timeout=5, max_body=2000)
    with start(create_app(shared, limits)) as address:
        yield Client(address)


def test_answers_carry_exit_confidence_and_id(client):
    status, answer = client.predict([1, 2, 3.5], id="mine")
    assert status == 200
    assert answer == {
        "id": "mine",
        "outputs": 6.5,
        "exit": 0,
        "confidence": 0.5,
        "full_model": False,
    }
    array = np.array([1, 2, 4], np.int16)
    one, two = (client.predict_npy(array)[1] for _ in range(2))
    assert one["outputs"] == 7
    assert one["id"] < two["id"]
    assert client.predict_npy(array, **{"X-Request-Id": "header"})[1]["id"] == "header"


def test_requests_are_batched(client, engine):
    engine.gate.clear()
    first = threading.Thread(target=client.predict, args=([0, 0, 0],))
    first.start()
    time.sleep(0.1)  # it runs; the others wait
    calls = [lambda k=k: client.predict([k, 0, 0]) for k in range(8)]
    threading.Timer(0.3, engine.gate.set).start()
    answers = at_once(calls)
    first.join()
    assert [content["outputs"] for _, content in answers] == list(range(8))
    assert max(engine.batches) > 1
    assert sum(engine.batches) == 9


@pytest.mark.parametrize("bad", [[-5, 0, 0], [666, 0, 0]])
def test_a_bad_request_fails_alone(client, engine, bad):
    engine.gate.clear()
    threading.Timer(0.3, engine.gate.set).start()
    calls = [lambda k=k: client.predict([k, 0, 0]) for k in range(4)]
    answers = at_once([*calls, lambda: client.predict(bad)])
    assert [status for status, _ in answers] == [200] * 4 + [422 if bad[0] < 0 else 500]
    assert "Traceback" not in json.dumps(answers)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"\xff\xfe", 422),
        (b"[" * 1900, 422),
        (b"[1, 2, 3]", 422),
        (b"{}", 422),
        (b'{"inputs": [1, 2]}', 422),
        (b'{"inputs": [[1, 2, 3]]}', 422),
        (b'{"inputs": [1, 2, [3]]}', 422),
        (b'{"inputs": ["1", "2", "3"]}', 422),
        (b'{"inputs": [1, 2, null]}', 422),
        (b'{"inputs": [1, 2, NaN]}', 422),
        (b'{"inputs": [1, 2, 1e39]}', 422),
        (b'{"inputs": [1, 2, 1' + b"0" * 400 + b"]}", 422),
        (b'{"inputs": [true, false, true]}', 422),
        (b'{"inputs": {"a": 1}}', 422),
        (b'{"inputs": [1, 2, 3], "id": 7}', 422),
        (b'{"inputs": [1, 2, 3], "id": ""}', 422),
        (b'{"inputs": [1, 2, 3], "id": "\\u0000"}', 422),
        (b'{"inputs": [1, 2, 3], "seed": 7}', 422),
        (b" " * 3000, 413),
    ],
)
def test_bad_bodies_are_refused(client, body, status):
    found, content = client.send("POST", "/predict", body, **{"Content-Type": "application/json"})
    assert found == status
    assert content["error"]


def npy(header, data=b"", version=b"\x01\x00"):
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x93NUMPY",
        b"PK\x03\x04 a zip archive",
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", b"\0" * 11),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", b"\0" * 13),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (10**13,), }"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999,), }"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,), }", b"\0" * 12),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", b"\0" * 24),
        npy("__import__('os').system('true')", b"\0" * 12),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", b"\0" * 12, b"\x09\x00"),
    ],
)
def test_bad_arrays_are_refused(client, body):
    kind = {"Content-Type": "application/x-npy"}
    assert client.send("POST", "/predict", body, **kind)[0] == 422


def test_pickles_and_other_kinds_are_refused(client):
    assert client.predict_npy(np.array([print, 1, 2], dtype=object))[0] == 422
    assert client.send("POST", "/predict", b"a=1", **{"Content-Type": "text/plain"})[0] == 415
    assert client.get("/predict")[0] == 405
    assert client.get("/nothing")[0] == 404


@pytest.mark.parametrize("n", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutants_of_requests_harm_nobody(client, n):
    rng = np.random.default_rng(0)
    good = bytearray(b'{"inputs": [1.5, 2, 3], "id": "a"}')
    for _ in range(n):
        body = good.copy()
        for place in rng.integers(0, len(body), rng.integers(1, 4)):
            body[place] = int(rng.integers(0, 256))
        kind = {"Content-Type": "application/json"}
        status, content = client.send("POST", "/predict", bytes(body), **kind)
        assert status in (200, 422), (bytes(body), content)
    assert client.predict([1, 2, 3])[0] == 200


def test_beyond_the_queue_is_429_and_nothing_accepted_is_lost(client, engine):
    engine.gate.clear()
    threading.Timer(0.6, engine.gate.set).start()
    calls = [lambda k=k: client.predict([k, 0, 0]) for k in range(30)]
    answers = at_once(calls)
    statuses = [status for status, _ in answers]
    assert set(statuses) == {200, 429}
    for k, (status, content) in enumerate(answers):
        assert content.get("outputs") == (k if status == 200 else None)
    assert sum(engine.batches) == statuses.count(200)
    _, text = client.get("/metrics")
    assert f'swiftsure_requests_total{{status="429"}} {statuses.count(429)}.0' in text
    assert 'swiftsure_request_seconds_count{exit="0"}' in text


def test_a_request_that_takes_too_long_is_504_and_is_not_run(policy):
    engine = Adder(policy)
    limits = Limits(max_batch=1, max_wait_ms=0, timeout=0.2)
    with start(create_app(engine, limits)) as address:
        engine.gate.clear()
        threading.Timer(0.6, engine.gate.set).start()
        answers = at_once([lambda: Client(address).predict([1, 0, 0])] * 3)
        assert {status for status, _ in answers} == {504}
        engine.gate.wait(5)
        assert Client(address).predict([1, 0, 0])[0] == 200
    assert engine.batches == [1, 1]  # the one that ran already, and the last one


def test_a_body_that_does_not_arrive_is_408(policy):
    with start(create_app(Adder(policy), Limits(timeout=0.2))) as address:
        place = Client(address).place.split(":")
        with socket.create_connection((place[0], int(place[1])), timeout=5) as raw:
            raw.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            assert raw.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_shutdown_answers_what_was_accepted(policy):
    engine = Adder(policy)
    answers = []
    with start(create_app(engine, Limits(max_batch=2))) as address:
        engine.gate.clear()
        work = threading.Thread(
            target=lambda: answers.extend(at_once([lambda: Client(address).predict([1, 1, 1])] * 6))
        )
        work.start()
        time.sleep(0.2)
        threading.Timer(0.2, engine.gate.set).start()
    work.join()
    assert [status for status, _ in answers] == [200] * 6


def test_middleware_is_not_bypassed(engine):
    app = create_app(engine)
    app.add_middleware(Closed)
    with start(app) as address:
        assert Client(address).predict([1, 2, 3]) == (403, "closed")


def test_a_token_protects_all_but_health(engine):
    with start(create_app(engine, token="secret")) as address:
        for path in ("/policy", "/metrics"):
            assert Client(address).get(path)[0] == 401
            assert Client(address, "secret").get(path)[0] == 200
        assert Client(address, "secrets").predict([1, 2, 3])[0] == 401
        assert Client(address, "secret").predict([1, 2, 3])[0] == 200
        assert Client(address).get("/health")[0] == 200


def test_the_policy_and_its_sentence_are_served(client, policy):
    _, content = client.get("/policy")
    assert content["sentence"] == str(policy)
    assert type(policy).model_validate_json(json.dumps(content["policy"])) == policy
    assert client.get("/health")[1] == {
        "status": "ok",
        "policy": content["version"],
        "policy_number": 1,
        "queue": 0,
        "alarm": None,
        "fault": None,
    }
