"""The base class of records, which takes, splits, concatenates and saves them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure._lib.html import html_card
from swiftsure.curves.sample_order import SampleOrder
from swiftsure.curves.sampling import Sampled, group_array
from swiftsure.records import checks as record_checks
from swiftsure.records import files as record_files
from swiftsure.records.checks import Ranges

__all__ = ["Record", "differing"]

Array = NDArray[Any]

OPTIONAL = ("groups", "slices", "predictions")
"""Fields with one row per sample that a record may lack."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Record(Sampled):
    """What `ExitRecord` and `ThresholdRecord` have in common; they document the fields."""

    tables: ClassVar[tuple[str, ...]]
    """Fields that map names to arrays with one row per sample."""
    identity: ClassVar[tuple[str, ...]]
    """Fields that records must agree in to be concatenated."""

    loss_ranges: Ranges = field(default_factory=dict)
    inconsistency_ranges: Ranges = field(default_factory=dict)
    ids: Array = None  # type: ignore[assignment]
    fingerprint: str | None = None
    order: SampleOrder = None  # type: ignore[assignment]
    has_ids: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def _checked_draw(self, n: int) -> dict[str, Any]:
        """Return the checked fields that say how n samples were drawn."""
        groups = group_array(self.groups, n)
        self.sampling.check(groups, n)
        return {
            "ids": record_checks.id_array(self.ids, n),
            "has_ids": self.ids is not None if self.has_ids is None else bool(self.has_ids),
            "groups": groups,
            "slices": group_array(self.slices, n, "slices"),
            "order": SampleOrder.of(self.order, "order"),
        }

    def __len__(self) -> int:
        return self.n

    def take(self, rows: ArrayLike) -> Self:
        """Return a record of the samples at these positions."""
        index = np.asarray(rows)
        if index.size == 0:
            raise ValueError("`rows` must not be empty.")
        return self._part(index, self.order)

    def _part(self, index: NDArray[np.int64], order: SampleOrder) -> Self:
        return replace(self, **self._rows(index), order=order)

    def _rows(self, index: Array) -> dict[str, Any]:
        """Return the fields of a record of the samples at these positions."""
        changed: dict[str, Any] = {
            table: {name: values[index] for name, values in getattr(self, table).items()}
            for table in self.tables
        }
        costs: Mapping[str, Array] = getattr(self, "costs")  # noqa: B009 (of the subclasses)
        changed["costs"] = {k: v if v.ndim == 1 else v[index] for k, v in costs.items()}
        changed["ids"] = self.ids[index]
        alone = getattr(self, "full_costs", {})
        if alone:
            changed["full_costs"] = {
                k: v if np.ndim(v) == 0 else v[index] for k, v in alone.items()
            }
        for name in OPTIONAL:
            values = getattr(self, name, None)
            if values is not None:
                changed[name] = values[index]
        changed["sampling"] = self.sampling.take(index)
        return changed

    def split(self, n: int, seed: SampleOrder | int | None = None) -> tuple[Self, Self]:
        """Return n samples drawn at random to calibrate on, and the rest to test on.

        With groups, n whole groups are drawn.

        Parameters
        ----------
        seed : int or SampleOrder, optional
            By default one is drawn from the operating system's random numbers, so the order of the
            samples does not matter. Both parts and their files keep it, and
            `seed=part.order.splits[-1]` draws the same samples again. With a number given here, the
            samples must be in random order, and certificates say so, whatever tests them.

        Examples
        --------
        >>> from swiftsure.study.simulate import Population
        >>> from swiftsure.records import ExitRecord
        >>> sample = Population().sample(500, seed=0)
        >>> record = ExitRecord.from_logits(sample.logits, sample.labels)
        >>> [len(part) for part in record.split(200)]
        [200, 300]
        """
        labels = np.arange(self.n) if self.groups is None else self.groups
        units, codes = np.unique(labels, return_inverse=True)
        size = checks.count("n", n)
        if size >= len(units):
            raise ValueError(
                f"`n` must be below the number of {self.unit}, {len(units):,}, but got {size:,}."
            )
        split = SampleOrder.of(seed)
        drawn = np.zeros(len(units), bool)
        drawn[split.draw_units(len(units), size)] = True
        first, order = drawn[codes], self.order.after(split)
        return self._part(np.flatnonzero(first), order), self._part(np.flatnonzero(~first), order)

    def resampled(self, rows: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Return a record of samples drawn with repetitions, each with an id of its own.

        `groups` are their groups, if samples are drawn in groups.
        """
        changed = self._rows(np.asarray(rows)) | {"ids": None, "has_ids": None}
        if groups is not None:
            changed["groups"] = np.asarray(groups)
        return replace(self, **changed)

    @classmethod
    def concatenate(cls, records: Sequence[Self]) -> Self:
        """Return one record with the samples of several, made with one model; ids must differ."""
        if not records:
            raise ValueError("`records` must not be empty.")
        first: Any = records[0]
        for other in records[1:]:
            different = differing(first, other)
            if different:
                raise ValueError(f"`records` must agree in `{different[0]}`, but they do not.")

        def joined(table: str, names: Any) -> dict[str, Array]:
            return {k: np.concatenate([getattr(r, table)[k] for r in records]) for k in names}

        changed: dict[str, Any] = {t: joined(t, getattr(first, t)) for t in cls.tables}
        each = [name for name, values in first.costs.items() if values.ndim == 2]
        changed["costs"] = dict(first.costs) | joined("costs", each)
        parts: Sequence[Any] = records
        changed["ids"] = np.concatenate([part.ids for part in parts])
        changed["has_ids"] = any(part.has_ids for part in parts)
        changed["order"] = first.order.after(*(each for p in parts for each in p.order.splits))
        alone = getattr(first, "full_costs", {})
        if alone:
            each = [name for name, value in alone.items() if np.ndim(value) == 1]
            changed["full_costs"] = dict(alone) | joined("full_costs", each)
        for name in OPTIONAL:
            found = [getattr(record, name, None) for record in records]
            if hasattr(first, name):
                known = [values for values in found if values is not None]
                if name != "predictions" and 0 < len(known) < len(found):
                    raise ValueError(
                        f"`records` must all have {name}, or none, but some have them."
                    )
                changed[name] = np.concatenate(known) if len(known) == len(found) else None
        if first.sampling.weights is not None:
            weights = np.concatenate([part.sampling.weights for part in parts])
            changed["sampling"] = replace(first.sampling, weights=weights)
        if "settings" not in cls.identity:
            changed["settings"] = _joined_settings([part.settings for part in parts])
        whole: Self = replace(first, **changed)
        return whole

    def save(self, path: str | os.PathLike[str], *, durable: bool = True) -> None:
        """Write the record to a Parquet file with checksums, whole or not at all.

        With `durable`, wait until it is on the disk, so that it survives a power failure.
        """
        record_files.save(self, path, durable=durable)

    def _repr_html_(self) -> str:
        held = {t: ", ".join(getattr(self, t)) for t in (*self.tables, "costs")}
        facts = {"samples": f"{self.n:,}"} | {k: v for k, v in held.items() if v}
        if self.groups is not None:
            facts["groups"] = f"{self.n_units:,}"
        return html_card(type(self).__name__, facts)


def differing(first: Any, other: Any) -> list[str]:
    """Return the names of fields that two records must share but do not."""

    def same(name: str) -> bool:
        mine, others = getattr(first, name), getattr(other, name)
        return np.array_equal(mine, others) if isinstance(mine, np.ndarray) else mine == others

    found = [name for name in first.identity if not same(name)]
    if first.sampling.facts() != other.sampling.facts():
        found.append("sampling")
    tables = (*first.tables, "costs")
    found += [name for name in tables if set(getattr(other, name)) != set(getattr(first, name))]
    mine, others = (getattr(each, "full_costs", {}) for each in (first, other))
    if set(mine) != set(others) or any(not _joins(mine[k], others[k]) for k in mine):
        found.append("full_costs")
    return found + [
        f"costs['{name}']"
        for name, values in first.costs.items()
        if values.ndim == 1 and not np.array_equal(values, other.costs.get(name, []))
    ]


def _joined_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return lists with the items of all records, and what is the same in all; no other settings.

    What a list says of the samples of one record, such as the kinds of its requests, is then said
    of those of all.
    """
    first, *others = settings
    found: dict[str, Any] = {}
    for name, value in first.items():
        all_values = [value, *(each.get(name) for each in others)]
        lists = [each for each in all_values if isinstance(each, list)]
        if len(lists) == len(settings):
            found[name] = list(dict.fromkeys(item for each in lists for item in each))
        elif all(each == value for each in all_values):
            found[name] = value
    return found


def _joins(mine: float | Array, others: float | Array) -> bool:
    """Return whether costs of the full model can be joined: both per sample, or equal numbers."""
    if isinstance(mine, np.ndarray) or isinstance(others, np.ndarray):
        return isinstance(mine, np.ndarray) and isinstance(others, np.ndarray)
    return mine == others
