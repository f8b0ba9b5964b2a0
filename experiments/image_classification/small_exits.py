"""Train exits for the small network and embed it in the library, in minutes on a CPU:
`python -m experiments.image_classification.small_exits --data FOLDER`, FOLDER holding CIFAR-10.

The network itself stays as `small` trained it. Writes the folder `swiftsure/small_cifar10`: the
exits, their record on the test part, and 400 test images.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from experiments.augment import shifted
from experiments.image_classification.data import Images, cifar10
from experiments.image_classification.embed import CLASSES, write, write_images
from experiments.training import batches
from swiftsure import assets
from swiftsure.torch import collect, train_heads
from swiftsure.torch.models.embedded import embedded_small_network, prepared, small_exits

N_IMAGES, EPOCHS, BATCH = 400, 6, 250


class Epochs:
    """Batches of shifted and mirrored images, in a new order each epoch."""

    def __init__(self, part: Images) -> None:
        self.part, self.random = part, torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.part.labels) // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in batches(len(self.part.labels), BATCH, self.random):
            images = prepared(self.part.images[rows].numpy())
            yield shifted(images, 4, self.random), self.part.labels[rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = small_exits(embedded_small_network())
    train_heads(model, Epochs(cifar10(arguments.data, "train")), epochs=EPOCHS)
    # Collect with the weights as stored, in half precision.
    save_file(model.heads.half().state_dict(), assets.SMALL / "heads.safetensors")
    model.heads.float()
    test = cifar10(arguments.data, "test")
    pixels, labels = test.images.numpy(), test.labels.numpy()
    loader = [
        (prepared(x.numpy()), y)
        for x, y in zip(test.images.split(500), test.labels.split(500), strict=True)
    ]
    record = collect(model, loader, losses=["zero_one"])
    record.save(assets.SMALL / "record.parquet")
    described = {
        **{key: assets.network()[key] for key in ("mean", "std")},
        "classes": CLASSES,
        "test_accuracy": (1 - record.losses["zero_one"].mean(axis=0)).round(4).tolist(),
        "flops": record.costs["flops"].tolist(),
    }
    write(assets.SMALL / "network.json", described)
    ids = np.sort(np.random.default_rng(0).permutation(len(labels))[:N_IMAGES])
    write_images(assets.SMALL, pixels[ids], labels[ids], ids)
    print(described["test_accuracy"])


if __name__ == "__main__":
    main()
