"""The proxy answers OpenAI's own client from a certified cascade, whatever upstreams do."""

import asyncio
import json
import math
import random
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import openai
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from swiftsure.cascade import Answer, UpstreamError
from swiftsure.curves.conditions import Condition
from swiftsure.serve import start
from swiftsure.serve.audits import AuditQueue
from swiftsure.serve.bill import Bill
from swiftsure.serve.disconnect import GoneError
from swiftsure.serve.openai import ApiError, parse_request
from swiftsure.serve.proxy import ProxyConfig, create_proxy
from swiftsure.serve.proxy.audits import Audits
from swiftsure.serve.proxy.health import ModelHealth
from swiftsure.serve.proxy.requests import not_covered_reason
from swiftsure.serve.proxy.streams import PassedOn
from swiftsure.serve.proxy.upstreams import Found
from tests.serve.builders import Client, Closed, at_once
from tests.serve.test_audit_log import wait_until
from tests.serve.upstreams import FAULTS, Upstream, chat_response, raw, status

PRICES = {"small": (1.0, 1.0), "large": (10.0, 10.0)}


def truth(text):
    return "odd" if int(text.split()[-1]) % 2 else "even"


def large_answer(text):
    return truth(text) if text.split()[-1].isdecimal() else "what?", 0.99


def small_answer(text):
    """Sure and right below 800; unsure, and wrong every second time, above."""
    number = text.split()[-1]
    if not number.isdecimal():
        return "what?", 0.05
    number = int(number)
    if number < 800:
        return truth(text), 0.95
    return ("odd" if number % 4 < 2 else "even"), 0.3


class Setup:
    """Two upstreams and a proxy in front of them."""

    def __init__(self, stack, folder, **audit):
        self.small = Upstream(small_answer, "small", dict(FAULTS))
        self.large = Upstream(large_answer, "large")
        places = {
            each.model: stack.enter_context(start(each.app)) for each in (self.small, self.large)
        }
        models = "".join(
            f'[[models]]\nbase_url = "{places[name]}/v1"\nmodel = "{name}"\ntimeout = 1.5\n'
            f"per_million = [{PRICES[name][0]}, {PRICES[name][1]}]\n"
            "parameters = { temperature = 0, max_tokens = 9 }\n"
            for name in PRICES
        )
        audits = "".join(f"{name} = {value}\n" for name, value in audit.items())
        folder.mkdir(exist_ok=True)
        self.path = folder / "cascade.toml"
        self.path.write_text(f'policy = "policy.json"\n[audit]\n{audits}{models}')
        config = ProxyConfig.load(self.path)
        cascade = config.cascade()
        inputs = [f"Is it odd? {k}" for k in np.random.default_rng(0).integers(0, 1000, 400)]
        record = cascade.collect(inputs, [truth(text) for text in inputs])
        self.policy = cascade.calibrate(
            replace(record, order=0), risk="consistency", loss="exact_match", epsilon=0.05
        )
        self.policy.save(folder / "policy.json")
        self.small.bodies.clear()
        self.large.bodies.clear()
        self.app = create_proxy(config)
        self.address = stack.enter_context(start(self.app))
        self.client = openai.OpenAI(
            base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=10
        )
        stack.callback(self.client.close)

    def ask(self, text, **more):
        """Return (answer, headers)."""
        given = {"model": "cascade", "messages": [{"role": "user", "content": text}]}
        found = self.client.chat.completions.with_raw_response.create(**(given | more))
        return found.parse().choices[0].message.content, found.headers


def rested(setup):
    """Forget what the proxy knows of its models' failures; return the new states."""
    health = setup.app.state.service.upstreams.health
    health[:] = [ModelHealth(each.name, last=each is health[-1]) for each in health]
    setup.app.state.service.upstreams.versions.changed.clear()
    return health


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    with ExitStack() as stack:
        yield Setup(stack, tmp_path_factory.mktemp("proxy"))


def test_the_small_model_answers_where_it_is_sure(setup):
    answer, headers = setup.ask("Is it odd? 7")
    assert answer == "odd"
    assert headers["x-swiftsure-model"] == "small"
    assert headers["x-swiftsure-exit"] == "0"
    assert float(headers["x-swiftsure-confidence"]) == pytest.approx(0.95)
    assert "usd=1.3e-05" in headers["x-swiftsure-cost"]
    answer, headers = setup.ask("Is it odd? 900")
    assert answer == "even"
    assert headers["x-swiftsure-model"] == "large"
    assert headers["x-swiftsure-reason"] == "not sure enough"
    assert "usd=0.000143" in headers["x-swiftsure-cost"]


@pytest.mark.parametrize("number", [7, 900])
def test_streams(setup, number):
    given = {"model": "cascade", "messages": [{"role": "user", "content": f"Is it odd? {number}"}]}
    for usage in (False, True):
        options = {"stream_options": {"include_usage": True}} if usage else {}
        chunks = list(setup.client.chat.completions.create(**given, stream=True, **options))
        text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
        assert text == truth(str(number))
        assert [each for each in chunks if each.choices][-1].choices[0].finish_reason == "stop"
        assert any(each.usage is not None for each in chunks) == usage


def test_completions_and_models(setup):
    assert {each.id for each in setup.client.models.list()} == {"cascade", "large"}
    found = setup.client.completions.with_raw_response.create(model="cascade", prompt="odd? 7")
    assert found.parse().choices[0].text == "odd"
    assert found.headers["x-swiftsure-reason"] == "the policy is for chat"
    chunks = setup.client.completions.create(model="cascade", prompt="odd? 7", stream=True)
    assert "".join(each.choices[0].text for each in chunks if each.choices) == "odd"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"temperature": 0.7}, "`temperature` has another value than when the policy was made"),
        ({"temperature": False}, "`temperature` has another value than when the policy was made"),
        ({"n": 2}, "`n` is not 1"),
        ({"max_tokens": 5}, "`max_tokens` has another value than when the policy was made"),
        ({"seed": 5}, "`seed` was not set when the policy was made"),
        ({"model": "large"}, "asked for by name"),
    ],
)
def test_what_the_policy_does_not_cover_goes_to_the_large_model(setup, more, reason):
    _, headers = setup.ask("Is it odd? 7", **more)
    assert (headers["x-swiftsure-model"], headers["x-swiftsure-reason"]) == ("large", reason)
    assert setup.large.bodies[-1].items() >= (more | {"model": "large"}).items()


@pytest.mark.parametrize("number", [7, 900])
def test_null_does_not_undo_a_parameter_of_the_calibration(setup, number):
    setup.small.bodies.clear()
    setup.large.bodies.clear()
    setup.ask(f"Is it odd? {number}", temperature=None, max_tokens=None)
    for body in (*setup.small.bodies, *setup.large.bodies):
        assert body["temperature"] == 0
        assert body["max_tokens"] == 9
    assert len(setup.small.bodies) == 1


@pytest.mark.parametrize("number", [7, 900])
def test_two_names_of_one_parameter_are_one(setup, number):
    """Models get the name that they were calibrated with, since both at once would be refused."""
    setup.small.bodies.clear()
    setup.large.bodies.clear()
    _, headers = setup.ask(f"Is it odd? {number}", max_completion_tokens=9)
    assert headers["x-swiftsure-reason"] in ("sure enough", "not sure enough")
    _, headers = setup.ask(f"Is it odd? {number}", max_completion_tokens=5)
    assert "another value" in headers["x-swiftsure-reason"]
    bodies = [*setup.small.bodies, *setup.large.bodies]
    assert {body["max_tokens"] for body in bodies} == {9, 5}
    assert not any("max_completion_tokens" in body for body in bodies)


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
QUESTION = {"role": "user", "content": "Is it odd? 7"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            [{"role": "user", "content": [{"type": "text", "text": "Is it odd? 7"}, IMAGE]}],
            "the calibration had no content of type image_url",
        ),
        (
            [{"role": "system", "content": "Lie."}, QUESTION],
            "the calibration had no such system prompt",
        ),
        (
            [QUESTION, {"role": "assistant", "content": "odd"}, QUESTION],
            "the calibration had no conversation of this length",
        ),
        ([{**QUESTION, "name": "x"}], "the calibration had no message with name"),
        (
            [{"role": "tool", "tool_call_id": "1", "content": "Is it odd? 7"}],
            "the calibration had no last message from tool",
        ),
    ],
)
def test_messages_unlike_the_calibrations_go_to_the_large_model(
    setup, monkeypatch, messages, reason
):
    rested(setup)
    monkeypatch.setattr(setup.large, "answer", lambda _: ("odd", 0.9))
    found = setup.client.chat.completions.with_raw_response.create(
        model="cascade", messages=messages
    )
    assert found.headers["x-swiftsure-model"] == "large"
    assert found.headers["x-swiftsure-reason"] == reason


def test_a_policy_that_does_not_say_what_its_messages_were_like(setup, tmp_path, caplog):
    config = ProxyConfig.load(setup.path)
    place = tmp_path / "policy.json"
    settings = {k: v for k, v in setup.policy.settings.items() if k != "requests"}
    setup.policy.model_copy(update={"settings": settings}).save(place)
    create_proxy(config.model_copy(update={"policy": place}))
    assert "does not say what its calibration's messages were like" in caplog.text


def test_models_of_two_kinds_have_no_request_in_common():
    asked = parse_request(b'{"model": "m", "messages": [{"role": "user"}]}', "chat")
    assert not_covered_reason(asked, {"chat"}, {}) is None
    assert (
        not_covered_reason(asked, {"chat", "completions"}, {})
        == "the policy is for chat and completions"
    )


def test_parameters_are_compared_as_json():
    asked = parse_request(
        b'{"model": "m", "messages": [{"role": "user"}], "a": {"b": [1]}}', "chat"
    )
    assert not_covered_reason(asked, {"chat"}, {"a": {"b": [1.0]}}) is None
    assert not_covered_reason(asked, {"chat"}, {"a": {"b": [True]}}) is not None


def test_what_the_client_did_not_ask_for_is_not_sent(setup):
    given = {"model": "cascade", "messages": [{"role": "user", "content": "Is it odd? 7"}]}
    assert setup.client.chat.completions.create(**given).choices[0].logprobs is None
    found = setup.client.chat.completions.create(**given, logprobs=True)
    assert found.choices[0].logprobs.content[0].token == "odd"
    assert setup.ask("Is it odd? 7", temperature=0)[1]["x-swiftsure-model"] == "small"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_small_model_that_fails_hands_over(setup, fault, stream):
    rested(setup)
    given = {"messages": [{"role": "user", "content": f"{fault} 7"}], "model": "cascade"}
    if stream:
        chunks = setup.client.chat.completions.create(**given, stream=True)
        answer = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    else:
        found = setup.client.chat.completions.with_raw_response.create(**given)
        answer = found.parse().choices[0].message.content
        assert found.headers["x-swiftsure-model"] == "large"
    assert answer == "odd"


EXPECTED = {
    "BUSY": (429, "rate_limit_exceeded"),
    "REFUSED": (400, "upstream_refused"),
    "KEY": (502, "upstream_key_refused"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stream", [False, True])
def test_faults_of_the_large_model_are_told_in_the_form_that_clients_know(
    setup, fault, stream, monkeypatch
):
    rested(setup)
    monkeypatch.setattr(setup.large, "faults", FAULTS)
    monkeypatch.setattr(setup.small, "faults", {})
    given = {"messages": [{"role": "user", "content": f"{fault} 900"}], "model": "cascade"}
    began = time.monotonic()
    text, error = outcome(setup, given, stream)
    rested(setup)
    assert time.monotonic() - began < 4
    if error is None:
        # What the large model sent is passed on, as it would be without the proxy.
        odd = ("EMPTY", "NO CHOICE", "NUMBER", "USAGE", "WRONG LOGPROBS", "NO LOGPROBS")
        assert text in ("odd", "even") if stream else fault in odd
    elif isinstance(error, openai.APIStatusError):
        assert (error.status_code, error.code) == EXPECTED.get(fault, (502, "bad_gateway"))
    else:  # in the middle of a stream
        assert stream
        assert error.code == "bad_gateway"


def outcome(setup, given, stream):
    """Return the text of an answer, or None, and the error, or None."""
    try:
        found = setup.client.chat.completions.create(**given, stream=stream)
        if stream:
            parts = [each.choices[0].delta.content or "" for each in found if each.choices]
            return "".join(parts), None
        return found.choices[0].message.content if found.choices else None, None
    except openai.APIError as error:
        return None, error


def test_a_rate_limit_is_respected(setup):
    small, large = rested(setup)
    busy = UpstreamError("", status=429, retry_after=5.0)
    small.failed(busy)
    asked = len(setup.small.bodies)
    answer, headers = setup.ask("Is it odd? 7")
    assert (answer, headers["x-swiftsure-reason"]) == ("odd", "small asked for a pause")
    assert len(setup.small.bodies) == asked
    small, large = rested(setup)
    large.failed(busy)
    assert setup.ask("Is it odd? 7")[1]["x-swiftsure-model"] == "small"
    with pytest.raises(openai.RateLimitError) as caught:
        setup.ask("Is it odd? 900")
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 5
    rested(setup)


def test_reasons_and_failures_are_counted(setup):
    rested(setup)
    client = Client(setup.address)
    setup.ask("Is it odd? 7", seed=3)
    setup.ask("BROKEN 7")
    text = client.get("/metrics")[1]
    assert 'swiftsure_reasons_total{reason="`seed` was not set when the policy was made"}' in text
    assert 'swiftsure_reasons_total{reason="small failed"}' in text
    assert 'swiftsure_upstream_failures_total{model="small"} 1.0' in text
    assert 'swiftsure_upstream_failures_total{model="large"} 0.0' in text
    reasons = dict(client.get("/status")[1]["reasons"])
    assert reasons["small failed"] >= 1


def test_clients_cannot_make_up_any_number_of_reasons(setup, monkeypatch):
    monkeypatch.setattr("swiftsure.serve.proxy.app.MOST_REASONS", 1)
    client = Client(setup.address)
    for name in ("one", "two", "\ud800"):
        body = {"model": "cascade", "messages": [{"role": "user", "content": "odd? 7"}], name: 1}
        assert client.send("POST", "/v1/chat/completions", json.dumps(body))[0] == 200
    text = client.get("/metrics")[1]
    assert "another reason" in text
    assert "`one`" not in text


def test_a_revoked_key_is_seen(setup):
    rested(setup)
    client = Client(setup.address)
    assert client.get("/health")[1]["status"] == "ok"
    assert setup.ask("KEY 7")[0] == "odd"
    health = client.get("/health")[1]
    assert health["status"] == "degraded"
    assert health["fault"] == "small does not answer (status 401)."
    assert client.get("/status")[1]["headline"] == "A model does not answer, or changed."
    asked = len(setup.small.bodies)
    _, headers = setup.ask("Is it odd? 7")
    assert headers["x-swiftsure-reason"] == "small failed several times in a row"
    assert len(setup.small.bodies) == asked
    rested(setup)


def test_a_model_that_fails_rests_and_is_tried_again():
    now = [0.0]
    health = ModelHealth("small", clock=lambda: now[0])
    for _ in range(5):
        assert (health.refusal(), health.trouble) == (None, None)
        health.failed(TimeoutError())
    assert health.refusal() == "small failed several times in a row"
    assert health.trouble == "small does not answer (TimeoutError)."
    now[0] += 30.0
    assert health.refusal() is None  # one request tries it
    assert health.refusal() is not None
    health.failed(UpstreamError("", status=503, temporary=True))
    assert health.refusal() == "small asked for a pause"
    now[0] += 29.0
    assert health.refusal() is not None
    now[0] += 1.0
    assert health.refusal() is None
    health.answered()
    assert (health.refusal(), health.trouble, health.failures) == (None, None, 6)


def test_refused_requests_are_not_failures_of_the_model():
    health = ModelHealth("small")
    for _ in range(20):
        health.failed(UpstreamError("", status=400))
    assert (health.refusal(), health.failures) == (None, 20)


def test_a_small_model_that_hangs_is_not_waited_for(setup, monkeypatch):
    """Its time-out is a few times what it took in the calibration, and not a minute."""
    rested(setup)
    monkeypatch.setattr(setup.app.state.service.upstreams.small[0], "seconds", 0.1)
    began = time.monotonic()
    answer, headers = setup.ask("SILENT 7")
    assert (answer, headers["x-swiftsure-reason"]) == ("odd", "small was too slow")
    assert time.monotonic() - began < 1.0


def test_time_outs_follow_from_the_calibration(setup):
    config = ProxyConfig.load(setup.path)
    models = [each.model_copy(update={"timeout": None}) for each in config.models]
    config = config.model_copy(update={"models": tuple(models)})
    assert config.timeouts(None) == [10.0, 60.0]
    seconds = setup.policy.settings["seconds"]
    assert len(seconds) == 2
    assert all(0 < each < 1 for each in seconds)
    found = [
        config.timeouts(setup.policy.model_copy(update={"settings": {"seconds": each}}))[0]
        for each in ([0.1, 1.0], [2.0, 1.0], [1e9, 1.0], [math.nan, 1.0], ["x", 1.0], [1.0], "x")
    ]
    assert found == [1.0, 6.0, 60.0, 10.0, 10.0, 10.0, 10.0]
    assert ProxyConfig.load(setup.path).timeouts(setup.policy) == [1.5, 1.5]


def test_errors_of_the_large_model_keep_their_code_and_parameter(setup, monkeypatch):
    async def too_long(_upstream, _body):
        error = {"message": "too long", "type": "invalid_request_error", "param": "messages"}
        return JSONResponse({"error": {**error, "code": "context_length_exceeded"}}, 400)

    monkeypatch.setitem(setup.large.faults, "LONG", too_long)
    for stream in (False, True):
        given = {"model": "large", "messages": [{"role": "user", "content": "LONG 7"}]}
        _, error = outcome(setup, given, stream)
        assert error.status_code == 400
        assert error.code == "context_length_exceeded"
        assert error.param == "messages"
        assert error.body["message"] == "large: too long"


def test_errors_of_the_large_model_may_hold_anything(setup, monkeypatch):
    odd = b'{"error": {"message": "\\ud800", "code": 3, "type": [], "param": {}}}'

    async def refuse(_upstream, _body):
        return Response(odd, 400)

    monkeypatch.setitem(setup.large.faults, "ODD", refuse)
    given = {"model": "large", "messages": [{"role": "user", "content": "ODD 7"}]}
    _, error = outcome(setup, given, stream=False)
    assert (error.status_code, error.code, error.param) == (400, "upstream_refused", None)


def test_other_paths_answer_in_the_form_that_clients_know(setup):
    assert setup.client.models.retrieve("cascade").id == "cascade"
    with pytest.raises(openai.NotFoundError) as caught:
        setup.client.models.retrieve("none/such")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        setup.client.embeddings.create(model="cascade", input="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        setup.client.images.generate(model="cascade", prompt="x")
    assert caught.value.code == "unknown_url"
    status, content = Client(setup.address).get("/v1/chat/completions")
    assert (status, content["error"]["code"]) == (405, "method_not_allowed")


def test_an_upstream_that_echoes_the_key_does_not_reveal_it(setup, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "sk-very-secret")
    monkeypatch.setattr(setup.app.state.service.upstreams.large, "key", "SECRET_KEY")
    words = "I got Bearer sk-very-secret"

    async def refuse(_upstream, _body):
        return JSONResponse({"error": {"message": words, "code": words}}, 400)

    events = f'data: {{"choices": [{{"index": 0, "delta": {{"content": "{words}"}}}}]}}\n\n'
    faults = {
        "REFUSE": refuse,
        "WHOLE": raw(json.dumps(chat_response(words))),
        "STREAM": raw(f"{events}data: [DONE]\n\n", "text/event-stream"),
    }
    monkeypatch.setattr(setup.large, "faults", faults)
    client = Client(setup.address)
    for fault in faults:
        messages = [{"role": "user", "content": f"{fault} 900"}]
        body = {"model": "large", "messages": messages, "stream": fault == "STREAM"}
        _, content = client.send("POST", "/v1/chat/completions", json.dumps(body))
        assert "[key]" in str(content)
        assert "secret" not in str(content)


def test_an_odd_retry_after_is_told_as_a_rate_limit(setup, monkeypatch):
    rested(setup)
    monkeypatch.setattr(setup.large, "faults", {"BUSY": status(429, **{"retry-after-ms": "inf"})})
    with pytest.raises(openai.RateLimitError) as caught:
        setup.ask("BUSY 900")
    assert caught.value.response.headers["retry-after"] == "1"
    rested(setup)


class Held:
    """Answers, or streams without an end, until it is released or the caller goes away."""

    def __init__(self):
        self.begun = self.gone = 0
        self.release = threading.Event()

    async def __call__(self, upstream, body):
        async def parts():
            self.begun += 1
            try:
                yield b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n'
                while not self.release.is_set():
                    await asyncio.sleep(0.01)
                yield b"data: [DONE]\n\n"
            except asyncio.CancelledError:
                self.gone += 1
                raise

        if body.get("stream"):
            return StreamingResponse(parts(), media_type="text/event-stream")
        self.begun += 1
        while not self.release.is_set():
            if await upstream.request.is_disconnected():
                self.gone += 1
                break
            await asyncio.sleep(0.01)
        return JSONResponse(chat_response("even"))


@pytest.mark.parametrize("stream", [False, True])
def test_requests_beyond_the_limit_are_refused_while_streams_are_open(setup, monkeypatch, stream):
    rested(setup)
    held = Held()
    monkeypatch.setattr(setup.large, "faults", {"HELD": held})
    proxy = setup.app.state.service
    limits = proxy.config.limits.model_copy(update={"max_requests": 4})
    monkeypatch.setattr(proxy, "config", proxy.config.model_copy(update={"limits": limits}))
    given = {"model": "cascade", "messages": [{"role": "user", "content": "HELD 900"}]}

    def ask():
        found = setup.client.chat.completions.create(**given, stream=stream)
        if stream:
            for _ in found:
                pass

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: held.begun == 4)
    with pytest.raises(openai.RateLimitError) as caught:
        setup.ask("Is it odd? 7")
    assert caught.value.code == "busy"
    held.release.set()
    for thread in threads:
        thread.join()
    wait_until(lambda: proxy.under_way == 0)
    assert setup.ask("Is it odd? 7")[0] == "odd"


@pytest.mark.parametrize("stream", [False, True])
def test_abandoned_requests_are_cancelled_upstream(setup, monkeypatch, stream):
    rested(setup)
    held = Held()
    monkeypatch.setattr(setup.large, "faults", {"HELD": held})
    messages = [{"role": "user", "content": "HELD 900"}]
    body = json.dumps({"model": "cascade", "messages": messages, "stream": stream}).encode()
    host, port = setup.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        wait_until(lambda: held.begun == 1)
        if stream:
            connection.recv(1)
    proxy = setup.app.state.service
    wait_until(lambda: proxy.under_way == 0)
    wait_until(lambda: held.gone == 1)
    if not stream:
        assert 'status="499"' in Client(setup.address).get("/metrics")[1]
    held.release.set()


def test_answers_do_not_mix(setup):
    numbers = random.Random(0).sample(range(1000), 60)
    found = at_once([lambda k=k: setup.ask(f"Is it odd? {k}")[0] for k in numbers])
    assert found == [truth(str(k)) for k in numbers]


def test_the_bytes_of_the_large_model_are_passed_on(setup, monkeypatch):
    """A parser might change a number, or the order or spelling of anything else."""
    found = chat_response("é, NaN or Infinity", 0.9, "large") | {"odd": "NUMBER"}
    body = json.dumps(found, ensure_ascii=False, indent=1).replace('"NUMBER"', "1.00e+00").encode()
    monkeypatch.setattr(setup.large, "faults", {"RAW": raw(body)})
    given = {"model": "cascade", "messages": [{"role": "user", "content": "RAW 900"}]}
    answer = setup.client.chat.completions.with_raw_response.create(**given)
    assert answer.headers["x-swiftsure-model"] == "large"
    assert answer.content == body
    assert "usd=" in answer.headers["x-swiftsure-cost"]


@pytest.mark.parametrize("text", ["é ✓ 你", "\ud800", '"\\\n\x00'])
def test_any_text_of_the_small_model_arrives(setup, monkeypatch, text):
    response = raw(json.dumps(chat_response(text, 0.95, "small")))
    monkeypatch.setattr(setup.small, "faults", {"odd": response})
    body = {"model": "cascade", "messages": [{"role": "user", "content": "Is it odd? 7"}]}
    status, content = Client(setup.address).send(
        "POST", "/v1/chat/completions", json.dumps(body).encode()
    )
    assert (status, content["model"]) == (200, "small")
    assert content["choices"][0]["message"]["content"] == text


def test_other_methods_and_a_body_that_is_cut_short(setup):
    status, _ = Client(setup.address).get("/v1/chat/completions")
    assert status == 405

    async def gone():
        return {"type": "http.disconnect"}

    async def run(sent):
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}

        async def send(message):
            sent.append(message)

        await setup.app(scope, gone, send)

    sent = []
    asyncio.run(run(sent))
    assert sent[0]["status"] == 400
    assert json.loads(sent[1]["body"])["error"]["message"] == "The body was cut short."
    assert setup.app.state.service.under_way == 0


def mutants(rng, n):
    """Bodies that are broken, hostile or odd."""
    good = {"model": "cascade", "messages": [{"role": "user", "content": "Is it odd? 7"}]}
    values = [
        None,
        0,
        -1,
        1e308,
        "",
        "x" * 5000,
        [],
        {},
        [[]],
        True,
        "\ud800",
        {"a": {"b": []}},
        2**80,
    ]
    for _ in range(n):
        body = json.loads(json.dumps(good))
        for _ in range(rng.randint(1, 3)):
            name = rng.choice([*good, "stream", "temperature", "n", "logprobs", "tools", "x"])
            body[name] = rng.choice(values)
        text = json.dumps(body).encode("utf-8", "surrogatepass")
        kind = rng.random()
        if kind < 0.3:
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice([b"", b"\x00", b"}", b"NaN", b"\xff"]) + text[at + 1 :]
        elif kind < 0.35:
            text = b"[" * 100_000
        yield text


def hostile(setup, n):
    rng = random.Random(1)
    setup.large.faults, before = dict(FAULTS) | {}, setup.large.faults
    del setup.large.faults["SILENT"]
    try:
        client = Client(setup.address)
        for k, body in enumerate(mutants(rng, n)):
            path = rng.choice(["/v1/chat/completions", "/v1/completions"])
            status, content = client.send(
                "POST", path, body, **{"Content-Type": "application/json"}
            )
            assert status in (200, 400, 404, 429, 502), (status, body)
            if status != 200:
                assert content["error"]["message"]
                assert content["error"]["type"]
            assert "Traceback" not in str(content)
            if k % 50 == 0:
                rested(setup)
                assert setup.ask("Is it odd? 7")[0] == "odd"
    finally:
        setup.large.faults = before
        rested(setup)


def test_hostile_requests(setup):
    hostile(setup, 300)


@pytest.mark.slow
def test_many_hostile_requests_and_faults(setup):
    hostile(setup, 4000)
    words = [word for word in FAULTS if word != "SILENT"]
    rng = random.Random(2)
    setup.large.faults, before = dict(FAULTS), setup.large.faults
    for _ in range(1000):
        rested(setup)
        number, word = rng.randrange(1000), rng.choice([*words, "", ""])
        given = {"messages": [{"role": "user", "content": f"{word} {number}"}], "model": "cascade"}
        answer, error = outcome(setup, given, stream=rng.random() < 0.5)
        if error is not None:
            assert word
            codes = ("rate_limit_exceeded", "upstream_refused", "bad_gateway")
            assert error.code in (*codes, "upstream_key_refused")
            assert error.body["message"]
        elif not word:
            assert answer == truth(str(number))
    setup.large.faults = before


def test_nothing_of_a_prompt_or_key_is_logged(setup, caplog, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "sk-very-secret")
    monkeypatch.setattr(setup.app.state.service.upstreams.models[0], "key", "SECRET_KEY")
    with caplog.at_level("DEBUG"):
        setup.ask("PRIVATE words BROKEN 7")
        client = Client(setup.address)
        client.send("POST", "/v1/chat/completions", b'{"PRIVATE')
    text = caplog.text + client.get("/metrics")[1]
    assert "PRIVATE" not in text
    assert "very-secret" not in text


def test_a_token_is_the_clients_key(setup):
    app = create_proxy(ProxyConfig.load(setup.path), token="mine")
    with start(app) as address:
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="other", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with openai.OpenAI(base_url=f"{address}/v1", api_key="mine", max_retries=0) as client:
            assert len(client.models.list().data) == 2
        for given, status in ({"token": "other"}, 401), ({}, 401), ({"token": "mine"}, 400):
            client = Client(address, **given)
            assert client.send("POST", "/v1/chat/completions", b"{}")[0] == status
        assert Client(address).get("/metrics")[0] == 401


def test_audits_raise_an_alarm_and_the_large_model_answers(tmp_path, monkeypatch):
    monkeypatch.setattr("swiftsure.serve.audit_log.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.audit_log.PAUSE", 0.05)
    with ExitStack() as stack:
        setup = Setup(stack, tmp_path / "served", rate=1.0)
        proxy = setup.app.state.service
        for k in range(30):
            assert setup.ask(f"Is it odd? {k}")[0] == truth(str(k))
        wait_until(lambda: proxy.manager.audit_log.monitor.n == 30)
        assert Client(setup.address).get("/health")[1]["status"] == "ok"
        assert len(setup.large.bodies) == 30  # audits, after the answer
        setup.small.answer = lambda _: ("wrong", 0.99)  # the small model was replaced
        for k in range(300):
            if setup.ask(f"Is it odd? {k}")[1]["x-swiftsure-reason"] == "there was an alarm":
                break
            time.sleep(0.01)
        assert setup.ask("Is it odd? 7")[0] == "odd"
        assert Client(setup.address).get("/health")[1]["status"] == "full model"
        assert "swiftsure_alarm 1.0" in Client(setup.address).get("/metrics")[1]
        status = Client(setup.address).get("/status")[1]
        found = status["bill"]["usd"]
        assert found["audits"] > 0
        alone = found["answers"] + found["audits"] + found["saved"]
        assert status["costs"]["usd"] == pytest.approx(found["saved"] / alone)
        assert found["saved"] < 0  # every answer of the small model was audited
        text = Client(setup.address).get("/metrics")[1]
        assert f'swiftsure_cost_audits{{unit="usd"}} {found["audits"]}' in text
    again = create_proxy(ProxyConfig.load(setup.path))
    assert again.state.service.manager.mode.full


def test_an_outage_of_the_large_model_is_a_fault_and_no_alarm(tmp_path, monkeypatch):
    """Nothing is known of the losses then, so the promise is not watched, and not broken."""
    monkeypatch.setattr("swiftsure.serve.audit_log.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.audit_log.PAUSE", 0.05)
    with ExitStack() as stack:
        setup = Setup(stack, tmp_path / "served", rate=1.0)
        audit_log, client = setup.app.state.service.manager.audit_log, Client(setup.address)
        setup.large.faults = {"odd": status(500)}
        for k in range(100):  # as largest losses, a few of these would raise the alarm
            assert setup.ask(f"Is it odd? {k}")[0] == truth(str(k))
        wait_until(lambda: audit_log.failed == 100)
        with pytest.raises(openai.InternalServerError):
            setup.ask("Is it odd? 900")  # needs no audit, so it does not end the fault
        wait_until(lambda: audit_log.made == 1)
        health, page = client.get("/health")[1], client.get("/status")[1]
        assert (health["status"], health["alarm"]) == ("degraded", None)
        assert "an audit was lost: the last model did not answer" in health["fault"]
        assert page["headline"] == "The monitor does not work."
        setup.large.faults = {}
        assert setup.ask("Is it odd? 7")[0] == "odd"
        wait_until(lambda: client.get("/health")[1]["status"] == "ok")
        wait_until(lambda: audit_log.monitor.n == 2)
        assert audit_log.monitor.mean == 0


def test_a_request_without_an_answer_counts_as_no_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("swiftsure.serve.audit_log.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.audit_log.PAUSE", 0.05)
    with ExitStack() as stack:
        setup = Setup(stack, tmp_path / "served", rate=1.0)
        setup.large.faults = FAULTS
        with pytest.raises(openai.InternalServerError):
            setup.ask("BROKEN 900")
        wait_until(lambda: setup.app.state.service.manager.audit_log.monitor.n == 1)
        assert setup.app.state.service.manager.audit_log.monitor.mean == 0


class SlowUpstreams:
    """The last model answers a request when its future is set."""

    last, health = 0, (ModelHealth("large", last=True),)

    class large:  # noqa: N801
        @staticmethod
        def answer_of(response):
            return Answer(response)

    async def ask_large(self, asked, *, logprobs):
        return await asked


class Written:
    """A manager that notes what is written."""

    mode = None

    def __init__(self):
        self.requests = []

    def audits(self, upstreams):
        return Audits(upstreams, self, AuditQueue(1.0, 10), Bill())

    def audit(self, audited, engine):
        self.requests.append(audited.request)

    def close(self):
        pass


@pytest.mark.parametrize("kind", ["http.response.start", "http.response.body"])
def test_a_client_that_does_not_read_its_stream_is_given_up(kind):
    closed = []

    async def parts():
        while True:
            yield b"x"

    async def close():
        closed.append(True)

    async def send(message):
        if message["type"] == kind:
            await asyncio.Event().wait()

    async def run():
        await PassedOn(parts(), close, {}, 0.01)({"type": "http"}, None, send)

    with pytest.raises(GoneError):
        asyncio.run(run())
    assert closed == [True]


class BusyUpstreams(SlowUpstreams):
    """The last model is at its rate limit when it is asked first."""

    def __init__(self):
        self.health, self.asked = (ModelHealth("large", last=True),), 0

    async def ask_large(self, asked, *, logprobs):
        assert self.health[0].pause == 0
        self.asked += 1
        if self.asked == 1:
            error = UpstreamError("", status=429, retry_after=asked)
            self.health[0].failed(error)
            raise error
        return "x", b""


@pytest.mark.parametrize(("wait", "written", "asked"), [(0.05, ["0", "1", "2"], 4), (60.0, [], 1)])
def test_audits_wait_as_long_as_the_large_model_says(wait, written, asked):
    """Those that still wait when the proxy ends are not written, and neither are later ones."""

    async def run():
        manager, upstreams = Written(), BusyUpstreams()
        audits = manager.audits(upstreams)
        for k in range(3):
            audits.begin(audits.queue.choose(), str(k), wait, Found(0, "", {}, Answer("x")))
            await asyncio.sleep(0)
        if wait < 1:
            while len(manager.requests) < 3:
                await asyncio.sleep(0.01)
        await audits.close()
        return manager.requests, upstreams.asked

    assert asyncio.run(run()) == (written, asked)


def test_audits_are_written_in_the_order_of_the_requests():
    async def run():
        loop, manager = asyncio.get_running_loop(), Written()
        audits = manager.audits(SlowUpstreams())
        turns = [audits.queue.choose() for _ in range(5)]
        slow, fast = loop.create_future(), loop.create_future()
        early, last = Found(0, "", {}, Answer("x")), Found(1, "")
        fast.set_result("x")
        audits.begin(turns[2], "2", fast, early)
        audits.begin(turns[1], "1", fast, last)  # nothing to ask for
        audits.begin(turns[0], "0", slow, early)
        await asyncio.sleep(0.05)
        assert manager.requests == []  # what the slow one lost is not known yet
        slow.set_result("x")
        audits.begin(turns[4], "4", fast, None)
        await audits.close()  # request 3 never got an answer
        audits.begin(turns[3], "3", fast, None)
        return manager.requests

    assert asyncio.run(run()) == ["0", "1", "2"]


def test_a_loss_that_audits_cannot_compute_is_refused(setup, tmp_path):
    """A judge's, for example: every audit would fail."""
    judged = replace(setup.policy.certificate.promises[0], loss="graded")
    conditions = [
        Condition.of(each.key, **(dict(each.facts) | {"loss": "graded"}))
        if "loss" in dict(each.facts)
        else each
        for each in setup.policy.certificate.conditions
    ]
    certificate = setup.policy.certificate.model_copy(
        update={"promises": (judged,), "conditions": tuple(conditions)}
    )
    config = ProxyConfig.load(setup.path)
    audit = config.audit.model_copy(update={"rate": 1.0, "state": tmp_path})
    place = tmp_path / "policy.json"
    setup.policy.model_copy(update={"certificate": certificate}).save(place)
    with pytest.raises(ValueError, match="graded"):
        create_proxy(config.model_copy(update={"policy": place, "audit": audit}))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("models = 3", "models"),
        ("[[models]]\nbase_url = 'http://x'\nmodel = 'a'", "at least 2"),
        ("x = [", "not a TOML file"),
        ("[audit]\nrat = 1", "rat"),
    ],
)
def test_bad_configurations(tmp_path, text, match):
    path = tmp_path / "cascade.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        ProxyConfig.load(path)


def test_a_key_in_place_of_its_name_is_not_repeated(tmp_path):
    path = tmp_path / "cascade.toml"
    model = "[[models]]\nbase_url = 'http://x'\nmodel = 'a'\nkey = 'sk-very-secret'\n"
    path.write_text(model * 2)
    with pytest.raises(ValueError, match="name of an environment variable") as error:
        ProxyConfig.load(path)
    with pytest.raises(ValueError, match="name of an environment variable") as own:
        ProxyConfig(models=[{"base_url": "http://x", "model": "a", "key": "sk-very-secret"}] * 2)
    assert "sk-" not in str(error.value) + str(own.value)


def test_a_key_or_policy_that_is_missing_is_refused_at_the_start(setup, tmp_path):
    path = tmp_path / "cascade.toml"
    path.write_text(setup.path.read_text())
    with pytest.raises(ValueError, match=r"`policy`: there is no file .*policy\.json"):
        create_proxy(ProxyConfig.load(path))
    text = setup.path.read_text().replace('policy = "policy.json"', "")
    path.write_text(text.replace("timeout = 1.5", 'key = "NO_SUCH_KEY"'))
    with pytest.raises(ValueError, match="NO_SUCH_KEY is not set"):
        create_proxy(ProxyConfig.load(path))


def test_failures_of_a_model_are_logged_once_a_minute(setup, caplog):
    rested(setup)
    for _ in range(3):
        setup.ask("BROKEN 7")
    assert [each.message for each in caplog.records if each.name == "swiftsure.serve"] == [
        "small failed: status 500"
    ]


def test_a_policy_of_other_models_is_refused(setup, tmp_path):
    text = setup.path.read_text().replace('model = "small"', 'model = "tiny"')
    path = tmp_path / "cascade.toml"
    path.write_text(text)
    setup.policy.save(tmp_path / "policy.json")
    with pytest.raises(ValueError, match="other"):
        create_proxy(ProxyConfig.load(path))


def test_the_proxy_ends_while_requests_are_under_way(tmp_path):
    with ExitStack() as stack:
        setup = Setup(stack, tmp_path / "served")
        setup.large.delay = 0.5
        found = []

        async def ask():
            client = openai.AsyncOpenAI(base_url=f"{setup.address}/v1", api_key="x", max_retries=0)
            given = {"model": "cascade", "messages": [{"role": "user", "content": "odd? 900"}]}
            done = await client.chat.completions.create(**given)
            found.append(done.choices[0].message.content)
            await client.close()

        thread = threading.Thread(target=lambda: asyncio.run(ask()))
        thread.start()
        wait_until(lambda: setup.app.state.service.under_way == 1)
    thread.join()
    assert found == ["even"]


def test_middleware_is_not_bypassed(setup):
    """Whoever guards the proxy with middleware guards its answers too."""
    app = create_proxy(ProxyConfig.load(setup.path))
    app.add_middleware(Closed)
    body = {"model": "cascade", "messages": [{"role": "user", "content": "Is it odd? 7"}]}
    with start(app) as address:
        found = Client(address).send("POST", "/v1/chat/completions", json.dumps(body))
    assert found == (403, "closed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("number", "model"), [(7, "small"), (900, "large")])
def test_numbers_that_json_lacks_reach_clients_as_null(setup, monkeypatch, number, model, stream):
    """Some servers write -Infinity for the log-probability of a token that was masked."""
    upstream = getattr(setup, model)
    found = chat_response(truth(str(number)), 0.95, model)
    others = [{"token": "x", "logprob": -math.inf}]
    found["choices"][0]["logprobs"]["content"][0]["top_logprobs"] += others
    chunk = {"id": "1", "choices": [{"index": 0, "delta": {"content": "x"}, "score": math.nan}]}
    events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    streams = stream and model == "large"
    fault = raw(events, "text/event-stream") if streams else raw(json.dumps(found))
    monkeypatch.setitem(upstream.faults, "MASKED", fault)
    messages = [{"role": "user", "content": f"MASKED {number}"}]
    body = {"model": "cascade", "messages": messages, "logprobs": True, "stream": stream}
    client = Client(setup.address)
    status, content = client.send("POST", "/v1/chat/completions", json.dumps(body))
    text = content if stream else json.dumps(content)
    assert status == 200
    assert ('"score":null' if streams else '"logprob":null') in text.replace(": ", ":")
    assert not any(word in text for word in ("Infinity", "NaN", "error"))


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_lacks_are_refused_in_requests(number):
    body = b'{"model": "m", "messages": [{"role": "user"}], "temperature": %s}' % number.encode()
    with pytest.raises(ApiError, match="must be JSON"):
        parse_request(body, "chat")


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{}", {"Content-Type": "text/plain"}, 415, None),
        (b"{}", {"Origin": "http://evil.example"}, 403, "foreign_origin"),
        (b'{"messages": [' + b"[0]," * 120_000 + b"0]}", {}, 413, None),
        (b'{"messages": [' + b"0," * 600_000 + b"0]}", {}, 413, None),
        (json.dumps({"model": "cascade", "messages": "[,{:" * 200_000}), {}, 400, None),
    ],
)
def test_other_kinds_pages_of_other_sites_and_many_values_are_refused(
    setup, body, headers, status, code
):
    found, content = Client(setup.address).send("POST", "/v1/chat/completions", body, **headers)
    assert (found, content["error"]["code"]) == (status, code)


def test_an_empty_token_is_refused(setup):
    with pytest.raises(ValueError, match="must not be empty"):
        create_proxy(ProxyConfig.load(setup.path), token="")
