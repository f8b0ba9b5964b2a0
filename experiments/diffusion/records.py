"""Record early exits of a trained U-ViT, from the root of the repository:
`python -m experiments.diffusion.records uvit_cifar10 --lpips lpips_alexnet.npz`.

From NAME.json and NAME.safetensors of `train.py`: generates pairs with DDIM, in full and at every
threshold, from the same noise. Writes NAME.parquet (a threshold record with LPIPS, also of images
enlarged to 64 pixels, SSIM and mean squared error against the full model, layers and FLOPs),
NAME_thresholds.webp (some samples in columns, one row per threshold, the full model first),
NAME_levels_LOSS.webp (new samples in columns, one row per ε, 0 first: the images of the paper's
figure), and adds its results to NAME.json.

Thresholds come from a pilot run with another seed, so that calibration on the record keeps its
guarantee; so must those given as `--levels`. An interrupted run continues from its folder in
NAME_shards, which holds them too. With `--look-at 0`, only the first exit can be taken, and only
NAME_look_at_0.parquet is written; with `--look-steps 15` too, only in the first 15 steps, and
NAME_look_at_0_of_15_steps.parquet is.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments import commands
from experiments.diffusion.train import HERE, sampled, sheet
from swiftsure import RunOptions, ThresholdRecord, calibrate
from swiftsure.diffusion import (
    DDIM,
    DeeDiff,
    DeeDiffRule,
    Guided,
    Lpips,
    Schedule,
    pilot_thresholds,
    sweep,
)
from swiftsure_zoo import UViT

EPSILONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""Values of ε whose images are shown; 0 is the full model."""

N_CALIBRATION = 500
"""Pairs that the policies of the images shown are calibrated on, as in the paper's figure."""

ENLARGED = 64
"""Side in pixels to which smaller images are enlarged for a second LPIPS."""

SHOWN = 10
"""Number of samples shown."""


def network(file: Path, recipe: dict[str, Any]) -> UViT | Guided:
    """Return a trained network, guided if its recipe says so, ready to run."""
    return sampled(commands.load_weights(UViT(**recipe["model"]), file), recipe)


def classes(n: int, n_classes: int | None, seed: int) -> np.ndarray | None:
    """Return a random class per image, as requests would have."""
    return None if n_classes is None else np.random.default_rng(seed).integers(n_classes, size=n)


def kept_thresholds(folder: Path, make: Callable[[], list[float | None]]) -> list[float | None]:
    """Return the thresholds of a run that is continued, or new ones.

    Computed again on a GPU they might differ in the last digit, and the shards would be refused.
    """
    file = folder / "thresholds.json"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(make()))
    return json.loads(file.read_text())


def shards_of(fast: DeeDiff, folder: Path, **options: Any) -> Path:
    """Return the folder of a run's shards, one for each combination of weights and options."""
    identity = json.dumps([fast.fingerprint, fast.settings, options], sort_keys=True)
    return folder / hashlib.sha256(identity.encode()).hexdigest()[:12]


def examples(
    fast: DeeDiff,
    thresholds: list[float | None],
    samples: np.ndarray,
    labels: np.ndarray | None,
    seed: int,
) -> np.ndarray:
    """Return samples at each of these thresholds, one row per threshold."""
    rows = [
        fast.generate(samples, labels=labels, seed=seed, thresholds=[each] * len(samples)).pixels()
        for each in thresholds
    ]
    return np.concatenate(rows)


def certified(record: ThresholdRecord, loss: str) -> list[float | None]:
    """Return the threshold of each of `EPSILONS`, under UCB."""
    pairs = record.take(np.arange(min(N_CALIBRATION, record.n)))
    policies = [
        calibrate(pairs, risk="consistency", loss=loss, bound="wsr", epsilon=epsilon)
        for epsilon in EPSILONS
        if epsilon > 0
    ]
    return [None, *(policy.threshold for policy in policies)]


def summary(record: ThresholdRecord, seconds: float) -> dict[str, Any]:
    """Return means over the samples at each threshold."""
    tables = {**record.inconsistencies, "layers": record.costs["layers"]}
    flops = record.costs["flops"] / record.costs["flops"][:, :1]
    return {
        "n": record.n,
        "seconds": round(seconds),
        "sampler": record.settings["sampler"],
        "thresholds": [None if np.isinf(t) else round(t, 5) for t in record.thresholds.tolist()],
        **{name: table.mean(axis=0).round(4).tolist() for name, table in tables.items()},
        "share_of_flops": flops.mean(axis=0).round(4).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the recipe")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--lpips", type=Path, help="weights; without them LPIPS is left out")
    parser.add_argument("--n", type=int, default=1000, help="pairs")
    parser.add_argument("--steps", type=int, default=50, help="of DDIM")
    parser.add_argument("--thresholds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--dtype", help="bfloat16, float16; float32 by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--look-at", type=int, nargs="+", help="exits; all by default")
    parser.add_argument("--look-steps", type=int, help="first steps; all by default")
    parser.add_argument("--levels", type=float, nargs="+", help="thresholds, instead of a pilot's")
    arguments = parser.parse_args()
    device = commands.device()
    report_file = arguments.results / f"{arguments.name}.json"
    report = json.loads(report_file.read_text())
    recipe = report["recipe"]
    model = network(arguments.results / f"{arguments.name}.safetensors", recipe).to(device)
    sampler = DDIM(arguments.steps, Schedule(**recipe["schedule"]))
    began = time.perf_counter()
    pilot_seed = arguments.seed + 1
    rule = DeeDiffRule(None, look_at=arguments.look_at, look_steps=arguments.look_steps)
    fast = DeeDiff(model, rule, sampler=sampler, dtype=arguments.dtype)
    n_classes = fast.n_classes
    perceptual = []
    if arguments.lpips:
        perceptual = [Lpips.load(arguments.lpips)]
        if min(model.image_shape[1:]) < ENLARGED:
            perceptual.append(Lpips.load(arguments.lpips, side=ENLARGED))
    asked = {name: getattr(arguments, name) for name in ("n", "thresholds", "batch", "seed")}
    asked |= {"losses": [loss.name for loss in perceptual], "levels": arguments.levels}
    shards = shards_of(fast, arguments.results / f"{arguments.name}_shards", **asked)

    def pilot() -> list[float | None]:
        if arguments.levels:
            return [None, *arguments.levels]
        labels = classes(64, n_classes, pilot_seed)
        return pilot_thresholds(
            fast,
            arguments.thresholds,
            n=64,
            labels=labels,
            seed=pilot_seed,
            batch_size=arguments.batch,
        )

    thresholds = kept_thresholds(shards, pilot)
    labels = classes(arguments.n, n_classes, arguments.seed)
    record = sweep(
        fast,
        arguments.n,
        thresholds=thresholds,
        losses=[*perceptual, "ssim", "mse"],
        labels=labels,
        seed=arguments.seed,
        batch_size=arguments.batch,
        run=RunOptions(shards=shards, shard_size=2 * arguments.batch),
    )
    if arguments.look_at:
        name = "_".join([arguments.name, "look_at", *map(str, arguments.look_at)])
        if arguments.look_steps is not None:
            name += f"_of_{arguments.look_steps}_steps"
        record.save(arguments.results / f"{name}.parquet")
        print(json.dumps(summary(record, time.perf_counter() - began)), flush=True)
        return
    record.save(arguments.results / f"{arguments.name}.parquet")
    report["record"] = summary(record, time.perf_counter() - began)
    named = [loss for loss in record.inconsistencies if loss.startswith("lpips")] or ["ssim"]
    levels_of = {loss: certified(record, loss) for loss in named}
    report["levels"] = {
        loss: dict(zip(map(str, EPSILONS), found, strict=True)) for loss, found in levels_of.items()
    }
    report_file.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["record"]), flush=True)
    rows = np.unique(np.linspace(0, len(thresholds) - 1, 6).round().astype(int))
    few = np.arange(min(SHOWN, arguments.n))
    new = arguments.n + np.arange(SHOWN)  # which nothing was calibrated on
    sheets = {
        "thresholds": ([thresholds[k] for k in rows], few, None if labels is None else labels[few]),
    }
    for loss, found in levels_of.items():
        sheets[f"levels_{loss}"] = (found, new, classes(SHOWN, n_classes, pilot_seed))
    for kind, (asked_for, samples, labelled) in sheets.items():
        tiles = examples(fast, asked_for, samples, labelled, arguments.seed)
        picture = sheet(tiles, len(samples))
        picture.save(arguments.results / f"{arguments.name}_{kind}.webp", lossless=True)


if __name__ == "__main__":
    main()
