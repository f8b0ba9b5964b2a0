"""One step of decoding: a token of every sequence, who is under way, who left where."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from swiftsure.text.confidences import Logits

__all__ = ["Step"]

# Compacting copies the cached keys and values of the active rows. On a CPU, with width 512 and
# sources of 64 to 400 tokens, that was paid back from these sizes on. It is not done on a GPU,
# where a block's time goes into launching it and reading its weights, however few the rows.
COMPACT_FROM = 8
"""Smallest batch that is worth compacting."""
COMPACT_BELOW = 0.5
"""Largest share of the batch whose rows are run by themselves."""


class Step:
    """One token of every sequence: who is under way, who left where.

    Tables are made when the first row leaves or is looked at: steps without any are the rule where
    nothing may leave, and must cost nothing.
    """

    def __init__(
        self, n: int, n_blocks: int, device: torch.device, levels: float | Tensor, may_exit: bool
    ) -> None:
        self.n = self.n_active = n
        self.n_blocks = n_blocks
        self.device = device
        self.levels = levels
        self.may_exit = may_exit
        self.rows: Tensor | None = None
        """Rows under way; None: all."""
        self.previous: Tensor | None = None
        """States before the last block that ran."""
        self.confidences: Tensor | None = None
        self.rows_known = 0
        self.exits_taken: list[int] = []
        """Depths at which some row left, after a look."""
        self._known: list[tuple[Tensor | None, Tensor]] = []

    @cached_property
    def gone(self) -> Tensor:
        """Which rows left."""
        return torch.zeros(self.n, dtype=torch.bool, device=self.device)

    @cached_property
    def depths(self) -> Tensor:
        """Blocks that each row runs."""
        return torch.full((self.n,), self.n_blocks, device=self.device)

    @cached_property
    def heads(self) -> Tensor:
        """How often each row's logits of the whole vocabulary were computed."""
        return torch.zeros(self.n, dtype=torch.long, device=self.device)

    @property
    def compacts(self) -> bool:
        """Whether a block runs on the active rows alone rather than on all of them."""
        few = self.n_active <= COMPACT_BELOW * self.n
        return few and self.n >= COMPACT_FROM and self.device.type == "cpu"

    @property
    def active_rows(self) -> Tensor:
        """Rows under way."""
        return self.rows if self.rows is not None else torch.arange(self.n, device=self.device)

    @cached_property
    def left_rows(self) -> Tensor:
        """Rows that left."""
        return self.gone.nonzero().squeeze(1)

    def note(self, exit_index: int, scores: Tensor, seen: Logits | None) -> None:
        """Note the confidences of a look, and how often the whole vocabulary was looked at."""
        if self.confidences is None:
            shape = (self.n, self.n_blocks - 1)
            self.confidences = torch.full(shape, torch.nan, device=self.device)
        if self.rows is None:
            self.confidences[:, exit_index] = scores
        else:
            self.confidences[self.rows, exit_index] = scores
        if seen is not None:
            whole = self.active_rows if seen.index is None else self.active_rows[seen.index]
            self.heads[whole] += 1

    def leave(self, depth: int, leaving: Tensor | None, seen: Logits | None = None) -> None:
        """Let some of those under way leave, by position among them; None: all."""
        m = self.n_active
        rows = self.active_rows if leaving is None else self.active_rows[leaving]
        if seen is not None:
            self._known.append((None if len(rows) == self.n else rows, seen.of(leaving, m)))
            self.rows_known += len(rows)
        self.depths[rows] = depth
        if depth > 0:
            self.exits_taken.append(depth)
        self.n_active = m - len(rows)
        if self.n_active:
            self.gone[rows] = True
            self.rows = (~self.gone).nonzero().squeeze(1)
            self.__dict__.pop("left_rows", None)

    def all_by_head(self) -> None:
        """Note that the head ran on every row; for steps without looks it goes without saying."""
        if "heads" in self.__dict__:
            self.heads.add_(1)

    def notes(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return depths, confidences and heads; None: full depth, no looks, one head each."""
        made = self.__dict__
        return made.get("depths"), self.confidences, made.get("heads")

    def all_logits(self, forward: Callable[..., Tensor], inputs: Tensor) -> Tensor:
        """Return the logits of all rows, (n, 1, vocabulary): known ones, and the head's others."""
        rows, logits = self._known[0]
        if rows is None:
            return logits.unsqueeze(1)
        whole = logits.new_empty((self.n, logits.shape[1]))
        missing = torch.ones(self.n, dtype=torch.bool, device=whole.device)
        for rows, logits in self._known:
            whole[rows] = logits
            missing[rows] = False
        if self.rows_known < self.n:
            others = missing.nonzero().squeeze(1)
            whole[others] = forward(inputs[others])[:, 0]
            self.heads[others] += 1
        return whole.unsqueeze(1)
