"""Audits: a share of requests also goes to the last model, after the answer was sent."""

import asyncio
import logging
import random
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from swiftsure.cascade import Answer, UpstreamError
from swiftsure.cascade.answer_losses import AnswerLoss, answer_tables
from swiftsure.losses import LOSSES, Loss
from swiftsure.serve.batching import Audited, Mode, Pending
from swiftsure.serve.engine import Answer as ServedAnswer
from swiftsure.serve.engine import Comparison, UnansweredError
from swiftsure.serve.guarding import Guard
from swiftsure.serve.proxy.asking import Found, Upstreams
from swiftsure.serve.proxy.bill import Bill
from swiftsure.serve.proxy.requests import Asked

__all__ = ["Audits", "CascadeEngine"]

log = logging.getLogger("swiftsure.serve")

TRIES = 5
"""How often an audit asks a last model that is at its rate limit."""


class CascadeEngine:
    """What the server's parts need to know of a cascade: how answers are compared.

    The sample of an audit is the last model's answer, or the error that came instead of it.
    """

    def __init__(self, n_exits: int) -> None:
        self.n_exits = n_exits

    def compare(self, sample: Any, answer: ServedAnswer, loss: str) -> Comparison:
        """Return how an answer compares with the last model's."""
        if answer.exit == self.n_exits - 1:
            return Comparison(0.0)
        if isinstance(sample, Exception):
            raise sample
        return Comparison(inconsistency(LOSSES.choose(loss), answer.output, sample))


def inconsistency(loss: Loss | AnswerLoss, served: Answer, full: Answer) -> float:
    """Return the loss of one answer against the last model's."""
    _, against_last = answer_tables(loss, [[served], [full]], None)
    return float(np.asarray(against_last)[0, 0])


NOT_ASKED = object()
"""Stands for the last model's answer if the proxy ended before it could be asked."""


class Turn:
    """The place of an audit among all, in the order in which their requests were accepted.

    Attributes
    ----------
    over : future of bool
        Set when later audits may be written: True, or False if they must not, because this one
        never will be.
    """

    def __init__(self, before: "Turn | None") -> None:
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._before = None if before is None else before.over

    async def comes(self) -> bool:
        """Wait for the audits before this one; return whether it may be written."""
        return self._before is None or await self._before


class Audits:
    """Chooses requests at random, asks the last model about them, and tells the monitor.

    Whether a request is audited, and whether its audit is dropped, is decided when it is accepted,
    from a random number and earlier requests alone, and losses are written in the order in which
    requests were accepted. So the audited losses keep a mean of at most ε given the past if the
    promise holds.

    Parameters
    ----------
    upstreams : Upstreams
    guard : Guard
    engine : CascadeEngine
    rate : float
        Share of requests.
    most : int
        How many audits may be under way; more are dropped.
    bill : Bill
        Where the costs of audits are added.

    Attributes
    ----------
    dropped : int
        How many audits were dropped.
    pending : Pending
        Audits of answers that were sent.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        guard: Guard,
        engine: CascadeEngine,
        rate: float,
        most: int,
        bill: Bill,
    ) -> None:
        self._bill = bill
        self._closing = asyncio.Event()
        self._one_by_one = asyncio.Lock()
        self._guard, self._rate = guard, rate
        self._engine: Any = engine
        self.dropped = 0
        self.pending = Pending()
        self._upstreams, self._most = upstreams, most
        self._chosen = 0
        self._random = random.SystemRandom()
        self._tasks: set[asyncio.Task[None]] = set()
        self._newest: Turn | None = None
        self._waiting: set[Turn] = set()  # of requests that have no answer yet
        # One thread, so that losses are written one after another, off the event loop.
        self._writer = ThreadPoolExecutor(1, "swiftsure-audits")

    def choose(self) -> Turn | None:
        """Return a turn if a request that was just accepted will be audited; pass it to `begin`."""
        if self._random.random() >= self._rate:
            return None
        if self._chosen >= self._most:
            self.dropped += 1
            return None
        self._chosen += 1
        self._newest = Turn(self._newest)
        self._waiting.add(self._newest)
        return self._newest

    def begin(self, turn: Turn, request: str, asked: Asked, found: Found | None) -> None:
        """Audit an answer in the background; None for a request that got none.

        A request without an answer counts as no loss, since nobody got a wrong one. To leave it
        out would be a choice that depends on its content.
        """
        if turn in self._waiting:  # not closed
            self._waiting.remove(turn)
            self.pending.begin(turn)
            self._start(self._audit(turn, request, asked, found, self._guard.mode))

    async def look(self) -> None:
        """Let the watcher look at its logs."""
        await asyncio.get_running_loop().run_in_executor(self._writer, self._guard.tick)

    async def close(self) -> None:
        """Finish the audits that are under way, up to the first that cannot be made yet.

        It cannot if its request has no answer yet, or if the last model asked for a pause.
        """
        self._closing.set()
        for turn in self._waiting:
            turn.over.set_result(False)
        self._waiting.clear()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._guard.close)
        self._writer.shutdown()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _audit(
        self, turn: Turn, request: str, asked: Asked, found: Found | None, mode: Mode
    ) -> None:
        written = False
        try:
            sample, served = None, None
            if found is not None:
                served = ServedAnswer({}, found.exit, found.confidence, found.answer)
                if found.response is not None:  # else the last model answered, and the loss is 0
                    sample = await self._last_answer(asked)
            audited = Audited(request, sample, served, mode)
            # When an audit ends depends on the request, and losses in such an order need not have
            # a mean of at most ε given those before.
            if sample is not NOT_ASKED and await turn.comes():
                written = True
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._writer, self._guard.audit, audited, self._engine)
        finally:
            turn.over.set_result(written)
            self.pending.end(turn)
            self._chosen -= 1

    async def _last_answer(self, asked: Asked) -> Any:
        """Return the last model's answer, or the error that came instead of it."""
        try:
            response = await self._asked_large(asked)
            if response is NOT_ASKED:
                return NOT_ASKED
            answer = self._upstreams.large.answer_of(response)
            self._bill.audit(answer.cost)
            return answer
        except Exception as error:
            # Without the provider's words, which may quote the prompt: audits that fail are logged.
            return UnansweredError(f"the last model did not answer ({type(error).__name__})")

    async def _asked_large(self, asked: Asked) -> Any:
        """Return the last model's response, after any pause that it asked for."""
        health = self._upstreams.health[self._upstreams.last]
        for left in reversed(range(TRIES)):
            # After a pause, audits must not come all at once.
            async with self._one_by_one if health.pause > 0 else nullcontext():
                while (wait := health.pause) > 0:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._closing.wait(), wait)
                        return NOT_ASKED
                try:
                    return (await self._upstreams.ask_large(asked, logprobs=True))[0]
                except UpstreamError as error:
                    if error.status != 429 or not left:
                        raise
        raise RuntimeError("unreachable")
