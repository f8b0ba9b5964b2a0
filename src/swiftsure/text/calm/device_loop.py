"""The loop that runs on the device: one graph per token of all rows, without a wait of the host.

Later segments are conditional parts of the graph, and the device itself records confidences, picks
tokens and notices ends. Blocks run on all rows until the last one exits: on a GPU more rows take
little longer. The host launches a few tokens ahead of those that it has read.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.exits import reaches
from swiftsure.run.graphs.conditional import run_if
from swiftsure.text.calm.confidences import Look
from swiftsure.text.calm.looks import Batch, decide, gap_and_token, next_tokens
from swiftsure.text.calm.loops import Found, Log, Loop, Request
from swiftsure.text.calm.session import WINDOW, Session

__all__ = ["DeviceLoop"]

AHEAD = 4
"""Tokens that are launched before the host reads the first of them."""
NESTED = 6
"""Segments that are nested, so that a skipped one skips all later ones at no cost."""


@dataclass(frozen=True)
class _Launched:
    """A token of all rows that the host has not read yet."""

    tokens: Tensor
    event: Any
    joined: NDArray[np.int64]
    """(n,): which sequence each row held; -1: none."""


class DeviceLoop(Loop):
    """All rows write their next tokens at once, each at a position of its own.

    Parameters
    ----------
    session : Session
        Without a shortlist.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        device, n, count = session.device, session.n, len(session.segments)

        def flag() -> Tensor:
            return torch.zeros((), dtype=torch.bool, device=device)

        self.due, self.lacks = flag(), torch.zeros(count, dtype=torch.bool, device=device)
        """Whether a window of positions is lacking; whether each segment lacks any."""
        log = torch.zeros((max(count - 1, 1), session.capacity, n), device=device)
        self.batch = Batch(
            tokens=session.tokens[:n, 0],
            positions=session.positions[:n, 0],
            finished=session.finished[:n],
            exited=torch.ones(n, dtype=torch.bool, device=device),
            levels=session.levels[:n],
            first=session.first[:n, 0],
            limits=torch.zeros(n, dtype=torch.long, device=device),
            level_table=session.level_table,
            ends=session.ends,
            pad=session.pad,
            found=torch.zeros(n, dtype=torch.long, device=device),
            log=log,
            behind=torch.zeros(count, dtype=torch.long, device=device),
            left=flag(),
            alive=flag(),
        )
        recorder = session.recorder
        self._free = [(recorder.pinned(n, torch.long), recorder.event()) for _ in range(AHEAD + 1)]
        self._launched: deque[_Launched] = deque()
        self._next = np.zeros(n, np.int64)
        """Number of the token that each row begins with the next launch."""
        self._joined = np.full(n, -1)
        self._sequences = 0
        self._prompted = np.zeros(n, np.bool_)
        self._may_lack = False

    # -------------------------------------------------------------------------------- on the host

    def settle(self) -> None:
        """Compute what all segments lack, so that no later fill touches the rows that join."""
        if self._may_lack:
            self.session.play("settle", self._fill_all, *self._changed())
            self._may_lack = False

    def _begin(self, rows: list[int], request: Request) -> None:
        self._prompted[rows] = request.first_logits is not None
        self._joined[rows] = np.arange(self._sequences, self._sequences + len(rows))
        self._sequences += len(rows)
        index = torch.tensor(rows, device=self.session.device)
        self.batch.limits[index] = request.levels.shape[1]
        self.batch.log[:, :, index] = torch.nan

    def _go_on(self, rows: Sequence[int]) -> None:
        self._next[list(rows)] = self.steps[list(rows)]
        self.batch.exited.copy_(self.batch.finished)
        self.batch.alive.fill_(True)

    def advance(self) -> list[Found]:
        """Launch a token of all rows; return those of an earlier launch."""
        going = self.active & (self._next < self.limits)
        if going.any():
            self._launch(going)
        if self._launched and (len(self._launched) >= AHEAD or not going.any()):
            return self._read(self._launched.popleft())
        return []

    def _launch(self, going: NDArray[np.bool_]) -> None:
        session, rows = self.session, np.flatnonzero(going)
        if self.may_exit[rows, self._next[rows]].any():
            session.play(("early", session.bars_ends), self._early, *self._changed())
            self._may_lack = True
        else:
            key = "full", session.bars_ends, self._may_lack
            session.play(key, partial(self._full, lacking=self._may_lack), *self._changed())
        self._next[rows] += 1
        tokens, event = self._free.pop()
        tokens.copy_(self.batch.tokens, non_blocking=True)
        if event is not None:
            event.record()
        self._launched.append(_Launched(tokens, event, np.where(going, self._joined, -1)))

    def _read(self, launched: _Launched) -> list[Found]:
        """Wait for a launch; return the tokens of sequences that had not ended before."""
        if launched.event is not None:
            launched.event.synchronize()
        tokens = launched.tokens.numpy().copy()
        self._free.append((launched.tokens, launched.event))
        rows = np.flatnonzero(self.active & (launched.joined == self._joined))
        ended = self._ended(rows, tokens[rows])
        self.active[rows[ended]] = False
        pairs = zip(rows.tolist(), tokens[rows].tolist(), ended.tolist(), strict=True)
        return [Found(*each) for each in pairs]

    def leave(self, rows: Sequence[int]) -> None:
        """Free rows; what was launched for them is not read."""
        super().leave(rows)
        self._joined[list(rows)] = -1
        self.batch.exited.copy_(self.batch.finished)

    def log(self, rows: Sequence[int]) -> Log:
        """Return what happened to the tokens of some rows: depths follow from confidences."""
        own, length = list(rows), max(1, int(self.steps[list(rows)].max()))
        written = np.arange(length) < self.steps[own][:, None]
        going = self.may_exit[own, :length] & written
        going[self._prompted[own], 0] = False
        depths = np.where(written, self.n_blocks, 0)
        heads = np.where(written & ~going, 1, 0)
        confidences = np.full((len(own), length, self.n_blocks - 1), np.nan, np.float32)
        looked = going.copy()
        if len(self.segments) > 1 and going.any():
            scores = self.batch.log[:, :length, own].cpu().numpy()
            for segment, found in enumerate(scores):
                index = self.segments[segment][-1]
                confidences[:, :, index] = np.where(going, found.T, np.nan)
                heads += going & self.session.gives_logits
                passed = going & reaches(
                    found.T, self.levels[own, :length], strict=self.session.rule.strict
                )
                depths[passed] = index + 1
                going = going & ~passed
        heads += going if self.session.gives_logits else looked
        return depths, confidences, heads

    # ------------------------------------------------------------------- captured: one token of all

    def _changed(self) -> tuple[Tensor, ...]:
        """Return the buffers that a token reads and changes."""
        session, it = self.session, self.batch
        own = it.exited, it.found, it.log, it.behind, it.left, it.alive, self.lacks, self.due
        steps = session.tokens, session.positions, session.finished, session.levels
        return *own, *steps, session.current, *session.static.kept

    def _early(self) -> None:
        """Run a token until all rows have exited."""
        run_if(self.batch.alive, self._early_token)

    def _full(self, *, lacking: bool) -> None:
        """Run all blocks; `lacking`: earlier tokens may have skipped some."""
        run_if(self.batch.alive, lambda: self._full_token(lacking))

    def _early_token(self) -> None:
        self._segments(0)
        session = self.session
        if not session.gives_logits:
            self.batch.found.copy_(self._picked(session.head(session.finals[: self.n])))
        self._next_tokens()

    def _segments(self, first: int) -> None:
        """Run a segment and, while rows are left, later ones."""
        last = len(self.segments) - 1
        self._segment(first)
        for start in range(first + 1, last + 1, NESTED):
            run_if(self.batch.left, partial(self._nested, start, start + NESTED))

    def _nested(self, segment: int, end: int) -> None:
        self._segment(segment)
        if segment + 1 < min(end, len(self.segments)):
            run_if(self.batch.left, lambda: self._nested(segment + 1, end))

    def _segment(self, segment: int) -> None:
        session, it, n = self.session, self.batch, self.n
        if segment > 0:
            run_if(self.lacks[segment], lambda: self._fill(segment))
        kept = it.exited[:, None, None] if n > 1 and segment > 0 else None
        states, before = session.run_blocks(self.segments[segment], None, kept)
        exit_index = self.segments[segment][-1]
        session.keep_finals(exit_index, states, None, kept)
        if segment < len(self.segments) - 1:
            look = Look(exit_index, states[:, 0], before[:, 0], None, n, it.levels)
            self._look(segment, look)
        else:
            it.behind.fill_(-1)
            if session.gives_logits:
                found = self._picked(session.head(states))
                it.found.copy_(torch.where(it.exited, it.found, found))
        session.current[:n].copy_(states)  # last: `before` may be a view of it

    def _look(self, segment: int, look: Look) -> None:
        session, confidence = self.session, self.session.confidence
        confidence.begin()
        scores = confidence.measure(look)
        tokens = None
        if session.gives_logits:
            tokens = confidence.tokens
            if session.bars_ends or tokens is None:
                tokens = self._picked(confidence.computed.values)  # type: ignore[union-attr]
        decide(scores, segment, tokens, self.batch, strict=session.rule.strict)

    def _full_token(self, lacking: bool) -> None:
        session, n = self.session, self.n
        if lacking:
            run_if(self.lacks[-1], self._fill_all)
        blocks = range(self.n_blocks)
        states, _ = session.run_blocks(blocks, None)
        self.batch.behind.fill_(-1)
        session.current[:n].copy_(states)
        self.batch.found.copy_(self._picked(session.head(states)))
        self._next_tokens(may_lack=lacking)

    def _picked(self, scores: Tensor) -> Tensor:
        """Return the most probable tokens for the head's output."""
        it = self.batch
        logits = self.session.allowed(scores, (it.positions - it.first)[:, None], None)
        return gap_and_token(logits)[1] if logits.device.type == "cuda" else logits.argmax(dim=1)

    def _next_tokens(self, *, may_lack: bool = True) -> None:
        """Write the tokens, and begin the next ones."""
        session, it, n = self.session, self.batch, self.n
        may_lack = may_lack and len(self.segments) > 1
        if may_lack:
            session.exit_states[session.own, it.positions] = session.current[:n, 0]
        next_tokens(it)
        states = session.static.begin(session.tokens[:n], session.positions[:n], None)
        session.current[:n].copy_(states)
        if may_lack:
            torch.gt(it.behind, 0, out=self.lacks)
            torch.ge(it.behind[-1], WINDOW, out=self.due)
            run_if(self.due, self._fill_all)

    def _fill(self, segment: int) -> None:
        """Compute keys and values that a segment lacks: at most a window of them."""
        session, n = self.session, self.n
        starts = session.positions[:n] - self.batch.behind[segment]
        session.starts[:n].copy_(starts.clamp_(min=0))  # of rows that have ended
        session.fill_window(segment, None, WINDOW)

    def _fill_all(self) -> None:
        """Compute what all segments lack; the last one lacks the most."""
        for segment in range(1, len(self.segments)):
            self._fill(segment)
        self.batch.behind.fill_(0)
        self.lacks.fill_(False)
