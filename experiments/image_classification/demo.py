"""Train the network that comes with the library, with its exits, in a minute on a GPU:
`python -m experiments.image_classification.demo --data FOLDER`, FOLDER holding Fashion-MNIST.

Writes the folder `swiftsure/demo`: the weights, the record on the test part, and 400 test images.
With `--record`, the weights are kept and only the rest is written.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from experiments.augment import shifted, with_hole
from experiments.commands import device, stored_weights
from experiments.image_classification.data import Images, fashion_mnist
from experiments.image_classification.embed import CLASSES, write, write_images
from experiments.training import batches, fit, make_optimizer, recorded_step, refresh_statistics
from swiftsure.demo import FOLDER
from swiftsure.demo.network import prepared, trained_exits, untrained_exits, untrained_network
from swiftsure.torch import collect

PLAN = {"epochs": 80, "batch": 512, "lr": 0.3, "weight_decay": 5e-4, "averaged_epochs": 2}
N_IMAGES, PADDING, HOLE = 400, 2, 8
WEIGHTS = (0.1, 0.15, 0.25, 1.0)
"""Of the exits' losses."""


class Exits(nn.Module):
    """The network with normalised convolutions and its heads, in the form of the training loop."""

    def __init__(self) -> None:
        super().__init__()
        self.network = untrained_network()
        self.heads = untrained_exits(self.network.eval()).heads
        normalise(self.network)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> list[Tensor]:
        outputs, x = [], images
        parts = list(self.network.children())
        for stage, head in zip(parts[:3], self.heads, strict=True):
            x = stage(x)
            outputs.append(head(x))
        for part in parts[3:]:
            x = part(x)
        return [*outputs, x]


def normalise(network: nn.Module) -> None:
    """Follow each convolution by batch normalisation."""
    for name, part in network.named_children():
        if isinstance(part, nn.Conv2d):
            setattr(network, name, nn.Sequential(part, nn.BatchNorm2d(part.out_channels)))
        else:
            normalise(part)


def fold(network: nn.Module) -> None:
    """Fold each batch normalisation into the convolution before it."""
    for name, part in network.named_children():
        parts = list(part.children())
        if len(parts) == 2 and isinstance(parts[1], nn.BatchNorm2d):
            setattr(network, name, fuse_conv_bn_eval(*parts))
        else:
            fold(part)


class Epochs:
    """Batches of shifted and mirrored images with a hole, in a new order each epoch."""

    def __init__(self, part: Images, where: str) -> None:
        self.images = prepared(part.images.numpy()).to(where)
        self.labels = part.labels.to(where)
        self.random = torch.Generator(where).manual_seed(0)

    def __len__(self) -> int:
        return len(self.labels) // PLAN["batch"]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in batches(len(self.labels), PLAN["batch"], self.random):
            images = with_hole(shifted(self.images[rows], PADDING, self.random), HOLE, self.random)
            yield images.contiguous(memory_format=torch.channels_last), self.labels[rows]


def loss_of(outputs: list[Tensor], labels: Tensor) -> Tensor:
    """Return the weighted loss: of labels, and for early exits also of the last exit's answers."""
    total = torch.zeros((), device=labels.device)
    target = outputs[-1].detach().softmax(dim=1)
    for k, (output, weight) in enumerate(zip(outputs, WEIGHTS, strict=True)):
        loss = functional.cross_entropy(output, labels)
        if k < len(outputs) - 1:
            loss = (loss + functional.cross_entropy(output, target)) / 2
        total = total + weight * loss
    return total / sum(WEIGHTS)


def train(epochs: Epochs, seconds: float | None) -> Exits:
    """Return the trained network with its heads."""
    model = Exits().to(epochs.labels.device).train()
    optimizer = make_optimizer(model, PLAN)
    step = recorded_step(model, optimizer, loss_of)
    trained = fit("demo", model, optimizer, PLAN, step, lambda: epochs, len(epochs), seconds)
    refresh_statistics(trained, (images for images, _ in islice(epochs, 80)))
    fold(trained.network.eval())
    return trained.eval().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, help="train for this long instead of epochs")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    described = {"mean": [0.286] * 3, "std": [0.353] * 3, "classes": CLASSES}
    write(FOLDER / "network.json", described)  # `prepared` reads it
    test = fashion_mnist(arguments.data, "test")
    if not arguments.record:
        epochs = Epochs(fashion_mnist(arguments.data, "train"), device())
        model = train(epochs, arguments.seconds)
        network = {name: each.contiguous() for name, each in model.network.state_dict().items()}
        save_file(
            {n: w.half() for n, w in network.items()}, arguments.output / "weights.safetensors"
        )
        save_file(stored_weights(model.heads, half=True), arguments.output / "heads.safetensors")
        print(f"trained in {time.perf_counter() - began:.0f} s")
        if arguments.output != FOLDER:
            return
    # The record is collected with the weights as stored, in half precision.
    loader = [
        (prepared(x.numpy()), y)
        for x, y in zip(test.images.split(500), test.labels.split(500), strict=True)
    ]
    record = collect(trained_exits(), loader, losses=["zero_one"])
    record.save(FOLDER / "record.parquet")
    accuracy = 1 - record.losses["zero_one"].mean(axis=0, dtype=float)
    described |= {
        "test_accuracy": accuracy.round(4).tolist(),
        "flops": record.costs["flops"].tolist(),
    }
    write(FOLDER / "network.json", described)
    write_images(FOLDER, test, N_IMAGES)


if __name__ == "__main__":
    main()
