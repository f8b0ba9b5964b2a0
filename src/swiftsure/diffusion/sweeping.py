"""`sweep`: from a diffusion model to a threshold record, with fewer runs than thresholds.

A generation at one threshold tells for which others it would be the same: those that lie on the
same side of every confidence that was compared. Only thresholds that none so far covers are run.
Every image of a batch has its own threshold, so batches stay full.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from swiftsure import checks
from swiftsure.diffusion.deediff import DeeDiff
from swiftsure.diffusion.image_losses import ImageLoss, image_loss
from swiftsure.diffusion.inputs import class_labels
from swiftsure.diffusion.results import Generated
from swiftsure.diffusion.rules import ExitRule, checked_thresholds
from swiftsure.diffusion.schedules import Sampler
from swiftsure.exits import exit_indices
from swiftsure.progress import steps
from swiftsure.records import ThresholdRecord
from swiftsure.records.shards import Shards, joined
from swiftsure.torch.fingerprinting import fingerprint
from swiftsure.torch.staged import StagedModel, refuse_unstaged

__all__ = ["pilot_thresholds", "sweep"]

Array = NDArray[Any]


def sweep(
    model: StagedModel,
    n: int,
    *,
    thresholds: Sequence[float | None] | ArrayLike,
    losses: Sequence[str | ImageLoss] = ("lpips",),
    sampler: Sampler | None = None,
    labels: ArrayLike | None = None,
    seed: int = 0,
    first: int = 0,
    strict: bool = False,
    min_exit: int = 0,
    dtype: str | None = None,
    batch_size: int = 64,
    shards: str | os.PathLike[str] | None = None,
    shard_size: int = 256,
    progress: bool | None = None,
) -> ThresholdRecord:
    """Generate at every threshold and in full, from the same noise, and record how they differ.

    Parameters
    ----------
    model : StagedModel
        As `DeeDiff` takes it.
    n : int
        How many pairs.
    thresholds : (K,)
        Safest first; the full model is put before them where it is not. Fix them beforehand, or
        from other samples: see `pilot_thresholds`.
    losses : names among "lpips", "ssim" and "mse", or `ImageLoss`es
        LPIPS with weights from a file: `Lpips.load(file)`.
    sampler, dtype
        As `DeeDiff` takes them; the policy will insist on them.
    labels : (n,), optional
        Classes, where the network is conditioned on them; drawn at random, as requests will be.
    seed, first : int
        Samples are the numbers from `first` of this seed.
    strict, min_exit
        Of the exit rule; see `ExitRule`.
    shards : folder, optional
        Where to write the record in pieces of `shard_size` images, and to resume from.
    progress : bool, optional
        Show a progress bar; by default where standard error is a terminal.

    Returns
    -------
    record : ThresholdRecord
        Of inconsistencies with the full model, for `risk="consistency"`; costs "layers" (mean
        blocks a step) and "flops" of every image at every threshold; the model's fingerprint.

    Raises
    ------
    ValueError
        If an argument is none, or the shards come from another run.

    Examples
    --------
    >>> from swiftsure.diffusion import DDIM
    >>> from swiftsure.torch.models import UViT
    >>> _ = torch.manual_seed(0)
    >>> model = UViT(image_size=8, width=16, depth=2, n_heads=2).eval()
    >>> sweep(model, 3, thresholds=[0.6, 0.4], losses=["mse"], sampler=DDIM(2))
    ThresholdRecord(n=3, K=3, losses=[], inconsistencies=['mse'], costs=['layers', 'flops'])
    """
    checks.count("n", n)
    refuse_unstaged(model)
    run = _Sweep(
        DeeDiff(model, ExitRule(None, strict, min_exit), sampler=sampler, dtype=dtype),
        _grid(thresholds),
        _resolved(losses),
        checks.count("seed", seed, 0),
        checks.count("batch_size", batch_size),
    )
    numbers = np.arange(checks.count("first", first, 0), first + n)
    classes = class_labels(labels, n, run.fast.n_classes)
    identity = run.identity() | {
        "first": first,
        "n": n,
        "labels": None if classes is None else classes.tolist(),
        "shard_size": checks.count("shard_size", shard_size),
    }
    kept = Shards(shards, identity)
    parts = []
    with steps("sweeping", n * len(run.grid), progress) as advance:
        for number, start in enumerate(range(0, n, shard_size)):
            rows = slice(start, start + shard_size)
            labelled = None if classes is None else classes[rows]
            seen = _Counter(advance)
            part = kept.piece(number, partial(run.record, numbers[rows], labelled, seen))
            seen.up_to(part.n * len(run.grid))
            parts.append(part)
    return joined(parts)


def pilot_thresholds(
    model: StagedModel,
    n_thresholds: int = 20,
    *,
    n: int = 32,
    sampler: Sampler | None = None,
    labels: ArrayLike | None = None,
    seed: int = 1,
    strict: bool = False,
    min_exit: int = 0,
    dtype: str | None = None,
    batch_size: int = 64,
) -> list[float | None]:
    """Return thresholds, safest first, at which a pilot's steps take ever fewer layers, evenly.

    Confidences of diffusion models crowd where nobody expects them. The pilot shows where they
    are; since its images are other ones, of another seed than the sweep's, whatever is calibrated
    on these thresholds keeps its guarantee. Thresholds whose looks at exits cost more FLOPs than
    leaving saves are left out.

    Parameters
    ----------
    n_thresholds : int
        At most so many beside the full model; fewer where confidences leave no more.
    n : int
        Images of the pilot.
    """
    checks.count("n_thresholds", n_thresholds)
    refuse_unstaged(model)
    fast = DeeDiff(model, ExitRule(None, strict, min_exit), sampler=sampler, dtype=dtype)
    seen = fast.confidences(n, labels=labels, seed=seed, batch_size=batch_size)
    table = seen.reshape(-1, seen.shape[-1])
    candidates = np.unique(np.quantile(table, np.linspace(0, 1, 1001)).astype(np.float32))[::-1]
    leave = partial(exit_indices, table, strict=strict, min_exit=min_exit)
    means = [
        (fast.costs.layers[taken].mean(), fast.costs.flops[taken].mean())
        for taken in map(leave, candidates)
    ]
    layers, flops = np.asarray(means).T
    # The full model does not look at exits: who looks and hardly leaves is slower than that.
    saving = np.flatnonzero(flops < fast.costs.full_flops)
    kept = saving if len(saving) else [-1]
    candidates, layers = candidates[kept], layers[kept]
    wanted = np.linspace(layers[0], layers[-1], n_thresholds)
    chosen = np.unique([int(np.argmin(np.abs(layers - each))) for each in wanted])
    return [None, *candidates[chosen].tolist()]


@dataclass(frozen=True)
class _Sweep:
    """One model, one grid, one seed."""

    fast: DeeDiff
    grid: NDArray[np.float32]
    losses: list[ImageLoss]
    seed: int
    batch_size: int

    def identity(self) -> dict[str, Any]:
        """Return what shards of one sweep have in common."""
        return {
            "model": self.fast.fingerprint,
            "settings": self.fast.settings,
            "thresholds": [None if np.isinf(each) else float(each) for each in self.grid],
            "losses": {loss.name: fingerprint(loss) for loss in self.losses},
            "seed": self.seed,
        }

    def record(self, numbers: Array, classes: Array | None, seen: "_Counter") -> ThresholdRecord:
        """Return the record of some samples."""
        shape = (len(numbers), len(self.grid))
        tables = {name: np.zeros(shape) for name in ("layers", "flops")}
        soft = {loss.name: np.zeros(shape) for loss in self.losses}
        full = self._generate(numbers, classes, None)
        tables["layers"][:, 0], tables["flops"][:, 0] = full.layers, full.flops
        seen.add(len(numbers))
        due = np.ones(shape, dtype=bool)
        due[:, 0] = False
        while due.any():
            rows = np.flatnonzero(due.any(axis=1))[: self.batch_size]
            columns = due[rows].argmax(axis=1)  # the safest that is due
            labelled = None if classes is None else classes[rows]
            made = self._generate(numbers[rows], labelled, self.grid[columns])
            same = made.same_at(self.grid)
            same[np.arange(len(rows)), columns] = True
            place, column = np.nonzero(same & due[rows])
            for name, values in self._measured(made, full, rows).items():
                table = soft[name] if name in soft else tables[name]
                table[rows[place], column] = values[place]
            due[rows[place], column] = False
            seen.add(len(place))
        return ThresholdRecord(
            self.grid.astype(np.float64),
            inconsistencies=soft,
            costs=tables,
            inconsistency_ranges={loss.name: loss.range for loss in self.losses},
            ids=numbers,
            fingerprint=self.fast.fingerprint,
            settings=self.fast.settings,
        )

    def _generate(self, numbers: Array, classes: Array | None, levels: Array | None) -> Generated:
        return self.fast.generate(
            numbers,
            labels=classes,
            seed=self.seed,
            thresholds=None if levels is None else levels.tolist(),
            batch_size=self.batch_size,
        )

    def _measured(self, made: Generated, full: Generated, rows: Array) -> dict[str, Array]:
        """Return losses and costs of images, (m,) each."""
        device = made.images.device
        others = full.images[torch.from_numpy(rows).to(device)]
        found = {
            loss.name: loss.to(device)(made.images, others).double().cpu().numpy()
            for loss in self.losses
        }
        return found | {"layers": made.layers, "flops": made.flops}


class _Counter:
    """Advances a bar, by as much as has been done."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self.advance, self.done = advance, 0

    def add(self, more: int) -> None:
        """Advance by some steps."""
        for _ in range(more):
            self.advance()
        self.done += more

    def up_to(self, total: int) -> None:
        """Advance by what is missing: all of a piece that was read."""
        self.add(total - self.done)


def _grid(thresholds: Sequence[float | None] | ArrayLike) -> NDArray[np.float32]:
    levels = checked_thresholds("thresholds", thresholds)
    if levels.ndim != 1 or len(levels) == 0:
        raise ValueError("`thresholds` must be a list of numbers, safest first.")
    if np.isfinite(levels[0]):
        levels = np.concatenate([np.asarray([np.inf], np.float32), levels])
    if (np.diff(levels) >= 0).any():
        raise ValueError("`thresholds` must fall from the safest to the fastest, each once.")
    return levels


def _resolved(losses: Sequence[str | ImageLoss]) -> list[ImageLoss]:
    found = [image_loss(loss) for loss in losses]
    names = [loss.name for loss in found]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"`losses` must be at least one, each once, but got {names}.")
    return found
