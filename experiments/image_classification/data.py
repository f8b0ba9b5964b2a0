"""Data sets in memory: images (n, 3, height, width) of uint8, and labels."""

import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

__all__ = ["DATA_SETS", "Images", "cifar10", "fashion_mnist", "tiny_imagenet_100"]


class Images(NamedTuple):
    """Images of one part of a data set, and their labels."""

    images: Tensor
    labels: Tensor

    def split(self, n: int, seed: int) -> tuple["Images", "Images"]:
        """Return all images but n, and those n, drawn at random."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        rest, held = order[n:], order[:n]
        return (
            Images(self.images[rest], self.labels[rest]),
            Images(self.images[held], self.labels[held]),
        )


def cifar10(folder: Path, part: str) -> Images:
    """Read CIFAR-10: the published binary files, or PNG files with one image per row."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if part == "train" else ["test_batch"]
    if (folder / f"{names[0]}.bin").exists():
        rows = np.concatenate(
            [np.fromfile(folder / f"{name}.bin", np.uint8).reshape(-1, 3073) for name in names]
        )
        labels, pixels = rows[:, 0].astype(np.int64), rows[:, 1:].reshape(-1, 3, 32, 32)
    elif (folder / f"{names[0]}.png").exists():
        labels = np.asarray(json.loads((folder / f"{part}_lables.json").read_text()))
        rows = np.concatenate([np.asarray(Image.open(folder / f"{name}.png")) for name in names])
        pixels = rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
    else:
        raise FileNotFoundError(
            f"{folder} must hold {names[0]}.bin or {names[0]}.png, but has neither"
        )
    return Images(torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(labels))


def tiny_imagenet_100(folder: Path, part: str) -> Images:
    """Read zip files of LABEL/NAME.JPEG; the part for testing is `val.zip`."""
    files = sorted(folder.glob("train*.zip" if part == "train" else "val.zip"))
    if not files:
        raise FileNotFoundError(f"{folder} must hold a zip file of the part {part!r}, but has none")
    images, labels = [], []
    for file in files:
        with zipfile.ZipFile(file) as archive:
            for name in sorted(n for n in archive.namelist() if n.endswith(".JPEG")):
                image = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
                images.append(np.asarray(image))
                labels.append(int(name.split("/")[0]))
    pixels = np.stack(images).transpose(0, 3, 1, 2)
    return Images(torch.from_numpy(np.ascontiguousarray(pixels)), torch.tensor(labels))


def fashion_mnist(folder: Path, part: str) -> Images:
    """Read the published IDX files; the grey images get three equal channels."""
    name = "train" if part == "train" else "t10k"
    files = [folder / f"{name}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"{folder} must hold {file.name}, but does not")
    # Headers: 16 bytes before the images, 8 before the labels.
    pixels, labels = (
        np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8, offset=offset)
        for file, offset in zip(files, (16, 8), strict=True)
    )
    images = torch.from_numpy(pixels.reshape(-1, 1, 28, 28).repeat(3, axis=1))
    return Images(images, torch.from_numpy(labels.astype(np.int64)))


DATA_SETS = {
    "cifar10": cifar10,
    "fashion_mnist": fashion_mnist,
    "tiny_imagenet_100": tiny_imagenet_100,
}
