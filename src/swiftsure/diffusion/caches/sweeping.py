"""`sweep_cache`: run a diffusers pipeline at every setting of a cache, and record the differences.

A sample gets the same noise at every setting: it has a generator of its own, which depends on the
seed and the sample's number alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from swiftsure._lib import checks
from swiftsure.curves.dials import dial_grid
from swiftsure.diffusion.caches.hooks import SampleReuse
from swiftsure.diffusion.caches.kinds import Cache, SampleCache
from swiftsure.diffusion.caches.pipeline import (
    SYSTEM,
    CachedPipeline,
    image_tensor,
    sample_generators,
)
from swiftsure.diffusion.image_losses import compare_images
from swiftsure.diffusion.sweeping import image_losses, loss_weights
from swiftsure.losses import Loss
from swiftsure.records import ThresholdRecord
from swiftsure.run import RunBatch, RunOptions, Runs, Sweep, sweep_grid

__all__ = ["sweep_cache"]

Array = NDArray[Any]


def sweep_cache(
    pipeline: Any,
    inputs: Mapping[str, Sequence[Any]],
    *,
    thresholds: Sequence[float] | ArrayLike,
    warm_ups: Sequence[int] | None = None,
    cache: Cache | None = None,
    losses: Sequence[str | Loss] = ("lpips",),
    seed: int = 0,
    first: int = 0,
    batch_size: int = 1,
    run: RunOptions = RunOptions(),
    **call: Any,
) -> ThresholdRecord:
    """Generate images with and without a cache, from the same noise; record the differences.

    Parameters
    ----------
    pipeline : DiffusionPipeline
        With a transformer and the scheduler to be used.
    inputs : mapping of (n,)
        What differs between samples, by the names of the pipeline's arguments: prompts or class
        labels. Draw them as requests will be.
    thresholds : (K,)
        Of the cache, rising; the pipeline without a cache is added in front. Choose them in
        advance, or on other samples.
    warm_ups : ints, optional
        Numbers of first steps that run all blocks, as a second dial of `SampleCache`: every
        combination with a threshold is recorded. Most steps first.
    cache : Cache, optional
        `SampleCache()` by default; or `DiffusersCache(FirstBlockCacheConfig())`, for example.
    losses : names among "lpips", "ssim" and "mse", or `Loss` objects with `tensors`
    seed, first : int
        The images are the samples of this seed numbered from `first`.
    batch_size : int
        Images at a time. A cache that averages its decision over a batch runs one at a time.
    run : RunOptions
        Shards, progress, and where the model runs.
    **call
        Arguments of the pipeline for every sample, such as `num_inference_steps` and
        `guidance_scale`, which policies will be bound to.

    Returns
    -------
    record : ThresholdRecord
        With inconsistencies against the pipeline without a cache, for `risk="consistency"`; the
        cost "blocks", counted as they ran, of every image at every setting; and a fingerprint.

    Raises
    ------
    ValueError
        If an argument is invalid, or the shards come from another run.
    """
    lists = {name: list(values) for name, values in inputs.items()}
    sizes = {name: len(values) for name, values in lists.items()}
    if not sizes or len(set(sizes.values())) > 1 or 0 in sizes.values():
        raise ValueError(f"`inputs` must hold lists of one length, but their lengths are {sizes}.")
    n = next(iter(sizes.values()))
    fast = CachedPipeline(pipeline, cache=cache, **call)
    fast.inputs = list(lists)
    levels = sweep_grid(np.asarray(thresholds, np.float32), 0.0)
    steps: list[int | None] = [None] * len(levels)
    grid, dials = levels, None
    if warm_ups is not None:
        if not isinstance(fast.cache, SampleCache):
            raise ValueError("`warm_ups` are a dial of SampleCache, not of diffusers' caches.")
        dials = dial_grid(
            {
                "threshold": levels[1:].tolist(),
                "warm_up": [checks.count("warm_ups", each, 0) for each in warm_ups],
            },
            {"threshold": 0.0, "warm_up": 0},
        )
        levels = np.asarray(dials["threshold"], np.float32)
        steps = list(dials["warm_up"])
        grid = np.arange(len(levels))
    return _CacheSweep(
        system=SYSTEM,
        fingerprint=fast.fingerprint,
        settings={**fast.settings, "inputs": list(lists)},
        grid=grid,
        dials=dials,
        fast=fast,
        inputs=lists,
        levels=levels,
        steps=steps,
        losses=image_losses(losses),
        numbers=np.arange(checks.count("first", first, 0), first + n),
        seed=checks.count("seed", seed, 0),
        batch_size=checks.count("batch_size", batch_size),
    ).run(n, run)


@dataclass(kw_only=True)
class _CacheSweep(Sweep):
    """Sweep over samples; with `SampleCache`, every sample of a batch has its own setting."""

    fast: CachedPipeline
    inputs: dict[str, list[Any]]
    levels: NDArray[np.float32]
    steps: list[int | None]
    losses: list[Loss]
    numbers: NDArray[np.int64]
    seed: int

    def identity(self) -> dict[str, Any]:
        """Return what else a resumed sweep must have in common."""
        return {
            "losses": {loss.name: loss_weights(loss) for loss in self.losses},
            "seed": self.seed,
            "first": int(self.numbers[0]),
            "inputs": {name: [str(v) for v in values] for name, values in self.inputs.items()},
            "dials": self.dials,
        }

    def prepare(self, inputs: slice) -> RunBatch:
        """Return a function that generates images and compares them with the uncached ones."""
        numbers = self.numbers[inputs]
        lists = {name: values[inputs] for name, values in self.inputs.items()}
        full: dict[int, Tensor] = {}

        def run(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Runs:
            parts = [
                self._generate(numbers[rows[part]], lists, rows[part], columns[part])
                for part in self._together(columns)
            ]
            order = np.argsort(np.concatenate(self._together(columns)))
            images = torch.cat([part[0] for part in parts])[torch.from_numpy(order)]
            blocks = np.concatenate([part[1] for part in parts])[order]
            same = np.concatenate([part[2] for part in parts])[order]
            if not columns.any():
                full.update(zip(rows.tolist(), images, strict=True))
                values = {loss.name: np.zeros(len(rows)) for loss in self.losses}
            else:
                others = torch.stack([full[row] for row in rows.tolist()])
                values = {
                    loss.name: compare_images(loss, images, others, (0, 1)).double().cpu().numpy()
                    for loss in self.losses
                }
            return Runs({**values, "blocks": blocks.astype(np.float64)}, same)

        return run

    def columns(self, inputs: slice, tables: dict[str, Array]) -> dict[str, Any]:
        """Return the columns of some samples' record."""
        return {
            "inconsistencies": {loss.name: tables.pop(loss.name) for loss in self.losses},
            "costs": tables,
            "inconsistency_ranges": {loss.name: loss.range for loss in self.losses},
            "ids": self.numbers[inputs],
        }

    def _together(self, columns: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return which samples of a batch run in one call of the pipeline."""
        everyone = np.arange(len(columns))
        if isinstance(self.fast.cache, SampleCache) or not columns.any():
            return [everyone]
        if self.fast.cache.any_batch:
            return [np.flatnonzero(columns == column) for column in np.unique(columns)]
        return [everyone[k : k + 1] for k in everyone]

    def _generate(
        self,
        numbers: NDArray[np.int64],
        lists: Mapping[str, list[Any]],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
    ) -> tuple[Tensor, Array, NDArray[np.bool_]]:
        """Return images, the blocks that ran, and the settings that would give the same images."""
        given = {name: [values[row] for row in rows] for name, values in lists.items()}
        output, found = self.fast.run(
            {
                **given,
                "generator": sample_generators(self.seed, numbers.tolist()),
                "output_type": "pt",
            },
            self.levels[columns].tolist(),
            [self.steps[column] for column in columns],
            trace=True,
        )
        same = columns[:, None] == np.arange(len(self.levels))
        if not isinstance(found, SampleReuse):
            return image_tensor(output), found.runs, same
        alike = np.asarray([[own == each for each in self.steps] for own in self._own(columns)])
        within = (self.levels >= found.max_reused[:, None]) & (
            self.levels < found.min_computed[:, None]
        )
        # Column 0 runs without a cache.
        within &= (self.levels > 0) & (columns > 0)[:, None]
        return image_tensor(output), found.counts.runs, same | (within & alike)

    def _own(self, columns: NDArray[np.int64]) -> list[int | None]:
        return [self.steps[column] for column in columns]
