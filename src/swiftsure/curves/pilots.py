"""Pilots: separate samples that a path or a score is learned on, which calibration refuses."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.curves.sample_order import SampleOrder

__all__ = [
    "PILOTS",
    "PilotPath",
    "PilotSamples",
    "learned_on",
    "pilot_size",
    "pilots_of",
    "with_pilot",
    "without_pilots",
]

Learned = Literal["path", "score", "router"]
"""What is learned on a pilot."""


@dataclass(frozen=True)
class PilotPath:
    """A path still to be learned, on samples set aside at random as a pilot; see `Path.learn`.

    Attributes
    ----------
    share : int or float
        Number or share of the record's samples (or groups) to set aside; the others calibrate.
    cost : str or None
        The cost that the path is to save.
    """

    share: int | float
    cost: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the value as JSON."""
        return {"share": self.share, "cost": self.cost}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PilotPath":
        """Return the value that `to_json` wrote."""
        return cls(content["share"], content["cost"])


@dataclass(frozen=True)
class PilotSamples:
    """Which samples a path or a score was learned on.

    Ids identify samples if both records were given ids, or if both are parts of one record, which
    parts show by their common drawn seed. Otherwise the numbers that records without ids get
    identify nothing, and only the very same samples are recognised.

    Attributes
    ----------
    n : int
        Number of samples.
    ids, groups : arrays
        Groups are None without groups.
    has_ids : bool
        Whether the ids were given.
    order : SampleOrder
        The record's.
    digest : str
        A hash of the samples' losses.
    """

    n: int
    ids: NDArray[Any]
    groups: NDArray[Any] | None
    has_ids: bool
    order: SampleOrder
    digest: str

    @classmethod
    def of(cls, record: Any) -> "PilotSamples":
        """Return the samples of a record."""
        known = record.ids, record.groups, record.has_ids, record.order
        return cls(record.n, *known, _digest(record))

    @classmethod
    def forgotten(cls, n: int, digest: str) -> "PilotSamples":
        """Return a pilot of which only the size and a hash of its losses are known."""
        return cls(n, np.arange(n), None, False, SampleOrder(0, drawn=False), digest)

    @classmethod
    def of_arrays(
        cls, *arrays: NDArray[Any], ids: ArrayLike | None = None, groups: ArrayLike | None = None
    ) -> "PilotSamples":
        """Return the samples of arrays with one row per sample."""
        n = len(arrays[0])
        labels = {"ids": ids, "groups": groups}
        known = {k: None if v is None else np.asarray(v) for k, v in labels.items()}
        for name, values in known.items():
            if values is not None:
                checks.of_shape(name, values, {"n": n})
        found = hashlib.sha256()
        for values in arrays:
            found.update(np.ascontiguousarray(values).tobytes())
        numbered = np.arange(n) if known["ids"] is None else known["ids"]
        order = SampleOrder(0, drawn=False)
        return cls(n, numbered, known["groups"], ids is not None, order, found.hexdigest())

    def to_json(self) -> dict[str, Any]:
        """Return the samples as JSON."""
        return {
            "n": self.n,
            "ids": self.ids.tolist(),
            "groups": None if self.groups is None else self.groups.tolist(),
            "has_ids": self.has_ids,
            "order": [self.order.seed, self.order.drawn],
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PilotSamples":
        """Return the samples that `to_json` wrote."""
        seed, drawn = content["order"]
        groups = content["groups"]
        return cls(
            content["n"],
            np.asarray(content["ids"]),
            None if groups is None else np.asarray(groups),
            content["has_ids"],
            SampleOrder(seed, drawn),
            content["digest"],
        )

    def joined(self, other: "PilotSamples") -> "PilotSamples":
        """Return the samples of both; their number is 0 where it is not known how many they share.

        Examples
        --------
        >>> one, other = np.zeros(2), np.ones(3)
        >>> first = PilotSamples.of_arrays(one, ids=["a", "b"])
        >>> first.joined(PilotSamples.of_arrays(other, ids=["b", "c", "d"])).ids.tolist()
        ['a', 'b', 'c', 'd']
        """
        if self.digest == other.digest and np.array_equal(self.ids, other.ids):
            return self
        named = [each for each in (self, other) if each.has_ids]
        together = len(named) == 2 or self.order.is_shared_with(other.order)
        ids = [each.ids for each in (named or (self, other))]
        groups = [each.groups for each in (self, other) if each.groups is not None]
        known = np.unique(np.concatenate(ids))
        return PilotSamples(
            len(known) if together else 0,
            known,
            np.concatenate(groups) if groups else None,
            bool(named),
            self.order if together else SampleOrder(0, drawn=False),
            hashlib.sha256(f"{self.digest}{other.digest}".encode()).hexdigest(),
        )

    def count(self, grouped: bool) -> int:
        """Return the number of samples, or of groups; a sample without a group is one of its own.

        Groups count where the samples that calibrate are grouped too.
        """
        return len(np.unique(self.groups)) if grouped and self.groups is not None else self.n

    def left_out(self, record: Any) -> Any:
        """Return a record without samples, and groups, of the pilot; raise if none remain.

        Of a record on a disk, whose parts are read as they are, nothing is left out.
        """
        if not hasattr(record, "take"):
            return record
        known = np.zeros(record.n, bool)
        if (self.has_ids and record.has_ids) or self.order.is_shared_with(record.order):
            known |= np.isin(record.ids, self.ids)
        if self.groups is not None and record.groups is not None:
            known |= np.isin(record.groups, self.groups)
        if known.all():
            raise ValueError("`record` must hold samples that are not in the pilot.")
        return record.take(np.flatnonzero(~known)) if known.any() else record

    def refuse(self, record: Any, what: Learned = "path") -> None:
        """Raise if a record holds samples, or groups, of the pilot."""
        if not self.refuse_ids([record], what) and self.digest == _digest(record):
            raise ValueError(_refusal("all of them", what))
        if self.groups is not None and record.groups is not None:
            again = np.intersect1d(self.groups, record.groups)
            if again.size:
                raise ValueError(_refusal(f"{again.size:,} of their groups ({again[0]!s})", what))

    def refuse_ids(self, parts: Iterable[Any], what: Learned = "path") -> bool:
        """Raise if one of these records, the parts of a whole, holds samples of the pilot.

        Returns whether ids identify the samples of all of them.
        """
        shared, identified = [], True
        for part in parts:
            if (self.has_ids and part.has_ids) or self.order.is_shared_with(part.order):
                shared.append(np.intersect1d(self.ids, part.ids))
            else:
                identified = False
        again = np.concatenate(shared) if shared else np.empty(0)
        if again.size:
            raise ValueError(_refusal(f"{again.size:,} of them (id {again[0]!s})", what))
        return identified


PILOTS = "learned on"
"""The setting of a record that holds the pilots of what decided or measured its confidences."""


def learned_on(
    settings: Mapping[str, Any], what: Learned, pilot: PilotSamples | None
) -> dict[str, Any]:
    """Return a record's settings that say what was learned on a pilot."""
    if pilot is None:
        return dict(settings)
    known = settings.get(PILOTS, {})
    if what in known:  # of another model of a cascade
        pilot = PilotSamples.from_json(known[what]).joined(pilot)
    return {**settings, PILOTS: {**known, what: pilot.to_json()}}


def with_pilot(
    pilots: Mapping[Learned, PilotSamples], what: Learned, pilot: PilotSamples | None
) -> dict[Learned, PilotSamples]:
    """Return pilots with another one, besides that of the same kind."""
    if pilot is None:
        return dict(pilots)
    return {**pilots, what: pilots[what].joined(pilot) if what in pilots else pilot}


def pilots_of(record: Any) -> dict[Learned, PilotSamples]:
    """Return the pilots that a record's settings name, by what was learned on them."""
    said = getattr(record, "settings", {}).get(PILOTS, {})
    return {what: PilotSamples.from_json(content) for what, content in said.items()}


def without_pilots(record: Any) -> Any:
    """Return a record without samples of the pilots that its settings name, which it forgets."""
    pilots = pilots_of(record)
    for pilot in pilots.values():
        record = pilot.left_out(record)
    kept = {k: v for k, v in getattr(record, "settings", {}).items() if k != PILOTS}
    return replace(record, settings=kept) if pilots else record


def _refusal(which: str, what: Learned) -> str:
    aside = {
        "path": "let `path=Path.learn(...)` set some aside",
        "score": "set the pilot aside with `record.split`",
        "router": "set the pilot aside before asking the models about the others",
    }
    return (
        f"`record` must not hold samples of the pilot that the {what} was learned on, but holds"
        f" {which}: calibrating on them voids the guarantee. Calibrate on other samples, or"
        f" {aside[what]}."
    )


def _digest(record: Any) -> str:
    found = hashlib.sha256()
    for table in record.tables:
        for name, values in getattr(record, table).items():
            found.update(f"{table}/{name}{values.shape}".encode())
            found.update(np.ascontiguousarray(values).view(np.uint8).data)
    return found.hexdigest()


def pilot_size(pilot: float, n: int, unit: str = "samples") -> int:
    """Return the number of pilot samples: `pilot` itself, or that share of n.

    Examples
    --------
    >>> pilot_size(0.25, 1000), pilot_size(300, 1000)
    (250, 300)
    """
    whole = not isinstance(pilot, float | np.floating)
    share = 0.0 if whole else checks.between("pilot", pilot, 0.0, 1.0)
    size = checks.count("pilot", pilot) if whole else round(share * n)  # type: ignore[arg-type]
    if not 2 <= size <= n - 1:
        raise ValueError(
            f"`pilot` must be at least 2 {unit}, and leave at least 1 to calibrate on, but got"
            f" {pilot} of {n:,}."
        )
    return size
