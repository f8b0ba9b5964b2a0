"""Record a cache on the trained DiT, from the root of the repository:
`python -m experiments.caches.records dit_cifar10 --lpips lpips_alexnet.npz`.

Generates the same samples without a cache and at every combination of a threshold and a number of
warm-up steps. Thresholds come from a pilot with another seed. Writes NAME_cache.parquet (both
dials), NAME_cache.json (means at each setting, certified settings) and NAME_levels.png (new samples
in columns, one row per ε, 0 first).
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from experiments import commands
from experiments.caches.network import dit, load_weights, pipeline
from experiments.caches.train import HERE, sheet
from swiftsure import Policy, RunOptions, ThresholdRecord, calibrate
from swiftsure.diffusion import Lpips
from swiftsure.diffusion.caches import CachedPipeline, sweep_cache
from swiftsure.diffusion.caches.pipeline import sample_generators

EPSILONS = (0.02, 0.05, 0.1, 0.2)
LOSS = "lpips_64"
SHOWN = 10
WARM_UPS = (20, 10, 0)


def trained(name: str, results: Path) -> tuple[Any, dict[str, Any]]:
    """Return the pipeline of a trained network, and its recipe."""
    recipe = json.loads((results / f"{name}.json").read_text())["recipe"]
    return pipeline(load_weights(dit(recipe), results / f"{name}.npz"), recipe), recipe


def labels_of(n: int, seed: int) -> list[int]:
    """Return a random class per image, as requests would have."""
    found: list[int] = np.random.default_rng(seed).integers(10, size=n).tolist()
    return found


def pilot_levels(pipe: Any, losses: list[Any], n: int, n_levels: int, **call: Any) -> list[float]:
    """Return thresholds, evenly spaced by blocks in a pilot of another seed."""
    tried = np.geomspace(0.01, 0.8, 24).round(4)
    labels = {"class_labels": labels_of(n, 1)}
    pilot = sweep_cache(pipe, labels, thresholds=tried, losses=losses, seed=1, batch_size=n, **call)
    blocks = pilot.costs["blocks"].mean(axis=0)[1:]
    distance = pilot.inconsistencies[LOSS].mean(axis=0)[1:]
    table = [tried.tolist(), distance.round(4).tolist(), blocks.round(1).tolist()]
    print(f"pilot: thresholds, distances, blocks: {table}", flush=True)
    useful = np.flatnonzero((distance > 0.003) & (distance < 0.25))
    useful = useful if len(useful) else np.arange(len(tried))
    goals = np.linspace(blocks[useful[0]], blocks[useful[-1]], n_levels)
    return np.unique([tried[useful[np.argmin(np.abs(blocks[useful] - g))]] for g in goals]).tolist()


def one_dial(record: ThresholdRecord) -> ThresholdRecord:
    """Return the settings without warm-up steps, as a record of one dial."""
    steps = np.asarray(record.dials["warm_up"])
    columns = np.flatnonzero(steps == 0)
    return ThresholdRecord(
        np.asarray(record.dials["threshold"])[columns],
        inconsistencies={k: v[:, columns] for k, v in record.inconsistencies.items()},
        costs={k: v[:, columns] for k, v in record.costs.items()},
        inconsistency_ranges=record.inconsistency_ranges,
        ids=record.ids,
        fingerprint=record.fingerprint,
        settings=record.settings,
    )


def certified(record: ThresholdRecord, n: int = 500, **options: Any) -> dict[float, Policy]:
    """Return the policy of each ε."""
    part = replace(record.take(np.arange(min(n, record.n))), order=0)
    return {
        epsilon: calibrate(part, risk="consistency", loss=LOSS, epsilon=epsilon, **options)
        for epsilon in EPSILONS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--lpips", type=Path, required=True)
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--pilot", type=int, default=64)
    parser.add_argument("--levels", type=int, default=8)
    arguments = parser.parse_args()
    output = arguments.output or arguments.results
    torch.set_float32_matmul_precision("high")
    device = commands.device()
    pipe, recipe = trained(arguments.name, arguments.results)
    pipe, call = pipe.to(device), recipe["sampling"]
    losses = [Lpips.load(arguments.lpips, side=64), "ssim", "mse"]
    began = time.perf_counter()
    levels = pilot_levels(pipe, losses, arguments.pilot, arguments.levels, **call)
    print(f"thresholds {levels}, {time.perf_counter() - began:.0f} s", flush=True)
    record = sweep_cache(
        pipe,
        {"class_labels": labels_of(arguments.n, 0)},
        thresholds=levels,
        warm_ups=WARM_UPS,
        losses=losses,
        batch_size=arguments.n,
        run=RunOptions(shard_size=arguments.n),
        **call,
    )
    record.save(output / f"{arguments.name}_cache.parquet")
    seconds = time.perf_counter() - began
    single = one_dial(record)
    policies = certified(single)
    report = {
        "n": record.n,
        "seconds": round(seconds),
        "dials": {name: list(values) for name, values in record.dials.items()},
        "blocks": record.costs["blocks"].mean(axis=0).round(1).tolist(),
        **{k: v.mean(axis=0).round(4).tolist() for k, v in record.inconsistencies.items()},
        "certified": {str(epsilon): policy.threshold for epsilon, policy in policies.items()},
    }
    (output / f"{arguments.name}_cache.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)
    rows = []
    for policy in (None, *policies.values()):
        shown = CachedPipeline(pipe, threshold=(policy and policy.threshold) or 0.0, **call)
        made = shown(
            class_labels=list(range(SHOWN)),
            generator=sample_generators(2, range(SHOWN)),
            output_type="np",
        ).images
        rows.append(np.rint(made * 255).astype(np.uint8))
    picture = Image.fromarray(sheet(np.concatenate(rows), SHOWN))
    picture.resize((picture.width * 2, picture.height * 2), Image.Resampling.NEAREST).save(
        output / f"{arguments.name}_levels.png"
    )


if __name__ == "__main__":
    main()
