"""The proxy answers OpenAI's own client from a certified cascade, whatever upstreams do."""

import asyncio
import json
import math
import random
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import openai
import pytest

from swiftsure.cascade import Answer
from swiftsure.serve import start
from swiftsure.serve.proxy import ProxyConfig, create_proxy
from swiftsure.serve.proxy.asking import Found
from swiftsure.serve.proxy.audits import Audits, CascadeEngine
from swiftsure.serve.proxy.requests import ProxyError, asked_of, uncovered
from tests.serve.builders import Client, Closed, at_once
from tests.serve.test_watching import wait_until
from tests.serve.upstreams import FAULTS, Upstream, chat_response, raw

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
        ({"max_tokens": 5}, "`max_tokens` was not set when the policy was made"),
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
        assert "max_tokens" not in body
    assert len(setup.small.bodies) == 1


def test_models_of_two_kinds_have_no_request_in_common():
    asked = asked_of(b'{"model": "m", "messages": [{"role": "user"}]}', "chat")
    assert uncovered(asked, {"chat"}, {}) is None
    assert uncovered(asked, {"chat", "completions"}, {}) == "the policy is for chat and completions"


def test_parameters_are_compared_as_json():
    asked = asked_of(b'{"model": "m", "messages": [{"role": "user"}], "a": {"b": [1]}}', "chat")
    assert uncovered(asked, {"chat"}, {"a": {"b": [1.0]}}) is None
    assert uncovered(asked, {"chat"}, {"a": {"b": [True]}}) is not None


def test_what_the_client_did_not_ask_for_is_not_sent(setup):
    given = {"model": "cascade", "messages": [{"role": "user", "content": "Is it odd? 7"}]}
    assert setup.client.chat.completions.create(**given).choices[0].logprobs is None
    found = setup.client.chat.completions.create(**given, logprobs=True)
    assert found.choices[0].logprobs.content[0].token == "odd"
    assert setup.ask("Is it odd? 7", temperature=0)[1]["x-swiftsure-model"] == "small"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_small_model_that_fails_hands_over(setup, fault, stream):
    wait_until(lambda: setup.app.state.proxy.upstreams.pause(0) == 0)
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
    pauses = setup.app.state.proxy.upstreams._pauses
    pauses[:] = [0.0] * len(pauses)
    monkeypatch.setattr(setup.large, "faults", FAULTS)
    monkeypatch.setattr(setup.small, "faults", {})
    given = {"messages": [{"role": "user", "content": f"{fault} 900"}], "model": "cascade"}
    began = time.monotonic()
    text, error = outcome(setup, given, stream)
    pauses[:] = [0.0] * len(pauses)
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
    upstreams = setup.app.state.proxy.upstreams
    upstreams._pauses[:] = [time.monotonic() + 5.0, 0.0]
    asked = len(setup.small.bodies)
    answer, headers = setup.ask("Is it odd? 7")
    assert (answer, headers["x-swiftsure-reason"]) == ("odd", "small asked for a pause")
    assert len(setup.small.bodies) == asked
    upstreams._pauses[:] = [0.0, time.monotonic() + 5.0]
    assert setup.ask("Is it odd? 7")[1]["x-swiftsure-model"] == "small"
    with pytest.raises(openai.RateLimitError) as caught:
        setup.ask("Is it odd? 900")
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 5
    upstreams._pauses[:] = [0.0, 0.0]


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
    assert setup.app.state.proxy.under_way == 0


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
                setup.app.state.proxy.upstreams._pauses[:] = [0.0, 0.0]
                assert setup.ask("Is it odd? 7")[0] == "odd"
    finally:
        setup.large.faults = before
        setup.app.state.proxy.upstreams._pauses[:] = [0.0, 0.0]


def test_hostile_requests(setup):
    hostile(setup, 300)


@pytest.mark.slow
def test_many_hostile_requests_and_faults(setup):
    hostile(setup, 4000)
    words = [word for word in FAULTS if word != "SILENT"]
    rng = random.Random(2)
    setup.large.faults, before = dict(FAULTS), setup.large.faults
    for _ in range(1000):
        setup.app.state.proxy.upstreams._pauses[:] = [0.0, 0.0]
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
    monkeypatch.setattr(setup.app.state.proxy.upstreams.models[0], "key", "SECRET_KEY")
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
    monkeypatch.setattr("swiftsure.serve.watching.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.watching.PAUSE", 0.05)
    with ExitStack() as stack:
        setup = Setup(stack, tmp_path / "served", rate=1.0)
        proxy = setup.app.state.proxy
        for k in range(30):
            assert setup.ask(f"Is it odd? {k}")[0] == truth(str(k))
        wait_until(lambda: proxy.guard.watcher.monitor.n == 30)
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
        assert status["costs"]["usd"] != 0
    again = create_proxy(ProxyConfig.load(setup.path))
    assert again.state.proxy.full


def test_a_request_without_an_answer_counts_as_the_lowest_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("swiftsure.serve.watching.SETTLE", 0.0)
    monkeypatch.setattr("swiftsure.serve.watching.PAUSE", 0.05)
    with ExitStack() as stack:
        setup = Setup(stack, tmp_path / "served", rate=1.0)
        setup.large.faults = FAULTS
        with pytest.raises(openai.InternalServerError):
            setup.ask("BROKEN 900")
        wait_until(lambda: setup.app.state.proxy.guard.watcher.monitor.n == 1)
        assert setup.app.state.proxy.guard.watcher.monitor.mean == 0


class SlowUpstreams:
    """The last model answers a request when its future is set."""

    class large:  # noqa: N801
        @staticmethod
        def answer_of(response):
            return Answer(response)

    async def ask_large(self, asked, *, logprobs):
        return await asked


class Written:
    """A guard that notes what is written."""

    mode = None

    def __init__(self):
        self.requests = []

    def audit(self, audited, engine):
        self.requests.append(audited.request)

    def close(self):
        pass


def test_audits_are_written_in_the_order_of_the_requests():
    async def run():
        loop, guard = asyncio.get_running_loop(), Written()
        audits = Audits(SlowUpstreams(), guard, CascadeEngine(2), 1.0, 10)
        turns = [audits.choose() for _ in range(5)]
        slow, fast = loop.create_future(), loop.create_future()
        early, last = Found(0, "", {}, Answer("x")), Found(1, "")
        fast.set_result("x")
        audits.begin(turns[2], "2", fast, early)
        audits.begin(turns[1], "1", fast, last)  # nothing to ask for
        audits.begin(turns[0], "0", slow, early)
        await asyncio.sleep(0.05)
        assert guard.requests == []  # what the slow one lost is not known yet
        slow.set_result("x")
        audits.begin(turns[4], "4", fast, None)
        await audits.close()  # request 3 never got an answer
        audits.begin(turns[3], "3", fast, None)
        return guard.requests

    assert asyncio.run(run()) == ["0", "1", "2"]


def test_a_loss_that_audits_cannot_compute_is_refused(setup, tmp_path):
    """A judge's, for example: every audit would fail, and count as no loss."""
    judged = setup.policy.certificate.promises[0].model_copy(update={"loss": "graded"})
    certificate = setup.policy.certificate.model_copy(update={"promises": (judged,)})
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


def test_a_key_or_policy_that_is_missing_is_refused_at_the_start(setup, tmp_path):
    path = tmp_path / "cascade.toml"
    path.write_text(setup.path.read_text())
    with pytest.raises(ValueError, match=r"`policy`: there is no file .*policy\.json"):
        create_proxy(ProxyConfig.load(path))
    text = setup.path.read_text().replace('policy = "policy.json"', "")
    path.write_text(text.replace("timeout = 1.5", 'key = "NO_SUCH_KEY"'))
    with pytest.raises(ValueError, match="NO_SUCH_KEY is not set"):
        create_proxy(ProxyConfig.load(path))


def test_failures_of_a_model_are_logged_once_a_minute(setup, caplog, monkeypatch):
    monkeypatch.setattr(setup.app.state.proxy.upstreams, "_logged", [-1e9, -1e9])
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
        wait_until(lambda: setup.app.state.proxy.under_way == 1)
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
    with pytest.raises(ProxyError, match="must be JSON"):
        asked_of(body, "chat")
