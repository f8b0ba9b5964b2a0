"""`Service`: what a server of models and a proxy share, which is all but answering.

Routes and who may use them, health, metrics, the live page, the monitor's faults, and policies that
are installed, labels that arrive and alarms that are put aside while requests run.
"""

import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftsure._lib.files import LockedError
from swiftsure.certify.slices import load_policy
from swiftsure.serve.engine import AnyPolicy
from swiftsure.serve.http import (
    Access,
    RefusedError,
    check_json,
    off_loop,
    read_body,
    read_json,
)
from swiftsure.serve.live import LiveStatus
from swiftsure.serve.metrics import Metrics
from swiftsure.serve.policy_manager import PolicyManager

__all__ = ["Answering", "Service", "headers_of"]

log = logging.getLogger("swiftsure.serve")

Respond = Callable[[Request], Awaitable[Response]]


class Service(ABC):
    """A web application around something that answers requests.

    Parameters
    ----------
    manager : PolicyManager
    live : LiveStatus
    token : str, optional
        Bearer token that all requests must have, except those to /health and the page, which holds
        no data until it is given the token. Without one, no policy can be installed over HTTP.
    max_body : int
        Largest body, in bytes.
    timeout : float
        Seconds that a body may take to arrive.

    Attributes
    ----------
    metrics : Metrics
        While the application runs.
    """

    metrics: Metrics

    def __init__(
        self,
        manager: PolicyManager,
        live: LiveStatus,
        token: str | None,
        *,
        max_body: int,
        timeout: float,
    ) -> None:
        self.manager, self.live, self.token = manager, live, token
        self.access = Access(token)
        self._max_body, self._timeout = max_body, timeout

    @abstractmethod
    def answering(self) -> "Mapping[str, Answering]":
        """Return what answers POST requests, by path."""

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[None]:
        """Answer requests, and set `live.load` and `metrics`, while the block runs."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the OpenAPI document."""

    def more_routes(self) -> list[Route]:
        """Return routes that only this service has."""
        return []

    def refusal(self, error: RefusedError) -> Response:
        """Return what a client is told whose request is refused."""
        return JSONResponse({"error": str(error)}, error.status)

    def follow_mode(self) -> None:  # noqa: B027 (a proxy reads it for each request)
        """Answer as the manager says from now on."""

    def application(self, **settings: Any) -> Starlette:
        """Return the ASGI application."""
        answering = self.answering()
        protected: dict[str, dict[str, Respond]] = {
            "/labels": {"GET": self._needed_labels, "POST": self._labels},
            "/policy": {"GET": self._policy, "POST": self._install},
            "/resume": {"POST": self._resume},
            "/metrics": {"GET": self._metrics},
            "/status": {"GET": self._status},
            "/events": {"GET": self._events},
        }
        routes = [
            *(Route(path, each, methods=["POST"]) for path, each in answering.items()),
            *self.more_routes(),
            *(Route(p, self.protected(each), methods=[*each]) for p, each in protected.items()),
            Route("/health", self._health),
            Route("/v2/health/ready", self._health),
            Route("/openapi.json", self._openapi),
            Route("/docs", self._docs),
            Route("/", self._page),
        ]
        app = _Application(answering, routes=routes, lifespan=self._lifespan, **settings)
        app.state.service = self
        return app

    @asynccontextmanager
    async def _lifespan(self, _app: Any) -> AsyncIterator[None]:
        async with self.manager.logging_stalls(), self.running():
            yield

    def protected(self, respond: Mapping[str, Respond]) -> Respond:
        """Return an endpoint that answers, by method, those who may use it."""

        async def endpoint(request: Request) -> Response:
            try:
                changes, headers = request.method == "POST", headers_of(request)
                self.access.check(headers, changes=changes)
                if changes:
                    check_json(headers)
                return await respond["GET" if request.method == "HEAD" else request.method](request)
            except RefusedError as error:
                return self.refusal(error)

        return endpoint

    async def _body(self, request: Request) -> bytes:
        headers, receive = headers_of(request), request.receive
        return await read_body(headers, receive, self._max_body, self._timeout)

    def _needs_token(self, what: str) -> None:
        if self.token is None:
            raise RefusedError(403, f"The server must have a token to {what}.")

    async def _needed_labels(self, _request: Request) -> Response:
        self._refuse_unaudited()
        return JSONResponse({"needed": await run_in_threadpool(self.manager.unlabelled)})

    async def _labels(self, request: Request) -> Response:
        """Take labels of audited requests."""
        self._refuse_unaudited()
        body = await self._body(request)
        content = await off_loop(body, lambda: read_json(body))
        labels = content.get("labels") if isinstance(content, dict) else None
        if not isinstance(labels, dict) or not labels or len(content) > 1:
            raise RefusedError(422, 'The body must be {"labels": {"request id": class, ...}}.')
        try:
            return JSONResponse({"results": await run_in_threadpool(self.manager.label, labels)})
        except ValueError as error:
            raise RefusedError(422, str(error)) from None

    def _refuse_unaudited(self) -> None:
        audit_log = self.manager.audit_log
        if audit_log is None or audit_log.monitor is None:
            raise RefusedError(409, "Nothing is audited, so no label is needed.")

    async def _policy(self, _request: Request) -> Response:
        """Return the policy in force and what it promises in words."""
        manager = self.manager
        content = None if manager.policy is None else manager.policy.model_dump(mode="json")
        sentence = None if manager.policy is None else str(manager.policy)
        found = {"version": manager.version, "number": manager.number, "sentence": sentence}
        return JSONResponse({**found, "policy": content})

    async def _install(self, request: Request) -> Response:
        """Install another policy."""
        self._needs_token("install policies")
        body = await self._body(request)
        try:
            await run_in_threadpool(lambda: self.manager.install(_policy_in(body)))
        except ValueError as error:
            log.warning("a policy was refused: %s", error)
            raise RefusedError(422, str(error)) from None
        self.follow_mode()
        return await self._policy(request)

    async def _resume(self, _request: Request) -> Response:
        """Put an alarm aside and go back to the policy in force."""
        self._needs_token("be told to resume")
        try:
            found = await run_in_threadpool(self.manager.resume)
        except (LockedError, OSError) as error:
            raise RefusedError(409, f"The alarm stays: {error}") from None
        self.follow_mode()
        return JSONResponse({"resumed": found, **self.live.health()})

    async def _health(self, _request: Request) -> Response:
        """Say whether the server answers, and how."""
        found = self.live.health()
        return JSONResponse(found, 503 if found["status"] == "dead" else 200)

    async def _metrics(self, _request: Request) -> Response:
        """Return the metrics in Prometheus' format."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.text(), media_type=kind)

    async def _page(self, _request: Request) -> Response:
        """Return the live page, which follows /events."""
        return _page(self.live.page(empty=self.token is not None))

    async def _status(self, _request: Request) -> Response:
        """Return what the page shows."""
        return JSONResponse(self.live.status())

    async def _events(self, request: Request) -> Response:
        """Stream the status as server-sent events."""
        return StreamingResponse(
            self.live.events(getattr(request.app.state, "stopping", lambda: False)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def _openapi(self, _request: Request) -> Response:
        return JSONResponse(self.describe())

    async def _docs(self, _request: Request) -> Response:
        return _page((Path(__file__).parent / "docs.html").read_text("utf-8"))


class Answering:
    """An ASGI application of one path."""

    def __init__(self, answer: ASGIApp) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._answer(scope, receive, send)


class _Application(Starlette):
    """Sends requests for answers straight to the service: routing would take as long as they do.

    Not with middleware, which may be what guards the server.
    """

    def __init__(self, answering: Mapping[str, Answering], **settings: Any) -> None:
        super().__init__(**settings)
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and not self.user_middleware:
            answer = self._answering.get(scope["path"])
            if answer is not None:
                await answer(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def headers_of(request: Request) -> dict[bytes, bytes]:
    """Return the headers of a request."""
    return dict(request.scope["headers"])


def _page(text: str) -> Response:
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    return HTMLResponse(text, headers={"Content-Security-Policy": f"{policy} connect-src 'self'"})


def _policy_in(body: bytes) -> AnyPolicy:
    """Return the policy in the content of its file, with its checksum and signature checked."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.json"
        path.write_bytes(body)
        try:
            return load_policy(path)
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), "The body")) from None
