"""Base class for sweeps over texts, shared by CALM and BiLD."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure.losses import Loss
from swiftsure.records import ThresholdRecord
from swiftsure.records.checks import id_array
from swiftsure.systems import Sweep

__all__ = ["TextData", "TextSweep"]

Array = NDArray[Any]


@dataclass(frozen=True)
class TextData:
    """The texts of a sweep with their references, ids and groups."""

    texts: list[str]
    references: list[Any] | None
    ids: Array
    groups: Array | None

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        references: Sequence[Any] | None,
        ids: ArrayLike | None,
        groups: ArrayLike | None,
    ) -> "TextData":
        """Check that there is one reference, id and group per text, and return the data."""
        n = len(texts)
        if n == 0:
            raise ValueError("`texts` must not be empty.")
        names = np.arange(n) if ids is None else np.asarray(ids)
        grouped = None if groups is None else np.asarray(groups)
        expected = None if references is None else list(references)
        for name, values in (("references", expected), ("ids", names), ("groups", grouped)):
            if values is not None and len(values) != n:
                raise ValueError(f"`{name}` must be one per text, {n}, but got {len(values)}.")
        return cls(list(texts), expected, id_array(names, n), grouped)

    def hash(self) -> str:
        """Return a hash of all data, which binds shards to it."""
        groups = [] if self.groups is None else [self.groups.tolist()]
        content = json.dumps([self.texts, self.references, self.ids.tolist(), *groups])
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True)
class TextSweep(Sweep):
    """A sweep over texts; subclasses implement `prepare`, which runs them.

    Runs return "answers" (texts) and one value per cost.
    """

    data: TextData
    tokenizer: Any
    grid: Array
    losses: list[Loss]
    max_source_length: int | None
    generation: dict[str, Any]
    seed: int
    fingerprint: str

    def __post_init__(self) -> None:
        """Refuse losses that cannot be computed here."""
        labelled = ["against_labels"] if self.data.references is not None else []
        for loss in self.losses:
            loss.function("against_last", *labelled)

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Settings that policies of this record are bound to, besides the model."""

    @property
    def dial(self) -> str:
        """Name of the dial."""
        return "threshold"

    def identity(self) -> dict[str, Any]:
        """Return what identifies this sweep; its shards must agree on it."""
        return {
            "model": self.fingerprint,
            "settings": self.settings,
            "losses": [loss.name for loss in self.losses],
            "max_source_length": self.max_source_length,
            "seed": self.seed,
            "data": self.data.hash(),
        }

    def record(self, inputs: slice, tables: dict[str, Array]) -> ThresholdRecord:
        """Return the record of some texts."""
        answers = tables.pop("answers")[:, ::-1]  # losses expect the full model last
        soft, hard = {}, {}
        for loss in self.losses:
            if loss.against_last is not None:
                soft[loss.name] = loss.against_last(answers)[:, ::-1]
            if loss.against_labels is not None and self.data.references is not None:
                expected = self.data.references[inputs]
                hard[loss.name] = loss.against_labels(answers, expected)[:, ::-1]
        ranges = {loss.name: loss.range for loss in self.losses}
        return ThresholdRecord(
            self.grid.astype(np.float64),
            losses=hard,
            inconsistencies=soft,
            costs=tables,
            loss_ranges=ranges if hard else {},
            inconsistency_ranges=ranges,
            ids=self.data.ids[inputs],
            groups=None if self.data.groups is None else self.data.groups[inputs],
            fingerprint=self.fingerprint,
            dial=self.dial,
            settings=self.settings,
        )

    def decoded(self, tokens: Any) -> Array:
        """Return sequences of tokens as an array of texts."""
        return np.asarray(self.tokenizer.batch_decode(tokens, skip_special_tokens=True), object)
