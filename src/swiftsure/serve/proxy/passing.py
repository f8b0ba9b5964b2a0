"""Passes other APIs of OpenAI's on to the last model's provider: responses and embeddings."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Literal

from starlette.responses import Response

from swiftsure.cascade import Endpoint, UpstreamError
from swiftsure.serve.http import RefusedError, read_json
from swiftsure.serve.openai import ApiError, event
from swiftsure.serve.proxy.streams import PassedOn
from swiftsure.serve.proxy.upstreams import client_error

__all__ = ["PASSED", "Passed", "asked_model", "passed_on"]

Passed = Literal["responses", "embeddings"]
PASSED: tuple[Passed, ...] = ("responses", "embeddings")
"""Paths below /v1 that are passed on; no policy speaks of them."""


def asked_model(body: bytes) -> tuple[dict[str, Any], str]:
    """Return a request and the model that it asks for."""
    try:
        content = read_json(body)
    except RefusedError as error:
        raise ApiError(413 if error.status == 413 else 400, str(error)) from None
    if not isinstance(content, dict):
        raise ApiError(400, "The body must be a JSON object.")
    model = content.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "`model` must be the name of a model.", param="model")
    return content, model


async def passed_on(
    endpoint: Endpoint,
    content: Mapping[str, Any],
    path: Passed,
    headers: Mapping[str, str],
    seconds: float,
) -> Response:
    """Return a provider's response as it came, or its stream.

    Parameters
    ----------
    endpoint : Endpoint
        Whose address and key are used.
    content : mapping
        The request.
    path : {"responses", "embeddings"}
    headers : mapping
        Those of the response.
    seconds : float
        How long a client may take to read a part of a stream.
    """
    try:
        if content.get("stream") is True:
            return await _stream(endpoint, content, path, headers, seconds)
        found = await endpoint.send(content, path)
        endpoint.parse(found)
    except (UpstreamError, ValueError) as error:
        raise client_error(error, endpoint) from None
    return Response(found, media_type="application/json", headers=dict(headers))


async def _stream(
    endpoint: Endpoint,
    content: Mapping[str, Any],
    path: Passed,
    headers: Mapping[str, str],
    seconds: float,
) -> Response:
    opened = endpoint.post(content, path)
    answer = await opened.__aenter__()

    async def lines() -> AsyncIterator[bytes]:
        rest = b""
        try:
            async for part in answer.content.iter_any():
                *whole, rest = (rest + part).split(b"\n")
                if whole:
                    yield endpoint.redacted(b"\n".join(whole) + b"\n")
            if rest:
                yield endpoint.redacted(rest)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # The client has a part of the answer already: tell it that the rest is missing.
            yield b"\nevent: error\n" + event(client_error(error, endpoint).content())

    async def close() -> None:
        with suppress(Exception):
            await opened.__aexit__(None, None, None)

    return PassedOn(lines(), close, headers, seconds)
