"""`collect`: from a staged model and batches to an exit record.

Scores and losses are reduced on the device, batch by batch: memory grows with samples and exits,
never with classes or pixels. With a folder for shards, a run that is killed resumes where it was.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swiftsure import checks
from swiftsure.files import write_text
from swiftsure.losses import LOSSES
from swiftsure.records import ExitRecord
from swiftsure.torch.costs import exit_flops, exit_seconds
from swiftsure.torch.fingerprint import fingerprint
from swiftsure.torch.losses import TensorLoss, resolve
from swiftsure.torch.scoring import confidence
from swiftsure.torch.staged import Scored, StagedModel, batch_size

__all__ = ["InterruptedCollectionError", "collect"]

Array = NDArray[Any]


class InterruptedCollectionError(RuntimeError):
    """Collection broke off; `record` holds what was collected before (None if nothing was)."""

    def __init__(self, message: str, record: ExitRecord | None) -> None:
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
        `labels`, `ids` and `groups`, or of inputs alone. In the same order each time, if a run is
        to be resumed. Negative labels are missing ones.
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
        with _bar(progress, total) as advance:
            for batch in _after(loader, store.done):
                store.add(run.reduce(batch, store.done))
                advance()
    except BaseException as error:
        kept = store.flush()
        if kept is None or not isinstance(error, Exception):
            raise  # nothing to keep, or an interruption that must go on
        where = f" in {shards}" if shards is not None else ", in this error's `record`"
        raise InterruptedCollectionError(
            f"{type(error).__name__} after {store.done:,} samples, which are kept{where}: {error}",
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
        if isinstance(model, nn.Module) and model.training:
            raise ValueError("`model` must be in evaluation mode: call model.eval() first.")
        self.model = model
        self.losses = [resolve(loss) for loss in losses]
        self.scores = list(scores)
        self.seconds = seconds
        self.dtype = (
            None
            if dtype is None
            else checks.known("dtype", dtype, ["float32", "bfloat16", "float16"])
        )
        self.temperatures = None if temperatures is None else tuple(float(t) for t in temperatures)
        if self.temperatures is not None and len(self.temperatures) != model.n_exits:
            raise ValueError(
                f"`temperatures` must be one an exit, {model.n_exits}, but got"
                f" {len(self.temperatures)}."
            )
        self.device = _device_of(model, device)
        self.costs: dict[str, Array] = {}
        self.fingerprint = None
        if isinstance(model, nn.Module):
            self.fingerprint = fingerprint(model, temperatures=self.temperatures, dtype=self.dtype)

    def reduce(self, batch: Any, done: int) -> dict[str, Array]:
        """Return the rows of one batch: confidences, losses, inconsistencies, ids, groups."""
        inputs, labels, extras = _parts(batch)
        inputs = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(self.device), inputs)
        n = batch_size(inputs)
        if not self.costs:
            self._measure(inputs)
        kind = None if self.dtype in (None, "float32") else getattr(torch, self.dtype or "")
        with (
            torch.inference_mode(),
            torch.autocast(self.device.type, dtype=kind, enabled=kind is not None),
        ):
            outputs, confidences = self._forward(inputs)
        with torch.inference_mode():
            rows = {f"confidences/{name}": torch.stack(c, dim=1) for name, c in confidences.items()}
            for loss in self.losses:
                if loss.against_last is not None:
                    rows[f"inconsistencies/{loss.name}"] = loss.against_last(outputs)
                if labels is not None and loss.against_labels is not None:
                    target = torch.as_tensor(labels).to(self.device)
                    against = loss.against_labels(outputs, target)
                    if target.ndim == 1 and not target.is_floating_point():
                        against = against.masked_fill((target < 0)[:, None], torch.nan)
                    rows[f"losses/{loss.name}"] = against
        arrays = {key: value.cpu().numpy() for key, value in rows.items()}
        for key, array in arrays.items():
            _refuse_bad(key, array, n, done, self.model.n_exits)
        arrays["ids"] = np.asarray(extras.get("ids", np.arange(done, done + n)))
        if "groups" in extras:
            arrays["groups"] = np.asarray(extras["groups"])
        return arrays

    def _forward(self, inputs: Any) -> tuple[list[Any], dict[str, list[Tensor]]]:
        model = self.model
        outputs: list[Any] = []
        confidences: dict[str, list[Tensor]] = {name: [] for name in self.scores}
        state = model.begin(inputs)
        for k in range(model.n_exits):
            state = model.advance(k, state)
            output = model.head(k, state)
            own = output.confidence if isinstance(output, Scored) else None
            plain = output.output if isinstance(output, Scored) else output
            if self.temperatures is not None:
                plain = plain / self.temperatures[k]
            outputs.append(plain)
            if k < model.n_exits - 1:
                scored = plain if own is None else Scored(plain, own)
                for name in self.scores:
                    confidences[name].append(confidence(name, scored))
        return outputs, confidences

    def _measure(self, inputs: Any) -> None:
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
        self.rows: list[dict[str, Array]] = []
        self.shards: list[ExitRecord] = []
        if self.folder is not None:
            self._resume(self.folder)
        self.done = sum(shard.n for shard in self.shards)

    def _resume(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / "collection.json"
        if manifest.is_file():
            if json.loads(manifest.read_text(encoding="utf-8")) != self.run.identity():
                raise ValueError(
                    f"`shards`: {folder} holds a collection of another model, or of other losses or"
                    " scores; choose another folder, or remove it."
                )
        else:
            write_text(manifest, json.dumps(self.run.identity(), indent=2) + "\n")
        self.shards = [ExitRecord.load(path) for path in sorted(folder.glob("shard-*.parquet"))]
        if self.shards:
            costs = self.shards[0].costs
            self.run.costs = {name: costs[name] for name in costs if name != "exit"}

    def add(self, rows: dict[str, Array]) -> None:
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
        if self.folder is not None:
            shard.save(self.folder / f"shard-{len(self.shards):05d}.parquet")
        self.shards.append(shard)
        self.rows = []

    def flush(self) -> ExitRecord | None:
        self._seal()
        return ExitRecord.concatenate(self.shards) if self.shards else None


def _after(loader: Iterable[Any], done: int) -> Iterator[Any]:
    """Yield batches, without the first `done` samples."""
    for batch in loader:
        n = batch_size(_parts(batch)[0])
        if done >= n:
            done -= n
            continue
        yield batch if not done else _without_first(batch, done)
        done = 0


def _without_first(batch: Any, done: int) -> dict[str, Any]:
    inputs, labels, extras = _parts(batch)
    rest = {key: values[done:] for key, values in extras.items()}
    if labels is not None:
        rest["labels"] = labels[done:]
    kinds = (Tensor, np.ndarray)
    return {"inputs": pytree.tree_map_only(kinds, lambda leaf: leaf[done:], inputs), **rest}


def _length(loader: Iterable[Any]) -> int | None:
    """Return the number of batches, if the loader knows it."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of a data set without a length
        return None


def _parts(batch: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return inputs, labels and the rest of a batch."""
    if isinstance(batch, dict):
        if "inputs" not in batch:
            raise ValueError(
                f"A batch that is a dict must have `inputs`, but has: {', '.join(batch)}."
            )
        extras = {key: batch[key] for key in ("ids", "groups") if key in batch}
        return batch["inputs"], batch.get("labels"), extras
    if isinstance(batch, tuple | list):
        if len(batch) not in (1, 2, 3):
            raise ValueError(
                f"A batch must be (inputs, labels) or (inputs, labels, ids), but has {len(batch)}"
                " parts; pass a dict for anything else."
            )
        extras = {"ids": batch[2]} if len(batch) == 3 else {}
        return batch[0], batch[1] if len(batch) > 1 else None, extras
    return batch, None, {}


def _refuse_bad(key: str, array: Array, n: int, done: int, n_exits: int) -> None:
    kind = key.partition("/")[0]
    width = n_exits - 1 if kind == "confidences" else n_exits
    if array.shape != (n, width):
        raise ValueError(f"`{key}` must have shape ({n}, {width}), but got {array.shape}.")
    if kind != "losses" and np.isnan(array).any():
        row, exit_ = np.argwhere(np.isnan(array))[0]
        raise ValueError(f"The output of exit {exit_ + 1} is NaN for sample {done + row}.")


def _device_of(model: StagedModel, wanted: str | torch.device | None) -> torch.device:
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if wanted is None:
        return torch.device("cpu") if parameter is None else parameter.device
    device = torch.device(wanted)
    if parameter is not None and parameter.device.type != device.type:
        raise ValueError(
            f"`device` is {device}, but the model is on {parameter.device}: move one of them."
        )
    return device


def _bar(wanted: bool | None, total: int | None) -> Any:
    if not (sys.stderr.isatty() if wanted is None else wanted):
        return nullcontext(lambda: None)
    from swiftsure.progress import steps

    return steps("collecting", total)
