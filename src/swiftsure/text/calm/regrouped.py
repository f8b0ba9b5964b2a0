"""The loop that lets rows that exited go on while others are deep.

A block runs on the rows that wait for it. It pays where more rows take longer, as on a CPU, or
where more rows are waiting than a block takes at once.
"""

import numpy as np
import torch
from torch import Tensor

from swiftsure.text.calm.loops import Loop, Request
from swiftsure.text.calm.session import Session

__all__ = ["Regrouped"]

LEAST_SHARE = 0.2
"""Share of the rows from which a group at a deeper block runs before shallower ones."""


class Regrouped(Loop):
    """Rows at tokens and blocks of their own; a block runs on the rows that wait for it.

    Parameters
    ----------
    session, request
        As in `Loop`, without processors and criteria of the host.
    largest : int
        Largest number of rows that a block takes at once.
    """

    def __init__(self, session: Session, request: Request, largest: int) -> None:
        super().__init__(session, request)
        self.largest = largest
        self.steps = np.zeros(self.n, np.int64)
        self._queues: list[list[int]] = [[] for _ in self.segments]
        self._done: list[int] = []
        """Rows that exited and wait for their next token."""
        self._first = request.input_ids.shape[1] - 1

    def run(self) -> Tensor:
        """Generate all answers."""
        if self._start():
            self._learn(list(range(self.n)))
        else:
            self._queues[0] = list(range(self.n))
        while self._done or any(self._queues):
            segment = self._next()
            if segment == 0 and self._done:
                self._turn()
            if self._queues[segment]:
                self._run(segment)
        length = max(1, int((self.log.depths > 0).sum(axis=1).max()))
        self._pad(length)
        return self.session.output[: self.n, :length].clone()

    def _next(self) -> int:
        """Return the segment to run: the deepest one with enough rows, else the fullest."""
        sizes = np.array([len(queue) for queue in self._queues])
        sizes[0] += len(self._done)
        enough = min(self.largest, LEAST_SHARE * sizes.sum())
        found = np.flatnonzero(sizes >= enough)
        return int(found[-1]) if len(found) else int(sizes.argmax())

    def _turn(self) -> None:
        rows, self._done = self._done[: self.largest], self._done[self.largest :]
        self.session.turn(rows, self.pick)
        self._learn(rows)

    def _learn(self, rows: list[int]) -> None:
        """Read the tokens of a turn, and queue the rows that go on."""
        tokens = self.session.read_tokens(len(rows))
        self.steps[rows] += 1
        ended = self._ended(tokens) | (self.steps[rows] >= self.request.tokens)
        self._queues[0] += [row for row, end in zip(rows, ended, strict=True) if not end]

    def _run(self, segment: int) -> None:
        queue = self._queues[segment]
        given, self._queues[segment] = queue[: self.largest], queue[self.largest :]
        rows = np.asarray(given)
        steps = self.steps[rows]
        positions = self._first + steps
        session = self.session
        session.show(int(positions.max()) + 1)
        starts = self.filled[segment, rows]
        owing = starts < positions
        if owing.any():
            owed = int((positions - starts).max())
            session.catch_up(segment, rows[owing].tolist(), starts[owing], owed)
        session.run_segment(segment, given)
        self.filled[segment, rows] = positions + 1
        if segment == len(self.segments) - 1:
            self._finish(rows, steps)
            self.log.heads[rows, steps] += 1
            self._done += given
            return
        passed = self._passed(segment, rows, steps, given)
        if self.pick == "head":
            self.log.heads[rows[passed], steps[passed]] = 1
        self._done += rows[passed].tolist()
        self._queues[segment + 1] += rows[~passed].tolist()

    def _pad(self, length: int) -> None:
        """Fill the columns after each sequence's end."""
        session = self.session
        lengths = torch.from_numpy((self.log.depths > 0).sum(axis=1)).to(session.device)
        after = torch.arange(length, device=session.device) >= lengths[:, None]
        session.output[: self.n, :length].masked_fill_(after, int(session.pad))
