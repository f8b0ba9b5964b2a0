"""The proxy of one reasoning model: ordinary answers that stop early, audits, alarm, fallback."""

import httpx2
import openai
import pytest

import swiftsure as ss
from swiftsure.cascade import Answer
from swiftsure.cascade.request_kinds import REQUESTS, features_of_inputs
from swiftsure.reasoning import Probe, Trace, TraceRecord
from swiftsure.serve import start
from swiftsure.serve.proxy import ProxyConfig, create_proxy
from tests.reasoning.servers import ASK, Server, need_of, right
from tests.serve.builders import wait_until

GRID = range(40, 401, 40)


@pytest.fixture
def upstream():
    found = Server()
    yield found
    found.stop()


def traces(fingerprint):
    """What the server would answer on the way to 170 questions."""
    found = []
    for k in range(170):
        need = need_of(k)
        probes = [
            Probe(at, Answer(right(k) if at >= need else "?", 0.98 if at >= need else 0.4))
            for at in range(40, 2 * need + 1, 40)
        ]
        found.append(Trace(k, probes, 2 * need, Answer(right(k)), right(k)))
    settings = {REQUESTS: features_of_inputs(["Is q1 odd?"])}
    return TraceRecord(found, fingerprint, settings)


def configured(folder, upstream, tail="", policy=True):
    path = folder / "thinking.toml"
    path.write_text(
        f"""{'policy = "policy.json"' if policy else ""}
name = "thinker"

[[models]]
base_url = "{upstream.url}"
model = "qwen3-tiny"
per_million = [1, 10]

[thinking]
max_tokens = 1000
{tail}
"""
    )
    if policy:
        config = ProxyConfig.load(path)
        exits = traces(config.reasoner().fingerprint).exits(GRID)
        stable = ss.Promise("zero_one", risk="consistency", epsilon=0.05)
        ss.calibrate(exits, stable, score="confidence").save(config.policy)
    return ProxyConfig.load(path)


def ask(address, text, model="thinker", **more):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": text}]
    with client:
        found = client.chat.completions.with_raw_response.create(
            model=model, messages=messages, **more
        )
    return found.parse(), found.headers


def test_clients_get_ordinary_answers_that_stopped_early(tmp_path, upstream):
    config = configured(tmp_path, upstream)
    with start(create_proxy(config)) as address:
        answer, headers = ask(address, "Is q16 odd?")
        page = httpx2.get(f"{address}/metrics").text
    message = answer.choices[0].message
    assert message.content == f"{ASK}even}}"
    assert message.reasoning_content.startswith(" w0 w1")
    assert headers["x-swiftsure-reason"] == "sure enough"
    assert headers["x-swiftsure-exit"] == "4"
    assert headers["x-swiftsure-model"] == "qwen3-tiny after 200 tokens"
    assert answer.usage.completion_tokens >= 200  # asking and what was written ahead included
    assert "usd=" in headers["x-swiftsure-cost"]
    assert 'swiftsure_upstream_failures_total{model="qwen3-tiny"} 0.0' in page


def test_streams_hold_the_same_answer(tmp_path, upstream):
    with start(create_proxy(configured(tmp_path, upstream))) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        with client:
            parts = client.chat.completions.create(
                model="thinker",
                messages=[{"role": "user", "content": "Is q3 odd?"}],
                stream=True,
            )
            text = "".join(each.choices[0].delta.content or "" for each in parts)
    assert text == f"{ASK}odd}}"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"model": "qwen3-tiny"}, "asked for by name"),
        ({"max_tokens": 7}, "`max_tokens` was not set when the policy was made"),
    ],
)
def test_what_no_policy_covers_goes_to_the_model_as_it_came(tmp_path, upstream, more, reason):
    with start(create_proxy(configured(tmp_path, upstream))) as address:
        answer, headers = ask(address, "Is q3 odd?", **more)
    assert headers["x-swiftsure-reason"] == reason
    assert answer.choices[0].message.content == "The answer is \\boxed{odd}."
    assert [("messages" in each) for each in upstream.requests] == [True]


def test_a_failure_on_the_way_hands_over_to_the_full_answer(tmp_path, upstream):
    upstream.faults = [400]
    with start(create_proxy(configured(tmp_path, upstream))) as address:
        answer, headers = ask(address, "Is q3 odd?")
    assert headers["x-swiftsure-reason"] == "qwen3-tiny failed on the way"
    assert answer.choices[0].message.content == "The answer is \\boxed{odd}."


def test_without_a_policy_the_model_thinks_to_the_end(tmp_path, upstream):
    with start(create_proxy(configured(tmp_path, upstream, policy=False))) as address:
        _, headers = ask(address, "Is q3 odd?")
    assert headers["x-swiftsure-reason"] == "there is no policy"


def test_audits_think_to_the_end_and_an_alarm_brings_the_full_model(tmp_path, upstream):
    config = configured(tmp_path, upstream, "[audit]\nrate = 1.0\nalpha = 0.1\n")
    with start(create_proxy(config)) as address:
        ask(address, "Is q2 odd?")
        wait_until(lambda: sum(bool(e.get("stream")) for e in upstream.requests) == 2)
        upstream.final = "The answer is \\boxed{other than %s}."  # answers on the way are wrong now

        def alarmed():
            _, headers = ask(address, "Is q2 odd?")
            return headers["x-swiftsure-reason"] == "there was an alarm"

        wait_until(alarmed)
    log = next(config.audit.state.rglob("*.jsonl")).read_text().splitlines()
    assert len(log) >= 4


def test_a_policy_of_another_model_is_refused(tmp_path, upstream):
    config = configured(tmp_path, upstream)
    exits = traces("sha256:" + "0" * 64).exits(GRID)
    stable = ss.Promise("zero_one", risk="consistency", epsilon=0.05)
    ss.calibrate(exits, stable, score="confidence").save(config.policy)
    with pytest.raises(ValueError, match="another model"):
        create_proxy(config)


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (
            '[[models]]\nbase_url = "http://localhost/v1"\nmodel = "m"\n',
            "thinking is for one model",
        ),
        ('families = "qwen3"\n', "families"),
    ],
)
def test_bad_files(tmp_path, upstream, tail, words):
    with pytest.raises(ValueError, match=words):
        configured(tmp_path, upstream, tail, policy=False)


def test_one_model_without_thinking_is_refused(tmp_path):
    path = tmp_path / "cascade.toml"
    path.write_text('[[models]]\nbase_url = "http://localhost/v1"\nmodel = "m"\n')
    with pytest.raises(ValueError, match=r"at least 2, or one with a \[thinking\] table"):
        ProxyConfig.load(path)
