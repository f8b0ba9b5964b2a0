"""`AuditQueue`: which requests are audited, and in which order their losses count."""

import random
import threading
import time
from dataclasses import dataclass
from typing import Any

from swiftsure._lib import checks
from swiftsure.serve.engine import Answer, AnyPolicy

__all__ = ["AuditQueue", "Audited", "Mode", "Pending"]


@dataclass(frozen=True)
class Mode:
    """How requests are answered: under a policy, or by the full model.

    A batch runs in one mode, so an installed policy or a fallback is never half in use.
    """

    policy: AnyPolicy | None
    full: bool = False


@dataclass(frozen=True)
class Audited:
    """A request that was chosen for an audit."""

    request: str
    sample: Any
    answer: Answer | None
    """None if the request could not be answered."""
    mode: Mode
    slice_name: str | None = None
    full: Answer | Exception | None = None
    """What the full system answers, if it was asked already."""


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


class AuditQueue:
    """Chooses requests for audits at random, and hands them out in the order of acceptance.

    Whether a request is audited, and whether its audit is dropped, is decided when it is accepted.
    The decision depends on a random number and on earlier requests, never on the request's own
    content. Audits are handed out one at a time and in the order in which their requests were
    accepted: the order in which answers and audits end depends on what is in them. So the audited
    losses keep a mean of at most ε given the past if the promise holds.

    Parameters
    ----------
    rate : float
        Probability that a request is audited.
    most : int
        How many audits may wait; more are dropped.
    seed : int, optional
        By default the operating system seeds the choice.

    Attributes
    ----------
    dropped : int
        How many audits were dropped.
    pending : Pending
        Audits that wait for something that should not take long.

    Examples
    --------
    >>> queue = AuditQueue(1.0, most=10)
    >>> first, second = queue.choose(), queue.choose()
    >>> queue.fill(second, "its answer")
    >>> queue.take() is None  # the first comes first
    True
    >>> queue.fill(first, None)
    >>> queue.take()
    (0, None)
    """

    def __init__(self, rate: float, most: int, seed: int | None = None) -> None:
        self.rate, self.most = rate, checks.count("max_audits", most)
        self.dropped = 0
        self.pending = Pending()
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._lock = threading.Lock()
        self._filled: dict[int, Any] = {}
        self._chosen = self._taken = 0
        self._busy = False

    def choose(self) -> int | None:
        """Return a ticket if a request that was just accepted is audited; `fill` it later."""
        if self.rate == 0.0 or self._random.random() >= self.rate:
            return None
        with self._lock:
            if self._chosen - self._taken >= self.most:
                self.dropped += 1
                return None
            self._chosen += 1
            return self._chosen - 1

    def fill(self, ticket: int, audited: Any) -> None:
        """Say what is to be audited; None if the request was withdrawn."""
        with self._lock:
            self._filled[ticket] = audited

    @property
    def ready(self) -> bool:
        """Whether `take` would return an audit."""
        return not self._busy and self._taken in self._filled

    @property
    def empty(self) -> bool:
        """Whether all chosen requests were taken."""
        return self._taken == self._chosen

    def take(self) -> tuple[int, Any] | None:
        """Return the next ticket and what was filled in; None if it is not ready.

        No other one is handed out before `done`.
        """
        with self._lock:
            if not self.ready:
                return None
            self._busy, ticket = True, self._taken
            self._taken += 1
            return ticket, self._filled.pop(ticket)

    def done(self, ticket: int) -> None:
        """End the audit that was taken."""
        self.pending.end(ticket)
        with self._lock:
            self._busy = False
