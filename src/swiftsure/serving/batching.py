"""`Batcher`: gathers requests into batches and runs them in one thread; audits run in between."""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from swiftsure import checks
from swiftsure.serving.engine import Answer, Engine

__all__ = ["Audited", "Batcher", "BusyError"]

log = logging.getLogger("swiftsure.serving")


class BusyError(RuntimeError):
    """The queue is full, or the server is shutting down: try again later."""


@dataclass(frozen=True)
class Audited:
    """A request that was chosen for an audit."""

    request: str
    sample: Any
    answer: Answer | None
    """None if the request could not be answered."""


@dataclass
class _Request:
    request: str
    sample: Any
    audit: bool
    since: float
    done: "Future[Answer]"


class Batcher:
    """Runs requests in batches, in one thread, and audits in idle moments.

    A batch runs as soon as `max_batch` requests wait, or the first of them has waited for
    `max_wait_ms`. If no request waits, one audit runs.

    Parameters
    ----------
    engine : Engine
    max_batch : int
    max_wait_ms : float
    max_queue : int
        How many requests may wait; more are refused with `BusyError`.
    audit_rate : float
        Probability that a request is audited.
    max_audits : int
        How many audits may wait; more are dropped.
    on_audit : callable, optional
        Called with each audited request, in an idle moment.
    on_idle : callable, optional
        Called with this batcher between batches, and at least every 0.2 s.
    full : bool
        Whether the full model answers at first.
    seed : int, optional
        By default the operating system seeds the choice of audits.

    Attributes
    ----------
    full : bool
        Whether the full model answers all requests. Nothing is audited then.
    dropped : int
        How many audits were dropped.

    Notes
    -----
    Whether a request is audited, and whether its audit is dropped, is decided when it is accepted.
    The decision depends on a random number and on earlier requests, never on the request's own
    content, so the audited losses keep a mean of at most ε given the past if the promise holds.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_batch: int = 16,
        max_wait_ms: float = 5.0,
        max_queue: int = 256,
        audit_rate: float = 0.0,
        max_audits: int = 256,
        on_audit: Callable[[Audited], None] | None = None,
        on_idle: "Callable[[Batcher], None] | None" = None,
        full: bool = False,
        seed: int | None = None,
    ) -> None:
        self.engine = engine
        self.max_batch = checks.count("max_batch", max_batch)
        self.max_wait = max_wait_ms / 1000
        self.max_queue = checks.count("max_queue", max_queue)
        self.audit_rate = audit_rate
        self.max_audits = checks.count("max_audits", max_audits)
        self.full = full
        self.dropped = 0
        self._on_audit, self._on_idle = on_audit, on_idle
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._requests: deque[_Request] = deque()
        self._audits: deque[Audited] = deque()
        self._n_audits = 0  # waiting, or of requests that wait
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="swiftsure-batcher", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """How many requests wait."""
        return len(self._requests)

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def submit(self, request: str, sample: Any) -> "Future[Answer]":
        """Add a request; cancel the future to withdraw it before it runs.

        Raises
        ------
        BusyError
            If the queue is full, or closed.
        """
        done: Future[Answer] = Future()
        with self._changed:
            if self._closing or len(self._requests) >= self.max_queue:
                raise BusyError("shutting down" if self._closing else "too many requests wait")
            audit = not self.full and self._random.random() < self.audit_rate
            if audit and self._n_audits >= self.max_audits:
                audit, self.dropped = False, self.dropped + 1
            self._n_audits += audit
            now = time.monotonic()
            self._requests.append(_Request(request, sample, audit, now, done))
            self._changed.notify()
        return done

    def close(self) -> None:
        """Accept no more requests, answer those that wait, run their audits, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                break
            if batch:
                self._run(batch)
            elif self._audits:
                self._audit(self._audits.popleft())
            if self._on_idle is not None:
                self._call(self._on_idle, self)

    def _next_batch(self) -> list[_Request] | None:
        """Return the next batch, [] if there is an audit or nothing to do, None at the end."""
        with self._changed:
            if not self._requests and not self._audits:
                if self._closing:
                    return None
                self._changed.wait(0.2)
            while self._requests and not self._closing:
                left = self._requests[0].since + self.max_wait - time.monotonic()
                if left <= 0 or len(self._requests) >= self.max_batch:
                    break
                self._changed.wait(left)
            n = min(self.max_batch, len(self._requests))
            return [self._requests.popleft() for _ in range(n)]

    def _run(self, batch: list[_Request]) -> None:
        running = [each for each in batch if each.done.set_running_or_notify_cancel()]
        full, before = self.full, len(self._audits)
        answers = self._answers([each.sample for each in running], full) if running else []
        for each, answer in zip(running, answers, strict=True):
            if isinstance(answer, Answer):
                each.done.set_result(replace(answer, full=full))
            else:
                each.done.set_exception(answer)
            if each.audit and not full:
                served = answer if isinstance(answer, Answer) else None
                self._audits.append(Audited(each.request, each.sample, served))
        kept = len(self._audits) - before
        with self._changed:  # withdrawn requests are not audited
            self._n_audits -= sum(each.audit for each in batch) - kept

    def _answers(self, samples: Sequence[Any], full: bool) -> Sequence[Answer | Exception]:
        """Return one answer or error per sample; if the batch fails, each sample runs alone."""
        try:
            return self.engine.answer(samples, full=full)
        except Exception as error:
            if len(samples) == 1:
                return [error]
        return [self._answers([sample], full)[0] for sample in samples]

    def _audit(self, audited: Audited) -> None:
        with self._changed:
            self._n_audits -= 1
        if self._on_audit is not None:
            self._call(self._on_audit, audited)

    @staticmethod
    def _call(function: Callable[[Any], None], argument: Any) -> None:
        """Call a function; whatever it raises, requests must still be answered."""
        try:
            function(argument)
        except Exception:
            log.exception("an audit or the monitor failed")
