"""What the server and the proxy demand of every HTTP request, before they look at its content."""

import asyncio
import hmac
import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.types import Receive

__all__ = [
    "JSON",
    "SLICE",
    "Access",
    "RefusedError",
    "check_json",
    "content_type",
    "off_loop",
    "read_body",
    "read_json",
]

JSON = "application/json"
SLICE = b"x-swiftsure-slice"
"""The header that names the slice of all samples of a request."""
MOST_VALUES = 500_000
"""Commas and colons in JSON: each stands before a value, which takes 30 bytes and more."""
MOST_LISTS = 100_000
"""Arrays and objects in JSON: each takes 90 bytes and more, and microseconds."""
TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text in JSON, or the rest of the body if it does not end."""
SHORT = 32 << 10
"""Bodies up to this size, in bytes, are parsed at once; a thread would take longer."""

T = TypeVar("T")
Headers = Mapping[bytes, bytes]


class RefusedError(Exception):
    """A request is refused; the status and the message go to the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Access:
    """Who may use a server: those with its token, or everybody but the pages of other sites.

    A browser sends a page's request to any address, also to one on the same machine, and adds the
    page's `Origin`. A server without a token refuses origins other than its own. It also refuses
    pages whose host is a name, since whoever owns a name can let it point to this machine.

    Parameters
    ----------
    token : str, optional
        Bearer token that requests must have.

    Raises
    ------
    ValueError
        If the token is empty: it would look like protection, and be none.
    """

    def __init__(self, token: str | None) -> None:
        if token is not None and not token.strip():
            raise ValueError(
                "`token` (SWIFTSURE_TOKEN) must not be empty. Unset it to serve without a token."
            )
        self._expected = None if token is None else f"Bearer {token}".encode()

    def check(self, headers: Headers, *, changes: bool = True) -> None:
        """Refuse a request without the token; likewise a foreign page's, if it changes anything."""
        if self._expected is not None:
            if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
                raise RefusedError(401, "The header `Authorization: Bearer TOKEN` must be given.")
        elif changes and (origin := headers.get(b"origin")) is not None:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            own = urlsplit(origin.decode("latin-1").lower()).netloc == host
            if not own or not _is_address(host):
                raise RefusedError(
                    403, "A web page of another site sent this request. Set a token to allow it."
                )


def _is_address(host: str) -> bool:
    """Return whether a `Host` header is localhost or an IP address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def content_type(headers: Headers) -> str:
    """Return the kind of a body, without its parameters; JSON if the header is missing."""
    given = headers.get(b"content-type", JSON.encode())
    return given.split(b";")[0].strip().lower().decode("latin-1")


def check_json(headers: Headers) -> None:
    """Refuse other kinds of bodies; a browser asks before it sends JSON to another site."""
    if content_type(headers) != JSON:
        raise RefusedError(415, f"The body must be JSON, with the header Content-Type: {JSON}.")


async def read_body(headers: Headers, receive: Receive, most: int, seconds: float) -> bytes:
    """Return a request's body of at most `most` bytes, if it arrives in time."""
    too_large = RefusedError(413, f"The body must have at most {most:,} bytes.")
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > most:
        raise too_large
    found = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RefusedError(400, "The body was cut short.")
                part: bytes = message.get("body", b"")
                if len(found) + len(part) > most:
                    raise too_large
                more = message.get("more_body", False)
                if not found and not more:
                    return part
                found += part
                if not more:
                    return bytes(found)
    except TimeoutError:
        raise RefusedError(408, f"The body did not arrive within {seconds:g} s.") from None


async def off_loop(body: bytes, function: Callable[[], T]) -> T:
    """Call a function that parses a body; in a thread, if other requests would wait for it."""
    return function() if len(body) <= SHORT else await run_in_threadpool(function)


def read_json(body: bytes, decode: Callable[[bytes], Any] = json.loads) -> Any:
    """Return the content of a JSON body, if it is not of very many parts.

    Parsing stops all threads, and takes up to fifty times the memory of the body. Both grow with
    the number of values and lists, so these are counted first.

    Raises
    ------
    RefusedError
        With status 413, or 422 if it is not JSON.
    """
    many = _has_many_parts(body)
    if many and body.count(b'"') - body.count(rb"\"") < MOST_LISTS:  # those in texts do not count
        many = _has_many_parts(TEXT.sub(b"", body))
    if many:
        raise RefusedError(
            413,
            f"A JSON body must have at most {MOST_VALUES:,} values, and {MOST_LISTS:,} arrays and"
            " objects. Send less at once.",
        )
    try:
        return decode(body)
    except (ValueError, RecursionError):
        raise RefusedError(422, "The body must be JSON in UTF-8.") from None


def _has_many_parts(body: bytes) -> bool:
    values = body.count(b",") + body.count(b":")
    return values > MOST_VALUES or body.count(b"[") + body.count(b"{") > MOST_LISTS
