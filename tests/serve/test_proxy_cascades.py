"""Confidences without log-probabilities, a router, several cascades and other APIs in a proxy."""

import json
from contextlib import ExitStack

import numpy as np
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

import swiftsure as ss
from swiftsure.serve import start
from swiftsure.serve.proxy import ProxyConfig, create_proxy
from tests.serve.builders import Client
from tests.serve.upstreams import Upstream

EMBEDDED = "numbers"


def number(text):
    return int(text.split()[-1])


def truth(text):
    return "odd" if number(text) % 2 else "even"


class Small:
    """Answers without log-probabilities; cannot make up its mind above 500."""

    def __init__(self):
        self.count = 0

    def __call__(self, text):
        self.count += 1
        if number(text) >= 500:
            return ("I'm sorry, I cannot tell.", "odd", "even")[self.count % 3], 0.5
        return truth(text), 0.5


def verifier(text):
    question = text.split("Question: ")[1].split("\n")[0]
    answer = text.split("Answer: ")[1].split("\n")[0]
    return str(95 if answer == truth(question) else 10), 0.9


async def embeddings(request):
    body = await request.json()
    rows = [[1.0, number(text) / 1000] for text in body["input"]]
    data = [{"index": k, "embedding": row} for k, row in enumerate(rows)]
    return JSONResponse({"object": "list", "data": data, "model": body["model"]})


class Places(ExitStack):
    """Upstreams by name."""

    def __enter__(self):
        self.small = Upstream(Small(), "small")
        self.large = Upstream(lambda text: (truth(text), 0.99), "large")
        self.verifier = Upstream(verifier, "verifier")
        self.seen = []
        self.other = Starlette(
            routes=[
                Route("/v1/embeddings", embeddings, methods=["POST"]),
                Route("/v1/responses", self.responses, methods=["POST"]),
            ]
        )
        self.large.app.routes.extend(self.other.routes)
        apps = {"small": self.small, "large": self.large, "verifier": self.verifier}
        self.url = {k: self.enter_context(start(each.app)) + "/v1" for k, each in apps.items()}
        return self

    async def responses(self, request):
        body = await request.json()
        self.seen.append(body)
        if body["input"] == "bad":
            error = {"message": "no such tool", "type": "invalid_request_error", "code": "tool"}
            return JSONResponse({"error": error}, 400)
        if body.get("stream"):
            lines = [f"event: e{k}\ndata: {json.dumps({'k': k})}\n\n" for k in range(3)]
            return StreamingResponse(iter(lines), media_type="text/event-stream")
        return JSONResponse({"id": "resp_1", "object": "response", "model": body["model"]})

    def models(self, confidence="", parameters="{ temperature = 0.7 }", table="models"):
        return (
            f'[[{table}]]\nbase_url = "{self.url["small"]}"\nmodel = "small"\n'
            f"per_million = [1, 1]\nparameters = {parameters}\n{confidence}\n"
            f'[[{table}]]\nbase_url = "{self.url["large"]}"\nmodel = "large"\n'
            "per_million = [20, 20]\n"
        )


@pytest.fixture(scope="module")
def places():
    with Places() as stack:
        yield stack


QUESTIONS = [f"Is it odd? {k}" for k in np.random.default_rng(0).integers(0, 1000, 700)]


def calibrated(file, n=300, name=None):
    config = ProxyConfig.load(file, name)
    cascade = config.cascade()
    ids = range(300, 300 + n)
    record = cascade.collect(QUESTIONS[300 : 300 + n], ids=ids, progress=False)
    policy = cascade.calibrate(
        record, risk="consistency", loss="exact_match", epsilon=0.05, cost="usd"
    )
    policy.save(config.policy)
    return policy


def asked(address, text, model="cascade"):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=20)
    with client:
        found = client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": text}]
        )
    return found.parse().choices[0].message.content, found.headers


CONFIDENCES = {
    "self-consistency": "confidence = { self_consistency = 4 }",
    "verifier": 'confidence.verifier = { base_url = "VERIFIER", model = "verifier" }',
    "learned": 'confidence = { learned = "score.json", self_consistency = 3 }',
}


@pytest.mark.parametrize("kind", CONFIDENCES)
def test_confidences_without_logprobs(places, tmp_path, kind):
    file = tmp_path / "cascade.toml"
    line = CONFIDENCES[kind].replace("VERIFIER", places.url["verifier"])
    file.write_text(f'policy = "policy.json"\n{places.models(line)}')
    if kind == "learned":
        with pytest.raises(ValueError, match=r"no file .*score.json. Learn it first"):
            ProxyConfig.load(file).cascade()
        ProxyConfig.load(file).learn(QUESTIONS[:300], ids=range(300), progress=False)
    policy = calibrated(file)
    assert not policy.runs_full_model
    places.small.bodies.clear()
    with start(create_proxy(ProxyConfig.load(file))) as address:
        answer, headers = asked(address, "Is it odd? 7")
        assert answer == "odd"
        assert headers["x-swiftsure-model"] == "small"
        assert "logprobs" not in places.small.bodies[-1]
        wanted = {"self-consistency": 4, "verifier": 1, "learned": 3}[kind]
        assert len(places.small.bodies) == wanted
        answer, headers = asked(address, "Is it odd? 901")
        assert (answer, headers["x-swiftsure-model"]) == ("odd", "large")
        same = ProxyConfig.load(file).cascade().run(policy)(["Is it odd? 7", "Is it odd? 901"])
        assert same.exits.tolist() == [0, 1]


def test_a_router_in_the_proxy(places, tmp_path):
    file = tmp_path / "cascade.toml"
    router = (
        f'[router]\nfile = "router.npz"\n[router.embeddings]\nbase_url = "{places.url["large"]}"\n'
        f'model = "{EMBEDDED}"\n'
    )
    line = "confidence = { self_consistency = 2 }"
    file.write_text(f'policy = "policy.json"\n{router}{places.models(line)}')
    ProxyConfig.load(file).learn(QUESTIONS[:300], ids=range(300), progress=False)
    policy = calibrated(file, 400)
    assert policy.n_exits == 3
    assert policy.thresholds[0] <= 1
    with start(create_proxy(ProxyConfig.load(file))) as address:
        places.small.bodies.clear()
        answer, headers = asked(address, "Is it odd? 950")
        assert answer == "even"
        assert headers["x-swiftsure-reason"] == "the router sent it on"
        assert "x-swiftsure-confidence" not in headers
        assert not places.small.bodies
        answer, headers = asked(address, "Is it odd? 100")
        assert (answer, headers["x-swiftsure-model"]) == ("even", "small")


def test_samples_must_differ(places, tmp_path):
    file = tmp_path / "cascade.toml"
    line = "confidence = { self_consistency = 4 }"
    file.write_text(places.models(line, "{ temperature = 0 }"))
    with pytest.raises(ValueError, match=r"set parameters\.temperature above 0"):
        ProxyConfig.load(file)
    file.write_text(places.models("confidence = {}"))
    with pytest.raises(ValueError, match="must have self_consistency, verifier or learned"):
        ProxyConfig.load(file)


@pytest.fixture(scope="module")
def several(places, tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    file = folder / "proxy.toml"
    line = "confidence = { self_consistency = 2 }"
    tables = "".join(
        f'[[cascades]]\nname = "{name}"\n{more}' + places.models(line, table="cascades.models")
        for name, more in {"support": 'policy = "support.json"\n', "search": ""}.items()
    )
    file.write_text(f'pass_through = ["{EMBEDDED}"]\n[audit]\nrate = 0.0\nstate = "kept"\n{tables}')
    calibrated(file, name="support")
    with start(create_proxy(*ProxyConfig.load_all(file))) as address:
        yield file, address


def test_several_cascades_by_name(several):
    file, address = several
    assert asked(address, "Is it odd? 7", "support")[1]["x-swiftsure-model"] == "small"
    headers = asked(address, "Is it odd? 7", "search")[1]
    assert headers["x-swiftsure-reason"] == "there is no policy"
    assert asked(address, "Is it odd? 7", "large")[1]["x-swiftsure-reason"] == "asked for by name"
    with pytest.raises(openai.NotFoundError, match="ask for 'support' or 'search'"):
        asked(address, "Is it odd? 7", "elsewhere")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        assert [each.id for each in client.models.list()] == ["support", "large", "search"]
        assert client.models.retrieve("search").id == "search"
    status, content = Client(address).get("/cascades/search/status")
    assert (status, content["exits"]) == (200, [0, 1])
    assert Client(address).get("/cascades/search/policy")[1]["policy"] is None
    states = [config.audit.state for config in ProxyConfig.load_all(file)]
    assert states == [file.parent / "kept" / name for name in ("support", "search")]


def test_cascades_need_names(several, tmp_path):
    file, _ = several
    with pytest.raises(ValueError, match="name one of support, search"):
        ProxyConfig.load(file)
    other = tmp_path / "proxy.toml"
    other.write_text(file.read_text().replace('"search"', '"support"'))
    with pytest.raises(ValueError, match="a name of its own"):
        ProxyConfig.load_all(other)


def test_responses_are_passed_on(several, places):
    _, address = several
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        found = client.responses.with_raw_response.create(model="support", input="hello")
        assert json.loads(found.text)["id"] == "resp_1"
        assert places.seen[-1]["model"] == "large"
        assert found.headers["x-swiftsure-reason"] == "passed on"
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="support", input="bad")
        assert refused.value.code == "tool"
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-secret'"):
            client.responses.create(model="gpt-secret", input="hello")
    body = json.dumps({"model": "support", "input": "hello", "stream": True})
    kind = {"Content-Type": "application/json"}
    _, text = Client(address).send("POST", "/v1/responses", body, **kind)
    assert text.count("event: e") == 3


def test_embeddings_of_named_models_are_passed_on(several):
    _, address = several
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model=EMBEDDED, input=["Is it odd? 500"])
        assert found.data[0].embedding == pytest.approx([1.0, 0.5])
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="support", input=["Is it odd? 500"])


def test_embeddings_of_questions(places):
    embed = ss.cascade.Embeddings(places.url["large"], EMBEDDED, key=None)
    found = embed(["Is it odd? 500", [{"role": "user", "content": "Is it odd? 250"}]])
    assert found.tolist() == [[1.0, 0.5], [1.0, 0.25]]
