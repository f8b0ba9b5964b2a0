"""Base class for sweeps over texts, shared by CALM and BiLD."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.losses import LOSSES, Loss
from swiftsure.run import Sweep
from swiftsure.text.inputs import Texts
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
        If a text is empty or too long.
    """

    model: Any
    texts: Texts
    losses: Sequence[str | Loss]
    generation: dict[str, Any]
    seed: int

    def __post_init__(self) -> None:
        """Check the losses and the lengths of the texts."""
        labelled = self.texts.references is not None
        self._losses = [LOSSES.choose(loss, "losses") for loss in self.losses]
        for loss in self._losses:  # refuse losses that cannot be computed here
            loss.function("against_last", *["against_labels"] * labelled)
        self._lengths = np.asarray([len(row) for row in self.texts.rows(self.model)])

    def identity(self) -> dict[str, Any]:
        """Return what else a resumed sweep must have in common."""
        texts = self.texts
        data = json.dumps([texts.texts, texts.references, self._ids.tolist()])
        return {
            "losses": [loss.name for loss in self._losses],
            "max_source_length": texts.max_source_length,
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
        references = self.texts.references
        answers, ranges = tables.pop("answers"), {each.name: each.range for each in self._losses}
        compared = np.concatenate([answers, answers[:, :1]], axis=1)  # the full model's, last
        hard: dict[str, Array] = {}
        soft: dict[str, Array] = {}
        for loss in self._losses:
            if loss.against_last is not None:
                soft[loss.name] = loss.against_last(compared)[:, :-1]
            if loss.against_labels is not None and references is not None:
                hard[loss.name] = loss.against_labels(answers, references[inputs])
        return {
            "losses": hard,
            "inconsistencies": soft,
            "costs": tables,
            "loss_ranges": ranges if hard else {},
            "inconsistency_ranges": ranges,
            "ids": self._ids[inputs],
            "has_ids": self.texts.ids is not None,
        }

    @property
    def _ids(self) -> Array:
        return np.arange(len(self.texts)) if self.texts.ids is None else np.asarray(self.texts.ids)

    def decoded(self, tokens: Any) -> Array:
        """Return sequences of tokens as an array of texts."""
        return np.asarray(
            self.texts.tokenizer.batch_decode(tokens, skip_special_tokens=True), object
        )
