"""Where the records and trained networks are, and what was measured with the MSDNet.

The functions are those of `swiftsure.demo`, for the MSDNet `msdnet_fashion_mnist()`.
"""

from pathlib import Path
from typing import Any

from swiftsure.demo import SampleImages, read_description, read_images, without_images
from swiftsure.records import ExitRecord

__all__ = [
    "BILD",
    "CALM",
    "DIFFUSION",
    "IMAGE_CLASSIFICATION",
    "MSDNET_FASHION_MNIST",
    "SEGMENTATION",
    "TRANSLATOR",
    "calibration_record",
    "description",
    "record",
    "sample_images",
]

DATA = Path(__file__).parent / "data"

IMAGE_CLASSIFICATION = DATA / "image_classification"
"""Folder of exit records of classifiers."""
SEGMENTATION = DATA / "segmentation" / "adp_c_camvid.parquet"
"""Exit record of ADP-C on CamVid. Its predictions on two scenes are beside it, as .npz."""
CALM = DATA / "calm"
"""Folder of threshold records of the translator, one per confidence measure."""
BILD = DATA / "bild" / "t5_multi30k.parquet"
"""Threshold record of a large and a small T5. Its seconds per sentence are beside it, as JSON."""
DIFFUSION = DATA / "diffusion" / "uvit_cifar10.parquet"
"""Threshold record of a U-ViT trained on CIFAR-10."""
MSDNET_FASHION_MNIST = DATA / "msdnet_fashion_mnist"
"""Folder of an MSDNet with five exits, trained on Fashion-MNIST."""
TRANSLATOR = DATA / "t5_multi30k"
"""Folder of an early-exit T5 for `from_pretrained`, with its `meta.safetensors`."""


def record() -> ExitRecord:
    """Return the exit record of the MSDNet on Fashion-MNIST's test set.

    Examples
    --------
    >>> record().n, record().n_exits
    (10000, 5)
    """
    return ExitRecord.load(IMAGE_CLASSIFICATION / "msdnet_fashion_mnist.parquet")


def calibration_record() -> ExitRecord:
    """Return `record()` without the images of `sample_images()`, which are kept for running.

    Examples
    --------
    >>> calibration_record().n
    8000
    """
    return without_images(record(), sample_images())


def description() -> dict[str, Any]:
    """Return the network's `mean`, `std`, `classes`, `test_accuracy`, `flops`.

    `model` holds its hyperparameters.
    """
    return read_description(MSDNET_FASHION_MNIST)


def sample_images() -> SampleImages:
    """Return images to run the network on.

    Examples
    --------
    >>> sample_images().images.shape
    (2000, 3, 28, 28)
    """
    return read_images(MSDNET_FASHION_MNIST)
