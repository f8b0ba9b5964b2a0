"""Images a second of a diffusion model under a threshold, against the same sampler in full.

A small U-ViT of random weights, at thresholds that save about a third and two thirds of its layers.
For a trained one, with the thresholds of its record (see `experiments/diffusion`), on a GPU:
`python benchmarks/diffusion.py --device cuda --batch 1 64 256 --results FOLDER --name NAME`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from measure import Result, best_times, show
from rich.console import Console
from safetensors.torch import load_file

from swiftsure.diffusion import DDIM, DeeDiff, Schedule, pilot_thresholds
from swiftsure.torch.models import UViT

TITLE = "diffusion: DDIM under a threshold against the full sampler, the same noise"

SAVINGS = (0.33, 0.67)
"""Shares of the layers that the thresholds shown save, as near as there are."""

FEWEST = 8
"""Images that are generated at least, one after the other where the batch is smaller."""


def random_network() -> UViT:
    """A U-ViT with 9 blocks, random weights, and doubts that differ from exit to exit."""
    torch.manual_seed(0)
    model = UViT(image_size=32, patch_size=4, width=128, depth=9, n_heads=4, uncertainty_ratio=1.0)
    with torch.no_grad():
        model.UEM[0].weight.normal_(0, 0.3)
        model.UEM[2].weight.normal_(0, 0.3)
    return model.eval()


def trained(results: Path, name: str) -> tuple[UViT, Schedule]:
    """Return a network from its report and weights."""
    recipe = json.loads((results / f"{name}.json").read_text())["recipe"]
    model = UViT(**recipe["model"])
    weights = load_file(results / f"{name}.safetensors")
    model.load_state_dict({key: value.float() for key, value in weights.items()})
    return model.eval(), Schedule(**recipe["schedule"])


def measure(
    name: str,
    model: UViT,
    sampler: DDIM,
    batches: Sequence[int],
    repeats: int,
    dtype: str | None = None,
) -> list[Result]:
    device = next(model.parameters()).device.type
    fast = DeeDiff(model, sampler=sampler, dtype=dtype)
    most = max(*batches, FEWEST)
    labels = None if fast.n_classes is None else np.arange(most) % fast.n_classes
    few = None if labels is None else labels[:FEWEST]
    levels = pilot_thresholds(model, 30, n=FEWEST, labels=few, sampler=sampler, dtype=dtype)
    layers = [
        fast.generate(FEWEST, labels=few, thresholds=[level] * FEWEST).layers.mean()
        for level in levels
    ]
    shares = 1 - np.asarray(layers) / layers[0]
    results = []
    for batch in batches:
        n = max(batch, FEWEST)

        def run(level: float | None, n: int = n, batch: int = batch):
            own = None if labels is None else labels[:n]
            made = fast.generate(n, labels=own, thresholds=[level] * n, batch_size=batch)
            made.images.cpu()  # waits for the device
            return made

        chosen = {f"{100 * s:.0f} %": levels[int(np.argmin(abs(shares - s)))] for s in SAVINGS}
        timed = {key: (lambda level=level: run(level)) for key, level in chosen.items()}
        seconds = best_times({"full": lambda: run(None), **timed}, repeats)
        full = run(None)
        for key, level in chosen.items():
            made = run(level)
            note = (
                f"{n / seconds['full']:.3g} images a second in full,"
                f" {n / seconds[key]:.3g} so; layers saved"
                f" {100 * (1 - made.layers.mean() / full.layers.mean()):.0f} %, FLOPs"
                f" {100 * (1 - made.flops.mean() / full.flops.mean()):.0f} %"
            )
            what = f"{name}, {device}, batch {batch}, aim {key} of layers"
            results.append(Result(what, seconds["full"] / seconds[key], note=note))
    return results


def run(
    device: str = "cpu", batches: Sequence[int] = (1, 16), steps: int = 5, repeats: int = 3
) -> list[Result]:
    model = random_network().to(device)
    return measure("random U-ViT", model, DDIM(steps), batches, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=50, help="of DDIM")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", help="bfloat16, float16; float32 by default")
    parser.add_argument("--results", type=Path, help="folder of a trained network")
    parser.add_argument("--name", help="of its recipe")
    arguments = parser.parse_args()
    name, model, schedule = "random U-ViT", random_network(), Schedule()
    if arguments.results is not None:
        name = arguments.name
        model, schedule = trained(arguments.results, name)
    found = measure(
        name,
        model.to(arguments.device),
        DDIM(arguments.steps, schedule),
        arguments.batch,
        arguments.repeats,
        arguments.dtype,
    )
    show(TITLE, found, Console())


if __name__ == "__main__":
    main()
