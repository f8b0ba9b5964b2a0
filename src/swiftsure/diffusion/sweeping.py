"""`sweep`: generate images at every threshold and record how they differ from the full model's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from swiftsure._lib import checks
from swiftsure.diffusion.deediff import DeeDiff
from swiftsure.diffusion.image_losses import compare_images
from swiftsure.diffusion.inputs import class_labels
from swiftsure.diffusion.lpips import Lpips
from swiftsure.diffusion.schedules import DDIM
from swiftsure.exits import exit_indices
from swiftsure.losses import LOSSES, LPIPS, Loss
from swiftsure.records import ThresholdRecord
from swiftsure.run import RunBatch, RunOptions, Runs, Sweep, sweep_grid, threshold_levels
from swiftsure.torch.fingerprinting import fingerprint
from swiftsure.torch.modes import model_device, needs_gpu
from swiftsure.torch.staged import refuse_unstaged

__all__ = ["image_losses", "loss_weights", "pilot_thresholds", "sweep"]

Array = NDArray[Any]


def sweep(
    model: DeeDiff,
    n: int,
    *,
    thresholds: Sequence[float | None] | ArrayLike,
    losses: Sequence[str | Loss] = ("lpips",),
    n_steps: Sequence[int] | None = None,
    labels: ArrayLike | None = None,
    seed: int = 0,
    first: int = 0,
    batch_size: int = 64,
    run: RunOptions = RunOptions(),
) -> ThresholdRecord:
    """Generate images with and without early exits, from the same noise; record the differences.

    Parameters
    ----------
    model : DeeDiff
        The network with its sampler and rule, whose threshold is ignored; policies will require
        the same.
    n : int
        Number of images.
    thresholds : (K,)
        Safest first; the full model is added in front if it is missing. Choose them in advance or
        from other samples: see `pilot_thresholds`.
    losses : names among "lpips", "ssim" and "mse", or `Loss` objects with `tensors`
        For LPIPS with weights from a file: `Lpips.load(file)`.
    n_steps : ints, optional
        A second dial: numbers of steps, fewer than the sampler's (a `DDIM`). All thresholds are
        swept at each of them, and also without exits. Losses are against the full model with all
        of the sampler's steps, from the same noise.
    labels : (n,), optional
        Classes, for a class-conditional network; draw them at random, as requests will be.
    seed, first : int
        The images are the samples of this seed numbered from `first`.
    run : RunOptions
        Shards, progress, and where the model runs; Ray actors take one shard at a time.

    Returns
    -------
    record : ThresholdRecord
        With inconsistencies against the full model, for `risk="consistency"`; the costs "layers"
        (mean blocks per step) and "flops" of every image at every threshold; and the model's
        fingerprint. With `n_steps`, its dials are "threshold" and "n_steps", and the cost "blocks"
        (in all steps together) takes the place of "layers".

    Raises
    ------
    ValueError
        If an argument is invalid, or the shards come from another run.

    Examples
    --------
    >>> from swiftsure.diffusion import DDIM
    >>> from swiftsure_zoo import UViT
    >>> _ = torch.manual_seed(0)
    >>> model = UViT(image_size=8, width=16, depth=2, n_heads=2).eval()
    >>> sweep(DeeDiff(model, sampler=DDIM(2)), 3, thresholds=[0.6, 0.4], losses=["mse"])
    ThresholdRecord(n=3, K=3, losses=[], inconsistencies=['mse'], costs=['layers', 'flops'])
    """
    checks.count("n", n)
    _refuse_other(model)
    levels = sweep_grid(threshold_levels("thresholds", thresholds), np.inf)
    models = [model, *(_with_steps(model, steps) for steps in n_steps or ())]
    dials = None
    if n_steps is not None:
        dials = {
            "threshold": [None, *levels[1:].tolist()] * len(models),
            "n_steps": [each.sampler.n_steps for each in models for _ in levels],  # type: ignore[attr-defined]
        }
    return _DiffusionSweep(
        system=model.rule.system,
        fingerprint=model.fingerprint,
        settings=model.settings,
        models=models,
        grid=levels if dials is None else np.arange(len(models) * len(levels), dtype=np.float64),
        levels=np.tile(levels, len(models)),
        dials=dials,
        losses=image_losses(losses),
        numbers=np.arange(checks.count("first", first, 0), first + n),
        labels=class_labels(labels, n, model.n_classes),
        seed=checks.count("seed", seed, 0),
        batch_size=checks.count("batch_size", batch_size),
    ).run(n, run)


def pilot_thresholds(
    model: DeeDiff,
    n_thresholds: int = 20,
    *,
    n: int = 32,
    labels: ArrayLike | None = None,
    seed: int = 1,
    batch_size: int = 64,
) -> list[float | None]:
    """Return thresholds, safest first, spaced evenly by mean layers per step in a pilot run.

    Diffusion models' confidences bunch up in places that are hard to guess; a pilot run shows
    where. By default its seed differs from the sweep's, so its images do too, and calibration on
    these thresholds keeps its guarantee. Thresholds at which evaluating exits costs more FLOPs
    than exiting saves are left out.

    Parameters
    ----------
    model : DeeDiff
        As in `sweep`.
    n_thresholds : int
        Maximum number besides the full model; fewer if the confidences do not allow more.
    n : int
        Number of pilot images.
    """
    checks.count("n_thresholds", n_thresholds)
    _refuse_other(model)
    rule, costs = model.rule, model.costs
    seen = model.confidences(n, labels=labels, seed=seed, batch_size=batch_size)
    n_steps = seen.shape[1]
    seen = seen[:, : rule.look_steps]
    table, looked = seen.reshape(-1, seen.shape[-1]), seen.shape[1] / n_steps
    looked_at = np.isin(np.arange(table.shape[1]), rule.looks(model.model.n_exits))
    levels = np.quantile(table[:, looked_at], np.linspace(0, 1, 1001))
    candidates = np.unique(levels.astype(np.float32))[::-1]

    def costs_at(level: np.float32) -> tuple[float, float]:
        taken = exit_indices(table, np.where(looked_at, level, np.inf), strict=rule.strict)
        layers, flops = costs.layers[taken].mean(), costs.flops[taken].mean()
        full = costs.layers[-1], costs.full_flops  # of the steps without looks
        return full[0] + looked * (layers - full[0]), full[1] + looked * (flops - full[1])

    means = [costs_at(level) for level in candidates]
    layers, flops = np.asarray(means).T
    # The full model evaluates no exits, so a threshold that rarely exits is slower than it.
    saving = np.flatnonzero(flops < costs.full_flops)
    kept = saving if len(saving) else [-1]
    candidates, layers = candidates[kept], layers[kept]
    wanted = np.linspace(layers[0], layers[-1], n_thresholds)
    chosen = np.unique([int(np.argmin(np.abs(layers - each))) for each in wanted])
    return [None, *candidates[chosen].tolist()]


@dataclass(kw_only=True)
class _DiffusionSweep(Sweep):
    """Sweep over images; every image of a batch has its own threshold and number of steps.

    Parameters
    ----------
    models
        The full model first, then with other numbers of steps.
    levels : (K,)
        The threshold of each setting: the same thresholds for each model, one model after the
        other.
    """

    models: list[DeeDiff]
    levels: NDArray[np.float32]
    losses: list[Loss]
    numbers: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    seed: int

    shard_size: ClassVar[int] = 256

    def identity(self) -> dict[str, Any]:
        """Return what else a resumed sweep must have in common."""
        return {
            "losses": {loss.name: loss_weights(loss) for loss in self.losses},
            "seed": self.seed,
            "first": int(self.numbers[0]),
            "n": len(self.numbers),
            "labels": None if self.labels is None else self.labels.tolist(),
        } | ({} if self.dials is None else {"dials": dict(self.dials)})

    @property
    def needs_gpu(self) -> bool:
        """Whether each Ray actor needs a GPU."""
        return needs_gpu(model_device(self.models[0].model))

    def prepare(self, inputs: slice) -> RunBatch:
        """Return a function that generates images and compares them with the full model's."""
        numbers = self.numbers[inputs]
        labels = None if self.labels is None else self.labels[inputs]
        full: dict[int, Tensor] = {}
        model_of = np.arange(len(self.levels)) // (len(self.levels) // len(self.models))

        def run_model(which: int, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Runs:
            made = self.models[which].generate(
                numbers[rows],
                labels=None if labels is None else labels[rows],
                seed=self.seed,
                thresholds=self.levels[columns].tolist(),
                batch_size=self.batch_size,
            )
            if not columns.any():
                full.update(zip(rows.tolist(), made.images, strict=True))
                losses = {loss.name: np.zeros(len(rows)) for loss in self.losses}
            else:
                losses = self._losses(made.images, torch.stack([full[row] for row in rows]))
            costs = {"layers": made.layers, "flops": made.flops}
            if self.dials is not None:
                costs["blocks"] = costs.pop("layers") * made.exits.shape[1]
            return Runs({**losses, **costs}, made.same_at(self.levels) & (model_of == which))

        def run(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Runs:
            models = model_of[columns]
            parts = [np.flatnonzero(models == which) for which in np.unique(models)]
            runs = [run_model(int(models[p[0]]), rows[p], columns[p]) for p in parts]
            back = np.argsort(np.concatenate(parts))
            values = {
                name: np.concatenate([each.values[name] for each in runs])[back]
                for name in runs[0].values
            }
            return Runs(values, np.concatenate([each.same for each in runs])[back])

        return run

    def _losses(self, images: Tensor, others: Tensor) -> dict[str, Array]:
        return {
            loss.name: compare_images(loss, images, others).double().cpu().numpy()
            for loss in self.losses
        }

    def columns(self, inputs: slice, tables: dict[str, Array]) -> dict[str, Any]:
        """Return the columns of some images' record."""
        return {
            "inconsistencies": {loss.name: tables.pop(loss.name) for loss in self.losses},
            "costs": tables,
            "inconsistency_ranges": {loss.name: loss.range for loss in self.losses},
            "ids": self.numbers[inputs],
        }


def _refuse_other(model: Any) -> None:
    """Raise for a bare network, whose sampler and rule are not known, and for one without exits."""
    if not isinstance(model, DeeDiff):
        raise TypeError(
            f"`model` must be a DeeDiff, such as DeeDiff(network, sampler=...), but got"
            f" {type(model).__name__}."
        )
    refuse_unstaged(model.model)


def _with_steps(fast: DeeDiff, n_steps: int) -> DeeDiff:
    """Return a diffusion model with fewer steps."""
    sampler = fast.sampler
    if not isinstance(sampler, DDIM):
        raise ValueError(f"`n_steps` needs a DDIM sampler, but got {type(sampler).__name__}.")
    if checks.count("n_steps", n_steps) >= sampler.n_steps:
        most = sampler.n_steps
        raise ValueError(f"`n_steps` must be below the sampler's {most}, but got {n_steps}.")
    fewer = replace(sampler, n_steps=n_steps)
    return DeeDiff(fast.model, fast.rule, sampler=fewer, dtype=fast.dtype)


def image_losses(losses: Sequence[str | Loss]) -> list[Loss]:
    """Return the losses of images by their names."""
    chosen = [LOSSES.choose(loss, "losses") for loss in losses]
    found = [Lpips.load() if loss is LPIPS else loss for loss in chosen]
    names = [loss.name for loss in found]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"`losses` must name at least one loss, and each only once, but got {names}."
        )
    return found


def loss_weights(loss: Loss) -> str | None:
    """Return the fingerprint of a loss's network; None if it has none."""
    function = loss.function("tensors.against_labels")
    return fingerprint(function) if isinstance(function, nn.Module) else None
