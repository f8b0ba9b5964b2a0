"""Put trained networks into `zoo/`, from the root of the repository:
`python -m experiments.image_classification.embed --data FOLDER`, FOLDER holding Fashion-MNIST.

Copies the records of the folder of results, the weights of msdnet_fashion_mnist, and 2,000 random
images of the test part, which the demonstration runs.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from experiments.image_classification.data import Images, fashion_mnist
from swiftsure.demo import IMAGE_SIDE
from swiftsure_zoo.records import IMAGE_CLASSIFICATION, MSDNET_FASHION_MNIST

CLASSES = [
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
]
COLUMNS, N_IMAGES = 40, 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    for file in sorted(arguments.results.glob("*.parquet")):
        shutil.copy(file, IMAGE_CLASSIFICATION / file.name)
    network = arguments.results / "msdnet_fashion_mnist.safetensors"
    shutil.copy(network, MSDNET_FASHION_MNIST / "weights.safetensors")
    report = json.loads(network.with_suffix(".json").read_text())
    recipe = report["recipe"]
    described = {
        "model": {name: value for name, value in recipe["model"].items() if name != "name"},
        "mean": recipe["data"]["mean"],
        "std": recipe["data"]["std"],
        "classes": CLASSES,
        "test_accuracy": report["test_accuracy"],
        "flops": report["flops"],
    }
    write(MSDNET_FASHION_MNIST / "network.json", described)
    write_images(MSDNET_FASHION_MNIST, fashion_mnist(arguments.data, "test"), N_IMAGES)


def write_images(folder: Path, part: Images, n: int) -> None:
    """Write n random images as tiles of one lossless file, with their labels and ids in another."""
    ids = np.sort(np.random.default_rng(0).permutation(len(part.labels))[:n])
    side = IMAGE_SIDE
    sheet = part.images[ids].numpy().reshape(-1, COLUMNS, 3, side, side).transpose(0, 3, 1, 4, 2)
    image = Image.fromarray(sheet.reshape(-1, side * COLUMNS, 3))
    image.save(folder / "images.webp", lossless=True, quality=100, method=6)
    write(folder / "images.json", {"ids": ids.tolist(), "labels": part.labels[ids].tolist()})


def write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
