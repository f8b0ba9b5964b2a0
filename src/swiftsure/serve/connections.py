"""`Connection`: HTTP as uvicorn reads it, with limits on headers, connections and waiting."""

import asyncio
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["Connection"]

MOST_HEADER = 64 << 10
"""Bytes of a request's line, headers and trailers; then 431."""
HEADER_SECONDS = 10.0
"""Seconds that these may take to arrive; then the connection is closed."""
UNREAD_SECONDS = 30.0
"""Seconds for which a client may read nothing of what was sent to it; then it is closed."""
STOPPING_SECONDS = 3.0
"""The same, and for requests that have not arrived in full, once the server stops."""
MOST_CONNECTIONS = 2_000
"""Connections at once, unless the process may open fewer than twice as many files; then 503."""


def most_connections() -> int:
    """Return how many connections leave enough files for logs, models and upstream servers."""
    if sys.platform == "win32":
        return MOST_CONNECTIONS
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files < 0 else min(MOST_CONNECTIONS, files // 2)


class Connection(HttpToolsProtocol):
    """A connection that is closed if its client sends too much, or keeps the server waiting."""

    _header = 0  # bytes of the request's line, headers and trailers that were parsed
    _unparsed = 0  # bytes since anything was parsed: of a header that does not end
    _reading_header = True
    _unread = 0  # bytes that the client had not read when it was last looked at
    _stopping = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: Any) -> None:
        """Start to wait for a request, unless there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            self._refuse(b"503 Service Unavailable")
        else:
            self._close_in(HEADER_SECONDS, unless="header")

    def data_received(self, data: bytes) -> None:
        """Parse what came, and count what cannot be parsed yet."""
        self._unparsed += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            self._wait_for_reader()
        elif max(self._header, self._unparsed) > MOST_HEADER:
            self._refuse(b"431 Request Header Fields Too Large")
        elif self._reading_header and "header" not in self._timers and not self._is_answering():
            self._close_in(HEADER_SECONDS, unless="header")

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._unparsed, self._reading_header = 0, True
        if self._header <= MOST_HEADER:  # else the connection will be closed
            self._header = 0

    def on_url(self, url: bytes) -> None:
        """Count a part of the request's line."""
        super().on_url(url)
        self._header += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer; more than are allowed are not kept."""
        self._header += len(name) + len(value) + 32
        if self._header <= MOST_HEADER:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hand the request over, unless it will be refused."""
        self._reading_header, self._unparsed = False, 0
        if self._header <= MOST_HEADER:
            self._keep_open("header")
            super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Note that the body goes on."""
        self._unparsed = 0

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, unless the request will be refused."""
        self._unparsed = 0
        if self._header <= MOST_HEADER:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request, unless it will be refused."""
        self._unparsed, self._reading_header = 0, True
        if self._header <= MOST_HEADER:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait until the client has read the response."""
        super().on_response_complete()
        self._keep_open("read")
        if self.transport.get_write_buffer_size():
            self._wait_for_reader()

    def pause_writing(self) -> None:
        """Wait until the client has read some of what was sent."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Go on to send."""
        super().resume_writing()
        self._keep_open("read")

    def shutdown(self) -> None:
        """Close the connection, once a request that arrived in full was answered."""
        self._stopping = True
        super().shutdown()
        if not self._is_answering() or self.cycle.more_body or self.flow.write_paused:
            self._wait_for_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        for name in [*self._timers]:
            self._keep_open(name)
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return not getattr(self.cycle, "response_complete", True)  # None before the first request

    def _wait_for_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._close_in(STOPPING_SECONDS if self._stopping else UNREAD_SECONDS, unless="read")

    def _close_in(self, seconds: float, *, unless: str) -> None:
        self._keep_open(unless)
        self._timers[unless] = self.loop.call_later(seconds, self._give_up, unless)

    def _keep_open(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, name: str) -> None:
        """Close the connection without waiting for its client, unless it reads."""
        unread = self.transport.get_write_buffer_size()
        if name == "header" or self._stopping or unread >= self._unread > 0:
            self.transport.abort()
        elif unread:
            self._wait_for_reader()

    def _refuse(self, status: bytes) -> None:
        if not self._is_answering():  # else it would be a part of that answer
            self.transport.write(
                b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
            )
        self.transport.close()
        self._wait_for_reader()
