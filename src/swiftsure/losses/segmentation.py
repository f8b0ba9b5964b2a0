"""Segmentation losses, one number per image: mIoU, miscoverage, and Brier for distributions.

All three average over the pixels of an image, and risks average over images: pixels of one image
depend on each other, so a sample is an image, however many pixels it has.

Probabilities are (n, n_exits, height, width, n_classes) and labels (n, height, width). Against
labels, void pixels (`VOID`, and negative numbers) are ignored in both label and prediction.
Against the last exit, all pixels count, because that comparison is also made without labels.

The paper (section 5.2) describes these losses in words only, and its code differs: it divides the
sum of IoUs by the number of all classes, so that classes absent from an image count as missed; and
it gives void pixels labels drawn from the last exit.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.losses.base import LOSSES, Loss, LossRange
from swiftsure.losses.classification import brier, brier_inconsistency

__all__ = [
    "MIOU",
    "MISCOVERAGE",
    "PIXEL_BRIER",
    "PIXEL_LOSSES",
    "VOID",
    "miou",
    "miscoverage",
    "pixel_brier",
    "pixel_brier_inconsistency",
]

Array = NDArray[Any]

VOID = 255
"""Label of pixels without a class, as in published data sets; negative labels are void too."""


def miou(confusions: Any) -> Any:
    """Return 1 minus the mean IoU over the classes in the label or prediction of an image.

    The confusion matrices, in pixels, are on the last two axes of an array or tensor.
    """
    both = confusions.diagonal(0, -2, -1)
    either = confusions.sum(-1) + confusions.sum(-2) - both
    return 1.0 - (both / either.clip(1)).sum(-1) / (either > 0).sum(-1)


def miscoverage(confusions: Any) -> Any:
    """Return the share of pixels whose most probable class is wrong, in [0, 1]."""
    return 1.0 - confusions.diagonal(0, -2, -1).sum(-1) / confusions.sum((-2, -1))


def pixel_brier(probabilities: Array, labels: Array) -> Array:
    """Return the mean Brier loss (Eq. 7 of the paper) over the labelled pixels, in [0, 2]."""
    truth = _truth(probabilities, labels)
    losses: Array = brier(probabilities, np.maximum(truth, 0))
    labelled = np.broadcast_to(truth[:, None] >= 0, losses.shape)
    mean: Array = losses.mean(axis=(-2, -1), where=labelled)
    return mean


def pixel_brier_inconsistency(probabilities: Array) -> Array:
    """Return the mean over pixels of the squared distance to the last exit's distribution."""
    _of_images(probabilities)
    mean: Array = brier_inconsistency(probabilities).mean(axis=(-2, -1))
    return mean


def _of_images(probabilities: Array) -> None:
    if probabilities.ndim != 5:
        raise ValueError(
            "Losses of segmentation need `probabilities` of shape (n, n_exits, height, width,"
            f" n_classes), but got {checks.shape_text(probabilities.shape)}."
        )


def _truth(probabilities: Array, labels: Array) -> Array:
    """Return class numbers, with -1 for void, (n, height, width)."""
    _of_images(probabilities)
    n, _, height, width, n_classes = probabilities.shape
    axes = {"n": n, "height": height, "width": width}
    labels = checks.of_shape("labels", checks.numbers("labels", labels), axes)
    void = (labels < 0) | ((labels == VOID) & (n_classes <= VOID))
    strange = ~void & ((labels >= n_classes) | (labels != np.rint(labels)))
    if strange.any():
        sample, row, column = np.argwhere(strange)[0].tolist()
        raise ValueError(
            f"`labels` must be class numbers below {n_classes}, or {VOID} for void, but sample"
            f" {sample} has {labels[sample, row, column]}."
        )
    unlabelled = np.flatnonzero(void.all(axis=(1, 2)))
    if len(unlabelled):
        raise ValueError(
            f"`labels` must be of some class somewhere, but sample {unlabelled[0]} is all void"
            f" ({len(unlabelled)} such): leave it out."
        )
    return np.where(void, np.int64(-1), labels).astype(np.int64)


def _last(probabilities: Array) -> Array:
    """Return the last exit's predictions, (n, height, width)."""
    _of_images(probabilities)
    predictions: Array = probabilities[:, -1].argmax(axis=-1)
    return predictions


def _confusions(probabilities: Array, truth: Array) -> Array:
    """Return the confusion matrix of every image and exit, in pixels."""
    n_classes = probabilities.shape[-1]
    predictions = probabilities.argmax(axis=-1)
    counts = [
        [_confusion(found, true, n_classes) for found in exits]
        for exits, true in zip(predictions, truth, strict=True)
    ]
    return np.asarray(counts)


def _confusion(found: Array, true: Array, n_classes: int) -> Array:
    labelled = true >= 0
    pairs = true[labelled] * n_classes + found[labelled]
    return np.bincount(pairs, minlength=n_classes**2).reshape(n_classes, n_classes)


def _of_confusions(name: str, measure: Callable[[Array], Array]) -> Loss:
    return LOSSES.register(
        Loss(
            name,
            LossRange(0, 1),
            "prediction",
            lambda p, labels: measure(_confusions(p, _truth(p, labels))),
            lambda p: measure(_confusions(p, _last(p))),
            tensors=f"swiftsure.torch.segmentation:{name.upper()}",
        )
    )


MIOU = _of_confusions("miou", miou)
MISCOVERAGE = _of_confusions("miscoverage", miscoverage)
PIXEL_BRIER = LOSSES.register(
    Loss(
        "pixel_brier",
        LossRange(0, 2),
        "distribution",
        pixel_brier,
        pixel_brier_inconsistency,
        tensors="swiftsure.torch.segmentation:PIXEL_BRIER",
    )
)
PIXEL_LOSSES = (MIOU, MISCOVERAGE, PIXEL_BRIER)
"""Losses that `swiftsure.torch.segmentation` computes together, in one pass over the pixels."""
