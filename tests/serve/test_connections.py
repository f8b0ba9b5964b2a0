"""Clients that send too much, too slowly or nothing, or read nothing; and those of other sites."""

import contextlib
import json
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from swiftsure.serve import AuditLog, Limits, audit_monitor, connections, create_app, start
from tests.serve.builders import Adder, Client, manager_of, policy_of, wait_until
from tests.serve.hostile import filled


@pytest.fixture(scope="module")
def address():
    with start(create_app(Adder(policy_of()), Limits(timeout=5))) as found:
        yield found


@contextlib.contextmanager
def connected(address):
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port), timeout=10) as raw:
        yield raw


def received(raw):
    """All that comes until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (GET, b"A: " + b"a" * 1000 + b"\r\n"),
        (GET + b"A: ", b"a" * 1000),
        (b"GET /", b"a" * 1000),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"A: " + b"a" * 1000 + b"\r\n"),
        (CHUNKED + b"2\r\n{}\r\n0\r\nA: ", b"a" * 1000),
        (CHUNKED + b"2;", b"a" * 1000),
    ],
)
def test_headers_that_do_not_end_are_refused(address, begin, part):
    with connected(address) as raw:
        sent = 0
        with contextlib.suppress(ConnectionError):
            raw.sendall(begin)
            while sent < 20_000_000:
                raw.sendall(part * 10)
                sent += 10 * len(part)
        assert sent < 20_000_000


def test_large_headers_are_431(address):
    with connected(address) as raw:
        raw.sendall(GET + b"A: " + b"a" * 65_000 + b"\r\nB: " + b"b" * 1_000 + b"\r\n\r\n" + GET)
        assert received(raw).startswith(b"HTTP/1.1 431 ")
    with connected(address) as raw:
        raw.sendall(GET + b"A: " + b"a" * 60_000 + b"\r\nConnection: close\r\n\r\n")
        assert received(raw).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("begin", [b"", b"GET /hea", GET])
def test_half_open_connections_are_closed(address, monkeypatch, begin):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.1)
    with connected(address) as raw:
        raw.sendall(begin)
        began = time.monotonic()
        assert received(raw) == b""
        assert time.monotonic() - began < 3
    with connected(address) as raw:  # the same on a connection that had a request
        raw.sendall(GET + b"\r\n")
        assert b"200 OK" in raw.recv(1000)
        raw.sendall(begin or b"G")
        received(raw)


def test_connections_are_limited(monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 3)
    with start(create_app(Adder(policy_of()))) as address, contextlib.ExitStack() as stack:
        for _ in range(3):
            raw = stack.enter_context(connected(address))
            raw.sendall(GET + b"\r\n")
            assert b"200 OK" in raw.recv(1000)
        with connected(address) as more:
            assert received(more).startswith(b"HTTP/1.1 503 ")


def large_answer():
    """An application whose answer does not fit in the buffers of a connection."""

    async def answer(_request):
        return Response(bytes(30_000_000))

    app = Starlette(routes=[Route("/", answer)])
    return start(app)


def test_a_client_that_reads_nothing_does_not_stop_the_end(monkeypatch):
    monkeypatch.setattr(connections, "STOPPING_SECONDS", 0.2)
    with contextlib.ExitStack() as stack:
        with large_answer() as address:
            for kept in (b"close", b"keep-alive"):
                raw = stack.enter_context(connected(address))
                raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: " + kept + b"\r\n\r\n")
                raw.recv(1)
            raw = stack.enter_context(connected(address))
            raw.sendall(CHUNKED + b"2\r\n{}\r\n")  # and one that does not end its request
            began = time.monotonic()
        assert time.monotonic() - began < 3


def test_a_client_that_reads_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.2)
    with large_answer() as address, connected(address) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(1.0)
        assert len(received(raw)) < 30_000_000


def test_a_slow_client_gets_its_whole_answer(monkeypatch):
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.7)
    with large_answer() as address, connected(address) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        found = 0
        while part := raw.recv(1 << 20):
            found += len(part)
            time.sleep(0.05)
        assert found > 30_000_000


@pytest.mark.parametrize(
    "request_",
    [
        GET,
        GET + b"\r\n",
        (GET + b"\r\n") * 1000,
        b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 22\r\n\r\n{",
        b'POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 21\r\n\r\n{"inputs": [1, 2, 3]}',
        b"POST /labels HTTP/1.1\r\nHost: x\r\nContent-Length: 22\r\n\r\n{",
    ],
)
def test_aborted_connections_leave_nothing_in_the_log(capfd, request_):
    engine = Adder(policy_of())
    with start(create_app(engine)) as address:
        engine.gate.clear()
        with connected(address) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.sendall(request_)
            assert Client(address).get("/health")[0] == 200  # the server has seen the request
        engine.gate.set()
        assert Client(address).predict([1, 2, 3])[0] == 200
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 409),
        ({"Content-Type": "application/json; charset=utf-8"}, 409),
        ({"Content-Type": "text/plain"}, 415),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example", "Host": "evil.example"}, 403),  # its name points here
        ({"Origin": "http://127.0.0.1:1", "Host": "127.0.0.1:2"}, 403),
        ({"Origin": "http://localhost:1", "Host": "localhost:1"}, 409),
        ({"Origin": "http://[::1]:1", "Host": "[::1]:1"}, 409),
        ({"Host": "model-service"}, 409),
    ],
)
def test_pages_of_other_sites_change_nothing(address, headers, status):
    client = Client(address)
    assert client.send("POST", "/labels", b'{"labels": {"a": 1}}', **headers)[0] == status
    foreign = status == 403
    body = b'{"inputs": [1, 2, 3]}'
    kind = {"Content-Type": "application/json"}
    assert client.send("POST", "/predict", body, **kind | headers)[0] == (
        415 if status == 415 else 403 if foreign else 200
    )
    for path in ("/policy", "/resume"):  # they need a token in any case
        assert client.send("POST", path, b"{}", **headers)[0] == (415 if status == 415 else 403)


def test_a_token_is_enough_for_any_origin():
    with start(create_app(Adder(policy_of()), token="secret")) as address:
        headers = {"Origin": "http://app.example", "Content-Type": "application/json"}
        for token, status in (("secret", 200), ("wrong", 401)):
            client = Client(address, token)
            assert client.send("POST", "/predict", b'{"inputs": [1, 2, 3]}', **headers)[0] == status
        assert (
            Client(address, "secret").send(
                "POST", "/policy", b"{", **{"Content-Type": "text/plain"}
            )[0]
            == 415
        )


@pytest.mark.parametrize("token", ["", " "])
def test_an_empty_token_is_refused(token):
    with pytest.raises(ValueError, match="must not be empty"):
        create_app(Adder(policy_of()), token=token)


def test_health_names_no_folders(tmp_path):
    policy = policy_of()
    audit_log = AuditLog(policy, audit_monitor(policy, 0.01), tmp_path)
    app = create_app(Adder(policy), manager=manager_of(audit_log), audit_rate=0.5)
    audit_log._lost = f"the log cannot be read: [Errno 5] {tmp_path / 'a b'}/audits-1.jsonl"
    with start(app) as address:
        client = Client(address)
        assert client.get("/health")[1]["fault"].startswith("the log cannot be read: ")
        assert "/" not in client.get("/health")[1]["fault"]
        assert str(tmp_path) in client.get("/status")[1]["fault"]
        (audit_log.folder / "fallback.json").write_text("{")  # damaged: an alarm all the same
        wait_until(lambda: client.get("/health")[1]["alarm"])
        assert "/" not in client.get("/health")[1]["alarm"]
        assert str(tmp_path) in client.get("/status")[1]["alarm"]


def test_large_bodies_do_not_stop_others(address):
    """While a client sends the worst bodies there are, another one gets its answers."""
    bodies = [filled(part) for part in (b"[0],", b"[" * 60 + b"]" * 60 + b",")]
    bodies.append(json.dumps({"inputs": np.ones((90_000, 1)).tolist()}).encode())
    bodies.append(json.dumps({"inputs": np.ones(490_000).tolist()}).encode())
    stop, times = threading.Event(), []

    def other():
        while not stop.is_set():
            began = time.process_time()  # of this process alone, however busy the machine is
            assert Client(address).predict([1, 2, 3])[0] == 200
            times.append(time.process_time() - began)

    work = threading.Thread(target=other)
    work.start()
    for body in bodies:
        kind = {"Content-Type": "application/json"}
        assert Client(address).send("POST", "/predict", body, **kind)[0] in (413, 422)
    stop.set()
    work.join()
    assert max(times) < 1.0
