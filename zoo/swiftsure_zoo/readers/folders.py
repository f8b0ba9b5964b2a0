"""`ImageFolder`: images in one folder per class, the layout of ImageNet and many others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from swiftsure._lib import checks

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ImageFolder", "centred", "normalised", "open_image"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SUFFIXES = {".jpeg", ".jpg", ".png", ".webp", ".bmp"}


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Data set of images `folder/CLASS/NAME.JPEG` with their class numbers, sorted by name.

    For ImageNet, `ImageFolder("imagenet/val")`: its folders are WordNet ids (n01440764, …), whose
    order is the class order of published networks. Use it with a `DataLoader` with workers, which
    decode the images.

    Parameters
    ----------
    folder : path
    prepare : callable, optional
        Maps a PIL image to a tensor. The default is the usual ImageNet test transform: resize the
        shorter side to 256 pixels, crop the central 224, normalise by ImageNet's mean and standard
        deviation.

    Attributes
    ----------
    classes : list of str
        Names of the folders; their positions are the labels.
    """

    def __init__(self, folder: str | Path, prepare: Callable[..., Tensor] | None = None) -> None:
        root = Path(folder)
        if not root.is_dir():
            raise ValueError(f"`folder` must be an existing folder, but {root} is not one.")
        self.classes = sorted(each.name for each in root.iterdir() if each.is_dir())
        if not self.classes:
            raise ValueError(
                f"`folder` must hold one folder per class, but {root} has none. ImageNet's"
                " validation images are published without: sort them by their ground truth first."
            )
        self.prepare = prepare or centred
        self.files = [
            (file, label)
            for label, name in enumerate(self.classes)
            for file in sorted((root / name).iterdir())
            if file.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            raise ValueError(
                f"`folder` must hold images in the folders of its classes, but {root} has none."
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image and its label."""
        file, label = self.files[index]
        return self.prepare(open_image(file, file).convert("RGB")), label


def centred(
    image: Image.Image,
    *,
    size: int = 224,
    shorter: int = 256,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
) -> Tensor:
    """Return the centre crop of an image as a normalised tensor (3, size, size).

    Parameters
    ----------
    image : PIL.Image.Image
    size : int
        Side of the crop.
    shorter : int
        Length of the shorter side after resizing, before the crop.
    """
    checks.count("size", size)
    if shorter < size:
        raise ValueError(f"`shorter` must be at least `size`, {size}, but got {shorter}.")
    width, height = image.size
    scale = shorter / min(width, height)
    # As torchvision does: the longer side is rounded down.
    wide = shorter if width <= height else int(shorter * width / height)
    high = shorter if height <= width else int(shorter * height / width)
    resized = image if scale == 1 else image.resize((wide, high), Image.Resampling.BILINEAR)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    return normalised(resized.crop((left, top, left + size, top + size)), mean, std)


def normalised(
    image: Image.Image,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
) -> Tensor:
    """Return an image as a normalised tensor (3, height, width)."""
    pixels = np.asarray(image, np.float32) / 255
    normal = (pixels - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return torch.from_numpy(np.ascontiguousarray(normal.transpose(2, 0, 1)))


def open_image(source: Any, name: Path) -> Image.Image:
    """Return the image in a file; `name` is its path, for the error."""
    try:
        with Image.open(source) as image:
            image.load()
            return image
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{name} is not a readable image ({error}).") from None
