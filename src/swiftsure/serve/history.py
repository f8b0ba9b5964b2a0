"""`History`: how exits and evidence developed since the server started, in bounded memory."""

import time
from collections.abc import Sequence
from typing import Any

__all__ = ["History"]


class History:
    """Keeps points over time for the live page.

    If there are more than `most` points, every second one is dropped and points are taken half as
    often, so that the whole time since the start stays visible.

    Parameters
    ----------
    period : float
        Seconds between points at first.
    most : int
        Largest number of points.

    Examples
    --------
    >>> history = History(period=1.0, most=4)
    >>> for second in range(7):
    ...     history.note([second, 0], evidence=None, now=float(second))
    >>> history.shown(now=6.0)["age"]
    [6.0, 4.0, 2.0, 0.0]
    """

    def __init__(self, period: float = 1.0, most: int = 240) -> None:
        self._period, self._most = period, most
        # Replaced as a whole, never changed, since other threads read it.
        self._points: tuple[tuple[float, tuple[int, ...], float | None], ...] = ()

    def note(self, exits: Sequence[int], evidence: float | None, now: float | None = None) -> None:
        """Add a point if the last one is old enough.

        Parameters
        ----------
        exits : sequence of int
            Answers of each exit so far.
        evidence : float, optional
            log(evidence) / log(evidence needed for an alarm).
        """
        now = time.monotonic() if now is None else now
        if self._points and now < self._points[-1][0] + self._period * (1 - 1e-6):
            return
        points = (*self._points, (now, tuple(exits), evidence))
        if len(points) > self._most:
            points, self._period = points[::2], 2 * self._period
        self._points = points

    def shown(self, now: float | None = None) -> dict[str, Any]:
        """Return the age of each point in seconds, answers since the point before, and evidence."""
        now = time.monotonic() if now is None else now
        points, exits = self._points, []
        before: tuple[int, ...] | None = None
        for _, counts, _ in points:
            exits.append([n - m for n, m in zip(counts, before or (0,) * len(counts), strict=True)])
            before = counts
        return {
            "age": [round(now - at, 1) for at, _, _ in points],
            "exits": exits,
            "evidence": [evidence for _, _, evidence in points],
        }
