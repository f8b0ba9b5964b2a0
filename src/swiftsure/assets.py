"""Trained networks, their records and sample images.

A small network comes with this library. The rest is in a second distribution, `swiftsure-assets`;
if it is missing, the error says how to install it. The folder `experiments` of the repository shows
how each was made.
"""

import json
from importlib.util import find_spec
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
    "IMAGE_SIDE",
    "NETWORK",
    "SEGMENTATION",
    "SMALL",
    "TRANSLATOR",
    "SampleImages",
    "calibration_record",
    "installed",
    "network",
    "record",
    "sample_images",
]

IMAGE_SIDE = 28
"""Width and height of the images of Fashion-MNIST."""

SMALL = Path(__file__).parent / "small_fashion_mnist"
"""Folder of the small network: three convolutions with three exits, trained on Fashion-MNIST."""

IMAGE_CLASSIFICATION: Path
"""Folder of exit records of classifiers."""
SEGMENTATION: Path
"""Exit record of ADP-C on CamVid. Its predictions on two scenes are beside it, as .npz."""
CALM: Path
"""Folder of threshold records of the translator, one per confidence measure."""
BILD: Path
"""Threshold record of a large and a small T5. Its seconds per sentence are beside it, as JSON."""
DIFFUSION: Path
"""Threshold record of a U-ViT trained on CIFAR-10."""
NETWORK: Path
"""Folder of an MSDNet with five exits, trained on Fashion-MNIST."""
TRANSLATOR: Path
"""Folder of an early-exit T5 for `from_pretrained`, with its `meta.safetensors`."""

_FILES = {
    "IMAGE_CLASSIFICATION": "image_classification",
    "SEGMENTATION": "segmentation/adp_c_camvid.parquet",
    "CALM": "calm",
    "BILD": "bild/t5_multi30k.parquet",
    "DIFFUSION": "diffusion/uvit_cifar10.parquet",
    "NETWORK": "msdnet_fashion_mnist",
    "TRANSLATOR": "t5_multi30k",
}


def __getattr__(name: str) -> Path:
    """Return a path into `swiftsure-assets`, which is located on first use."""
    if name not in _FILES:
        raise AttributeError(f"module 'swiftsure.assets' has no attribute {name!r}")
    return _path(name)


def installed() -> bool:
    """Return whether `swiftsure-assets` is installed."""
    return find_spec("swiftsure_assets") is not None


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


def record(small: bool = False) -> ExitRecord:
    """Return the exit record of the MSDNet, or of the small network, on Fashion-MNIST's test set.

    Examples
    --------
    >>> record().n, record().n_exits
    (10000, 5)
    >>> record(small=True).n, record(small=True).n_exits
    (10000, 3)
    """
    if small:
        return ExitRecord.load(SMALL / "record.parquet")
    return ExitRecord.load(_path("IMAGE_CLASSIFICATION") / "msdnet_fashion_mnist.parquet")


def calibration_record(small: bool = False) -> ExitRecord:
    """Return `record()` without the images of `sample_images()`, which are kept for running.

    Examples
    --------
    >>> calibration_record().n
    8000
    """
    whole = record(small)
    return whole.take(np.flatnonzero(~np.isin(whole.ids, sample_images(small).ids)))


def network(small: bool = False) -> dict[str, Any]:
    """Return the network's description: `mean`, `std`, `classes`, `test_accuracy`, `flops`.

    `model` holds the MSDNet's hyperparameters.
    """
    described: dict[str, Any] = json.loads((_folder(small) / "network.json").read_text("utf-8"))
    return described


def sample_images(small: bool = False) -> SampleImages:
    """Return images to run the network on.

    Examples
    --------
    >>> sample_images().images.shape
    (2000, 3, 28, 28)
    """
    from PIL import Image

    described = json.loads((_folder(small) / "images.json").read_text("utf-8"))
    with Image.open(_folder(small) / "images.webp") as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    side = IMAGE_SIDE
    tiles = pixels.reshape(pixels.shape[0] // side, side, -1, side, 3).transpose(0, 2, 4, 1, 3)
    labels, ids = (np.asarray(described[key], np.int64) for key in ("labels", "ids"))
    images = tiles.reshape(-1, 3, side, side)[: len(labels)]
    return SampleImages(np.ascontiguousarray(images), labels, ids)


def _folder(small: bool) -> Path:
    return SMALL if small else _path("NETWORK")


def _path(name: str) -> Path:
    spec = find_spec("swiftsure_assets")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            'This needs trained networks and their records: pip install "swiftsure[demo]"',
            name="swiftsure_assets",
        )
    return Path(spec.submodule_search_locations[0]) / _FILES[name]
