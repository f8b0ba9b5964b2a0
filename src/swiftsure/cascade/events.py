"""Reads a server's stream of events."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from swiftsure.cascade.retrying import UpstreamError

__all__ = ["events_of"]

LONGEST = 8 << 20
"""Longest line of an upstream's stream, in bytes."""


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
