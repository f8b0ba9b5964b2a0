"""Request ids: strings that are unique across processes and restarts, in order of time."""

import os
import secrets
import threading
import time

__all__ = ["LONGEST_ID", "check_request_id", "request_ids"]

LONGEST_ID = 200
"""Maximum length of a request id, in characters."""


class _Source:
    """Makes ids of one process: milliseconds, a counter within them, and a random name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = secrets.token_hex(6)
        self._time = self._count = 0

    def take(self, n: int) -> list[str]:
        with self._lock:
            now = time.time_ns() // 1_000_000
            if now > self._time:  # a clock that is set back must not change the order
                self._time, self._count = now, 0
            first = self._count
            self._count += n
            stamp = f"{self._time:012x}"
        return [f"{stamp}-{k:08x}-{self._process}" for k in range(first, first + n)]


_source = _Source()


def _renew() -> None:
    global _source  # noqa: PLW0603 (one source per process)
    _source = _Source()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)  # a copy would make the same ids


def request_ids(n: int) -> list[str]:
    """Return n new request ids, in ascending order.

    Examples
    --------
    >>> one, two = request_ids(2)
    >>> one < two < request_ids(1)[0]
    True
    """
    return _source.take(n)


def check_request_id(name: str, value: object) -> str:
    """Return a request id that is a string; raise if it is empty, too long or not printable."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, but got {type(value).__name__}.")
    if not 0 < len(value) <= LONGEST_ID or not value.isprintable():
        raise ValueError(
            f"`{name}` must have 1 to {LONGEST_ID} printable characters, but got {value!r:.220}."
        )
    return value
