"""Base class for sweeps over texts, shared by CALM and BiLD."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.losses import LOSSES, Loss
from swiftsure.records.checks import id_array
from swiftsure.run import Sweep
from swiftsure.text.inputs import encode, token_rows
from swiftsure.torch.modes import model_device, needs_gpu

__all__ = ["TextSweep"]

Array = NDArray[Any]


@dataclass(kw_only=True)
class TextSweep(Sweep):
    """A sweep over texts; subclasses implement `prepare`, which runs them.

    Runs return "answers" (texts) and one value per cost. Parameters are those of
    `swiftsure.text.sweep`, checked here.

    Raises
    ------
    ValueError
        If a text is empty or too long, or there is not one reference, id and group per text.
    """

    model: Any
    tokenizer: Any
    texts: Sequence[str]
    references: Any
    ids: Any
    groups: Any
    losses: Sequence[str | Loss]
    max_source_length: int | None
    generation: dict[str, Any]
    seed: int

    def __post_init__(self) -> None:
        """Check the texts and what belongs to them."""
        n = len(self.texts)
        if n == 0:
            raise ValueError("`texts` must not be empty.")
        self.texts = list(self.texts)
        self.references = None if self.references is None else list(self.references)
        self.groups = None if self.groups is None else np.asarray(self.groups)
        self._has_ids = self.ids is not None
        self.ids = np.asarray(self.ids) if self._has_ids else np.arange(n)
        for name in ("references", "ids", "groups"):
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise ValueError(
                    f"`{name}` must have one entry per text, {n}, but got {len(values)}."
                )
        self.ids = id_array(self.ids, n)
        self._losses = [LOSSES.choose(loss, "losses") for loss in self.losses]
        for loss in self._losses:  # refuse losses that cannot be computed here
            loss.function("against_last", *["against_labels"] * (self.references is not None))
        rows = token_rows(self.texts, self.tokenizer, self.model, self.max_source_length)
        self._lengths = np.asarray([len(row) for row in rows])

    def identity(self) -> dict[str, Any]:
        """Return what else a resumed sweep must have in common."""
        groups = [] if self.groups is None else [self.groups.tolist()]
        data = json.dumps([self.texts, self.references, self.ids.tolist(), *groups])
        return {
            "losses": [loss.name for loss in self._losses],
            "max_source_length": self.max_source_length,
            "seed": self.seed,
            "data": hashlib.sha256(data.encode()).hexdigest(),
        }

    @property
    def needs_gpu(self) -> bool:
        """Whether each Ray actor needs a GPU."""
        return needs_gpu(model_device(self.model))

    def order(self, inputs: slice) -> NDArray[np.int64]:
        """Return the order of texts by length: answers to similarly long texts end together."""
        return self._lengths[inputs].argsort(kind="stable")

    def columns(self, inputs: slice, tables: dict[str, Array]) -> dict[str, Any]:
        """Return the columns of some texts' record."""
        answers, ranges = tables.pop("answers"), {each.name: each.range for each in self._losses}
        compared = np.concatenate([answers, answers[:, :1]], axis=1)  # the full model's, last
        hard: dict[str, Array] = {}
        soft: dict[str, Array] = {}
        for loss in self._losses:
            if loss.against_last is not None:
                soft[loss.name] = loss.against_last(compared)[:, :-1]
            if loss.against_labels is not None and self.references is not None:
                hard[loss.name] = loss.against_labels(answers, self.references[inputs])
        return {
            "losses": hard,
            "inconsistencies": soft,
            "costs": tables,
            "loss_ranges": ranges if hard else {},
            "inconsistency_ranges": ranges,
            "ids": self.ids[inputs],
            "has_ids": self._has_ids,
            "groups": None if self.groups is None else self.groups[inputs],
        }

    def encoded(self, inputs: slice) -> dict[str, Any]:
        """Return token ids and mask of some texts."""
        return encode(self.texts[inputs], self.tokenizer, self.model, self.max_source_length)

    def decoded(self, tokens: Any) -> Array:
        """Return sequences of tokens as an array of texts."""
        return np.asarray(self.tokenizer.batch_decode(tokens, skip_special_tokens=True), object)
