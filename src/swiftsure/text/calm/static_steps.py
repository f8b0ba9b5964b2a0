"""What a session captures: segments of blocks with their looks, turns, and owed keys and values.

Every function works on fixed buffers, for all rows or for a group of them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.exits import reaches
from swiftsure.text.calm.confidences import Confidence, Look, look_exits
from swiftsure.text.calm.rules import CalmRule
from swiftsure.text.calm.static_looks import StaticShortlist
from swiftsure.text.decoder import Decoder
from swiftsure.text.static_cache import chosen_rows
from swiftsure.text.static_decoder import StaticDecoder, StaticShape
from swiftsure.torch.capture import Recorder

__all__ = ["Pick", "StaticSteps"]

Pick = Literal["known", "head", "given"]
"""Where a turn finds the next tokens: logits of the looks, the head, or given by the host."""


class StaticSteps:
    """Buffers for n sequences of limited length, and the functions that work on them.

    Parameters
    ----------
    decoder : Decoder
    rule : CalmRule
    confidence : Confidence
    shape : StaticShape
    ends : int
        Number of end tokens.
    recorder : Recorder

    Attributes
    ----------
    segments : list of range
        Blocks between two looks; the last one ends without a look.
    scores, chosen : Tensor
        On the host: confidences of the last look of each segment, and tokens of the last turn.
    """

    def __init__(
        self,
        decoder: Decoder,
        rule: CalmRule,
        confidence: Confidence,
        shape: StaticShape,
        ends: int,
        recorder: Recorder,
    ) -> None:
        self.decoder, self.rule, self.confidence = decoder, rule, confidence
        self.recorder, self.n, self.device = recorder, shape.n, recorder.device
        self.captures = recorder.captures
        self.static = StaticDecoder(decoder, shape, recorder)
        last = len(decoder.blocks)
        bounds = [0, *(each + 1 for each in look_exits(decoder, rule, confidence)), last]
        self.segments = [range(*pair) for pair in pairwise(bounds)]
        self.gives_logits = confidence.gives_logits
        self.shortlist = StaticShortlist.of(confidence, shape.n)
        self.bars_ends = False
        """Whether end tokens are barred from the first answer tokens."""
        self._loaded: NDArray[np.float32] | None = None
        """What is in the table of levels."""
        self._allocate(shape.n + 1, shape.capacity, ends)

    def _allocate(self, rows: int, capacity: int, ends: int) -> None:
        device, head = self.device, self.decoder.head.weight

        def whole(*size: int, fill: int = 0) -> Tensor:
            return torch.full(size, fill, dtype=torch.long, device=device)

        self.tokens, self.positions = whole(rows, 1), whole(rows, 1)
        self.first = whole(1)
        """Position of the token from which the first answer token is computed."""
        self.starts = whole(rows, 1)
        self.rows = whole(rows)
        self.output = whole(rows, capacity)
        self.given = whole(rows)
        self.ends, self.pad, self.barred_until = whole(ends, fill=-1), whole(1), whole(1)
        self.finished, self.exited = (
            torch.zeros(rows, dtype=torch.bool, device=device) for _ in range(2)
        )
        self.level_table = torch.zeros((rows, capacity + 1), device=device)
        self.levels = torch.zeros(rows, device=device)
        self.short = torch.zeros(rows, device=device)
        """Confidences among the shortlist."""
        self.logits = torch.zeros((rows, head.shape[0]), dtype=head.dtype, device=device)
        self.current = self._first_states(rows)
        """States after the last block that each row ran."""
        self.finals = self.current
        """Input of the last norm; other than `current` only with exit heads."""
        if self.decoder.exit_heads is not None:
            self.finals = torch.zeros_like(self.current)
        width = self.current.shape[-1]
        self.exit_states = self.current.new_zeros((rows, capacity, width))
        """The exit state of every position."""
        self._own = torch.arange(self.n, device=device)
        pinned = self.recorder.pinned
        self.scores = [pinned(rows, torch.float32) for _ in self.segments]
        self.chosen = pinned(rows, torch.long)
        self.looked = [self.recorder.event() for _ in self.segments]
        self.turned = self.recorder.event()

    def _first_states(self, rows: int) -> Tensor:
        """Return a buffer for states, of the dtype that blocks return."""
        with torch.inference_mode():
            embedded = self.decoder.model.get_input_embeddings().weight
            return torch.zeros(
                (rows, 1, embedded.shape[1]), dtype=embedded.dtype, device=self.device
            )

    # ----------------------------------------------------------------------------- one generation

    def load(
        self,
        tokens: Tensor,
        position: int,
        prompt: int,
        levels: NDArray[np.float32],
        *,
        ends: Sequence[int],
        pad: int,
        barred: int,
    ) -> None:
        """Begin a generation.

        Parameters
        ----------
        tokens : (n,)
            The tokens to be fed first.
        position : int
            Their position.
        prompt : int
            Number of positions before the first answer token.
        levels : (n, tokens)
            The threshold of each token.
        ends, pad : end tokens, and the token after an end
        barred : int
            Number of answer tokens before which no end token is picked.
        """
        n = self.n
        self.tokens[:n, 0].copy_(tokens)
        self.positions.fill_(position)
        self.first.fill_(prompt - 1)
        if len(self.ends):
            self.ends.copy_(torch.tensor(list(ends)))
        self.pad.fill_(pad)
        self.bars_ends = barred > 0 and len(ends) > 0
        self.barred_until.fill_(barred)
        self.finished.fill_(False)
        self.exited.fill_(False)
        if self._loaded is not None and np.array_equal(self._loaded, levels):
            return
        self._loaded = levels
        columns = min(levels.shape[1], self.level_table.shape[1])
        self.level_table.fill_(float("inf"))
        self.level_table[:n, :columns].copy_(torch.from_numpy(levels[:, :columns]))

    # -------------------------------------------------------------------------------- the tokens

    def begin(self, tokens: Tensor, positions: Tensor, rows: Tensor | None) -> None:
        """Begin tokens: everything before the first block."""
        states = self.static.begin(tokens, positions, rows)
        steps = (positions - self.first).clamp_(max=self.level_table.shape[1] - 1)
        if rows is None:
            n = self.n
            self.current[:n].copy_(states)
            self.levels[:n].copy_(self.level_table[:n].gather(1, steps)[:, 0])
            self.exited[:n].copy_(self.finished[:n])
        else:
            self.current.index_copy_(0, rows, states.to(self.current.dtype))
            levels = self.level_table.index_select(0, rows).gather(1, steps)[:, 0]
            self.levels.index_copy_(0, rows, levels)

    def pick_and_begin(self, rows: Tensor | None, pick: Pick) -> None:
        """Pick the tokens of rows that are done, note what they leave, and begin the next ones."""
        n, own = self.n, self._own if rows is None else rows
        positions = chosen_rows(self.positions, rows, n)
        steps = (positions - self.first).clamp_(min=0)
        self.exit_states[own, positions[:, 0]] = chosen_rows(self.current, rows, n)[:, 0]
        finished = chosen_rows(self.finished, rows, n)
        tokens = torch.where(finished, self.pad, self._picked(rows, pick, steps))
        self.output[own, steps[:, 0]] = tokens
        if len(self.ends):
            finished = finished | (tokens[:, None] == self.ends).any(dim=1)
        positions = (positions + 1).clamp_(max=self.output.shape[1] - 1)  # of the padding row
        for buffer, value in (
            (self.finished, finished),
            (self.tokens, tokens[:, None]),
            (self.positions, positions),
        ):
            if rows is None:
                buffer[:n].copy_(value)
            else:
                buffer.index_copy_(0, rows, value)
        self.chosen[: len(own)].copy_(tokens, non_blocking=True)
        self.begin(tokens[:, None], positions, rows)

    def turned_buffers(self) -> tuple[Tensor, ...]:
        """Return the buffers that a turn reads and changes."""
        return self.tokens, self.positions, self.finished, self.current

    def _picked(self, rows: Tensor | None, pick: Pick, steps: Tensor) -> Tensor:
        if pick == "given":
            return chosen_rows(self.given, rows, self.n)
        if pick == "known":
            scores = chosen_rows(self.logits, rows, self.n)
        else:
            scores = self.head(chosen_rows(self.finals, rows, self.n))
        logits = self.decoder.logits(scores).float()
        if self.bars_ends:
            early = logits[:, self.ends]
            bar = torch.where(steps < self.barred_until, -torch.inf, early)
            logits = logits.index_copy(1, self.ends, bar)
        return logits.argmax(dim=1)

    def head(self, states: Tensor) -> Tensor:
        """Return the head's output for states after a norm is applied, (b, vocabulary)."""
        scores: Tensor = self.decoder.head(self.decoder.head_input(states[:, 0]))
        return scores

    def segment(self, segment: int, rows: Tensor | None, masked: bool) -> None:
        """Run a segment and its look; `masked`: rows that exited keep their states."""
        n, blocks = self.n, self.segments[segment]
        positions = chosen_rows(self.positions, rows, n)
        states = before = chosen_rows(self.current, rows, n)
        arguments = self.static.arguments(rows)
        kept = self.exited[:n, None, None] if masked else None
        for index in blocks:
            before = states
            states = self.static.run_block(index, before, positions, arguments)
            if kept is not None:
                states = torch.where(kept, before, states)
        is_last = segment == len(self.segments) - 1
        exit_index = blocks[-1]
        if self.decoder.exit_heads is not None:
            heads = self.decoder.exit_heads
            self._write(self.finals, states if is_last else heads(exit_index, states), rows, kept)
        if not is_last:
            self._look(segment, Look(exit_index, states[:, 0], before[:, 0], rows, n, 0.0))
        elif self.gives_logits:
            scores = self.head(states)
            self._write(self.logits, scores, rows, None if kept is None else kept[:, 0])
        self._write(self.current, states, rows, None)  # last: `before` may be a view of it

    def _look(self, segment: int, look: Look) -> None:
        """Measure the confidence of all rows of a group, and let those exit that pass."""
        rows, n = look.rows, self.n
        levels = chosen_rows(self.levels, rows, n)
        if self.shortlist is not None and segment > 0:
            scores = self.shortlist.scores(look, rows)
            self._write(self.short, scores, rows, None)
            whole = None
        else:
            self.confidence.begin()
            asked = Look(look.exit_index, look.states, look.previous, None, len(levels), levels)
            scores = self.confidence.measure(asked)
            whole = self.confidence.computed
            if self.shortlist is not None:
                self.shortlist.keep(self.confidence.listed, rows)  # type: ignore[attr-defined]
        self.scores[segment][: len(levels)].copy_(scores, non_blocking=True)
        if self.shortlist is None or segment == 0:
            self._exit(scores, levels, None if whole is None else whole.values, rows)

    def _exit(
        self, scores: Tensor, levels: Tensor, whole: Tensor | None, rows: Tensor | None
    ) -> None:
        """Keep the logits of rows that pass and, if all rows run together, mark them."""
        if rows is not None:
            if whole is not None:
                self.logits.index_copy_(0, rows, whole)
            return
        exited = self.exited[: self.n]
        if whole is not None:
            self._write(self.logits, whole, None, exited[:, None])
        exited |= reaches(scores, levels, strict=self.rule.strict)

    def check_vocabulary(self, segment: int, rows: Tensor | None) -> None:
        """Check the whole vocabulary for rows whose shortlist reached the threshold."""
        n = self.n
        levels = chosen_rows(self.levels, rows, n)
        short = chosen_rows(self.short, rows, n)
        states = chosen_rows(self.finals, rows, n)[:, 0]
        inputs = self.decoder.head_input(states)
        whole = self.decoder.head(inputs)
        scores = self.shortlist.checked(short, whole, levels)  # type: ignore[union-attr]
        self.scores[segment][: len(levels)].copy_(scores, non_blocking=True)
        self._exit(scores, levels, whole, rows)

    def fill_window(self, segment: int, rows: Tensor | None, window: int) -> None:
        """Compute the keys and values of tokens that skipped a segment, from `starts` on."""
        own = self._own if rows is None else rows
        later = torch.arange(window, device=self.device)
        positions = chosen_rows(self.starts, rows, self.n) + later
        positions = positions.clamp_(max=self.exit_states.shape[1] - 1)
        states = self.exit_states[own[:, None], positions]
        for index in self.segments[segment]:
            self.static.write_skipped(index, states, positions, rows)

    def _write(
        self, buffer: Tensor, value: Tensor, rows: Tensor | None, kept: Tensor | None
    ) -> None:
        """Write a value per row, except where `kept`."""
        if rows is not None:
            buffer.index_copy_(0, rows, value.to(buffer.dtype))
            return
        target = buffer[: self.n]
        target.copy_(value if kept is None else torch.where(kept, target, value.to(target.dtype)))
