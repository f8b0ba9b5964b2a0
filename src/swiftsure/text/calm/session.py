"""Early-exit decoding over fixed buffers: the functions that run, and their captured graphs.

Blocks between two looks form a segment; one more segment holds all blocks and looks nowhere. One
function runs a segment and its look; `next_tokens` picks the tokens of rows that are done, and
begins their next ones; `fill_skipped` computes the keys and values that a segment lacks for tokens
that skipped it. On a GPU each is captured once as a CUDA graph and replayed; elsewhere it is
called. Rows may be at different tokens and segments.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.run.graphs.recorder import Recorder
from swiftsure.text.calm.confidences import Confidence, Look, StaticShortlist, look_exits
from swiftsure.text.calm.rules import CalmRule
from swiftsure.text.decoder import Decoder
from swiftsure.text.static_cache import chosen_rows
from swiftsure.text.static_decoder import StaticDecoder, StaticEncoder, StaticShape, group_size

__all__ = ["WINDOW", "Pick", "Session"]

Pick = Literal["known", "head", "given"]
"""Where `next_tokens` finds them: logits of the looks, the head, or given by the host."""
WINDOW = 8
"""Skipped positions whose keys and values one captured `fill_skipped` computes."""


class Session:
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
    parts : list of range
        The segments and, if there are several, all blocks together.
    scores, chosen : Tensor
        On the host: confidences of the last look of each segment, and the last tokens picked.
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
        self.recorder, self.device = recorder, recorder.device
        self.n, self.capacity = shape.n, shape.capacity
        self.captures = recorder.captures
        self.static = StaticDecoder(decoder, shape, recorder)
        self.encoder = StaticEncoder(self.static, recorder)
        last = len(decoder.blocks)
        bounds = [0, *(each + 1 for each in look_exits(decoder, rule, confidence)), last]
        self.segments = [range(*pair) for pair in pairwise(bounds)]
        self.parts = self.segments if len(bounds) == 2 else [*self.segments, range(last)]
        self.gives_logits = confidence.gives_logits
        self.shortlist = StaticShortlist.of(confidence, shape.n)
        self.bars_ends = False
        """Whether end tokens are barred from the first tokens of some answer."""
        self._graphs: dict[Hashable, Any] = {}
        self._allocate(shape.n + 1, shape.capacity, ends)

    def _allocate(self, rows: int, capacity: int, ends: int) -> None:
        device, head = self.device, self.decoder.head.weight

        def whole(*size: int, fill: int = 0) -> Tensor:
            return torch.full(size, fill, dtype=torch.long, device=device)

        self.tokens, self.positions = whole(rows, 1), whole(rows, 1)
        self.first = whole(rows, 1)
        """Position of the token from which the first answer token is computed."""
        self.starts = whole(rows, 1)
        self.rows = whole(rows)
        self.given = whole(rows)
        self.ends, self.pad, self.barred_until = whole(ends, fill=-1), whole(1), whole(rows, 1)
        self.finished = torch.ones(rows, dtype=torch.bool, device=device)
        self.level_table = torch.zeros((rows, capacity + 1), device=device)
        self.levels = torch.zeros(rows, device=device)
        self.short = torch.zeros(rows, device=device)
        """Confidences among the shortlist."""
        self.logits = torch.zeros((rows, head.shape[0]), dtype=head.dtype, device=device)
        embedded = self.decoder.model.get_input_embeddings().weight
        self.current = torch.zeros((rows, 1, embedded.shape[1]), dtype=embedded.dtype).to(device)
        """States after the last block that each row ran."""
        self.finals = self.current
        """Input of the last norm; other than `current` only with exit heads."""
        if self.decoder.exit_heads is not None:
            self.finals = torch.zeros_like(self.current)
        self.exit_states = self.current.new_zeros((rows, capacity, self.current.shape[-1]))
        """The exit state of every position."""
        self.own = torch.arange(self.n, device=device)
        pinned = self.recorder.pinned
        self.scores = [pinned(rows, torch.float32) for _ in self.segments]
        self.chosen = pinned(rows, torch.long)
        self.looked = [self.recorder.event() for _ in self.segments]
        self.picked = self.recorder.event()

    # ------------------------------------------------------------------------------ sequences join

    def set_ends(self, ends: Sequence[int], pad: int) -> None:
        """Set the tokens that end a sequence, and the one that follows an end."""
        self.ends.copy_(torch.tensor(list(ends), dtype=torch.long))
        self.pad.fill_(pad)

    def join(
        self,
        rows: Sequence[int],
        tokens: Tensor,
        position: int,
        levels: NDArray[np.float32],
        barred: int,
    ) -> None:
        """Begin sequences in some rows.

        Parameters
        ----------
        rows : (m,)
        tokens : (m,)
            The tokens to be fed first.
        position : int
            Their position.
        levels : (m, tokens)
            The threshold of each token.
        barred : int
            Number of answer tokens before which no end token is picked.
        """
        index = torch.tensor(list(rows), device=self.device)
        columns = min(levels.shape[1], self.level_table.shape[1])
        self.level_table[index] = torch.inf
        self.level_table[index, :columns] = torch.from_numpy(levels[:, :columns]).to(self.device)
        self.tokens[index, 0] = tokens.to(self.device)
        for buffer, value in (
            (self.positions, position),
            (self.first, position),
            (self.barred_until, barred),
        ):
            buffer.index_fill_(0, index, value)
        self.finished.index_fill_(0, index, False)

    def finish(self, rows: Sequence[int]) -> None:
        """Mark sequences as ended, whatever their tokens."""
        self.finished.index_fill_(
            0, torch.tensor(list(rows), dtype=torch.long, device=self.device), True
        )

    def encode(self, ids: Tensor, mask: Tensor, rows: Sequence[int]) -> None:
        """Encode sources, (m, positions), into the cache of some rows."""
        self.encoder.run(ids, mask, self._select(rows)[0])

    # --------------------------------------------------------------------- functions, run or played

    def play(self, key: Hashable, function: Callable[[], None], *changed: Tensor) -> None:
        """Run a function: captured and replayed on a GPU, called elsewhere.

        Capturing runs it several times, so buffers that it reads and changes are restored.
        """
        if not self.captures:
            function()
            return
        if key not in self._graphs:
            kept = [each.clone() for each in changed]
            with self.static.blas(self.n):
                self._graphs[key] = self.recorder.record(function)
            for each, before in zip(changed, kept, strict=True):
                each.copy_(before)
        self._graphs[key].replay()

    def _select(self, rows: Sequence[int]) -> tuple[Tensor | None, Hashable]:
        """Return the rows of a group on the device, and what a captured function is for.

        None stands for all rows, which must then be in order.
        """
        if len(rows) == self.n:
            return None, None
        if not self.captures:
            return torch.tensor(rows, device=self.device), None
        size = group_size(len(rows), self.n)
        padded = [*rows, *[self.n] * (size - len(rows))]
        self.rows[:size].copy_(torch.tensor(padded))
        return self.rows[:size], size

    def open(self, rows: Sequence[int]) -> None:
        """Begin the first tokens of some rows."""
        index, size = self._select(rows)
        n = self.n
        self.play(
            ("open", size),
            lambda: self.begin(
                chosen_rows(self.tokens, index, n), chosen_rows(self.positions, index, n), index
            ),
        )

    def next_tokens(self, rows: Sequence[int], pick: Pick) -> None:
        """Pick the tokens of rows that are done, and begin their next ones."""
        index, size = self._select(rows)
        self.play(
            ("next", size, pick, self.bars_ends),
            lambda: self._pick_and_begin(index, pick),
            *(self.tokens, self.positions, self.finished, self.current),
        )
        if self.captures:
            self.picked.record()

    def run_part(self, part: int, rows: Sequence[int]) -> None:
        """Run a segment and its look, or all blocks."""
        index, size = self._select(rows)
        changed = self.current, self.finals, self.logits
        self.play(("part", part, size), lambda: self._part(part, index), *changed)
        self._look_recorded(part)

    def check_shortlist(self, segment: int, rows: Sequence[int]) -> None:
        """Check the whole vocabulary for rows whose shortlist reached the threshold."""
        index, size = self._select(rows)
        key = "vocabulary", segment, size
        self.play(key, lambda: self._check_vocabulary(segment, index), self.logits)
        self._look_recorded(segment)

    def _look_recorded(self, part: int) -> None:
        if self.captures and part < len(self.looked):
            self.looked[part].record()

    def run_head(self, rows: Sequence[int]) -> None:
        """Compute the logits of some rows from their last states."""
        index, size = self._select(rows)

        def function() -> None:
            self.write(self.logits, self.head(chosen_rows(self.finals, index, self.n)), index)

        self.play(("head", size), function)

    def fill_skipped(
        self, segment: int, rows: Sequence[int], starts: NDArray[np.int64], n_lacking: int
    ) -> None:
        """Compute the keys and values that a segment lacks.

        Parameters
        ----------
        segment : int
        rows : (m,)
        starts : (m,)
            The first position that each row lacks.
        n_lacking : int
            How many positions; later ones are computed too, and overwritten before they are read.
        """
        index, size = self._select(rows)
        window = WINDOW if self.captures else n_lacking
        own = self.own if index is None else index[: len(rows)]
        for more in range(0, n_lacking, window):
            given = torch.as_tensor(starts, device=self.device) + more
            self.starts.index_copy_(0, own, given[:, None])
            self.play(("skipped", segment, size), lambda: self.fill_window(segment, index, window))

    # --------------------------------------------------------------------------- read by the host

    def read_scores(self, segment: int, size: int) -> NDArray[np.float32]:
        """Wait for a segment's look; return its confidences, (size,)."""
        if self.captures:
            self.looked[segment].synchronize()
        scores: NDArray[np.float32] = self.scores[segment][:size].numpy().copy()
        return scores

    def read_tokens(self, size: int) -> NDArray[np.int64]:
        """Wait for the last `next_tokens`; return its tokens, (size,)."""
        if self.captures:
            self.picked.synchronize()
        tokens: NDArray[np.int64] = self.chosen[:size].numpy().copy()
        return tokens

    def show(self, positions: int) -> None:
        """Let attention read this many positions, where shapes may change."""
        if not self.captures:
            self.static.cache.show(positions)

    # ------------------------------------------------------- what is captured, for rows or for all

    def begin(self, tokens: Tensor, positions: Tensor, rows: Tensor | None) -> None:
        """Begin tokens: everything before the first block."""
        n = self.n
        self.write(self.current, self.static.begin(tokens, positions, rows), rows)
        steps = positions - chosen_rows(self.first, rows, n)
        steps = steps.clamp_(0, self.level_table.shape[1] - 1)
        self.write(self.levels, chosen_rows(self.level_table, rows, n).gather(1, steps)[:, 0], rows)

    def _pick_and_begin(self, rows: Tensor | None, pick: Pick) -> None:
        """Pick the tokens of rows that are done, note what they leave, and begin the next ones."""
        n, own = self.n, self.own if rows is None else rows
        positions = chosen_rows(self.positions, rows, n)
        steps = (positions - chosen_rows(self.first, rows, n)).clamp_(min=0)
        self.exit_states[own, positions[:, 0]] = chosen_rows(self.current, rows, n)[:, 0]
        finished = chosen_rows(self.finished, rows, n)
        found = self._picked(rows, pick, steps)
        tokens = torch.where(finished, self.pad, found)
        if len(self.ends):
            finished = finished | (tokens[:, None] == self.ends).any(dim=1)
        positions = (positions + 1).clamp_(max=self.capacity - 1)  # of the padding row
        self.write(self.finished, finished, rows)
        self.write(self.tokens, tokens[:, None], rows)
        self.write(self.positions, positions, rows)
        self.chosen[: len(own)].copy_(tokens, non_blocking=True)
        self.begin(tokens[:, None], positions, rows)

    def _picked(self, rows: Tensor | None, pick: Pick, steps: Tensor) -> Tensor:
        if pick == "given":
            return chosen_rows(self.given, rows, self.n)
        if pick == "known":
            scores = chosen_rows(self.logits, rows, self.n)
        else:
            scores = self.head(chosen_rows(self.finals, rows, self.n))
        return self.allowed(scores, steps, rows).argmax(dim=1)

    def allowed(self, scores: Tensor, steps: Tensor, rows: Tensor | None) -> Tensor:
        """Return logits for the head's output; end tokens that come too early are barred."""
        logits = self.decoder.logits(scores)
        if not self.bars_ends:
            return logits
        logits = logits.float()
        early = steps < chosen_rows(self.barred_until, rows, self.n)
        bar = torch.where(early, -torch.inf, logits[:, self.ends])
        return logits.index_copy(1, self.ends, bar)

    def head(self, states: Tensor) -> Tensor:
        """Return the head's output for states after a norm is applied, (b, vocabulary)."""
        scores: Tensor = self.decoder.head(self.decoder.head_input(states[:, 0]))
        return scores

    def run_blocks(
        self, blocks: range, rows: Tensor | None, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run blocks; return states after the last one and before it.

        `kept`, (n, 1, 1), marks rows that keep their states.
        """
        positions = chosen_rows(self.positions, rows, self.n)
        states = before = chosen_rows(self.current, rows, self.n)
        arguments = self.static.arguments(rows)
        for index in blocks:
            before = states
            states = self.static.run_block(index, before, positions, arguments)
            if kept is not None:
                states = torch.where(kept, before, states)
        return states, before

    def keep_finals(
        self, exit_index: int, states: Tensor, rows: Tensor | None, kept: Tensor | None = None
    ) -> None:
        """Write the input of the last norm, where exit heads make it other than the states."""
        heads = self.decoder.exit_heads
        if heads is None:
            return
        if exit_index < len(self.decoder.blocks) - 1:
            states = heads(exit_index, states)
        if kept is not None:
            states = torch.where(kept, self.finals[: self.n], states.to(self.finals.dtype))
        self.write(self.finals, states, rows)

    def _part(self, part: int, rows: Tensor | None) -> None:
        states, before = self.run_blocks(self.parts[part], rows)
        exit_index = self.parts[part][-1]
        self.keep_finals(exit_index, states, rows)
        if part < len(self.segments) - 1:
            self._look(part, exit_index, states[:, 0], before[:, 0], rows)
        elif self.gives_logits:
            self.write(self.logits, self.head(states), rows)
        self.write(self.current, states, rows)  # last: `before` may be a view of it

    def _look(
        self, segment: int, exit_index: int, states: Tensor, before: Tensor, rows: Tensor | None
    ) -> None:
        """Measure the confidence of all rows of a group, and keep the logits that it computed."""
        levels = chosen_rows(self.levels, rows, self.n)
        look = Look(exit_index, states, before, None, len(levels), levels)
        if self.shortlist is not None and segment > 0:
            scores = self.shortlist.scores(look, rows)
            self.write(self.short, scores, rows)
        else:
            self.confidence.begin()
            scores = self.confidence.measure(look)
            if self.shortlist is not None:
                self.shortlist.keep(self.confidence.listed, rows)  # type: ignore[attr-defined]
            if self.confidence.computed is not None:
                self.write(self.logits, self.confidence.computed.values, rows)
        self.scores[segment][: len(levels)].copy_(scores, non_blocking=True)

    def _check_vocabulary(self, segment: int, rows: Tensor | None) -> None:
        levels = chosen_rows(self.levels, rows, self.n)
        short = chosen_rows(self.short, rows, self.n)
        whole = self.head(chosen_rows(self.finals, rows, self.n))
        scores = self.shortlist.checked(short, whole, levels)  # type: ignore[union-attr]
        self.scores[segment][: len(levels)].copy_(scores, non_blocking=True)
        self.write(self.logits, whole, rows)

    def fill_window(self, segment: int, rows: Tensor | None, window: int) -> None:
        """Compute the keys and values of tokens that skipped a segment, from `starts` on."""
        own = self.own if rows is None else rows
        later = torch.arange(window, device=self.device)
        positions = chosen_rows(self.starts, rows, self.n) + later
        positions = positions.clamp_(max=self.capacity - 1)
        states = self.exit_states[own[:, None], positions]
        for index in self.segments[segment]:
            self.static.write_skipped(index, states, positions, rows)

    def write(self, buffer: Tensor, value: Tensor, rows: Tensor | None) -> None:
        """Write a value per row of a group, or of all rows."""
        if rows is None:
            buffer[: self.n].copy_(value)
        else:
            buffer.index_copy_(0, rows, value.to(buffer.dtype))
