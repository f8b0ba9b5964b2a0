"""The loop that runs on the device: one graph per token, without a wait of the host.

Later segments are conditional parts of the graph, and the device itself records confidences, picks
tokens and notices the end. The host launches a few tokens ahead.
"""

from functools import partial
from typing import Any
from weakref import proxy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.exits import reaches
from swiftsure.text.calm.confidences import Look
from swiftsure.text.calm.looks import Turn, decide, gap_and_token, turn
from swiftsure.text.calm.loops import Loop
from swiftsure.text.calm.session import WINDOW, Session
from swiftsure.torch.conditional import run_if

__all__ = ["OnDevice", "TokenGraph"]

AHEAD = 4
"""Tokens that are launched before the host reads whether sequences go on."""
NESTED = 6
"""Segments that are nested, so that a skipped one skips all later ones at no cost."""


class TokenGraph:
    """One token of all rows, as functions to be captured.

    Parameters
    ----------
    session : Session
        Whose buffers are used.
    """

    def __init__(self, session: Session) -> None:
        self.session: Session = proxy(session)  # which owns this
        self.n = session.n
        device, n, count = session.device, session.n, len(session.segments)
        self.step, self.limit = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        self.alive, self.left, self.due = (
            torch.zeros((), dtype=torch.bool, device=device) for _ in range(3)
        )
        self.found = torch.zeros(n, dtype=torch.long, device=device)
        """Tokens of rows that exited."""
        self.filled = torch.zeros(count, dtype=torch.long, device=device)
        """Positions up to which each segment has keys and values."""
        self.owes = torch.zeros(count, dtype=torch.bool, device=device)
        capacity = session.output.shape[1]
        self.log = torch.zeros((max(count - 1, 1), capacity, n), device=device)
        """Confidences of each look, NaN where none was computed."""
        self.turn = Turn(
            tokens=session.tokens[:n, 0],
            positions=session.positions[:n, 0],
            finished=session.finished[:n],
            exited=session.exited[:n],
            levels=session.levels[:n],
            output=session.output,
            level_table=session.level_table,
            ends=session.ends,
            pad=session.pad,
            step=self.step,
            limit=self.limit,
            alive=self.alive,
        )
        self.goes_on = session.recorder.pinned(1, torch.bool)
        """On the host: whether a sequence goes on."""

    def begin(self, step: int, tokens: int, filled: int) -> None:
        """Prepare for a generation whose first token has this number."""
        self.step.fill_(step)
        self.limit.fill_(tokens)
        self.filled.fill_(filled)
        self.owes.fill_(False)
        self.due.fill_(False)
        self.alive.fill_(True)
        self.goes_on.fill_(True)
        self.log.fill_(float("nan"))

    def changed(self) -> tuple[Tensor, ...]:
        """Return the buffers that a token reads and changes."""
        session = self.session
        own = self.step, self.filled, self.owes, self.due, self.alive, self.found, self.log
        steps = session.tokens, session.positions, session.finished, session.exited
        more = session.levels, session.current, session.output, self.goes_on
        return *own, *steps, *more, *session.static.kept

    def early(self) -> None:
        """Run a token until all rows have exited."""
        run_if(self.alive, self._early)

    def full(self, *, owing: bool) -> None:
        """Run all blocks; `owing`: earlier tokens may have skipped some."""
        run_if(self.alive, lambda: self._full(owing))

    # ---------------------------------------------------------------------------------- one token

    def _early(self) -> None:
        self._segments(0)
        session = self.session
        if not session.gives_logits:
            self.found.copy_(self._picked(session.head(session.finals[: self.n])))
        self._turn()

    def _segments(self, first: int) -> None:
        """Run a segment and, while rows are left, later ones."""
        last = len(self.session.segments) - 1
        self._segment(first)
        for start in range(first + 1, last + 1, NESTED):
            run_if(self.left, lambda start=start: self._nested(start, start + NESTED))  # type: ignore[misc]

    def _nested(self, segment: int, end: int) -> None:
        self._segment(segment)
        if segment + 1 < min(end, len(self.session.segments)):
            run_if(self.left, lambda: self._nested(segment + 1, end))

    def _segment(self, segment: int) -> None:
        session, n = self.session, self.n
        if segment > 0:
            run_if(self.owes[segment], lambda: self._fill(segment))
        positions = session.positions[:n]
        states = before = session.current[:n]
        arguments = session.static.arguments(None)
        kept = session.exited[:n, None, None] if n > 1 and segment > 0 else None
        for index in session.segments[segment]:
            before = states
            states = session.static.run_block(index, before, positions, arguments)
            if kept is not None:
                states = torch.where(kept, before, states)
        is_last = segment == len(session.segments) - 1
        exit_index = session.segments[segment][-1]
        heads = session.decoder.exit_heads
        if heads is not None:
            session._write(
                session.finals, states if is_last else heads(exit_index, states), None, kept
            )
        if not is_last:
            self._look(segment, Look(exit_index, states[:, 0], before[:, 0], None, n, 0.0))
        elif session.gives_logits:
            found = self._picked(session.head(states))
            self.found.copy_(torch.where(session.exited[:n], self.found, found))
        if is_last:
            torch.add(positions[:1, 0].expand_as(self.filled), 1, out=self.filled)
        session.current[:n].copy_(states)  # last: `before` may be a view of it

    def _look(self, segment: int, look: Look) -> None:
        session, n = self.session, self.n
        confidence = session.confidence
        confidence.begin()
        levels = session.levels[:n]
        asked = Look(look.exit_index, look.states, look.previous, None, n, levels)
        scores = confidence.measure(asked)
        tokens = None
        if session.gives_logits:
            tokens = confidence.tokens
            if session.bars_ends or tokens is None:
                tokens = self._picked(confidence.computed.values)  # type: ignore[union-attr]
        decide(
            scores,
            levels,
            session.exited[:n],
            self.left,
            self.log[segment],
            self.step,
            tokens,
            self.found,
            self.turn.positions,
            self.filled[segment],
            strict=session.rule.strict,
        )

    def _full(self, owing: bool) -> None:
        session, n = self.session, self.n
        if owing:
            run_if(self.owes[-1], self._fill_all)
        states, positions = session.current[:n], session.positions[:n]
        arguments = session.static.arguments(None)
        for index in range(len(session.decoder.blocks)):
            states = session.static.run_block(index, states, positions, arguments)
        torch.add(positions[:1, 0].expand(len(self.filled)), 1, out=self.filled)
        session.current[:n].copy_(states)
        self.found.copy_(self._picked(session.head(states)))
        self._turn(may_owe=owing)

    def _picked(self, scores: Tensor) -> Tensor:
        """Return the most probable tokens for the head's output."""
        session = self.session
        logits = session.decoder.logits(scores)
        if session.bars_ends:
            logits = logits.float()
            early = self.step < session.barred_until
            bar = torch.where(early, -torch.inf, logits[:, session.ends])
            logits = logits.index_copy(1, session.ends, bar)
        return gap_and_token(logits)[1] if logits.device.type == "cuda" else logits.argmax(dim=1)

    def _turn(self, *, may_owe: bool = True) -> None:
        """Append the tokens, and begin the next ones."""
        session, n = self.session, self.n
        if may_owe and len(session.segments) > 1:
            session.exit_states[session._own, session.positions[:n, 0]] = session.current[:n, 0]
        turn(self.found, self.turn)
        states = session.static.begin(session.tokens[:n], session.positions[:n], None)
        session.current[:n].copy_(states)
        self.goes_on.copy_(self.alive, non_blocking=True)
        if may_owe and len(session.segments) > 1:
            owed = session.positions[0] - self.filled
            torch.gt(owed, 0, out=self.owes)
            torch.ge(owed[-1], WINDOW, out=self.due)
            run_if(self.due, self._fill_all)

    # ------------------------------------------------------------------------ owed keys and values

    def _fill(self, segment: int) -> None:
        """Compute keys and values that a segment owes: at most a window of them."""
        session = self.session
        session.starts[: self.n].copy_(self.filled[segment].expand(self.n, 1))
        session.fill_window(segment, None, WINDOW)

    def _fill_all(self) -> None:
        """Compute what all segments owe; the last one owes the most."""
        for segment in range(1, len(self.session.segments)):
            self._fill(segment)
        self.filled.copy_(self.session.positions[:1, 0].expand_as(self.filled))
        self.owes.fill_(False)


class OnDevice(Loop):
    """All rows at the same token, decided on the device; without processors of the host."""

    def run(self) -> Tensor:
        """Generate all answers."""
        session, request = self.session, self.request
        step = self._start()
        graph = session.token_graph
        graph.begin(step, request.tokens, int(self.filled[0, 0]) + step)
        session.levels[: self.n].copy_(session.level_table[: self.n, step])
        may_owe = False
        waiting: list[Any] = []
        for number in range(step, request.tokens):
            if request.may_exit[number]:
                session.play(("early", session.bars_ends), graph.early, *graph.changed())
                may_owe = True
            else:
                session.play(
                    ("whole", session.bars_ends, may_owe),
                    partial(graph.full, owing=may_owe),
                    *graph.changed(),
                )
            if not self._goes_on(waiting):
                break
        return self._finished_answers(step)

    def _goes_on(self, waiting: list[Any]) -> bool:
        """Return whether a sequence goes on, as of some tokens ago."""
        session = self.session
        if not len(session.ends):
            return True
        event = session.recorder.event()
        if event is not None:
            event.record()
        waiting.append(event)
        if len(waiting) < AHEAD:
            return True
        first = waiting.pop(0)
        if first is not None:
            first.synchronize()
        return bool(session.token_graph.goes_on)

    def _finished_answers(self, first: int) -> Tensor:
        """Return the answers, and record what happened to their tokens."""
        session, request, n = self.session, self.request, self.n
        answers = session.output[:n, : request.tokens].cpu().numpy()
        ended = np.isin(answers, self.ends)
        ends = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, request.tokens)
        length = max(1, int(ends.max()))
        if len(session.segments) > 1 and request.may_exit[:length].any():
            self._record(session.token_graph.log[:, :length].cpu().numpy(), first)
        else:
            self.log.depths[:, :length] = self.n_blocks
            self.log.heads[:, :length] = 1
        after = np.arange(request.tokens) >= ends[:, None]
        self.log.depths[after] = 0
        self.log.heads[after] = 0
        self.log.confidences[after] = np.nan
        return session.output[:n, :length].clone()

    def _record(self, scores: NDArray[np.float32], first: int) -> None:
        """Find the depth of every token from its confidences, (looks, tokens, n)."""
        session, request, log = self.session, self.request, self.log
        length = scores.shape[1]
        levels = request.levels[:, :length].T
        going = np.ones((length, self.n), np.bool_)
        log.depths[:, :length] = self.n_blocks
        log.heads[:, :length] = 1
        looked = request.may_exit[:length] & (np.arange(length) >= first)
        going[~looked] = False
        looks = np.zeros((length, self.n), np.int64)
        for segment, found in enumerate(scores):
            index = session.segments[segment][-1]
            log.confidences[:, :length, index] = np.where(going, found, np.nan).T
            looks += going
            passed = going & reaches(found, levels, strict=session.rule.strict)
            log.depths[:, :length][passed.T] = index + 1
            going &= ~passed
        if session.gives_logits:
            log.heads[:, :length] = np.where(looked[:, None], looks + going, 1).T
