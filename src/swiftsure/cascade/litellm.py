"""LiteLLM: its models in a cascade, and a cascade as one of its providers."""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from swiftsure.cascade.answers import Answer
from swiftsure.cascade.endpoints import Endpoint, answer_of_response, usage_cost
from swiftsure.cascade.models import Model
from swiftsure.cascade.request_kinds import calibrated_features, unlike
from swiftsure.cascade.request_parameters import in_common, other_parameter
from swiftsure.cascade.running import CascadeRunner, Decision
from swiftsure.cascade.wrapping import innermost

if TYPE_CHECKING:
    import litellm

__all__ = ["LiteLLMModel", "custom_llm"]

FOR_LITELLM = ("stream", "stream_options", "max_retries")
"""Options that LiteLLM adds for itself."""


class LiteLLMModel(Model):
    """A model that LiteLLM asks, of any of its providers.

    Parameters
    ----------
    model : str
        As LiteLLM names it, such as "anthropic/claude-haiku-4-5"; with a router, a model group.
    router : litellm.Router, optional
        Asks instead, with its load balancing and fallbacks.
    parameters : mapping, optional
        Of requests; by default `{"temperature": 0}`.
    logprobs : int, optional
        How many of the most probable tokens to ask for; by default no log-probabilities.
    per_million : (input, output), optional
        Prices of a million tokens, in dollars; by default those that LiteLLM knows.

    Examples
    --------
    >>> LiteLLMModel("gpt-4o-mini", logprobs=5).name
    'gpt-4o-mini'
    """

    def __init__(
        self,
        model: str,
        *,
        router: "litellm.Router | None" = None,
        parameters: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        per_million: tuple[float, ...] | None = None,
    ) -> None:
        self.name = self.model = model
        self.router, self.logprobs, self.per_million = router, logprobs, per_million
        self.parameters = {"temperature": 0} if parameters is None else dict(parameters)

    def identity(self) -> dict[str, Any]:
        """Return what answers depend on, as far as it is known here."""
        return {"litellm": self.model, "parameters": self.parameters, "logprobs": self.logprobs}

    async def answer(self, value: Any) -> Answer:
        """Return the answer to a text, a list of messages, or a request."""
        import litellm

        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        asked = dict(value) if isinstance(value, Mapping) else {"messages": list(value)}
        more = {} if self.logprobs is None else {"logprobs": True, "top_logprobs": self.logprobs}
        ask: Any = litellm if self.router is None else self.router
        found = await ask.acompletion(**self.parameters | more | asked | {"model": self.model})
        content = found.model_dump()
        cost = usage_cost(content, self.per_million)
        known = (getattr(found, "_hidden_params", None) or {}).get("response_cost")
        if self.per_million is None and known is not None:
            cost = {"usd": float(known), **cost}
        return answer_of_response(content, cost)


def custom_llm(runner: CascadeRunner) -> "litellm.CustomLLM":
    """Return a provider for `litellm.custom_provider_map` that runs a cascade under its policy.

    A request with parameters or messages unlike those of the calibration goes to the last model, as
    in the proxy. What all models cost together counts as the cost of a response, so LiteLLM's
    budgets see the whole bill.

    Parameters
    ----------
    runner : CascadeRunner
        What `Cascade.run` returns; of models that take messages: `LiteLLMModel` and `Endpoint`.

    Raises
    ------
    ValueError
        If an endpoint has a prompt, which texts were put into and messages would not be.

    Examples
    --------
    >>> handler = custom_llm(cascade.run(policy))  # doctest: +SKIP
    >>> litellm.custom_provider_map = [  # doctest: +SKIP
    ...     {"provider": "swiftsure", "custom_handler": handler}
    ... ]
    >>> litellm.completion(
    ...     "swiftsure/cascade", [{"role": "user", "content": "Is 7 prime?"}]
    ... )  # doctest: +SKIP
    """
    _refuse_prompts(runner)
    import litellm

    features = calibrated_features(runner.policy)
    common = in_common([each.parameters for each in map(innermost, runner.models)])  # type: ignore[attr-defined]

    async def decided(messages: list[Any], parameters: Mapping[str, Any]) -> Decision:
        given = {k: v for k, v in parameters.items() if v is not None and k not in FOR_LITELLM}
        why = other_parameter(given, common)
        if why is None and features is not None:
            why = unlike(messages, features)
        if why is None:
            return await runner.answer(messages)
        return await runner.ask_last({**given, "messages": messages})

    def response_of(found: Decision) -> Any:
        response = litellm.ModelResponse(**found.answer.response)
        headers = {
            "x-swiftsure-model": runner.models[found.exit].name,
            "x-swiftsure-exit": str(found.exit),
        }
        response._hidden_params["additional_headers"] = headers
        if "usd" in found.cost:
            response._hidden_params["response_cost"] = found.cost["usd"]
        return response

    def part_of(found: Decision) -> Any:
        choice = found.answer.response["choices"][0]
        return {
            "text": found.answer.answer,
            "is_finished": True,
            "finish_reason": choice.get("finish_reason") or "stop",
            "index": 0,
            "tool_use": None,
            "usage": found.answer.response.get("usage"),
        }

    class CascadeLLM(litellm.CustomLLM):  # type: ignore[misc]
        def completion(self, messages: Any, optional_params: Any, **_: Any) -> Any:
            return response_of(runner.finish(decided(messages, optional_params)))

        async def acompletion(self, messages: Any, optional_params: Any, **_: Any) -> Any:
            return response_of(await decided(messages, optional_params))

        def streaming(self, messages: Any, optional_params: Any, **_: Any) -> Iterator[Any]:
            yield part_of(runner.finish(decided(messages, optional_params)))

        async def astreaming(
            self, messages: Any, optional_params: Any, **_: Any
        ) -> AsyncIterator[Any]:
            yield part_of(await decided(messages, optional_params))

    return CascadeLLM()


def _refuse_prompts(runner: CascadeRunner) -> None:
    for each in map(innermost, runner.models):
        if isinstance(each, Endpoint) and (each.prompt is not None or each.kind != "chat"):
            raise ValueError(
                f"`runner` must be of models that take messages, but {each.name} puts texts into a"
                " prompt: calibrate a chat endpoint without `prompt` on whole messages."
            )
