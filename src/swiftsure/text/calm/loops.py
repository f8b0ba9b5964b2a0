"""Loops over a session: sequences join its rows, write tokens, and leave, each at its own time.

A loop decides what runs next, and records where each token exits. `RegroupingLoop` decides on the
host: each block runs on the rows that wait for it, so that rows that exited go on while others are
deep.
`device_loop.DeviceLoop` lets the device decide.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.exits import reaches
from swiftsure.text.calm.session import Pick, Session

__all__ = ["Found", "Log", "Loop", "RegroupingLoop", "Request"]

LEAST_SHARE = 0.2
"""Share of the rows from which a group at a deeper block runs before shallower ones."""

Log = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]
"""Depths (m, tokens), confidences (m, tokens, n_exits - 1) and heads (m, tokens)."""


@dataclass(frozen=True)
class Request:
    """Sequences that join together, as the host sees them."""

    input_ids: Tensor
    """(m, positions) before the first answer token."""
    levels: NDArray[np.float32]
    """(m, tokens): the threshold of each token."""
    may_exit: NDArray[np.bool_]
    """(tokens,): whether any row can exit at this token."""
    barred: int
    """Number of answer tokens before which no end token is picked."""
    first_logits: Tensor | None = None
    """(m, vocabulary): those of the first token, if there was a prompt."""
    processors: Any = None
    """Logits processors that the host runs; None: none."""
    criteria: Any = None
    """Stopping criteria that the host runs; None: none."""

    @property
    def by_host(self) -> bool:
        """Whether the host has to see each token before the next one begins."""
        return self.processors is not None or self.criteria is not None


@dataclass(frozen=True, slots=True)
class Found:
    """A token that a sequence wrote."""

    row: int
    token: int
    ended: bool
    """Whether it is the sequence's last one."""


class Loop(ABC):
    """Sequences in the rows of a session, each at a token of its own.

    Attributes
    ----------
    active : (n,)
        Rows whose sequences go on.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.n = session, session.n
        self.segments = session.segments
        self.n_blocks = len(session.decoder.blocks)
        size = self.n, session.capacity
        self.active = np.zeros(self.n, np.bool_)
        self.steps = np.zeros(self.n, np.int64)
        """Tokens that each row has written."""
        self.first = np.zeros(self.n, np.int64)
        """Position from which each row's first answer token is computed."""
        self.limits = np.zeros(self.n, np.int64)
        self.barred = np.zeros(self.n, np.int64)
        self.levels = np.zeros(size, np.float32)
        self.may_exit = np.zeros(size, np.bool_)
        self.ends = np.zeros(0, np.int64)
        self._depths, self._heads = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._confidences = np.zeros((*size, self.n_blocks - 1), np.float32)

    def set_ends(self, ends: Sequence[int], pad: int) -> None:
        """Set the tokens that end a sequence, and the one that follows an end."""
        self.ends = np.asarray(ends, np.int64)
        self.session.set_ends(ends, pad)

    @abstractmethod
    def settle(self) -> None:
        """Finish what concerns all rows, before the cache of some of them is overwritten."""

    def join(self, rows: Sequence[int], request: Request) -> list[Found]:
        """Begin sequences in free rows, whose source or prompt is in the cache.

        Returns their first tokens, if these are known from a prompt.
        """
        session, own = self.session, list(rows)
        tokens = request.levels.shape[1]
        first = request.input_ids.shape[1] - 1
        self.active[own] = True
        self.steps[own], self.first[own], self.limits[own] = 0, first, tokens
        self.barred[own] = request.barred if len(self.ends) else 0
        self.levels[own, :tokens], self.may_exit[own, :tokens] = request.levels, request.may_exit
        self._depths[own], self._heads[own], self._confidences[own] = 0, 0, np.nan
        session.bars_ends = bool((self.barred[self.active] > 0).any())
        session.join(own, request.input_ids[:, -1], first, request.levels, request.barred)
        self._begin(own, request)
        if request.first_logits is None:
            session.open(own)
            self._go_on(own)
            return []
        scores = request.first_logits
        if request.processors is not None:
            scores = request.processors(request.input_ids, scores)
        elif request.barred > 0:
            scores[:, self.ends] = -torch.inf
        session.given[torch.tensor(own, device=session.device)] = scores.argmax(dim=-1)
        session.next_tokens(own, "given")
        self._depths[own, 0], self._heads[own, 0] = self.n_blocks, 1
        found = self._learn(own)
        if any(each.ended for each in found):
            session.finish([each.row for each in found if each.ended])
        return found

    @abstractmethod
    def _begin(self, rows: list[int], request: Request) -> None:
        """Note what else concerns sequences that join."""

    @abstractmethod
    def _go_on(self, rows: Sequence[int]) -> None:
        """Let rows run whose next token has begun."""

    @abstractmethod
    def advance(self) -> list[Found]:
        """Run for a while; return the tokens that were written."""

    def leave(self, rows: Sequence[int]) -> None:
        """Free rows, whether or not their sequences have ended."""
        self.active[list(rows)] = False
        self.session.finish(rows)

    def log(self, rows: Sequence[int]) -> Log:
        """Return what happened to the tokens of some rows."""
        own, length = list(rows), max(1, int(self.steps[list(rows)].max()))
        found = self._depths, self._confidences, self._heads
        return tuple(each[own, :length].copy() for each in found)  # type: ignore[return-value]

    def _learn(self, rows: Sequence[int]) -> list[Found]:
        """Read the next tokens of these rows, and let those go on that have not ended."""
        tokens = self.session.read_tokens(len(rows))
        own = np.asarray(rows)
        going = self.active[own].copy()
        ended = self._ended(own, tokens)
        self.active[own[ended]] = False
        found = [
            Found(row, token, over)
            for row, token, over, was in zip(
                own.tolist(), tokens.tolist(), ended.tolist(), going, strict=True
            )
            if was
        ]
        self._go_on(own[going & ~ended].tolist())
        return found

    def _ended(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Count a token of each active row; return which of the rows have ended."""
        self.steps[rows] += self.active[rows]
        ended: NDArray[np.bool_] = np.isin(tokens, self.ends) | (
            self.steps[rows] >= self.limits[rows]
        )
        return ended


class _Host:
    """Sequences whose tokens the host picks or judges, all at once."""

    def __init__(self, rows: Sequence[int], request: Request) -> None:
        self.rows = list(rows)
        self.processors, self.criteria = request.processors, request.criteria
        self.sequences = request.input_ids


class RegroupingLoop(Loop):
    """Rows at tokens and blocks of their own; a block runs on the rows that wait for it.

    Parameters
    ----------
    session : Session
    largest : int
        Largest number of rows that a block takes at once.
    """

    def __init__(self, session: Session, largest: int) -> None:
        super().__init__(session)
        self.largest = largest
        self.pick: Pick = "known" if session.gives_logits else "head"
        self._queues: list[list[int]] = [[] for _ in session.parts]
        """Rows that wait for a segment or, the last queue, for all blocks."""
        self._done: list[int] = []
        """Rows that exited and wait for their next token."""
        self._hosts: dict[int, _Host] = {}
        self._filled = np.zeros((len(self.segments), self.n), np.int64)
        """Positions up to which each segment has the keys and values of each row."""

    def settle(self) -> None:
        """Do nothing: each row's keys and values are computed for itself."""

    def _begin(self, rows: list[int], request: Request) -> None:
        prompted = request.first_logits is not None
        self._filled[:, rows] = self.first[rows] + prompted
        for row in rows:
            self._hosts.pop(row, None)
        if request.by_host:
            host = _Host(rows, request)
            self._hosts |= dict.fromkeys(rows, host)

    def _go_on(self, rows: Sequence[int]) -> None:
        for row in rows:
            early = self.may_exit[row, self.steps[row]]
            self._queues[0 if early else -1].append(row)

    def leave(self, rows: Sequence[int]) -> None:
        """Free rows, whether or not their sequences have ended."""
        super().leave(rows)
        for queue in (*self._queues, self._done):
            queue[:] = [row for row in queue if row not in rows]

    def advance(self) -> list[Found]:
        """Run one group of rows through a segment, or let them take their next tokens."""
        part = self._next()
        ready = self._ready() if part == 0 else []
        if ready:
            return self._next_tokens(ready)
        if self._queues[part]:
            self._run(part)
        return []

    def _next(self) -> int:
        """Return what to run: the deepest part with enough rows, else the fullest.

        0 also takes next tokens.
        """
        sizes = np.array([len(queue) for queue in self._queues])
        sizes[0] += len(self._ready())
        enough = min(self.largest, LEAST_SHARE * sizes.sum())
        found = np.flatnonzero(sizes >= max(enough, 1))
        return int(found[-1]) if len(found) else int(sizes.argmax())

    def _ready(self) -> list[int]:
        """Return rows that may take their next tokens together.

        Those of one host may only when all of them are done.
        """
        for row in self._done:
            host = self._hosts.get(row)
            if host is not None and not self.active[host.rows].sum() > sum(
                each in host.rows for each in self._done
            ):
                return host.rows
        return [row for row in self._done if row not in self._hosts][: self.largest]

    def _next_tokens(self, rows: list[int]) -> list[Found]:
        session, host = self.session, self._hosts.get(rows[0])
        self._done = [row for row in self._done if row not in rows]
        pick = self.pick
        if host is not None and host.processors is not None:
            if pick == "head":
                session.run_head(rows)
            index = torch.tensor(rows, device=session.device)
            logits = session.decoder.logits(session.logits[index]).float()
            session.given[index] = host.processors(host.sequences, logits).argmax(dim=-1)
            pick = "given"
        session.next_tokens(rows if len(rows) < self.n else sorted(rows), pick)
        return self._learn(rows if len(rows) < self.n else sorted(rows))

    def _ended(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        ended = super()._ended(rows, tokens)
        host = self._hosts.get(int(rows[0]))
        if host is None:
            return ended
        new = torch.from_numpy(tokens).to(host.sequences)
        host.sequences = torch.cat([host.sequences, new[:, None]], dim=1)
        if host.criteria is not None:
            done = host.criteria(host.sequences, None).cpu().numpy()
            self.session.finish(rows[done].tolist())
            ended |= done
        return ended

    def _run(self, part: int) -> None:
        session, queue = self.session, self._queues[part]
        given, self._queues[part] = queue[: self.largest], queue[self.largest :]
        if len(given) == self.n:
            given.sort()
        rows = np.asarray(given)
        steps = self.steps[rows]
        positions = self.first[rows] + steps
        session.show(int(positions.max()) + 1)
        last = len(self.segments) - 1
        covered = range(part, part + 1) if part <= last else range(last + 1)
        for segment in covered:
            starts = self._filled[segment, rows]
            lacking = starts < positions
            if lacking.any():
                n_lacking = int((positions - starts).max())
                session.fill_skipped(segment, rows[lacking].tolist(), starts[lacking], n_lacking)
        session.run_part(part, given)
        self._filled[covered, rows[:, None]] = positions[:, None] + 1
        if part >= last:
            self._depths[rows, steps] = self.n_blocks
            self._heads[rows, steps] += 1
            self._done += given
            return
        passed = self._passed(part, rows, steps)
        self._done += rows[passed].tolist()
        self._queues[part + 1] += rows[~passed].tolist()

    def _passed(
        self, segment: int, rows: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Read a look at some rows; record it, and return which of them pass."""
        session, index = self.session, self.segments[segment][-1]
        scores = session.read_scores(segment, len(rows))
        levels = self.levels[rows, steps]
        counted = np.full(len(rows), session.gives_logits)
        if session.shortlist is not None and segment > 0:
            counted = reaches(scores, levels)
            if counted.any():
                session.check_shortlist(segment, rows[counted].tolist())
                scores[counted] = session.read_scores(segment, int(counted.sum()))
        passed: NDArray[np.bool_] = reaches(scores, levels, strict=session.rule.strict)
        self._confidences[rows, steps, index] = scores
        self._heads[rows[counted], steps[counted]] += 1
        self._depths[rows[passed], steps[passed]] = index + 1
        if not session.gives_logits:
            self._heads[rows[passed], steps[passed]] = 1
        return passed
