"""One step of decoding: a token of every sequence, who is under way, who left where.

Who leaves is decided on the host, where all is noted: a look at confidences waits for the device
once, and each change of the rows under way sends it one list.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.text.confidences import Logits

__all__ = ["Parting", "Step"]

# Compacting copies the cached keys and values of the active rows. On a CPU, with width 512 and
# sources of 64 to 400 tokens, that was paid back from these sizes on. It is not done on a GPU,
# where a block's time goes into launching it and reading its weights, however few the rows.
COMPACT_FROM = 8
"""Smallest batch that is worth compacting."""
COMPACT_BELOW = 0.5
"""Largest share of the batch whose rows are run by themselves."""


class Parting:
    """Rows of a batch of n, parted into those under way and those that left.

    Tensors are made when they are asked for, and serve all blocks until more rows leave.
    """

    def __init__(self, under_way: NDArray[np.intp], n: int, device: torch.device) -> None:
        self.under_way = under_way
        self.n = n
        self.device = device
        self._cut: dict[int, tuple[Any, Any]] = {}

    @cached_property
    def active(self) -> Tensor:
        """Rows under way."""
        return torch.from_numpy(self.under_way).to(self.device)

    @cached_property
    def gone(self) -> Tensor:
        """Which rows left, (n, 1, 1)."""
        return torch.from_numpy(self._mask[:, None, None]).to(self.device)

    @cached_property
    def left(self) -> Tensor:
        """Rows that left."""
        return torch.from_numpy(np.flatnonzero(self._mask)).to(self.device)

    @property
    def _mask(self) -> NDArray[np.bool_]:
        mask = np.ones(self.n, dtype=np.bool_)
        mask[self.under_way] = False
        return mask

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
        levels: NDArray[np.float32],
        may_exit: bool,
    ) -> None:
        self.n = self.n_active = n
        self.n_blocks = n_blocks
        self.device = device
        self.levels = levels
        """What those under way must reach: one for all, of shape (), or one each."""
        self.may_exit = may_exit
        self.parting: Parting | None = None
        """None as long as all are under way."""
        self.previous: Tensor | None = None
        """States before the last block that ran."""
        self.confidences: NDArray[np.float32] | None = None
        self.rows_known = 0
        self.exits_taken: list[int] = []
        """Depths at which some row left, after a look."""
        self._known: list[tuple[NDArray[np.intp] | None, Tensor]] = []

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """Blocks that each row runs."""
        return np.full(self.n, self.n_blocks, dtype=np.int64)

    @cached_property
    def heads(self) -> NDArray[np.int64]:
        """How often each row's logits of the whole vocabulary were computed."""
        return np.zeros(self.n, dtype=np.int64)

    @property
    def compacts(self) -> bool:
        """Whether a block runs on the active rows alone rather than on all of them."""
        few = self.n_active <= COMPACT_BELOW * self.n
        return few and self.n >= COMPACT_FROM and self.device.type == "cpu"

    def note(self, exit_index: int, scores: NDArray[np.float32], seen: Logits | None) -> None:
        """Note the confidences of a look, and how often the whole vocabulary was looked at."""
        if self.confidences is None:
            shape = (self.n, self.n_blocks - 1)
            self.confidences = np.full(shape, np.nan, dtype=np.float32)
        rows = self.under_way
        self.confidences[rows, exit_index] = scores
        if seen is not None:
            self.heads[rows if seen.index is None else rows[seen.index]] += 1

    def leave(self, depth: int, staying: NDArray[np.bool_], seen: Logits | None = None) -> None:
        """Let all those under way leave but some."""
        leaving = np.flatnonzero(~staying)
        rows = self.under_way[leaving]
        if seen is not None:
            whole = len(rows) == self.n
            self._known.append((None if whole else rows, seen.of(leaving, self.n_active)))
            self.rows_known += len(rows)
        self.depths[rows] = depth
        if depth > 0:
            self.exits_taken.append(depth)
        self.n_active -= len(rows)
        if self.n_active:
            self.parting = Parting(self.under_way[staying], self.n, self.device)
            self.levels = self.levels[staying] if self.levels.ndim else self.levels

    @property
    def under_way(self) -> NDArray[np.intp]:
        """Rows under way."""
        return np.arange(self.n) if self.parting is None else self.parting.under_way

    def all_by_head(self) -> None:
        """Note that the head ran on every row; for steps without looks it goes without saying."""
        if "heads" in self.__dict__:
            self.heads += 1

    def notes(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return depths, confidences and heads; None: full depth, no looks, one head each."""
        made = self.__dict__
        tables = (made.get("depths"), self.confidences, made.get("heads"))
        depths, looks, heads = (None if each is None else torch.from_numpy(each) for each in tables)
        return depths, looks, heads

    def all_logits(self, forward: Callable[..., Tensor], inputs: Tensor) -> Tensor:
        """Return the logits of all rows, (n, 1, vocabulary): known ones, and the head's others."""
        rows, logits = self._known[0]
        if rows is None:
            return logits.unsqueeze(1)
        whole = logits.new_empty((self.n, logits.shape[1]))
        missing = np.ones(self.n, dtype=np.bool_)
        for rows, logits in self._known:
            whole.index_copy_(0, torch.from_numpy(rows).to(self.device), logits)
            missing[rows] = False
        if self.rows_known < self.n:
            others = np.flatnonzero(missing)
            index = torch.from_numpy(others).to(self.device)
            whole.index_copy_(0, index, forward(inputs.index_select(0, index))[:, 0])
            self.heads[others] += 1
        return whole.unsqueeze(1)


def rows_of(value: Any, rows: Tensor, n: int) -> Any:
    """Return some rows of every tensor that has one a sequence; the rest is shared."""
    if isinstance(value, Tensor):
        return value.index_select(0, rows) if value.ndim and len(value) == n else value
    if isinstance(value, tuple):
        return tuple(rows_of(each, rows, n) for each in value)
    return value
