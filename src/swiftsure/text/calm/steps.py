"""One step of decoding: a token of every sequence, who is under way, who left where.

Who leaves is decided on the host, where all is noted, in plain lists: a look at confidences waits
for the device once, and small tables of arrays would cost more than they hold.

On a CPU work is done for the rows under way alone where that saves time (`Step`). On a GPU the time
goes into starting work, however few the rows: there all rows are worked on, and a mask says whose
result counts (`MaskedStep`).
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from swiftsure.text.calm.confidences import Logits, Look

__all__ = ["MaskedStep", "SplitRows", "Step", "rows_of", "step_on"]

# Compacting copies the cached keys and values of the active rows, and runs the left ones' through
# their matrices apart. On a CPU, at width 224, a batch of 32 won a few percent by it, and one of 8
# lost a tenth; at width 512 one of 8 won nothing.
COMPACT_FROM = 16
"""Smallest batch that is worth compacting."""
COMPACT_BELOW = 0.5
"""Largest share of the batch whose rows are run by themselves."""


class SplitRows:
    """Rows of a batch of n: those that are still running, and those that exited.

    Tensors are made when they are asked for, and serve all blocks until more rows leave.
    """

    def __init__(self, under_way: Sequence[int], n: int, device: torch.device) -> None:
        self.under_way = under_way
        self.n = n
        self.device = device
        self._cut: dict[int, tuple[Any, Any]] = {}

    @cached_property
    def active(self) -> Tensor:
        """Rows under way."""
        return torch.tensor(self.under_way, device=self.device)

    @cached_property
    def left(self) -> Tensor:
        """Rows that left."""
        left = set(range(self.n)).difference(self.under_way)
        return torch.tensor(sorted(left), device=self.device)

    @cached_property
    def gone(self) -> Tensor:
        """Which rows left, (n, 1, 1)."""
        all_gone = torch.ones((self.n, 1, 1), dtype=torch.bool, device=self.device)
        return all_gone.index_fill_(0, self.active, False)

    def of(self, value: Any) -> Any:
        """Return the rows under way of every tensor that has one a sequence; the rest is shared.

        Blocks share masks and positions, which are cut once.
        """
        if id(value) not in self._cut:
            self._cut[id(value)] = value, rows_of(value, self.active, self.n)
        return self._cut[id(value)][1]


class Step:
    """One token of every sequence: who is under way, who left where.

    Tables are made when the first row leaves or is looked at: steps without any are the rule where
    nothing may leave, and must cost nothing.
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
        self.asked = self.levels = levels
        """What rows must reach: one for all, or one each; `levels` is of those under way."""
        self.may_exit = may_exit
        self.under_way: Sequence[int] = range(n)
        """Rows that have not left."""
        self.split: SplitRows | None = None
        """The same on the device; None as long as all are under way."""
        self.previous: Tensor | None = None
        """States before the last block that ran."""
        self.rows_known = 0
        self.exits_taken: list[int] = []
        """Depths at which some row left, after a look."""
        self._looks: list[tuple[int, Sequence[int], Sequence[float]]] = []
        self._known: list[tuple[Sequence[int], Tensor]] = []

    @cached_property
    def depths(self) -> list[int]:
        """Blocks that each row runs."""
        return [self.n_blocks] * self.n

    @cached_property
    def heads(self) -> list[int]:
        """How often each row's logits of the whole vocabulary were computed."""
        return [0] * self.n

    @property
    def compacts(self) -> bool:
        """Whether a block runs on the active rows alone rather than on all of them."""
        return self.n >= COMPACT_FROM and self.n_active <= COMPACT_BELOW * self.n

    @property
    def undivided(self) -> bool:
        """Whether no row has to keep its state."""
        return self.n_active == self.n

    @property
    def gone(self) -> Tensor:
        """Which rows left, (n, 1, 1), once some have."""
        split: SplitRows = self.split  # type: ignore[assignment]
        return split.gone

    def look(self, exit_index: int, states: Tensor) -> Look:
        """Return what a confidence sees of those under way, (n, 1, width) being all states."""
        now, before = states[:, 0], self.previous[:, 0]  # type: ignore[index]
        rows = None
        if self.split is not None:
            rows = self.split.active
            now, before = now.index_select(0, rows), before.index_select(0, rows)
        return Look(exit_index, now, before, rows, self.n, _on(self.levels, self.device))

    def let_leave(self, look: Look, scores: Tensor, seen: Logits | None, *, strict: bool) -> None:
        """Let those leave whose confidence passes."""
        values = scores.tolist()  # the one synchronisation of a look: who is left decides what runs
        self.note(look.exit_index, values, seen)
        leaving = self._passing(values, strict)
        if leaving:
            self.leave(look.exit_index + 1, leaving, seen)

    def finish(self, rows: Sequence[int]) -> None:
        """Let rows leave before any look: their sequences are over."""
        self.leave(0, rows)

    def _passing(self, scores: Iterable[float], strict: bool) -> list[int]:
        """Return who passes, as positions among those under way."""
        passes = operator.gt if strict else operator.ge  # a NaN does neither, and stays
        levels = repeat(self.levels) if isinstance(self.levels, float) else self.levels
        compared = map(passes, scores, levels)
        return [place for place, passed in enumerate(compared) if passed]

    def note(self, exit_index: int, scores: Sequence[float], seen: Logits | None) -> None:
        """Note the confidences of a look, and how often the whole vocabulary was looked at."""
        self._looks.append((exit_index, self.under_way, scores))
        if seen is not None:
            whole = range(self.n_active) if seen.index is None else seen.index.tolist()
            self._count_heads(self.under_way[place] for place in whole)

    def leave(self, depth: int, leaving: Sequence[int], seen: Logits | None = None) -> None:
        """Let some of those under way leave, by position among them."""
        everybody = len(leaving) == self.n_active
        if seen is not None:
            index = None if everybody else torch.tensor(leaving, device=self.device)
            rows = [self.under_way[place] for place in leaving]
            self._known.append((rows, seen.of(index, self.n_active)))
        self._note_left(depth, leaving, known=seen is not None)
        if not everybody:
            self.split = SplitRows(self.under_way, self.n, self.device)

    def _note_left(self, depth: int, leaving: Sequence[int], *, known: bool) -> None:
        """Note who left where, and who is still under way; `known`: with their logits."""
        for place in leaving:
            self.depths[self.under_way[place]] = depth
        if depth > 0:
            self.exits_taken.append(depth)
        if known:
            self.rows_known += len(leaving)
        self.n_active -= len(leaving)
        if self.n_active:
            gone = set(leaving)
            staying = [place for place in range(len(self.under_way)) if place not in gone]
            self.under_way = [self.under_way[place] for place in staying]
            if not isinstance(self.levels, float):
                self.levels = [self.levels[place] for place in staying]

    def all_by_head(self) -> None:
        """Note that the head ran on every row; for steps without looks it goes without saying."""
        if "heads" in self.__dict__:
            self._count_heads(range(self.n))

    def _count_heads(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.heads[row] += 1

    def notes(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return depths, confidences and heads; None: full depth, no looks, one head each."""
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
        """Return the logits of all rows, (n, 1, vocabulary): known ones, and the head's others."""
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


class MaskedStep(Step):
    """A step that works on all rows as long as anyone is under way."""

    _gone: Tensor | None = None
    """Which rows left, (n,); None as long as none has."""

    compacts = False

    @property
    def undivided(self) -> bool:
        """Whether no row has to keep its state."""
        return self._gone is None

    @property
    def gone(self) -> Tensor:
        """Which rows left, (n, 1, 1), once some have."""
        return self._gone.view(-1, 1, 1)  # type: ignore[union-attr]

    @cached_property
    def _device_levels(self) -> float | Tensor:
        return _on(self.asked, self.device)

    @cached_property
    def _with_logits(self) -> list[tuple[Tensor, Tensor]]:
        """Who left at a look, (n, 1), and the logits of all rows there."""
        return []

    @cached_property
    def _unknown(self) -> set[int]:
        """Rows whose logits are not known."""
        return set(range(self.n))

    def look(self, exit_index: int, states: Tensor) -> Look:
        """Return what a confidence sees of all rows, who left among them."""
        now, before = states[:, 0], self.previous[:, 0]  # type: ignore[index]
        return Look(exit_index, now, before, None, self.n, self._device_levels)

    def let_leave(self, look: Look, scores: Tensor, seen: Logits | None, *, strict: bool) -> None:
        """Let those leave whose confidence passes: noted on the host, masked on the device.

        Both compare the same numbers in single precision, and agree.
        """
        passed = scores > look.levels if strict else scores >= look.levels
        values = scores.tolist()
        values = [values[row] for row in self.under_way]
        self._looks.append((look.exit_index, self.under_way, values))
        if seen is not None:
            whole = self.under_way
            if seen.index is not None:
                whole = sorted(set(whole).intersection(seen.index.tolist()))
            self._count_heads(whole)
        leaving = self._passing(values, strict)
        if not leaving:
            return
        if seen is not None:
            now = passed if self._gone is None else passed & ~self._gone
            # Of rows that were not seen it gives anything; they stay, and the mask leaves them out.
            self._with_logits.append((now.unsqueeze(1), seen.of(None, self.n)))
            self._unknown.difference_update(self.under_way[place] for place in leaving)
        self._gone = passed if self._gone is None else self._gone | passed
        self._note_left(look.exit_index + 1, leaving, known=seen is not None)

    def finish(self, rows: Sequence[int]) -> None:
        """Let rows leave before any look: their sequences are over, and no mask is needed."""
        self._note_left(0, rows, known=False)

    def all_logits(self, forward: Callable[..., Tensor], inputs: Tensor) -> Tensor:
        """Return the logits of all rows, (n, 1, vocabulary): known ones, and the head's others."""
        if self._unknown:
            whole = forward(inputs)[:, 0]
            self._count_heads(self._unknown)
            kept = self._with_logits
        else:
            (_, whole), *kept = self._with_logits
        for left, logits in kept:
            whole = torch.where(left, logits, whole)
        return whole.unsqueeze(1)


def step_on(device: torch.device) -> type[Step]:
    """Return the kind of step that is faster on a device."""
    return Step if device.type == "cpu" else MaskedStep


def _on(levels: float | Sequence[float], device: torch.device) -> float | Tensor:
    """Return levels for comparisons on a device: float32 either way."""
    if isinstance(levels, float):
        return levels
    return torch.tensor(levels, dtype=torch.float32, device=device)


def rows_of(value: Any, rows: Tensor, n: int) -> Any:
    """Return some rows of every tensor that has one a sequence; the rest is shared."""
    if isinstance(value, Tensor):
        return value.index_select(0, rows) if value.ndim and len(value) == n else value
    if isinstance(value, tuple):
        return tuple(rows_of(each, rows, n) for each in value)
    return value
