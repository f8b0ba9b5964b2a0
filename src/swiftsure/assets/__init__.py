"""What comes with the library: records of trained networks, two of these, and some images.

MSDNet on CIFAR-10 with its record, and a T5 that translates German to English and may stop at any
decoder layer, make a first run real without any download. See `experiments` for how all was made.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftsure.records import ExitRecord

__all__ = [
    "BILD",
    "CALM",
    "DIFFUSION",
    "IMAGE_CLASSIFICATION",
    "NETWORK",
    "SEGMENTATION",
    "TRANSLATOR",
    "SampleImages",
    "calibration_record",
    "network",
    "record",
    "sample_images",
]

FOLDER = Path(__file__).parent
IMAGE_CLASSIFICATION = FOLDER / "image_classification"
"""Exit records of classifiers, as `swiftsure reproduce image-classification` reads them."""
SEGMENTATION = FOLDER / "segmentation" / "adp_c_camvid.parquet"
"""Exit record of ADP-C on CamVid; beside it, as .npz, what it says of two scenes."""
CALM = FOLDER / "calm"
"""Threshold records of the translator, one a confidence measure."""
BILD = FOLDER / "bild" / "t5_multi30k.parquet"
"""Threshold record of a large and a small T5 that translate, over thresholds of the rollback;
beside it, as .seconds.json, how long a sentence took on two CPU cores."""
DIFFUSION = FOLDER / "diffusion" / "uvit_cifar10.parquet"
"""Threshold record of a U-ViT that generates images like CIFAR-10's."""
NETWORK = FOLDER / "msdnet_cifar10"
TRANSLATOR = FOLDER / "t5_multi30k"
"""An early-exit T5 and its tokenizer, as `from_pretrained` reads them, and `meta.safetensors`."""


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
