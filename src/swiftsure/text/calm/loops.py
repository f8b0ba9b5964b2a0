"""The host's side of captured decoding: what runs next, and which rows have exited.

`Together` keeps all rows at the same token: a block runs on all of them until the last one exits.
`Regrouped` runs a block on the rows that are there, and lets rows that exited go on while others
are deep. It pays where more rows take longer, or where more rows are waiting than a block takes at
once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.text.calm.session import Pick, Session

__all__ = ["Log", "Loop", "Regrouped", "Request", "Together"]

SPECULATE_BELOW = 0.2
"""Share of tokens that exit at a look, up to which the next segment is launched before it is read.

Waiting for a look costs about a quarter of a block, which is wasted if the batch exits.
"""
LEAST_SHARE = 0.2
"""Share of the rows from which a group at a deeper block runs before shallower ones."""


@dataclass(frozen=True)
class Request:
    """One generation, as the host sees it."""

    input_ids: Tensor
    """(n, positions) before the first answer token."""
    levels: NDArray[np.float32]
    """(n, tokens): the threshold of each token."""
    may_exit: NDArray[np.bool_]
    """(tokens,): whether any row can exit at this token."""
    ends: frozenset[int]
    barred: int
    """Number of answer tokens before which no end token is picked."""
    first_logits: Tensor | None = None
    """(n, vocabulary): those of the first token, if there was a prompt."""
    processors: Any = None
    """Logits processors that the host runs; None: none."""
    criteria: Any = None
    """Stopping criteria that the host runs; None: none."""

    @property
    def tokens(self) -> int:
        """Largest number of answer tokens."""
        return self.levels.shape[1]


class Log:
    """What happened to each token: depth, confidences and heads."""

    def __init__(self, n: int, tokens: int, n_exits: int) -> None:
        self.depths = np.zeros((n, tokens), np.int64)
        self.confidences = np.full((n, tokens, n_exits - 1), np.nan, np.float32)
        self.heads = np.zeros((n, tokens), np.int64)

    def steps(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the entries of the first tokens, as a `Trace` holds them."""
        return [
            (
                torch.from_numpy(self.depths[:, step]),
                torch.from_numpy(self.confidences[:, step]),
                torch.from_numpy(self.heads[:, step]),
            )
            for step in range(tokens)
        ]


class Loop(ABC):
    """Generates with a session; `run` returns the answers, (n, tokens)."""

    def __init__(self, session: Session, request: Request) -> None:
        self.session, self.request = session, request
        self.n, self.segments = session.n, session.segments
        self.n_blocks = len(session.decoder.blocks)
        self.log = Log(self.n, request.tokens, self.n_blocks)
        self.finished = np.zeros(self.n, np.bool_)
        self.pick: Pick = "known" if session.gives_logits else "head"
        self.ends = np.asarray(sorted(request.ends), np.int64)
        begin = request.input_ids.shape[1] - (request.first_logits is None)
        self.filled = np.full((len(self.segments), self.n), begin, np.int64)
        """Positions up to which each segment has the keys and values of each row."""

    @abstractmethod
    def run(self) -> Tensor:
        """Generate all answers."""

    def _start(self) -> int:
        """Begin the first token that is not known yet; return its number."""
        session, request = self.session, self.request
        if request.first_logits is None:
            session.open()
            return 0
        scores = request.first_logits
        if request.processors is not None:
            scores = request.processors(request.input_ids, scores)
        elif request.barred > 0:
            scores[:, self.ends] = -torch.inf
        session.given[: self.n].copy_(scores.argmax(dim=-1))
        session.turn(None, "given")
        self.log.depths[:, 0] = self.n_blocks
        self.log.heads[:, 0] = 1
        return 1

    def _passed(
        self, segment: int, rows: NDArray[np.int64], steps: Any, given: Sequence[int] | None
    ) -> NDArray[np.bool_]:
        """Read a look at some rows; record it, and return which of them pass.

        `given` are the rows that ran: None if all of them did.
        """
        session, log = self.session, self.log
        own = self._scores(segment, rows, given)
        levels = self.request.levels[rows, steps]
        counted = np.full(len(rows), session.gives_logits)
        if session.shortlist is not None and segment > 0:
            counted = own >= levels
            if counted.any():
                own[counted] = self._checked(segment, rows[counted], given)
        at = np.broadcast_to(steps, rows.shape)
        log.confidences[rows, at, self.segments[segment][-1]] = own
        log.heads[rows[counted], at[counted]] += 1
        passed: NDArray[np.bool_] = own > levels if session.rule.strict else own >= levels
        log.depths[rows[passed], at[passed]] = self.segments[segment][-1] + 1
        return passed

    def _scores(
        self, segment: int, rows: NDArray[np.int64], given: Sequence[int] | None
    ) -> NDArray[np.float32]:
        if given is None:
            return self.session.read_scores(segment, self.n)[rows]
        return self.session.read_scores(segment, len(rows))

    def _checked(
        self, segment: int, rows: NDArray[np.int64], given: Sequence[int] | None
    ) -> NDArray[np.float32]:
        """Return the confidences of rows whose shortlist passed, over the whole vocabulary."""
        self.session.check_shortlist(segment, None if given is None else rows.tolist())
        return self._scores(segment, rows, given)

    def _finish(self, rows: NDArray[np.int64], steps: Any) -> None:
        """Record rows that ran all blocks."""
        at = np.broadcast_to(steps, rows.shape)
        self.log.depths[rows, at] = self.n_blocks

    def _ended(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.isin(tokens, self.ends)


class Together(Loop):
    """All rows at the same token, until the last one exits."""

    def __init__(self, session: Session, request: Request) -> None:
        super().__init__(session, request)
        self._taken = np.zeros(len(self.segments))
        """For each look, the recent share of tokens at which the batch exited."""
        self._sequences = request.input_ids

    def run(self) -> Tensor:
        """Generate all answers."""
        session, request = self.session, self.request
        step = self._start()
        prompt = request.input_ids.shape[1] - 1
        if step > 0:
            self._extend(0)
        while step < request.tokens and not self._stops(step):
            session.show(prompt + step + 1)
            if request.may_exit[step]:
                known = self._run_early(step, prompt + step)
                if known is None:
                    break
                self._turn(step, known=known)
            else:
                self._run_full(step, prompt + step)
            step += 1
        return session.output[: self.n, : self._length(step)].clone()

    # ---------------------------------------------------------------------------------- one token

    def _run_full(self, step: int, position: int) -> None:
        session = self.session
        for segment in range(len(self.segments)):
            self._fill(segment, position)
        self.filled[:] = position + 1
        by_host = self.request.processors is not None or self.request.criteria is not None
        session.run_full("given" if by_host else "known")
        self._finish(np.flatnonzero(~self.finished), step)
        self.log.heads[~self.finished, step] = 1
        if by_host:
            self._turn(step, known=True)

    def _run_early(self, step: int, position: int) -> bool | None:
        """Run segments until all rows exited; return whether all logits are known.

        None: all sequences had ended already.
        """
        active = ~self.finished
        last, launched = len(self.segments) - 1, -1
        for segment in range(last + 1):
            if launched < segment:
                self._launch(segment, position, bool((~active).any()))
            self.filled[segment] = position + 1
            if segment == last:
                rows = np.flatnonzero(active)
                self._finish(rows, step)
                self.log.heads[rows, step] += 1
                break
            if self._speculates(segment):
                self._launch(segment + 1, position, True)
                launched = segment + 1
            if segment == 0 and self.session.captures:
                self._learn_finished(step)
                active &= ~self.finished
                if not active.any():
                    return None
            rows = np.flatnonzero(active)
            passed = self._passed(segment, rows, step, None)
            active[rows[passed]] = False
            self._taken[segment] += 0.1 * ((not active.any()) - self._taken[segment])
            if not active.any():
                break
        ran = np.flatnonzero(self.log.depths[:, step] > 0)
        if self.pick == "head":
            self.log.heads[ran, step] = 1
        return self.pick == "known"

    def _launch(self, segment: int, position: int, some_exited: bool) -> None:
        self._fill(segment, position)
        masked = segment > 0 and (some_exited or self.session.captures)
        self.session.run_segment(segment, None, masked=masked)

    def _fill(self, segment: int, position: int) -> None:
        """Compute what a segment owes before this position."""
        start = int(self.filled[segment, 0])
        if start < position:
            self.session.catch_up(segment, None, start, position - start)
            self.filled[segment] = position

    def _speculates(self, segment: int) -> bool:
        session = self.session
        return (
            session.captures
            and session.shortlist is None
            and bool(self._taken[segment] < SPECULATE_BELOW)
        )

    # ------------------------------------------------------------------------------------- tokens

    def _turn(self, step: int, *, known: bool) -> None:
        session, request = self.session, self.request
        if request.processors is None:
            session.turn(None, "known" if known else "head")
        else:
            if not known:
                session.run_head()
            logits = session.decoder.logits(session.logits[: self.n]).float()
            chosen = request.processors(self._sequences, logits).argmax(dim=-1)
            session.given[: self.n].copy_(chosen)
            session.turn(None, "given")
        self._extend(step)

    def _extend(self, step: int) -> None:
        """Append the tokens to the sequences that processors and stopping criteria see, if any."""
        session, n = self.session, self.n
        if self.request.processors is None and self.request.criteria is None:
            return
        new = session.output[:n, step : step + 1].to(self._sequences.device)
        self._sequences = torch.cat([self._sequences, new], dim=1)
        if self.request.criteria is not None:
            done = self.request.criteria(self._sequences, None).to(session.device)
            session.finished[:n] |= done
            session.exited[:n] |= done
            self.finished |= done.cpu().numpy()

    def _learn_finished(self, step: int) -> None:
        """Read the last turn's tokens, if there was one."""
        if step > 0:
            self.finished |= self._ended(self.session.read_tokens(self.n))

    def _stops(self, step: int) -> bool:
        """Whether all sequences have ended; a GPU tells one token later, without a wait."""
        if step == 0 or (self.session.captures and self.request.may_exit[step]):
            return False
        self._learn_finished(step)
        return bool(self.finished.all())

    def _length(self, steps: int) -> int:
        """Return the length of the longest answer."""
        ran = int((self.log.depths[:, :steps] > 0).any(axis=0).sum())
        return max(1, ran)


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
