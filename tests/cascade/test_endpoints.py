"""Endpoints over HTTP: answers, prices, retries, faults."""

import asyncio
import gzip
import json
import math
import time
import warnings

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.cascade import Backoff, CollectionError, UpstreamError
from swiftsure.cascade.retrying import retry_after

pytest.importorskip("aiohttp")

QUICK = Backoff(retries=3, first=0.01)


def pair(server, **options):
    return [
        ss.Endpoint(server.url, "small", key=None, per_million=(1.0, 2.0), **options),
        ss.Endpoint(server.url, "large", key=None, per_million=(10.0, 20.0), **options),
    ]


async def ask(endpoint, value):
    try:
        return await endpoint.answer(value)
    finally:
        await endpoint.close()


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_an_answer_with_logprobs_and_price(server, kind):
    small, _ = pair(server, kind=kind, prompt="Even or odd: {input}?")
    answer = asyncio.run(ask(small, "12"))
    assert answer.answer == "even"
    assert answer.logprobs[0] == pytest.approx(math.log(0.95))
    assert answer.cost == {"usd": pytest.approx(24e-6), "tokens": 22}
    path, body = server.requests[0]
    assert path == ("/v1/chat/completions" if kind == "chat" else "/v1/completions")
    assert body["temperature"] == 0
    assert "Even or odd: 12?" in str(body)


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(server, monkeypatch):
    endpoint = ss.Endpoint(server.url, "small", key="TEST_KEY")
    monkeypatch.delenv("TEST_KEY", raising=False)
    with pytest.raises(ValueError, match="environment variable TEST_KEY is not set"):
        asyncio.run(ask(endpoint, "1"))
    monkeypatch.setenv("TEST_KEY", "secret-1")
    asyncio.run(ask(endpoint, "1"))
    assert server.headers[-1]["Authorization"] == "Bearer secret-1"
    assert "secret-1" not in repr(endpoint) + str(endpoint.identity())


@pytest.mark.parametrize("key", ["sk-very-secret-key", "Bearer abc", "1abc", "", "a=b", "é"])
def test_a_key_in_place_of_its_name_is_refused_and_not_repeated(key):
    with pytest.raises(ValueError, match="name of an environment variable") as error:
        ss.Endpoint("http://localhost/v1", "small", key=key)
    assert not key or key not in str(error.value)


def test_a_key_that_looks_like_a_name_is_shown_nowhere(monkeypatch, server):
    endpoint = ss.Endpoint(server.url, "small", key="abcdef0123456789")
    with pytest.raises(ValueError, match="is not set") as error:
        asyncio.run(ask(endpoint, "1"))
    assert "abcdef" not in str(error.value) + repr(endpoint)


def test_a_key_that_a_server_repeats_is_redacted(server, monkeypatch):
    monkeypatch.setenv("TEST_KEY", "sk-very-secret")
    endpoint = ss.Endpoint(server.url, "small", key="TEST_KEY")
    server.faults = [(400, {}, b'{"error": {"message": "got Bearer sk-very-secret"}}')]
    with pytest.raises(UpstreamError, match=r"got Bearer \[key\]") as error:
        asyncio.run(ask(endpoint, "1"))
    assert error.value.error == {"message": "got Bearer [key]"}
    answer = {"choices": [{"message": {"content": "I saw sk-very-secret"}}], "usage": {}}
    server.faults = [(200, {}, json.dumps(answer).encode())]
    assert asyncio.run(ask(endpoint, "1")).answer == "I saw [key]"


def test_redirects_are_not_followed(server):
    server.faults = [(307, {"Location": f"{server.url}/elsewhere"}, b"")]
    small, _ = pair(server)
    with pytest.raises(UpstreamError, match="status 307, a redirect"):
        asyncio.run(ask(small, "1"))
    assert len(server.requests) == 1


def test_large_and_compressed_answers_are_refused(server, monkeypatch):
    monkeypatch.setattr("swiftsure.cascade.endpoints.LARGEST", 1 << 20)
    small, _ = pair(server)
    server.faults = [(200, {}, b" " * (2 << 20))]
    with pytest.raises(UpstreamError, match="sent more than 1 MiB"):
        asyncio.run(ask(small, "1"))
    bomb = gzip.compress(b" " * (2 << 20))
    server.faults = [(200, {"Content-Encoding": "gzip"}, bomb)]
    with pytest.raises(UpstreamError, match="compressed"):
        asyncio.run(ask(small, "1"))
    assert server.headers[-1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("name", ["retry-after-ms", "Retry-After"])
@pytest.mark.parametrize("value", ["inf", "nan", "-inf", "1e999", "9" * 400, "", "\xb2", "x"])
def test_odd_waits_are_ignored(name, value):
    assert retry_after({name: value}) is None


def test_no_wait_is_longer_than_a_day():
    assert retry_after({"retry-after-ms": "1e300"}) == 86400
    assert retry_after({"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}) == 86400
    assert retry_after({"Retry-After": "-5"}) is None


def test_collect_calibrate_and_run(server, tmp_path):
    cascade = ss.Cascade(pair(server), scores=["confidence", "min_logprob", "first_margin"])
    numbers = [str(n) for n in range(200)]
    labels = [["even", "odd"][n % 2] for n in range(200)]
    record = cascade.collect(numbers, labels, folder=tmp_path, progress=False)
    assert len(server.requests) == 400
    assert record.n == 200
    assert list(record.costs) == ["exit", "usd", "tokens", "seconds"]
    np.testing.assert_allclose(record.costs["usd"][0], [24e-6, 264e-6])
    np.testing.assert_allclose(record.full_costs["usd"], 240e-6)
    assert record.losses["exact_match"].mean(axis=0).tolist() == [0.1, 0.0]
    assert record.fingerprint == cascade.fingerprint
    again = cascade.collect(numbers, labels, folder=tmp_path, progress=False)
    assert len(server.requests) == 400  # nothing is paid twice
    np.testing.assert_array_equal(again.confidences["confidence"], record.confidences["confidence"])
    policy = cascade.calibrate(record, epsilon=0.05)
    assert policy.certificate.provenance.model == cascade.fingerprint
    out = cascade.run(policy)(["7", "20"])
    assert out.answers == ["odd", "even"]
    assert out.exits.tolist() == [0, 1]
    assert out.cost["usd"] == pytest.approx(24e-6 + 264e-6)
    other = ss.Cascade([pair(server)[0], ss.Endpoint(server.url, "larger", key=None)])
    with pytest.raises(ValueError, match="made for another model"):
        other.run(policy)


def test_temporary_faults_are_retried_and_retry_after_is_kept(server):
    server.faults = [
        (429, {"Retry-After": "0.2"}, b"slow down"),
        (500, {}, b"oops"),
        (200, {}, b"{not json"),
    ]
    small, _ = pair(server)
    start = time.perf_counter()

    async def run():
        try:
            return await QUICK.call(lambda: small.answer("3"))
        finally:
            await small.close()

    assert asyncio.run(run()).answer == "odd"
    assert time.perf_counter() - start >= 0.2
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((401, {}, b"no such key"), "status 401: no such key"),
        ((200, {}, b'{"choices": []}'), "no `usage`"),
        ((200, {}, b'{"choices": [], "usage": {}}'), "not an answer"),
        (
            (
                200,
                {},
                b'{"choices": [{"text": "a", "logprobs": {"tokens": 3, "token_logprobs": 4}}],'
                b' "usage": {}}',
            ),
            "not an answer",
        ),
        ("cut", "cannot be reached"),
    ],
)
def test_other_faults_are_errors(server, fault, message):
    server.faults = [fault]
    small, _ = pair(server)
    with pytest.raises(UpstreamError, match=message):
        asyncio.run(ask(small, "3"))


def test_a_refused_key_is_named(server, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "secret-1")
    server.faults = [(401, {}, b"no")]
    endpoint = ss.Endpoint(server.url, "small", key="THEIR_KEY")
    with pytest.raises(UpstreamError, match=r"status 401 \(key: THEIR_KEY\): no") as error:
        asyncio.run(ask(endpoint, "3"))
    assert "secret-1" not in str(error.value)


def test_cookies_are_not_kept(server):
    """One request's session must not become another's."""
    first = (200, {"Set-Cookie": "session=1; Path=/"}, b'{"choices": [{"text": "a"}]}')
    server.faults = [first, first]

    async def twice():
        endpoint = ss.Endpoint(server.url.replace("127.0.0.1", "localhost"), "small", key=None)
        for _ in range(2):
            await endpoint.answer("3")
        await endpoint.close()

    asyncio.run(twice())
    assert all("Cookie" not in each for each in server.headers)


def test_a_collection_that_fails_keeps_its_answers_and_resumes(server, tmp_path):
    cascade = ss.Cascade(pair(server))
    server.faults = [None] * 10 + [(403, {}, b"no credit")] * 3
    with pytest.raises(CollectionError, match="no credit") as error:
        cascade.collect(["1", "2", "3", "4"] * 10, folder=tmp_path, concurrency=2, progress=False)
    assert 60 <= error.value.missing < 80
    server.faults = []
    before = len(server.requests)
    record = cascade.collect(["1", "2", "3", "4"] * 10, folder=tmp_path, progress=False)
    assert record.n == 40
    assert len(server.requests) - before == error.value.missing


def test_a_failing_small_model_escalates_and_a_failing_large_one_raises(server):
    cascade = ss.Cascade(pair(server))
    record = cascade.collect([str(n) for n in range(100)], progress=False)
    policy = cascade.calibrate(record, epsilon=0.3, risk="consistency")
    run = cascade.run(policy, backoff=Backoff(retries=0))
    server.faults = [(503, {}, b"busy")]
    out = run(["7"])
    assert (out.answers, out.exits.tolist()) == (["odd"], [1])
    assert out.failures == [(0, "small answered with status 503: busy")]
    server.faults = [(503, {}, b"busy")] * 2
    with pytest.raises(UpstreamError, match="large answered with status 503"):
        run(["7"])


def test_an_event_loop_may_run_already(server):
    async def inside():
        cascade = ss.Cascade(pair(server))
        record = cascade.collect(["1", "2"] * 30, progress=False)
        async with cascade.run(None) as fast:
            decision = await fast.answer("4")
        return record.n, decision.exit

    assert asyncio.run(inside()) == (60, 1)


def test_dates_of_retry_after():
    assert retry_after({"retry-after-ms": "250"}) == 0.25
    assert retry_after({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, now=1445412470) == 10.0
    assert retry_after({"Retry-After": "soon"}) is None
    assert retry_after({}) is None
    waits = [Backoff(first=1.0, longest=3.0).wait(k, TimeoutError()) for k in range(5)]
    assert all(0.5 * m <= w <= m for w, m in zip(waits, [1, 2, 3, 3, 3], strict=True))
    assert Backoff().wait(0, UpstreamError("", temporary=True, retry_after=1e4)) is None


def test_a_dearer_model_before_a_cheaper_one_warns_by_its_prices():
    small, large = (
        ss.Endpoint("http://x/v1", name, key=None, per_million=prices)
        for name, prices in (("small", (0.15, 0.6)), ("large", (2.5, 10.0)))
    )
    with pytest.warns(UserWarning, match=r"large costs \(2.5, 10.0\) usd .* before small"):
        ss.Cascade([large, small])
    euros = ss.Endpoint("http://x/v1", "euros", key=None, per_million=(0.1, 0.1), unit="eur")
    mixed = ss.Endpoint("http://x/v1", "mixed", key=None, per_million=(3.0, 5.0))
    free = ss.Endpoint("http://x/v1", "free", key=None)
    for models in ([small, large], [large, euros], [large, mixed], [large, free], [free, small]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ss.Cascade(models)


def test_messages_are_not_put_into_a_prompt_by_the_door_of_litellm():
    """Texts of the calibration were; so what the door asks would be another question."""
    from swiftsure.cascade.litellm import custom_llm

    small = ss.Endpoint("http://localhost:1/v1", "small", key=None, prompt="Yes or no: {input}")
    large = ss.Endpoint("http://localhost:1/v1", "large", key=None)
    with pytest.raises(ValueError, match="puts texts into a prompt"):
        custom_llm(ss.Cascade([small, large]).run(None))
