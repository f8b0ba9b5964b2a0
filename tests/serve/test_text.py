"""Language models behind a server: OpenAI's API, continuous batching, audits, other policies."""

import http.client
import json
import random
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest

from swiftsure.losses import LOSSES
from swiftsure.serve import (
    AuditLog,
    Batcher,
    Limits,
    PolicyManager,
    audit_monitor,
    create_app,
    load_engine,
    start,
)
from swiftsure.serve.engine import EngineOptions
from swiftsure.serve.engines.text import TextEngine
from swiftsure.serve.queueing import Submission
from swiftsure.text import CalmModel, fast_blocks
from tests.serve.builders import Client, at_once, lines, wait_until
from tests.serve.texts import TOKENS, calm, pair, saved
from tests.text.tokenizing import texts, tokenizer

SYSTEMS = {"llama": calm, "t5": lambda: calm("t5"), "pair": pair}


@pytest.fixture(params=SYSTEMS)
def system(request):
    return SYSTEMS[request.param]()


def text_of(system, prompt, **options):
    """What `generate` answers to one prompt."""
    words = tokenizer()
    ids = words(prompt, return_tensors="pt")["input_ids"]
    tokens = system.generate(ids, **options).sequences[0]
    model = system.model if isinstance(system, CalmModel) else system.large
    start = 0 if model.config.is_encoder_decoder else ids.shape[1]
    return words.decode(tokens[start:], skip_special_tokens=True)


def complete(client, prompt, **fields):
    kind = "messages" if isinstance(prompt, list) else "prompt"
    path = "/v1/chat/completions" if kind == "messages" else "/v1/completions"
    body = json.dumps({"model": "text", kind: prompt, **fields})
    return client.send("POST", path, body, **{"Content-Type": "application/json"})


def events(text):
    parts = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def test_answers_are_those_of_generate(system):
    """Requests that come at any time, several at once, get the tokens that they get alone."""
    prompts = texts(12, seed=3)
    engine = TextEngine(system, tokenizer(), room=3)
    with start(create_app(engine)) as address:
        client, rng = Client(address), random.Random(0)

        def ask(prompt):
            threading.Event().wait(rng.random() / 10)
            return complete(client, prompt)

        found = at_once([lambda each=each: ask(each) for each in prompts])
        status, predicted = client.predict(prompts[0])
    for prompt, (code, answer) in zip(prompts, found, strict=True):
        assert code == 200, answer
        assert answer["choices"][0]["text"] == text_of(system, prompt)
        assert answer["usage"]["completion_tokens"] <= TOKENS
    assert status == 200
    assert predicted["text"] == found[0][1]["choices"][0]["text"]
    if isinstance(system, CalmModel):
        assert len({each["swiftsure"]["exit"] for _, each in found}) >= 1


def test_streams_have_the_same_text():
    engine = TextEngine(calm(), tokenizer())
    with start(create_app(engine)) as address:
        client, most = Client(address), 0
        for prompt in texts(4, seed=5):
            _, whole = complete(client, prompt)
            status, stream = complete(
                client, prompt, stream=True, stream_options={"include_usage": True}
            )
            assert status == 200
            *parts, usage = events(stream)
            assert (
                "".join(each["choices"][0]["text"] for each in parts)
                == (whole["choices"][0]["text"])
            )
            most = max(most, len(parts))
            assert parts[-1]["choices"][0]["finish_reason"] in ("stop", "length")
            assert usage["usage"] == whole["usage"]
    assert most > 3


def test_all_parts_are_delivered_before_the_answer():
    """A stream ends with the answer, so a part that came later would be lost."""
    engine, delivered = TextEngine(calm(), tokenizer()), []
    batcher, answers = Batcher(engine, deliver=delivered.append), [Future() for _ in range(4)]
    for k, prompt in enumerate(texts(4, seed=5)):
        sample = engine.inputs.sample({"prompt": prompt, "stream": True})
        batcher.submit_all([Submission(str(k), sample, None, answers[k], k)])
    batcher.close()
    told = [whose for together in delivered for whose, _ in together]
    assert sum(isinstance(whose, int) for whose in told) > 4
    for k, answer in enumerate(answers):
        assert k not in told[told.index(answer) :]


def test_chats_by_the_chat_template(tmp_path):
    folder = saved(calm(), tmp_path / "text")
    with start(create_app(load_engine(folder))) as address:
        client = Client(address)
        messages = [{"role": "user", "content": "w04 w05"}, {"role": "user", "content": "w06"}]
        _, answer = complete(client, messages)
        _, stream = complete(client, messages, stream=True)
        _, models = client.get("/v1/models")
        refused = complete(client, "w04", n=2)
        other = client.send(
            "POST", "/v1/completions", '{"model": "gpt", "prompt": "w04"}', **{
                "Content-Type": "application/json"}
        )  # fmt: skip
    said = answer["choices"][0]["message"]
    assert said == {"role": "assistant", "content": text_of(calm(), "w04 w05 w06")}
    parts = [each["choices"][0]["delta"].get("content", "") for each in events(stream)]
    assert "".join(parts) == said["content"]
    assert [each["id"] for each in models["data"]] == ["text"]
    assert refused[0] == 400
    assert other[0] == 404


def test_other_options_get_the_full_model():
    """A policy says nothing about them, so they are neither audited nor cut short."""
    system = calm()
    full = CalmModel(system.model, None)
    engine = TextEngine(system, tokenizer())
    with start(create_app(engine)) as address:
        client, prompt = Client(address), texts(1, seed=9)[0]
        _, answer = complete(client, prompt, max_tokens=3)
        _, covered = complete(client, prompt, max_tokens=TOKENS, temperature=0)
        _, sampled = complete(client, prompt, max_tokens=6, temperature=0.7, seed=5)
        _, again = complete(client, prompt, max_tokens=6, temperature=0.7, seed=5)
        stop = text_of(full, prompt, max_new_tokens=3).split()[1]
        _, stopped = complete(client, prompt, max_tokens=3, stop=stop)
    assert answer["swiftsure"]["full_model"]
    assert answer["choices"][0]["text"] == text_of(full, prompt, max_new_tokens=3)
    assert not covered["swiftsure"]["full_model"]
    assert covered["choices"][0]["text"] == text_of(system, prompt)
    assert sampled["choices"][0]["text"] == again["choices"][0]["text"]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stop not in stopped["choices"][0]["text"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": ""},
        {"prompt": ["a", "b"]},
        {"prompt": "w04", "max_tokens": 0},
        {"prompt": "w04", "temperature": "hot"},
        {"prompt": "w04", "stop": 3},
        {"prompt": "w04", "logprobs": 5},
        {"prompt": "w04 " * 200},
        {"prompt": "w04", "max_tokens": 10_000},
    ],
)
def test_wrong_requests_are_refused(wrong, client_of_text):
    body = json.dumps({"model": "text", **wrong})
    status, answer = client_of_text.send(
        "POST", "/v1/completions", body, **{"Content-Type": "application/json"}
    )
    assert status == 400, answer
    assert answer["error"]["message"]
    status, _ = complete(client_of_text, "w04")
    assert status == 200


@pytest.fixture(scope="module")
def client_of_text():
    with start(create_app(TextEngine(calm(), tokenizer()))) as address:
        yield Client(address)


@contextmanager
def audited(system, folder, *, engine=None, alpha=0.01):
    own = TextEngine(system, tokenizer()) if engine is None else engine
    manager = PolicyManager(
        own.policy,
        watch=lambda policy, share: AuditLog(policy, audit_monitor(policy, alpha * share), folder),
    )
    with start(create_app(own, Limits(timeout=60), manager=manager, audit_rate=1.0)) as address:
        yield Client(address), manager


def test_audits_compare_with_the_full_model(system, tmp_path):
    """Each loss in the log is that of the text against the full model's text."""
    prompts = texts(8, seed=11)
    with audited(system, tmp_path) as (client, manager):
        given = {}
        for prompt, (status, answer) in zip(
            prompts, at_once([lambda p=p: complete(client, p) for p in prompts]), strict=True
        ):
            assert status == 200
            given[answer["id"]] = prompt, answer["choices"][0]["text"]
        complete(client, prompts[0], max_tokens=2)  # not covered
        wait_until(lambda: manager.audit_log.made == len(prompts))
    (folder,) = tmp_path.iterdir()
    found = {each["request"]: each["loss"] for each in lines(folder)}
    assert found.keys() == given.keys()
    full = TextEngine(system, tokenizer())._full
    loss = LOSSES.choose("token_f1")
    for name, (prompt, text) in given.items():
        whole = text_of(full, prompt, max_new_tokens=TOKENS)
        expected = loss.against_last(np.array([[text, whole]], object))[0, 0]
        assert found[name] == pytest.approx(expected)


def test_a_request_that_is_audited_goes_on_without_its_client(tmp_path):
    """Clients may leave because an answer is bad; a loss that is left out would hide that."""
    engine = TextEngine(calm(), tokenizer())
    step, slow = engine.step, threading.Event()
    engine.step = lambda: (slow.wait(0.05), step())[1]
    with audited(calm(), tmp_path, engine=engine) as (client, manager):
        connection = http.client.HTTPConnection(client.place)
        body = json.dumps({"model": "text", "prompt": "w04 w05", "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().read(10)
        connection.close()
        wait_until(lambda: manager.audit_log.made == 1)


def test_a_policy_is_installed_when_all_have_left(tmp_path):
    first, second = calm(), calm(epsilon=0.9).policy
    engine = TextEngine(first, tokenizer(), room=2)
    installed = []
    install = engine.install
    engine.install = lambda policy: (installed.append(len(engine._rows)), install(policy))
    prompts = texts(10, seed=13)
    app = create_app(engine, token="secret")
    with start(app) as address:
        client = Client(address, "secret")
        threads = [
            threading.Thread(target=lambda p=p: complete(client, p, stream=True)) for p in prompts
        ]
        for each in threads[:6]:
            each.start()
        second.save(tmp_path / "policy.json")
        status, _ = client.send(
            "POST",
            "/policy",
            (tmp_path / "policy.json").read_bytes(),
            **{"Content-Type": "application/json"},
        )
        assert status == 200
        for each in threads[6:]:
            each.start()
        for each in threads:
            each.join()
        _, answer = complete(client, prompts[0])
    assert installed == [0]
    under = CalmModel(first.model, second)
    assert answer["choices"][0]["text"] == text_of(under, prompts[0])


def test_what_breaks_fails_alone(tmp_path):
    """Whatever a step raises, the server goes on, and the next request is answered."""
    engine = TextEngine(calm(), tokenizer())
    broken = iter([True])
    step = engine._batch.step

    def fail():
        if next(broken, False):
            raise RuntimeError("no memory")
        return step()

    engine._batch.step = fail
    with start(create_app(engine)) as address:
        client = Client(address)
        assert complete(client, "w04 w05")[0] == 500
        assert complete(client, "w04 w05")[0] == 200
        assert client.get("/health")[1]["status"] == "ok"


def test_damaged_folders_are_refused(tmp_path):
    folder = saved(calm(), tmp_path / "text")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        load_engine(folder)


def test_compiled_blocks_serve_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(fast_blocks, "_compile", lambda _, **__: fast_blocks.run_block)
    folder = saved(calm(), tmp_path / "calm")
    prompt, options = texts(1)[0], {"max_new_tokens": TOKENS}
    engine = TextEngine.load(folder, EngineOptions(capture=True, compile=True))
    assert engine.system.decoder.fast is not None
    assert text_of(engine.system, prompt, **options) == text_of(calm(), prompt, **options)
    engine.install(engine.policy)  # a policy that is put in its place is run in the same way
    for system in [*engine._systems.values(), engine._full]:
        assert system.decoder.fast is not None
        assert system.capture is True
    with pytest.raises(ValueError, match="`compile` needs `capture`"):
        TextEngine.load(folder, EngineOptions(compile=True))
