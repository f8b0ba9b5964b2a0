"""ShardedRecord: a record in a folder of Parquet files, read a part at a time."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure._lib.storage import Scratch, Storage
from swiftsure.curves.conditions import Condition
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import BREAKPOINTS, Path, PathLike
from swiftsure.curves.sample_order import SampleOrder
from swiftsure.curves.sampling import Sampling
from swiftsure.exits import ExitRule
from swiftsure.records import files
from swiftsure.records.base import differing
from swiftsure.records.exit_record import ExitRecord, Missing
from swiftsure.records.repeated_ids import RepeatedIds
from swiftsure.records.shards import check_shards
from swiftsure.scores import LearnedScore

__all__ = ["ShardedRecord", "record_files"]

IN_MEMORY = "Load the folder into memory for that: swiftsure.load_record(folder)."


class ShardedRecord:
    """The samples of all Parquet files in a folder, in the order of the files' names.

    `calibrate`, `evaluate` and `policy.evaluate` take it for an ExitRecord. It is read a row group
    at a time, and arrays with a row per sample are temporary files, so that memory does not grow
    with the number of samples. The result of a calibration is exactly that of the whole record in
    memory. `evaluate` draws a sample of it.

    Parameters
    ----------
    folder : path
        With files written by `ExitRecord.save`, or by `collect(..., shards=folder)`.
    scores, losses : names, optional
        Read only these.
    scratch : path, optional
        Folder for temporary files, on a disk; by default the operating system's. Calibrating needs
        about 24 bytes in it for each sample and exit, and 32 for each sample.

    Attributes
    ----------
    n, n_exits : int
        Number of samples, and of exits.
    first : ExitRecord
        The first sample alone, which shows the names of scores, losses and costs.
    order : SampleOrder
        Seed of the order in which betting tests see the samples: that of the first file.

    Raises
    ------
    ValueError
        If there are no records in the folder, or they were not made with one model. Damaged files
        and ids that are used twice are noticed when the record is read.

    Examples
    --------
    >>> import tempfile
    >>> from swiftsure.study.simulate import Population
    >>> sample = Population().sample(600, seed=0)
    >>> record = ExitRecord.from_logits(sample.logits, sample.labels)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     record.take(range(300)).save(f"{folder}/1.parquet")
    ...     record.take(range(300, 600)).save(f"{folder}/2.parquet")
    ...     len(ShardedRecord(folder))
    600
    """

    groups: None = None
    """Samples with groups can be loaded, but not calibrated on from the disk."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        scores: Iterable[str] | None = None,
        losses: Iterable[str] | None = None,
        scratch: str | os.PathLike[str] | None = None,
    ) -> None:
        self.folder = FilePath(folder)
        self._files = record_files(folder)
        self._storage = Scratch(scratch)
        found = [files.about(path) for path in self._files]
        self._sizes = [n for _, n in found]
        self.n = sum(self._sizes)
        # A shard of `collect` that lacks a label lacks the losses that need every label.
        names = {
            table: [
                column.removeprefix(prefix)
                for column in found[0][0].columns
                if column.startswith(prefix) and all(column in each.columns for each, _ in found)
            ]
            for table, prefix in (("losses", "loss/"), ("inconsistencies", "inconsistency/"))
        }
        if losses is not None:
            known = dict.fromkeys([*names["losses"], *names["inconsistencies"]])
            kept = [checks.choice("losses", name, known) for name in losses]
            names = {table: [n for n in some if n in kept] for table, some in names.items()}
        self._only: dict[str, Any] = {
            **names,
            "confidences": None if scores is None else list(scores),
        }
        self.first = next(self._parts_of(0)).take([0])
        self._ids_checked = False

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        """Return a one-line summary of the record."""
        return f"ShardedRecord({str(self.folder)!r}, n={self.n:,}, files={len(self._files):,})"

    def __getattr__(self, name: str) -> Any:
        """Return what all samples share, such as the order, the fingerprint and `n_exits`."""
        if name in ("order", "n_exits", *ExitRecord.identity):
            return getattr(self.first, name)
        raise AttributeError(f"a ShardedRecord has no attribute {name!r}")

    def parts(self) -> Iterator[ExitRecord]:
        """Yield the samples in order, as records of one row group each.

        Raises
        ------
        ValueError
            For anything that would void a guarantee, as in `ExitRecord`; ids that are used twice
            in different parts are noticed after the last part.
        """
        ids = None if self._ids_checked else RepeatedIds(self.n, self._storage)
        for number in range(len(self._files)):
            for part in self._parts_of(number):
                if ids is not None:
                    ids.add(part.ids)
                yield part
        if ids is not None:
            ids.check(self._ids)
            self._ids_checked = True

    def _ids(self) -> Iterator[NDArray[Any]]:
        """Yield the ids of all parts."""
        for number in range(len(self._files)):
            for part in self._parts_of(number):
                yield part.ids

    def _parts_of(self, number: int) -> Iterator[ExitRecord]:
        path = self._files[number]
        with files.reading(path):
            for arguments in files.load_parts(path, "exits", self._only):
                part = ExitRecord(**arguments)
                if number:
                    different = differing(self.first, part)
                    if (part.groups is None) != (self.first.groups is None):
                        different = ["groups"]
                    if different:
                        raise ValueError(
                            f"`{different[0]}` must be the same as in {self._files[0]}."
                        )
                yield part

    @cached_property
    def sampling(self) -> Sampling:
        """How the samples were drawn; their weights are read into memory."""
        shared = self.first.sampling
        if shared.weights is None:
            return shared
        every = (part for number in range(len(self._files)) for part in self._parts_of(number))
        return replace(shared, weights=np.concatenate([part.sampling.weights for part in every]))

    @property
    def slices(self) -> None:
        """None, or an error if the samples have slices, whose rows are not looked up on a disk."""
        if self.first.slices is not None:
            raise ValueError(f"{self.folder} holds samples with slices. {IN_MEMORY}")

    def score_of(self, rule: ExitRule) -> str:
        """Return the name of the score that a rule uses."""
        return self.first.score_of(rule)

    def curve(
        self,
        risk: str = "gap",
        loss: str | None = None,
        score: str | LearnedScore | None = None,
        path: PathLike = None,
        *,
        missing: Missing = "raise",
        rule: ExitRule | None = None,
    ) -> RiskCurve:
        """Return the losses and costs along a path, as `ExitRecord.curve`; its arrays are files."""
        plain = self.plain_curve(risk, loss, rule or ExitRule(score), path, missing)
        return self.sampling.applied(plain, None)

    def plain_curve(
        self,
        risk: str,
        loss: str | None,
        rule: ExitRule,
        path: PathLike = None,
        missing: Missing = "raise",
    ) -> RiskCurve:
        """Return `curve` with every sample counted alike."""
        self._refuse_groups()
        route = Path.of(path, np.empty((0, 0))) if isinstance(path, str) else path
        if isinstance(route, Path) and route.kind == BREAKPOINTS:
            raise ValueError(f"`path` of a folder must be a grid, not breakpoints. {IN_MEMORY}")
        pilot = None
        if isinstance(route, Path) and route.pilot is not None:
            # Of the whole record: ids of a part do not show whether the record has its own.
            self._refuse_pilot(route)
            pilot, route = route.pilot, replace(route, pilot=None)
        curves = (part.plain_curve(risk, loss, rule, route, missing) for part in self.parts())
        whole = _joined(curves, self.n, self._storage)
        if pilot is None or whole.path is None:
            return whole
        return replace(whole, path=replace(whole.path, pilot=pilot))

    def sample(self, n: int, seed: SampleOrder | int | None = None) -> ExitRecord:
        """Return a record of n samples drawn at random, or of all if there are not more.

        `seed` is as in `ExitRecord.split`.
        """
        self._refuse_groups()
        size = checks.count("n", n)
        if size >= self.n:
            return self.load()
        split = SampleOrder.of(seed)
        rows = split.draw_units(self.n, size)
        drawn, done = [], 0
        for part in self.parts():
            here = rows[np.searchsorted(rows, done) : np.searchsorted(rows, done + part.n)] - done
            if here.size:
                drawn.append(part.take(here))
            done += part.n
        whole = ExitRecord.concatenate(drawn)
        return replace(whole, order=whole.order.after(split))

    def load(self) -> ExitRecord:
        """Return the whole record in memory."""
        return ExitRecord.concatenate(list(self.parts()))

    def _refuse_pilot(self, path: Path) -> None:
        if path.pilot is None:
            return
        if path.pilot.n == self.n:  # as small as the pilot, which was in memory
            path.refuse(self.load())
        else:
            path.pilot.refuse_ids(self.parts())

    def _refuse_groups(self) -> None:
        if self.first.groups is not None:
            raise ValueError(f"{self.folder} holds samples with groups. {IN_MEMORY}")


def _joined(parts: Iterable[RiskCurve], n: int, storage: Storage) -> RiskCurve:
    """Return one curve of the samples of several, which must be in exit form and not grouped.

    Parameters
    ----------
    parts : iterable of RiskCurve
        Of one record; each is used and released before the next is asked for.
    n : int
        Number of samples in all.
    storage : Storage
        Where the arrays are made.
    """
    tables: dict[str, NDArray[Any]] = {}
    shortest: RiskCurve | None = None
    conditions: dict[Condition, None] = {}
    splits: dict[SampleOrder, None] = {}
    n_labels, done = 0, 0
    for part in parts:
        rows = {"values": part.data.values, "confidences": part.confidences}
        rows |= {f"cost {k}": v for k, v in part.costs.items() if v.ndim == 2}
        rows |= {f"full {k}": np.asarray(v) for k, v in part.full_costs.items() if np.ndim(v)}
        for name, values in rows.items():
            if name not in tables:
                tables[name] = storage.empty((n, *values.shape[1:]), values.dtype)
            tables[name][done : done + part.n] = values
        done += part.n
        n_labels += part.n_labels or 0
        conditions |= dict.fromkeys(part.conditions)
        splits |= dict.fromkeys(part.order.splits)
        if shortest is None or part.n_settings < shortest.n_settings:
            shortest = part  # where labels are missing, paths are cut
    if shortest is None or done != n:
        raise ValueError(f"`parts` must hold {n:,} samples, but hold {done:,}.")
    return replace(
        shortest,
        costs={k: tables.get(f"cost {k}", v) for k, v in shortest.costs.items()},
        full_costs={k: tables.get(f"full {k}", v) for k, v in shortest.full_costs.items()},
        conditions=tuple(conditions),
        order=shortest.order.after(*splits),
        n_labels=None if shortest.n_labels is None else n_labels,
        storage=storage,
        data=shortest.data._replace(values=tables["values"], confidences=tables["confidences"]),
    )


def record_files(folder: str | os.PathLike[str]) -> list[FilePath]:
    """Return the Parquet files in a folder by name; raise if it has none, or some are missing."""
    paths = sorted(FilePath(folder).glob("*.parquet"))
    if not paths:
        raise ValueError(f"`folder` must hold Parquet files of a record, but {folder} has none.")
    check_shards(FilePath(folder), paths)
    return paths
