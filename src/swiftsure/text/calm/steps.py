"""One decoding step: one token per sequence, which rows are still running and where others exited.

Exits are decided and recorded on the host, in plain lists: reading the confidences waits for the
device once, and for a few numbers lists are cheaper than arrays.

Blocks run on the remaining rows only, where that saves time; otherwise they run on all rows, and a
mask keeps the states of those that exited. On a GPU, captured decoding is faster.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from swiftsure.exits import reaches
from swiftsure.text.calm.confidences import Logits, Look

__all__ = ["SplitRows", "Step", "rows_of"]

# Compacting copies the active rows' cached keys and values, and projects the exited rows
# separately. On a CPU, at width 224, it made a batch of 32 a few percent faster and a batch of 8 a
# tenth slower; at width 512 a batch of 8 gained nothing.
COMPACT_FROM = 16
"""Smallest batch that is worth compacting."""
COMPACT_BELOW = 0.5
"""Largest share of active rows at which a batch is compacted."""


class SplitRows:
    """Rows of a batch of n: those still running, and those that exited.

    Tensors are made on first use and shared by all blocks until more rows exit.
    """

    def __init__(self, active_rows: Sequence[int], n: int, device: torch.device) -> None:
        self.active_rows = active_rows
        self.n = n
        self.device = device
        self._cut: dict[int, tuple[Any, Any]] = {}

    @cached_property
    def active(self) -> Tensor:
        """Rows still running."""
        return torch.tensor(self.active_rows, device=self.device)

    @cached_property
    def exited(self) -> Tensor:
        """Rows that exited."""
        exited = set(range(self.n)).difference(self.active_rows)
        return torch.tensor(sorted(exited), device=self.device)

    @cached_property
    def exited_mask(self) -> Tensor:
        """Mask of the rows that exited, (n, 1, 1)."""
        mask = torch.ones((self.n, 1, 1), dtype=torch.bool, device=self.device)
        return mask.index_fill_(0, self.active, False)

    def of(self, value: Any) -> Any:
        """Return the active rows of every tensor with one row per sequence; the rest is shared.

        Masks and positions are cut once for all blocks.
        """
        if id(value) not in self._cut:
            self._cut[id(value)] = value, rows_of(value, self.active, self.n)
        return self._cut[id(value)][1]


class Step:
    """One token of every sequence: which rows are still running, and where the others exited.

    Tables are made when the first row exits or is looked at, so that a step in which nothing can
    exit costs nothing.
    """

    def __init__(
        self,
        n: int,
        n_blocks: int,
        device: torch.device,
        levels: float | Sequence[float],
        may_exit: bool,
    ) -> None:
        self.n = self.n_active = n
        self.n_blocks = n_blocks
        self.device = device
        self.levels = levels
        """Thresholds: one for all rows, or one per active row."""
        self.may_exit = may_exit
        self.active_rows: Sequence[int] = range(n)
        """Rows that have not exited."""
        self.split: SplitRows | None = None
        """The same on the device; None until a row exits."""
        self.previous: Tensor | None = None
        """States before the last block that ran."""
        self.rows_known = 0
        self.exits_taken: list[int] = []
        """Depths at which a row exited by its confidence."""
        self._looks: list[tuple[int, Sequence[int], Sequence[float]]] = []
        self._known: list[tuple[Sequence[int], Tensor]] = []

    @cached_property
    def depths(self) -> list[int]:
        """Number of blocks that each row runs."""
        return [self.n_blocks] * self.n

    @cached_property
    def heads(self) -> list[int]:
        """How often each row's logits over the whole vocabulary were computed."""
        return [0] * self.n

    @property
    def compacts(self) -> bool:
        """Whether blocks run on the active rows only."""
        return self.n >= COMPACT_FROM and self.n_active <= COMPACT_BELOW * self.n

    def look(self, exit_index: int, states: Tensor) -> Look:
        """Return the confidence's input for the active rows; `states` are (n, 1, width)."""
        now, before = states[:, 0], self.previous[:, 0]  # type: ignore[index]
        rows = None
        if self.split is not None:
            rows = self.split.active
            now, before = now.index_select(0, rows), before.index_select(0, rows)
        return Look(exit_index, now, before, rows, self.n, _levels_on(self.levels, self.device))

    def exit_confident(
        self, look: Look, scores: Tensor, computed: Logits | None, *, strict: bool
    ) -> None:
        """Let the rows exit whose confidence passes."""
        values = scores.tolist()  # the only synchronisation per exit: the host decides what runs
        self.record_look(look.exit_index, values, computed)
        exiting = self._passing(values, strict)
        if exiting:
            self.exit_rows(look.exit_index + 1, exiting, computed)

    def finish(self, rows: Sequence[int]) -> None:
        """Let the rows of finished sequences exit before any block."""
        self.exit_rows(0, rows)

    def _passing(self, scores: Iterable[float], strict: bool) -> list[int]:
        """Return the rows that pass, as positions among the active rows."""
        levels = repeat(self.levels) if isinstance(self.levels, float) else self.levels
        compared = zip(scores, levels, strict=False)
        return [k for k, each in enumerate(compared) if reaches(*each, strict=strict)]

    def record_look(
        self, exit_index: int, scores: Sequence[float], computed: Logits | None
    ) -> None:
        """Record the confidences of a look, and the rows whose whole vocabulary was computed."""
        self._looks.append((exit_index, self.active_rows, scores))
        if computed is not None:
            whole = range(self.n_active) if computed.index is None else computed.index.tolist()
            self._count_heads(self.active_rows[place] for place in whole)

    def exit_rows(self, depth: int, exiting: Sequence[int], computed: Logits | None = None) -> None:
        """Let some active rows exit, given by position among the active rows."""
        all_exit = len(exiting) == self.n_active
        if computed is not None:
            index = None if all_exit else torch.tensor(exiting, device=self.device)
            rows = [self.active_rows[place] for place in exiting]
            self._known.append((rows, computed.of(index, self.n_active)))
        self._record_exits(depth, exiting, known=computed is not None)
        if not all_exit:
            self.split = SplitRows(self.active_rows, self.n, self.device)

    def _record_exits(self, depth: int, exiting: Sequence[int], *, known: bool) -> None:
        """Record which rows exited, and which still run; `known`: their logits are known."""
        for place in exiting:
            self.depths[self.active_rows[place]] = depth
        if depth > 0:
            self.exits_taken.append(depth)
        if known:
            self.rows_known += len(exiting)
        self.n_active -= len(exiting)
        if self.n_active:
            exited = set(exiting)
            staying = [place for place in range(len(self.active_rows)) if place not in exited]
            self.active_rows = [self.active_rows[place] for place in staying]
            if not isinstance(self.levels, float):
                self.levels = [self.levels[place] for place in staying]

    def count_head_for_all(self) -> None:
        """Count one head per row; steps without looks leave it to the default of one."""
        if "heads" in self.__dict__:
            self._count_heads(range(self.n))

    def _count_heads(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.heads[row] += 1

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return depths, confidences and heads; None: full depth, no confidences, one head each."""
        made = self.__dict__
        depths, heads = (
            torch.tensor(made[name]) if name in made else None for name in ("depths", "heads")
        )
        if not self._looks:
            return depths, None, heads
        confidences = [[math.nan] * (self.n_blocks - 1) for _ in range(self.n)]
        for exit_index, rows, scores in self._looks:
            for row, score in zip(rows, scores, strict=True):
                confidences[row][exit_index] = score
        return depths, torch.tensor(confidences), heads

    def all_logits(self, forward: Callable[..., Tensor], inputs: Tensor) -> Tensor:
        """Return the logits of all rows, (n, 1, vocabulary); the head runs on unknown ones."""
        rows, logits = self._known[0]
        if len(rows) == self.n:
            return logits.unsqueeze(1)
        whole = logits.new_empty((self.n, logits.shape[1]))
        others = set(range(self.n))
        for rows, logits in self._known:
            whole.index_copy_(0, torch.tensor(rows, device=self.device), logits)
            others.difference_update(rows)
        if others:
            index = torch.tensor(sorted(others), device=self.device)
            whole.index_copy_(0, index, forward(inputs.index_select(0, index))[:, 0])
            self._count_heads(others)
        return whole.unsqueeze(1)


def _levels_on(levels: float | Sequence[float], device: torch.device) -> float | Tensor:
    """Return thresholds to compare with on a device: a float, or a float32 tensor."""
    if isinstance(levels, float):
        return levels
    return torch.tensor(levels, dtype=torch.float32, device=device)


def rows_of(value: Any, rows: Tensor, n: int) -> Any:
    """Return some rows of every tensor with one row per sequence; the rest is shared."""
    if isinstance(value, Tensor):
        return value.index_select(0, rows) if value.ndim and len(value) == n else value
    if isinstance(value, tuple):
        return tuple(rows_of(each, rows, n) for each in value)
    return value
