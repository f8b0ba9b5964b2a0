"""Audits: a share of requests also goes to the last model, after the answer was sent."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from swiftsure.cascade import UpstreamError
from swiftsure.serve.audits import Audited, AuditQueue
from swiftsure.serve.bill import Bill
from swiftsure.serve.engine import Answer as ServedAnswer
from swiftsure.serve.engine import UnansweredError
from swiftsure.serve.openai import ApiRequest
from swiftsure.serve.policy_manager import PolicyManager
from swiftsure.serve.proxy.upstreams import Found, Upstreams

__all__ = ["Audits"]

log = logging.getLogger("swiftsure.serve")

TRIES = 5
"""How often an audit asks a last model that is at its rate limit."""


NOT_ASKED = object()
"""Stands for the last model's answer if the proxy ended before it could be asked."""


class Audits:
    """Asks the last model about the requests that were chosen, and tells the monitor.

    The last model is asked about several at once; their losses are written in the order in which
    the requests were accepted, as `AuditQueue` hands them out.

    Parameters
    ----------
    upstreams : Upstreams
    manager : PolicyManager
    queue : AuditQueue
    bill : Bill
        Where the costs of audits are added.
    """

    def __init__(
        self, upstreams: Upstreams, manager: PolicyManager, queue: AuditQueue, bill: Bill
    ) -> None:
        self._bill, self._manager, self._upstreams = bill, manager, upstreams
        self.queue = queue
        self._closing = asyncio.Event()
        self._one_by_one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        # One thread, so that losses are written one after another, off the event loop.
        self._writer = ThreadPoolExecutor(1, "swiftsure-audits")

    def begin(
        self,
        ticket: int,
        request: str,
        asked: ApiRequest,
        found: Found | None,
        slice_name: str | None = None,
    ) -> None:
        """Audit an answer in the background; None for a request that got none.

        A request without an answer counts as no loss, since nobody got a wrong one. To leave it
        out would be a choice that depends on its content.
        """
        if self._closing.is_set():
            return
        served = None
        if found is not None:
            served = ServedAnswer({}, found.exit, found.confidence, found.answer)
        audited = Audited(request, None, served, self._manager.mode, slice_name)
        self.queue.pending.begin(ticket)
        # If the last model answered, the loss is 0.
        early = found is not None and found.response is not None and not found.is_full
        ask = asked if early else None
        task = asyncio.get_running_loop().create_task(self._audit(ticket, audited, ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def look(self) -> None:
        """Let the manager follow the monitor."""
        await asyncio.get_running_loop().run_in_executor(self._writer, self._manager.tick)

    async def close(self) -> None:
        """Finish the audits that are under way, up to the first that cannot be made yet.

        It cannot if its request has no answer yet, or if the last model asked for a pause.
        """
        self._closing.set()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._manager.close)
        self._writer.shutdown()

    async def _audit(self, ticket: int, audited: Audited, ask: ApiRequest | None) -> None:
        try:
            sample = None if ask is None else await self._last_answer(ask)
            if sample is NOT_ASKED:
                return  # neither this one nor later ones are written
            self.queue.fill(ticket, replace(audited, sample=sample))
            await asyncio.get_running_loop().run_in_executor(self._writer, self._write)
        finally:
            self.queue.pending.end(ticket)

    def _write(self) -> None:
        """Write the audits whose turn it is."""
        engine: Any = self._upstreams  # which has all that an audit needs
        while (taken := self.queue.take()) is not None:
            ticket, audited = taken
            try:
                self._manager.audit(audited, engine)
            except Exception:
                log.exception("an audit failed")
            self.queue.done(ticket)

    async def _last_answer(self, asked: ApiRequest) -> Any:
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

    async def _asked_large(self, asked: ApiRequest) -> Any:
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
