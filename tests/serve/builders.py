"""A toy engine whose answers can be told in advance, and a client."""

import http.client
import io
import json
import threading
import time
from dataclasses import replace
from urllib.parse import urlsplit

import numpy as np
from starlette.responses import PlainTextResponse

import swiftsure as ss
from swiftsure.serve import Answer, Comparison, Description, InvalidRequestError, PolicyManager
from swiftsure.serve.inputs import InputForm
from swiftsure.study.simulate import Population


def policy_of(risk="consistency", epsilon=0.05, loss="zero_one", **more):
    sample = Population(n_exits=3, overconfidence=1.5).sample(600, 0)
    record = ss.ExitRecord.from_logits(sample.logits, sample.labels)
    promise = ss.Promise(loss, risk=risk, epsilon=epsilon, **more)
    return ss.calibrate(replace(record, order=0), promise)


class Adder:
    """Answers the sum of three numbers at exit 0; the full model, at exit 2, may disagree."""

    n_exits = 3
    lanes = 1
    costs = {}  # noqa: RUF012
    inputs = InputForm(((3,), np.dtype(np.float32)))

    def __init__(self, policy):
        self.policy = policy
        self.batches = []
        self.wrong = 0.0  # inconsistency of early answers
        self.audit_fails = False
        self.gate = threading.Event()  # nothing is answered while it is clear
        self.gate.set()

    def describe(self):
        return Description("Adder", self.inputs.schema())

    def check(self, policy):
        if policy.certificate.promises[0].epsilon > 0.5:
            raise ValueError("`policy` was made for another model.")

    def check_loss(self, loss):
        pass

    def install(self, policy):
        self.policy = policy

    def answer(self, samples, *, full, slices=()):
        self.gate.wait(10)
        self.batches.append(len(samples))
        if any(sample[0] == 666 for sample in samples):
            raise RuntimeError("the model breaks")
        return [self._answer(sample, full) for sample in samples]

    def _answer(self, sample, full):
        total = float(sample.sum())
        if total < 0:
            return InvalidRequestError("its sum is negative")
        return Answer({"outputs": total}, 2 if full else 0, 0.5, total)

    def compare(self, sample, answer, loss):
        if self.audit_fails:
            raise RuntimeError("no memory")
        lost = float(answer.exit == 0) * self.wrong
        return Comparison(lost, [1 - lost, lost, 0.0], [1.0, 0.0, 0.0])


def manager_of(audit_log):
    """A manager that watches one policy with this audit log."""
    return PolicyManager(audit_log.policy, watch=lambda *_: audit_log)


class Client:
    """Sends requests to a server and returns (status, content)."""

    def __init__(self, address, token=None):
        self.place = urlsplit(address).netloc
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def send(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection(self.place, timeout=60)
        try:
            connection.request(method, path, body, self.headers | headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        kind = response.headers.get("content-type", "")
        return response.status, json.loads(content) if "json" in kind else content.decode()

    def get(self, path):
        return self.send("GET", path)

    def predict(self, inputs, **more):
        body = json.dumps({"inputs": inputs, **more})
        return self.send("POST", "/predict", body, **{"Content-Type": "application/json"})

    def predict_npy(self, array, **headers):
        file = io.BytesIO()
        np.save(file, array, allow_pickle=True)
        return self.send(
            "POST", "/predict", file.getvalue(), **{"Content-Type": "application/x-npy"}, **headers
        )


class Closed:
    """Middleware that refuses every request."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        closed = PlainTextResponse("closed", 403)
        await (closed if scope["type"] == "http" else self.app)(scope, receive, send)


def at_once(calls):
    """Run functions in threads of their own; return their results in order."""
    found = [None] * len(calls)

    def run(k):
        found[k] = calls[k]()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def lines(folder):
    """All lines of the audits' logs in a folder."""
    files = sorted(folder.glob("audits-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def wait_until(fact, seconds=30):
    """Wait for a fact, and fail if it does not come."""
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.02)
