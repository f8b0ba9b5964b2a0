"""Segmentation losses on tensors: logit maps, compared at the size of the labels.

Heads may return logits at a lower resolution than the labels. They are enlarged (bilinearly, as
published segmentation networks are tested) one strip of the image at a time, so that no exit's
logits are ever held at full size. All losses of a batch come from one pass over the strips.

| risk | compared with | at the size of | void pixels |
|---|---|---|---|
| gap | labels | the labels | left out of both label and prediction |
| consistency | the last exit | the labels; without labels, the input images | counted |
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from swiftsure.losses import LOSSES, PIXEL_LOSSES, VOID, Loss, TensorFunctions
from swiftsure.losses.segmentation import miou, miscoverage

__all__ = [
    "Enlarged",
    "image_losses",
    "image_size",
    "labelled_rows",
    "logit_maps",
    "pixel_classes",
]

N_STRIPS = 8
"""Strips per image; at most four tensors of a strip's size are alive at once."""

NAMES = tuple(loss.name for loss in PIXEL_LOSSES)


def image_losses(
    outputs: Sequence[Any],
    labels: Tensor | None = None,
    size: tuple[int, int] | None = None,
    names: Sequence[str] = NAMES,
) -> dict[str, Tensor]:
    """Return losses of images at all exits, (n, n_exits) each, from one pass over their pixels.

    Parameters
    ----------
    outputs : logit maps of all exits, (n, n_classes, height, width) each
    labels : (n, height, width), optional
        Class numbers of the pixels; negative ones and `swiftsure.losses.VOID` are void.
    size : (height, width), optional
        Size to compare at if there are no labels; that of the logits by default.
    names : names of losses

    Returns
    -------
    losses
        "inconsistencies/NAME" against the last exit and, with labels, "losses/NAME".
    """
    maps = logit_maps(outputs)
    n, n_classes, *own_size = maps[0].shape
    truth = None
    height, width = own_size if size is None else size
    if labels is not None:
        truth = pixel_classes(labels, n, n_classes)
        _refuse_unlabelled(truth)
        height, width = truth.shape[1:]
    tallies = {"inconsistencies": _Tally(maps, height * width)}
    if truth is not None:
        tallies["losses"] = _Tally(maps, (truth >= 0).sum(dim=(1, 2)))
    enlarged = Enlarged(maps, (height, width))
    last = len(maps) - 1
    for rows in _strips(height):
        full = _Strip(enlarged.rows(last, rows), names)
        for k in range(len(maps)):
            strip = full if k == last else _Strip(enlarged.rows(k, rows), names)
            _compare_exits(tallies["inconsistencies"], k, strip, full)
            if truth is not None:
                _compare_labels(tallies["losses"], k, strip, truth[:, rows])
            del strip  # free it before computing the next
        del full
    return {
        f"{kind}/{name}": getattr(tally, name)()
        for kind, tally in tallies.items()
        for name in names
    }


def image_size(inputs: Any) -> tuple[int, int] | None:
    """Return (height, width) of the input images; None if the inputs are not images."""
    if isinstance(inputs, Tensor) and inputs.ndim == 4:
        return inputs.shape[2], inputs.shape[3]
    return None


def logit_maps(outputs: Sequence[Any]) -> list[Tensor]:
    """Return the outputs of all exits; raises unless they are logit maps of one shape."""
    forms = [
        tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        for output in outputs
    ]
    if isinstance(forms[0], str) or len(forms[0]) != 4 or len(set(forms)) > 1:
        raise ValueError(
            "Segmentation losses need outputs of shape (n, n_classes, height, width) at every"
            f" exit, but got {', '.join(map(str, forms))}: classifiers use 'zero_one' or 'brier'."
        )
    return list(outputs)


def pixel_classes(
    labels: Tensor, n: int, n_classes: int, ids: Sequence[Any] | None = None
) -> Tensor:
    """Return the classes of the pixels of n images, -1 for void; `ids` name samples in errors."""
    if labels.ndim != 3 or len(labels) != n or labels.is_floating_point() or labels.is_complex():
        raise ValueError(
            f"`labels` must be whole numbers of shape ({n}, height, width), but got {labels.dtype}"
            f" of shape {tuple(labels.shape)}."
        )
    numbers = labels.long()
    void = numbers < 0
    if n_classes <= VOID:
        void = void | (numbers == VOID)
    strange = (numbers >= n_classes) & ~void
    if strange.any():
        sample, row, column = strange.nonzero()[0].tolist()
        raise ValueError(
            f"`labels` must be class numbers below {n_classes}, or {VOID} for void, but sample"
            f" {sample if ids is None else ids[sample]} has {int(numbers[sample, row, column])}."
        )
    return numbers.masked_fill(void, -1)


def labelled_rows(outputs: Sequence[Any], labels: Tensor, ids: Sequence[Any]) -> Tensor | None:
    """Return the indices of images with a labelled pixel; None if all have one."""
    n, n_classes = logit_maps(outputs)[0].shape[:2]
    labelled = (pixel_classes(labels, n, n_classes, ids) >= 0).flatten(1).any(dim=1)
    return None if labelled.all() else labelled.nonzero()[:, 0]


class Enlarged:
    """Logit maps resized on demand, some rows at a time.

    Parameters
    ----------
    maps : (n, n_classes, height, width) each, all of one shape
    size : (height, width)
    """

    def __init__(self, maps: Sequence[Tensor], size: tuple[int, int]) -> None:
        self.maps = maps
        self.size = size
        n_rows, device = maps[0].shape[2], maps[0].device
        wanted = torch.arange(size[0], device=device, dtype=torch.float32)
        place = ((wanted + 0.5) * (n_rows / size[0]) - 0.5).clamp_(min=0.0)
        self._above = place.long()
        self._below = (self._above + 1).clamp_(max=n_rows - 1)
        self._share = (place - self._above)[:, None]

    def rows(self, index: int, rows: slice) -> Tensor:
        """Return some rows of one resized map, in float32.

        They equal those of `interpolate(logits, size, mode="bilinear", align_corners=False)`.
        """
        logits = self.maps[index]
        height, width = self.size
        if logits.shape[2] == height:
            strip = logits[:, :, rows].float()
        else:
            upper = logits.index_select(2, self._above[rows]).float()
            lower = logits.index_select(2, self._below[rows]).float()
            strip = torch.lerp(upper, lower, self._share[rows])
        if logits.shape[3] == width:
            return strip
        return interpolate(strip, (strip.shape[2], width), mode="bilinear", align_corners=False)


def _strips(height: int) -> Iterator[slice]:
    step = math.ceil(height / N_STRIPS)
    for start in range(0, height, step):
        yield slice(start, min(start + step, height))


def _refuse_unlabelled(truth: Tensor) -> None:
    unlabelled = (truth < 0).flatten(1).all(dim=1)
    if unlabelled.any():
        raise ValueError(
            "`labels` must have a class for at least one pixel per sample, but sample"
            f" {int(unlabelled.nonzero()[0, 0])} is all void ({int(unlabelled.sum())} such): leave"
            " it out."
        )


class _Strip:
    """Predictions and probabilities of one strip at one exit, as losses need; drops the logits."""

    def __init__(self, logits: Tensor, names: Sequence[str]) -> None:
        kinds = {LOSSES[name].of for name in names}
        self.predictions = self.probabilities = None
        if "prediction" in kinds:
            self.predictions = logits.max(dim=1).indices  # twice as fast as argmax on a CPU
        if "distribution" in kinds:
            self.probabilities = logits.softmax(dim=1)


class _Tally:
    """Confusion counts and distances, summed over strips, from which all losses follow."""

    def __init__(self, maps: list[Tensor], n_pixels: int | Tensor) -> None:
        n, n_classes = maps[0].shape[:2]
        device = maps[0].device
        self.wide = torch.float32 if device.type == "mps" else torch.float64
        counts = torch.as_tensor(n_pixels, device=device)
        self.n_pixels = counts.expand(n)[:, None].to(self.wide)  # per image, without void
        self.distances = torch.zeros((n, len(maps)), dtype=self.wide, device=device)
        shape = (n, len(maps), n_classes, n_classes)
        self.confusions = torch.zeros(shape, dtype=torch.long, device=device)

    def add_distances(self, exit_index: int, distances: Tensor) -> None:
        self.distances[:, exit_index] += distances.sum(dim=(1, 2), dtype=self.wide)

    def add_predictions(self, exit_index: int, found: Tensor, truth: Tensor) -> None:
        """Count pixels by image, true class and predicted class; void pixels are dropped."""
        n, n_classes = len(found), self.confusions.shape[2]
        image = torch.arange(n, device=found.device)[:, None, None] * (n_classes + 1)
        pairs = (truth + (image + 1)).mul_(n_classes).add_(found)
        counts = pairs.flatten().bincount(minlength=n * (n_classes + 1) * n_classes)
        self.confusions[:, exit_index] += counts.view(n, n_classes + 1, n_classes)[:, 1:]

    def miou(self) -> Tensor:
        losses: Tensor = miou(self.confusions.to(self.wide))
        return losses

    def miscoverage(self) -> Tensor:
        losses: Tensor = miscoverage(self.confusions.to(self.wide))
        return losses

    def pixel_brier(self) -> Tensor:
        return self.distances / self.n_pixels


def _compare_exits(tally: _Tally, exit_index: int, strip: _Strip, full: _Strip) -> None:
    if strip.predictions is not None and full.predictions is not None:
        tally.add_predictions(exit_index, strip.predictions, full.predictions)
    if strip.probabilities is not None and full.probabilities is not None and strip is not full:
        distances = (strip.probabilities - full.probabilities).square_().sum(dim=1)
        tally.add_distances(exit_index, distances)


def _compare_labels(tally: _Tally, exit_index: int, strip: _Strip, truth: Tensor) -> None:
    if strip.predictions is not None:
        tally.add_predictions(exit_index, strip.predictions, truth)
    if strip.probabilities is not None:
        of_label = strip.probabilities.gather(1, truth.clamp(min=0)[:, None])[:, 0]
        losses = strip.probabilities.square().sum(dim=1).sub_(of_label, alpha=2).add_(1)
        tally.add_distances(exit_index, losses.masked_fill_(truth < 0, 0.0))


def _functions(loss: Loss) -> TensorFunctions:
    name = loss.name
    return TensorFunctions(
        lambda outputs, labels: image_losses(outputs, labels, names=[name])[f"losses/{name}"],
        lambda outputs: image_losses(outputs, names=[name])[f"inconsistencies/{name}"],
    )


MIOU, MISCOVERAGE, PIXEL_BRIER = map(_functions, PIXEL_LOSSES)
