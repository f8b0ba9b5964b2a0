"""The web application of the proxy: /v1/chat/completions, /v1/completions, /v1/models."""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from swiftsure.cascade import UpstreamError, usage_cost
from swiftsure.cascade.request_kinds import REQUESTS
from swiftsure.certify.policy import Policy
from swiftsure.losses import LOSSES
from swiftsure.monitor import request_ids
from swiftsure.serve.batching import Mode
from swiftsure.serve.guarding import Guard
from swiftsure.serve.http import Access, RefusedError, check_json, off_loop, read_body
from swiftsure.serve.live import LiveStatus
from swiftsure.serve.metrics import Metrics
from swiftsure.serve.proxy.asking import Found, Upstreams, added, client_error
from swiftsure.serve.proxy.audits import Audits, CascadeEngine
from swiftsure.serve.proxy.bill import Bill
from swiftsure.serve.proxy.config import ProxyConfig, parameters_in_common
from swiftsure.serve.proxy.connections import GoneError, while_connected
from swiftsure.serve.proxy.requests import Asked, Kind, ProxyError, asked_of, uncovered
from swiftsure.serve.proxy.routing_metrics import RoutingMetrics
from swiftsure.serve.proxy.streams import (
    DONE,
    PassedOn,
    as_json,
    as_stream,
    encoded,
    event,
    events_of,
    without_logprobs,
)
from swiftsure.serve.watching import Watcher, policy_version, watched_monitor

__all__ = ["create_proxy"]

log = logging.getLogger("swiftsure.serve")

CLIENT_GONE = 499
"""The status under which requests are counted whose client went away."""
MOST_REASONS = 100
"""How many reasons are counted apart; clients could otherwise make up any number."""


def create_proxy(config: ProxyConfig, *, token: str | None = None) -> Starlette:
    """Return an ASGI application that answers as OpenAI's API does, from a certified cascade.

    Parameters
    ----------
    config : ProxyConfig
    token : str, optional
        What clients must send as their API key.

    Raises
    ------
    ValueError
        If the policy was made for other models.

    Examples
    --------
    >>> app = create_proxy(ProxyConfig.load("cascade.toml"))  # doctest: +SKIP
    """
    proxy = _Proxy(config, token)
    answers = {
        "/v1/chat/completions": _Answers(proxy, "chat"),
        "/v1/completions": _Answers(proxy, "completions"),
    }
    routes = [
        *(Route(path, each, methods=["POST"]) for path, each in answers.items()),
        Route("/v1/models", proxy.models),
        Route("/v1/models/{name:path}", proxy.model),
        Route("/health", proxy.health),
        Route("/policy", proxy.policy),
        Route("/metrics", proxy.metrics_text),
        Route("/status", proxy.status),
        Route("/events", proxy.events),
        Route("/", proxy.page),
    ]
    handlers: Any = {HTTPException: _not_here}
    app = _App(routes=routes, lifespan=proxy.lifespan, exception_handlers=handlers)
    app.state.proxy, app.state.answers = proxy, answers
    return app


class _App(Starlette):
    """Sends requests for answers straight to the proxy: routing would take as long as they do.

    Not with middleware, which may be what guards the proxy.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and not self.user_middleware:
            answers = self.state.answers.get(scope["path"])
            if answers is not None:
                await answers(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


class _Answers:
    """An ASGI application that answers the requests of one kind."""

    def __init__(self, proxy: "_Proxy", kind: Kind) -> None:
        self._proxy, self._kind = proxy, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._proxy.serve(scope, receive, send, self._kind)


class _Load:
    """What the live page and the metrics ask about the requests under way."""

    alive = True

    def __init__(self, proxy: "_Proxy", guard: Guard) -> None:
        self._proxy, self._guard = proxy, guard

    @property
    def depth(self) -> int:
        return self._proxy.under_way

    @property
    def mode(self) -> Mode:
        return self._guard.mode

    @property
    def dropped(self) -> int:
        return 0 if self._proxy.audits is None else self._proxy.audits.dropped


class _Proxy:
    live: LiveStatus | None = None
    metrics: Metrics | None = None
    audits: Audits | None = None

    def __init__(self, config: ProxyConfig, token: str | None) -> None:
        self.config, self.token = config, token
        self._access = Access(token)
        policy = config.load_policy()
        cascade = config.cascade()
        self.upstreams = Upstreams(cascade.run(policy), config.timeouts(policy))
        for model in self.upstreams.models:
            model.headers()  # a key that is missing must not wait for the first request
        self.names = cascade.names
        self.parameters = parameters_in_common(self.upstreams.models)
        self.certified = policy
        self.features = None if policy is None else _calibrated_features(policy)
        if policy is None and config.audit.rate:
            raise ValueError("`audit.rate` needs a policy to watch.")
        self.guard = None if policy is None else Guard(policy, watch=self._watcher)
        self.under_way = 0
        self.bill = Bill()
        self.reasons: Counter[str] = Counter()
        self.created = int(time.time())

    def _watcher(self, policy: Policy) -> Watcher | None:
        audit = self.config.audit
        before = (audit.state / policy_version(policy) / "monitor.json").exists()
        if not audit.rate and not before:  # an alarm of before holds even if nothing is audited
            return None
        monitor = watched_monitor(policy, audit.alpha, audit.epsilon)
        # Each audit with a loss that is not known here would fail.
        LOSSES.choose(str(monitor.loss))
        return Watcher(policy, monitor, audit.state)

    @property
    def full(self) -> bool:
        """Whether the last model answers all."""
        return self.guard is None or self.guard.mode.full

    @asynccontextmanager
    async def lifespan(self, _app: Any) -> AsyncIterator[None]:
        if self.guard is not None:
            engine: Any = CascadeEngine(len(self.names))
            load: Any = _Load(self, self.guard)
            self.live = LiveStatus(engine, self.guard)
            self.live.costs = self.bill
            self.live.reasons = self.reasons
            self.live.trouble = lambda: self.upstreams.trouble
            self.live.batcher = load
            self.metrics = Metrics(load, self.guard, self.bill)
            self.metrics.registry.register(RoutingMetrics(self.reasons, self.upstreams.health))
            audit = self.config.audit
            self.audits = Audits(
                self.upstreams, self.guard, engine, audit.rate, audit.most, self.bill
            )
            self.guard.pending = self.audits.pending
        following = asyncio.get_running_loop().create_task(self._follow())
        try:
            async with nullcontext() if self.guard is None else self.guard.logging_stalls():
                yield
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            if self.audits is not None:
                await self.audits.close()
            await self.upstreams.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            try:
                if self.audits is not None and self.live is not None:
                    await self.audits.look()
                    self.live.tick()
            except Exception:
                log.exception("the monitor failed")

    async def serve(self, scope: Scope, receive: Receive, send: Send, kind: Kind) -> None:
        """Answer a request, from the models or with an error.

        A request holds its place until its answer is sent, streams included. If the client goes
        away, the models' work on it is given up.
        """
        (name,) = request_ids(1)
        limits = self.config.limits

        response: Response | None = None
        try:
            try:
                self._check(scope)
                if self.under_way >= limits.max_requests:
                    text = "The proxy is busy. Try again later."
                    raise ProxyError(429, text, "rate_limit_error", code="busy", retry_after=1.0)
            except ProxyError as error:
                await self._counted(_refusal(error, name))(scope, receive, send)
                return
            self.under_way += 1
            try:
                async with self._connected_answer(name, scope, receive, kind) as response:
                    await self._counted(response)(scope, receive, send)
            finally:
                self.under_way -= 1
        except GoneError:
            if self.metrics is not None and response is None:
                self.metrics.count(CLIENT_GONE)

    @asynccontextmanager
    async def _connected_answer(
        self, name: str, scope: Scope, receive: Receive, kind: Kind
    ) -> AsyncIterator[Response]:
        """Yield the response to a request; raise GoneError as soon as the client goes away."""
        until = asyncio.get_running_loop().time() + self.config.limits.timeout
        try:
            body = await self._body(scope, receive)
        except ProxyError as error:
            yield self._failure(error, name)
            return
        async with while_connected(receive):
            yield await self._response(name, body, kind, until)

    async def _response(self, name: str, body: bytes, kind: Kind, until: float) -> Response:
        try:
            async with asyncio.timeout_at(until):
                asked = await off_loop(body, lambda: asked_of(body, kind))
                response, exit_, full = await self._answer(name, asked)
        except Exception as error:
            return self._failure(error, name)
        if self.metrics is not None and self.live is not None:
            left = until - asyncio.get_running_loop().time()
            self.metrics.answered(exit_, full=full, seconds=self.config.limits.timeout - left)
            self.live.exits[exit_] += 1
        return response

    def _failure(self, error: Exception, name: str) -> Response:
        """Return what the client is told of an error."""
        if isinstance(error, TimeoutError):
            text = f"There was no answer within {self.config.limits.timeout:g} s."
            error = ProxyError(504, text, "api_error", code="timeout")
        if not isinstance(error, ProxyError):
            # The type alone: a message may hold a part of the prompt.
            log.error("request %s failed: %s", name, type(error).__name__)
            error = ProxyError(500, "The proxy failed on this request.", "api_error")
        return _refusal(error, name)

    def _counted(self, response: Response) -> Response:
        if self.metrics is not None:
            self.metrics.count(response.status_code)
        return response

    async def _answer(self, name: str, asked: Asked) -> tuple[Response, int, bool]:
        """Return the response, the number of the model that answered, and whether it had to."""
        found, covered = await self._found(asked)
        turn = self.audits.choose() if covered and self.audits is not None else None
        try:
            if found is None:
                found = await self.upstreams.ask_small(asked, self.config.limits.timeout)
            self._note(found.reason)
            response = await self._delivered(name, asked, found)
        except BaseException:
            if turn is not None and self.audits is not None:
                self.audits.begin(turn, name, asked, None)
            raise
        if turn is not None and self.audits is not None:
            self.audits.begin(turn, name, asked, found)
        return response, found.exit, not covered

    def _note(self, reason: str) -> None:
        """Count why a model answers."""
        reason = _ascii(reason)
        known = reason in self.reasons or len(self.reasons) < MOST_REASONS
        self.reasons[reason if known else "another reason"] += 1

    async def _found(self, asked: Asked) -> tuple[Found | None, bool]:
        """Return who must answer if that is settled already, and whether the policy decides."""
        last = self.upstreams.last
        if asked.model != self.config.name:
            if asked.model not in (self.names[last], self.upstreams.large.model):
                raise _no_such_model(asked.model, self.config.name)
            return Found(last, "asked for by name"), False
        if self.certified is None:
            return Found(last, "there is no policy"), False
        if self.full:
            return Found(last, "there was an alarm"), False
        kinds = {each.kind for each in self.upstreams.models}
        why = uncovered(asked, kinds, self.parameters, self.features)
        return (None, True) if why is None else (Found(last, why), False)

    async def _delivered(self, name: str, asked: Asked, found: Found) -> Response:
        """Return the response of a small model, or ask the last one."""
        if found.response is not None:
            usage = found.response.get("usage")
            large = self.upstreams.large
            alone = usage_cost({"usage": usage}, large.per_million, large.unit) if usage else {}
            self.bill.answer(found.cost, alone)
            shown = found.response if asked.logprobs else without_logprobs(found.response)
            headers = self._headers(name, found, found.cost)
            if asked.stream:
                parts = as_stream(shown, chat=asked.kind == "chat", usage=asked.usage)
                body = b"".join(parts)
                return Response(body, media_type="text/event-stream", headers=headers)
            return Response(encoded(shown), media_type="application/json", headers=headers)
        large = self.upstreams.large_for(asked)
        wait = self.upstreams.health[self.upstreams.last].pause
        if wait > 0:
            self.bill.answer(found.cost, {})
            text = f"{large.name} is at its rate limit."
            code = "rate_limit_exceeded"
            raise ProxyError(429, text, "rate_limit_error", code=code, retry_after=wait)
        try:
            if asked.stream:
                return await self._passed_on(name, asked, found)
            response, content = await self.upstreams.ask_large(asked, logprobs=False)
        except BaseException as error:
            self.bill.answer(found.cost, {})  # of the models before, which answered
            if isinstance(error, UpstreamError | ValueError):
                raise client_error(error, large) from None
            raise
        own = self._price(response)
        total = added(found.cost, own)
        self.bill.answer(total, own)
        headers = self._headers(name, found, total)
        body = as_json(content, response)
        return Response(body, media_type="application/json", headers=headers)

    async def _passed_on(self, name: str, asked: Asked, found: Found) -> Response:
        """Return the last model's stream; an error before its first event is raised."""
        large = self.upstreams.large_for(asked)
        opened = large.post(self.upstreams.stream_body(asked))
        health = self.upstreams.health[self.upstreams.last]
        try:
            answer = await opened.__aenter__()
        except Exception as error:
            health.failed(error)
            raise
        events = events_of(answer.content, large.redacted)
        try:
            first = await anext(events)
        except (UpstreamError, StopAsyncIteration) as error:
            await opened.__aexit__(None, None, None)
            if isinstance(error, StopAsyncIteration):
                error = UpstreamError(f"{large.name} sent an empty stream.")
            health.failed(error)
            raise error from None
        except BaseException:
            await opened.__aexit__(None, None, None)
            raise
        health.answered()

        own: dict[str, float] = {}

        async def relayed() -> AsyncIterator[bytes]:
            nonlocal own
            try:
                each: Any = first
                while True:
                    own = self._price(each) or own
                    if (part := _relayed(each, asked)) is not None:
                        yield part
                    try:
                        each = await anext(events)
                    except StopAsyncIteration:
                        break
                yield DONE
            except Exception as error:
                # The client has a part of the answer already: tell it that the rest is missing.
                yield event(client_error(error, large).content())

        async def close() -> None:
            self.bill.answer(added(found.cost, own), own)
            await events.aclose()  # type: ignore[attr-defined]
            with suppress(Exception):
                await opened.__aexit__(None, None, None)

        headers = self._headers(name, found, found.cost)
        return PassedOn(relayed(), close, headers, self.config.limits.timeout)

    def _price(self, response: Mapping[str, Any]) -> dict[str, float]:
        """Return what a response of the last model cost; nothing if it does not say."""
        large = self.upstreams.large
        if response.get("usage") is None:
            return {}
        with suppress(UpstreamError):
            return usage_cost(response, large.per_million, large.unit)
        return {}

    def _headers(self, name: str, found: Found, cost: Mapping[str, float]) -> dict[str, str]:
        headers = {
            "x-request-id": name,
            "x-swiftsure-model": _ascii(self.names[found.exit]),
            "x-swiftsure-exit": str(found.exit),
            "x-swiftsure-reason": _ascii(found.reason),
        }
        if found.confidence is not None:
            headers["x-swiftsure-confidence"] = f"{found.confidence:.9g}"
        if cost:
            bill = (f"{_ascii(unit)}={value:.9g}" for unit, value in cost.items())
            headers["x-swiftsure-cost"] = ", ".join(bill)
        return headers

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        headers, limits = dict(scope["headers"]), self.config.limits
        try:
            check_json(headers)
            return await read_body(headers, receive, limits.max_body, limits.timeout)
        except RefusedError as error:
            raise ProxyError(error.status, str(error)) from None

    def _check(self, scope: Scope) -> None:
        try:
            self._access.check(dict(scope["headers"]), changes=scope["method"] == "POST")
        except RefusedError as error:
            code = "invalid_api_key" if error.status == 401 else "foreign_origin"
            raise ProxyError(error.status, str(error), code=code) from None

    async def models(self, request: Request) -> Response:
        """Return the names that clients may ask for."""
        data = list(self._models().values())
        return self._protected(request, {"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Return one model."""
        name = request.path_params["name"]
        found = self._models().get(name)
        if found is None:
            return self._refused(request) or _refusal(_no_such_model(name, self.config.name))
        return self._protected(request, found)

    def _models(self) -> dict[str, Any]:
        more = {"object": "model", "created": self.created, "owned_by": "swiftsure"}
        return {each: {"id": each, **more} for each in (self.config.name, self.names[-1])}

    async def health(self, _request: Request) -> Response:
        """Say whether the proxy answers, and how."""
        return JSONResponse(self._health())

    def _health(self) -> dict[str, Any]:
        if self.live is None:
            fault = self.upstreams.trouble
            return {"status": "full model", "policy": None, "alarm": None, "fault": fault}
        return self.live.health()

    async def policy(self, request: Request) -> Response:
        """Return the policy with its certificate, and what it promises in words."""
        policy = self.certified
        if policy is None:
            return self._protected(request, {"version": None, "sentence": None, "policy": None})
        content = policy.model_dump(mode="json")
        found = {"version": policy_version(policy), "sentence": str(policy), "policy": content}
        return self._protected(request, found)

    async def metrics_text(self, request: Request) -> Response:
        """Return the metrics in Prometheus' format."""
        if (refused := self._refused(request)) is not None:
            return refused
        text = b"" if self.metrics is None else self.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, request: Request) -> Response:
        """Return what the live page shows."""
        found = self._health() if self.live is None else self.live.status()
        return self._protected(request, found)

    async def events(self, request: Request) -> Response:
        """Return what the live page shows, again and again."""
        if (refused := self._refused(request)) is not None:
            return refused
        if self.live is None:
            return Response(status_code=204)
        stopping = getattr(request.app.state, "stopping", lambda: False)
        headers = {"Cache-Control": "no-store"}
        return StreamingResponse(
            self.live.events(stopping), media_type="text/event-stream", headers=headers
        )

    async def page(self, _request: Request) -> Response:
        """Return the live page."""
        if self.live is None:
            return HTMLResponse("<!doctype html><title>Swiftsure</title><p>There is no policy.")
        security = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
        headers = {"Content-Security-Policy": f"{security} connect-src 'self'"}
        return HTMLResponse(self.live.page(empty=self.token is not None), headers=headers)

    def _refused(self, request: Request) -> Response | None:
        try:
            self._check(request.scope)
        except ProxyError as error:
            return JSONResponse(error.content(), error.status)
        return None

    def _protected(self, request: Request, content: Any) -> Response:
        refused = self._refused(request)
        return JSONResponse(content) if refused is None else refused


def _calibrated_features(policy: Policy) -> frozenset[str] | None:
    """Return what the messages of the calibration were like; None if the policy does not say."""
    found = policy.settings.get(REQUESTS)
    if isinstance(found, list | tuple) and all(isinstance(each, str) for each in found):
        return frozenset(found)
    log.warning(
        "The policy does not say what its calibration's messages were like, so requests with other"
        " roles, images or system prompts cannot be told apart. Collect and calibrate again."
    )
    return None


async def _not_here(request: Request, error: Exception) -> Response:
    """Say in OpenAI's form that there is no such path, or not for this method."""
    status = getattr(error, "status_code", 404)
    path = request.url.path[:200]
    if status == 405:
        text = f"{path} does not answer {request.method}."
        return _refusal(ProxyError(405, text, code="method_not_allowed"))
    text = f"The proxy has no {path}; it answers /v1/chat/completions and /v1/completions."
    return _refusal(ProxyError(status, text, code="unknown_url"))


def _no_such_model(name: str, known: str) -> ProxyError:
    text = f"There is no model {name[:100]!r}; ask for {known!r}."
    return ProxyError(404, text, code="model_not_found", param="model")


def _relayed(each: dict[str, Any], asked: Asked) -> bytes | None:
    """Return an event as the client asked for it: the usage was asked for to know the price."""
    if not asked.usage:
        if each.get("usage") is not None and not each.get("choices"):
            return None
        each = {key: value for key, value in each.items() if key != "usage"}
    return event(each)


def _refusal(error: ProxyError, name: str | None = None) -> Response:
    headers = {} if name is None else {"x-request-id": name}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    return JSONResponse(error.content(), error.status, headers)


def _ascii(text: str) -> str:
    return json.dumps(text)[1:-1]
