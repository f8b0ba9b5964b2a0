"""`Endpoint`: a language model behind an OpenAI-compatible API."""

import asyncio
import json
import os
import re
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

from swiftsure._lib import checks
from swiftsure._lib.files import shortened
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.events import events_of
from swiftsure.cascade.models import Model
from swiftsure.cascade.retrying import TEMPORARY, UpstreamError, retry_after

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

__all__ = [
    "Endpoint",
    "answer_of_response",
    "check_key",
    "logprobs_of",
    "usage_cost",
    "version_of",
    "warn_of_prices",
]

LARGEST = 32 << 20
"""Largest answer that is read, in bytes."""

LARGEST_ERROR = 10_000
"""How much of an error is read, in bytes."""

SHORTEST_SECRET = 8
"""Shorter values of a key, such as EMPTY for a local server, are not secrets."""


@dataclass(eq=False)
class Endpoint(Model):
    """A model behind an OpenAI-compatible API, as many servers and providers offer it.

    Parameters
    ----------
    base_url : str
        Such as "https://api.openai.com/v1" or "http://localhost:8000/v1".
    model : str
    key : str, optional
        Name of the environment variable that holds the API key, and not the key; it is read at each
        request and stored nowhere. None sends no key.
    per_million : (input, output) or (input, output, cached input), optional
        Prices of a million tokens, as providers list them.
    unit : str
        Currency of the prices.
    kind : {"chat", "completions"}
    logprobs : int or None
        How many of the most probable tokens to ask for at each position, besides the
        log-probability of the chosen ones; None asks for no log-probabilities.
    prompt : str, optional
        Template of the prompt; `{input}` stands for the input.
    system : str, optional
        System message, for "chat".
    parameters : mapping, optional
        Others of the request; by default `{"temperature": 0}`.
    timeout : float
        Seconds until a request is given up.
    name : str, optional
        By default the model's.

    Notes
    -----
    Redirects are not followed, since they would send the prompt to another host. Answers of more
    than 32 MiB, and compressed ones, are refused. A key that a server repeats is replaced by
    "[key]".

    Examples
    --------
    >>> small = Endpoint("http://localhost:8000/v1", "small", key=None, per_million=(0.15, 0.6))
    >>> small.body("Is 7 prime?")["messages"]
    [{'role': 'user', 'content': 'Is 7 prime?'}]
    """

    base_url: str
    model: str
    key: str | None = field(default="OPENAI_API_KEY", repr=False)  # in case it is a key
    per_million: Sequence[float] | None = None
    unit: str = "usd"
    kind: Literal["chat", "completions"] = "chat"
    logprobs: int | None = 5
    prompt: str | None = None
    system: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    timeout: float = 60.0
    name: str = ""
    connections: int = 100
    _sessions: dict[asyncio.AbstractEventLoop, "ClientSession"] = field(
        default_factory=dict, repr=False, init=False
    )

    def __post_init__(self) -> None:
        """Check every field."""
        checks.choice("kind", self.kind, ["chat", "completions"])
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"`base_url` must start with http:// or https://: {self.base_url!r}.")
        self.base_url = self.base_url.rstrip("/")
        check_key(self.key)
        if self.logprobs is not None:
            checks.count("logprobs", self.logprobs, 0)
        if self.per_million is not None:
            prices = tuple(checks.number("per_million", each) for each in self.per_million)
            if not 2 <= len(prices) <= 3 or any(not 0 <= each < 1e9 for each in prices):
                raise ValueError("`per_million` must be (input, output), prices of at least 0.")
            self.per_million = prices
        self.name = self.name or self.model

    @property
    def url(self) -> str:
        """Where requests go."""
        path = "chat/completions" if self.kind == "chat" else "completions"
        return f"{self.base_url}/{path}"

    def identity(self) -> dict[str, Any]:
        """Return what answers depend on: address, model, prompt and parameters."""
        return {
            "endpoint": self.base_url,
            "model": self.model,
            "kind": self.kind,
            "prompt": self.prompt,
            "system": self.system,
            "logprobs": self.logprobs,
            "parameters": dict(self.parameters),
        }

    def body(self, value: Any) -> dict[str, Any]:
        """Return the JSON of a request for an input: a text, a list of messages, or a request."""
        asked: dict[str, Any] = {"model": self.model, **self.parameters}
        if self.kind == "chat":
            if self.logprobs is not None:
                asked |= {"logprobs": True, "top_logprobs": self.logprobs}
        elif self.logprobs is not None:
            asked |= {"logprobs": self.logprobs}
        if isinstance(value, Mapping):  # a whole request, as a client sent it
            return {**asked, **value, "model": self.model}
        if isinstance(value, str) and self.prompt is not None:
            value = self.prompt.replace("{input}", value)
        if self.kind == "completions":
            return {**asked, "prompt": value}
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        return {**asked, "messages": messages}

    async def answer(self, value: Any) -> Answer:
        """Return the answer to one input."""
        return self.answer_of(await self.complete(self.body(value)))

    def answer_of(self, response: Any) -> Answer:
        """Return the answer in the JSON of a response, with its price."""
        cost = usage_cost(response, self.per_million, self.unit)
        return answer_of_response(response, cost)

    async def complete(self, body: Mapping[str, Any]) -> Any:
        """Send a request and return the JSON of its response."""
        return self.parse(await self.send(body))

    async def send(self, body: Mapping[str, Any], path: str | None = None) -> bytes:
        """Send a request and return its response as it came; `path` is that of another API."""
        async with self.post(body, path) as response:
            parts, size = [], 0
            async for part in response.content.iter_any():
                size += len(part)
                if size > LARGEST:
                    raise UpstreamError(f"{self.name} sent more than {LARGEST >> 20} MiB.")
                parts.append(part)
        return self.redacted(b"".join(parts))

    async def events(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Send a request for a stream, and yield the JSON of each of its events, up to [DONE].

        Raises
        ------
        UpstreamError
            As `post`; also if the stream is cut, or holds something else.
        """
        async with self.post(body) as response:
            async for each in events_of(response.content, self.redacted):
                yield each

    def redacted(self, content: bytes) -> bytes:
        """Return what the server sent, with "[key]" wherever it repeats the key."""
        secret = os.environ.get(self.key, "") if self.key is not None else ""
        if len(secret) < SHORTEST_SECRET:
            return content
        return content.replace(secret.encode("utf-8", "surrogateescape"), b"[key]")

    def parse(self, content: bytes) -> Any:
        """Return the JSON in a response."""
        try:
            # `json.loads` would also take other encodings than UTF-8, and halves of characters.
            return json.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UpstreamError(
                f"{self.name} sent no JSON ({shortened(error)}).", temporary=True
            ) from None

    @asynccontextmanager
    async def post(
        self, body: Mapping[str, Any], path: str | None = None
    ) -> AsyncIterator["ClientResponse"]:
        """Send a request and yield its response, of status 200; for streams too.

        `path` is that of another API, such as "embeddings".

        Raises
        ------
        UpstreamError
            For any other status, and if the connection fails or takes too long.
        """
        import aiohttp

        content = json.dumps(dict(body)).encode()
        url = self.url if path is None else f"{self.base_url}/{path}"
        try:
            async with self._session().post(
                url, data=content, headers=self.headers(), allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise await self._refused(response)
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise UpstreamError(f"{self.name} sent a compressed answer.")
                yield response
        except TimeoutError:
            raise UpstreamError(
                f"{self.name} did not answer within {self.timeout:g} s.", temporary=True
            ) from None
        except aiohttp.ClientError as error:
            raise UpstreamError(
                f"{self.name} cannot be reached ({shortened(error)}).", temporary=True
            ) from None

    def headers(self) -> dict[str, str]:
        """Return the headers of a request.

        Raises
        ------
        ValueError
            If the environment variable of the key is not set.
        """
        # Not compressed: a few bytes could become more than memory holds.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key is not None:
            secret = os.environ.get(self.key)
            if not secret:
                raise ValueError(f"`key`: the environment variable {_shown(self.key)} is not set.")
            headers["Authorization"] = f"Bearer {secret}"
        return headers

    async def _refused(self, response: "ClientResponse") -> UpstreamError:
        """Return the error for a response that is not an answer."""
        if 300 <= response.status < 400:
            text = f"{self.name} answered with status {response.status}, a redirect, which is not"
            return UpstreamError(f"{text} followed: correct `base_url`.", status=response.status)
        parts, size = [], 0
        while size < LARGEST_ERROR and (part := await response.content.read(LARGEST_ERROR)):
            parts.append(part)
            size += len(part)
        content = self.redacted(b"".join(parts))
        text = content.decode("utf-8", "replace")
        key = ""
        if response.status in (401, 403) and self.key is not None:
            key = f" (key: {_shown(self.key)})"
        return UpstreamError(
            f"{self.name} answered with status {response.status}{key}: {shortened(text)}",
            status=response.status,
            temporary=response.status in TEMPORARY,
            retry_after=retry_after(response.headers),
            error=_error_in(content),
        )

    def _session(self) -> "ClientSession":
        """Return the session of the running event loop."""
        try:
            import aiohttp
        except ImportError:
            raise ImportError("Endpoint needs aiohttp: pip install 'swiftsure[api]'.") from None
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            connector = aiohttp.TCPConnector(limit=self.connections)
            session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=self.timeout),
                # A cookie from the answer to one request must not be sent with another.
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
            self._sessions = {k: v for k, v in self._sessions.items() if not k.is_closed()}
            self._sessions[loop] = session
        return session

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


def check_key(key: Any) -> str | None:
    """Return the name of an environment variable; refuse anything else without repeating it.

    Examples
    --------
    >>> check_key("OPENAI_API_KEY")
    'OPENAI_API_KEY'
    """
    if key is None:
        return None
    if isinstance(key, str) and re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII):
        return key
    raise ValueError(
        "`key` must be the name of an environment variable, such as OPENAI_API_KEY, not the API key"
        " itself: export the key under a name, and give the name."
    )


def _shown(key: str) -> str:
    """Return the name of a variable for messages; one in small letters may be an API key."""
    return key if key.isupper() else "that `key` names"


def _error_in(content: bytes) -> Mapping[str, Any]:
    """Return the `error` object of an OpenAI-style error; empty if there is none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else {}


def usage_cost(
    response: Any, per_million: Sequence[float] | None, unit: str = "usd"
) -> dict[str, float]:
    """Return the cost of a response by unit: its price, if prices are known, and its tokens.

    Examples
    --------
    >>> usage_cost({"usage": {"prompt_tokens": 100, "completion_tokens": 10}}, (1.0, 5.0))
    {'usd': 0.00015, 'tokens': 110.0}
    """
    usage = response.get("usage") if isinstance(response, Mapping) else None
    if not isinstance(usage, Mapping):
        if per_million is not None:
            raise UpstreamError("The response has no `usage`, so its price is not known.")
        return {}
    read, written = (_tokens(usage, name) for name in ("prompt_tokens", "completion_tokens"))
    if per_million is None:
        return {"tokens": float(read + written)}
    details = usage.get("prompt_tokens_details")
    cached = _tokens(details, "cached_tokens") if isinstance(details, Mapping) else 0
    known = per_million[2] if len(per_million) > 2 else per_million[0]
    price = (read - cached) * per_million[0] + cached * known + written * per_million[1]
    return {unit: price / 1e6, "tokens": float(read + written)}


def _tokens(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name) or 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UpstreamError(f"`usage.{name}` must be a number of tokens, but got {value!r:.80}.")
    return value


def warn_of_prices(models: Sequence[Any], stacklevel: int = 3) -> None:
    """Warn if the listed prices of a model are above those of a later one in the cascade."""
    listed = [
        (each, tuple(each.per_million[:2]))
        for each in models
        if isinstance(each, Endpoint) and each.per_million is not None
    ]
    for (earlier, price), (later, other) in combinations(listed, 2):
        dearer = price != other and price[0] >= other[0] and price[1] >= other[1]
        if dearer and earlier.unit == later.unit:
            warnings.warn(
                f"`models` must be cheapest first, but {earlier.name} costs {price}"
                f" {earlier.unit} per million tokens and comes before {later.name}, which costs"
                f" {other}: nothing can be saved by asking it first.",
                stacklevel=stacklevel,
            )


def answer_of_response(response: Any, cost: Mapping[str, float] | None = None) -> Answer:
    """Return the text and log-probabilities of an OpenAI-style response, chat or completion.

    Parameters
    ----------
    cost : mapping, optional
        Of the answer.

    Raises
    ------
    UpstreamError
        If it has another form.
    """
    try:
        choice = response["choices"][0]
        text = choice["message"].get("content") if "message" in choice else choice["text"]
        if not isinstance(text, str):
            raise TypeError("it holds no text")
        logprobs, top = logprobs_of(choice.get("logprobs"))
        return Answer(
            text,
            cost=cost or {},
            logprobs=logprobs,
            top_logprobs=top,
            version=version_of(response),
            response=response,
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UpstreamError(
            f"The response is not an answer of a language model ({type(error).__name__}:"
            f" {shortened(error)})."
        ) from None


def version_of(response: Any) -> str | None:
    """Return which version of a model gave a response, as far as it says.

    Examples
    --------
    >>> version_of({"model": "gpt-4o-2024-08-06", "system_fingerprint": "fp_1"})
    'gpt-4o-2024-08-06 fp_1'
    """
    said = [response.get(name) for name in ("model", "system_fingerprint")]
    return " ".join(each for each in said if isinstance(each, str)) or None


def logprobs_of(given: Any) -> tuple[Any, Any]:
    """Return the log-probabilities of tokens, and of the alternatives at each token."""
    if not given:
        return None, None
    if "content" in given or "tokens" not in given:  # chat
        tokens = given.get("content") or []
        top = [
            {each["token"]: each["logprob"] for each in token.get("top_logprobs") or ()}
            for token in tokens
        ]
        return [token["logprob"] for token in tokens], top if any(top) else None
    values = [each for each in given["token_logprobs"] if each is not None]
    tops = given.get("top_logprobs")
    return values, None if not tops else [dict(each or {}) for each in tops]
