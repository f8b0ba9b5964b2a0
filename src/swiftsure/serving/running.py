"""Starts a server, in a thread for programs and tests or until a signal for the command line."""

import gc
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from swiftsure.serving.connections import Connection

__all__ = ["run", "start"]


def _config(app: Any, **settings: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        lifespan="on",
        access_log=False,
        proxy_headers=False,
        http=Connection,
        ws="none",  # there is none here, and it would get round the limits of `Connection`
        **settings,
    )


def run(app: Any, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM, then answer what was accepted."""
    # The model and the imports stay for good: going through them stopped requests for 100 ms.
    gc.collect()
    gc.freeze()
    _server(app, host=host, port=port).run()


def _server(app: Any, **settings: Any) -> uvicorn.Server:
    server = uvicorn.Server(_config(app, **settings))
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
    with socket.create_server((host, port)) as listening:
        # asyncio does this only for sockets that it made itself; answers would wait for 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
