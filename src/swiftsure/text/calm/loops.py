"""The host's side of captured decoding: what all loops share.

A loop decides what runs next, and records where each token exits.
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
from swiftsure.text.calm.session import Session
from swiftsure.text.calm.static_steps import Pick

__all__ = ["Log", "Loop", "Request"]


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
        return int(self.levels.shape[1])


class Log:
    """What happened to each token: depth, confidences and heads."""

    def __init__(self, n: int, tokens: int, n_exits: int) -> None:
        self.depths = np.zeros((n, tokens), np.int64)
        self.confidences = np.full((n, tokens, n_exits - 1), np.nan, np.float32)
        self.heads = np.zeros((n, tokens), np.int64)

    def arrays(self, tokens: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return depths, confidences and heads of the first tokens."""
        return self.depths[:, :tokens], self.confidences[:, :tokens], self.heads[:, :tokens]


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
            counted = reaches(own, levels)
            if counted.any():
                own[counted] = self._checked(segment, rows[counted], given)
        at = np.broadcast_to(steps, rows.shape)
        log.confidences[rows, at, self.segments[segment][-1]] = own
        log.heads[rows[counted], at[counted]] += 1
        passed: NDArray[np.bool_] = reaches(own, levels, strict=session.rule.strict)
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
