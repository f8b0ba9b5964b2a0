"""Asks the models of a cascade in turn, and remembers how each of them is doing."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from swiftsure.cascade import Answer, Cascade, CascadeRunner, Endpoint, UpstreamError
from swiftsure.cascade.answer_losses import answer_tables
from swiftsure.cascade.models import Model
from swiftsure.cascade.providers import ProviderEndpoint
from swiftsure.cascade.request_parameters import own_spelling
from swiftsure.cascade.retrying import described
from swiftsure.cascade.wrapping import Wrapper, innermost
from swiftsure.losses import LOSSES
from swiftsure.serve.engine import Answer as ServedAnswer
from swiftsure.serve.engine import AnyPolicy, Comparison
from swiftsure.serve.openai import ApiError, ApiRequest
from swiftsure.serve.proxy.health import ModelHealth
from swiftsure.serve.proxy.versions import Versions

__all__ = ["Found", "Upstreams", "client_error", "endpoint_of"]

ROUTER_SECONDS = 2.0
"""How long to wait for a router whose speed is not known."""


@dataclass(frozen=True)
class Found:
    """What the models before the last said to a request.

    Attributes
    ----------
    exit : int
        Number of the model that answers, from 0; the last if none of them is sure enough.
    response : mapping, optional
        That model's response; None for the last, which has not been asked yet.
    answer : Answer, optional
    confidence : float, optional
        The last confidence that was seen.
    cost : mapping
        Of the models asked so far, by unit.
    reason : str
        Why this model answers.
    is_full : bool
        Whether that response is the full answer already, as a model gave that thought to its end.
    alone : mapping, optional
        What the full answer would have cost; by default as many tokens of the last model.
    """

    exit: int
    reason: str
    response: Mapping[str, Any] | None = None
    answer: Answer | None = None
    confidence: float | None = None
    cost: Mapping[str, float] = field(default_factory=dict)
    is_full: bool = False
    alone: Mapping[str, float] | None = None


class _Inquiry(dict[str, Any]):
    """A request's fields, on their way through the models before the last.

    Attributes
    ----------
    until : float
        Time of the event loop at which the last model must be asked.
    """

    def __init__(self, asked: ApiRequest, until: float) -> None:
        super().__init__(asked.fields)
        self.asked, self.until = asked, until


class _RestingError(Exception):
    """A model must not be asked now; the message says why."""


class _Asking(Model):
    """An endpoint that is asked with an inquiry."""

    def __init__(self, endpoint: Endpoint, versions: Versions) -> None:
        self.endpoint, self.name, self.versions = endpoint, endpoint.name, versions

    async def answer(self, value: Any) -> Answer:
        """Return the answer to an inquiry."""
        response = await self.endpoint.complete(_own_body(self.endpoint, value.asked))
        answer = self.endpoint.answer_of(response)
        _check_choice(response)
        self.versions.saw(self.name, response)
        return answer


class _Small(Model):
    """A model before the last, which rests after failures and is not waited for too long."""

    def __init__(
        self,
        model: Model,
        health: Callable[[], ModelHealth],
        seconds: float,
        versions: Versions,
    ) -> None:
        self.model, self.name, self.is_router = model, model.name, model.is_router
        self.health, self.seconds = health, seconds
        if not model.is_router:
            asking = _Asking(endpoint_of(model), versions)
            self.model = model.around(asking) if isinstance(model, Wrapper) else asking

    async def answer(self, value: Any) -> Answer:
        """Return the answer to an inquiry."""
        if (why := self.health().refusal()) is not None:
            raise _RestingError(why)
        at = min(value.until, asyncio.get_running_loop().time() + self.seconds)
        async with asyncio.timeout_at(at):
            return await self.model.answer(value)


def endpoint_of(model: Model) -> Endpoint:
    """Return the endpoint within a model's wrappers."""
    found = innermost(model)
    if not isinstance(found, Endpoint):
        raise TypeError("`models` of a proxy must be endpoints, with wrappers or without.")
    return found


class Upstreams:
    """The models of a cascade, asked with requests as clients sent them.

    For the server's other parts this is an engine: its samples are requests, and `compare` gets the
    last model's answer as the sample, or the error that came instead of it.

    Parameters
    ----------
    cascade : Cascade
        Of endpoints.
    policy : Policy or SlicedPolicy, optional
    seconds : sequence of float, optional
        How long to wait for each model before the last; by default as long as its time-out.

    Attributes
    ----------
    names : list of str
        What clients are told of who answered, by exit.
    models : list of Model
        The router, if there is one, and endpoints with their wrappers; the last is an endpoint.
    endpoints : list of Endpoint
        Those of the models.
    health : list of ModelHealth
        One per model.
    versions : Versions
        What providers say of their models.
    keeps_answers : bool
        Whether audits log both answers, for labels that come later.
    """

    keeps_answers = False

    def __init__(
        self, cascade: Cascade, policy: AnyPolicy | None, seconds: Sequence[float] | None = None
    ) -> None:
        models = self.models = cascade.models
        self.cascade, self.names = cascade, cascade.names
        self.endpoints = [endpoint_of(model) for model in models if not model.is_router]
        self.large = self.endpoints[-1]
        if self.large is not models[-1]:
            raise TypeError("`models` of a proxy must end with an endpoint without a wrapper.")
        self.n_exits, self.last = len(models), len(models) - 1
        waits = seconds or [
            ROUTER_SECONDS if model.is_router else endpoint_of(model).timeout for model in models
        ]
        self.health = [
            ModelHealth(model.name, last=k == self.last) for k, model in enumerate(models)
        ]
        self.versions = Versions()
        self.small = [
            _Small(model, partial(self.health.__getitem__, k), waits[k], self.versions)
            for k, model in enumerate(self.models[:-1])
        ]
        self._last_of_kind = {self.large.kind: self.large}
        self.install(policy)

    @property
    def policy(self) -> AnyPolicy | None:
        """The policy in use."""
        return self.runner.policy

    def check(self, policy: AnyPolicy) -> None:
        """Raise if a policy was made for other models."""
        self.cascade.run(policy)

    def check_loss(self, loss: str) -> None:
        """Raise if a loss is not known: each audit with it would fail."""
        LOSSES.choose(loss)

    def install(self, policy: AnyPolicy | None) -> None:
        """Use another policy for later requests."""
        score = self.cascade.run(policy).score
        self.runner = CascadeRunner([*self.small, self.large], policy, score)
        self.versions.install(policy)

    def compare(self, sample: Any, answer: ServedAnswer, loss: str) -> Comparison:
        """Return how an answer compares with the last model's."""
        if answer.exit == self.last:
            return Comparison(0.0)
        if isinstance(sample, Exception):
            raise sample
        _, against_last = answer_tables(LOSSES.choose(loss), [[answer.output], [sample]], None)
        found = float(np.asarray(against_last)[0, 0])
        if not self.keeps_answers:
            return Comparison(found)
        return Comparison(found, answer.output.answer, sample.answer)

    def large_for(self, asked: ApiRequest) -> Endpoint:
        """Return the last model, as an endpoint of the kind that a request is for."""
        if asked.kind not in self._last_of_kind:
            if isinstance(self.large, ProviderEndpoint):
                raise ApiError(404, f"{self.large.name} answers chats only.")
            self._last_of_kind[asked.kind] = replace(self.large, kind=asked.kind)
        return self._last_of_kind[asked.kind]

    async def ask_small(
        self, asked: ApiRequest, seconds: float, slice_name: str | None = None
    ) -> Found:
        """Ask the small models in order until one is confident; their errors do not surface.

        Parameters
        ----------
        seconds : float
            Half of it at most is spent here, so that the last model has time to answer.
        """
        inquiry = _Inquiry(asked, asyncio.get_running_loop().time() + seconds / 2)
        routed = await self.runner.route(inquiry, slice_name)
        known = [
            each
            for k, each in zip(routed.asked, routed.confidences, strict=True)
            if each is not None and not self.models[k].is_router
        ]
        found = Found(
            routed.exit,
            "sure enough",
            confidence=known[-1] if known else None,
            cost=routed.cost,
        )
        for k, confidence in zip(routed.asked, routed.confidences, strict=True):
            if confidence is not None:
                self.health[k].answered()
        if routed.answer is not None:
            return replace(found, response=routed.answer.response, answer=routed.answer)
        if routed.routed:
            reason = "the router sent it on"
        elif routed.error is None:
            reason = "not sure enough" if known else "the policy always asks it"
        elif isinstance(routed.error, _RestingError):
            reason = str(routed.error)
        else:
            failed = routed.asked[-1]
            self.health[failed].failed(routed.error)
            late = isinstance(routed.error, TimeoutError)
            reason = f"{self.models[failed].name} {'was too slow' if late else 'failed'}"
        return replace(found, reason=reason)

    async def ask_large(
        self, asked: ApiRequest, *, logprobs: bool
    ) -> tuple[Mapping[str, Any], bytes]:
        """Return the last model's response, and the bytes that hold it.

        Raises
        ------
        UpstreamError
        """
        model = self.large_for(asked)
        body = _own_body(model, asked) if logprobs else _client_body(model, asked)
        try:
            content = await model.send(body)
            response = model.parse(content)
            if not isinstance(response, dict):
                raise UpstreamError(f"{model.name} sent JSON that is not an object.")
        except Exception as error:
            self.health[self.last].failed(error)
            raise
        self.health[self.last].answered()
        self.versions.saw(self.large.name, response)
        return response, content

    def stream_body(self, asked: ApiRequest) -> dict[str, Any]:
        """Return the request with which the last model streams."""
        body = _client_body(self.large_for(asked), asked)
        return {**body, "stream": True, "stream_options": {"include_usage": True}}

    @property
    def trouble(self) -> str | None:
        """Which model does not answer, or is another one; None if all are well."""
        silent = next((each.trouble for each in self.health if each.trouble is not None), None)
        return silent or self.versions.trouble

    async def close(self) -> None:
        """Close all connections."""
        for model in (*self.models, *self._last_of_kind.values()):
            await model.close()


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of two costs, by unit.

    Examples
    --------
    >>> added({"usd": 1.0}, {"usd": 2.0, "tokens": 3.0})
    {'usd': 3.0, 'tokens': 3.0}
    """
    return {**one, **{unit: one.get(unit, 0.0) + cost for unit, cost in other.items()}}


def _own_body(model: Endpoint, asked: ApiRequest) -> dict[str, Any]:
    """Return the request as the model was calibrated with, log-probabilities included."""
    own = {k: v for k, v in asked.fields.items() if k not in ("logprobs", "top_logprobs", "n")}
    return model.body(own_spelling(own, model.parameters))


def _client_body(model: Endpoint, asked: ApiRequest) -> dict[str, Any]:
    """Return the request as the client sent it, with the model's own parameters as defaults."""
    fields = own_spelling(asked.fields, model.parameters)
    return {**model.parameters, **fields, "model": model.model}


def _check_choice(response: Mapping[str, Any]) -> None:
    """Refuse several answers, and one that was filtered."""
    choice = response["choices"][0]
    if len(response["choices"]) != 1 or not isinstance(choice, dict):
        raise UpstreamError("The response must hold one choice.")
    if choice.get("finish_reason") == "content_filter":
        raise UpstreamError("The answer was filtered.")


def client_error(error: BaseException, model: Endpoint) -> ApiError:
    """Map an upstream error to a client error without leaking keys."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, UpstreamError):
        return ApiError(502, f"{model.name} did not answer.", "api_error", code="bad_gateway")
    code, param = _word(error, "code"), _word(error, "param")
    if error.status == 429:
        text = f"{model.name} is at its rate limit."
        wait = 1.0 if error.retry_after is None else error.retry_after
        code = code or "rate_limit_exceeded"
        return ApiError(429, text, "rate_limit_error", code=code, param=param, retry_after=wait)
    if error.status in (401, 403):
        text = f"{model.name} refused the proxy's key."
        return ApiError(502, text, "api_error", code="upstream_key_refused")
    if error.status is not None and 400 <= error.status < 500 and error.status != 408:
        kind = _word(error, "type") or "invalid_request_error"
        words = _word(error, "message")
        text = described(error) if words is None else f"{model.name}: {words}"
        return ApiError(error.status, text, kind, code=code or "upstream_refused", param=param)
    text = f"{model.name} did not answer ({described(error)})"
    return ApiError(502, text, "api_error", code="bad_gateway", retry_after=error.retry_after)


def _word(error: UpstreamError, name: str) -> str | None:
    """Return a text of the upstream's own error, such as its code; None if it has none."""
    value = error.error.get(name)
    if not isinstance(value, str) or not value:
        return None
    return value[:1000].encode("utf-8", "replace").decode()  # JSON can hold halves of characters
