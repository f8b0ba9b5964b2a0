"""Train the small network that comes with the library, on a CPU:
`python -m experiments.image_classification.small --data FOLDER`, FOLDER holding CIFAR-10.

The cheap half of a cascade whose other half is MSDNet. Writes small_cifar10.safetensors and .json.
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from experiments.augment import shifted
from experiments.commands import stored_weights
from experiments.image_classification.data import cifar10
from experiments.image_classification.networks import normaliser
from experiments.training import batches, fit, make_optimizer, recorded_step, refresh_statistics
from swiftsure import assets
from swiftsure.torch.models.embedded import small_network

HERE = Path(__file__).parent
PLAN = {"epochs": 16, "batch": 128, "lr": 0.1, "weight_decay": 5e-4, "averaged_epochs": 1}


class OneExit(torch.nn.Module):
    """Wraps a network as one with a single exit, the form that the training loop takes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = small_network()

    def forward(self, images: Tensor) -> list[Tensor]:
        return [self.network(images)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    described = {key: assets.network()[key] for key in ("mean", "std")}
    normalise = normaliser({"data": described}, "cpu")
    part = cifar10(arguments.data, "train")
    model = OneExit().train()
    optimizer = make_optimizer(model, PLAN)
    step = recorded_step(model, optimizer, lambda out, y: functional.cross_entropy(out[0], y))

    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        for index in batches(len(part.labels), PLAN["batch"], random):
            yield shifted(normalise(part.images[index]), 4, random), part.labels[index]

    per_epoch = len(part.labels) // PLAN["batch"]
    began = time.perf_counter()
    trained = fit("small_cifar10", model, optimizer, PLAN, step, epoch, per_epoch)
    refresh_statistics(trained, (images for images, _ in islice(epoch(), 40)))
    network = trained.network.eval()
    test = cifar10(arguments.data, "test")
    with torch.inference_mode():
        said = torch.cat([network(normalise(x)).argmax(1) for x in test.images.split(1000)])
    report = {
        "training": PLAN,
        "seed": 0,
        "seconds": round(time.perf_counter() - began),
        "parameters": sum(p.numel() for p in network.parameters()),
        "test_accuracy": round(float((said == test.labels).float().mean()), 4),
    }
    print(json.dumps(report))
    arguments.output.mkdir(parents=True, exist_ok=True)
    weights = stored_weights(network, half=True)
    save_file(weights, arguments.output / "small_cifar10.safetensors")
    # Not NAME.json: `records` reads those as reports of recipes.
    (arguments.output / "small_cifar10_report.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
