"""The web application of a server of models: `create_app`, and /predict."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from swiftsure.monitor import request_ids
from swiftsure.monitor.ids import check_request_id
from swiftsure.serve.batching import Batcher
from swiftsure.serve.completions import Completions
from swiftsure.serve.engine import Engine, Inputs, InvalidRequestError, Part
from swiftsure.serve.http import SLICE, RefusedError, content_type, off_loop, read_body
from swiftsure.serve.limits import Limits
from swiftsure.serve.live import LiveStatus
from swiftsure.serve.metrics import Metrics
from swiftsure.serve.openapi import openapi
from swiftsure.serve.policy_manager import PolicyManager
from swiftsure.serve.queueing import BusyError, Outcome, Served, Submission
from swiftsure.serve.request_body import ARROW, JSON, NPY, Parsed, check_count, parse_body
from swiftsure.serve.service import Answering, Service
from swiftsure.serve.workers import WorkerEngine

__all__ = ["create_app"]

log = logging.getLogger("swiftsure.serve")


class _Asked(NamedTuple):
    """A request for predictions: its id, and its samples, checked; errors where they are wrong."""

    name: str
    samples: "list[Any | InvalidRequestError]"
    slices: list[str | None]
    several: bool


def create_app(
    engine: Engine | Sequence[Engine],
    limits: Limits | None = None,
    *,
    manager: PolicyManager | None = None,
    audit_rate: float = 0.0,
    token: str | None = None,
) -> Starlette:
    """Return an ASGI application that serves an engine.

    Parameters
    ----------
    engine : Engine or several
        Several engines, such as `WorkerEngine`s, answer batches side by side.
    limits : Limits, optional
    manager : PolicyManager, optional
        Decides which policy answers, and watches its promise; by default the engine's own policy
        answers, and nothing is watched.
    audit_rate : float
        Probability that a request is audited; needs a manager that watches.
    token : str, optional
        Bearer token that all requests must have, except those to /health and the page, which holds
        no data until it is given the token. Without one, no policy can be installed over HTTP.

    Notes
    -----
    The batcher starts with the application and is `app.state.service.batcher` while it runs. At
    the end, all accepted requests are answered and the waiting audits are made.
    """
    engines: list[Engine] = list(engine) if isinstance(engine, Sequence) else [engine]
    own = PolicyManager(engines[0].policy) if manager is None else manager
    return ModelService(engines, limits or Limits(), own, audit_rate, token).application()


class ModelService(Service):
    """Answers from engines, in batches.

    Attributes
    ----------
    batcher : Batcher
        While the application runs.
    """

    batcher: Batcher

    def __init__(
        self,
        engines: list[Engine],
        limits: Limits,
        manager: PolicyManager,
        audit_rate: float,
        token: str | None,
    ) -> None:
        if audit_rate and (manager.audit_log is None or manager.audit_log.monitor is None):
            raise ValueError("`audit_rate` needs a manager that watches.")
        manager.check_with(engines[0])
        live = LiveStatus(engines[0].n_exits, manager)
        super().__init__(manager, live, token, max_body=limits.max_body, timeout=limits.timeout)
        self.engines, self.engine = engines, engines[0]
        self.limits, self.audit_rate = limits, audit_rate
        self.description = self.engine.describe()
        self.completions = Completions(self) if self.description.completions else None
        costs = self.engine.costs.items()
        self._alone = {unit: each.full for unit, each in costs}
        self._spent = [
            {unit: each.exits[k] for unit, each in costs} for k in range(self.engine.n_exits)
        ]

    def answering(self) -> Mapping[str, Answering]:
        """Answer /predict, and what more the engine can."""
        more = {} if self.completions is None else self.completions.answering()
        paths = {"/predict": self.predict, **more}
        return {path: Answering(each) for path, each in paths.items()}

    def more_routes(self) -> list[Route]:
        """Return the routes of the model's name, for clients of OpenAI's API."""
        return [] if self.completions is None else self.completions.routes()

    def describe(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        return openapi(self.description.name, self.description)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the batcher; at the end, answer what was accepted and audit it."""
        limits, loop = self.limits, asyncio.get_running_loop()

        def deliver(outcomes: list[Outcome]) -> None:
            loop.call_soon_threadsafe(_set_futures, outcomes)

        self.batcher = Batcher(
            self.engines,
            limits,
            audit_rate=self.audit_rate,
            on_audit=self.manager.audit,
            on_idle=self._tick,
            mode=self.manager.mode,
            deliver=deliver,
        )
        self.live.load, self.manager.pending = self.batcher, self.batcher.audits.pending
        self.metrics = Metrics(self.batcher, self.manager, self.live)
        try:
            yield
        finally:
            await run_in_threadpool(self.batcher.close)
            await run_in_threadpool(self.manager.close)
            for engine in self.engines:
                if isinstance(engine, WorkerEngine):
                    await run_in_threadpool(engine.close)

    def follow_mode(self) -> None:
        """Answer as the manager says from now on."""
        self.batcher.mode = self.manager.mode

    def _tick(self, _batcher: Batcher) -> None:
        self.manager.tick()
        self.follow_mode()
        self.live.tick()

    async def predict(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one or several samples, sent as JSON, .npy or Arrow."""
        began, own = time.perf_counter(), {}
        try:
            headers = dict(scope["headers"])
            self.access.check(headers)
            asked = await self._asked(headers, receive)
            own = {"id": asked.name}
            if asked.several:
                status, content = await self._several(asked, began)
            else:
                (sample,) = asked.samples
                if isinstance(sample, InvalidRequestError):
                    raise sample
                (found,) = await self._answers([(asked.name, sample, asked.slices[0])])
                if isinstance(found, Exception):
                    raise found
                status, content = 200, {**own, **_content(found)}
                self.note(found, began)
        except RefusedError as error:
            status, content = error.status, {**own, "error": str(error)}
        except InvalidRequestError as error:
            status, content = 422, {**own, "error": str(error)}
        except BusyError as error:
            status, content = 429, {**own, "error": f"The server is busy: {error}."}
        except TimeoutError:
            text = f"There was no answer within {self.limits.timeout:g} s."
            status, content = 504, {**own, "error": text}
        except Exception:
            log.exception("a request failed")
            status, content = 500, {**own, "error": "The server failed on this request."}
        self.metrics.count(status)
        body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
        reply = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if status == 429:
            reply.append((b"retry-after", b"1"))
        await send({"type": "http.response.start", "status": status, "headers": reply})
        await send({"type": "http.response.body", "body": body})

    async def _several(self, asked: _Asked, began: float) -> tuple[int, dict[str, Any]]:
        """Answer several samples; one that is wrong fails alone."""
        name = asked.name
        found: list[Served | Exception] = list(asked.samples)
        good = [k for k, sample in enumerate(found) if not isinstance(sample, InvalidRequestError)]
        answers = await self._answers(
            [(f"{name}.{k}", asked.samples[k], asked.slices[k]) for k in good]
        )
        for k, answer in zip(good, answers, strict=True):
            found[k] = answer
        content = []
        for k, each in enumerate(found):
            if isinstance(each, Served):
                content.append({"id": f"{name}.{k}", **_content(each)})
                self.note(each, began)
                continue
            mine = isinstance(each, InvalidRequestError)
            if not mine:
                log.error("a sample failed: %s: %s", type(each).__name__, each)
            text = str(each) if mine else "The server failed on this sample."
            status = 422 if mine else 500
            content.append({"id": f"{name}.{k}", "error": text, "status": status})
        return 200, {"id": name, "answers": content}

    async def _answers(
        self, samples: list[tuple[str, Any, str | None]]
    ) -> list[Served | Exception]:
        """Return one outcome per sample, or raise `TimeoutError` and withdraw those that wait."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Served | Exception]] = [loop.create_future() for _ in samples]
        if not samples:
            return []
        self.batcher.submit_all(
            [Submission(*each, done) for each, done in zip(samples, futures, strict=True)]
        )
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            _withdraw(futures)

        timer = loop.call_later(self.limits.timeout, expire)
        try:
            return [await done for done in futures]
        except asyncio.CancelledError:
            if expired:  # else the client is gone
                raise TimeoutError from None
            _withdraw(futures)
            raise
        finally:
            timer.cancel()

    def note(self, served: Served, began: float) -> None:
        """Count an answer."""
        exit_, full = served.answer.exit, served.mode.full
        self.live.exits[exit_] += 1
        spent, alone = self._alone if full else self._spent[exit_], self._alone
        if served.answer.costs is not None:
            own = served.answer.costs.items()
            spent = {unit: cost for unit, (cost, _) in own}
            alone = {unit: cost for unit, (_, cost) in own}
        self.live.bill.answer(spent, alone)
        self.metrics.answered(exit_, full=full, seconds=time.perf_counter() - began)

    async def _asked(self, headers: dict[bytes, bytes], receive: Receive) -> _Asked:
        """Return what a request asks for."""
        kind = content_type(headers)
        if kind not in (JSON, ARROW, *NPY):
            raise RefusedError(415, f"The body must be {JSON}, {NPY[0]} or {ARROW}.")
        body = await read_body(headers, receive, self.limits.max_body, self.limits.timeout)
        return await off_loop(body, lambda: self._read(kind, body, headers))

    def _read(self, kind: str, body: bytes, headers: dict[bytes, bytes]) -> _Asked:
        most, inputs = self.limits.max_queue, self.engine.inputs
        parsed = parse_body(kind, body, most)
        name = _request_id(parsed.id, headers)
        samples = inputs.samples(parsed.inputs) if parsed.samples is None else parsed.samples
        if samples is None:
            slices = _slices(parsed, headers, 1)
            return _Asked(name, [_checked(inputs, parsed.inputs)], slices, False)
        check_count(len(samples), most)
        slices = _slices(parsed, headers, len(samples))
        return _Asked(name, [_checked(inputs, each) for each in samples], slices, True)


def _content(served: Served) -> dict[str, Any]:
    answer = served.answer
    return {
        **answer.content,
        "exit": answer.exit,
        "confidence": answer.confidence,
        "full_model": served.mode.full,
    }


def _checked(inputs: Inputs, given: Any) -> Any:
    """Return a sample, or the error of one that is wrong."""
    try:
        return inputs.sample(given)
    except InvalidRequestError as error:
        return error


def _request_id(given: object, headers: dict[bytes, bytes]) -> str:
    """Return the caller's own id, from the body or a header, or a new one."""
    if given is None:
        header = headers.get(b"x-request-id")
        if header is None:
            return request_ids(1)[0]
        given = header.decode("latin-1")
    try:
        return check_request_id("id", given)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(str(error)) from None


def _slices(parsed: Parsed, headers: Mapping[bytes, bytes], n: int) -> list[str | None]:
    """Return the slice of each sample, from the body or else from the header for all."""
    if parsed.slices is None:
        header = headers.get(SLICE)
        return [None if header is None else header.decode("latin-1")] * n
    if len(parsed.slices) != n:
        raise InvalidRequestError(f"`slices` must name the slice of each of {n} samples.")
    return parsed.slices


def _set_futures(outcomes: list[Outcome]) -> None:
    """Hand results over to the requests that wait for them, in the event loop."""
    for done, outcome in outcomes:
        if isinstance(outcome, Part):
            done.put_nowait(outcome)
        elif not done.done():
            done.set_result(outcome)


def _withdraw(futures: "list[asyncio.Future[Any]]") -> None:
    for done in futures:
        done.cancel()
