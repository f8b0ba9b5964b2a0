"""Against servers that run here: transformers' own and ours; both give no log-probabilities."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
import warnings

import pytest

pytest.importorskip("transformers")

import swiftsure as ss
from swiftsure.cascade import Backoff, Endpoint
from swiftsure.reasoning import (
    LocalReasoner,
    Reasoner,
    Thinker,
    ThinkingFamily,
    Voter,
    collect_traces,
    collect_votes,
)
from swiftsure.serve import create_app, start
from swiftsure.serve.engines.text import TextEngine
from tests.reasoning.builders import tiny_reasoner
from tests.serve.texts import calm
from tests.text.tokenizing import texts, tokenizer

FAMILY = ThinkingFamily("{content}", " <think>", " </think> ")
OPTIONS = {"family": FAMILY, "answer_prompt": "", "answer_tokens": 1, "max_tokens": 12}
QUESTIONS = ["1 2 3", "4 5", "6 7 8 9"]
BACKOFF = Backoff(retries=1, first=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("reasoner")
    model, tokenizer = tiny_reasoner()
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def transformers_server(folder):
    """Transformers' own server, in a process of its own."""
    pytest.importorskip("fastapi")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health"):
                break
            if server.poll() is not None or time.monotonic() > until:
                pytest.fail("transformers' server did not start")
            time.sleep(0.1)
        yield f"{address}/v1"
    finally:
        server.terminate()
        server.wait(30)


def reasoner(url, folder, parameters):
    endpoint = Endpoint(
        url, str(folder), key=None, logprobs=None, parameters=parameters, name="tiny"
    )
    return Reasoner(
        endpoint, parse=lambda text: text.split()[0] if text.split() else None, **OPTIONS
    )


@pytest.mark.slow
def test_transformers_server_is_collected_from_and_stopped(transformers_server, folder):
    client = reasoner(transformers_server, folder, {})
    record = collect_traces(client, QUESTIONS, checkpoints=4, backoff=BACKOFF, concurrency=1)
    local = LocalReasoner(*tiny_reasoner(), parse=client.parse, **OPTIONS)
    expected = collect_traces(local, QUESTIONS, checkpoints=4)
    for found, known in zip(record.traces, expected.traces, strict=True):
        assert 0 <= found.tokens - known.tokens <= 1  # the server counts the end token too
        assert [p.answer.answer for p in found.probes] == [p.answer.answer for p in known.probes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # thoughts this short save little or nothing
        exits = record.exits([4, 8])
    assert list(exits.confidences) == ["agreement", "progress"]
    always = ss.calibrate(
        exits, risk="consistency", loss="zero_one", epsilon=0.99, delta=0.5, score="progress"
    )
    thought = Thinker(client, always, backoff=BACKOFF).answer(QUESTIONS[0])
    if always.threshold is not None:
        assert thought.stopped
    whole = Thinker(client, backoff=BACKOFF).answer(QUESTIONS[0])
    assert whole.tokens == record.traces[0].tokens


@pytest.mark.slow
def test_votes_of_transformers_server(transformers_server, folder):
    endpoint = Endpoint(
        transformers_server,
        str(folder),
        key=None,
        logprobs=None,
        parameters={"temperature": 1.5, "max_tokens": 2},
    )
    read = lambda text: text.split()[0] if text.split() else None  # noqa: E731
    record = collect_votes(endpoint, QUESTIONS, samples=4, parse=read, concurrency=1)
    assert all(len(row) == 4 for row in record.answers)
    policy = ss.calibrate(
        record.exits(), risk="consistency", loss="zero_one", epsilon=0.9, delta=0.5, score="lead"
    )
    assert Voter(endpoint, policy, parse=read).answer(QUESTIONS[0]).samples <= 4


def test_our_own_text_engine_is_asked():
    with start(create_app(TextEngine(calm(), tokenizer()))) as address:
        client = Reasoner(
            Endpoint(f"{address}/v1", "text", key=None, logprobs=None, parameters={}),
            family=ThinkingFamily("{content}", " w01", " w02 "),
            answer_prompt="w03",
            answer_tokens=2,
            max_tokens=6,
            parse=lambda text: text.strip() or "nothing",
        )
        record = collect_traces(client, texts(2, seed=5), checkpoints=2, backoff=BACKOFF)
        whole = Thinker(client, backoff=BACKOFF).answer(texts(2, seed=5)[0])
    assert all(trace.probes for trace in record.traces if trace.tokens >= 2)
    assert abs(whole.tokens - record.traces[0].tokens) <= 4  # it may send several in one event
