"""`ModelHealth`: whether a model may be asked now, from its pauses and its failures in a row."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from swiftsure.cascade import UpstreamError

__all__ = ["ModelHealth", "UpstreamMetrics"]

log = logging.getLogger("swiftsure.serve")

MOST_IN_A_ROW = 5
"""After so many failures in a row a model rests."""
REST = 30.0
"""Seconds that it rests; then one request tries it."""
LONGEST_PAUSE = 60.0
"""A longer Retry-After is cut, so that a model is not lost for hours."""
LOG_EVERY = 60.0
"""Seconds between two messages in the log about failures of one model."""


class ModelHealth:
    """What is known of one model: failures, a pause that it asked for, and a circuit breaker.

    Parameters
    ----------
    name : str
    last : bool
        Whether it is the last model, which is asked even after failures, as no other can answer.
    clock : callable
        Seconds, from any start.

    Attributes
    ----------
    failures : int
        In all.
    """

    def __init__(
        self, name: str, *, last: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.failures = name, 0
        self._busy = (429,) if last else (429, 503)
        self._clock = clock
        self._in_a_row, self._why = 0, ""
        self._paused_until = self._rests_until = self._logged = -math.inf

    @property
    def pause(self) -> float:
        """For how many more seconds the model asked to be left alone."""
        return max(0.0, self._paused_until - self._clock())

    @property
    def trouble(self) -> str | None:
        """What is wrong with the model; None if it answers."""
        if self._in_a_row < MOST_IN_A_ROW:
            return None
        return f"{self.name} does not answer ({self._why})."

    def refusal(self) -> str | None:
        """Return why the model must not be asked now; None if it may.

        After a rest one request may ask, and the others wait for what it finds.
        """
        if self.pause > 0:
            return f"{self.name} asked for a pause"
        if self._in_a_row >= MOST_IN_A_ROW:
            now = self._clock()
            if now < self._rests_until:
                return f"{self.name} failed several times in a row"
            self._rests_until = now + REST
        return None

    def answered(self) -> None:
        """Note that the model answered."""
        self._in_a_row = 0

    def failed(self, error: BaseException) -> None:
        """Note an error, log it at most once per minute, and remember a pause."""
        now = self._clock()
        self.failures += 1
        status = getattr(error, "status", None)
        # Without the error's words, which may quote the prompt.
        why = type(error).__name__ if status is None else f"status {status}"
        if now >= self._logged + LOG_EVERY:
            self._logged = now
            log.warning("%s failed: %s", self.name, why)
        if isinstance(error, UpstreamError) and error.status in self._busy:
            wait = 1.0 if error.retry_after is None else min(error.retry_after, LONGEST_PAUSE)
            self._paused_until = now + wait
        elif status == 401:  # a key is refused for all requests alike
            self._rest(MOST_IN_A_ROW, why)
        elif _is_outage(error):
            self._rest(self._in_a_row + 1, why)

    def _rest(self, in_a_row: int, why: str) -> None:
        self._in_a_row, self._why = max(in_a_row, self._in_a_row), why
        if self._in_a_row >= MOST_IN_A_ROW:
            self._rests_until = self._clock() + REST


class UpstreamMetrics(Collector):
    """Reads the failures of the models when asked."""

    def __init__(self, health: Sequence[ModelHealth]) -> None:
        self._health = health

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the family."""
        failures = CounterMetricFamily(
            "swiftsure_upstream_failures", "Failed requests to a model.", labels=["model"]
        )
        for each in dict.fromkeys(self._health):  # the checkpoints of a model share one
            failures.add_metric([each.name], each.failures)
        yield failures


def _is_outage(error: BaseException) -> bool:
    """Return whether an error is about the model, and not about one request."""
    if isinstance(error, UpstreamError):
        return error.temporary or error.status in (402, 403, 404)
    return isinstance(error, TimeoutError)
