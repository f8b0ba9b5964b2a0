"""The web application: /predict, /health, /policy, /metrics, and a live page at /."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from swiftsure import checks
from swiftsure.monitor import request_ids
from swiftsure.monitor.ids import check_request_id
from swiftsure.serving.batching import Batcher, BusyError
from swiftsure.serving.bodies import json_body, npy_body
from swiftsure.serving.engine import Engine, InvalidRequestError
from swiftsure.serving.live import LiveStatus
from swiftsure.serving.metrics import Metrics
from swiftsure.serving.watching import Watcher, policy_version

__all__ = ["Limits", "create_app"]

log = logging.getLogger("swiftsure.serving")

NPY = ("application/x-npy", "application/octet-stream")


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
    max_wait_ms: float = 5.0
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


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(
    engine: Engine,
    limits: Limits | None = None,
    *,
    watcher: Watcher | None = None,
    audit_rate: float = 0.0,
    token: str | None = None,
) -> Starlette:
    """Return an ASGI application that serves an engine.

    Parameters
    ----------
    engine : Engine
    limits : Limits, optional
    watcher : Watcher, optional
        Receives the audits and decides when the full model must answer.
    audit_rate : float
        Probability that a request is audited; needs a watcher.
    token : str, optional
        Bearer token that all requests must have, except those to /health and the page, which holds
        no data until it is given the token.

    Notes
    -----
    The batcher starts with the application and is `app.state.service.batcher` while it runs. At
    the end, all accepted requests are answered and the waiting audits are made.
    """
    service = _Service(engine, limits or Limits(), watcher, audit_rate, token)
    routes = [
        Route("/predict", service.predict, methods=["POST"]),
        Route("/health", service.health),
        Route("/policy", service.policy),
        Route("/metrics", service.metrics_text),
        Route("/status", service.status),
        Route("/events", service.events),
        Route("/", service.page),
    ]
    app = Starlette(routes=routes, lifespan=service.lifespan)
    app.state.service = service
    return app


class _Service:
    batcher: Batcher
    metrics: Metrics

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        watcher: Watcher | None,
        audit_rate: float,
        token: str | None,
    ) -> None:
        if audit_rate and watcher is None:
            raise ValueError("`audit_rate` needs a watcher.")
        self.engine, self.limits, self.watcher = engine, limits, watcher
        self.audit_rate, self.token = audit_rate, token
        self.live = LiveStatus(engine, watcher)

    @asynccontextmanager
    async def lifespan(self, _app: Any) -> AsyncIterator[None]:
        watcher, limits = self.watcher, self.limits
        self.batcher = Batcher(
            self.engine,
            max_batch=limits.max_batch,
            max_wait_ms=limits.max_wait_ms,
            max_queue=limits.max_queue,
            audit_rate=self.audit_rate,
            max_audits=limits.max_audits,
            on_audit=None if watcher is None else watcher.audit,
            on_idle=self._follow_watcher,
            full=watcher is not None and watcher.fallback is not None,
        )
        self.live.batcher = self.batcher
        self.metrics = Metrics(self.batcher, watcher, self.live.costs)
        try:
            yield
        finally:
            await run_in_threadpool(self.batcher.close)
            if watcher is not None:
                await run_in_threadpool(watcher.close)

    def _follow_watcher(self, batcher: Batcher) -> None:
        if self.watcher is not None:
            self.watcher.tick()
            batcher.full = self.watcher.fallback is not None
        self.live.tick()

    async def predict(self, request: Request) -> Response:
        """Answer one sample, sent as JSON or as .npy."""
        began, own = time.perf_counter(), {}
        try:
            self._authorise(request)
            inputs, name = await self._inputs(request)
            own = {"id": name}
            sample = self.engine.sample(inputs)
            answer = await asyncio.wait_for(
                asyncio.wrap_future(self.batcher.submit(name, sample)), self.limits.timeout
            )
            status = 200
            content = {**own, **answer.content, "exit": answer.exit}
            content["confidence"] = answer.confidence
            content["full_model"] = answer.full
            self.live.answered(answer.exit, full=answer.full)
            self.metrics.answered(
                answer.exit, full=answer.full, seconds=time.perf_counter() - began
            )
        except _RefusedError as error:
            status, content = error.status, {**own, "error": str(error)}
        except InvalidRequestError as error:
            status, content = 422, {**own, "error": str(error)}
        except BusyError as error:
            status, content = 429, {**own, "error": f"The server is busy: {error}."}
        except TimeoutError:
            text = f"There was no answer within {self.limits.timeout:g} s."
            status, content = 504, {**own, "error": text}
        except ClientDisconnect:
            status, content = 400, {"error": "The body was cut short."}
        except Exception:
            log.exception("a request failed")
            status, content = 500, {**own, "error": "The server failed on this request."}
        self.metrics.requests.labels(status).inc()
        headers = {"Retry-After": "1"} if status == 429 else None
        return JSONResponse(content, status, headers)

    async def _inputs(self, request: Request) -> tuple[Any, str]:
        """Return the inputs in a request's body, and its id."""
        kind = request.headers.get("content-type", "application/json").split(";")[0].strip()
        if kind != "application/json" and kind not in NPY:
            raise _RefusedError(415, f"The body must be application/json or {NPY[0]}.")
        try:
            body = await asyncio.wait_for(self._body(request), self.limits.timeout)
        except TimeoutError:
            text = f"The body did not arrive within {self.limits.timeout:g} s."
            raise _RefusedError(408, text) from None
        name: object = request.headers.get("x-request-id")
        if kind in NPY:
            inputs: Any = npy_body(body)
        else:
            content = json_body(body)
            inputs, name = content["inputs"], content.get("id", name)
        if name is None:
            return inputs, request_ids(1)[0]
        try:
            return inputs, check_request_id("id", name)
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(str(error)) from None

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.limits.max_body:
                text = f"The body must have at most {self.limits.max_body:,} bytes."
                raise _RefusedError(413, text)
            parts.append(part)
        return b"".join(parts)

    def _authorise(self, request: Request) -> None:
        if self.token is None:
            return
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise _RefusedError(401, "The header `Authorization: Bearer TOKEN` must be given.")

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
        return self._protected(request, lambda: JSONResponse(self.live.status()))

    async def events(self, request: Request) -> Response:
        """Return what the page shows, again and again."""
        stopping = getattr(request.app.state, "stopping", lambda: False)
        return self._protected(
            request,
            lambda: StreamingResponse(
                self.live.events(stopping),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
            ),
        )

    async def policy(self, request: Request) -> Response:
        """Return the policy with its certificate, and what it promises in words."""
        policy = self.engine.policy
        content = policy.model_dump(mode="json")
        found = {"version": policy_version(policy), "sentence": str(policy), "policy": content}
        return self._protected(request, lambda: JSONResponse(found))

    async def metrics_text(self, request: Request) -> Response:
        """Return the metrics in Prometheus' format."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return self._protected(request, lambda: Response(self.metrics.text(), media_type=kind))

    def _protected(self, request: Request, respond: Any) -> Response:
        try:
            self._authorise(request)
        except _RefusedError as error:
            return JSONResponse({"error": str(error)}, error.status)
        response: Response = respond()
        return response
