"""`collect`: from a staged model and batches to an exit record.

Scores and losses are reduced on the device, batch by batch: memory grows with samples and exits,
never with classes or pixels. With a folder for shards, a run that is killed resumes where it was.
"""

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.files import write_text
from swiftsure.progress import steps
from swiftsure.records import ExitRecord
from swiftsure.torch.batches import Batch
from swiftsure.torch.losses import TensorLoss
from swiftsure.torch.reducing import Begun, Reducer
from swiftsure.torch.staged import StagedModel, batch_size

__all__ = ["InterruptedCollectionError", "collect"]

Array = NDArray[Any]


class InterruptedCollectionError(RuntimeError):
    """Collection broke off; `record` holds what was collected before."""

    def __init__(self, message: str, record: ExitRecord) -> None:
        super().__init__(message)
        self.record = record


def collect(
    model: StagedModel,
    loader: Iterable[Any],
    losses: Sequence[str | TensorLoss] = ("zero_one", "brier"),
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
    """Run a model on batches and record what happens at every exit.

    Parameters
    ----------
    model : StagedModel
        In evaluation mode.
    loader : iterable
        Of `(inputs, labels)` or `(inputs, labels, ids)`, of dicts with `inputs` and perhaps
        `labels`, `ids` and `groups`, or of inputs alone; all batches alike. In the same order each
        time, if a run is to be resumed. Negative labels are missing ones. For segmentation, labels
        are (n, height, width), and negative or `swiftsure.losses.VOID` where they are void.
    losses, scores : names
        Among `swiftsure.torch.losses.TENSOR_LOSSES` (or `TensorLoss`es), and
        `swiftsure.torch.scoring.SCORES` or "model" (the model's own). For segmentation: "miou",
        "miscoverage", "pixel_brier", and scores such as "mean_top1" or "patch_entropy".
    temperatures : (n_exits,), optional
        From other data than the calibration's; see `fit_temperatures`.
    dtype : {"float32", "bfloat16", "float16"}, optional
        To run under autocast; the policy will insist on it.
    device : optional
        Where to run: the model's by default.
    seconds : bool
        Also measure the time to each exit, on the first batch.
    shards : folder, optional
        Where to write the record in pieces as it grows, and to resume from.
    progress : bool, optional
        Show a progress bar; by default where standard error is a terminal.

    Returns
    -------
    record : ExitRecord
        With costs "flops" (and "seconds") and the model's fingerprint.

    Raises
    ------
    ValueError
        If the model is in training mode, an output is NaN (it says which sample and exit), outputs
        have the wrong shape, or the shards come from another model.
    InterruptedCollectionError
        If the loader or the model breaks off in the middle; it holds what was collected.

    Warns
    -----
    UserWarning
        If images have no labelled pixel at all. They have no loss, and are left out of the record:
        its risks, the consistency risks too, are those of images with some label.
    """
    run = Reducer(model, losses, scores, temperatures, dtype, device, seconds)
    store = _Store(run, shards, checks.count("shard_size", shard_size))
    total = _length(loader)
    try:
        with steps("collecting", total, progress) as advance:
            for batch in _after(loader, store.done):
                store.begin(batch)
                advance()
            store.finish()
    except BaseException as error:
        kept = store.rescued()
        if kept is None or not isinstance(error, Exception):
            raise  # nothing to keep, or an interruption that must go on
        where = "" if shards is None else f" in {shards} and"
        raise InterruptedCollectionError(
            f"{type(error).__name__} after {store.done:,} samples, which are kept{where} in this"
            f" error's `record`: {error}",
            kept,
        ) from error
    record = store.flush()
    if record is None:
        labelled = " with a labelled pixel" if store.left_out else ""
        raise ValueError(f"`loader` must give at least one sample{labelled}.")
    if store.left_out:
        warnings.warn(_left_out_text(store.left_out, store.done), UserWarning, stacklevel=2)
    return record


class _Store:
    """Rows collected so far, in memory or in a folder of shards."""

    def __init__(self, run: Reducer, folder: str | os.PathLike[str] | None, size: int) -> None:
        self.run = run
        self.size = size
        self.folder = None if folder is None else Path(folder)
        self.holds: list[str] | None = None  # parts of every batch
        self.begun: Begun | None = None
        self.rows: list[dict[str, Array]] = []
        self.shards: list[ExitRecord] = []
        self.left_out_of: dict[int, list[Any]] = {}  # shards, by number: a resumed run skips both
        if self.folder is not None:
            self._resume(self.folder)
        self.done = sum(shard.n for shard in self.shards) + len(self.left_out)

    @property
    def left_out(self) -> list[Any]:
        """Ids of samples that have no rows."""
        return [name for names in self.left_out_of.values() for name in names]

    def _resume(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / "collection.json"
        paths = sorted(folder.glob("shard-*.parquet"))
        if not (manifest.is_file() or paths):
            return
        found = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
        self.holds = found.pop("batches", None)
        left_out = {int(number): names for number, names in found.pop("left_out", {}).items()}
        if found != self.run.identity():
            raise ValueError(
                f"`shards`: {folder} holds a collection of another model, or of other losses or"
                " scores; choose another folder, or remove it."
            )
        self.shards = [ExitRecord.load(path) for path in paths]
        # Told before its shard is written, which the end of the run may have come between.
        self.left_out_of = {k: names for k, names in left_out.items() if k < len(paths)}
        if self.shards:
            costs = self.shards[0].costs
            self.run.costs = {name: costs[name] for name in costs if name != "exit"}

    def begin(self, batch: Batch) -> None:
        """Run a batch, and take in the one before it while the device is busy."""
        if self.holds is None:
            self.holds = batch.names
            self._tell()
        if batch.names != self.holds:
            raise ValueError(
                f"All batches must hold the same parts, but one holds {', '.join(batch.names)}"
                f" after {', '.join(self.holds)}."
            )
        running = 0 if self.begun is None else len(self.begun.ids)
        begun = self.run.begin(batch, self.done + running)
        self.finish()
        self.begun = begun
        if not begun.runs_on:
            self.finish()

    def finish(self) -> None:
        """Take in the batch that is running, if there is one."""
        if self.begun is None:
            return
        begun, self.begun = self.begun, None
        rows = begun.rows()
        self.rows.append(rows.arrays)
        if rows.left_out:
            self.left_out_of.setdefault(len(self.shards), []).extend(rows.left_out)
        self.done += len(rows.arrays["ids"]) + len(rows.left_out)
        if self.folder is not None and self._waiting >= self.size:
            self._seal()

    @property
    def _waiting(self) -> int:
        return sum(len(part["ids"]) for part in self.rows)

    def _tell(self) -> None:
        """Write what the shards are of, and which samples they leave out."""
        if self.folder is None:
            return
        found = {**self.run.identity(), "batches": self.holds}
        if self.left_out_of:
            found["left_out"] = self.left_out_of
        write_text(self.folder / "collection.json", json.dumps(found, indent=2) + "\n")

    def _seal(self) -> None:
        if not self._waiting:
            return
        joined = {key: np.concatenate([part[key] for part in self.rows]) for key in self.rows[0]}
        shard = self.run.record(joined)
        number = len(self.shards)
        self.rows = []
        self.shards.append(shard)  # before it is saved: a full disk must not lose it
        if self.folder is not None:
            if number in self.left_out_of:
                self._tell()
            shard.save(self.folder / f"shard-{number:05d}.parquet")

    def rescued(self) -> ExitRecord | None:
        """Return what there is after an error, the batch included that was running."""
        with suppress(Exception):  # one error is enough
            self.finish()
        return self.flush()

    def flush(self) -> ExitRecord | None:
        self._seal()
        if not self.shards:
            return None
        # Losses that need every label are in no shard with a missing one, so in none of the whole.
        common = set.intersection(*(set(shard.losses) for shard in self.shards))
        return ExitRecord.concatenate([_with_losses(shard, common) for shard in self.shards])


def _with_losses(record: ExitRecord, names: set[str]) -> ExitRecord:
    if set(record.losses) == names:
        return record
    losses = {name: record.losses[name] for name in record.losses if name in names}
    return replace(record, losses=losses)


def _after(loader: Iterable[Any], done: int) -> Iterator[Batch]:
    """Yield batches, without empty ones and without the first `done` samples."""
    for given in loader:
        batch = Batch.of(given)
        n = batch_size(batch.inputs)
        if done >= n:
            done -= n
            continue
        yield batch if not done else batch.after(done)
        done = 0


def _length(loader: Iterable[Any]) -> int | None:
    """Return the number of batches, if the loader knows it."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of a data set without a length
        return None


def _left_out_text(ids: list[Any], n: int) -> str:
    shown = ", ".join(map(str, ids[:10])) + (", …" if len(ids) > 10 else "")
    return f"{len(ids)} of {n:,} samples have no labelled pixel, and are left out: {shown}."
