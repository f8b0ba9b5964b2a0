"""Small servers that speak OpenAI's protocol: scripted ones, and real language models."""

import asyncio
import json
import math
import time

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


def chat_response(text, probability=0.9, model="model", tokens=(10, 3)):
    """Return a whole answer of a chat model; `probability` may be a list of (token, logprob)."""
    pairs = probability
    if isinstance(probability, float):
        pairs = [(piece, math.log(probability)) for piece in text.split(" ") or [""]]
    content = [
        {"token": piece, "logprob": logprob, "top_logprobs": [{"token": piece, "logprob": logprob}]}
        for piece, logprob in pairs
    ]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "finish_reason": "stop",
                "logprobs": {"content": content, "refusal": None},
            }
        ],
        "usage": {
            "prompt_tokens": tokens[0],
            "completion_tokens": tokens[1],
            "total_tokens": sum(tokens),
        },
    }


class Upstream:
    """A model given as a function from the last message to (text, probability).

    `faults` maps words in a message to what happens instead of an answer.
    """

    def __init__(self, answer, model="model", faults=None):
        self.answer, self.model = answer, model
        self.faults = faults or {}
        self.bodies = []
        self.delay = 0.0
        routes = [
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def complete(self, request: Request):
        body = await request.json()
        self.bodies.append(body)
        chat = "messages" in body
        asked = body["messages"][-1]["content"] if chat else body["prompt"]
        if self.delay:
            await asyncio.sleep(self.delay)
        for word, fault in self.faults.items():
            if isinstance(asked, str) and word in asked:
                self.request = request
                return await fault(self, body)
        text, probability = self.answer(asked)
        found = chat_response(text, probability, self.model)
        if not chat:
            found["object"] = "text_completion"
            choice = found["choices"][0]
            given = choice.pop("logprobs")["content"]
            del choice["message"]
            choice["text"] = text
            choice["logprobs"] = {
                "tokens": [each["token"] for each in given],
                "token_logprobs": [each["logprob"] for each in given],
                "top_logprobs": None,
            }
        if body.get("stream"):
            return StreamingResponse(self.chunks(found, chat), media_type="text/event-stream")
        return JSONResponse(found)

    async def chunks(self, found, chat):
        head = {name: found[name] for name in ("id", "created", "model")}
        choice = found["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        for k, piece in enumerate(text.split(" ")):
            words = piece if k == 0 else " " + piece
            part = {"delta": {"content": words}} if chat else {"text": words}
            chunk = {**head, "choices": [{"index": 0, **part, "finish_reason": None}]}
            yield f"data: {json.dumps(chunk)}\n\n"
            await asyncio.sleep(0)
        part = {"delta": {}} if chat else {"text": ""}
        chunk = {**head, "choices": [{"index": 0, **part, "finish_reason": "stop"}]}
        yield f"data: {json.dumps(chunk)}\n\n"
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': found['usage']})}\n\n"
        yield "data: [DONE]\n\n"


def status(code, **headers):
    async def fault(_upstream, _body):
        error = {"error": {"message": "no", "type": "error", "code": None, "param": None}}
        return JSONResponse(error, code, headers)

    return fault


def raw(body, kind="application/json"):
    async def fault(_upstream, _body):
        return Response(body, media_type=kind)

    return fault


async def silent(_upstream, _body):
    await asyncio.sleep(3)
    return JSONResponse(chat_response("late"))


async def cut(_upstream, body):
    """Send a part of an answer, and break the connection."""

    async def parts():
        if body.get("stream"):
            chunk = {"id": "1", "choices": [{"index": 0, "delta": {"content": "half of"}}]}
            yield f"data: {json.dumps(chunk)}\n\n"
        else:
            yield '{"choices": [{"mess'
        await asyncio.sleep(0.01)
        if body.get("stream"):
            return  # ends without [DONE]
        yield ""

    return StreamingResponse(parts(), media_type="text/event-stream")


async def wrong_logprobs(upstream, _body):
    found = chat_response("odd", 0.9, upstream.model)
    for token in found["choices"][0]["logprobs"]["content"]:
        token["logprob"] = 3.0
    return JSONResponse(found)


async def no_logprobs(upstream, _body):
    found = chat_response("odd", 0.9, upstream.model)
    found["choices"][0]["logprobs"] = None
    return JSONResponse(found)


FAULTS = {
    "SILENT": silent,
    "CUT": cut,
    "BUSY": status(429, **{"Retry-After": "0"}),
    "BROKEN": status(500),
    "UNAVAILABLE": status(503, **{"Retry-After": "0"}),
    "REFUSED": status(400),
    "KEY": status(401),
    "NOT JSON": raw("<html>"),
    "NOT UTF-8": raw(json.dumps(chat_response("HALF")).encode().replace(b"HALF", b"\xed\xa0\x80")),
    "LIST": raw("[]"),
    "EMPTY": raw("{}"),
    "NULL": raw("null"),
    "NO CHOICE": raw('{"choices": []}'),
    "NUMBER": raw('{"choices": [{"message": {"content": 5}}]}'),
    "USAGE": raw(
        json.dumps(
            chat_response("odd") | {"usage": {"prompt_tokens": -5, "completion_tokens": "x"}}
        )
    ),
    "WRONG LOGPROBS": wrong_logprobs,
    "NO LOGPROBS": no_logprobs,
}
