"""`App`: a plain ASGI application that serves an exported folder, with dynamic batching.

    SWIFTSURE_FOLDER=exported uvicorn swiftsure.onnx.asgi:app

| request | answer |
|---|---|
| `GET /health` | `{"status": "ok", "model": …, "policy": …}` |
| `POST /predict` with `{"inputs": …}` | `{"exits": […], "outputs": …, "predictions": […]}` |
| `POST /predict` with an .npy file | the same |
"""

import asyncio
import io
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.onnx.results import ExitOutput
from swiftsure.onnx.runtime import EarlyExit
from swiftsure.onnx.trees import Form, arrays_in, build

__all__ = ["App", "app"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY = 64 << 20
"""Bytes of a request that are accepted."""


class App:
    """An ASGI application.

    Requests that arrive within `max_wait` seconds run as one batch.

    Parameters
    ----------
    fast : EarlyExit
    batch_size : int
        Largest number of samples that run at once; a larger request runs alone.
    max_wait : float
        Seconds to wait for further requests.
    """

    def __init__(self, fast: EarlyExit, batch_size: int = 32, max_wait: float = 0.002) -> None:
        self.fast = fast
        self.batch_size = checks.count("batch_size", batch_size)
        self.max_wait = max_wait
        self._waiting: list[tuple[list[NDArray[Any]], asyncio.Future[dict[str, Any]]]] = []
        self._due: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            status, content = await self._answer(scope, receive)
        except (ValueError, TypeError) as error:
            status, content = 400, {"error": str(error)}
        except Exception as error:  # the server goes on
            status, content = 500, {"error": f"{type(error).__name__}: {error}"}
        body = json.dumps(content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        manifest = self.fast.stages.manifest
        if scope["path"] == "/health" and scope["method"] == "GET":
            return 200, {"status": "ok", "model": manifest.model, "policy": str(self.fast.policy)}
        if scope["path"] != "/predict" or scope["method"] != "POST":
            return 404, {"error": "There are GET /health and POST /predict."}
        body = await _body(receive)
        headers = dict(scope["headers"])
        if b"json" in headers.get(b"content-type", b"application/json"):
            tree = _from_json(body, manifest.inputs)
        else:
            tree = np.load(io.BytesIO(body), allow_pickle=False)
        return 200, await self._batched(arrays_in(manifest.inputs, tree, "`inputs`"))

    async def _batched(self, arrays: list[NDArray[Any]]) -> dict[str, Any]:
        """Wait for the batch that these samples run in, and return their part of the results."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._waiting.append((arrays, answer))
        if sum(len(each[0]) for each, _ in self._waiting) >= self.batch_size:
            self._start()
        elif self._due is None:
            self._due = loop.call_later(self.max_wait, self._start)
        return await answer

    def _start(self) -> None:
        """Run the requests that wait."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        waiting, self._waiting = self._waiting, []
        if waiting:
            task = asyncio.get_running_loop().create_task(self._run(waiting))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(
        self, waiting: list[tuple[list[NDArray[Any]], asyncio.Future[dict[str, Any]]]]
    ) -> None:
        try:
            joined = [np.concatenate(each) for each in zip(*(a for a, _ in waiting), strict=True)]
            batch = build(self.fast.stages.manifest.inputs, joined)
            out = await asyncio.to_thread(self.fast, batch)
        except Exception as error:
            if len(waiting) == 1:
                if not waiting[0][1].done():
                    waiting[0][1].set_exception(error)
                return
            for each in waiting:  # one request must not fail the others
                await self._run([each])
            return
        start = 0
        for arrays, answer in waiting:
            part = slice(start, start + len(arrays[0]))
            start = part.stop
            if not answer.done():  # the client may have gone
                answer.set_result(_said(out, part))


def _said(out: ExitOutput, part: slice) -> dict[str, Any]:
    """Return the results of some samples as JSON."""
    rows = [array[part] for array in out.raw]
    found = {"exits": out.exits[part].tolist(), "outputs": _lists(out.build(rows))}
    if isinstance(out.outputs, np.ndarray) and out.outputs.ndim == 2:
        found["predictions"] = out.predictions[part].tolist()
    return found


def _lists(tree: Any) -> Any:
    if isinstance(tree, np.ndarray):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: _lists(value) for key, value in tree.items()}
    return [_lists(value) for value in tree] if isinstance(tree, tuple | list) else tree


def _from_json(body: bytes, form: Form) -> Any:
    try:
        content = json.loads(body)
    except ValueError as error:
        raise ValueError(f"The body must be JSON ({error}).") from None
    if not isinstance(content, dict) or "inputs" not in content:
        raise ValueError('The body must be {"inputs": …}.')
    return _with_dtypes(form, content["inputs"])


def _with_dtypes(form: Form, tree: Any) -> Any:
    """Return nested lists as arrays with the dtypes of a form."""
    if "dtype" in form:
        return np.asarray(tree, dtype=form["dtype"])
    if "dict" in form and isinstance(tree, dict):
        return {k: _with_dtypes(each, tree[k]) for k, each in form["dict"].items() if k in tree}
    parts = form.get("tuple", form.get("list"))
    if parts is not None and isinstance(tree, list) and len(parts) == len(tree):
        return [_with_dtypes(each, value) for each, value in zip(parts, tree, strict=True)]
    return tree


async def _body(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            raise ValueError(f"The body must have at most {MAX_BODY:,} bytes.")
        if not message.get("more_body", False):
            return b"".join(parts)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


_served: list[App] = []


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve the folder in the environment variable SWIFTSURE_FOLDER."""
    if not _served:
        folder = os.environ.get("SWIFTSURE_FOLDER")
        if folder is None:
            raise ValueError("SWIFTSURE_FOLDER must name the exported folder.")
        _served.append(App(EarlyExit.load(folder)))
    await _served[0](scope, receive, send)
