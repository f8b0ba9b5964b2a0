"""CIFAR-10 and CelebA in memory: uint8 images (n, 3, height, width), and classes if any."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from experiments.image_classification.data import Images, cifar10

__all__ = ["DATA_SETS", "Images", "celeba", "load"]

PARTS = {"train": "0", "test": "2"}
FACE = (25, 57, 153, 185)
"""Square of an aligned photograph (178 x 218) with the face, as in U-ViT's training."""


def celeba(folder: Path, part: str, size: int = 64) -> Images:
    """Read CelebA as it is published: img_align_celeba/*.jpg and list_eval_partition.txt."""
    listed = folder / "list_eval_partition.txt"
    photographs = folder / "img_align_celeba"
    if not listed.is_file() or not photographs.is_dir():
        raise FileNotFoundError(
            f"{folder} must hold list_eval_partition.txt and the folder img_align_celeba"
        )
    rows = [line.split() for line in listed.read_text().splitlines() if line.strip()]
    names = [name for name, number in rows if number == PARTS[part]]

    def face(name: str) -> np.ndarray:
        with Image.open(photographs / name) as photograph:
            square = photograph.convert("RGB").crop(FACE)
            return np.asarray(square.resize((size, size), Image.Resampling.BICUBIC))

    with ThreadPoolExecutor() as pool:
        faces = np.stack(list(pool.map(face, names)))
    pixels = np.ascontiguousarray(faces.transpose(0, 3, 1, 2))
    return Images(torch.from_numpy(pixels), torch.zeros(len(names), dtype=torch.long))


DATA_SETS = {"cifar10": cifar10, "celeba": celeba}


def load(recipe: dict[str, Any], folder: Path, part: str) -> Images:
    """Return a part of a recipe's data set."""
    options = {key: value for key, value in recipe["data"].items() if key != "name"}
    return DATA_SETS[recipe["data"]["name"]](folder, part, **options)
