"""How many images of each class a classifier recognises, from the root of the repository:
`python -m experiments.diffusion.recognised uvit_cifar10`.

Generates new samples in full and at every ε that `records.py` shows, classifies them with
msdnet_cifar10 of the image classification experiment, and adds the shares of correct classes to
NAME.json. For networks trained on CIFAR-10, whose classes both know.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from experiments import commands
from experiments.diffusion.records import classes, network
from experiments.diffusion.train import HERE
from experiments.image_classification.networks import load, normaliser
from swiftsure import ThresholdRecord
from swiftsure.diffusion import DeeDiff
from swiftsure.diffusion.schedules import sampler_from_settings

CLASSIFIERS = Path(__file__).parents[1] / "image_classification" / "results"
SEED = 2
"""Differs from the seeds of the record and its pilot, so the samples do too."""


@torch.inference_mode()
def predicted(images: np.ndarray, device: str, batch: int = 500) -> np.ndarray:
    """Return the full MSDNet's class for each image, (n, height, width, 3) of bytes."""
    model, report = load(CLASSIFIERS, "msdnet_cifar10")
    model, normalise = model.to(device), normaliser(report["recipe"], device)
    pixels = torch.tensor(images).permute(0, 3, 1, 2)
    parts = [
        model(normalise(part.to(device)))[-1].argmax(dim=1).cpu() for part in pixels.split(batch)
    ]
    return torch.cat(parts).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the recipe")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--record", type=Path, help="the one in the results by default")
    parser.add_argument("--n", type=int, default=1000, help="samples for each ε")
    parser.add_argument("--batch", type=int, default=250)
    arguments = parser.parse_args()
    device = commands.device()
    report_file = arguments.results / f"{arguments.name}.json"
    report = json.loads(report_file.read_text())
    if report["recipe"]["data"]["name"] != "cifar10":
        parser.error(f"{arguments.name} was not trained on CIFAR-10, whose classes MSDNet knows")
    settings = ThresholdRecord.load(
        arguments.record or arguments.results / f"{arguments.name}.parquet"
    ).settings
    fast = DeeDiff(
        network(arguments.results / f"{arguments.name}.safetensors", report["recipe"]).to(device),
        sampler=sampler_from_settings(settings["sampler"]),
        dtype=settings.get("dtype"),
    )
    labels = classes(arguments.n, fast.n_classes, SEED)
    shares: dict[float | None, float] = {}  # two values of ε may share a threshold
    found = {}
    for loss, levels in report["levels"].items():
        for threshold in levels.values():
            if threshold not in shares:
                made = fast.generate(
                    arguments.n,
                    labels=labels,
                    seed=SEED,
                    thresholds=[threshold] * arguments.n,
                    batch_size=arguments.batch,
                )
                right = predicted(made.pixels(), device) == labels
                shares[threshold] = round(float(right.mean()), 4)
        found[loss] = {level: shares[threshold] for level, threshold in levels.items()}
    report["recognised"] = {
        "n": arguments.n,
        "of_real_images": json.loads((CLASSIFIERS / "msdnet_cifar10.json").read_text())[
            "test_accuracy"
        ][-1],
        **found,
    }
    history = report.pop("history")
    report_file.write_text(json.dumps(report | {"history": history}, indent=2) + "\n")
    print(json.dumps(report["recognised"]), flush=True)


if __name__ == "__main__":
    main()
