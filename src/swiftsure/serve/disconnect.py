"""Notices that a client has gone away, so that nothing is paid for an answer that nobody reads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

__all__ = ["GoneError", "while_connected"]


class GoneError(Exception):
    """The client went away, or does not read its answer."""


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Run a block after a request's body was read; cancel it if the client goes away.

    Raises
    ------
    GoneError
        If the client went away.
    """
    task = asyncio.current_task()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        if task is not None:
            task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task is not None and task.uncancel() == 0:
            raise GoneError from None
        raise
    finally:
        watching.cancel()
