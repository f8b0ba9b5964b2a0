"""A trained network that comes with the library, its record and sample images; a cascade's record.

It has four exits: three cheap stages, each with a linear head, and a deep one. It was trained on
Fashion-MNIST by `experiments.image_classification.demo`. Nothing here needs PyTorch: the network
itself is in `swiftsure.demo.network`. `swiftsure-zoo` has others.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftsure.records import ExitRecord

__all__ = [
    "FOLDER",
    "IMAGE_SIDE",
    "SampleImages",
    "calibration_record",
    "description",
    "language_models",
    "read_description",
    "read_images",
    "record",
    "sample_images",
    "without_images",
]

FOLDER = Path(__file__).parent
"""Folder of the network's weights, record and images."""

IMAGE_SIDE = 28
"""Width and height of the images of Fashion-MNIST."""


class SampleImages(NamedTuple):
    """Images from the test set of Fashion-MNIST.

    Attributes
    ----------
    images : (n, 3, 28, 28), uint8
        Grey: the three channels are equal.
    labels : (n,)
    ids : (n,)
        Their indices in the test set, which are the ids of `record()`.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    ids: NDArray[np.int64]


def record() -> ExitRecord:
    """Return the network's exit record on Fashion-MNIST's test set.

    Examples
    --------
    >>> record().n, record().n_exits
    (10000, 4)
    """
    return ExitRecord.load(FOLDER / "record.parquet")


def calibration_record() -> ExitRecord:
    """Return `record()` without the images of `sample_images()`, which are kept for running.

    Examples
    --------
    >>> calibration_record().n
    9600
    """
    return without_images(record(), sample_images())


def language_models() -> ExitRecord:
    """Return the record of a cascade: GPT-4o-mini before GPT-4o on 1,300 questions of MedMCQA.

    The confidence is the geometric mean of the answer's token probabilities, the loss is 1 for a
    wrong answer, and the cost is in dollars.

    Examples
    --------
    >>> language_models().n, language_models().n_exits
    (1300, 2)
    """
    return ExitRecord.load(FOLDER / "language_models.parquet")


def description() -> dict[str, Any]:
    """Return the network's `mean`, `std`, `classes`, `test_accuracy` and `flops`."""
    return read_description(FOLDER)


def sample_images() -> SampleImages:
    """Return images to run the network on.

    Examples
    --------
    >>> sample_images().images.shape
    (400, 3, 28, 28)
    """
    return read_images(FOLDER)


def without_images(record: ExitRecord, images: SampleImages) -> ExitRecord:
    """Return a record without the samples of some images."""
    return record.take(np.flatnonzero(~np.isin(record.ids, images.ids)))


def read_description(folder: Path) -> dict[str, Any]:
    """Read a network's description from its folder."""
    described: dict[str, Any] = json.loads((folder / "network.json").read_text("utf-8"))
    return described


def read_images(folder: Path) -> SampleImages:
    """Read a network's sample images from its folder, where they are tiled into one file."""
    from PIL import Image

    described = json.loads((folder / "images.json").read_text("utf-8"))
    with Image.open(folder / "images.webp") as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    side = IMAGE_SIDE
    tiles = pixels.reshape(pixels.shape[0] // side, side, -1, side, 3).transpose(0, 2, 4, 1, 3)
    labels, ids = (np.asarray(described[key], np.int64) for key in ("labels", "ids"))
    images = tiles.reshape(-1, 3, side, side)[: len(labels)]
    return SampleImages(np.ascontiguousarray(images), labels, ids)
