"""Put a trained network into `assets`, from the root of the repository:
`python -m experiments.image_classification.embed --data FOLDER`.

Copies the records of the folder of results, the weights of msdnet_cifar10, and 2,000 random images
of the test part, which the demonstration runs.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from experiments.image_classification.data import cifar10
from swiftsure import assets

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
COLUMNS, N_IMAGES = 40, 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-10")
    arguments = parser.parse_args()
    for file in sorted(arguments.results.glob("*.parquet")):
        shutil.copy(file, assets.IMAGE_CLASSIFICATION / file.name)
    shutil.copy(
        arguments.results / "msdnet_cifar10.safetensors", assets.NETWORK / "weights.safetensors"
    )
    report = json.loads((arguments.results / "msdnet_cifar10.json").read_text())
    recipe = report["recipe"]
    described = {
        "model": {name: value for name, value in recipe["model"].items() if name != "name"},
        "mean": recipe["data"]["mean"],
        "std": recipe["data"]["std"],
        "classes": CLASSES,
        "test_accuracy": report["test_accuracy"],
        "flops": report["flops"],
    }
    write(assets.NETWORK / "network.json", described)
    part = cifar10(arguments.data, "test")
    ids = np.sort(np.random.default_rng(0).permutation(len(part.labels))[:N_IMAGES])
    write_images(assets.NETWORK, part.images[ids].numpy(), part.labels[ids].numpy(), ids)


def write_images(folder: Path, pixels: np.ndarray, labels: np.ndarray, ids: np.ndarray) -> None:
    """Write images as tiles of one lossless file, and what `sample_images` says of them."""
    sheet = pixels.reshape(-1, COLUMNS, 3, 32, 32).transpose(0, 3, 1, 4, 2)
    image = Image.fromarray(sheet.reshape(-1, 32 * COLUMNS, 3))
    image.save(folder / "images.webp", lossless=True, quality=100, method=6)
    write(folder / "images.json", {"ids": ids.tolist(), "labels": labels.tolist()})


def write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
