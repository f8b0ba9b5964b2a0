"""The OpenAPI document of a server."""

from typing import Any

from swiftsure import __version__
from swiftsure.serve.engine import Description
from swiftsure.serve.http import JSON
from swiftsure.serve.request_body import ARROW, NPY

__all__ = ["openapi"]

TEXT = {"type": "string"}
ERRORS = {
    "400": "The body was cut short.",
    "401": "The token is missing or wrong.",
    "413": "The body is too large.",
    "422": "The request is invalid; `error` says why.",
    "429": "The server is busy: try again later.",
    "504": "There was no answer in time.",
}
ANSWERED = {
    "id": TEXT,
    "exit": {"type": "integer", "description": "From 0; the last is the full model's."},
    "confidence": {"type": ["number", "null"]},
    "full_model": {"type": "boolean", "description": "Whether the full model had to answer."},
}
OTHERS = {
    "/health": "Whether the server answers, and how",
    "/v2/health/ready": "The same: 503 until requests are answered",
    "/policy": "The policy in force, and what it promises",
    "/labels": "Requests whose label is needed",
    "/metrics": "Metrics in Prometheus' format",
    "/status": "What the live page shows",
    "/events": "The status as server-sent events",
}


def openapi(
    name: str, described: Description | None = None, *, completions: bool = False
) -> dict[str, Any]:
    """Return the document: of /predict if an engine is described, and of OpenAI's paths."""
    paths: dict[str, Any] = {}
    if described is not None:
        paths["/predict"] = {"post": _predict(described)}
        completions = completions or described.completions
    if completions:
        for path, main in (("chat/completions", "messages"), ("completions", "prompt")):
            paths[f"/v1/{path}"] = {"post": _completion(name, main)}
    for path, summary in OTHERS.items():
        paths[path] = {"get": _operation(summary, {"type": "object"})}
    changes = {"/policy": "Install a policy", "/labels": "Give labels of audited requests"}
    for path, summary in changes.items():
        paths[path]["post"] = _operation(summary, {"type": "object"}, {"type": "object"})
    paths["/resume"] = {"post": _operation("Put an alarm aside", {"type": "object"})}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"{name} under a Swiftsure policy", "version": __version__},
        "paths": paths,
        "security": [{}, {"token": []}],
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _predict(described: Description) -> dict[str, Any]:
    sample = dict(described.inputs)
    slice_name = {"type": ["string", "null"], "description": "For a policy of slices."}
    one = {"inputs": sample, "id": TEXT, "slice": slice_name}
    several = {
        "samples": {"type": "array", "items": sample, "minItems": 1},
        "id": TEXT,
        "slices": {"type": "array", "items": slice_name},
    }
    body = {
        "oneOf": [
            {"type": "object", "properties": one, "required": ["inputs"]},
            {"type": "object", "properties": several, "required": ["samples"]},
        ]
    }
    answer = {"type": "object", "properties": {**ANSWERED, **described.outputs}}
    found = _operation("Answer one or several samples", answer, body)
    content = found["requestBody"]["content"]
    if described.example is not None:
        content[JSON]["example"] = {"inputs": described.example}
    if described.arrays:
        binary = {"schema": {"type": "string", "format": "binary"}}
        content |= {NPY[0]: binary, ARROW: binary}
    found["parameters"] = [
        {"name": "x-request-id", "in": "header", "schema": TEXT},
        {"name": "x-swiftsure-slice", "in": "header", "schema": TEXT},
    ]
    return found


def _completion(name: str, main: str) -> dict[str, Any]:
    messages = {"type": "array", "items": {"type": "object"}}
    fields = {
        "model": {"type": "string", "examples": [name]},
        main: messages if main == "messages" else TEXT,
        "max_tokens": {"type": "integer"},
        "stream": {"type": "boolean"},
    }
    body = {"type": "object", "properties": fields, "required": ["model", main]}
    return _operation("As OpenAI's API", {"type": "object"}, body)


def _operation(summary: str, answer: Any, body: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Answered", "content": {JSON: {"schema": answer}}},
            **{status: {"description": text} for status, text in ERRORS.items()},
        },
    }
    if body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return found
