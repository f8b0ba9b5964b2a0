"""Semantic segmentation data sets of road scenes: Cityscapes, GTA5 and CamVid, as published.

Each yields (image, label, id). To keep the groups too, pass its `collate` to the loader:

    scenes = Cityscapes("cityscapes", "val")
    loader = DataLoader(scenes, batch_size=4, num_workers=4, collate_fn=scenes.collate)
    record = collect(model, loader, losses=["miou"], scores=["mean_top1"])

Frames of one video depend on each other, so a guarantee that assumes independent samples would not
hold. Records with groups test the means of groups; it takes many groups to certify anything.
"""

import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from swiftsure._lib import checks
from swiftsure.losses import VOID
from swiftsure_zoo.readers.folders import normalised, open_image

__all__ = ["CAMVID_CLASSES", "CITYSCAPES_CLASSES", "GTA5", "CamVid", "Cityscapes", "RoadScenes"]

CITYSCAPES_IDS = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "wall": 12,
    "fence": 13,
    "pole": 17,
    "traffic light": 19,
    "traffic sign": 20,
    "vegetation": 21,
    "terrain": 22,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "truck": 27,
    "bus": 28,
    "train": 31,
    "motorcycle": 32,
    "bicycle": 33,
}
"""Published label ids of the evaluated classes, in the class order of networks."""

CITYSCAPES_CLASSES = tuple(CITYSCAPES_IDS)
CAMVID_CLASSES = (
    "sky",
    "building",
    "pole",
    "road",
    "sidewalk",
    "tree",
    "sign",
    "fence",
    "car",
    "pedestrian",
    "cyclist",
)

N_LABEL_IDS = 35
"""Cityscapes has the ids 0 to 33, GTA5 also 34 (its licence plates); all others are errors."""

MAX_STRETCH = 0.05
"""Largest relative difference between the sides of a label and of its image."""


class Scene(NamedTuple):
    """Paths of one image and its label."""

    name: str
    image: str
    label: str
    group: str | None


class RoadScenes(Dataset[tuple[Tensor, Tensor, str]]):
    """Base class of segmentation data sets: images with a class for every pixel.

    An item is the image, (3, height, width), normalised by ImageNet's mean and standard deviation;
    the label, (height, width), with class numbers and `swiftsure.losses.VOID`; and the id.

    Parameters
    ----------
    root : path
        Folder or zip file with all the files.
    scenes : sequence of Scene
        With paths relative to the root.
    classes : sequence of str
    numbers : mapping
        Maps numbers in label files to classes. Those mapped to `VOID` are ignored; a number that
        is not mapped is an error.
    size : (height, width), optional
        Resize images to this (bilinearly). Labels keep their size, since losses are measured there.

    Attributes
    ----------
    classes : tuple of str
        Their positions are the class numbers.
    ids : list of str
    groups : list of str, or None
        Video sequence of each image.
    """

    def __init__(
        self,
        root: Path,
        scenes: Sequence[Scene],
        classes: Sequence[str],
        numbers: Mapping[int, int],
        size: tuple[int, int] | None = None,
    ) -> None:
        self.root = root
        self.scenes = list(scenes)
        self.classes = tuple(classes)
        self.size = (
            None if size is None else (checks.count("size", size[0]), checks.count("size", size[1]))
        )
        self.ids = [scene.name for scene in scenes]
        groups = [scene.group for scene in scenes if scene.group is not None]
        self.groups = groups or None
        self._group_of = dict(zip(self.ids, groups, strict=True)) if groups else {}
        self._class_of = np.full(256, -1, np.int64)
        for number, label in numbers.items():
            self._class_of[number] = label

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, str]:
        """Return an image, its label and its id."""
        scene = self.scenes[index]
        image = self._open(scene.image).convert("RGB")
        label = self._fitted(self._open(scene.label), image, scene)
        if self.size is not None and image.size != self.size[::-1]:
            image = image.resize(self.size[::-1], Image.Resampling.BILINEAR)
        return normalised(image), torch.from_numpy(self._classes_of(label, scene)), scene.name

    def collate(self, items: Sequence[tuple[Tensor, Tensor, str]]) -> dict[str, Any]:
        """Return items as a batch dict for `collect`: inputs, labels, ids and, if known, groups."""
        images, labels, names = zip(*items, strict=True)
        _refuse_unequal("images", images, names)
        _refuse_unequal("labels", labels, names)
        batch = {"inputs": torch.stack(images), "labels": torch.stack(labels), "ids": list(names)}
        if self._group_of:
            batch["groups"] = [self._group_of[name] for name in names]
        return batch

    def _open(self, path: str) -> Image.Image:
        """Return an image file; a zip is reopened each time, as workers must not share it."""
        if self.root.is_dir():
            return open_image(self.root / path, self.root / path)
        try:
            with zipfile.ZipFile(self.root) as archive:
                packed = io.BytesIO(archive.read(path))
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.root / path} is not a readable image ({error}).") from None
        return open_image(packed, self.root / path)

    def _fitted(self, label: Image.Image, image: Image.Image, scene: Scene) -> Image.Image:
        """Return the label at its image's size; raises if the sizes differ too much."""
        if label.size == image.size:
            return label
        stretches = [abs(a / b - 1) for a, b in zip(label.size, image.size, strict=True)]
        if max(stretches) > MAX_STRETCH:
            raise ValueError(
                f"{self.root / scene.label} has size {label.size}, but its image has size"
                f" {image.size}: check that they belong together."
            )
        return label.resize(image.size, Image.Resampling.NEAREST)

    def _classes_of(self, label: Image.Image, scene: Scene) -> NDArray[np.int64]:
        if label.mode not in ("L", "P"):
            raise ValueError(
                f"{self.root / scene.label} must hold class numbers, 8 bits per pixel, but has mode"
                f" {label.mode}: use the label files, not their colour versions."
            )
        numbers = np.asarray(label)
        classes: NDArray[np.int64] = self._class_of[numbers]
        if (classes < 0).any():
            known = np.flatnonzero(self._class_of >= 0)
            raise ValueError(
                f"{self.root / scene.label} must hold labels among {_ranges(known)}, but has"
                f" {numbers[classes < 0][0]}."
            )
        return classes


class Cityscapes(RoadScenes):
    """Cityscapes: 19 classes, 2048 x 1024, groups by city and sequence.

    Reads `leftImg8bit/SPLIT/CITY/NAME_leftImg8bit.png` with
    `gtFine/SPLIT/CITY/NAME_gtFine_labelIds.png` or, if that is missing, `…_labelTrainIds.png`.

    Parameters
    ----------
    root : folder
    split : {"train", "val", "test"}
        Test labels are published empty: all their pixels are void.
    size : (height, width), optional
        Resize images to this.
    """

    def __init__(
        self, root: str | Path, split: str = "val", size: tuple[int, int] | None = None
    ) -> None:
        folder = Path(root)
        images = sorted((folder / "leftImg8bit" / split).glob("*/*_leftImg8bit.png"))
        if not images:
            raise ValueError(
                f"`root` must hold leftImg8bit/{split}/CITY/NAME_leftImg8bit.png, but {folder} has"
                " none."
            )
        kinds = {self._kind(folder, split, image) for image in images}
        if len(kinds) > 1:
            raise ValueError(
                f"`root` must hold labelIds for all images, or labelTrainIds for all, but {folder}"
                " has each for some: add the missing ones."
            )
        kind = kinds.pop()
        scenes = []
        for image in images:
            name = _plain_name(image)
            label = _cityscapes_label(split, image, kind)
            city, sequence, *_ = name.split("_")
            scenes.append(Scene(name, str(image.relative_to(folder)), label, f"{city}_{sequence}"))
        numbers = _LABEL_IDS if kind == "labelIds" else _TRAIN_IDS
        super().__init__(folder, scenes, CITYSCAPES_CLASSES, numbers, size)

    @staticmethod
    def _kind(folder: Path, split: str, image: Path) -> str:
        for kind in ("labelIds", "labelTrainIds"):
            if (folder / _cityscapes_label(split, image, kind)).is_file():
                return kind
        raise ValueError(
            f"{image.name} must have a label, but"
            f" {folder / _cityscapes_label(split, image, 'labelIds')} is missing."
        )


class GTA5(RoadScenes):
    """GTA5 (Playing for Data): game scenes with the 19 classes of Cityscapes; no known groups.

    Reads `images/00001.png` with `labels/00001.png`, whose numbers are Cityscapes' label ids. Image
    sizes vary a little, so use batches of one image or pass `size`. A few published labels differ
    in size from their images: up to 5 % they are resized (nearest pixel), beyond that they are an
    error.

    Parameters
    ----------
    root : folder
    names : iterable of str, optional
        Images to use, such as "00001", in this order; all by default.
    size : (height, width), optional
        Resize images to this.
    """

    def __init__(
        self,
        root: str | Path,
        names: Iterable[str] | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        folder = Path(root)
        pairs = dict(_pairs(_names_in(folder), "images/", "labels/", folder))
        chosen = list(pairs) if names is None else list(names)
        for name in chosen:
            if name not in pairs:
                raise ValueError(
                    f"`names` must name images in {folder / 'images'}, but {name!r} is not one."
                )
        scenes = [Scene(name, *pairs[name], group=None) for name in chosen]
        super().__init__(folder, scenes, CITYSCAPES_CLASSES, _LABEL_IDS, size)


class CamVid(RoadScenes):
    """CamVid with SegNet's 11 classes, 480 x 360, groups by video.

    Reads a zip file, or a folder, of `images/NAME.jpg` (or png) with `labels/NAME.png`; a folder of
    such zip files, one per split (`val.zip`); or SegNet's folders `val/NAME.png` and
    `valannot/NAME.png`.

    Parameters
    ----------
    root : folder or zip file
    split : {"train", "val", "test"}
        Used if the root has several splits.
    size : (height, width), optional
        Resize images to this.
    """

    def __init__(
        self, root: str | Path, split: str = "val", size: tuple[int, int] | None = None
    ) -> None:
        place = Path(root)
        if (place / f"{split}.zip").is_file():
            place = place / f"{split}.zip"
        files = _names_in(place)
        flat = any(file.startswith("images/") for file in files)
        folders = ("images/", "labels/") if flat else (f"{split}/", f"{split}annot/")
        scenes = [
            Scene(name, image, label, group=name.split("_")[0])
            for name, (image, label) in _pairs(files, *folders, place)
        ]
        numbers = {**{k: k for k in range(len(CAMVID_CLASSES))}, len(CAMVID_CLASSES): VOID}
        super().__init__(place, scenes, CAMVID_CLASSES, numbers, size)


_CLASS_OF_ID = {number: k for k, number in enumerate(CITYSCAPES_IDS.values())}
_LABEL_IDS = {**{k: _CLASS_OF_ID.get(k, VOID) for k in range(N_LABEL_IDS)}, VOID: VOID}
_TRAIN_IDS = {**{k: k for k in range(len(CITYSCAPES_IDS))}, VOID: VOID}


def _plain_name(image: Path) -> str:
    return image.name.removesuffix("_leftImg8bit.png")


def _cityscapes_label(split: str, image: Path, kind: str) -> str:
    return f"gtFine/{split}/{image.parent.name}/{_plain_name(image)}_gtFine_{kind}.png"


def _names_in(root: Path) -> list[str]:
    """Return the sorted file paths in the subfolders of a folder, or in a zip file."""
    if root.is_dir():
        found = [path.relative_to(root).as_posix() for path in root.glob("*/*") if path.is_file()]
    elif zipfile.is_zipfile(root):
        with zipfile.ZipFile(root) as archive:
            found = archive.namelist()
    else:
        raise ValueError(f"`root` must be a folder or a zip file, but {root} is neither.")
    return sorted(found)


def _pairs(
    files: list[str], images: str, labels: str, root: Path
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (name, (image path, label path)) for each image of a folder."""
    known = set(files)
    found = [name for name in files if name.startswith(images) and name.endswith((".png", ".jpg"))]
    if not found:
        raise ValueError(f"`root` must hold {images}NAME.png or .jpg, but {root} has none.")
    for image in found:
        name = Path(image).stem
        label = f"{labels}{name}.png"
        if label not in known:
            raise ValueError(f"{image} must have a label, but {root / label} is missing.")
        yield name, (image, label)


def _refuse_unequal(what: str, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    first, *others = [tuple(tensor.shape[-2:]) for tensor in tensors]
    for size, name in zip(others, names[1:], strict=True):
        if size != first:
            raise ValueError(
                f"The {what} of a batch must have the same size, but {names[0]} has {first} and"
                f" {name} {size}: load one at a time{', or pass `size`' * (what == 'images')}."
            )


def _ranges(numbers: NDArray[np.int64]) -> str:
    """Return ascending numbers as text, with runs as ranges: 0-33, 255."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)
