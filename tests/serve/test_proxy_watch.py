"""The proxy watches: slices, gaps with late labels, providers that change, rates of audits."""

import json
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import openai
import pytest

import swiftsure as ss
from swiftsure.serve import start
from swiftsure.serve.proxy import ProxyConfig, create_proxy
from tests.serve.builders import Client, wait_until
from tests.serve.upstreams import Upstream


def truth(text):
    return "odd" if int(text.split()[-1]) % 2 else "even"


class Models(ExitStack):
    """A small model that is sure below 800, and a large one; both may change."""

    def __enter__(self):
        self.drift = False
        self.small = Upstream(self.answer, "small-2026-01")
        self.large = Upstream(lambda text: (truth(text), 0.99), "large-2026-01")
        self.places = [
            self.enter_context(start(each.app)) + "/v1" for each in (self.small, self.large)
        ]
        return self

    def answer(self, text):
        number = int(text.split()[-1])
        if number >= 800:
            return ("odd" if number % 4 < 2 else "even"), 0.3
        wrong = self.drift and number % 5 < 2
        return (truth(text) if not wrong else truth(f"{number + 1}")), 0.95

    def file(self, folder, head="", tail=""):
        models = "".join(
            f'[[models]]\nbase_url = "{place}"\nmodel = "{name}"\ntimeout = 30\n'
            f"per_million = [{price}, 1]\n"
            for place, name, price in zip(self.places, ("small", "large"), (1, 10), strict=True)
        )
        path = folder / "cascade.toml"
        path.write_text(f'policy = "policy.json"\n{head}\n{models}\n{tail}')
        return path

    def policy(self, path, promise, slices=None, labels=None):
        config = ProxyConfig.load(path)
        cascade = config.cascade()
        inputs = [f"Is it odd? {k}" for k in np.random.default_rng(0).integers(0, 1000, 400)]
        truths = [truth(text) for text in inputs] if labels else None
        record = replace(cascade.collect(inputs, truths, progress=False), order=0)
        if slices:
            record = record.sliced([slices[k % len(slices)] for k in range(record.n)])
        policy = cascade.calibrate(record, promise)
        policy.save(config.policy)
        return policy


@pytest.fixture
def models():
    with Models() as stack:
        yield stack


def ask(address, text, header=None, **more):
    client = openai.OpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0, default_headers=header or {}
    )
    with client:
        found = client.chat.completions.with_raw_response.create(
            model="cascade", messages=[{"role": "user", "content": text}], **more
        )
    return found.parse().choices[0].message.content, found.headers


STABLE = ss.Promise("exact_match", risk="consistency", epsilon=0.05)


@pytest.mark.parametrize(
    ("by", "request_of"),
    [
        ('header = "x-customer"', lambda name: ({"X-Customer": name}, {})),
        ('field = "user"', lambda name: ({}, {"user": name})),
        ('field = "metadata.tenant"', lambda name: ({}, {"metadata": {"tenant": name}})),
    ],
)
def test_slices_by_header_or_field(models, tmp_path, by, request_of):
    path = models.file(tmp_path, tail=f"[slices]\n{by}")
    models.policy(path, replace(STABLE, within="each slice"), slices=["ann", "bob"])
    with start(create_proxy(ProxyConfig.load(path))) as address:
        for name, model in (("ann", "small"), ("bob", "small"), ("eve", "large")):
            header, more = request_of(name)
            _, headers = ask(address, "Is it odd? 7", header, **more)
            assert headers["x-swiftsure-model"] == model
        _, headers = ask(address, "Is it odd? 7")
        assert headers["x-swiftsure-reason"] == "the policy has no such slice"


def test_slices_are_told_in_one_way(models, tmp_path):
    path = models.file(tmp_path, tail="[slices]\n")
    with pytest.raises(ValueError, match="must have a header or a field"):
        ProxyConfig.load(path)


def test_labels_that_arrive_later_watch_a_gap(models, tmp_path):
    audit = '[audit]\nrate = 1.0\nlabels = true\nstate = "kept"'
    path = models.file(tmp_path, tail=audit)
    models.policy(path, ss.Promise("exact_match", epsilon=0.05), labels=True)
    models.drift = True  # the small model is wrong where the number ends in 0, 1, 5 or 6
    app = create_proxy(ProxyConfig.load(path))
    with start(app) as address:
        client = Client(address)
        ids = {}
        for number in range(200, 280):
            _, headers = ask(address, f"Is it odd? {number}")
            ids[headers["x-request-id"]] = truth(str(number))
        log = app.state.service.manager.audit_log
        wait_until(lambda: log.made >= 80)
        needed = client.get("/labels")[1]["needed"]
        assert len(needed) == 32  # where both models agree, no label is needed
        body = json.dumps({"labels": {needed[0]: 5}})
        kind = {"Content-Type": "application/json"}
        assert client.send("POST", "/labels", body, **kind)[0] == 422
        body = json.dumps({"labels": {name: ids[name] for name in needed}})
        status, found = client.send("POST", "/labels", body, **kind)
        assert (status, set(found["results"].values())) == (200, {"added"})
        wait_until(lambda: client.get("/health")[1]["alarm"] is not None)
        wait_until(lambda: app.state.service.manager.mode.full)  # with the next look at the monitor
        _, headers = ask(address, "Is it odd? 7")
        assert headers["x-swiftsure-reason"] == "there was an alarm"


CHANGES = {
    "say": ("small", "sure enough"),
    "fall back": ("large", "the provider changed small"),
    "shadow": ("large", "the provider changed small"),
}


@pytest.mark.parametrize("on_change", CHANGES)
def test_a_provider_that_changes_its_model(models, tmp_path, on_change):
    audit = '[audit]\nrate = 1.0\nstate = "kept"'
    path = models.file(tmp_path, head=f'on_change = "{on_change}"', tail=audit)
    policy = models.policy(path, STABLE)
    assert policy.settings["versions"] == {"small": ["small-2026-01"], "large": ["large-2026-01"]}
    app = create_proxy(ProxyConfig.load(path))
    with start(app) as address:
        assert ask(address, "Is it odd? 7")[1]["x-swiftsure-model"] == "small"
        assert Client(address).get("/health")[1]["status"] == "ok"
        models.small.model = "small-2026-02"
        ask(address, "Is it odd? 7")
        health = Client(address).get("/health")[1]
        assert health["status"] == "degraded"
        assert "small answers as small-2026-02" in health["fault"]
        models.small.bodies.clear()
        _, headers = ask(address, "Is it odd? 9")
        found = (headers["x-swiftsure-model"], headers["x-swiftsure-reason"])
        assert found == CHANGES[on_change]
        assert len(models.small.bodies) == (on_change != "fall back")
        if on_change == "shadow":  # what the small model would have answered is still audited
            models.drift = True
            for number in range(60):
                ask(address, f"Is it odd? {number}")
            wait_until(lambda: Client(address).get("/health")[1]["alarm"] is not None)


def test_audits_choose_their_own_rate(models, tmp_path):
    audit = "[audit]\ndetect = 0.40\nwithin = 150\n"
    path = models.file(tmp_path, tail=f'{audit}state = "kept"')
    models.policy(path, STABLE)
    service = create_proxy(ProxyConfig.load(path)).state.service
    assert 0.05 < service.queue.rate < 0.9
    path = models.file(tmp_path, tail=f"{audit}rate = 0.1")
    with pytest.raises(ValueError, match="not both"):
        ProxyConfig.load(path)
    path = models.file(tmp_path, tail="[audit]\ndetect = 0.4")
    with pytest.raises(ValueError, match="go together"):
        ProxyConfig.load(path)


@pytest.mark.slow
def test_a_drill_of_the_whole_proxy_confirms_the_rate(models, tmp_path):
    """Twelve proxies, whose small model turns bad; a risk of about .32 is found in time."""
    found = 0
    for run in range(12):
        folder = tmp_path / str(run)
        folder.mkdir()
        audit = '[audit]\ndetect = 0.30\nwithin = 300\nstate = "kept"'
        path = models.file(folder, tail=audit)
        models.drift = False
        models.policy(path, STABLE)
        rng = np.random.default_rng(run)
        with start(create_proxy(ProxyConfig.load(path))) as address:
            for number in rng.integers(0, 1000, 100):
                ask(address, f"Is it odd? {number}")
            models.drift = True
            for number in rng.integers(0, 1000, 300):
                ask(address, f"Is it odd? {number}")
            alarm = Client(address).get("/health")[1]["alarm"]
            found += alarm is not None
    assert found >= 8  # promised 90 %: fewer than 8 of 12 has a probability below 0.5 %
