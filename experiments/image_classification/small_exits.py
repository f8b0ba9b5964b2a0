"""Train exits for the small network and embed it in the library, in seconds:
`python -m experiments.image_classification.small_exits`.

Needs no data but the 2,000 sample images of `swiftsure-assets`: 600 train the exits, 1,000 are
there to calibrate, and 400 to run. Writes the folder `swiftsure/small_cifar10`.
"""

import json
from collections.abc import Iterator

import torch
from safetensors.torch import save_file
from torch import Tensor

from experiments.image_classification.embed import write, write_images
from swiftsure import assets
from swiftsure.torch import collect, train_heads
from swiftsure.torch.models.embedded import embedded_small_network, prepared, small_exits

N_TRAINING, N_RUN = 600, 400
EPOCHS, BATCH = 30, 100


class Batches:
    """Batches of images and their mirror images, in a new order each epoch."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = torch.cat([images, images.flip(3)]), labels.repeat(2)
        self.random = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.labels) // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.labels), generator=self.random).split(BATCH):
            yield self.images[rows], self.labels[rows]


def main() -> None:
    torch.manual_seed(0)
    sample = assets.sample_images()
    images, labels = prepared(sample.images), torch.from_numpy(sample.labels)
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, rest = rows[:N_TRAINING], rows[N_TRAINING:]
    model = small_exits(embedded_small_network())
    train_heads(model, Batches(images[training], labels[training]), epochs=EPOCHS, progress=False)
    # The record must be of the weights as they are stored, in half precision.
    model.heads.half()
    save_file(model.heads.state_dict(), assets.SMALL / "heads.safetensors")
    model.heads.float()
    batch = (images[rest], labels[rest], torch.from_numpy(sample.ids)[rest])
    record = collect(model, [batch], losses=["zero_one"], progress=False)
    record.save(assets.SMALL / "record.parquet")
    accuracy = (1 - record.losses["zero_one"].mean(axis=0)).round(4).tolist()
    flops = record.costs["flops"].tolist()
    described = {key: assets.network()[key] for key in ("mean", "std", "classes")}
    write(assets.SMALL / "network.json", described | {"test_accuracy": accuracy, "flops": flops})
    run = rest[-N_RUN:].sort().values.numpy()
    write_images(assets.SMALL, sample.images[run], sample.labels[run], sample.ids[run])
    print(json.dumps({"test_accuracy": accuracy}))


if __name__ == "__main__":
    main()
