"""Server-sent events: an answer as a stream, and an upstream's stream passed on."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from swiftsure.cascade import UpstreamError
from swiftsure.serve.proxy.connections import GoneError

__all__ = ["PassedOn", "as_stream", "events_of", "without_logprobs"]

LONGEST = 8 << 20
"""Longest line of an upstream's stream, in bytes."""


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def encoded(content: Any) -> bytes:
    """Return JSON in ASCII, as any client can read it, with null for NaN and infinities."""
    try:
        return _ENCODER.encode(content).encode()
    except ValueError:
        finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
        return _ENCODER.encode(finite).encode()


def as_json(content: bytes, parsed: Any) -> bytes:
    """Return the bytes of a response; encoded again only if they hold NaN or an infinity."""
    if b"NaN" in content or b"Infinity" in content:
        try:
            _ENCODER.encode(parsed)
        except ValueError:
            return encoded(parsed)
    return content


def event(content: Any) -> bytes:
    """Return one event."""
    return b"data: " + encoded(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def as_stream(response: Mapping[str, Any], *, chat: bool, usage: bool) -> Iterator[bytes]:
    """Yield a whole response as the events that a stream of it would have had."""
    head = {name: response[name] for name in ("id", "created", "model") if name in response}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    given = response["choices"][0]
    index = {"index": given.get("index", 0)}
    end = {"finish_reason": given.get("finish_reason") or "stop"}
    more = {"logprobs": given["logprobs"]} if given.get("logprobs") is not None else {}
    if chat:
        message = {name: each for name, each in given["message"].items() if each is not None}
        message.setdefault("role", "assistant")
        yield event(
            {**head, "choices": [{**index, "delta": message, **more, "finish_reason": None}]}
        )
        yield event({**head, "choices": [{**index, "delta": {}, **end}]})
    else:
        yield event({**head, "choices": [{**index, "text": given["text"], **more, **end}]})
    if usage:
        yield event({**head, "choices": [], "usage": response.get("usage")})
    yield DONE


def without_logprobs(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response without the log-probabilities, which the proxy asked for itself."""
    choices = [{**choice, "logprobs": None} for choice in response["choices"]]
    return {**response, "choices": choices}


class PassedOn(StreamingResponse):
    """A stream that closes its source in the end; its caller notices if the client goes away.

    Parameters
    ----------
    parts : asynchronous generator of bytes
    close : callable
        Awaited in the end, also if no part was sent.
    headers : mapping
    seconds : float
        How long the client may take to read a part.
    """

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
        seconds: float,
    ) -> None:
        super().__init__(parts, media_type="text/event-stream", headers=headers)
        self.close, self.seconds = close, seconds

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the stream.

        Raises
        ------
        GoneError
            If the client does not read.
        """

        async def patient(message: Message) -> None:
            try:
                async with asyncio.timeout(self.seconds):
                    await send(message)
            except TimeoutError:
                raise GoneError from None

        try:
            await self.stream_response(patient)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]
            await self.close()


async def events_of(
    content: Any, redacted: Callable[[bytes], bytes] = lambda line: line
) -> AsyncIterator[Any]:
    """Yield the JSON of each event of an upstream's stream, up to [DONE].

    Parameters
    ----------
    content : stream
        Of an HTTP response.
    redacted : callable
        Removes the key from a line.

    Raises
    ------
    UpstreamError
        If the stream is cut, or holds something else.
    """
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > LONGEST:
            raise UpstreamError("The stream holds a line that is too long.")
        for line in lines:
            text = line.strip()
            if not text.startswith(b"data:"):
                continue
            text = redacted(text[5:].strip())
            if text == b"[DONE]":
                return
            try:
                found = json.loads(text)
            except ValueError:
                raise UpstreamError("The stream holds an event that is not JSON.") from None
            if not isinstance(found, dict):
                raise UpstreamError("The stream holds an event that is not an object.")
            yield found
    raise UpstreamError("The stream was cut short.", temporary=True)
