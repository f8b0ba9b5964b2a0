"""LangChain: its chat models in a cascade, and a cascade as a runnable."""

import asyncio
import contextvars
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from swiftsure.cascade.answers import Answer
from swiftsure.cascade.endpoints import logprobs_of, usage_cost, version_of
from swiftsure.cascade.models import Model
from swiftsure.cascade.request_kinds import calibrated_features, unlike
from swiftsure.cascade.running import CascadeRunner

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage
    from langchain_core.runnables import Runnable

__all__ = ["LangChainModel", "as_runnable"]

MOST_THREADS = 64


class LangChainModel(Model):
    """A chat model of LangChain's, or one with options bound to it.

    It is asked in threads, because its connections may belong to one event loop.

    Parameters
    ----------
    model : Runnable
        From messages to a message, such as `ChatOpenAI(model="gpt-4o-mini").bind(logprobs=True)`.
    name : str, optional
    per_million : (input, output) or (input, output, cached input), optional
        Prices of a million tokens.
    unit : str
        Currency of the prices.
    """

    def __init__(
        self,
        model: "Runnable[Any, BaseMessage]",
        name: str | None = None,
        *,
        per_million: Sequence[float] | None = None,
        unit: str = "usd",
    ) -> None:
        self.model, self.per_million, self.unit = model, per_million, unit
        inner = getattr(model, "bound", model)
        self.name = name or next(
            (
                found
                for found in (getattr(inner, field, None) for field in ("model_name", "model"))
                if isinstance(found, str)
            ),
            type(inner).__name__,
        )
        self._threads = ThreadPoolExecutor(MOST_THREADS, "swiftsure-langchain")

    def identity(self) -> dict[str, Any] | None:
        """Return the model as LangChain stores it, without keys; None if it cannot be stored."""
        from langchain_core.load import dumpd

        stored = dumpd(self.model)
        return {"langchain": stored} if stored.get("type") == "constructor" else None

    async def answer(self, value: Any) -> Answer:
        """Return the answer to a text, or to messages in any form that LangChain takes."""
        context = contextvars.copy_context()  # which has the callbacks of the chain
        loop = asyncio.get_running_loop()
        message = await loop.run_in_executor(self._threads, context.run, self.model.invoke, value)
        said = message.response_metadata
        logprobs, top = logprobs_of(said.get("logprobs"))
        return Answer(
            str(message.text),
            cost=self._cost(getattr(message, "usage_metadata", None)),
            logprobs=logprobs,
            top_logprobs=top,
            version=version_of({**said, "model": said.get("model_name")}),
            response=message,
        )

    def _cost(self, usage: Mapping[str, Any] | None) -> dict[str, float]:
        if usage is None:
            return usage_cost({}, self.per_million, self.unit)
        cached = (usage.get("input_token_details") or {}).get("cache_read")
        counts = {
            "prompt_tokens": usage["input_tokens"],
            "completion_tokens": usage["output_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return usage_cost({"usage": counts}, self.per_million, self.unit)


def as_runnable(runner: CascadeRunner) -> "Runnable[Any, BaseMessage]":
    """Return a cascade under its policy as a runnable, from a prompt or messages to a message.

    What a text of a prompt, or a list of messages, is answered with has in `response_metadata` an
    entry "swiftsure": the model that answered, its number, its confidence, and the cost of all
    models that were asked. Messages unlike those of the calibration go to the last model.

    Parameters
    ----------
    runner : CascadeRunner
        What `Cascade.run` returns, of models that are `LangChainModel`.

    Examples
    --------
    >>> chain = prompt | as_runnable(cascade.run(policy))  # doctest: +SKIP
    >>> chain.invoke({"question": "Is 7 prime?"})  # doctest: +SKIP
    """
    from langchain_core.messages import AIMessage, convert_to_openai_messages
    from langchain_core.prompt_values import PromptValue
    from langchain_core.runnables import RunnableLambda

    features = calibrated_features(runner.policy)

    async def ask(given: Any) -> Any:
        value = given.to_messages() if isinstance(given, PromptValue) else given
        if not isinstance(value, str):
            value = convert_to_openai_messages(value)
        why = None if features is None else unlike(value, features)
        found = await (runner.answer(value) if why is None else runner.ask_last(value))
        about = {
            "model": runner.models[found.exit].name,
            "exit": found.exit,
            "confidence": found.confidences[-1] if found.confidences else None,
            "cost": found.cost,
            "reason": why,
        }
        message = found.answer.response
        if message is None:
            message = AIMessage(found.answer.answer)
        more = {**message.response_metadata, "swiftsure": about}
        return message.model_copy(update={"response_metadata": more})

    def ask_now(given: Any) -> Any:
        return runner.finish(ask(given))

    return RunnableLambda(ask_now, afunc=ask, name="cascade")
