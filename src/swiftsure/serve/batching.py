"""`Batcher`: gathers requests into batches and runs them in lanes; audits run in between."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from swiftsure.certify.slices import SlicedPolicy
from swiftsure.serve.audits import Audited, AuditQueue, Mode
from swiftsure.serve.engine import Answer, AnyPolicy, Engine, joins
from swiftsure.serve.limits import Limits
from swiftsure.serve.queueing import (
    MOST_DEATHS,
    BusyError,
    Outcome,
    Request,
    Served,
    Submission,
    WorkerDiedError,
)
from swiftsure.serve.stream_lane import StreamLane

__all__ = ["Batcher"]

log = logging.getLogger("swiftsure.serve")


class Batcher:
    """Runs requests in batches, in one thread per lane, and audits in idle moments.

    A lane that is free takes the requests that wait, up to `max_batch`. If they are fewer, it waits
    for more until the first of them has waited for `max_wait_ms`. If no request waits, it runs one
    audit. An engine whose requests join a running batch has a `StreamLane` instead.

    Parameters
    ----------
    engine : Engine or several
        Each has `engine.lanes` lanes.
    limits : Limits, optional
        Of batches, of the queue and of audits that wait.
    audit_rate : float
        Probability that a request is audited.
    on_audit : callable, optional
        Called with each audited request and the engine of the lane, in an idle moment.
    on_idle : callable, optional
        Called with this batcher between batches, and at least every 0.2 s.
    mode : Mode, optional
        The engine's policy by default.
    deliver : callable, optional
        Called with a list of (future, result or error) after each batch; by default it sets the
        futures. A server hands them over to its event loop, once per batch.
    seed : int, optional
        By default the operating system seeds the choice of audits.

    Attributes
    ----------
    mode : Mode
        How later batches are answered. Nothing is audited while the full model answers.
    audits : AuditQueue
        Chooses them. Those that wait are pending since their request was accepted.
    """

    def __init__(
        self,
        engine: Engine | Sequence[Engine],
        limits: Limits | None = None,
        *,
        audit_rate: float = 0.0,
        on_audit: Callable[[Audited, Engine], None] | None = None,
        on_idle: "Callable[[Batcher], None] | None" = None,
        mode: Mode | None = None,
        deliver: Callable[[list[Outcome]], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self.engines: list[Engine] = list(engine) if isinstance(engine, Sequence) else [engine]
        self.limits = Limits() if limits is None else limits
        self.mode = Mode(self.engines[0].policy) if mode is None else mode
        self.audits = AuditQueue(audit_rate, self.limits.max_audits, seed)
        self._on_audit, self._on_idle = on_audit, on_idle
        self.deliver = _set_futures if deliver is None else deliver
        self._requests: deque[Request] = deque()
        self._running = 0  # batches, and rows of streams, under way
        self._closing = False
        self._changed = threading.Condition()
        self._idle_lock = threading.Lock()
        self._lanes = [
            threading.Thread(target=self._worker(each), name=f"lane-{k}", daemon=True)
            for k, each in enumerate(e for e in self.engines for _ in range(e.lanes))
        ]
        for lane in self._lanes:
            lane.start()

    @property
    def dropped(self) -> int:
        """How many audits were dropped."""
        return self.audits.dropped

    @property
    def depth(self) -> int:
        """How many requests wait."""
        return len(self._requests)

    @property
    def alive(self) -> bool:
        """Whether all lanes run."""
        return all(lane.is_alive() for lane in self._lanes)

    def submit(self, request: str, sample: Any, slice_name: str | None = None) -> "Future[Served]":
        """Add one sample; cancel the future to withdraw it before it runs.

        Raises
        ------
        BusyError
            If the queue is full, or closed.
        """
        done: Future[Served] = Future()
        self.submit_all([Submission(request, sample, slice_name, done)])
        return done

    def submit_all(self, submissions: Sequence[Submission]) -> None:
        """Add several samples, or none of them."""
        mode = self.mode
        covers = self.engines[0].inputs.covers
        with self._changed:
            if self._closing or len(self._requests) + len(submissions) > self.limits.max_queue:
                raise BusyError("shutting down" if self._closing else "too many requests wait")
            now = time.monotonic()
            for each in submissions:
                covered = mode.policy is not None and covers(each.sample, mode.policy)
                audit = self.audits.choose() if covered and not mode.full else None
                if audit is not None:
                    self.audits.pending.begin(audit)
                self._requests.append(Request(each, covered, audit, now))
            self._changed.notify()

    def close(self) -> None:
        """Accept no more requests, answer those that wait, run their audits, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for lane in self._lanes:
            lane.join()

    def _worker(self, engine: Engine) -> Callable[[], None]:
        return StreamLane(self, engine).work if joins(engine) else partial(self._work, engine)

    def _work(self, engine: Engine) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                break
            if batch:
                died = self._run(engine, batch)
                if died is not None:
                    self.revive(died)
            else:
                taken = self.audits.take()
                if taken is not None:
                    self.audit(*taken, engine)
            self.look()

    def look(self) -> None:
        """Call `on_idle`, unless another lane does so now."""
        if self._on_idle is not None and self._idle_lock.acquire(blocking=False):
            try:
                self._call(self._on_idle, self)
            finally:
                self._idle_lock.release()

    def wait(self, *, under_way: bool) -> bool:
        """Wait until a stream's lane has something to do; return whether it goes on at all."""
        with self._changed:
            if not under_way and not self._requests and not self.audits.ready:
                if self._closing and not self._running and self.audits.empty:
                    return False
                self._changed.wait(0.2)
        return True

    def take(self, most: int, *, alone: bool = True) -> list[Request]:
        """Return requests that join a stream, in order, and count them as running.

        One that may be what ended a worker is returned by itself, and only if it is `alone`.
        """
        with self._changed:
            taken: list[Request] = []
            while self._requests and len(taken) < most:
                suspect = self._requests[0].deaths > 0
                if suspect and (taken or not alone):
                    break
                request = self._requests.popleft()
                if request.submission.done.cancelled():
                    if request.audit is not None:
                        self.audits.fill(request.audit, None)
                    continue
                taken.append(request)
                if suspect:
                    break
            self._running += len(taken)
            return taken

    def put_back(self, requests: Sequence[Request]) -> None:
        """Let requests that were taken wait again, before all others."""
        with self._changed:
            self._requests.extendleft(reversed(requests))
            self._running -= len(requests)
            self._changed.notify_all()

    def begin(self) -> None:
        """Count something more as running."""
        with self._changed:
            self._running += 1

    def end(self) -> None:
        """Count something that ran as done."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _next_batch(self) -> list[Request] | None:
        """Return the next batch, [] if there is an audit or nothing to do, None at the end."""
        limits = self.limits
        with self._changed:
            if not self._requests and not self.audits.ready:
                if self._closing and not self._running and self.audits.empty:
                    return None
                self._changed.wait(0.2)
            while self._requests and not self._closing:
                left = self._requests[0].since + limits.max_wait_ms / 1000 - time.monotonic()
                if left <= 0 or len(self._requests) >= limits.max_batch:
                    break
                self._changed.wait(left)
            n = min(limits.max_batch, len(self._requests))
            if n and self._requests[0].deaths:
                n = 1  # it may be what ended a worker
            batch = [self._requests.popleft() for _ in range(n)]
            self._running += bool(batch)
            if self._requests:
                self._changed.notify()
            return batch

    def _run(self, engine: Engine, batch: list[Request]) -> WorkerDiedError | None:
        mode, died = self.mode, None
        running = [each for each in batch if not each.submission.done.cancelled()]
        outcomes: list[Outcome] = []
        audits: dict[int, Audited | None] = {}
        again: list[Request] = []
        if running:
            found = self._answers(engine, [each.submission for each in running], mode)
            for each, answer in zip(running, found, strict=True):
                own = each.submission
                served = answer if isinstance(answer, Answer) else None
                if isinstance(answer, WorkerDiedError):
                    died, each.deaths = answer, each.deaths + 1
                    if each.deaths < MOST_DEATHS:
                        again.append(each)
                        continue
                outcome = Served(answer, mode) if isinstance(answer, Answer) else answer
                outcomes.append((own.done, outcome))
                if each.audit is not None and not mode.full:
                    audits[each.audit] = Audited(
                        own.request, own.sample, served, mode, own.slice_name
                    )
        if outcomes:
            self.deliver(outcomes)
        with self._changed:
            for each in batch:
                if each.audit is not None and each not in again:
                    self.audits.fill(each.audit, audits.get(each.audit))
            self._requests.extendleft(reversed(again))
            self._running -= 1
            if again or audits or self._closing:
                self._changed.notify_all()
        return died

    def _answers(
        self, engine: Engine, batch: Sequence[Submission], mode: Mode
    ) -> Sequence[Answer | Exception]:
        """Return one answer or error per sample; if the batch fails, each sample runs alone."""
        sliced = isinstance(mode.policy, SlicedPolicy)
        slices = [each.slice_name for each in batch] if sliced else ()
        try:
            if mode.policy is not None and not _same(engine.policy, mode.policy):
                engine.install(mode.policy)
            return engine.answer([each.sample for each in batch], full=mode.full, slices=slices)
        except WorkerDiedError as error:
            return [error] * len(batch)
        except Exception as error:
            if len(batch) == 1:
                return [error]
        return [self._answers(engine, [each], mode)[0] for each in batch]

    def revive(self, died: WorkerDiedError) -> None:
        """Start the worker of a lane again; other lanes go on meanwhile."""
        log.error("a worker ended, and another one is started: %s", died)
        while not (self._closing and not self._requests):
            try:
                died.revive()
                return
            except Exception:
                log.exception("a worker could not be started")
                time.sleep(1.0)

    def audit(self, ticket: int, audited: Audited | None, engine: Engine) -> None:
        """Make the audit that was taken."""
        if audited is not None and self._on_audit is not None:
            self._call(self._on_audit, audited, engine)
        self.audits.done(ticket)
        with self._changed:
            self._changed.notify()

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function; whatever it raises, requests must still be answered."""
        try:
            function(*arguments)
        except WorkerDiedError as died:
            self.revive(died)
        except Exception:
            log.exception("an audit or the monitor failed")


def _same(one: AnyPolicy, other: AnyPolicy) -> bool:
    return one is other or one == other


def _set_futures(outcomes: list[Outcome]) -> None:
    for done, outcome in outcomes:
        if not done.set_running_or_notify_cancel():
            continue
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)
