"""Asks the models of a cascade in turn, and remembers how each of them is doing."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swiftsure.cascade import Answer, CascadeRunner, Endpoint, UpstreamError
from swiftsure.cascade.confidences import answer_confidence
from swiftsure.cascade.retrying import described
from swiftsure.serve.proxy.health import ModelHealth
from swiftsure.serve.proxy.requests import Asked, ProxyError, own_spelling

__all__ = ["Found", "Upstreams", "client_error"]


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
    cost : dict
        Of the models asked so far, by unit.
    reason : str
        Why this model answers.
    """

    exit: int
    reason: str
    response: Mapping[str, Any] | None = None
    answer: Answer | None = None
    confidence: float | None = None
    cost: dict[str, float] = field(default_factory=dict)


class Upstreams:
    """The models of a cascade, asked with requests as clients sent them.

    Parameters
    ----------
    runner : CascadeRunner
        Of endpoints, under the policy.
    seconds : sequence of float, optional
        How long to wait for each model before the last; by default as long as its time-out.

    Attributes
    ----------
    health : list of ModelHealth
        One per model.
    """

    def __init__(self, runner: CascadeRunner, seconds: Sequence[float] | None = None) -> None:
        models = runner.models
        if not all(isinstance(model, Endpoint) for model in models):
            raise TypeError("`models` of a proxy must all be endpoints.")
        self.runner = runner
        self.models: list[Endpoint] = list(models)  # type: ignore[arg-type]
        self.last = len(models) - 1
        self._seconds = seconds or [model.timeout for model in self.models]
        self.health = [
            ModelHealth(model.name, last=k == self.last) for k, model in enumerate(models)
        ]
        self._last_of_kind = {self.large.kind: self.large}

    @property
    def large(self) -> Endpoint:
        """The last model."""
        return self.models[self.last]

    def large_for(self, asked: Asked) -> Endpoint:
        """Return the last model, as an endpoint of the kind that a request is for."""
        if asked.kind not in self._last_of_kind:
            self._last_of_kind[asked.kind] = replace(self.large, kind=asked.kind)
        return self._last_of_kind[asked.kind]

    async def ask_small(self, asked: Asked, seconds: float) -> Found:
        """Ask the models before the last until one is sure enough; none of their faults is raised.

        Parameters
        ----------
        seconds : float
            Half of it at most is spent here, so that the last model has time to answer.
        """
        cost: dict[str, float] = {}
        confidence: float | None = None
        until = time.monotonic() + seconds / 2
        for k, model in enumerate(self.models[:-1]):
            if not self.runner.asked(k):
                continue
            if (why := self.health[k].refusal()) is not None:
                return Found(self.last, why, confidence=confidence, cost=cost)
            try:
                at = min(until, time.monotonic() + self._seconds[k])
                async with asyncio.timeout_at(_loop_time(at)):
                    response = await model.complete(_own_body(model, asked))
                answer = model.answer_of(response)
                cost = added(cost, answer.cost)
                _check_choice(response)
                found = answer_confidence(answer, self.runner.score)
                if found is None or found != found:
                    raise UpstreamError(f"{model.name} gave no confidence.")
            except Exception as error:
                self.health[k].failed(error)
                late = isinstance(error, TimeoutError)
                reason = f"{model.name} {'was too slow' if late else 'failed'}"
                return Found(self.last, reason, confidence=confidence, cost=cost)
            self.health[k].answered()
            confidence = found
            if self.runner.leaves(k, found):
                return Found(k, "sure enough", response, answer, found, cost)
        reason = "not sure enough" if confidence is not None else "the policy always asks it"
        return Found(self.last, reason, confidence=confidence, cost=cost)

    async def ask_large(self, asked: Asked, *, logprobs: bool) -> tuple[Mapping[str, Any], bytes]:
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
        return response, content

    def stream_body(self, asked: Asked) -> dict[str, Any]:
        """Return the request with which the last model streams."""
        body = _client_body(self.large_for(asked), asked)
        return {**body, "stream": True, "stream_options": {"include_usage": True}}

    @property
    def trouble(self) -> str | None:
        """Which model does not answer, and why; None if all do."""
        return next((each.trouble for each in self.health if each.trouble is not None), None)

    async def close(self) -> None:
        """Close all connections."""
        for model in {
            id(each): each for each in (*self.models, *self._last_of_kind.values())
        }.values():
            await model.close()


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of two costs, by unit.

    Examples
    --------
    >>> added({"usd": 1.0}, {"usd": 2.0, "tokens": 3.0})
    {'usd': 3.0, 'tokens': 3.0}
    """
    return {**one, **{unit: one.get(unit, 0.0) + cost for unit, cost in other.items()}}


def _loop_time(until: float) -> float:
    return asyncio.get_running_loop().time() + max(0.0, until - time.monotonic())


def _own_body(model: Endpoint, asked: Asked) -> dict[str, Any]:
    """Return the request as the model was calibrated with, log-probabilities included."""
    own = {k: v for k, v in asked.fields.items() if k not in ("logprobs", "top_logprobs", "n")}
    return model.body(own_spelling(own, model.parameters))


def _client_body(model: Endpoint, asked: Asked) -> dict[str, Any]:
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


def client_error(error: BaseException, model: Endpoint) -> ProxyError:
    """Return what the client is told if the last model does not answer; nothing of keys."""
    if isinstance(error, ProxyError):
        return error
    if not isinstance(error, UpstreamError):
        return ProxyError(502, f"{model.name} did not answer.", "api_error", code="bad_gateway")
    code, param = _word(error, "code"), _word(error, "param")
    if error.status == 429:
        text = f"{model.name} is at its rate limit."
        wait = 1.0 if error.retry_after is None else error.retry_after
        code = code or "rate_limit_exceeded"
        return ProxyError(429, text, "rate_limit_error", code=code, param=param, retry_after=wait)
    if error.status in (401, 403):
        text = f"{model.name} refused the proxy's key."
        return ProxyError(502, text, "api_error", code="upstream_key_refused")
    if error.status is not None and 400 <= error.status < 500 and error.status != 408:
        kind = _word(error, "type") or "invalid_request_error"
        words = _word(error, "message")
        text = described(error) if words is None else f"{model.name}: {words}"
        return ProxyError(error.status, text, kind, code=code or "upstream_refused", param=param)
    text = f"{model.name} did not answer ({described(error)})"
    return ProxyError(502, text, "api_error", code="bad_gateway", retry_after=error.retry_after)


def _word(error: UpstreamError, name: str) -> str | None:
    """Return a text of the upstream's own error, such as its code; None if it has none."""
    value = error.error.get(name)
    if not isinstance(value, str) or not value:
        return None
    return value[:1000].encode("utf-8", "replace").decode()  # JSON can hold halves of characters
