"""Early-exit decoding over fixed buffers: what the host runs between two decisions.

Blocks between two looks form a segment. One function runs a segment and its look; `turn` picks the
tokens of rows that are done, and begins their next ones; `catch_up` computes the keys and values
that a segment owes for tokens that skipped it. On a GPU each is captured once as a CUDA graph and
replayed; elsewhere it is called.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.text.calm.faster_way import FasterWay
from swiftsure.text.calm.static_steps import Pick, StaticSteps
from swiftsure.text.static_encoder import StaticEncoder

__all__ = ["WINDOW", "Session"]

WINDOW = 8
"""Skipped positions whose keys and values one captured `catch_up` computes."""


class Session(StaticSteps):
    """Runs the functions of `StaticSteps`, and captures each of them once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._graphs: dict[Hashable, Any] = {}
        self.faster = FasterWay()

    @cached_property
    def token_graph(self) -> Any:
        """The functions that run whole tokens on the device."""
        from swiftsure.text.calm.on_device import TokenGraph

        with self.recorder.buffers():
            return TokenGraph(self)

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

    def _select(self, rows: Sequence[int] | None) -> tuple[Tensor | None, Hashable]:
        """Return the rows of a group on the device, and what a captured function is for."""
        if rows is None:
            return None, None
        if not self.captures:
            return torch.tensor(rows, device=self.device), None
        size = group_size(len(rows), self.n)
        padded = [*rows, *[self.n] * (size - len(rows))]
        self.rows[:size].copy_(torch.tensor(padded))
        return self.rows[:size], size

    @cached_property
    def encoder(self) -> StaticEncoder:
        """The model's encoder."""
        return StaticEncoder(self.static, self.recorder)

    def open(self) -> None:
        """Begin the first tokens of all rows."""

        def function() -> None:
            self.begin(self.tokens[: self.n], self.positions[: self.n], None)

        self.play("open", function)

    def turn(self, rows: Sequence[int] | None, pick: Pick) -> None:
        """Pick the tokens of rows that are done, and begin their next ones."""
        index, size = self._select(rows)
        self.play(
            ("turn", size, pick, self.bars_ends),
            lambda: self.pick_and_begin(index, pick),
            *self.turned_buffers(),
        )
        if self.captures:
            self.turned.record()

    def run_segment(
        self, segment: int, rows: Sequence[int] | None, *, masked: bool = False
    ) -> None:
        """Run a segment and its look; `masked`: some rows have exited and keep their states."""
        index, size = self._select(rows)
        changed = self.current, self.finals, self.exited, self.logits
        key = "segment", segment, size, masked
        self.play(key, lambda: self.segment(segment, index, masked), *changed)
        if self.captures:
            self.looked[segment].record()

    def run_full(self, pick: Pick) -> None:
        """Run all blocks and the head for all rows and, unless the host picks, turn."""

        def function() -> None:
            states, positions = self.current[: self.n], self.positions[: self.n]
            arguments = self.static.arguments(None)
            for index in range(len(self.decoder.blocks)):
                states = self.static.run_block(index, states, positions, arguments)
            self.current[: self.n].copy_(states)
            self.logits[: self.n].copy_(self.head(states))
            if pick != "given":
                self.pick_and_begin(None, "known")

        changed = *self.turned_buffers(), *self.static.kept
        self.play(("full", pick, self.bars_ends), function, *changed)
        if self.captures and pick != "given":
            self.turned.record()

    def run_head(self) -> None:
        """Compute the logits of all rows from their last states."""

        def function() -> None:
            self.logits[: self.n].copy_(self.head(self.finals[: self.n]))

        self.play("head", function)

    def check_shortlist(self, segment: int, rows: Sequence[int] | None) -> None:
        """Check the whole vocabulary for rows whose shortlist reached the threshold."""
        index, size = self._select(rows)
        changed = self.exited, self.logits
        self.play(("whole", segment, size), lambda: self.check_vocabulary(segment, index), *changed)
        if self.captures:
            self.looked[segment].record()

    def catch_up(self, segment: int, rows: Sequence[int] | None, starts: Any, owed: int) -> None:
        """Compute the keys and values that a segment owes.

        Parameters
        ----------
        segment : int
        rows : the rows; None: all
        starts : int, or (rows,)
            The first position that each row owes.
        owed : int
            How many positions; later ones are computed too, and overwritten before they are read.
        """
        index, size = self._select(rows)
        window = WINDOW if self.captures else owed
        for more in range(0, owed, window):
            if rows is None:
                self.starts.fill_(int(starts) + more)
            else:
                given = torch.as_tensor(starts, device=self.device) + more
                self.starts.index_copy_(0, index[: len(rows)], given[:, None])  # type: ignore[index]
            self.play(("owed", segment, size), lambda: self.fill_window(segment, index, window))

    def read_scores(self, segment: int, size: int) -> NDArray[np.float32]:
        """Wait for a segment's look; return its confidences, (size,)."""
        if self.captures:
            self.looked[segment].synchronize()
        scores: NDArray[np.float32] = self.scores[segment][:size].numpy().copy()
        return scores

    def read_tokens(self, size: int) -> NDArray[np.int64]:
        """Wait for the last turn; return its tokens, (size,)."""
        if self.captures:
            self.turned.synchronize()
        tokens: NDArray[np.int64] = self.chosen[:size].numpy().copy()
        return tokens

    def show(self, positions: int) -> None:
        """Let attention read this many positions, where shapes may change."""
        if not self.captures:
            self.static.cache.visible = positions


def group_size(size: int, n: int) -> int:
    """Return the captured size for a group: a power of two, or all rows."""
    return min(1 << (size - 1).bit_length(), n)
