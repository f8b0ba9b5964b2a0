"""The server as an ASGI application, for other servers than `swiftsure serve`.

SWIFTSURE_FOLDER=model uvicorn swiftsure.serve.asgi:app

The folder is one from `EarlyExit.save_pretrained` or `swiftsure export`. The application is made on
first use, so that importing this module loads nothing.
"""

import os

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from swiftsure.serve.app import create_app
from swiftsure.serve.loading import load_engine

__all__ = ["app"]

_made: list[Starlette] = []


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve the folder in the environment variable SWIFTSURE_FOLDER."""
    if not _made:
        folder = os.environ.get("SWIFTSURE_FOLDER")
        if folder is None:
            raise ValueError("SWIFTSURE_FOLDER must name the model's folder.")
        _made.append(create_app(load_engine(folder), token=os.environ.get("SWIFTSURE_TOKEN")))
    await _made[0](scope, receive, send)
