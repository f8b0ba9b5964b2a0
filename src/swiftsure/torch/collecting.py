"""`collect`: runs a staged model on batches and returns an exit record.

Scores and losses are reduced on the device, batch by batch, so memory grows with samples and exits
but not with classes or pixels. With a folder for shards, a killed run can be resumed.
"""

import json
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swiftsure._lib import checks
from swiftsure._lib.files import validation_message
from swiftsure._lib.progress import Advance, no_bar, steps
from swiftsure.losses import Loss
from swiftsure.records import ExitRecord
from swiftsure.records.shards import Shards
from swiftsure.run import RunOptions
from swiftsure.scores import LearnedScore
from swiftsure.torch.batches import Batch, DataHash
from swiftsure.torch.ray_data import dataset_batches, is_ray_dataset
from swiftsure.torch.reducing import PendingRows, Reducer, Rows, Source
from swiftsure.torch.staged import StagedModel

__all__ = ["InterruptedCollectionError", "collect"]

Array = NDArray[Any]

SHARD_SIZE = 1_000


class InterruptedCollectionError(RuntimeError):
    """Collection failed part-way.

    Attributes
    ----------
    record : ExitRecord
        The samples collected before that.
    n_saved : int
        How many of them are in shards on the disk.
    """

    def __init__(self, message: str, record: ExitRecord, n_saved: int = 0) -> None:
        super().__init__(message)
        self.record = record
        self.n_saved = n_saved


class OtherDataError(ValueError):
    """The loader's samples are not those that the shards were collected from."""


def collect(
    model: StagedModel,
    loader: Iterable[Any],
    losses: Sequence[str | Loss] = ("zero_one", "brier"),
    scores: Sequence[str] | LearnedScore = ("top1",),
    *,
    temperatures: Sequence[float] | None = None,
    dtype: str | None = None,
    device: str | torch.device | None = None,
    seconds: bool = False,
    batch_size: int | None = None,
    run: RunOptions = RunOptions(),
) -> ExitRecord:
    """Return the record of a model's scores, losses and costs at every exit.

    Parameters
    ----------
    model : StagedModel
        In evaluation mode.
    loader : iterable, or Ray Dataset
        Yields `(inputs, labels)`, `(inputs, labels, ids)`, dicts with `inputs` and optionally
        `labels`, `ids` and `groups`, dicts of the network's arguments with `labels`, as a tokenizer
        and a collator make them, or inputs alone; the same form for all batches. To resume a
        run, the order must be the same each time. Negative labels are missing. For segmentation,
        labels are (n, height, width); negative ones and `swiftsure.losses.VOID` are void.
        The columns of a Ray Dataset are named like the entries of such dicts.
    losses, scores : names
        Losses are names in `swiftsure.losses.LOSSES` or `Loss` objects with `tensors`; scores are
        names in `swiftsure.torch.scoring.SCORES`, or "model" for the model's own; a learned score
        stands for those that it needs, which classifiers' records always hold. For segmentation:
        "miou", "miscoverage", "pixel_brier", and scores such as "mean_top1" or "patch_entropy".
    temperatures : (n_exits,), optional
        Must be fitted on samples that you do not calibrate on; see `fit_temperatures`.
    dtype : {"float32", "bfloat16", "float16"}, optional
        Autocast dtype; policies made from the record then require it.
    device : optional
        Where to run; the model's device by default. Ray actors move the model there.
    seconds : bool
        Also measure the time to each exit on the first batch as it runs, with its heads and
        decisions (of the first score). Savings are against the full model alone, without early
        heads. `measure` times other ways to run, such as a captured `Stream`.
    batch_size : int, optional
        Rows of a Ray Dataset that run at once, 64 by default.
    run : RunOptions
        Shards, progress, and where the model runs.

    Returns
    -------
    record : ExitRecord
        With costs "flops" (and "seconds") and the model's fingerprint.

    Raises
    ------
    ValueError
        If the model is in training mode, an output is not valid (the error names sample and exit),
        outputs have the wrong shape, or the shards come from another model or other data.
    InterruptedCollectionError
        If the loader or the model fails part-way; its `record` holds the samples so far.

    Warns
    -----
    UserWarning
        If images have no labelled pixel at all. They have no loss and are left out of the record,
        so its risks, including consistency risks, are about images with some label.
    """
    batches, total, spare = _batches(loader, batch_size)
    reducer = _reducer(run, spare)(
        model, losses, scores, temperatures, dtype, seconds, device=device
    )
    # Without a folder, one shard holds everything and the fingerprint is not needed yet.
    identity = {} if run.shards is None else reducer.identity()
    with closing(reducer), Shards(run.shards, ExitRecord, identity, durable=run.durable) as kept:
        collected = _Collection(reducer, kept, run)
        try:
            with steps("collecting", total, run.progress) as advance:
                collected.advance = advance
                with closing(batches):
                    for batch in batches:
                        collected.begin(batch)
                collected.finish()
            record = collected.record()
        except OtherDataError:
            raise
        except BaseException as error:
            rescued = collected.rescued()
            if rescued is None or not isinstance(error, Exception):
                raise  # nothing to keep, or an interrupt (KeyboardInterrupt, SystemExit)
            saved = f" ({collected.n_saved:,} of them in {run.shards})"
            on_disk = "" if run.shards is None else saved
            raise InterruptedCollectionError(
                f"{type(error).__name__} after {rescued.n:,} samples, which are kept in this"
                f" error's `record`{on_disk}: {error}",
                rescued,
                collected.n_saved,
            ) from error
    if record is None:
        labelled = " with a labelled pixel" if collected.left_out else ""
        raise ValueError(f"`loader` must give at least one sample{labelled}, but gave none.")
    if collected.left_out:
        warnings.warn(
            _left_out_message(collected.left_out, collected.done), UserWarning, stacklevel=2
        )
    return record


def _batches(
    loader: Iterable[Any], size: int | None
) -> tuple[Generator[Source, None, None], int | None, int]:
    """Return the batches of a loader, their number if it is known, and CPUs to read them."""
    if is_ray_dataset(loader):
        size = checks.count("batch_size", 64 if size is None else size)
        return dataset_batches(loader, size), None, 1
    if size is not None:
        raise ValueError("`batch_size` is for a Ray Dataset; other loaders yield batches.")
    return (Batch.of(given) for given in loader), _length(loader), 0


def _reducer(run: RunOptions, spare: int) -> Callable[..., Reducer]:
    if run.engine == "local":
        return Reducer
    from swiftsure.torch.ray_workers import RayReducer

    return partial(RayReducer, run.workers, spare)


class _Collection:
    """Rows collected so far: finished shards, and batches not written to a shard yet."""

    def __init__(self, reducer: Reducer, shards: Shards[ExitRecord], options: RunOptions) -> None:
        self.reducer = reducer
        self.shards = shards
        self.size = options.shard_size or SHARD_SIZE
        self.seconds = options.shard_seconds
        self.written_at = time.monotonic()
        self.advance: Advance = no_bar
        # Batches that run or are hashed, and whether each ends a batch of the loader.
        self.pending: deque[tuple[PendingRows, bool]] = deque()
        self.rows: list[dict[str, Array]] = []
        self.hash = DataHash()  # of the samples whose rows are here, or in shards
        # What the manifest says of each shard. It is written before its shard, and a shard may
        # have been lost: samples from the first missing shard on are collected again.
        notes = _checked_notes(shards)
        described = notes.data
        n_whole = next(
            (k for k in range(len(described)) if k not in shards.records), len(described)
        )
        if shards.folder is not None:
            shards.drop_from(n_whole)
        self.data = [each.model_dump() for each in described[:n_whole]]
        self.left_out_of: dict[int, list[Any]] = {
            number: ids for number, ids in notes.left_out.items() if number < n_whole
        }
        for record in shards.all[:1]:
            reducer.costs = {name: record.costs[name] for name in record.costs if name != "exit"}
            reducer.full_costs = dict(record.full_costs)
        self.known = deque(self.data)  # shards whose samples have not been compared yet
        self.n_known: int = self.data[-1]["n"] if self.data else 0
        self.begun = 0
        self.done = 0

    def _check_data(self, described: dict[str, Any]) -> None:
        """Raise if the samples so far are not those that a shard was made from."""
        found = self.hash.digests()
        other = [
            name for name in described["hashes"] if found.get(name) != described["hashes"][name]
        ]
        if other:
            raise OtherDataError(
                f"`loader` must give the samples of {self.shards.folder} in the same order, but"
                f" among the first {described['n']:,} the {' and '.join(other)} differ: pass the"
                " same data (unshuffled, without random augmentation), or choose another folder."
            )

    @property
    def n_saved(self) -> int:
        """How many samples are in shards on the disk."""
        return sum(self.shards[number].n for number in self.shards.saved)

    @property
    def left_out(self) -> list[Any]:
        """Ids of samples without rows."""
        return [name for names in self.left_out_of.values() for name in names]

    def begin(self, batch: Source) -> None:
        """Start a batch, then store earlier ones while the device, or workers, are busy.

        Samples that shards hold are hashed only, to compare them with the shards' samples.
        """
        hashed = self.shards.folder is not None
        ends = (each["n"] for each in self.data)
        while batch.size and self.begun < self.n_known:
            taken = min(batch.size, next(end for end in ends if end > self.begun) - self.begun)
            self._wait_for(
                self.reducer.begin_hashing(batch.rows(slice(taken))), batch.size == taken
            )
            batch = batch.rows(slice(taken, None))
        if batch.size:
            self._wait_for(self.reducer.begin(batch, self.begun, hashed=hashed), True)

    def _wait_for(self, pending: PendingRows, last: bool) -> None:
        self.pending.append((pending, last))
        self.begun += pending.size
        while self.pending and (
            len(self.pending) > self.reducer.n_running or not self.pending[0][0].is_running
        ):
            self._store()

    def finish(self) -> None:
        """Wait for all running batches and store their rows."""
        while self.pending:
            self._store()
        if self.known:
            raise OtherDataError(
                f"`loader` must give the samples of {self.shards.folder}, which holds"
                f" {self.n_known:,} of them, but it gives only {self.done:,}: pass the same data,"
                " or choose another folder."
            )

    def _store(self) -> None:
        """Wait for the oldest running batch and store its rows."""
        pending, last = self.pending.popleft()
        try:
            rows = pending.rows()
            if not self.known:
                self._check_parts(rows.parts)
        except BaseException:
            self.pending.clear()  # what comes after a gap must not be stored
            raise
        self.hash.update(rows.digests)
        self.done += pending.size
        if self.known:
            if self.done == self.known[0]["n"]:
                self._check_data(self.known.popleft())
        else:
            self._keep(rows)
        self.reducer.report(self.done)
        if last:
            self.advance()

    def _check_parts(self, found: list[str]) -> None:
        parts = self.shards.notes.get("batches")
        if parts is None:
            self.shards.note(batches=found)
        elif found != parts:
            raise ValueError(
                f"All batches must have the same parts, {', '.join(parts)} as in the first, but got"
                f" one with {', '.join(found)}."
            )

    def _keep(self, rows: Rows) -> None:
        self.rows.append(rows.arrays)
        if rows.left_out:
            self.left_out_of.setdefault(len(self.shards.records), []).extend(rows.left_out)
        late = time.monotonic() - self.written_at >= self.seconds
        if self.shards.folder is not None and (late or self._n_waiting >= self.size):
            self._write_shard()

    @property
    def _n_waiting(self) -> int:
        return sum(len(part["ids"]) for part in self.rows)

    def _write_shard(self) -> None:
        if not self._n_waiting:
            return
        joined = {key: np.concatenate([part[key] for part in self.rows]) for key in self.rows[0]}
        record = self.reducer.record(joined)
        self.rows = []
        self.data.append({"n": self.done, "hashes": self.hash.digests()})
        number = len(self.shards.records)
        self.shards.put(number, record, data=self.data, left_out=self.left_out_of)
        self.written_at = time.monotonic()

    def rescued(self) -> ExitRecord | None:
        """Return the record so far after an error, including the running batch if it finishes."""
        with suppress(Exception):  # the first error is the one to report
            self.finish()
        with suppress(Exception):
            self._write_shard()
        return self.record()

    def record(self) -> ExitRecord | None:
        """Return the record of everything collected, or None if there is nothing."""
        self._write_shard()
        records = self.shards.all
        if not records:
            return None
        # A shard with a missing label lacks the losses that need every label, so drop them.
        common = set.intersection(*(set(record.losses) for record in records))
        return ExitRecord.concatenate([_with_losses(record, common) for record in records])


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _ShardData(_Strict):
    """What a manifest says of the data of one shard."""

    n: int = Field(ge=1)
    """Samples up to the end of the shard."""
    hashes: dict[str, str]


class _Notes(_Strict):
    """The notes of a manifest."""

    batches: list[str] | None = None
    data: list[_ShardData] = Field(default_factory=list)
    left_out: dict[int, list[Any]] = Field(default_factory=dict)


def _checked_notes(shards: Shards[ExitRecord]) -> _Notes:
    """Return the notes of the interrupted run; raise if they do not fit its shards."""
    try:
        notes = _Notes.model_validate_json(json.dumps(shards.notes))
        start = 0
        for number, each in enumerate(notes.data):
            n = each.n - start - len(notes.left_out.get(number, []))
            if number in shards.records and n != shards[number].n:
                raise ValueError(f"data.{number}.n: the shard has {shards[number].n:,} samples")
            start = each.n
    except ValueError as error:
        what = validation_message(error) if isinstance(error, ValidationError) else error
        raise ValueError(
            f"{shards.manifest} is not a manifest of `collect`: {what}. Delete"
            f" {shards.folder} and start again."
        ) from None
    return notes


def _with_losses(record: ExitRecord, names: set[str]) -> ExitRecord:
    if set(record.losses) == names:
        return record
    losses = {name: record.losses[name] for name in record.losses if name in names}
    return replace(record, losses=losses)


def _length(loader: Iterable[Any]) -> int | None:
    """Return the number of batches, or None if the loader does not know it."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of a data set without a length
        return None


def _left_out_message(ids: list[Any], n: int) -> str:
    shown = ", ".join(map(str, ids[:10])) + (", …" if len(ids) > 10 else "")
    return f"{len(ids)} of {n:,} samples have no labelled pixel and were left out: {shown}."
