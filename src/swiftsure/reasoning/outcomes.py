"""What would have been answered, and paid, at each place where thinking or voting may stop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.cascade.answer_losses import answer_tables, chosen_losses
from swiftsure.cascade.answers import Answer
from swiftsure.records import ExitRecord
from swiftsure.records.checks import gap_is_known_by_agreement

__all__ = ["Outcomes"]


@dataclass(frozen=True)
class Outcomes:
    """Answers, confidences and costs of n runs at K places and at their ends.

    Attributes
    ----------
    answers : n lists of K + 1 answers
    scores : n lists of mappings
        Of the places that a run reached; it had ended before the others.
    costs : (n, K + 1)
    full_costs : (n,)
    unit : str
        Of the costs.
    labels : n labels, or None
    ids, groups : n texts
    settings : mapping
    fingerprint : str, optional
    """

    answers: Sequence[Sequence[Answer]]
    scores: Sequence[Sequence[Mapping[str, float]]]
    costs: NDArray[np.float64]
    full_costs: NDArray[np.float64]
    unit: str
    labels: Sequence[Any]
    ids: Sequence[str]
    groups: Sequence[str]
    settings: Mapping[str, Any]
    fingerprint: str | None = None

    def record(self, losses: Any = None) -> ExitRecord:
        """Return the outcomes as an ExitRecord; see `TraceRecord.exits`."""
        against, aside, ranges = self._losses(losses)
        return ExitRecord(
            self._confidences(),
            losses=against,
            inconsistencies=aside,
            loss_ranges={name: ranges[name] for name in against},
            inconsistency_ranges=ranges,
            costs={self.unit: self.costs},
            full_costs={self.unit: self.full_costs},
            ids=np.asarray(self.ids),
            groups=np.asarray(self.groups) if len(set(self.groups)) < len(self.groups) else None,
            settings=self.settings,
            fingerprint=self.fingerprint,
        )

    def _losses(self, losses: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return losses against labels, against the full answers, and their ranges."""
        by_exit = list(zip(*self.answers, strict=True))
        labelled = any(label is not None for label in self.labels)
        against, aside, ranges = {}, {}, {}
        for loss in chosen_losses("zero_one" if losses is None else losses, by_exit):
            table, apart = answer_tables(loss, by_exit, self.labels if labelled else None)
            aside[loss.name], ranges[loss.name] = apart, loss.range
            missing = table is not None and bool(np.isnan(table).any())
            if table is not None and (not missing or gap_is_known_by_agreement(loss.name)):
                against[loss.name] = table
        return against, aside, ranges

    def _confidences(self) -> dict[str, NDArray[np.float32]]:
        """Return the scores that all places have, (n, K) each, 1 after the end of a run."""
        shape = self.costs.shape[0], self.costs.shape[1] - 1
        known = [set(each) for row in self.scores for each in row]
        if not known:
            raise ValueError("Every run had ended before the first place where it may stop.")
        names = set.intersection(*known)
        ordered = [name for name in self.scores[self._first_run()][0] if name in names]
        tables = {name: np.ones(shape, np.float32) for name in ordered}
        for i, row in enumerate(self.scores):
            for k, each in enumerate(row):
                for name, table in tables.items():
                    table[i, k] = each[name]
        return tables

    def _first_run(self) -> int:
        return next(i for i, row in enumerate(self.scores) if row)
