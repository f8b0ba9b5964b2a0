"""Starts a server, in a thread for programs and tests or until a signal for the command line."""

import errno
import gc
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from swiftsure.serve.connections import Connection

__all__ = ["listen", "log_to_stderr", "run", "start"]


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises
    ------
    ValueError
        If the port is in use, or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not 0 <= port < 65536:
        raise ValueError(f"`port` must be in [0, 65535], but got {port}.")
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"`port` {port} of {host} is in use: stop the server that uses it, or choose"
                " another port."
            ) from None
        raise ValueError(
            f"`host` and `port` must be an address of this machine and a port that you may use, but"
            f" {host} port {port} gives: {error}."
        ) from None
    # asyncio does this only for sockets that it made itself; answers would wait for 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Write what the server logs to standard error, with its time, while the block runs."""
    log, handler = logging.getLogger("swiftsure"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def run(app: Any, listening: socket.socket) -> None:
    """Serve on a socket until SIGINT or SIGTERM, then answer what was accepted."""
    # The model and the imports stay for good: going through them stopped requests for 100 ms.
    gc.collect()
    gc.freeze()
    _server(app).run(sockets=[listening])


def _server(app: Any) -> uvicorn.Server:
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            lifespan="on",
            access_log=False,
            proxy_headers=False,
            http=Connection,
            ws="none",  # there is none here, and it would get round the limits of `Connection`
        )
    )
    if hasattr(app, "state"):
        # Events for the live page would never end, and the server waits for open answers.
        app.state.stopping = lambda: server.should_exit
    return server


@contextmanager
def start(app: Any, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve in a background thread while the block runs; gives the address.

    Examples
    --------
    >>> with start(create_app(engine)) as address:  # doctest: +SKIP
    ...     urllib.request.urlopen(f"{address}/health")
    """
    with listen(host, port) as listening:
        server = _server(app)
        work = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        work.start()
        try:
            while not server.started:
                if not work.is_alive():
                    raise RuntimeError("The server did not start.")
                time.sleep(0.005)
            yield f"http://{host}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            work.join()
