"""Road scenes in memory, for training: normalised images at one size, and labels."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from swiftsure_zoo.readers.road_scenes import GTA5, CamVid, Cityscapes, RoadScenes

__all__ = ["TEST_PART", "Scenes", "in_memory", "scenes"]

TEST_PART = {"camvid": "test", "cityscapes": "val", "gta5": "val"}
"""Part that records are collected on; networks must not be trained on it."""

VALIDATION_SHARE = 10
"""GTA5 has no published split: every tenth image is for validation."""

AHEAD = 32
"""Number of scenes read at a time."""


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
    held: Scenes | None = None
    for i, (image, label, _) in enumerate(read(data)):
        size = image.shape[1:]
        if held is None:  # allocated once: scenes and a copy of them may not fit together
            held = Scenes(
                torch.empty((len(data), 3, *size), dtype=torch.half, device=device),
                torch.empty((len(data), *size), dtype=torch.uint8, device=device),
            )
        held.images[i] = image
        held.labels[i] = interpolate(label[None, None].float(), size=size, mode="nearest")[0, 0]
    assert held is not None  # no data set is empty
    return held


def read(data: RoadScenes) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Yield all scenes, reading ahead in threads; processes would need much shared memory."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(data), AHEAD):
            yield from pool.map(data.__getitem__, range(start, min(start + AHEAD, len(data))))
