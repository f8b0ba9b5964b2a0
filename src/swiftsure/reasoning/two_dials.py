"""Two dials: stop when sure, and give up when hopeless."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from swiftsure._lib import checks
from swiftsure.curves.dials import dial_grid
from swiftsure.exits import ExitRule, reaches, threshold_array
from swiftsure.records import ExitRecord, ThresholdRecord

__all__ = ["HOPELESS", "PATIENCE", "SURE", "gives_up", "giving_up"]

SURE, HOPELESS, PATIENCE = "sure", "hopeless", "patience"
"""The dials, and the setting that says from which exit on it may give up."""


def giving_up(
    record: ExitRecord,
    *,
    sure: Sequence[float | None],
    hopeless: Sequence[float],
    patience: int,
    score: str | None = None,
) -> ThresholdRecord:
    """Return the record of a system that also gives up where its confidence stays low.

    It stops at the first exit where the confidence is at least `sure`, or, from exit `patience` on,
    below `hopeless`, and gives the answer that it has there. A question that the full answer fails
    too loses nothing, so its tokens need not be spent. The promise is about all questions, whether
    answered with confidence or given up.

    Parameters
    ----------
    record : ExitRecord
        As `TraceRecord.exits` and `VoteRecord.exits` make them; all labels must be known.
    sure : sequence of float or None
        Values of the first dial, safest first; None for never.
    hopeless : sequence of float
        Values of the second, safest first; 0 for never.
    patience : int
        Number of the first exit, from 0, at which it may give up.
    score : str, optional
        The confidence; top1 by default, if the record has several.

    Returns
    -------
    record : ThresholdRecord
        Of every combination, the full answer first; use it with `Path.pareto` or `Path.branching`.

    Examples
    --------
    >>> record = ExitRecord([[0.9, 0.9], [0.1, 0.2]], losses={"zero_one": [[0, 0, 0], [1, 1, 1]]})
    >>> both = giving_up(record, sure=[0.8], hopeless=[0, 0.5], patience=1)
    >>> both.dials
    {'sure': (None, 0.8, 0.8), 'hopeless': (0, 0, 0.5)}
    >>> both.costs["exit"][1]
    array([3., 3., 2.])
    """
    first = checks.count("patience", patience, 0)
    if first > record.n_exits - 2:
        raise ValueError(
            f"`patience` must be the number of an exit before the last, at most"
            f" {record.n_exits - 2}, but got {first}."
        )
    if score is not None and not isinstance(score, str):
        raise TypeError("`score` must be the name of a score: a ThresholdRecord keeps no others.")
    if any(np.isnan(table).any() for table in record.losses.values()):
        raise ValueError("`record` must hold all labels: a ThresholdRecord has no missing ones.")
    rule = ExitRule(score)
    confidences = np.asarray(record.confidences_of(rule), np.float32)
    dials = dial_grid({SURE: list(sure), HOPELESS: list(hopeless)}, full={SURE: None, HOPELESS: 0})
    last = record.n_exits - 1
    taken = []
    for level, low in list(zip(*dials.values(), strict=True))[1:]:
        stops = reaches(confidences, threshold_array(np.inf if level is None else level))
        stops[:, first:] |= gives_up(confidences[:, first:], low)
        taken.append(np.where(stops.any(axis=1), stops.argmax(axis=1), last))

    def along(values: Any, full: Any) -> Any:
        rows = np.broadcast_to(values, (record.n, record.n_exits))
        columns = [rows[np.arange(record.n), exits] for exits in taken]
        return np.column_stack([np.broadcast_to(full, record.n), *columns])

    return ThresholdRecord(
        dials=dials,
        losses={name: along(each, each[:, -1]) for name, each in record.losses.items()},
        inconsistencies={name: along(each, 0.0) for name, each in record.inconsistencies.items()},
        costs={
            name: along(each, record.full_costs.get(name, each[..., -1]))
            for name, each in record.costs.items()
        },
        loss_ranges={k: v for k, v in record.loss_ranges.items() if k in record.losses},
        inconsistency_ranges={
            k: v for k, v in record.inconsistency_ranges.items() if k in record.inconsistencies
        },
        ids=record.ids,
        has_ids=record.has_ids,
        groups=record.groups,
        slices=record.slices,
        fingerprint=record.fingerprint,
        settings={**record.settings, "score": record.score_of(rule), PATIENCE: first},
        order=record.order,
        sampling=record.sampling,
    )


def gives_up(confidences: Any, hopeless: float) -> Any:
    """Return where confidences are so low that no more is tried; never at 0.

    Examples
    --------
    >>> gives_up(np.float32([0.1, 0.5]), 0.5).tolist()
    [True, False]
    """
    return np.asarray(confidences, np.float32) < np.float32(hopeless)
