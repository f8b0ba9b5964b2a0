"""`Reasoner`: a reasoning model behind an OpenAI-compatible API that shows what it thinks.

Its thinking is streamed from /v1/completions. To ask for an answer on the way, the same text goes
there once more, with the end of the thinking and the beginning of an answer; a server that caches
prefixes reads only those.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from swiftsure._lib import checks
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.endpoints import Endpoint
from swiftsure.cascade.events import events_of
from swiftsure.cascade.models import identity_digest
from swiftsure.cascade.retrying import UpstreamError
from swiftsure.reasoning.families import HIDDEN, ThinkingFamily, family_of, hides_thinking
from swiftsure.reasoning.reading import options_answer, read_answer

__all__ = ["Piece", "Reasoner", "Thinking", "ThinkingClient", "client_of"]

BOXED = "**Final answer:** \\boxed{"
NOT_SERVED = (404, 405, 501)
Question = str | Sequence[Mapping[str, Any]]


class Piece(NamedTuple):
    """A part of what a model wrote, and its tokens; `finish` says why it ended there, if it did."""

    text: str
    tokens: int
    finish: str | None = None


class Thinking(ABC):
    """A text that a model is writing: an iterator of pieces that can be asked on the way."""

    @abstractmethod
    async def next(self) -> Piece:
        """Return the next piece."""

    @abstractmethod
    async def ask(self, thought: str) -> Answer:
        """Return the answer that the model gives if its thinking ends after this text.

        With the text as the model wrote it, and the "tokens" that asking took as its cost.
        """

    @property
    def ahead(self) -> int:
        """Tokens that were written, and paid for, but not returned yet."""
        return 0


class ThinkingClient(ABC):
    """A reasoning model that can be asked for its answer while it thinks.

    Attributes
    ----------
    name : str
    family : ThinkingFamily
    options : sequence of str
    answer_prompt : str
    """

    name: str
    family: ThinkingFamily
    options: Sequence[str] = ()
    answer_prompt: str = BOXED
    parse: Callable[[str], Any] | None = None

    @abstractmethod
    def think(
        self, question: Question, written: str = "", *, seed: int = 0, tokens: int = 0
    ) -> AbstractAsyncContextManager[Thinking]:
        """Return a context in which the model thinks about a question.

        Parameters
        ----------
        written : str
            What it wrote before, which it continues, in `tokens` tokens.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any] | None:
        """Return what its answers depend on; None if that is not known."""

    async def close(self) -> None:  # noqa: B027 (some hold nothing)
        """Release connections of the running event loop."""

    @property
    def fingerprint(self) -> str | None:
        """What policies are bound to."""
        return identity_digest([self.identity()])

    def read(self, text: str) -> Any:
        """Return the answer in what the model wrote after its thinking; None if unreadable."""
        if self.parse is not None:
            return self.parse(text)
        return read_answer(text, self.answer_prompt, self.options)

    def shown(self, answer: Any) -> str:
        """Return an answer on the way as the model would have written it."""
        if answer is None:
            return ""
        return f"{self.answer_prompt}{answer}{'}' if self.answer_prompt.endswith('{') else ''}"

    def read_probe(self, raw: Answer) -> Answer:
        """Return the answer of a probe, with the probabilities of the options if it has options.

        One that cannot be read is None, with a confidence of 0.
        """
        if self.options:
            found = options_answer(raw.top_logprobs or (), self.options, raw.cost)
            if found is not None:
                return found
        text = str(raw.answer)
        if self.answer_prompt.endswith("{"):
            text = text.partition("}")[0]
        answer = text.strip() if self.parse is None else self.parse(text)
        if self.options:
            answer = read_answer(text, "", self.options)
        if answer in (None, ""):
            even = [1 / len(self.options)] * len(self.options) if self.options else None
            return replace(raw, answer=None, confidence=0.0, probabilities=even)  # type: ignore[arg-type]
        return replace(raw, answer=answer)


@dataclass(eq=False)
class Reasoner(ThinkingClient):
    r"""A reasoning model behind an OpenAI-compatible API with /v1/completions.

    vLLM, SGLang, llama.cpp and transformers have it. APIs that hide the thinking cannot be probed;
    there use `collect_votes` and `Voter`.

    Parameters
    ----------
    endpoint : Endpoint
        Its `parameters` are those of the thinking; `logprobs=None` asks for no log-probabilities,
        so that answers on the way have only the confidences "agreement" and "progress".
    family : str or ThinkingFamily, optional
        How the model is asked to think; by default found by the model's name.
    options : sequence of str
        The only answers that there are, such as "ABCD"; then each has a probability.
    answer_prompt : str
        What an answer on the way begins with. If it ends with "{", the answer ends at "}".
    answer_tokens : int
        The longest answer on the way.
    max_tokens : int
        The longest thinking; at its end the model is asked, as on the way.
    parse : callable, optional
        From what the model wrote to its answer, or None if it cannot be read; by default the last
        `\boxed{}` or what comes after "answer".
    prefix_cache : bool
        Whether the server keeps what it has read, so that a probe costs only the tokens that it
        adds. Otherwise it costs all that it reads, as `usage` says.
    timeout : float
        Seconds for one stream; a longer one is continued by another request.

    Examples
    --------
    >>> model = Reasoner(Endpoint("http://localhost:8000/v1", "Qwen/Qwen3-8B", key=None))
    >>> model.family.mark
    '</think>'
    """

    endpoint: Endpoint
    family: Any = None
    options: Sequence[str] = ()
    answer_prompt: str = BOXED
    answer_tokens: int = 24
    max_tokens: int = 32_768
    parse: Callable[[str], Any] | None = field(default=None, repr=False)
    prefix_cache: bool = True
    timeout: float = 600.0

    def __post_init__(self) -> None:
        """Find the family and refuse APIs that hide the thinking."""
        if any(host in self.endpoint.base_url for host in HIDDEN):
            raise ValueError(f"`endpoint`: {hides_thinking(self.endpoint.name)}")
        self.family = family_of(self.family, self.endpoint.model)
        self.name = self.endpoint.name
        self.options = tuple(self.options)
        checks.count("answer_tokens", self.answer_tokens)
        checks.count("max_tokens", self.max_tokens)
        if self.options and self.endpoint.logprobs == 0:
            raise ValueError("`endpoint` must ask for `logprobs` of several tokens for options.")
        self._raw = replace(self.endpoint, kind="completions", timeout=self.timeout)

    def identity(self) -> dict[str, Any]:
        """Return the endpoint's identity, and how it is asked."""
        family = self.family
        return {
            **self.endpoint.identity(),
            "family": [family.head, family.turn, family.begin, family.end],
            "options": list(self.options),
            "answer_prompt": self.answer_prompt,
            "answer_tokens": self.answer_tokens,
            "max_tokens": self.max_tokens,
        }

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        await self._raw.close()

    def prompt(self, question: Question) -> str:
        """Return the text that the model continues with its thoughts."""
        value, system = question, self.endpoint.system
        if isinstance(value, str) and self.endpoint.prompt is not None:
            value = self.endpoint.prompt.replace("{input}", value)
        if system is not None:
            messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
            value = [{"role": "system", "content": system}, *messages]
        return str(self.family.prompt(value))

    @asynccontextmanager
    async def think(
        self, question: Question, written: str = "", *, seed: int = 0, tokens: int = 0
    ) -> AsyncIterator[Thinking]:
        """Yield the stream of a question's thinking; it is cancelled at the end of the context."""
        prompt = self.prompt(question)
        body = {
            "model": self.endpoint.model,
            **self.endpoint.parameters,
            **self.family.request,
            "prompt": prompt + written,
            "max_tokens": max(1, self.max_tokens - tokens),
            "stream": True,
            **({"seed": seed} if seed else {}),
        }
        stream = _Stream(self, prompt, body)
        try:
            yield stream
        finally:
            await stream.close()

    async def ask(self, prompt: str, thought: str) -> Answer:
        """Return the raw answer after some thinking."""
        added = self.family.end + self.answer_prompt
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            **self.family.request,
            "prompt": prompt + thought.rstrip() + added,
            "max_tokens": self.answer_tokens,
            "temperature": 0,
        }
        if self.answer_prompt.endswith("{"):
            body["stop"] = ["}"]
        if self.endpoint.logprobs is not None:
            body["logprobs"] = self.endpoint.logprobs
        try:
            response = await self._raw.complete(body)
        except UpstreamError as error:
            raise self._explained(error) from None
        raw = self._raw.answer_of(response)
        if self.endpoint.logprobs is not None and raw.logprobs is None:
            raise UpstreamError(
                f"{self.name} sent no log-probabilities, from which confidences are made. Let the"
                " server send them; or give the endpoint logprobs=None, and decide by the score"
                ' "agreement", whether answers on the way stay the same.'
            )
        return replace(raw, cost={"tokens": self._spent(response, raw, added)}, version=None)

    def _spent(self, response: Any, raw: Answer, added: str) -> float:
        """Return the tokens that a probe took, read and written."""
        usage = response.get("usage") or {}
        written = usage.get("completion_tokens") or len(raw.logprobs or ()) or self.answer_tokens
        if self.prefix_cache:
            return float(written + math.ceil(len(added) / 3))  # tokens are rarely shorter
        if not isinstance(usage.get("prompt_tokens"), int):
            raise UpstreamError(
                f"{self.name} does not say how many tokens it read, so what probes cost is not"
                " known. Give prefix_cache=True if it keeps what it has read."
            )
        return float(written + usage["prompt_tokens"])

    def _explained(self, error: UpstreamError) -> UpstreamError:
        if error.status in NOT_SERVED:
            return UpstreamError(f"{error} {hides_thinking(self.name)}", status=error.status)
        return error

    async def pieces(self, body: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """Yield what the server sends of a stream; the last piece says why it ended."""
        seen = 0
        try:
            async with self._raw.post(body) as response:
                async for event in events_of(response.content, self._raw.redacted):
                    piece = self._piece(event)
                    if piece is not None:
                        # Where the server counts, a piece may hold several tokens.
                        total = (event.get("usage") or {}).get("completion_tokens")
                        if isinstance(total, int):
                            piece = piece._replace(tokens=max(0, total - seen))
                        seen += piece.tokens
                        yield piece
                        if piece.finish is not None:
                            return
        except UpstreamError as error:
            raise self._explained(error) from None
        raise UpstreamError(f"The stream of {self.name} was cut short.", temporary=True)

    def _piece(self, event: Mapping[str, Any]) -> Piece | None:
        if event.get("error"):
            raise UpstreamError(f"{self.name} failed while it was thinking.", temporary=True)
        choices = event.get("choices")
        if not choices:
            return None  # the usage
        choice = choices[0]
        text = choice.get("text") if isinstance(choice, Mapping) else None
        if text is None and choice.get("finish_reason") is None:
            raise UpstreamError(f"{self.name} sent a stream that is not one of completions.")
        tokens = (choice.get("logprobs") or {}).get("tokens")
        n = len(tokens) if tokens else int(bool(text))
        return Piece(text or "", n, choice.get("finish_reason"))


class _Stream(Thinking):
    """A stream that is read in the background, while answers on the way are waited for."""

    def __init__(self, model: Reasoner, prompt: str, body: Mapping[str, Any]) -> None:
        self.model, self.prompt = model, prompt
        self.queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self.waiting = 0
        self.task = asyncio.get_running_loop().create_task(self._read(body))

    async def _read(self, body: Mapping[str, Any]) -> None:
        try:
            async for piece in self.model.pieces(body):
                self.waiting += piece.tokens
                self.queue.put_nowait(piece)
        except Exception as error:
            self.queue.put_nowait(error)

    @property
    def ahead(self) -> int:
        return self.waiting

    async def next(self) -> Piece:
        found = await self.queue.get()
        if isinstance(found, Exception):
            raise found
        self.waiting -= found.tokens
        return found

    async def ask(self, thought: str) -> Answer:
        return await self.model.ask(self.prompt, thought)

    async def close(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


def client_of(client: Any) -> ThinkingClient:
    """Return a client; an endpoint becomes a Reasoner of the family that its model's name says."""
    if isinstance(client, ThinkingClient):
        return client
    if isinstance(client, Endpoint):
        return Reasoner(client)
    raise TypeError(
        "`client` must be a Reasoner, a LocalReasoner or an Endpoint, but got"
        f" {type(client).__name__}."
    )
