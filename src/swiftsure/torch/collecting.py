"""`collect`: runs a staged model on batches and returns an exit record.

Scores and losses are reduced on the device, batch by batch, so memory grows with samples and exits
but not with classes or pixels. With a folder for shards, a killed run can be resumed.
"""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.losses import Loss
from swiftsure.progress import steps
from swiftsure.records import ExitRecord
from swiftsure.records.shards import Shards
from swiftsure.torch.batches import Batch
from swiftsure.torch.reducing import PendingBatch, Reducer
from swiftsure.torch.staged import StagedModel, batch_size

__all__ = ["InterruptedCollectionError", "collect"]

Array = NDArray[Any]


class InterruptedCollectionError(RuntimeError):
    """Collection failed part-way; `record` holds the samples collected before that."""

    def __init__(self, message: str, record: ExitRecord) -> None:
        super().__init__(message)
        self.record = record


def collect(
    model: StagedModel,
    loader: Iterable[Any],
    losses: Sequence[str | Loss] = ("zero_one", "brier"),
    scores: Sequence[str] = ("top1",),
    *,
    temperatures: Sequence[float] | None = None,
    dtype: str | None = None,
    device: str | torch.device | None = None,
    seconds: bool = False,
    shards: str | os.PathLike[str] | None = None,
    shard_size: int = 10_000,
    progress: bool | None = None,
) -> ExitRecord:
    """Return the record of a model's scores, losses and costs at every exit.

    Parameters
    ----------
    model : StagedModel
        In evaluation mode.
    loader : iterable
        Yields `(inputs, labels)`, `(inputs, labels, ids)`, dicts with `inputs` and optionally
        `labels`, `ids` and `groups`, or inputs alone; the same form for all batches. To resume a
        run, the order must be the same each time. Negative labels are missing. For segmentation,
        labels are (n, height, width), and void where negative or `swiftsure.losses.VOID`.
    losses, scores : names
        Losses are names in `swiftsure.losses.LOSSES` or `Loss` objects with `tensors`; scores are
        names in `swiftsure.torch.scoring.SCORES`, or "model" for the model's own. For segmentation:
        "miou", "miscoverage", "pixel_brier", and scores such as "mean_top1" or "patch_entropy".
    temperatures : (n_exits,), optional
        Fitted to data other than the calibration's; see `fit_temperatures`.
    dtype : {"float32", "bfloat16", "float16"}, optional
        Autocast dtype; policies made from the record then require it.
    device : optional
        Where to run; the model's device by default.
    seconds : bool
        Also measure the time to each exit, on the first batch.
    shards : folder, optional
        Where to write the record in pieces as it grows, and to resume from.
    progress : bool, optional
        Show a progress bar; by default if standard error is a terminal.

    Returns
    -------
    record : ExitRecord
        With costs "flops" (and "seconds") and the model's fingerprint.

    Raises
    ------
    ValueError
        If the model is in training mode, an output is not valid (the error names sample and exit),
        outputs have the wrong shape, or the shards come from another model.
    InterruptedCollectionError
        If the loader or the model fails part-way; it holds what was collected.

    Warns
    -----
    UserWarning
        If images have no labelled pixel at all. They have no loss and are left out of the record,
        so its risks, including consistency risks, are those of images with some label.
    """
    run = Reducer(model, losses, scores, temperatures, dtype, device, seconds)
    collected = _Collection(run, shards, checks.count("shard_size", shard_size))
    total = _length(loader)
    try:
        with steps("collecting", total, progress) as advance:
            for batch in _remaining_batches(loader, collected.done):
                collected.begin(batch)
                advance()
            collected.finish()
    except BaseException as error:
        kept = collected.rescued()
        if kept is None or not isinstance(error, Exception):
            raise  # nothing to keep, or an interrupt (KeyboardInterrupt, SystemExit)
        where = "" if shards is None else f" in {shards} and"
        raise InterruptedCollectionError(
            f"{type(error).__name__} after {collected.done:,} samples, which are kept{where} in"
            f" this error's `record`: {error}",
            kept,
        ) from error
    record = collected.record()
    if record is None:
        labelled = " with a labelled pixel" if collected.left_out else ""
        raise ValueError(f"`loader` must give at least one sample{labelled}, but gave none.")
    if collected.left_out:
        warnings.warn(
            _left_out_message(collected.left_out, collected.done), UserWarning, stacklevel=2
        )
    return record


class _Collection:
    """Rows collected so far: finished shards, and batches not written to a shard yet."""

    def __init__(self, run: Reducer, folder: str | os.PathLike[str] | None, size: int) -> None:
        self.run = run
        # Without a folder, one shard holds everything and the fingerprint is not needed yet.
        self.size = None if folder is None else size
        self.shards = Shards(folder, ExitRecord, {} if folder is None else run.identity())
        self.pending: PendingBatch | None = None
        self.rows: list[dict[str, Array]] = []
        # Ids by shard number: a resumed run skips them along with the shard. The manifest is
        # written before its shard; entries whose shard is missing are dropped.
        self.left_out_of: dict[int, list[Any]] = {
            int(number): ids
            for number, ids in self.shards.notes.get("left_out", {}).items()
            if int(number) < len(self.shards.records)
        }
        for record in self.shards.records[:1]:
            run.costs = {name: record.costs[name] for name in record.costs if name != "exit"}
        self.done = sum(record.n for record in self.shards.records) + len(self.left_out)

    @property
    def left_out(self) -> list[Any]:
        """Ids of samples without rows."""
        return [name for names in self.left_out_of.values() for name in names]

    def begin(self, batch: Batch) -> None:
        """Start a batch, then store the previous one while the device is busy."""
        parts = self.shards.notes.get("batches")
        if parts is None:
            self.shards.note(batches=batch.names)
        elif batch.names != parts:
            raise ValueError(
                f"All batches must have the same parts, {', '.join(parts)} as in the first, but got"
                f" one with {', '.join(batch.names)}."
            )
        running = 0 if self.pending is None else len(self.pending.ids)
        pending = self.run.begin(batch, self.done + running)
        self.finish()
        self.pending = pending
        if not pending.is_running:
            self.finish()

    def finish(self) -> None:
        """Wait for the running batch, if any, and store its rows."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        rows = pending.rows()
        self.rows.append(rows.arrays)
        if rows.left_out:
            self.left_out_of.setdefault(len(self.shards.records), []).extend(rows.left_out)
        self.done += len(rows.arrays["ids"]) + len(rows.left_out)
        if self.size is not None and self._n_waiting >= self.size:
            self._write_shard()

    @property
    def _n_waiting(self) -> int:
        return sum(len(part["ids"]) for part in self.rows)

    def _write_shard(self) -> None:
        if not self._n_waiting:
            return
        joined = {key: np.concatenate([part[key] for part in self.rows]) for key in self.rows[0]}
        record = self.run.record(joined)
        self.rows = []
        if len(self.shards.records) in self.left_out_of:
            self.shards.note(left_out=self.left_out_of)
        self.shards.append(record)

    def rescued(self) -> ExitRecord | None:
        """Return the record so far after an error, including the running batch if it finishes."""
        with suppress(Exception):  # the first error is the one to report
            self.finish()
        return self.record()

    def record(self) -> ExitRecord | None:
        """Return the record of everything collected, or None if there is nothing."""
        self._write_shard()
        records = self.shards.records
        if not records:
            return None
        # A shard with a missing label lacks the losses that need every label, so drop them.
        common = set.intersection(*(set(record.losses) for record in records))
        return ExitRecord.concatenate([_with_losses(record, common) for record in records])


def _with_losses(record: ExitRecord, names: set[str]) -> ExitRecord:
    if set(record.losses) == names:
        return record
    losses = {name: record.losses[name] for name in record.losses if name in names}
    return replace(record, losses=losses)


def _remaining_batches(loader: Iterable[Any], done: int) -> Iterator[Batch]:
    """Yield batches, skipping empty ones and the first `done` samples."""
    for given in loader:
        batch = Batch.of(given)
        n = batch_size(batch.inputs)
        if done >= n:
            done -= n
            continue
        yield batch if not done else batch.after(done)
        done = 0


def _length(loader: Iterable[Any]) -> int | None:
    """Return the number of batches, or None if the loader does not know it."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of a data set without a length
        return None


def _left_out_message(ids: list[Any], n: int) -> str:
    shown = ", ".join(map(str, ids[:10])) + (", …" if len(ids) > 10 else "")
    return f"{len(ids)} of {n:,} samples have no labelled pixel and were left out: {shown}."
