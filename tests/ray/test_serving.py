"""A certified model in Ray Serve: answers over HTTP, in batches, with exit, confidence and id."""

import socket
import warnings
from functools import partial

import pytest
import torch

from swiftsure.serve import Limits
from swiftsure.serve.engines.torch import TorchEngine
from swiftsure.serve.ray_serve import ray_application
from swiftsure.torch import EarlyExit
from tests.serve.builders import Client, at_once
from tests.torch.builders import inputs, middle_threshold, network, policy_of

N = 24
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Counting(TorchEngine):
    """Also answers how many requests were in the batch."""

    def answer(self, samples, *, full, slices=()):
        answers = super().answer(samples, full=full, slices=slices)
        for each in answers:
            if not isinstance(each, Exception):
                each.content["batch"] = len(samples)
        return answers


def early_exit():
    model, batch = network(), inputs(60)
    policy = policy_of(middle_threshold(model, batch), model.n_exits)
    return EarlyExit(model, policy, on_invalid="mark")


def engine(kind):
    torch.set_num_threads(1)
    return kind(early_exit(), inputs(1))


@pytest.fixture(scope="module")
def client(cluster):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray Serve's own models
        from ray import serve
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    limits = Limits(max_batch=8, max_wait_ms=200)
    serve.run(ray_application(partial(engine, Counting), limits), logging_config={"log_level": 40})
    yield Client(f"http://127.0.0.1:{port}")
    serve.shutdown()


def test_answers_come_in_batches_with_exit_confidence_and_id(client):
    batch = inputs(N, seed=3)
    calls = [partial(client.predict, row.tolist(), id=f"r{k}") for k, row in enumerate(batch)]
    found, out = at_once(calls), early_exit()(batch)
    for k, (status, answer) in enumerate(found):
        assert status == 200
        assert answer["id"] == f"r{k}"
        assert answer["exit"] == out.exits[k]
        assert answer["prediction"] == out.predictions[k]
        assert 0 < answer["confidence"] <= 1
        assert answer["full_model"] is False
    assert max(answer["batch"] for _, answer in found) > 1


def test_a_bad_request_fails_alone(client):
    good, bad = at_once(
        [partial(client.predict, [0.1] * 6), partial(client.predict, [0.1] * 5, id="bad")]
    )
    assert good[0] == 200
    assert bad[0] == 422
    assert bad[1]["id"] == "bad"
    status, policy = client.get("/policy")
    assert status == 200
    assert policy["policy"]["score"] == "top1"
