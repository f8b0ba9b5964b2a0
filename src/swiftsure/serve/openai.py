"""OpenAI's API: requests for text, the errors that its clients expect, and streams of events."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import JSONResponse, Response

from swiftsure.serve.http import SLICE, RefusedError, read_json

__all__ = [
    "DONE",
    "ApiError",
    "ApiRequest",
    "Kind",
    "as_stream",
    "encoded",
    "event",
    "parse_request",
    "refusal",
    "slice_of",
]

Kind = Literal["chat", "completions"]


@dataclass(frozen=True)
class ApiRequest:
    """A request as a client sent it.

    Attributes
    ----------
    kind : {"chat", "completions"}
    model : str
    fields : dict
        All other fields but those of streaming and those that are null, to be sent on.
    stream, usage : bool
        Whether to stream, and whether to end the stream with the usage.
    logprobs : bool
        Whether the client wants log-probabilities itself.
    """

    kind: Kind
    model: str
    fields: Mapping[str, Any]
    stream: bool
    usage: bool
    logprobs: bool


def parse_request(body: bytes, kind: Kind) -> ApiRequest:
    """Return the request in a body.

    Raises
    ------
    ApiError
        If it is not a request of this kind.
    """
    try:
        content = read_json(body, _decoded)
    except RefusedError as error:
        raise ApiError(413 if error.status == 413 else 400, str(error)) from None
    if not isinstance(content, dict):
        raise ApiError(400, "The body must be a JSON object.")
    model = content.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "`model` must be the name of a model.", param="model")
    main = "messages" if kind == "chat" else "prompt"
    value = content.get(main)
    if kind == "chat" and not _are_messages(value):
        text = "`messages` must be a list of at least one object with a `role`."
        raise ApiError(400, text, param=main)
    if kind == "completions" and not isinstance(value, str | list):
        raise ApiError(400, "`prompt` must be a text or a list.", param=main)
    stream = content.get("stream") or False
    options = content.get("stream_options") or {}
    if not isinstance(stream, bool):
        raise ApiError(400, "`stream` must be true or false.", param="stream")
    if not isinstance(options, dict):
        raise ApiError(400, "`stream_options` must be an object.", param="stream_options")
    wanted = content.get("logprobs")
    logprobs = wanted is not None and wanted is not False
    left_out = {"model", "stream", "stream_options"}
    fields = {
        # `null` is a field that is left out: passed on, it would undo a model's own parameter.
        name: each
        for name, each in content.items()
        if name not in left_out and each is not None
    }
    return ApiRequest(kind, model, fields, stream, options.get("include_usage") is True, logprobs)


def slice_of(request: ApiRequest, headers: Mapping[bytes, bytes]) -> str | None:
    """Return the slice that a request is of: `metadata.slice`, or the header."""
    metadata = request.fields.get("metadata")
    named = metadata.get("slice") if isinstance(metadata, Mapping) else None
    if isinstance(named, str):
        return named
    header = headers.get(SLICE)
    return None if header is None else header.decode("latin-1")


class ApiError(Exception):
    """An error that the client gets.

    Parameters
    ----------
    status : int
        HTTP status.
    message : str
    kind : str
        `error.type` of OpenAI's API.
    code, param : str, optional
    retry_after : float, optional
        Seconds, sent as `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.retry_after = retry_after

    def content(self) -> dict[str, Any]:
        """Return the body."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def refusal(error: ApiError, name: str | None = None) -> Response:
    """Return the response to a request, with its id, that is refused or failed."""
    headers = {} if name is None else {"x-request-id": name}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    return JSONResponse(error.content(), error.status, headers)


def encoded(content: Any) -> bytes:
    """Return JSON in ASCII, as any client can read it, with null for NaN and infinities."""
    try:
        return _ENCODER.encode(content).encode()
    except ValueError:
        finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
        return _ENCODER.encode(finite).encode()


def event(content: Any) -> bytes:
    """Return one event."""
    return b"data: " + encoded(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def as_stream(response: Mapping[str, Any], *, chat: bool, usage: bool) -> Iterator[bytes]:
    """Yield a whole response as the events that a stream of it would have had."""
    head = {name: response[name] for name in ("id", "created", "model") if name in response}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    given = response["choices"][0]
    index = {"index": given.get("index", 0)}
    end = {"finish_reason": given.get("finish_reason") or "stop"}
    more = {"logprobs": given["logprobs"]} if given.get("logprobs") is not None else {}
    if chat:
        message = {name: each for name, each in given["message"].items() if each is not None}
        message.setdefault("role", "assistant")
        yield event(
            {**head, "choices": [{**index, "delta": message, **more, "finish_reason": None}]}
        )
        yield event({**head, "choices": [{**index, "delta": {}, **end}]})
    else:
        yield event({**head, "choices": [{**index, "text": given["text"], **more, **end}]})
    if usage:
        yield event({**head, "choices": [], "usage": response.get("usage")})
    yield DONE


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _decoded(body: bytes) -> Any:
    return _DECODER.decode(body.decode(json.detect_encoding(body), "surrogatepass"))


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in value)
    )
