"""Train the small network that comes with the library, and its exits, in minutes on a CPU:
`python -m experiments.image_classification.small --data FOLDER`, FOLDER holding Fashion-MNIST.

Writes the folder `swiftsure/demo`: the network, the exits that are trained after it,
their record on the test part, and 400 test images. The network without exits is also the cheap half
of a cascade whose other half is MSDNet.
"""

import argparse
import time
import tomllib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from experiments.augment import shifted
from experiments.commands import stored_weights
from experiments.image_classification.data import Images, fashion_mnist
from experiments.image_classification.embed import CLASSES, write, write_images
from experiments.training import batches, fit, make_optimizer, recorded_step, refresh_statistics
from swiftsure.demo import FOLDER
from swiftsure.demo.network import prepared, small_network, untrained_exits, untrained_network
from swiftsure.torch import collect, train_heads

RECIPE = Path(__file__).parent / "recipes" / "msdnet_fashion_mnist.toml"
PLAN = {"epochs": 16, "batch": 128, "lr": 0.1, "weight_decay": 5e-4, "averaged_epochs": 1}
N_IMAGES, HEAD_EPOCHS, PADDING = 400, 6, 2


class OneExit(torch.nn.Module):
    """Wraps a network as one with a single exit, the form that the training loop takes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = untrained_network()

    def forward(self, images: Tensor) -> list[Tensor]:
        return [self.network(images)]


class Epochs:
    """Batches of shifted and mirrored images, in a new order each epoch."""

    def __init__(self, part: Images) -> None:
        self.part, self.random = part, torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.part.labels) // PLAN["batch"]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in batches(len(self.part.labels), PLAN["batch"], self.random):
            images = prepared(self.part.images[rows].numpy())
            yield shifted(images, PADDING, self.random), self.part.labels[rows]


def train(epochs: Epochs) -> torch.nn.Module:
    """Return the trained network, without exits."""
    model = OneExit().train()
    optimizer = make_optimizer(model, PLAN)
    step = recorded_step(model, optimizer, lambda out, y: functional.cross_entropy(out[0], y))
    trained = fit("small_fashion_mnist", model, optimizer, PLAN, step, lambda: epochs, len(epochs))
    refresh_statistics(trained, (images for images, _ in islice(epochs, 40)))
    return trained.network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    data = tomllib.loads(RECIPE.read_text())["data"]  # both networks take the same input
    described = {"mean": data["mean"], "std": data["std"], "classes": CLASSES}
    write(FOLDER / "network.json", described)  # `prepared` reads it
    epochs = Epochs(fashion_mnist(arguments.data, "train"))
    save_file(stored_weights(train(epochs), half=True), FOLDER / "weights.safetensors")
    model = untrained_exits(small_network())
    train_heads(model, epochs, epochs=HEAD_EPOCHS)
    # Collect with the weights as stored, in half precision.
    save_file(model.heads.half().state_dict(), FOLDER / "heads.safetensors")
    model.heads.float()
    test = fashion_mnist(arguments.data, "test")
    loader = [
        (prepared(x.numpy()), y)
        for x, y in zip(test.images.split(500), test.labels.split(500), strict=True)
    ]
    record = collect(model, loader, losses=["zero_one"])
    record.save(FOLDER / "record.parquet")
    described |= {
        "test_accuracy": (1 - record.losses["zero_one"].mean(axis=0, dtype=float))
        .round(4)
        .tolist(),
        "flops": record.costs["flops"].tolist(),
    }
    write(FOLDER / "network.json", described)
    write_images(FOLDER, test, N_IMAGES)
    print(f"{described['test_accuracy']} after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
