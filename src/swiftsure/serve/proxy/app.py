"""The web application of the proxy: /v1/chat/completions, /v1/completions, /v1/models."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from swiftsure.cascade import UpstreamError, usage_cost
from swiftsure.cascade.request_kinds import calibrated_features
from swiftsure.cascade.request_parameters import in_common
from swiftsure.certify.policy import Policy
from swiftsure.certify.slices import SlicedPolicy
from swiftsure.monitor import audit_rate, request_ids
from swiftsure.serve.alarms import alarm_hook
from swiftsure.serve.audit_log import AuditLog, audit_monitor, policy_version
from swiftsure.serve.audits import AuditQueue
from swiftsure.serve.disconnect import GoneError, while_connected
from swiftsure.serve.engine import AnyPolicy
from swiftsure.serve.http import RefusedError, check_json, off_loop, read_body
from swiftsure.serve.live import LiveStatus
from swiftsure.serve.metrics import Metrics
from swiftsure.serve.openai import (
    DONE,
    ApiError,
    ApiRequest,
    Kind,
    as_stream,
    encoded,
    event,
    parse_request,
    refusal,
    slice_of,
)
from swiftsure.serve.openapi import openapi
from swiftsure.serve.policy_manager import PolicyManager, PolicyStore
from swiftsure.serve.proxy.audits import Audits
from swiftsure.serve.proxy.config import ProxyConfig
from swiftsure.serve.proxy.health import UpstreamMetrics
from swiftsure.serve.proxy.passing import PASSED, Passed, asked_model, passed_on
from swiftsure.serve.proxy.requests import not_covered_reason
from swiftsure.serve.proxy.streams import PassedOn, as_json, without_logprobs
from swiftsure.serve.proxy.thinking import ThinkingUpstreams
from swiftsure.serve.proxy.upstreams import Found, Upstreams, added, client_error
from swiftsure.serve.service import Answering, Service

__all__ = ["create_proxy"]

log = logging.getLogger("swiftsure.serve")

CLIENT_GONE = 499
"""The status under which requests are counted whose client went away."""
MOST_REASONS = 100
"""How many reasons are counted apart; clients could otherwise make up any number."""


def create_proxy(config: ProxyConfig, *others: ProxyConfig, token: str | None = None) -> Starlette:
    """Return an ASGI application that answers as OpenAI's API does, from certified cascades.

    Parameters
    ----------
    config, *others : ProxyConfig
        One for each cascade, which clients ask for by its name. Limits are those of the first. Each
        has its own policy, audits and page; those of the others are under /cascades/NAME.
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
    rest = [ProxyService(each, token) for each in others]
    service = ProxyService(config, token, rest)
    return service.application(**HANDLERS)


class ProxyService(Service):
    """Answers from the models of a cascade, behind OpenAI-compatible APIs.

    Attributes
    ----------
    under_way : int
        Requests that have a place now.
    """

    alive = True

    def __init__(
        self, config: ProxyConfig, token: str | None, others: "Sequence[ProxyService]" = ()
    ) -> None:
        policy, audit = config.load_policy(), config.audit
        self.config = config
        self.upstreams = _upstreams(config, policy)
        self.upstreams.keeps_answers = audit.labels
        for model in self.upstreams.endpoints:
            model.headers()  # a key that is missing must not wait for the first request
        if policy is None and (audit.rate or audit.detect is not None):
            raise ValueError("`audit` needs a policy to watch.")
        self.rate = audit.rate if audit.detect is None else self._chosen_rate(policy)
        manager = PolicyManager(
            policy,
            watch=self._watch,
            fallback=config.load_fallback(),
            store=PolicyStore(audit.state) if policy is not None and token is not None else None,
            on_alarm=alarm_hook(config.on_alarm),
        )
        checks: Any = self.upstreams  # which has all that checking policies needs
        manager.check_with(checks)
        live = LiveStatus(self.upstreams.n_exits, manager, lambda: self.upstreams.trouble)
        limits = config.limits
        super().__init__(manager, live, token, max_body=limits.max_body, timeout=limits.timeout)
        self.queue = AuditQueue(self.rate, audit.most)
        manager.pending = self.queue.pending
        self.bill = live.bill
        self.names = self.upstreams.names
        self.parameters = in_common([each.parameters for each in self.upstreams.endpoints])
        known = None if manager.policy is None else _calibrated_features(manager.policy)
        self._features: tuple[AnyPolicy | None, frozenset[str] | None] = (manager.policy, known)
        self.under_way = 0
        self.created = int(time.time())
        self.others = others
        # The cascade that a request asks for, by each name that clients may use.
        self.by_name = {each.config.name: each for each in others}
        for each in (self, *others):
            for asked_name in (each.names[-1], each.upstreams.large.model):
                self.by_name.setdefault(asked_name, each)

    def _watch(self, policy: Policy, share: float) -> AuditLog | None:
        audit = self.config.audit
        before = (audit.state / policy_version(policy) / "monitor.json").exists()
        if not self.rate and not before:  # an alarm of before holds even if nothing is audited
            return None
        monitor = audit_monitor(policy, audit.alpha * share, audit.epsilon, labels=audit.labels)
        return AuditLog(policy, monitor, audit.state)

    def _chosen_rate(self, policy: AnyPolicy | None) -> float:
        """Return the rate at which audits find a risk in time: the highest of all slices."""
        audit = self.config.audit
        parts = policy.policies.values() if isinstance(policy, SlicedPolicy) else [policy]
        rates = []
        for part in parts:
            alpha, labels = audit.alpha / len(parts), audit.labels
            monitor = audit_monitor(part, alpha, audit.epsilon, labels=labels)  # type: ignore[arg-type]
            rates.append(
                audit_rate(
                    monitor.epsilon,
                    detect=audit.detect,  # type: ignore[arg-type]
                    within=audit.within,  # type: ignore[arg-type]
                    alpha=monitor.alpha,
                    loss_range=monitor.loss_range,
                )
            )
        log.info("audits take %.1f %% of requests", 100 * max(rates))
        return max(rates)

    @property
    def depth(self) -> int:
        """How many requests are under way."""
        return self.under_way

    @property
    def dropped(self) -> int:
        """How many audits were dropped."""
        return self.queue.dropped

    def answering(self) -> Mapping[str, Answering]:
        """Answer chats and completions, and pass other requests on."""
        return {
            "/v1/chat/completions": Answering(partial(self.answer, kind="chat")),
            "/v1/completions": Answering(partial(self.answer, kind="completions")),
            **{f"/v1/{path}": Answering(partial(self.answer, kind=path)) for path in PASSED},
        }

    def more_routes(self) -> list[Route]:
        """Return the routes of the names that clients may ask for."""
        mounted = [
            Mount(f"/cascades/{quote(each.config.name, safe='')}", each.application(**HANDLERS))
            for each in self.others
        ]
        return [
            Route("/v1/models", self.protected({"GET": self._list_models})),
            Route("/v1/models/{name:path}", self.protected({"GET": self._model})),
            *mounted,  # type: ignore[list-item]
        ]

    def describe(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        return openapi(self.config.name, completions=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer requests and follow the monitor while the block runs."""
        self.live.load = self
        self.metrics = Metrics(self, self.manager, self.live)
        self.metrics.registry.register(UpstreamMetrics(self.upstreams.health))
        self.audits = Audits(self.upstreams, self.manager, self.queue, self.bill)
        following = asyncio.get_running_loop().create_task(self._follow())
        try:
            async with AsyncExitStack() as stack:
                for each in self.others:
                    await stack.enter_async_context(each.manager.logging_stalls())
                    await stack.enter_async_context(each.running())
                yield
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            await self.audits.close()
            await self.upstreams.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            try:
                await self.audits.look()
                self.live.tick()
            except Exception:
                log.exception("the monitor failed")

    async def answer(
        self, scope: Scope, receive: Receive, send: Send, *, kind: Kind | Passed
    ) -> None:
        """Answer a request, from the models or with an error.

        A request holds its place until its answer is sent, streams included. If the client goes
        away, the models' work on it is given up.
        """
        (name,) = request_ids(1)
        limits = self.config.limits

        response: Response | None = None
        try:
            try:
                self.access.check(dict(scope["headers"]))
                if self.under_way >= limits.max_requests:
                    text = "The proxy is busy. Try again later."
                    raise ApiError(429, text, "rate_limit_error", code="busy", retry_after=1.0)
            except (ApiError, RefusedError) as error:
                await self._counted(self._failure(error, name))(scope, receive, send)
                return
            self.under_way += 1
            try:
                async with self._connected_answer(name, scope, receive, kind) as response:
                    await self._counted(response)(scope, receive, send)
            finally:
                self.under_way -= 1
        except GoneError:
            if response is None:
                self.metrics.count(CLIENT_GONE)

    @asynccontextmanager
    async def _connected_answer(
        self, name: str, scope: Scope, receive: Receive, kind: Kind | Passed
    ) -> AsyncIterator[Response]:
        """Yield the response to a request; raise GoneError as soon as the client goes away."""
        until = asyncio.get_running_loop().time() + self.config.limits.timeout
        headers, limits = dict(scope["headers"]), self.config.limits
        try:
            check_json(headers)
            body = await read_body(headers, receive, limits.max_body, limits.timeout)
        except RefusedError as error:
            yield self._failure(error, name)
            return
        async with while_connected(receive):
            yield await self._response(name, body, kind, until, headers)

    async def _response(
        self,
        name: str,
        body: bytes,
        kind: Kind | Passed,
        until: float,
        headers: Mapping[bytes, bytes],
    ) -> Response:
        try:
            async with asyncio.timeout_at(until):
                if kind == "responses" or kind == "embeddings":
                    return await self._passed(name, body, kind)
                asked = await off_loop(body, lambda: parse_request(body, kind))
                owner = self._owner(asked.model)
                response, exit_, full = await owner._answer(
                    name, asked, owner._slice(asked, headers)
                )
        except Exception as error:
            return self._failure(error, name)
        left = until - asyncio.get_running_loop().time()
        owner.metrics.answered(exit_, full=full, seconds=self.config.limits.timeout - left)
        owner.live.exits[exit_] += 1
        return response

    def _slice(self, asked: ApiRequest, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the slice that a request is of."""
        by = self.config.slices
        return slice_of(asked, headers) if by is None else by.of(asked.fields, headers)

    async def _passed(self, name: str, body: bytes, path: Passed) -> Response:
        """Pass a request on that no policy speaks of."""
        content, model = asked_model(body)
        owner, upstream = self._owner(model), model
        if path == "responses" and (model == owner.config.name or model in owner.by_name):
            upstream = owner.upstreams.large.model
        elif model not in self.config.pass_through:
            raise _no_such_model(model, *self.config.pass_through, *self._models())
        headers = {
            "x-request-id": name,
            "x-swiftsure-model": _ascii(upstream),
            "x-swiftsure-reason": "passed on",
        }
        sent = {**content, "model": upstream}
        large = owner.upstreams.large
        return await passed_on(large, sent, path, headers, self.config.limits.timeout)

    def _owner(self, model: str) -> "ProxyService":
        """Return the service of the cascade that a request asks for."""
        return self if model == self.config.name else self.by_name.get(model, self)

    def _failure(self, error: Exception, name: str) -> Response:
        """Return what the client is told of an error."""
        if isinstance(error, TimeoutError):
            text = f"There was no answer within {self.config.limits.timeout:g} s."
            error = ApiError(504, text, "api_error", code="timeout")
        if isinstance(error, RefusedError):
            return self.refusal(error, name)
        if not isinstance(error, ApiError):
            # The type alone: a message may hold a part of the prompt.
            log.error("request %s failed: %s", name, type(error).__name__)
            error = ApiError(500, "The proxy failed on this request.", "api_error")
        return refusal(error, name)

    def _counted(self, response: Response) -> Response:
        self.metrics.count(response.status_code)
        return response

    def refusal(self, error: RefusedError, name: str | None = None) -> Response:
        """Return what a client is told whose request is refused, in OpenAI's form."""
        code = {401: "invalid_api_key", 403: "foreign_origin"}.get(error.status)
        return refusal(ApiError(error.status, str(error), code=code), name)

    async def _answer(
        self, name: str, asked: ApiRequest, slice_name: str | None
    ) -> tuple[Response, int, bool]:
        """Return the response, the number of the model that answered, and whether it had to."""
        if self.manager.mode.policy is not self.upstreams.policy:
            self.upstreams.install(self.manager.mode.policy)
        found = self._forced(asked, slice_name)
        covered = found is None
        ticket = self.queue.choose() if covered else None
        try:
            if found is None:
                found = await self.upstreams.ask_small(
                    asked, self.config.limits.timeout, slice_name
                )
            delivered = self._shadowed(found)
            self._note(delivered.reason)
            response = await self._delivered(name, asked, delivered)
        except BaseException:
            if ticket is not None:
                self.audits.begin(ticket, name, asked, None, slice_name)
            raise
        if ticket is not None:
            self.audits.begin(ticket, name, asked, found, slice_name)
        return response, delivered.exit, not covered

    def _shadowed(self, found: Found) -> Found:
        """Return the last model's turn where a small model's answer is only to be audited."""
        changed = self.upstreams.versions.changed
        if found.response is None or not changed or self.config.on_change != "shadow":
            return found
        reason = f"the provider changed {next(iter(changed))}"
        return replace(found, exit=self.upstreams.last, reason=reason, response=None)

    def _note(self, reason: str) -> None:
        """Count why a model answers."""
        reason, reasons = _ascii(reason), self.live.reasons
        known = reason in reasons or len(reasons) < MOST_REASONS
        reasons[reason if known else "another reason"] += 1

    def _forced(self, asked: ApiRequest, slice_name: str | None) -> Found | None:
        """Return the forced route, if any; None if the policy covers the request."""
        last, policy = self.upstreams.last, self.manager.mode.policy
        if asked.model != self.config.name:
            if asked.model not in (self.names[last], self.upstreams.large.model):
                raise _no_such_model(asked.model, *self._cascades())
            return Found(last, "asked for by name")
        if policy is None:
            return Found(last, "there is no policy")
        if self.manager.mode.full:
            return Found(last, "there was an alarm")
        changed = self.upstreams.versions.changed
        if changed and self.config.on_change == "fall back":
            return Found(last, f"the provider changed {next(iter(changed))}")
        if isinstance(policy, SlicedPolicy) and slice_name not in policy.policies:
            return Found(last, "the policy has no such slice")
        kinds = {each.kind for each in self.upstreams.endpoints}
        if self._features[0] is not policy:
            self._features = policy, _calibrated_features(policy)
        why = not_covered_reason(asked, kinds, self.parameters, self._features[1])
        return None if why is None else Found(last, why)

    async def _delivered(self, name: str, asked: ApiRequest, found: Found) -> Response:
        """Return the response of a small model, or ask the last one."""
        if found.response is not None:
            usage = found.response.get("usage")
            large = self.upstreams.large
            alone = found.alone
            if alone is None:
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
            raise ApiError(429, text, "rate_limit_error", code=code, retry_after=wait)
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

    async def _passed_on(self, name: str, asked: ApiRequest, found: Found) -> Response:
        """Return the last model's stream; an error before its first event is raised."""
        large = self.upstreams.large_for(asked)
        events = large.events(self.upstreams.stream_body(asked))
        health = self.upstreams.health[self.upstreams.last]
        try:
            first = await anext(events, None)
            if first is None:
                raise UpstreamError(f"{large.name} sent an empty stream.")
        except Exception as error:
            health.failed(error)
            raise
        health.answered()

        own: dict[str, float] = {}

        async def relayed() -> AsyncIterator[bytes]:
            nonlocal own
            try:
                each: Any = first
                while True:
                    own = self._price(each) or own
                    self.upstreams.versions.saw(large.name, each)
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
            with suppress(Exception):
                await events.aclose()  # type: ignore[attr-defined]

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

    async def _list_models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(self._models().values())})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = self._models().get(name)
        if found is None:
            return refusal(_no_such_model(name, *self._cascades()))
        return JSONResponse(found)

    def _cascades(self) -> list[str]:
        return [each.config.name for each in (self, *self.others)]

    def _models(self) -> dict[str, Any]:
        """Return the names that clients may ask for."""
        more = {"object": "model", "created": self.created, "owned_by": "swiftsure"}
        names = dict.fromkeys(
            name for each in (self, *self.others) for name in (each.config.name, each.names[-1])
        )
        return {each: {"id": each, **more} for each in names}


def _upstreams(config: ProxyConfig, policy: AnyPolicy | None) -> Upstreams:
    """Return the models of a cascade, or the one that thinks."""
    if config.thinking is None:
        return Upstreams(config.cascade(), policy, config.timeouts(policy))
    return ThinkingUpstreams(config.reasoner(), policy)


def _calibrated_features(policy: AnyPolicy) -> frozenset[str] | None:
    """Return what the messages of the calibration were like; None if the policy does not say."""
    found = calibrated_features(policy)
    if found is None:
        log.warning(
            "The policy does not say what its calibration's messages were like, so requests with"
            " other roles, images or system prompts cannot be told apart. Collect and calibrate"
            " again."
        )
    return found


async def _not_here(request: Request, error: Exception) -> Response:
    """Say in OpenAI's form that there is no such path, or not for this method."""
    status = getattr(error, "status_code", 404)
    path = request.url.path[:200]
    if status == 405:
        text = f"{path} does not answer {request.method}."
        return refusal(ApiError(405, text, code="method_not_allowed"))
    text = (
        f"The proxy has no {path}; it answers /v1/chat/completions, /v1/completions, /v1/responses,"
        " /v1/embeddings and /v1/models."
    )
    return refusal(ApiError(status, text, code="unknown_url"))


HANDLERS: dict[str, Any] = {"exception_handlers": {HTTPException: _not_here}}
"""Errors of the web framework, in OpenAI's form."""


def _no_such_model(name: str, *known: str) -> ApiError:
    text = f"There is no model {name[:100]!r}; ask for {' or '.join(map(repr, known))}."
    return ApiError(404, text, code="model_not_found", param="model")


def _relayed(each: dict[str, Any], asked: ApiRequest) -> bytes | None:
    """Return an event as the client asked for it: the usage was asked for to know the price."""
    if not asked.usage:
        if each.get("usage") is not None and not each.get("choices"):
            return None
        each = {key: value for key, value in each.items() if key != "usage"}
    return event(each)


def _ascii(text: str) -> str:
    return json.dumps(text)[1:-1]
