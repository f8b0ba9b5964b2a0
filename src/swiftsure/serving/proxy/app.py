"""The web application of the proxy: /v1/chat/completions, /v1/completions, /v1/models."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from swiftsure.cascade import UpstreamError, usage_cost
from swiftsure.losses import LOSSES
from swiftsure.monitor import request_ids
from swiftsure.policy import Policy
from swiftsure.serving.batching import Mode
from swiftsure.serving.guarding import Guard
from swiftsure.serving.http import Access, RefusedError, check_json, off_loop, read_body
from swiftsure.serving.live import LiveStatus
from swiftsure.serving.metrics import Metrics
from swiftsure.serving.proxy.asking import Found, Upstreams, added, client_error
from swiftsure.serving.proxy.audits import Audits, CascadeEngine
from swiftsure.serving.proxy.config import ProxyConfig, parameters_in_common
from swiftsure.serving.proxy.requests import Asked, Kind, ProxyError, asked_of, uncovered
from swiftsure.serving.proxy.streams import (
    DONE,
    as_json,
    as_stream,
    encoded,
    event,
    events_of,
    without_logprobs,
)
from swiftsure.serving.watching import Watcher, policy_version, watched_monitor

__all__ = ["create_proxy"]

log = logging.getLogger("swiftsure.serving")


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
        Route("/health", proxy.health),
        Route("/policy", proxy.policy),
        Route("/metrics", proxy.metrics_text),
        Route("/status", proxy.status),
        Route("/events", proxy.events),
        Route("/", proxy.page),
    ]
    app = _App(routes=routes, lifespan=proxy.lifespan)
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
        response = await self._proxy.answered(scope, receive, self._kind)
        await response(scope, receive, send)


class _Bill:
    """Costs of all answers, and an estimate of what the last model alone would have cost."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.saved: dict[str, float] = {}

    def add(self, spent: Mapping[str, float], alone: Mapping[str, float]) -> None:
        for unit in spent.keys() | alone.keys():
            cost = spent.get(unit, 0.0)
            self.spent[unit] = self.spent.get(unit, 0.0) + cost
            self.saved[unit] = self.saved.get(unit, 0.0) + alone.get(unit, 0.0) - cost

    @property
    def shares(self) -> dict[str, float]:
        total = {unit: self.spent[unit] + saved for unit, saved in self.saved.items()}
        return {unit: self.saved[unit] / each for unit, each in total.items() if each > 0}


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
        self.upstreams = Upstreams(cascade.run(policy))
        for model in self.upstreams.models:
            model.headers()  # a key that is missing must not wait for the first request
        self.names = cascade.names
        self.parameters = parameters_in_common(self.upstreams.models)
        self.certified = policy
        if policy is None and config.audit.rate:
            raise ValueError("`audit.rate` needs a policy to watch.")
        self.guard = None if policy is None else Guard(policy, watch=self._watcher)
        self.under_way = 0
        self.created = int(time.time())

    def _watcher(self, policy: Policy) -> Watcher | None:
        audit = self.config.audit
        before = (audit.state / policy_version(policy) / "monitor.json").exists()
        if not audit.rate and not before:  # an alarm of before holds even if nothing is audited
            return None
        monitor = watched_monitor(policy, audit.alpha, audit.epsilon)
        # Each audit with a loss that is not known here would fail, and count as no loss.
        LOSSES.choose(str(monitor.loss))
        return Watcher(policy, monitor, audit.state)

    @property
    def full(self) -> bool:
        """Whether the last model answers all."""
        return self.guard is None or self.guard.mode.full

    @asynccontextmanager
    async def lifespan(self, _app: Any) -> AsyncIterator[None]:
        self.bill = _Bill()
        if self.guard is not None:
            engine: Any = CascadeEngine(len(self.names))
            load: Any = _Load(self, self.guard)
            self.live = LiveStatus(engine, self.guard)
            self.live.costs = self.bill  # type: ignore[assignment]
            self.live.batcher = load
            self.metrics = Metrics(load, self.guard, self.bill)  # type: ignore[arg-type]
            audit = self.config.audit
            self.audits = Audits(self.upstreams, self.guard, engine, audit.rate, audit.most)
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

    async def answered(self, scope: Scope, receive: Receive, kind: Kind) -> Response:
        """Return the response to a request, of the models or an error."""
        began = time.perf_counter()
        (name,) = request_ids(1)
        try:
            self._check(scope)
            if self.under_way >= self.config.limits.max_requests:
                text = "The proxy is busy. Try again later."
                raise ProxyError(429, text, "rate_limit_error", code="busy", retry_after=1.0)
            self.under_way += 1
            try:
                async with asyncio.timeout(self.config.limits.timeout):
                    body = await self._body(scope, receive)
                    asked = await off_loop(body, lambda: asked_of(body, kind))
                    response, exit_, full = await self._answer(name, asked)
            finally:
                self.under_way -= 1
            if self.metrics is not None and self.live is not None:
                seconds = time.perf_counter() - began
                self.metrics.answered(exit_, full=full, seconds=seconds)
                self.live.exits[exit_] += 1
        except ProxyError as error:
            response = _refusal(error, name)
        except TimeoutError:
            text = f"There was no answer within {self.config.limits.timeout:g} s."
            response = _refusal(ProxyError(504, text, "api_error", code="timeout"), name)
        except Exception as error:
            # The type alone: a message may hold a part of the prompt.
            log.error("request %s failed: %s", name, type(error).__name__)
            text = "The proxy failed on this request."
            response = _refusal(ProxyError(500, text, "api_error"), name)
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
            response = await self._delivered(name, asked, found)
        except BaseException:
            if turn is not None and self.audits is not None:
                self.audits.begin(turn, name, asked, None)
            raise
        if turn is not None and self.audits is not None:
            self.audits.begin(turn, name, asked, found)
        return response, found.exit, not covered

    async def _found(self, asked: Asked) -> tuple[Found | None, bool]:
        """Return who must answer if that is settled already, and whether the policy decides."""
        last = self.upstreams.last
        if asked.model != self.config.name:
            if asked.model not in (self.names[last], self.upstreams.large.model):
                text = f"There is no model {asked.model[:100]!r}; ask for {self.config.name!r}."
                raise ProxyError(404, text, code="model_not_found", param="model")
            return Found(last, "asked for by name"), False
        if self.certified is None:
            return Found(last, "there is no policy"), False
        if self.full:
            return Found(last, "there was an alarm"), False
        kinds = {each.kind for each in self.upstreams.models}
        why = uncovered(asked, kinds, self.parameters)
        return (None, True) if why is None else (Found(last, why), False)

    async def _delivered(self, name: str, asked: Asked, found: Found) -> Response:
        """Return the response of a small model, or ask the last one."""
        if found.response is not None:
            usage = found.response.get("usage")
            large = self.upstreams.large
            alone = usage_cost({"usage": usage}, large.per_million, large.unit) if usage else {}
            self.bill.add(found.cost, alone)
            shown = found.response if asked.logprobs else without_logprobs(found.response)
            headers = self._headers(name, found, found.cost)
            if asked.stream:
                parts = as_stream(shown, chat=asked.kind == "chat", usage=asked.usage)
                body = b"".join(parts)
                return Response(body, media_type="text/event-stream", headers=headers)
            return Response(encoded(shown), media_type="application/json", headers=headers)
        large = self.upstreams.large_for(asked)
        wait = self.upstreams.pause(self.upstreams.last)
        if wait > 0:
            text = f"{large.name} is at its rate limit."
            code = "rate_limit_exceeded"
            raise ProxyError(429, text, "rate_limit_error", code=code, retry_after=wait)
        try:
            if asked.stream:
                return await self._passed_on(name, asked, found)
            response, content = await self.upstreams.ask_large(asked, logprobs=False)
        except (UpstreamError, ValueError) as error:
            raise client_error(error, large) from None
        total = found.cost
        with suppress(UpstreamError):
            own = usage_cost(response, large.per_million, large.unit)
            total = added(found.cost, own)
            self.bill.add(total, own)
        headers = self._headers(name, found, total)
        body = as_json(content, response)
        return Response(body, media_type="application/json", headers=headers)

    async def _passed_on(self, name: str, asked: Asked, found: Found) -> Response:
        """Return the last model's stream; an error before its first event is raised."""
        large = self.upstreams.large_for(asked)
        opened = large.post(self.upstreams.stream_body(asked))
        try:
            answer = await opened.__aenter__()
        except Exception as error:
            self.upstreams.noted(error)
            raise
        events = events_of(answer.content)
        try:
            first = await anext(events)
        except (UpstreamError, StopAsyncIteration) as error:
            await opened.__aexit__(None, None, None)
            if isinstance(error, StopAsyncIteration):
                raise UpstreamError(f"{large.name} sent an empty stream.") from None
            raise
        except BaseException:
            await opened.__aexit__(None, None, None)
            raise

        async def relayed() -> AsyncIterator[bytes]:
            try:
                each: Any = first
                while True:
                    for part in self._relayed(each, asked, found):
                        yield part
                    try:
                        each = await anext(events)
                    except StopAsyncIteration:
                        break
                yield DONE
            except Exception as error:
                # The client has a part of the answer already: tell it that the rest is missing.
                yield event(client_error(error, large).content())
            finally:
                await events.aclose()  # type: ignore[attr-defined]
                with suppress(Exception):
                    await opened.__aexit__(None, None, None)

        headers = self._headers(name, found, found.cost)
        return StreamingResponse(relayed(), media_type="text/event-stream", headers=headers)

    def _relayed(self, each: dict[str, Any], asked: Asked, found: Found) -> list[bytes]:
        """Return an event as the client asked for it: the usage was asked for to know the price."""
        usage = each.get("usage")
        if usage is not None:
            large = self.upstreams.large
            with suppress(UpstreamError):
                own = usage_cost(each, large.per_million, large.unit)
                self.bill.add(added(found.cost, own), own)
            if not asked.usage and not each.get("choices"):
                return []
        if not asked.usage:
            each = {key: value for key, value in each.items() if key != "usage"}
        return [event(each)]

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
        names = dict.fromkeys([self.config.name, self.names[-1]])
        data = [
            {"id": each, "object": "model", "created": self.created, "owned_by": "swiftsure"}
            for each in names
        ]
        return self._protected(request, {"object": "list", "data": data})

    async def health(self, _request: Request) -> Response:
        """Say whether the proxy answers, and how."""
        return JSONResponse(self._health())

    def _health(self) -> dict[str, Any]:
        if self.live is None:
            return {"status": "full model", "policy": None, "alarm": None, "fault": None}
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


def _refusal(error: ProxyError, name: str) -> Response:
    headers = {"x-request-id": name}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    return JSONResponse(error.content(), error.status, headers)


def _ascii(text: str) -> str:
    return json.dumps(text)[1:-1]
