"""Anthropic's API and Azure's as models of a cascade, with stand-in servers."""

import json

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, StreamingResponse
from starlette.routing import Mount, Route

import swiftsure as ss
from swiftsure.cascade import ProviderEndpoint, UpstreamError
from swiftsure.serve import start
from swiftsure.serve.proxy import ProxyConfig, create_proxy
from tests.serve.upstreams import Upstream

pytest.importorskip("any_llm")

KEY = "sk-ant-0123456789"


def truth(text):
    return "odd" if int(text.split()[-1]) % 2 else "even"


class Anthropic:
    """Answers as Anthropic's API does."""

    def __init__(self):
        self.bodies, self.headers = [], []
        self.app = Starlette(routes=[Route("/v1/messages", self.messages, methods=["POST"])])

    async def messages(self, request: Request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        asked = body["messages"][-1]["content"]
        if "BUSY" in asked:
            error = {"type": "rate_limit_error", "message": f"slow down, {KEY}"}
            return JSONResponse({"type": "error", "error": error}, 429, {"retry-after": "7"})
        if "AWAY" in asked:
            return RedirectResponse("http://127.0.0.1:9/elsewhere", 307)
        message = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "claude-2026-01",
            "content": [{"type": "text", "text": truth(asked)}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 12, "output_tokens": 4},
        }
        if not body.get("stream"):
            return JSONResponse(message)
        return StreamingResponse(self.events(message), media_type="text/event-stream")

    async def events(self, message):
        text = message["content"][0]["text"]
        start = {**message, "content": [], "stop_reason": None}
        usage = {"output_tokens": 4}
        for each in (
            {"type": "message_start", "message": start},
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            },
            *(
                {
                    "type": "content_block_delta",
                    "index": 0,
                    "delta": {"type": "text_delta", "text": letter},
                }
                for letter in text
            ),
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
            {"type": "message_stop"},
        ):
            yield f"event: {each['type']}\ndata: {json.dumps(each)}\n\n"


@pytest.fixture
def claude(monkeypatch):
    monkeypatch.setenv("CLAUDE_KEY", KEY)
    model = Anthropic()
    with start(model.app) as place:
        model.place = place
        yield model


def endpoint(claude, **more):
    return ProviderEndpoint(
        claude.place,
        "claude",
        key="CLAUDE_KEY",
        provider="anthropic",
        per_million=(3, 15),
        parameters={"temperature": 0, "max_tokens": 50},
        **more,
    )


def small(text):
    number = int(text.split()[-1])
    return ss.Answer(
        truth(text) if number % 10 else "odd",
        confidence=0.9 if number % 10 else 0.2,
        cost={"usd": 0.0, "tokens": 1.0},
    )


def test_a_cascade_before_anthropic(claude):
    cascade = ss.Cascade({"small": small, "large": endpoint(claude)})
    questions = [f"Is it odd? {k}" for k in range(80)]
    record = cascade.collect(questions, progress=False)
    policy = cascade.calibrate(record, risk="consistency", epsilon=0.05)
    found = cascade.run(policy)(["Is it odd? 7", "Is it odd? 10"])
    assert found.answers == ["odd", "even"]
    assert found.exits.tolist() == [0, 1]
    assert found.decisions[1].cost == {"usd": (12 * 3 + 4 * 15) / 1e6, "tokens": 17.0}
    assert found.decisions[1].answer.version == "claude-2026-01"
    sent = claude.bodies[0]
    assert (sent["model"], sent["max_tokens"], sent["temperature"]) == ("claude", 50, 0)
    assert claude.headers[0]["x-api-key"] == KEY
    assert endpoint(claude).identity() != ss.Endpoint(claude.place, "claude").identity()


def test_system_messages_are_translated(claude):
    messages = [
        {"role": "system", "content": "One word."},
        {"role": "user", "content": "Is it odd? 4"},
    ]
    runner = ss.Cascade({"small": small, "large": endpoint(claude)}).run(None)
    assert runner([messages]).answers == ["even"]
    assert claude.bodies[0]["system"] == "One word."
    assert len(claude.bodies[0]["messages"]) == 1


@pytest.mark.parametrize(
    ("word", "status", "temporary"), [("BUSY", 429, True), ("AWAY", 307, None)]
)
def test_errors(claude, word, status, temporary):
    backoff = ss.cascade.Backoff(retries=0)
    runner = ss.Cascade({"small": small, "large": endpoint(claude)}).run(None, backoff=backoff)
    with pytest.raises(UpstreamError) as raised:
        runner([f"{word} 1"])
    assert raised.value.status == status
    assert KEY not in str(raised.value)
    if temporary:
        assert (raised.value.temporary, raised.value.retry_after) == (True, 7.0)
    assert len(claude.bodies) == 1  # it is not asked again, and redirects are not followed


def test_what_it_cannot_translate_is_refused(claude):
    with pytest.raises(ValueError, match="`kind` must be chat"):
        endpoint(claude, kind="completions")
    with pytest.raises(ValueError, match=r"`provider` must be"):
        ProviderEndpoint(claude.place, "claude", provider="azure")


@pytest.fixture
def proxy(claude, tmp_path, monkeypatch):
    """Return the address of a proxy with OpenAI's API before Anthropic's."""
    monkeypatch.setenv("AZURE_KEY", "azure-key-012345")
    azure = Upstream(lambda text: (truth(text), 0.4 if text.endswith("5") else 0.95), "deployed")
    with start(Starlette(routes=[Mount("/openai", azure.app)])) as place:
        path = tmp_path / "cascade.toml"
        path.write_text(
            f"""
            policy = "policy.json"
            [[models]]
            provider = "azureopenai"
            base_url = "{place}"
            model = "deployed"
            key = "AZURE_KEY"
            per_million = [0.1, 0.4]
            parameters = {{ temperature = 0, max_tokens = 50 }}
            [[models]]
            provider = "anthropic"
            base_url = "{claude.place}"
            model = "claude"
            key = "CLAUDE_KEY"
            per_million = [3, 15]
            parameters = {{ temperature = 0, max_tokens = 50 }}
            """
        )
        config = ProxyConfig.load(path)
        cascade = config.cascade()
        record = cascade.collect([f"Is it odd? {k}" for k in range(80)], progress=False)
        cascade.calibrate(record, risk="consistency", epsilon=0.05).save(config.policy)
        with start(create_proxy(config)) as address:
            yield address


def test_the_proxy_before_azure_and_anthropic(proxy, claude):
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key="none", max_retries=0) as client:

        def ask(text, **more):
            messages = [{"role": "user", "content": text}]
            return client.chat.completions.with_raw_response.create(
                model="cascade", messages=messages, **more
            )

        found = ask("Is it odd? 7")
        assert found.headers["x-swiftsure-model"] == "deployed"
        assert found.parse().choices[0].message.content == "odd"
        found = ask("Is it odd? 8", n=1, user="ann", temperature=0.7)
        assert found.headers["x-swiftsure-model"] == "claude"
        assert float(found.headers["x-swiftsure-cost"].split(",")[0].split("=")[1]) == 9.6e-05
        assert found.parse().choices[0].message.content == "even"
        assert claude.bodies[-1]["temperature"] == 0.7
        stream = client.chat.completions.create(
            model="claude",
            messages=[{"role": "user", "content": "Is it odd? 9"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "odd"
        assert chunks[-1].usage.total_tokens == 16
        with pytest.raises(openai.RateLimitError) as raised:
            ask("BUSY 8", temperature=0.7)
        assert raised.value.response.headers["retry-after"] == "7"
        assert KEY not in raised.value.response.text


def test_what_anthropic_lacks_is_refused(proxy):
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "Is it odd? 7"}]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="claude", messages=messages, seed=5)
        with pytest.raises(openai.NotFoundError, match="chats only"):
            client.completions.create(model="claude", prompt="Is it odd? 7")
        with pytest.raises(openai.NotFoundError, match="has no responses"):
            client.responses.create(model="claude", input="Is it odd? 7")


def test_a_small_model_of_anthropics_needs_a_confidence(tmp_path):
    path = tmp_path / "cascade.toml"
    table = '[[models]]\nbase_url = "http://127.0.0.1"\nmodel = "claude"\n'
    path.write_text(f'{table}provider = "anthropic"\n{table}')
    with pytest.raises(ValueError, match="claude needs `confidence`"):
        ProxyConfig.load(path)
