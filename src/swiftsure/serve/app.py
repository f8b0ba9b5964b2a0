"""The web application: /predict, /health, /policy, /metrics, and a live page at /."""

import asyncio
import json
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from swiftsure._lib import checks
from swiftsure._lib.files import LockedError
from swiftsure.certify.policy import Policy
from swiftsure.monitor import request_ids
from swiftsure.monitor.ids import check_request_id
from swiftsure.serve.batching import Batcher, BusyError, Outcome, Served
from swiftsure.serve.bodies import ARROW, JSON, NPY, check_count, parse_body
from swiftsure.serve.engine import Engine, Inputs, InvalidRequestError
from swiftsure.serve.guarding import Guard
from swiftsure.serve.http import (
    Access,
    RefusedError,
    check_json,
    content_type,
    off_loop,
    read_body,
    read_json,
)
from swiftsure.serve.live import LiveStatus
from swiftsure.serve.metrics import Metrics
from swiftsure.serve.watching import Watcher
from swiftsure.serve.workers import WorkerEngine

__all__ = ["Limits", "create_app"]

log = logging.getLogger("swiftsure.serve")


@dataclass(frozen=True)
class Limits:
    """What a server accepts.

    Attributes
    ----------
    max_batch, max_wait_ms, max_queue, max_audits
        As for `Batcher`.
    timeout : float
        Seconds that a body may take to arrive (else 408), and an answer to be ready (else 504).
    max_body : int
        Largest body, in bytes.
    """

    max_batch: int = 16
    max_wait_ms: float = 0.0
    max_queue: int = 256
    max_audits: int = 256
    timeout: float = 30.0
    max_body: int = 8 << 20

    def __post_init__(self) -> None:
        """Refuse impossible limits before the server starts."""
        for name in ("max_batch", "max_queue", "max_audits", "max_body"):
            checks.count(name, getattr(self, name))
        checks.between("timeout", self.timeout, 0.0, float("inf"))
        if not 0 <= self.max_wait_ms <= 60_000:
            raise ValueError(f"`max_wait_ms` must be in [0, 60000], but got {self.max_wait_ms:g}.")


class _Asked(NamedTuple):
    """A request for predictions: its id, and its samples, checked; errors where they are wrong."""

    name: str
    samples: "list[Any | InvalidRequestError]"
    several: bool


def create_app(
    engine: Engine | Sequence[Engine],
    limits: Limits | None = None,
    *,
    guard: Guard | None = None,
    audit_rate: float = 0.0,
    token: str | None = None,
) -> Starlette:
    """Return an ASGI application that serves an engine.

    Parameters
    ----------
    engine : Engine or several
        Several engines, such as `WorkerEngine`s, answer batches side by side.
    limits : Limits, optional
    guard : Guard, optional
        Decides which policy answers, and watches its promise; by default the engine's own policy
        answers, and nothing is watched.
    audit_rate : float
        Probability that a request is audited; needs a guard that watches.
    token : str, optional
        Bearer token that all requests must have, except those to /health and the page, which holds
        no data until it is given the token. Without one, no policy can be installed over HTTP.

    Notes
    -----
    The batcher starts with the application and is `app.state.service.batcher` while it runs. At
    the end, all accepted requests are answered and the waiting audits are made.
    """
    engines: list[Engine] = list(engine) if isinstance(engine, Sequence) else [engine]
    own = Guard(engines[0].policy) if guard is None else guard
    service = _Service(engines, limits or Limits(), own, audit_rate, token)
    routes = [
        Route("/predict", service.predict, methods=["POST"]),
        Route("/labels", service.labels, methods=["GET", "POST"]),
        Route("/health", service.health),
        Route("/policy", service.policy, methods=["GET", "POST"]),
        Route("/resume", service.resume, methods=["POST"]),
        Route("/metrics", service.metrics_text),
        Route("/status", service.status),
        Route("/events", service.events),
        Route("/", service.page),
    ]
    app = _App(routes=routes, lifespan=service.lifespan)
    app.state.service = service
    return app


class _App(Starlette):
    """Sends predictions straight to the service: routing would take as long as they do.

    Not with middleware, which may be what guards the server.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", "/predict")
        if asked and not self.user_middleware:
            await self.state.service.predict_asgi(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class _Service:
    batcher: Batcher
    metrics: Metrics

    def __init__(
        self,
        engines: list[Engine],
        limits: Limits,
        guard: Guard,
        audit_rate: float,
        token: str | None,
    ) -> None:
        if audit_rate and (guard.watcher is None or guard.watcher.monitor is None):
            raise ValueError("`audit_rate` needs a guard that watches.")
        self.engines, self.engine = engines, engines[0]
        self.limits, self.guard = limits, guard
        self.audit_rate, self.token = audit_rate, token
        guard.check_with(self.engine)
        self.live = LiveStatus(self.engine, guard)
        self._access = Access(token)

    @property
    def watcher(self) -> Watcher | None:
        """The watcher of the policy that answers."""
        return self.guard.watcher

    @asynccontextmanager
    async def lifespan(self, _app: Any) -> AsyncIterator[None]:
        limits, loop = self.limits, asyncio.get_running_loop()

        def deliver(outcomes: list[Outcome]) -> None:
            loop.call_soon_threadsafe(_set_futures, outcomes)

        self.batcher = Batcher(
            self.engines,
            max_batch=limits.max_batch,
            max_wait_ms=limits.max_wait_ms,
            max_queue=limits.max_queue,
            audit_rate=self.audit_rate,
            max_audits=limits.max_audits,
            on_audit=self.guard.audit,
            on_idle=self._follow_guard,
            mode=self.guard.mode,
            deliver=deliver,
        )
        self.live.batcher, self.guard.pending = self.batcher, self.batcher.pending
        self.metrics = Metrics(self.batcher, self.guard, self.live.costs)
        try:
            async with self.guard.logging_stalls():
                yield
        finally:
            await run_in_threadpool(self.batcher.close)
            await run_in_threadpool(self.guard.close)
            for engine in self.engines:
                if isinstance(engine, WorkerEngine):
                    await run_in_threadpool(engine.close)

    def _follow_guard(self, batcher: Batcher) -> None:
        self.guard.tick()
        batcher.mode = self.guard.mode
        self.live.tick()

    async def predict(self, request: Request) -> Response:
        """Answer samples, if this is mounted below another application."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await self.predict_asgi(request.scope, request.receive, send)
        headers = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
        return Response(sent[1]["body"], sent[0]["status"], headers)

    async def predict_asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one or several samples, sent as JSON, .npy or Arrow."""
        began, own = time.perf_counter(), {}
        try:
            headers = dict(scope["headers"])
            self._access.check(headers)
            asked = await self._asked(headers, receive)
            own = {"id": asked.name}
            if asked.several:
                status, content = await self._several(asked, began)
            else:
                (sample,) = asked.samples
                if isinstance(sample, InvalidRequestError):
                    raise sample
                (found,) = await self._answers([(asked.name, sample)])
                if isinstance(found, Exception):
                    raise found
                status, content = 200, {**own, **self._content(found)}
                self._note(found, began)
        except RefusedError as error:
            status, content = error.status, {**own, "error": str(error)}
        except InvalidRequestError as error:
            status, content = 422, {**own, "error": str(error)}
        except BusyError as error:
            status, content = 429, {**own, "error": f"The server is busy: {error}."}
        except TimeoutError:
            text = f"There was no answer within {self.limits.timeout:g} s."
            status, content = 504, {**own, "error": text}
        except Exception:
            log.exception("a request failed")
            status, content = 500, {**own, "error": "The server failed on this request."}
        self.metrics.count(status)
        body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
        reply = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if status == 429:
            reply.append((b"retry-after", b"1"))
        await send({"type": "http.response.start", "status": status, "headers": reply})
        await send({"type": "http.response.body", "body": body})

    async def _several(self, asked: _Asked, began: float) -> tuple[int, dict[str, Any]]:
        """Answer several samples; one that is wrong fails alone."""
        name = asked.name
        found: list[Served | Exception] = list(asked.samples)
        good = [k for k, sample in enumerate(found) if not isinstance(sample, InvalidRequestError)]
        answers = await self._answers([(f"{name}.{k}", asked.samples[k]) for k in good])
        for k, answer in zip(good, answers, strict=True):
            found[k] = answer
        content = []
        for k, each in enumerate(found):
            if isinstance(each, Served):
                content.append({"id": f"{name}.{k}", **self._content(each)})
                self._note(each, began)
                continue
            mine = isinstance(each, InvalidRequestError)
            if not mine:
                log.error("a sample failed: %s: %s", type(each).__name__, each)
            text = str(each) if mine else "The server failed on this sample."
            status = 422 if mine else 500
            content.append({"id": f"{name}.{k}", "error": text, "status": status})
        return 200, {"id": name, "answers": content}

    async def _answers(self, samples: list[tuple[str, Any]]) -> list[Served | Exception]:
        """Return one outcome per sample, or raise `TimeoutError` and withdraw those that wait."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Served | Exception]] = [loop.create_future() for _ in samples]
        if not samples:
            return []
        self.batcher.submit_all(
            [(*each, done) for each, done in zip(samples, futures, strict=True)]
        )
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            _withdraw(futures)

        timer = loop.call_later(self.limits.timeout, expire)
        try:
            return [await done for done in futures]
        except asyncio.CancelledError:
            if expired:  # else the client is gone
                raise TimeoutError from None
            _withdraw(futures)
            raise
        finally:
            timer.cancel()

    def _content(self, served: Served) -> dict[str, Any]:
        answer = served.answer
        return {
            **answer.content,
            "exit": answer.exit,
            "confidence": answer.confidence,
            "full_model": served.mode.full,
        }

    def _note(self, served: Served, began: float) -> None:
        exit_, full = served.answer.exit, served.mode.full
        self.live.answered(exit_, full=full)
        self.metrics.answered(exit_, full=full, seconds=time.perf_counter() - began)

    async def _asked(self, headers: dict[bytes, bytes], receive: Receive) -> _Asked:
        """Return what a request asks for."""
        kind = content_type(headers)
        if kind not in (JSON, ARROW, *NPY):
            raise RefusedError(415, f"The body must be {JSON}, {NPY[0]} or {ARROW}.")
        body = await read_body(headers, receive, self.limits.max_body, self.limits.timeout)
        return await off_loop(body, lambda: self._read(kind, body, headers))

    def _read(self, kind: str, body: bytes, headers: dict[bytes, bytes]) -> _Asked:
        most, inputs = self.limits.max_queue, self.engine.inputs
        parsed = parse_body(kind, body, most)
        name = _request_id(parsed.id, headers)
        samples = inputs.samples(parsed.inputs) if parsed.samples is None else parsed.samples
        if samples is None:
            return _Asked(name, [_checked(inputs, parsed.inputs)], False)
        check_count(len(samples), most)
        return _Asked(name, [_checked(inputs, each) for each in samples], True)

    async def labels(self, request: Request) -> Response:
        """Take labels of audited requests, or say which are needed."""
        return await self._protected(request, self._labels)

    async def _labels(self, request: Request) -> Response:
        watcher = self.watcher
        if watcher is None or watcher.monitor is None:
            raise RefusedError(409, "Nothing is audited, so no label is needed.")
        if request.method == "GET":
            return JSONResponse({"needed": await run_in_threadpool(watcher.unlabelled)})
        body = await self._body(request)
        content = await off_loop(body, lambda: read_json(body))
        labels = content.get("labels") if isinstance(content, dict) else None
        if not isinstance(labels, dict) or not labels or len(content) > 1:
            raise RefusedError(422, 'The body must be {"labels": {"request id": class, ...}}.')
        try:
            return JSONResponse({"results": await run_in_threadpool(watcher.label, labels)})
        except ValueError as error:
            raise RefusedError(422, str(error)) from None

    async def _body(self, request: Request) -> bytes:
        limits = self.limits
        return await read_body(_headers(request), request.receive, limits.max_body, limits.timeout)

    async def resume(self, request: Request) -> Response:
        """Put an alarm aside and go back to the policy in force."""
        return await self._protected(request, self._resume)

    async def _resume(self, _request: Request) -> Response:
        if self.token is None:
            raise RefusedError(403, "The server must have a token to be told to resume.")
        try:
            found = await run_in_threadpool(self.guard.resume)
        except (LockedError, OSError) as error:
            raise RefusedError(409, f"The alarm stays: {error}") from None
        self.batcher.mode = self.guard.mode
        return JSONResponse({"resumed": found, **self.live.health()})

    async def health(self, _request: Request) -> Response:
        """Say whether the server answers, and how."""
        return JSONResponse(self.live.health(), 200 if self.batcher.alive else 503)

    async def page(self, _request: Request) -> Response:
        """Return the live page, which follows /events."""
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
        headers = {"Content-Security-Policy": f"{policy} connect-src 'self'"}
        return HTMLResponse(self.live.page(empty=self.token is not None), headers=headers)

    async def status(self, request: Request) -> Response:
        """Return what the page shows."""

        async def respond(_request: Request) -> Response:
            return JSONResponse(self.live.status())

        return await self._protected(request, respond)

    async def events(self, request: Request) -> Response:
        """Return what the page shows, again and again."""

        async def respond(request: Request) -> Response:
            return StreamingResponse(
                self.live.events(getattr(request.app.state, "stopping", lambda: False)),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
            )

        return await self._protected(request, respond)

    async def policy(self, request: Request) -> Response:
        """Return the policy in force and what it promises in words, or install another one."""
        return await self._protected(request, self._policy)

    async def _policy(self, request: Request) -> Response:
        guard = self.guard
        if request.method == "POST":
            if self.token is None:
                raise RefusedError(403, "The server must have a token to install policies.")
            body = await self._body(request)
            try:
                await run_in_threadpool(lambda: guard.install(_policy_in(body)))
            except ValueError as error:
                log.warning("a policy was refused: %s", error)
                raise RefusedError(422, str(error)) from None
            self.batcher.mode = guard.mode
        content = guard.policy.model_dump(mode="json")
        return JSONResponse(
            {
                "version": guard.version,
                "number": guard.number,
                "sentence": str(guard.policy),
                "policy": content,
            }
        )

    async def metrics_text(self, request: Request) -> Response:
        """Return the metrics in Prometheus' format."""

        async def respond(_request: Request) -> Response:
            kind = "text/plain; version=0.0.4; charset=utf-8"
            return Response(self.metrics.text(), media_type=kind)

        return await self._protected(request, respond)

    async def _protected(
        self, request: Request, respond: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        try:
            changes = request.method == "POST"
            self._access.check(_headers(request), changes=changes)
            if changes:
                check_json(_headers(request))
            return await respond(request)
        except RefusedError as error:
            return JSONResponse({"error": str(error)}, error.status)


def _checked(inputs: Inputs, given: Any) -> Any:
    """Return a sample, or the error of one that is wrong."""
    try:
        return inputs.sample(given)
    except InvalidRequestError as error:
        return error


def _request_id(given: object, headers: dict[bytes, bytes]) -> str:
    """Return the caller's own id, from the body or a header, or a new one."""
    if given is None:
        header = headers.get(b"x-request-id")
        if header is None:
            return request_ids(1)[0]
        given = header.decode("latin-1")
    try:
        return check_request_id("id", given)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(str(error)) from None


def _headers(request: Request) -> dict[bytes, bytes]:
    return dict(request.scope["headers"])


def _policy_in(body: bytes) -> Policy:
    """Return the policy in the content of its file, with its checksum and signature checked."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.json"
        path.write_bytes(body)
        try:
            return Policy.load(path)
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), "The body")) from None


def _set_futures(outcomes: list[Outcome]) -> None:
    """Hand results over to the requests that wait for them, in the event loop."""
    for done, outcome in outcomes:
        if not done.done():
            done.set_result(outcome)


def _withdraw(futures: "list[asyncio.Future[Any]]") -> None:
    for done in futures:
        done.cancel()
