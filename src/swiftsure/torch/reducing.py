"""`Reducer`: reduces batches to rows of a record (scores and losses per exit) on the device."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from swiftsure._lib import checks
from swiftsure.losses import LOSSES, PIXEL_LOSSES, ZERO_ONE, Loss
from swiftsure.records import ExitRecord
from swiftsure.records.checks import check_dtype, temperature_tuple
from swiftsure.run.graphs.precision import inference
from swiftsure.scores import SCORE_VERSION, SCORES, LearnedScore
from swiftsure.scores.features import DEFAULT_FEATURES, inputs_of
from swiftsure.torch.batches import Batch, moved, sample_digests
from swiftsure.torch.costs import exit_and_full_flops, exit_seconds, full_seconds
from swiftsure.torch.fingerprinting import begin_fingerprint
from swiftsure.torch.foreign import ForeignModel
from swiftsure.torch.losses import label_losses, stacked_logits
from swiftsure.torch.modes import model_device, refuse_training
from swiftsure.torch.results import broken_rows, refuse_confidence, refuse_output
from swiftsure.torch.scoring import confidence, known_score, warn_of_probabilities
from swiftsure.torch.segmentation import image_losses, image_size, labelled_rows
from swiftsure.torch.staged import (
    StagedModel,
    batch_size,
    device_of,
    exit_outputs,
    plain_output,
    refuse_unstaged,
    rows_of,
)

__all__ = ["HashedBatch", "PendingBatch", "PendingRows", "Reducer", "Rows", "Source"]

Array = NDArray[Any]

BROKEN = "broken"
"""Key of the rows that mark the exits at which a sample's output is not valid."""

PREDICTIONS = "predictions"
"""Key of the rows that hold the class that each exit predicts."""


HASH_VERSION = 2
"""Counts the ways in which data were hashed; version 2 hashes each sample."""


class Rows(NamedTuple):
    """Rows of a record, ids of samples without rows, and what is known of the batch."""

    arrays: dict[str, Array]
    left_out: list[Any]
    parts: list[str]
    """Names of the parts that the batch has."""
    digests: dict[str, bytes]
    """Digests of the samples, for each part; none if they are not needed."""


class Source(Protocol):
    """A batch, here or elsewhere: `Batch` or `swiftsure.torch.ray_data.RemoteBatch`."""

    @property
    def size(self) -> int:
        """Number of samples."""

    def rows(self, which: slice) -> "Source":
        """Return some of the samples."""

    def load(self) -> Batch:
        """Return the batch in this process."""


class PendingRows(Protocol):
    """Rows that are being computed."""

    @property
    def size(self) -> int:
        """Number of samples of the batch."""

    @property
    def is_running(self) -> bool:
        """Whether `rows` would have to wait."""

    def rows(self) -> Rows:
        """Wait for the rows and return them."""


class Reducer:
    """Reduces batches to rows of a record.

    `n_running` is how many batches may run before the oldest is waited for.
    """

    n_running = 1

    def __init__(
        self,
        model: StagedModel,
        losses: Sequence[str | Loss],
        scores: Sequence[str] | LearnedScore,
        temperatures: Sequence[float] | None,
        dtype: str | None,
        seconds: bool,
        *,
        device: str | torch.device | None,
    ) -> None:
        refuse_unstaged(model, selects=False)
        refuse_training(model)
        self.model = model
        losses = [losses] if isinstance(losses, str | Loss) else losses
        scores = scores.inputs if isinstance(scores, LearnedScore) else scores
        scores = [scores] if isinstance(scores, str) else scores
        self.losses = [LOSSES.choose(loss, "losses") for loss in losses]
        for loss in self.losses:
            loss.function("tensors.against_last", "tensors.against_labels")
        self.of_images = [loss.name for loss in self.losses if loss in PIXEL_LOSSES]
        if not scores:
            raise ValueError("`scores` must name at least one score, but is empty.")
        self.scores = [str(known_score("scores", name)) for name in scores]
        self.features: list[str] = []
        if any(name in SCORES for name in self.scores):  # of classifiers
            needed = inputs_of(DEFAULT_FEATURES)
            self.features = [name for name in needed if name not in self.scores]
        self.seconds = seconds
        self.dtype = check_dtype(dtype)
        self.temperatures = temperature_tuple(temperatures, model.n_exits)
        self.device = _device(model, device)
        self.costs: dict[str, Array] = {}
        self.full_costs: dict[str, Any] = {}
        self._confidence: Callable[[str, Any], Tensor] = confidence
        self._seen = False
        self._fingerprint: Future[str] | None = None
        if isinstance(model, nn.Module):
            self._fingerprint = begin_fingerprint(
                model, self.device, temperatures=self.temperatures, dtype=self.dtype
            )
        elif isinstance(model, ForeignModel):
            if self.dtype is not None:
                raise ValueError(f"`dtype` must be None for this model, but got {dtype!r}.")
            self._confidence = model.confidence
            self.costs["flops"] = model.flops
            self._fingerprint = Future()
            self._fingerprint.set_result(model.fingerprint(self.temperatures))

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the model before it ran; None if it is not an `nn.Module`."""
        return None if self._fingerprint is None else self._fingerprint.result()

    def begin(
        self, given: Source, done: int, *, hashed: bool, measured: bool = True
    ) -> PendingRows:
        """Run one batch and start copying its rows from the device.

        Parameters
        ----------
        done : int
            Number of samples before this batch.
        hashed : bool
            Whether to return digests of the samples.
        measured : bool
            Whether to measure the costs of the exits, unless they are known.
        """
        batch = given.load()
        # Before the batch runs: a model may overwrite it.
        digests = sample_digests(batch) if hashed else {}
        inputs = moved(batch.inputs, self.device)
        n = batch_size(inputs)
        ids = np.arange(done, done + n) if batch.ids is None else _per_sample("ids", batch.ids, n)
        groups = None if batch.groups is None else _per_sample("groups", batch.groups, n)
        copies, kept = self._reduced(inputs, batch.labels, ids)
        if measured and not self.measured:  # after the batch: a model may overwrite its inputs
            self._measure(inputs)
        return PendingBatch(
            self.model.n_exits,
            copies,
            ids,
            batch.ids is not None,
            groups,
            kept,
            done,
            batch.names,
            digests,
        )

    def begin_hashing(self, given: Source) -> PendingRows:
        """Return the digests of a batch that need not run."""
        batch = given.load()
        return HashedBatch(batch.size, Rows({}, [], batch.names, sample_digests(batch)))

    def _reduced(self, inputs: Any, given: Any, ids: Array) -> tuple["_HostCopies", Array]:
        """Return scores and losses, and the indices of the samples that have them."""
        with inference(self.device, self.dtype):
            try:
                outputs, rows = self._forward(inputs)
            except Exception as error:
                if not self._seen:
                    error.add_note(_about_first_batch(inputs))
                raise
        kept = np.arange(len(ids))
        if not self._seen:  # on the first batch only, since it waits for the device
            self._seen = True
            warn_of_probabilities(outputs[0], stacklevel=8)
        with torch.inference_mode():
            labels = None if given is None else _labels(given)
            if self.of_images and labels is not None:
                labels = labels.to(self.device)
                labelled = labelled_rows(outputs, labels, ids.tolist())
                if labelled is not None:
                    outputs, labels, rows = rows_of((outputs, labels, rows), labelled)
                    kept = labelled.cpu().numpy()
            rows |= self._losses(outputs, labels)
            if ZERO_ONE in self.losses:
                rows[PREDICTIONS] = stacked_logits(outputs).argmax(dim=2).int()
            if self.of_images:
                rows |= image_losses(outputs, labels, image_size(inputs), self.of_images)
        return _HostCopies(rows), kept

    def _losses(self, outputs: list[Any], labels: Tensor | None) -> dict[str, Tensor]:
        rows: dict[str, Tensor] = {}
        for loss in self.losses:
            if loss in PIXEL_LOSSES:  # computed together in `image_losses`
                continue
            on_tensors = loss.on_tensors()
            if on_tensors.against_last is not None:
                rows[f"inconsistencies/{loss.name}"] = on_tensors.against_last(outputs)
            if on_tensors.against_labels is not None and labels is not None:
                against = label_losses(loss, outputs, labels)
                if labels.ndim == 1 and not labels.is_floating_point():
                    missing = (labels < 0).to(against.device, non_blocking=True)
                    against = against.masked_fill(missing[:, None], torch.nan)
                rows[f"losses/{loss.name}"] = against
        return rows

    def _forward(self, inputs: Any) -> tuple[list[Any], dict[str, Tensor]]:
        """Return outputs of all exits, and rows: early confidences, invalid outputs."""
        outputs: list[Any] = []
        found: dict[str, list[Tensor]] = defaultdict(list)
        for k, output in enumerate(exit_outputs(self.model, inputs, self.temperatures)):
            outputs.append(plain_output(output))
            broken = broken_rows(outputs[-1])
            if broken is not None:
                found[BROKEN].append(broken)
            if k < self.model.n_exits - 1:
                for table, names in (("confidences", self.scores), ("features", self.features)):
                    for name in names:
                        found[f"{table}/{name}"].append(self._confidence(name, output))
        return outputs, {name: torch.stack(parts, dim=1) for name, parts in found.items()}

    @property
    def measured(self) -> bool:
        """Whether the costs of the exits are known."""
        return "flops" in self.costs and (not self.seconds or "seconds" in self.costs)

    def _measure(self, inputs: Any) -> None:
        first = torch.zeros(1, dtype=torch.long, device=device_of(inputs))
        with inference(self.device, self.dtype):
            if "flops" not in self.costs:
                flops, alone = exit_and_full_flops(self.model, rows_of(inputs, first))
                self.costs["flops"] = flops
                if alone > 0:  # the full model alone does not run the heads of early exits
                    self.full_costs["flops"] = alone
            if self.seconds:
                self.costs["seconds"] = exit_seconds(self.model, inputs, score=self.scores[0])
                self.full_costs["seconds"] = full_seconds(self.model, inputs)

    def record(self, rows: dict[str, Array]) -> ExitRecord:
        """Return rows as a record."""

        def tables(kind: str) -> dict[str, Array]:
            start = f"{kind}/"
            return {key.removeprefix(start): rows[key] for key in rows if key.startswith(start)}

        losses = tables("losses")
        if any(np.isnan(values).any() for values in losses.values()):
            kept = [loss.name for loss in self.losses if loss.gap_needs_no_label()]
            losses = {name: losses[name] for name in kept if name in losses}
        return ExitRecord(
            tables("confidences"),
            losses=losses,
            inconsistencies=tables("inconsistencies"),
            costs=self.costs,
            loss_ranges={loss.name: loss.range for loss in self.losses},
            ids=rows["ids"],
            has_ids=bool(rows["has_ids"].any()),
            groups=rows.get("groups"),
            fingerprint=self.fingerprint,
            temperatures=self.temperatures,
            dtype=self.dtype,
            full_costs=self.full_costs,
            predictions=rows.get(PREDICTIONS),
            features=tables("features"),
        )

    def report(self, done: int) -> None:
        """Publish how many samples are done; nothing here."""

    def close(self) -> None:
        """Free what the reducer holds besides memory; nothing here."""

    def identity(self) -> dict[str, Any]:
        """Return what all shards of one run have in common."""
        return {
            "model": self.fingerprint,
            "losses": [loss.name for loss in self.losses],
            "scores": [*self.scores, *self.features],
            "score_version": SCORE_VERSION,
            "hash_version": HASH_VERSION,
        }


@dataclass(frozen=True)
class PendingBatch:
    """A batch whose rows are still being copied from the device while the next batch runs.

    Parameters
    ----------
    kept : (m,)
        Indices of the samples that have rows.
    done : int
        Number of samples before this batch.
    """

    n_exits: int
    copies: "_HostCopies"
    ids: Array
    has_ids: bool
    groups: Array | None
    kept: Array
    done: int
    parts: list[str]
    digests: dict[str, bytes]

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.ids)

    @property
    def is_running(self) -> bool:
        """Whether the device may still be busy with this batch."""
        return self.copies.copied is not None

    def rows(self) -> Rows:
        """Wait for the rows, check them and return them."""
        arrays = self.copies.arrays()
        samples = self.done + self.kept
        broken = np.argwhere(arrays.pop(BROKEN, np.zeros((0, 0), bool)))
        if len(broken):
            row, exit_index = broken[0].tolist()
            refuse_output(exit_index, samples[row])
        for key, array in arrays.items():
            _check_rows(key, array, samples, self.n_exits)
        arrays["ids"] = self.ids[self.kept]
        arrays["has_ids"] = np.full(len(self.kept), self.has_ids)
        if self.groups is not None:
            arrays["groups"] = self.groups[self.kept]
        left_out = np.delete(self.ids, self.kept).tolist()
        return Rows(arrays, left_out, self.parts, self.digests)


@dataclass(frozen=True)
class HashedBatch:
    """A batch that was only hashed."""

    size: int
    found: Rows
    is_running: bool = False

    def rows(self) -> Rows:
        """Return no rows, but the digests."""
        return self.found


class _HostCopies:
    """Copies tensors to the host while the device does other work."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = {
            key: tensor.to("cpu", non_blocking=True) for key, tensor in tensors.items()
        }
        self.copied: torch.cuda.Event | None = None
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if devices:
            # Recorded on the stream of the copies: their device may not be the current one.
            stream = torch.cuda.current_stream(devices.pop())
            self.copied = stream.record_event()

    def arrays(self) -> dict[str, Array]:
        if self.copied is not None:
            self.copied.synchronize()
        return {key: tensor.numpy() for key, tensor in self._tensors.items()}


def _about_first_batch(inputs: Any) -> str:
    """Return what a first batch was, for the error of a model that cannot run on it."""
    named = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    shapes = ", ".join(
        f"{name} {checks.shape_text(leaf.shape)}" if isinstance(leaf, Tensor) else str(name)
        for name, leaf in named.items()
    )
    return (
        f"The model failed on the first batch, which has {shapes}. A batch must be"
        " (inputs, labels), or a dict with the keys `inputs` and `labels`, or a dict with the"
        " model's own arguments by name; inputs must have the shape and channels that it takes."
    )


def _labels(given: Any) -> Tensor:
    """Return labels as a tensor; raise if they are not numbers."""
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        example = next((each for each in given if isinstance(each, str)), None)
        raise TypeError(
            "Labels must be numbers, such as those of classes, but are"
            + (f" text such as {example!r}" if example is not None else f" {type(given).__name__}")
            + ": number the classes in the loader, {name: k for k, name in enumerate(classes)}."
        ) from None


def _per_sample(name: str, values: Any, n: int) -> Array:
    return checks.of_shape(name, np.asarray(values), {"n": n})


def _check_rows(key: str, array: Array, samples: Array, n_exits: int) -> None:
    kind, _, name = key.partition("/")
    early = kind in ("confidences", "features")
    expected = (len(samples), n_exits - 1 if early else n_exits)
    if array.shape != expected:
        raise ValueError(f"`{kind}` {name!r} must have shape {expected}, but got {array.shape}.")
    if kind != "losses" and np.isnan(array).any():
        row, exit_index = np.argwhere(np.isnan(array))[0].tolist()
        if kind == "confidences":
            refuse_confidence(exit_index, samples[row])
        raise ValueError(
            f"`{kind}` {name!r} must not be NaN, but is at exit {exit_index + 1} for sample"
            f" {samples[row]}."
        )


def _device(model: StagedModel, wanted: str | torch.device | None) -> torch.device:
    """Return the model's device; raises if another one is wanted."""
    found = model_device(model)
    if wanted is None:
        return found or torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"`device` must name a PyTorch device, but got {wanted!r}.") from None
    if found is None:
        return device
    if device.type != found.type or device.index not in (None, found.index):
        raise ValueError(
            f"`device` must be the model's, {found}, but got {device}: move the model first."
        )
    return found
