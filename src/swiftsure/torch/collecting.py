"""`collect`: from a staged model and batches to an exit record.

Scores and losses are reduced on the device, batch by batch: memory grows with samples and exits,
never with classes or pixels. With a folder for shards, a run that is killed resumes where it was.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from swiftsure import checks
from swiftsure.files import write_text
from swiftsure.losses import LOSSES
from swiftsure.progress import steps
from swiftsure.records import ExitRecord
from swiftsure.records.checks import temperature_tuple
from swiftsure.torch.batches import Batch, moved
from swiftsure.torch.costs import exit_flops, exit_seconds
from swiftsure.torch.fingerprint import fingerprint
from swiftsure.torch.losses import TensorLoss, resolve
from swiftsure.torch.modes import home, inference, refuse_training
from swiftsure.torch.results import broken_rows, refuse_broken
from swiftsure.torch.scoring import MODEL_SCORE, SCORES, confidence
from swiftsure.torch.staged import (
    StagedModel,
    batch_size,
    exit_outputs,
    plain_output,
    refuse_unstaged,
)

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
        time, if a run is to be resumed. Negative labels are missing ones.
    losses, scores : names
        Among `swiftsure.torch.losses.TENSOR_LOSSES` (or `TensorLoss`es), and "top1", "top_diff",
        "entropy" or "model" (the model's own).
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
    """
    run = _Run(model, losses, scores, temperatures, dtype, device, seconds)
    store = _Store(run, shards, checks.count("shard_size", shard_size))
    total = _length(loader)
    try:
        with steps("collecting", total, progress) as advance:
            for batch in _after(loader, store.done):
                store.add(batch, run.reduce(batch, store.done))
                advance()
    except BaseException as error:
        kept = store.flush()
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
        raise ValueError("`loader` must give at least one sample.")
    return record


class _Run:
    """Reduces batches to rows of a record."""

    def __init__(
        self,
        model: StagedModel,
        losses: Sequence[str | TensorLoss],
        scores: Sequence[str],
        temperatures: Sequence[float] | None,
        dtype: str | None,
        device: str | torch.device | None,
        seconds: bool,
    ) -> None:
        refuse_unstaged(model, selects=False)
        refuse_training(model)
        self.model = model
        self.losses = [resolve(loss) for loss in losses]
        if not scores:
            raise ValueError("`scores` must name at least one.")
        self.scores = [checks.known("scores", name, [*SCORES, MODEL_SCORE]) for name in scores]
        self.seconds = seconds
        if dtype is not None:
            checks.known("dtype", dtype, ["float32", "bfloat16", "float16"])
        self.dtype = dtype
        self.temperatures = temperature_tuple(temperatures, model.n_exits)
        self.device = _device(model, device)
        self.costs: dict[str, Array] = {}
        self.fingerprint = None
        if isinstance(model, nn.Module):
            self.fingerprint = fingerprint(model, temperatures=self.temperatures, dtype=self.dtype)

    def reduce(self, batch: Batch, done: int) -> dict[str, Array]:
        """Return the rows of one batch: confidences, losses, inconsistencies, ids, groups."""
        inputs = moved(batch.inputs, self.device)
        n = batch_size(inputs)
        arrays = self._arrays(inputs, batch.labels, done)
        if not self.costs:  # not before the batch is run: a model may write over its inputs
            self._measure(inputs)
        arrays["ids"] = np.asarray(np.arange(done, done + n) if batch.ids is None else batch.ids)
        if batch.groups is not None:
            arrays["groups"] = np.asarray(batch.groups)
        return arrays

    def _arrays(self, inputs: Any, labels: Any, done: int) -> dict[str, Array]:
        n, n_exits = batch_size(inputs), self.model.n_exits
        with inference(self.device, self.dtype):
            outputs, confidences, broken = self._forward(inputs)
        with torch.inference_mode():
            target = None if labels is None else torch.as_tensor(labels).to(self.device)
            rows = {f"confidences/{name}": torch.stack(c, dim=1) for name, c in confidences.items()}
            for loss in self.losses:
                if loss.against_last is not None:
                    rows[f"inconsistencies/{loss.name}"] = loss.against_last(outputs)
                if target is not None and loss.against_labels is not None:
                    against = loss.against_labels(outputs, target)
                    if target.ndim == 1 and not target.is_floating_point():
                        against = against.masked_fill((target < 0)[:, None], torch.nan)
                    rows[f"losses/{loss.name}"] = against
        arrays = {key: value.cpu().numpy() for key, value in rows.items()}
        bad = np.argwhere(torch.stack(broken, dim=1).cpu().numpy())
        if len(bad):
            row, exit_index = bad[0].tolist()
            refuse_broken(outputs[exit_index], row, exit_index, done + row)
        for key, array in arrays.items():
            _refuse_bad(key, array, n, done, n_exits)
        return arrays

    def _forward(self, inputs: Any) -> tuple[list[Any], dict[str, list[Tensor]], list[Tensor]]:
        """Return outputs of all exits, confidences at all but the last, and which rows are NaN."""
        outputs: list[Any] = []
        confidences: dict[str, list[Tensor]] = {name: [] for name in self.scores}
        broken: list[Tensor] = []
        for k, output in enumerate(exit_outputs(self.model, inputs, self.temperatures)):
            outputs.append(plain_output(output))
            scores: list[Tensor] = []
            if k < self.model.n_exits - 1:
                scores = [confidence(name, output) for name in self.scores]
                for name, score in zip(self.scores, scores, strict=True):
                    confidences[name].append(score)
            found = broken_rows(output, *scores)
            broken.append(torch.zeros_like(broken[0]) if found is None else found)
        return outputs, confidences, broken

    def _measure(self, inputs: Any) -> None:
        with inference(self.device, self.dtype):
            self.costs["flops"] = exit_flops(self.model, inputs)
            if self.seconds:
                self.costs["seconds"] = exit_seconds(self.model, inputs)

    def record(self, rows: dict[str, Array]) -> ExitRecord:
        """Return the record of some rows."""

        def tables(kind: str) -> dict[str, Array]:
            start = f"{kind}/"
            return {key.removeprefix(start): rows[key] for key in rows if key.startswith(start)}

        ranges = {loss.name: loss.range for loss in self.losses if loss.range is not None}
        losses = tables("losses")
        if any(np.isnan(values).any() for values in losses.values()):
            kept = [k for k in losses if k in LOSSES and LOSSES[k].of == "prediction"]
            losses = {name: losses[name] for name in kept}
        return ExitRecord(
            tables("confidences"),
            losses=losses,
            inconsistencies=tables("inconsistencies"),
            costs=self.costs,
            loss_ranges=ranges,
            ids=rows["ids"],
            groups=rows.get("groups"),
            fingerprint=self.fingerprint,
            temperatures=self.temperatures,
            dtype=self.dtype,
        )

    def identity(self) -> dict[str, Any]:
        """Return what shards of one run have in common."""
        return {
            "model": self.fingerprint,
            "losses": [loss.name for loss in self.losses],
            "scores": self.scores,
        }


class _Store:
    """Rows collected so far, in memory or in a folder of shards."""

    def __init__(self, run: _Run, folder: str | os.PathLike[str] | None, size: int) -> None:
        self.run = run
        self.size = size
        self.folder = None if folder is None else Path(folder)
        self.holds: list[str] | None = None  # parts of every batch
        self.rows: list[dict[str, Array]] = []
        self.shards: list[ExitRecord] = []
        if self.folder is not None:
            self._resume(self.folder)
        self.done = sum(shard.n for shard in self.shards)

    def _resume(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / "collection.json"
        paths = sorted(folder.glob("shard-*.parquet"))
        if not (manifest.is_file() or paths):
            return
        found = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
        self.holds = found.pop("batches", None)
        if found != self.run.identity():
            raise ValueError(
                f"`shards`: {folder} holds a collection of another model, or of other losses or"
                " scores; choose another folder, or remove it."
            )
        self.shards = [ExitRecord.load(path) for path in paths]
        if self.shards:
            costs = self.shards[0].costs
            self.run.costs = {name: costs[name] for name in costs if name != "exit"}

    def add(self, batch: Batch, rows: dict[str, Array]) -> None:
        if self.holds is None:
            self.holds = batch.names
            if self.folder is not None:
                text = json.dumps({**self.run.identity(), "batches": self.holds}, indent=2)
                write_text(self.folder / "collection.json", text + "\n")
        if batch.names != self.holds:
            raise ValueError(
                f"All batches must hold the same parts, but one holds {', '.join(batch.names)}"
                f" after {', '.join(self.holds)}."
            )
        self.rows.append(rows)
        self.done += len(rows["ids"])
        waiting = sum(len(part["ids"]) for part in self.rows)
        if self.folder is not None and waiting >= self.size:
            self._seal()

    def _seal(self) -> None:
        if not self.rows:
            return
        joined = {key: np.concatenate([part[key] for part in self.rows]) for key in self.rows[0]}
        shard = self.run.record(joined)
        path = f"shard-{len(self.shards):05d}.parquet"
        self.rows = []
        self.shards.append(shard)  # before it is saved: a full disk must not lose it
        if self.folder is not None:
            shard.save(self.folder / path)

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


def _refuse_bad(key: str, array: Array, n: int, done: int, n_exits: int) -> None:
    kind, _, name = key.partition("/")
    width = n_exits - 1 if kind == "confidences" else n_exits
    if array.shape != (n, width):
        raise ValueError(
            f"`{kind}` {name!r} must have shape ({n}, {width}), but got {array.shape}."
        )
    if kind != "losses" and np.isnan(array).any():
        row, exit_index = np.argwhere(np.isnan(array))[0].tolist()
        raise ValueError(
            f"`{kind}` {name!r} is NaN at exit {exit_index + 1} for sample {done + row}."
        )


def _device(model: StagedModel, wanted: str | torch.device | None) -> torch.device:
    """Return where to run: where the model is, which must be what is wanted."""
    found = home(model)
    if wanted is None:
        return found or torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"`device` must be one of PyTorch's, but got {wanted!r}.") from None
    if found is None:
        return device
    if device.type != found.type or device.index not in (None, found.index):
        raise ValueError(f"`device` is {device}, but the model is on {found}: move one of them.")
    return found
