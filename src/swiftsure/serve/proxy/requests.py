"""Requests to the proxy, checked, and errors in the form that OpenAI's clients expect."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from swiftsure.cascade.request_kinds import unlike
from swiftsure.serve.http import SLICE, RefusedError, read_json

__all__ = [
    "Asked",
    "ProxyError",
    "asked_of",
    "canonical",
    "own_spelling",
    "same_json",
    "slice_of",
    "uncovered",
]

Kind = Literal["chat", "completions"]

NEUTRAL = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", "user", "metadata", "store"}
    | {"logprobs", "top_logprobs", "n", "best_of", "service_tier", "safety_identifier"}
)
"""Fields on which the text of an answer does not depend, or that are checked apart."""

ALIASES = {"max_completion_tokens": "max_tokens"}
"""Parameters that mean the same as another one, whose name is used to compare them."""


def canonical(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with one name for those that mean the same.

    Examples
    --------
    >>> canonical({"max_completion_tokens": 5})
    {'max_tokens': 5}
    """
    return {ALIASES.get(name, name): value for name, value in parameters.items()}


def own_spelling(fields: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's fields with the names that a model's own parameters have.

    A model that got both names of one parameter would refuse the request.

    Examples
    --------
    >>> own_spelling({"max_tokens": 5}, {"max_completion_tokens": 9})
    {'max_completion_tokens': 5}
    """
    names = {ALIASES.get(name, name): name for name in parameters}
    return {names.get(ALIASES.get(name, name), name): value for name, value in fields.items()}


class ProxyError(Exception):
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


@dataclass(frozen=True)
class Asked:
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


def asked_of(body: bytes, kind: Kind) -> Asked:
    """Return the request in a body.

    Raises
    ------
    ProxyError
        If it is not a request of this kind.
    """
    try:
        content = read_json(body, _decoded)
    except RefusedError as error:
        raise ProxyError(413 if error.status == 413 else 400, str(error)) from None
    if not isinstance(content, dict):
        raise ProxyError(400, "The body must be a JSON object.")
    model = content.get("model")
    if not isinstance(model, str) or not model:
        raise ProxyError(400, "`model` must be the name of a model.", param="model")
    main = "messages" if kind == "chat" else "prompt"
    value = content.get(main)
    if kind == "chat" and not _are_messages(value):
        text = "`messages` must be a list of at least one object with a `role`."
        raise ProxyError(400, text, param=main)
    if kind == "completions" and not isinstance(value, str | list):
        raise ProxyError(400, "`prompt` must be a text or a list.", param=main)
    stream = content.get("stream") or False
    options = content.get("stream_options") or {}
    if not isinstance(stream, bool):
        raise ProxyError(400, "`stream` must be true or false.", param="stream")
    if not isinstance(options, dict):
        raise ProxyError(400, "`stream_options` must be an object.", param="stream_options")
    wanted = content.get("logprobs")
    logprobs = wanted is not None and wanted is not False
    left_out = {"model", "stream", "stream_options"}
    fields = {
        # `null` is a field that is left out: passed on, it would undo a model's own parameter.
        name: each
        for name, each in content.items()
        if name not in left_out and each is not None
    }
    return Asked(kind, model, fields, stream, options.get("include_usage") is True, logprobs)


def slice_of(asked: Asked, headers: Mapping[bytes, bytes]) -> str | None:
    """Return the slice that a request is of: `metadata.slice`, or the header."""
    metadata = asked.fields.get("metadata")
    named = metadata.get("slice") if isinstance(metadata, Mapping) else None
    if isinstance(named, str):
        return named
    header = headers.get(SLICE)
    return None if header is None else header.decode("latin-1")


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


def uncovered(
    asked: Asked,
    kinds: Collection[Kind],
    parameters: Mapping[str, Any],
    features: Collection[str] | None = None,
) -> str | None:
    """Return why a policy says nothing about a request; None if it covers it.

    Parameters
    ----------
    kinds : set of "chat" and "completions"
        Of the models that were calibrated. If they differ, no request is for all of them.
    parameters : mapping
        With which they were calibrated. A request may leave them out, or must have the same.
    features : set of str, optional
        What the messages of the calibration were like; see `cascade.request_kinds`.
    """
    fields = asked.fields
    if {asked.kind} != set(kinds):
        return f"the policy is for {' and '.join(sorted(kinds))}"
    for name in ("n", "best_of"):
        if not same_json(fields.get(name, 1), 1):
            return f"`{name}` is not 1"
    if asked.kind == "completions" and not isinstance(fields["prompt"], str):
        return "`prompt` is not one text"
    known = canonical(parameters)
    for name, value in fields.items():
        if name in NEUTRAL:
            continue
        meant = ALIASES.get(name, name)
        if meant not in known:
            return f"`{name[:60]}` was not set when the policy was made"
        if not same_json(value, known[meant]):
            return f"`{name[:60]}` has another value than when the policy was made"
    return None if features is None else unlike(fields, features)


def same_json(one: Any, other: Any) -> bool:
    """Return whether two values are the same in JSON, where true is not 1.

    Examples
    --------
    >>> same_json(0, 0.0), same_json(0, False)
    (True, False)
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_json(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
