"""What comes with the library: exit records of trained networks, one of them, and some images.

The network and its record make the first run real without any download; see
`experiments/image_classification` for how they were made.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftsure.records import ExitRecord

__all__ = [
    "IMAGE_CLASSIFICATION",
    "NETWORK",
    "SampleImages",
    "calibration_record",
    "network",
    "record",
    "sample_images",
]

FOLDER = Path(__file__).parent
IMAGE_CLASSIFICATION = FOLDER / "image_classification"
"""Exit records of classifiers, as `swiftsure reproduce image-classification` reads them."""
NETWORK = FOLDER / "msdnet_cifar10"


class SampleImages(NamedTuple):
    """Images of CIFAR-10's test part.

    Attributes
    ----------
    images : (n, 3, 32, 32), uint8
    labels : (n,)
    ids : (n,)
        Their numbers in the test part, which are the ids of `record()`.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    ids: NDArray[np.int64]


def record() -> ExitRecord:
    """Return the exit record of the network that comes with the library: MSDNet on CIFAR-10.

    Examples
    --------
    >>> record().n, record().n_exits
    (10000, 5)
    """
    return ExitRecord.load(IMAGE_CLASSIFICATION / "msdnet_cifar10.parquet")


def calibration_record() -> ExitRecord:
    """Return that record without the images of `sample_images()`, which are then for trying it.

    Examples
    --------
    >>> calibration_record().n
    8000
    """
    whole = record()
    return whole.take(np.setdiff1d(whole.ids, sample_images().ids))


def network() -> dict[str, Any]:
    """Return how that network is built and what it takes: `model`, `mean`, `std`, `classes`."""
    described: dict[str, Any] = json.loads((NETWORK / "network.json").read_text(encoding="utf-8"))
    return described


def sample_images() -> SampleImages:
    """Return the images to try it on.

    Examples
    --------
    >>> sample_images().images.shape
    (2000, 3, 32, 32)
    """
    from PIL import Image

    described = json.loads((NETWORK / "images.json").read_text(encoding="utf-8"))
    with Image.open(NETWORK / "images.webp") as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    rows, columns = (side // 32 for side in pixels.shape[:2])
    tiles = pixels.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 4, 1, 3)
    labels, ids = (np.asarray(described[key], np.int64) for key in ("labels", "ids"))
    images = tiles.reshape(-1, 3, 32, 32)[: len(labels)]
    return SampleImages(np.ascontiguousarray(images), labels, ids)
