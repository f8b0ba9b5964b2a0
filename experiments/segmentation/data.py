"""Road scenes in memory, for training: normalised images at one size, and labels."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader

from swiftsure.torch.road_scenes import GTA5, CamVid, Cityscapes, RoadScenes

__all__ = ["Scenes", "in_memory", "scenes"]

VALIDATION_SHARE = 10
"""GTA5 is published without a split: every tenth image is for validation."""


class Scenes(NamedTuple):
    """Images (n, 3, height, width) of float16, and labels (n, height, width) of uint8."""

    images: Tensor
    labels: Tensor


def scenes(recipe: dict[str, Any], root: Path, split: str) -> RoadScenes:
    """Return a part of the data set of a recipe."""
    name, size = recipe["data"]["name"], tuple(recipe["data"]["size"])
    if name == "camvid":
        return CamVid(root, split, size)
    if name == "cityscapes":
        return Cityscapes(root, split, size)
    names = GTA5(root).ids
    kept = [(i % VALIDATION_SHARE == 0) == (split == "val") for i in range(len(names))]
    return GTA5(root, [name for name, keep in zip(names, kept, strict=True) if keep], size)


def in_memory(data: RoadScenes, device: str) -> Scenes:
    """Return all scenes, labels at the size of the images."""
    loader = DataLoader(data, batch_size=1, num_workers=min(8, os.cpu_count() or 1))
    images, labels = [], []
    for image, label, _ in loader:
        size = image.shape[2:]
        images.append(image.half().to(device))
        smaller = interpolate(label[:, None].float(), size=size, mode="nearest")[:, 0]
        labels.append(smaller.to(torch.uint8).to(device))
    return Scenes(torch.cat(images), torch.cat(labels))
