"""A reasoning model that stops thinking when its answer is safe, behind OpenAI's API."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swiftsure.cascade import Answer, Endpoint, UpstreamError
from swiftsure.certify.slices import any_part
from swiftsure.reasoning import Reasoner, Thinker, Thought
from swiftsure.serve.engine import AnyPolicy
from swiftsure.serve.engines.by_slice import policies_of
from swiftsure.serve.openai import ApiRequest, encoded
from swiftsure.serve.proxy.health import ModelHealth
from swiftsure.serve.proxy.upstreams import Found, Upstreams
from swiftsure.serve.proxy.versions import Versions

__all__ = ["ThinkingUpstreams"]


@dataclass(eq=False)
class _Full(Endpoint):
    """The model that thinks to the end, whose answers are read as those on the way are."""

    reasoner: Reasoner | None = field(default=None, repr=False)

    def answer_of(self, response: Any) -> Answer:
        """Return the answer in a response."""
        found = super().answer_of(response)
        read = None if self.reasoner is None else self.reasoner.read(found.answer)
        if read is None:
            raise UpstreamError(f"The answer of {self.name} cannot be read.")
        return replace(found, answer=read)


class ThinkingUpstreams(Upstreams):
    """One reasoning model; its exits are the checkpoints at which it may stop, and its end.

    Requests that no policy covers go to the model's own chat API, as they came.

    Parameters
    ----------
    reasoner : Reasoner
    policy : Policy or SlicedPolicy, optional
    """

    def __init__(self, reasoner: Reasoner, policy: AnyPolicy | None) -> None:
        self.reasoner = reasoner
        given = {
            name: value
            for name, value in vars(reasoner.endpoint).items()
            if name != "_sessions"  # of the endpoint itself
        }
        self.large = _Full(**given, reasoner=reasoner)
        self.endpoints, self.models = [self.large], [self.large]
        self.versions = Versions()
        self._last_of_kind = {self.large.kind: self.large}
        grid = [] if policy is None else any_part(policy).settings.get("checkpoints", [])
        self.names = [*(f"{reasoner.name} after {at} tokens" for at in grid), reasoner.name]
        self.n_exits, self.last = len(self.names), len(self.names) - 1
        health = ModelHealth(reasoner.name, last=True)
        self.health = [health] * self.n_exits
        self._full = Thinker(reasoner)
        self.install(policy)

    @property
    def policy(self) -> AnyPolicy | None:
        """The policy in use."""
        return self._policy

    def check(self, policy: AnyPolicy) -> None:
        """Raise if a policy was made for another model, or for other checkpoints."""
        for each in self._thinkers_of(policy).values():
            if len(each.checkpoints) != self.last and self.last:
                raise ValueError(
                    f"`policy` must have {self.last} checkpoints, as the one that the proxy started"
                    f" with, but has {len(each.checkpoints)}: start the proxy with it."
                )

    def install(self, policy: AnyPolicy | None) -> None:
        """Use another policy for later requests."""
        self._thinkers = {} if policy is None else self._thinkers_of(policy)
        self._policy = policy
        self.versions.install(policy)

    def _thinkers_of(self, policy: AnyPolicy) -> dict[str | None, Thinker]:
        parts = policies_of(policy)
        return {name: Thinker(self.reasoner, part) for name, part in parts.items()}

    async def ask_small(
        self, asked: ApiRequest, seconds: float, slice_name: str | None = None
    ) -> Found:
        """Let the model think until its answer is safe; if that fails, its own API answers."""
        name = slice_name if slice_name in self._thinkers else None
        thinker = self._thinkers[name]
        messages = asked.fields["messages"]
        if not all(isinstance(each.get("content"), str) for each in messages):
            return Found(self.last, "a message is not a text")
        try:
            async with asyncio.timeout(seconds):
                thought = await thinker.aanswer(messages)
        except UpstreamError as error:
            self.health[self.last].failed(error)
            return Found(self.last, f"{self.reasoner.name} failed on the way")
        self.health[self.last].answered()
        cost = self._price(thought.total)
        reason = "gave up" if thought.gave_up else "sure enough" if thought.stopped else "its end"
        return Found(
            thought.exit,
            reason,
            response=self._response(thought),
            answer=Answer(thought.answer, cost=cost),
            confidence=thought.confidence,
            cost=cost,
            is_full=not thought.stopped,
            alone=self._price(thinker.usual or 0.0),
        )

    async def ask_large(
        self, asked: ApiRequest, *, logprobs: bool
    ) -> tuple[Mapping[str, Any], bytes]:
        """Return the answer after all of the thinking: for an audit, or as the client asked."""
        if not logprobs:
            return await super().ask_large(asked, logprobs=False)
        try:
            thought = await self._full.aanswer(asked.fields["messages"])
        except UpstreamError as error:
            self.health[self.last].failed(error)
            raise
        response = self._response(thought)
        return response, encoded(response)

    def _price(self, tokens: float) -> dict[str, float]:
        """Return what tokens cost that were written; the prompt is the same for all answers."""
        prices = self.large.per_million
        price = {} if prices is None else {self.large.unit: tokens * prices[1] / 1e6}
        return {**price, "tokens": tokens}

    def _response(self, thought: Thought) -> dict[str, Any]:
        """Return a thought as a response of OpenAI's API, with the thinking beside the answer."""
        message = {
            "role": "assistant",
            "content": thought.text,
            "reasoning_content": thought.thinking,
        }
        written = round(thought.total)
        return {
            "id": f"chatcmpl-{time.time_ns():x}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.large.model,
            "choices": [
                {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
            ],
            "usage": {
                "prompt_tokens": 0,  # streams of completions do not say
                "completion_tokens": written,
                "total_tokens": written,
            },
        }

    async def close(self) -> None:
        """Close all connections."""
        await self.reasoner.close()
        await super().close()
