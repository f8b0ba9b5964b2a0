"""What a sweep is over: texts, their references, and a record of the answers to them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure import checks
from swiftsure.losses import LOSSES, Loss
from swiftsure.records import ThresholdRecord
from swiftsure.records.checks import id_array

__all__ = ["SweptTexts", "resolved_loss"]

Array = NDArray[Any]


@dataclass(frozen=True)
class SweptTexts:
    """What is swept over: texts, what they should give, and who they are."""

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
    ) -> "SweptTexts":
        """Return them, if there is one of everything for each text."""
        n = len(texts)
        if n == 0:
            raise ValueError("`texts` must not be empty.")
        known = np.arange(n) if ids is None else np.asarray(ids)
        grouped = None if groups is None else np.asarray(groups)
        expected = None if references is None else list(references)
        for name, values in (("references", expected), ("ids", known), ("groups", grouped)):
            if values is not None and len(values) != n:
                raise ValueError(f"`{name}` must be one a text, {n}, but got {len(values)}.")
        return cls(list(texts), expected, id_array(known, n), grouped)

    def hash(self) -> str:
        """Return a hash of all that is recorded about."""
        groups = [] if self.groups is None else [self.groups.tolist()]
        said = json.dumps([self.texts, self.references, self.ids.tolist(), *groups])
        return hashlib.sha256(said.encode()).hexdigest()

    def record(
        self,
        rows: slice,
        grid: NDArray[np.float64],
        answers: Array,
        losses: list[Loss],
        **known: Any,
    ) -> ThresholdRecord:
        """Return the record of some texts and the answers to them, a column a setting.

        `known` are costs, and whatever else a record holds.
        """
        backwards = answers[:, ::-1]  # losses have the full model last
        soft = {loss.name: loss.against_last(backwards)[:, ::-1] for loss in losses}
        hard: dict[str, Array] = {}
        if self.references is not None:
            expected: Any = self.references[rows]
            hard = {loss.name: loss.against_labels(backwards, expected)[:, ::-1] for loss in losses}
        ranges = {loss.name: loss.range for loss in losses}
        return ThresholdRecord(
            grid,
            losses=hard,
            inconsistencies=soft,
            loss_ranges=ranges if hard else {},
            inconsistency_ranges=ranges,
            ids=self.ids[rows],
            groups=None if self.groups is None else self.groups[rows],
            **known,
        )


def resolved_loss(loss: str | Loss) -> Loss:
    """Return a loss of texts by name, or as it is."""
    return loss if isinstance(loss, Loss) else LOSSES[checks.known("losses", loss, LOSSES)]
