"""`Batcher`: gathers requests into batches and runs them in lanes; audits run in between."""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from swiftsure._lib import checks
from swiftsure.serve.engine import Answer, AnyPolicy, Engine

__all__ = ["Audited", "Batcher", "BusyError", "Mode", "Pending", "Served", "WorkerDiedError"]

log = logging.getLogger("swiftsure.serve")

MOST_DEATHS = 3
"""A request fails if this many workers died while they ran it."""


class BusyError(RuntimeError):
    """The queue is full, or the server is shutting down: try again later."""


class WorkerDiedError(RuntimeError):
    """The process of an engine ended during a call; `revive` starts another one."""

    def __init__(self, message: str, revive: Callable[[], None]) -> None:
        super().__init__(message)
        self.revive = revive


@dataclass(frozen=True)
class Mode:
    """How requests are answered: under a policy, or by the full model.

    A batch runs in one mode, so an installed policy or a fallback is never half in use.
    """

    policy: AnyPolicy
    full: bool = False


class Served(NamedTuple):
    """An answer, and the mode that it was given in."""

    answer: Answer
    mode: Mode


@dataclass(frozen=True)
class Audited:
    """A request that was chosen for an audit."""

    request: str
    sample: Any
    answer: Answer | None
    """None if the request could not be answered."""
    mode: Mode


class Pending:
    """Since when audits wait, in any thread.

    Examples
    --------
    >>> pending = Pending()
    >>> pending.begin("audit")
    >>> 0 <= pending.age() < 60
    True
    >>> pending.end("audit")
    >>> pending.age()
    0.0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[object, float] = {}  # oldest first

    def begin(self, audit: object) -> None:
        """Add an audit that waits from now on."""
        with self._lock:
            self._since[audit] = time.monotonic()

    def end(self, audit: object) -> None:
        """Remove an audit that is over."""
        with self._lock:
            self._since.pop(audit, None)

    def age(self) -> float:
        """Return for how many seconds the oldest audit has waited; 0 if none waits."""
        with self._lock:
            oldest = next(iter(self._since.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest


@dataclass(slots=True, eq=False)
class _Request:
    request: str
    sample: Any
    audit: int | None
    """Its number among the audited requests, in the order in which they were accepted."""
    since: float
    done: Any
    deaths: int = 0


Outcome = tuple[Any, Served | Exception]


class Batcher:
    """Runs requests in batches, in one thread per lane, and audits in idle moments.

    A lane that is free takes the requests that wait, up to `max_batch`. If they are fewer, it waits
    for more until the first of them has waited for `max_wait_ms`. If no request waits, it runs one
    audit.

    Parameters
    ----------
    engine : Engine or several
        Each has `engine.lanes` lanes.
    max_batch : int
    max_wait_ms : float
    max_queue : int
        How many requests may wait; more are refused with `BusyError`.
    audit_rate : float
        Probability that a request is audited.
    max_audits : int
        How many audits may wait; more are dropped.
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
    dropped : int
        How many audits were dropped.
    pending : Pending
        Audits that were accepted and are not over.

    Notes
    -----
    Whether a request is audited, and whether its audit is dropped, is decided when it is accepted.
    The decision depends on a random number and on earlier requests, never on the request's own
    content, so the audited losses keep a mean of at most ε given the past if the promise holds.
    """

    def __init__(
        self,
        engine: Engine | Sequence[Engine],
        *,
        max_batch: int = 16,
        max_wait_ms: float = 0.0,
        max_queue: int = 256,
        audit_rate: float = 0.0,
        max_audits: int = 256,
        on_audit: Callable[[Audited, Engine], None] | None = None,
        on_idle: "Callable[[Batcher], None] | None" = None,
        mode: Mode | None = None,
        deliver: Callable[[list[Outcome]], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self.engines: list[Engine] = list(engine) if isinstance(engine, Sequence) else [engine]
        self.max_batch = checks.count("max_batch", max_batch)
        self.max_wait = max_wait_ms / 1000
        self.max_queue = checks.count("max_queue", max_queue)
        self.audit_rate = audit_rate
        self.max_audits = checks.count("max_audits", max_audits)
        self.mode = Mode(self.engines[0].policy) if mode is None else mode
        self.dropped = 0
        self.pending = Pending()
        self._on_audit, self._on_idle = on_audit, on_idle
        self._deliver = _set_futures if deliver is None else deliver
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._requests: deque[_Request] = deque()
        self._audits: dict[int, Audited | None] = {}  # None if it was withdrawn
        self._chosen = self._audited = 0  # audits accepted, and begun
        self._auditing = False
        self._running = 0  # lanes with a batch
        self._closing = False
        self._changed = threading.Condition()
        self._idle_lock = threading.Lock()
        self._lanes = [
            threading.Thread(target=self._work, args=(each,), name=f"lane-{k}", daemon=True)
            for k, each in enumerate(e for e in self.engines for _ in range(e.lanes))
        ]
        for lane in self._lanes:
            lane.start()

    @property
    def depth(self) -> int:
        """How many requests wait."""
        return len(self._requests)

    @property
    def alive(self) -> bool:
        """Whether all lanes run."""
        return all(lane.is_alive() for lane in self._lanes)

    def submit(self, request: str, sample: Any) -> "Future[Served]":
        """Add one sample; cancel the future to withdraw it before it runs.

        Raises
        ------
        BusyError
            If the queue is full, or closed.
        """
        done: Future[Served] = Future()
        self.submit_all([(request, sample, done)])
        return done

    def submit_all(self, requests: Sequence[tuple[str, Any, Any]]) -> None:
        """Add several samples, each with its id and a future, or none of them."""
        with self._changed:
            if self._closing or len(self._requests) + len(requests) > self.max_queue:
                raise BusyError("shutting down" if self._closing else "too many requests wait")
            now = time.monotonic()
            for request, sample, done in requests:
                audit = None
                if not self.mode.full and self._random.random() < self.audit_rate:
                    if self._chosen - self._audited < self.max_audits:
                        audit, self._chosen = self._chosen, self._chosen + 1
                        self.pending.begin(audit)
                    else:
                        self.dropped += 1
                self._requests.append(_Request(request, sample, audit, now, done))
            self._changed.notify()

    def close(self) -> None:
        """Accept no more requests, answer those that wait, run their audits, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for lane in self._lanes:
            lane.join()

    def _work(self, engine: Engine) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                break
            if batch:
                died = self._run(engine, batch)
                if died is not None:
                    self._revive(died)
            else:
                self._audit(engine)
            if self._on_idle is not None and self._idle_lock.acquire(blocking=False):
                try:
                    self._call(self._on_idle, self)
                finally:
                    self._idle_lock.release()

    def _next_batch(self) -> list[_Request] | None:
        """Return the next batch, [] if there is an audit or nothing to do, None at the end."""
        with self._changed:
            if not self._requests and not self._audit_is_ready():
                if self._closing and not self._running and self._audited == self._chosen:
                    return None
                self._changed.wait(0.2)
            while self._requests and not self._closing:
                left = self._requests[0].since + self.max_wait - time.monotonic()
                if left <= 0 or len(self._requests) >= self.max_batch:
                    break
                self._changed.wait(left)
            n = min(self.max_batch, len(self._requests))
            if n and self._requests[0].deaths:
                n = 1  # it may be what ended a worker
            batch = [self._requests.popleft() for _ in range(n)]
            self._running += bool(batch)
            if self._requests:
                self._changed.notify()
            return batch

    def _run(self, engine: Engine, batch: list[_Request]) -> WorkerDiedError | None:
        mode, died = self.mode, None
        running = [each for each in batch if not each.done.cancelled()]
        outcomes: list[Outcome] = []
        audits: dict[int, Audited | None] = {}
        again: list[_Request] = []
        if running:
            found = self._answers(engine, [each.sample for each in running], mode)
            for each, answer in zip(running, found, strict=True):
                served = answer if isinstance(answer, Answer) else None
                if isinstance(answer, WorkerDiedError):
                    died, each.deaths = answer, each.deaths + 1
                    if each.deaths < MOST_DEATHS:
                        again.append(each)
                        continue
                outcome = Served(answer, mode) if isinstance(answer, Answer) else answer
                outcomes.append((each.done, outcome))
                if each.audit is not None and not mode.full:
                    audits[each.audit] = Audited(each.request, each.sample, served, mode)
        if outcomes:
            self._deliver(outcomes)
        with self._changed:
            for each in batch:
                if each.audit is not None and each not in again:
                    self._audits[each.audit] = audits.get(each.audit)
            self._requests.extendleft(reversed(again))
            self._running -= 1
            if again or audits or self._closing:
                self._changed.notify_all()
        return died

    def _answers(
        self, engine: Engine, samples: Sequence[Any], mode: Mode
    ) -> Sequence[Answer | Exception]:
        """Return one answer or error per sample; if the batch fails, each sample runs alone."""
        try:
            if engine.policy is not mode.policy and engine.policy != mode.policy:
                engine.install(mode.policy)
            return engine.answer(samples, full=mode.full)
        except WorkerDiedError as error:
            return [error] * len(samples)
        except Exception as error:
            if len(samples) == 1:
                return [error]
        return [self._answers(engine, [sample], mode)[0] for sample in samples]

    def _revive(self, died: WorkerDiedError) -> None:
        """Start the worker of a lane again; other lanes go on meanwhile."""
        log.error("a worker ended, and another one is started: %s", died)
        while not (self._closing and not self._requests):
            try:
                died.revive()
                return
            except Exception:
                log.exception("a worker could not be started")
                time.sleep(1.0)

    def _audit(self, engine: Engine) -> None:
        """Run the next audit: one at a time, in the order in which requests were accepted.

        The order in which batches and audits end depends on what is in them, and losses in such
        an order need not have a mean of at most ε given those before.
        """
        with self._changed:
            if not self._audit_is_ready():
                return
            number = self._audited
            audited = self._audits.pop(number)
            self._audited += 1
            self._auditing = True
        if audited is not None and self._on_audit is not None:
            self._call(self._on_audit, audited, engine)
        self.pending.end(number)
        with self._changed:
            self._auditing = False
            self._changed.notify()

    def _audit_is_ready(self) -> bool:
        return not self._auditing and self._audited in self._audits

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function; whatever it raises, requests must still be answered."""
        try:
            function(*arguments)
        except WorkerDiedError as died:
            self._revive(died)
        except Exception:
            log.exception("an audit or the monitor failed")


def _set_futures(outcomes: list[Outcome]) -> None:
    for done, outcome in outcomes:
        if not done.set_running_or_notify_cancel():
            continue
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)
