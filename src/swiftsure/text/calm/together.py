"""The loop that keeps all rows at the same token: blocks run on all until the last one exits.

It pays where more rows take no longer, as on a GPU: the mask of exited rows costs little, and one
graph serves every token.
"""

import numpy as np
import torch
from torch import Tensor

from swiftsure.text.calm.loops import Loop, Request
from swiftsure.text.calm.session import Session

__all__ = ["Together"]

SPECULATE_BELOW = 0.2
"""Share of tokens that exit at a look, up to which the next segment is launched before it is read.

Waiting for a look costs about a quarter of a block, which is wasted if the batch exits.
"""


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
