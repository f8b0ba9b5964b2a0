"""Retries with exponential back-off, which wait as long as a server's Retry-After says."""

import asyncio
import email.utils
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from swiftsure._lib.files import shortened

__all__ = ["Backoff", "UpstreamError", "retry_after"]

T = TypeVar("T")

TEMPORARY = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""HTTP statuses after which another try may succeed."""

LONGEST_WAIT = 86_400.0
"""Longest Retry-After that is believed, in seconds."""


class UpstreamError(Exception):
    """A model did not answer.

    Attributes
    ----------
    status : int or None
        HTTP status, if there was one.
    temporary : bool
        Whether another try may succeed.
    retry_after : float or None
        Seconds to wait before that, if the server said so.
    error : mapping
        The `error` object that the server sent, without keys; empty if it sent none.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        temporary: bool = False,
        retry_after: float | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.error = error or {}
        self.status = status
        self.temporary = temporary
        self.retry_after = retry_after


@dataclass(frozen=True)
class Backoff:
    """How often to try again, and how long to wait in between.

    Parameters
    ----------
    retries : int
        How many more times to try after the first.
    first, longest : float
        Seconds to wait at most before the first and before any retry. Waits double from one retry
        to the next, and are drawn from the upper half of that time, so that many callers do not
        come back at once.
    patience : float
        The longest Retry-After that is waited for; after a longer one the call fails at once.
    """

    retries: int = 5
    first: float = 1.0
    longest: float = 60.0
    patience: float = 300.0

    async def call(self, ask: Callable[[], Awaitable[T]], on_retry: Any = None) -> T:
        """Return what `ask` returns; after a temporary error, wait and ask again."""
        for attempt in range(self.retries + 1):
            try:
                return await ask()
            except Exception as error:
                wait = self.wait(attempt, error)
                if wait is None:
                    raise
                if on_retry is not None:
                    on_retry(error, wait)
            await asyncio.sleep(wait)
        raise RuntimeError("unreachable")

    def wait(self, attempt: int, error: Exception) -> float | None:
        """Return the seconds to wait after an error; None if there is no use in another try."""
        if attempt >= self.retries or not _is_temporary(error):
            return None
        told = _told(error)
        if told is not None:
            return told if told <= self.patience else None
        return min(self.longest, self.first * 2.0**attempt) * _JITTER.uniform(0.5, 1.0)


_JITTER = Random()
"""Jitter of waiting times; results never depend on it."""


def _is_temporary(error: Exception) -> bool:
    if isinstance(error, UpstreamError):
        return error.temporary
    status = getattr(error, "status_code", getattr(error, "status", None))
    if isinstance(status, int):  # as the errors of the openai and httpx clients have it
        return status in TEMPORARY
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return type(error).__name__ in ("APIConnectionError", "APITimeoutError")


def _told(error: Exception) -> float | None:
    if isinstance(error, UpstreamError):
        return error.retry_after
    response = getattr(error, "response", None)
    headers = getattr(response, "headers", None)
    return None if headers is None else retry_after(headers)


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Return the seconds that Retry-After says to wait, a day at most: a number, or a date.

    Examples
    --------
    >>> retry_after({"Retry-After": "2"})
    2.0
    """
    lower = {str(name).lower(): str(value) for name, value in headers.items()}
    try:
        text = lower.get("retry-after", "")
        if "retry-after-ms" in lower:
            wait = float(lower["retry-after-ms"]) / 1000
        elif text.strip().replace(".", "", 1).isdecimal():
            wait = float(text)
        else:
            until = email.utils.parsedate_to_datetime(text).timestamp()
            wait = until - (time.time() if now is None else now)
    except (ValueError, TypeError, OverflowError, OSError):
        return None
    return min(max(0.0, wait), LONGEST_WAIT) if math.isfinite(wait) else None


def described(error: BaseException) -> str:
    """Return an error's type and first words."""
    text = shortened(error)
    return text if isinstance(error, UpstreamError) else f"{type(error).__name__}: {text}"
