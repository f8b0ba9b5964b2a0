"""An upstream's stream, passed on."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from swiftsure.serve.disconnect import GoneError
from swiftsure.serve.openai import encoded

__all__ = ["PassedOn", "as_json", "without_logprobs"]


def as_json(content: bytes, parsed: Any) -> bytes:
    """Return the bytes of a response; encoded again only if they hold NaN or an infinity."""
    if b"NaN" in content or b"Infinity" in content:
        try:
            json.dumps(parsed, allow_nan=False)
        except ValueError:
            return encoded(parsed)
    return content


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
