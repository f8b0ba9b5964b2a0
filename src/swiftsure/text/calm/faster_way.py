"""The choice between early exits and the full decoder, by the time that both took."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

__all__ = ["FasterWay"]

Way = Literal["early", "full"]
TRIALS: tuple[Way, ...] = ("early", "early", "full", "full")
"""The first batches of a size; of two in a row the first captures graphs, and is not counted."""


class FasterWay:
    """Tries both ways on the first batches of a size, and keeps to the faster one.

    Early exits may take longer than the full decoder where the rows of a batch exit at different
    depths. The choice depends on earlier batches only, and the full decoder loses nothing, so a
    policy's promise holds for every batch.
    """

    def __init__(self) -> None:
        self._runs = 0
        self._seconds: dict[Way, float] = {}

    @property
    def way(self) -> Way:
        """The way of the next batch."""
        if self._runs < len(TRIALS):
            return TRIALS[self._runs]
        return "full" if self._seconds["full"] < self._seconds["early"] else "early"

    @contextmanager
    def timed(self) -> Iterator[list[int]]:
        """Time a batch; the block adds the number of its tokens to the list."""
        way, tokens = self.way, list[int]()
        start = perf_counter()
        yield tokens
        if self._runs < len(TRIALS) and self._runs % 2 == 1:
            self._seconds[way] = (perf_counter() - start) / max(1, sum(tokens))
        self._runs += 1
