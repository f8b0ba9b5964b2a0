"""`Completions`: answers OpenAI's requests for text from the engine of a server."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from swiftsure.monitor import request_ids
from swiftsure.serve.disconnect import GoneError, while_connected
from swiftsure.serve.engine import InvalidRequestError, Part
from swiftsure.serve.http import RefusedError, check_json, off_loop, read_body
from swiftsure.serve.openai import (
    DONE,
    ApiError,
    ApiRequest,
    Kind,
    encoded,
    event,
    parse_request,
    refusal,
    slice_of,
)
from swiftsure.serve.queueing import BusyError, Served, Submission

if TYPE_CHECKING:
    from swiftsure.serve.app import ModelService

__all__ = ["Completions"]

log = logging.getLogger("swiftsure.serve")

PASSED = ("temperature", "top_p", "seed", "stop")
"""Fields that engines know by the same name."""
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier")
"""Fields on which an answer does not depend."""


class Completions:
    """Answers /v1/chat/completions, /v1/completions and /v1/models.

    A client that goes away gives its request up. The name of the model is the engine's.
    """

    def __init__(self, service: "ModelService") -> None:
        self.service, self.name = service, service.description.name
        self.created = int(time.time())

    def answering(self) -> Mapping[str, Any]:
        """Return what answers POST requests, by path."""
        return {
            "/v1/chat/completions": partial(self.answer, kind="chat"),
            "/v1/completions": partial(self.answer, kind="completions"),
        }

    def routes(self) -> list[Route]:
        """Return the routes of the model's name."""
        return [
            Route("/v1/models", self.service.protected({"GET": self._models})),
            Route("/v1/models/{name:path}", self.service.protected({"GET": self._model})),
        ]

    async def answer(self, scope: Scope, receive: Receive, send: Send, *, kind: Kind) -> None:
        """Answer a request, at once or as a stream."""
        service, began = self.service, time.perf_counter()
        (name,) = request_ids(1)
        try:
            headers = dict(scope["headers"])
            service.access.check(headers)
            check_json(headers)
            limits = service.limits
            body = await read_body(headers, receive, limits.max_body, limits.timeout)
            request = await off_loop(body, lambda: parse_request(body, kind))
            sample = service.engine.inputs.sample(self._sample(request))
            async with while_connected(receive):
                done, parts = self._submitted(name, sample, slice_of(request, headers))
                try:
                    await self._respond(request, name, began, (done, parts), scope, receive, send)
                finally:
                    done.cancel()
        except GoneError:
            service.metrics.count(499)
        except Exception as error:
            await self._sent(refusal(_api_error(error, service.limits.timeout), name))(
                scope, receive, send
            )

    def _sample(self, request: ApiRequest) -> dict[str, Any]:
        """Return a request as `inputs.sample` takes it."""
        if request.model != self.name:
            text = f"There is no model {request.model[:100]!r}; ask for {self.name!r}."
            raise ApiError(404, text, code="model_not_found", param="model")
        main = "messages" if request.kind == "chat" else "prompt"
        fields = {k: v for k, v in request.fields.items() if k not in IGNORED}
        found: dict[str, Any] = {main: fields.pop(main), "stream": request.stream}
        if isinstance(found[main], list) and main == "prompt":
            raise ApiError(400, "`prompt` must be one text.", param="prompt")
        found |= {name: fields.pop(name) for name in PASSED if name in fields}
        for alias in ("max_completion_tokens", "max_tokens"):
            if alias in fields:
                found["max_tokens"] = fields.pop(alias)
        for name, value in fields.items():  # what asks for nothing special may be there
            if value not in (1 if name in ("n", "best_of") else 0, False):
                raise ApiError(400, f"`{name[:60]}` is not supported here.", param=name[:60])
        return found

    def _submitted(self, name: str, sample: Any, slice_name: str | None) -> tuple[Any, Any]:
        done = asyncio.get_running_loop().create_future()
        parts: asyncio.Queue[Part] | None = asyncio.Queue() if sample.stream else None
        self.service.batcher.submit_all([Submission(name, sample, slice_name, done, parts)])
        return done, parts

    async def _respond(
        self,
        request: ApiRequest,
        name: str,
        began: float,
        running: tuple[Any, Any],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        done, parts = running
        until = asyncio.get_running_loop().time() + self.service.limits.timeout
        if parts is None:
            async with asyncio.timeout_at(until):
                served = _served(await done)
            self.service.note(served, began)
            body = self._whole(request, name, served)
            response = Response(encoded(body), headers=_headers(name, served))
            response.headers["content-type"] = "application/json"
            await self._sent(response)(scope, receive, send)
            return
        async with asyncio.timeout_at(until):
            first = await _next(done, parts)
        if first is None:
            _served(done.result())  # an error before the first part has a status of its own
        stream = self._events(request, name, began, first, running, until)
        response = StreamingResponse(
            stream, media_type="text/event-stream", headers={"x-request-id": name}
        )
        self.service.metrics.count(200)
        await response.stream_response(send)

    async def _events(
        self,
        request: ApiRequest,
        name: str,
        began: float,
        part: Part | None,
        running: tuple[Any, Any],
        until: float,
    ) -> AsyncIterator[bytes]:
        done, parts = running
        try:
            if request.kind == "chat":
                yield event(self._chunk(request, name, {"role": "assistant", "content": ""}))
            while part is not None:
                delta = {"content": part.content} if request.kind == "chat" else part.content
                yield event(self._chunk(request, name, delta))
                async with asyncio.timeout_at(until):
                    part = await _next(done, parts)
            served = _served(done.result())
            self.service.note(served, began)
            empty: Any = {} if request.kind == "chat" else ""
            reason = served.answer.content["finish_reason"]
            yield event(self._chunk(request, name, empty, reason, served))
            if request.usage:
                last = self._chunk(request, name, empty)
                yield event({**last, "choices": [], "usage": _usage(served)})
            yield DONE
        except Exception as error:  # a part is there already: say that the rest is missing
            yield event(_api_error(error, self.service.limits.timeout).content())

    def _whole(self, request: ApiRequest, name: str, served: Served) -> dict[str, Any]:
        content, chat = served.answer.content, request.kind == "chat"
        said: dict[str, Any] = {"text": content["text"]}
        if chat:
            said = {"message": {"role": "assistant", "content": content["text"]}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": content["finish_reason"]}
        return {
            "id": name,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [choice],
            "usage": _usage(served),
            "swiftsure": _how(served),
        }

    def _chunk(
        self,
        request: ApiRequest,
        name: str,
        delta: Any,
        reason: str | None = None,
        served: Served | None = None,
    ) -> dict[str, Any]:
        chat = request.kind == "chat"
        own = {"delta" if chat else "text": delta, "logprobs": None, "finish_reason": reason}
        found = {
            "id": name,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self.created,
            "model": self.name,
            "choices": [{"index": 0, **own}],
        }
        return found if served is None else {**found, "swiftsure": _how(served)}

    def _sent(self, response: Response) -> Response:
        self.service.metrics.count(response.status_code)
        return response

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] == self.name:
            return JSONResponse(self._about())
        text = f"There is no such model; ask for {self.name!r}."
        return refusal(ApiError(404, text, code="model_not_found", param="model"))

    def _about(self) -> dict[str, Any]:
        more = {"object": "model", "created": self.created, "owned_by": "swiftsure"}
        return {"id": self.name, **more}


async def _next(done: "asyncio.Future[Any]", parts: "asyncio.Queue[Part]") -> Part | None:
    """Return the next part; None if the answer is complete, or failed."""
    if parts.empty() and not done.done():
        getting = asyncio.ensure_future(parts.get())
        try:
            await asyncio.wait([getting, done], return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
    return None if parts.empty() else parts.get_nowait()


def _served(found: Served | Exception) -> Served:
    if isinstance(found, Exception):
        raise found
    return found


def _how(served: Served) -> dict[str, Any]:
    return {"exit": served.answer.exit, "full_model": served.mode.full}


def _usage(served: Served) -> dict[str, int]:
    content = served.answer.content
    prompt, new = content["prompt_tokens"], content["completion_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _headers(name: str, served: Served) -> dict[str, str]:
    return {"x-request-id": name, "x-swiftsure-exit": str(served.answer.exit)}


def _api_error(error: Exception, seconds: float) -> ApiError:
    """Return what the client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RefusedError):
        code = {401: "invalid_api_key", 403: "foreign_origin"}.get(error.status)
        return ApiError(error.status, str(error), code=code)
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error))
    if isinstance(error, BusyError):
        text = f"The server is busy: {error}."
        return ApiError(429, text, "rate_limit_error", code="busy", retry_after=1.0)
    if isinstance(error, TimeoutError):
        return ApiError(504, f"There was no answer within {seconds:g} s.", "api_error")
    log.error("a request failed: %s: %s", type(error).__name__, error)
    return ApiError(500, "The server failed on this request.", "api_error")
