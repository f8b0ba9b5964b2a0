"""`ProviderEndpoint`: a language model behind another API than OpenAI's, asked through any-llm."""

import asyncio
import importlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from swiftsure._lib import checks
from swiftsure._lib.files import shortened
from swiftsure.cascade.endpoints import Endpoint
from swiftsure.cascade.retrying import TEMPORARY, UpstreamError, retry_after

if TYPE_CHECKING:
    from contextlib import _AsyncGeneratorContextManager

    from aiohttp import ClientResponse
    from any_llm import AnyLLM

__all__ = ["PROVIDERS", "Provider", "ProviderEndpoint"]

Provider = Literal["anthropic", "azureopenai"]

PROVIDERS: Mapping[Provider, str] = {"anthropic": "anthropic", "azureopenai": "openai"}
"""The package of each provider's own client, by the provider's name in any-llm."""

IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "stream_options")
"""Fields of a request that other APIs lack, and on which the text of an answer does not depend."""


@dataclass(eq=False)
class ProviderEndpoint(Endpoint):
    """A model behind Anthropic's API, or Azure's, as an `Endpoint`.

    Requests and responses have OpenAI's form; the library any-llm and the provider's own client
    translate them.

    Parameters
    ----------
    provider : {"anthropic", "azureopenai"}
    base_url : str
        "https://api.anthropic.com", or "https://NAME.openai.azure.com".
    model : str
        For Azure, the name of the deployment.

    Notes
    -----
    Other parameters are those of `Endpoint`. Anthropic gives no log-probabilities, so `logprobs` is
    None there.

    Redirects are not followed, and the client does not try again: the cascade does that. The size
    of answers is not limited.

    Examples
    --------
    >>> large = ProviderEndpoint(
    ...     "https://api.anthropic.com", "claude", key="ANTHROPIC_API_KEY", provider="anthropic"
    ... )
    >>> large.logprobs is None
    True
    """

    provider: Provider = "anthropic"

    def __post_init__(self) -> None:
        """Check every field."""
        checks.choice("provider", self.provider, PROVIDERS)
        if self.kind != "chat":
            raise ValueError(f"`kind` must be chat with provider {self.provider!r}.")
        if self.provider == "anthropic":
            self.logprobs = None
        super().__post_init__()

    def identity(self) -> dict[str, Any]:
        """Return what answers depend on."""
        return {**super().identity(), "provider": self.provider}

    async def send(self, body: Mapping[str, Any], path: str | None = None) -> bytes:
        """Send a request and return its response in OpenAI's form, as JSON."""
        if path is not None:
            raise self._lacks(path)
        return self._json(await self._complete(body))

    async def events(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of an answer that the model streams, in OpenAI's form."""
        stream = await self._complete(body)
        try:
            async for each in stream:
                yield json.loads(self._json(each))
        except UpstreamError:
            raise
        except Exception as error:
            raise self._failed(error) from None
        finally:
            await stream.aclose()

    def post(
        self, body: Mapping[str, Any], path: str | None = None
    ) -> "_AsyncGeneratorContextManager[ClientResponse]":
        """Raise: only whole answers and their events can be translated."""
        raise self._lacks(path or f"stream of {len(body)} fields")

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        found: Any = self._sessions.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found.client.close()

    async def _complete(self, body: Mapping[str, Any]) -> Any:
        asked = {name: value for name, value in body.items() if value is not None}
        if self.provider == "anthropic":
            lacks = (*IGNORED, "logprobs", "top_logprobs", *(["n"] if asked.get("n") == 1 else ()))
            asked = {name: value for name, value in asked.items() if name not in lacks}
        try:
            return await self._client().acompletion(**asked)
        except Exception as error:
            raise self._failed(error) from None

    def _json(self, found: Any) -> bytes:
        return self.redacted(found.model_dump_json(exclude_unset=True).encode())

    def _lacks(self, path: str) -> UpstreamError:
        return UpstreamError(f"{self.name} has no {path}.", status=404)

    def _failed(self, error: Exception) -> UpstreamError:
        """Return the error that the client raised as ours, without the key."""
        status = getattr(error, "status_code", None)
        text = self.redacted(shortened(error).encode()).decode()
        cause = getattr(error, "original_exception", None) or error
        if status is None and (
            isinstance(cause, TypeError | ValueError) or "Unsupported" in type(cause).__name__
        ):
            status = 400  # a request that the library cannot translate
        told = getattr(error, "retry_after", None)
        known = {"message": text, "type": getattr(error, "error_type", None)}
        known |= {name: getattr(error, name, None) for name in ("code", "param")}
        if status is None:
            words = f"{self.name} cannot be reached ({text})."
        else:
            words = f"{self.name} answered with status {status}: {text}"
        return UpstreamError(
            words,
            status=status,
            temporary=status is None or status in TEMPORARY,
            retry_after=None if told is None else retry_after({"Retry-After": str(told)}),
            error=known,
        )

    def _client(self) -> "AnyLLM":
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        sessions: dict[Any, Any] = self._sessions
        if loop not in sessions:
            try:
                from any_llm import AnyLLM

                sdk = importlib.import_module(PROVIDERS[self.provider])
            except ImportError:
                raise ImportError(
                    "ProviderEndpoint needs any-llm: pip install 'swiftsure[providers]'."
                ) from None
            self.headers()  # raises if the key is missing
            secret = None if self.key is None else os.environ[self.key]
            sessions[loop] = AnyLLM.create(
                self.provider,
                secret or "none",
                self.base_url,
                unified_exceptions=True,
                max_retries=0,
                timeout=self.timeout,
                default_headers={"Accept-Encoding": "identity"},
                http_client=sdk.DefaultAsyncHttpxClient(follow_redirects=False),
            )
            for each in [each for each in sessions if each.is_closed()]:
                del sessions[each]
        found: AnyLLM = sessions[loop]
        return found
