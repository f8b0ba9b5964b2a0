"""`Embeddings`: vectors of texts from an OpenAI-compatible API, as a `Router` takes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.cascade.answer_features import question_text
from swiftsure.cascade.endpoints import Endpoint
from swiftsure.cascade.retrying import UpstreamError
from swiftsure.cascade.running import run_coroutine

__all__ = ["Embeddings"]


class Embeddings:
    """The embeddings of inputs: texts, lists of messages, of which the last counts, or requests.

    Parameters
    ----------
    base_url, model, key, timeout
        As in `Endpoint`.

    Examples
    --------
    >>> embed = Embeddings("http://localhost:8000/v1", "minilm", key=None)
    >>> embed.fingerprint
    'http://localhost:8000/v1 minilm'
    """

    def __init__(
        self, base_url: str, model: str, *, key: str | None = "OPENAI_API_KEY", timeout: float = 10
    ) -> None:
        self.endpoint = Endpoint(base_url, model, key=key, timeout=timeout, logprobs=None)

    @property
    def fingerprint(self) -> str:
        """Address and model."""
        return f"{self.endpoint.base_url} {self.endpoint.model}"

    def __call__(self, inputs: Sequence[Any]) -> NDArray[np.float64]:
        """Return the embeddings of several inputs, (n, d)."""

        async def run() -> NDArray[np.float64]:
            try:
                return await self.vectors(inputs)
            finally:
                await self.close()

        return run_coroutine(run())

    async def vectors(self, inputs: Sequence[Any]) -> NDArray[np.float64]:
        """Await the same."""
        body = {"model": self.endpoint.model, "input": [question_text(each) for each in inputs]}
        response = self.endpoint.parse(await self.endpoint.send(body, "embeddings"))
        try:
            rows = sorted(response["data"], key=lambda each: each["index"])
            found = np.asarray([each["embedding"] for each in rows], np.float64)
        except (KeyError, TypeError, ValueError):
            raise UpstreamError(f"{self.endpoint.name} sent no embeddings.") from None
        if found.ndim != 2 or len(found) != len(inputs):
            raise UpstreamError(f"{self.endpoint.name} must send one embedding per input.")
        return found

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        await self.endpoint.close()
