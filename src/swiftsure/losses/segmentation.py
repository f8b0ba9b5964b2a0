"""Losses of segmentation, one number per image: mIoU, miscoverage, and Brier for distributions.

All three average over the pixels of an image, and risks average over images: pixels of one image
depend on each other, so a sample is an image, however many pixels it has.

Against labels, void pixels (`VOID`, and negative numbers) are ignored in both label and prediction.
Against the last exit, all pixels count, because that comparison is also made without labels.

The paper (section 5.2) describes these losses in words only, and its code differs: it divides the
sum of IoUs by the number of all classes, so that classes absent from an image count as missed; and
it gives void pixels labels drawn from the last exit.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.losses.base import LOSSES, Loss, LossRange

__all__ = [
    "MIOU",
    "MISCOVERAGE",
    "PIXEL_BRIER",
    "VOID",
    "miou",
    "miou_inconsistency",
    "miscoverage",
    "miscoverage_inconsistency",
    "pixel_brier",
    "pixel_brier_inconsistency",
]

Array = NDArray[Any]

VOID = 255
"""Label of pixels without a class, as in published data sets; negative labels are void too."""


def miou(probabilities: Array, labels: Array) -> Array:
    """Return 1 minus the mean IoU over the classes in the label or prediction of an image.

    Parameters
    ----------
    probabilities : (n, n_exits, height, width, n_classes)
    labels : (n, height, width)
        Class numbers, or void.

    Returns
    -------
    losses : (n, n_exits), in [0, 1]

    Raises
    ------
    ValueError
        If a label is not a class, or an image has no labelled pixel and so no loss.
    """
    return _miou(_confusions(probabilities, _truth(probabilities, labels)))


def miou_inconsistency(probabilities: Array) -> Array:
    """Return 1 minus the mean IoU of an exit's prediction with the last exit's, over all pixels."""
    return _miou(_confusions(probabilities, _last(probabilities)))


def miscoverage(probabilities: Array, labels: Array) -> Array:
    """Return the share of labelled pixels whose most probable class is wrong, in [0, 1]."""
    return _miscoverage(_confusions(probabilities, _truth(probabilities, labels)))


def miscoverage_inconsistency(probabilities: Array) -> Array:
    """Return the share of all pixels whose prediction is not the last exit's."""
    return _miscoverage(_confusions(probabilities, _last(probabilities)))


def pixel_brier(probabilities: Array, labels: Array) -> Array:
    """Return the mean Brier loss (Eq. 7 of the paper) over the labelled pixels, in [0, 2]."""
    truth = _truth(probabilities, labels)
    of_label = np.take_along_axis(
        probabilities, np.maximum(truth, 0)[:, None, ..., None], axis=-1
    ).squeeze(-1)
    losses = np.square(probabilities).sum(axis=-1) - 2.0 * of_label + 1.0
    labelled = np.broadcast_to(truth[:, None] >= 0, losses.shape)
    mean: Array = losses.mean(axis=(-2, -1), where=labelled)
    return mean


def pixel_brier_inconsistency(probabilities: Array) -> Array:
    """Return the mean over pixels of the squared distance to the last exit's distribution.

    It is in [0, 2]. As for classifiers, it is the exact mean of the difference of the Brier losses,
    over labels drawn from the last exit.
    """
    _of_images(probabilities)
    distances = np.square(probabilities - probabilities[:, -1:]).sum(axis=-1)
    mean: Array = distances.mean(axis=(-2, -1))
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


def _miou(confusions: Array) -> Array:
    both = np.diagonal(confusions, axis1=-2, axis2=-1)
    either = confusions.sum(axis=-1) + confusions.sum(axis=-2) - both
    shares = both / np.maximum(either, 1)
    loss: Array = 1.0 - shares.sum(axis=-1) / (either > 0).sum(axis=-1)
    return loss


def _miscoverage(confusions: Array) -> Array:
    right = np.trace(confusions, axis1=-2, axis2=-1)
    loss: Array = 1.0 - right / confusions.sum(axis=(-2, -1))
    return loss


MIOU = LOSSES.register(
    Loss(
        "miou",
        LossRange(0, 1),
        of="prediction",
        against_labels=miou,
        against_last=miou_inconsistency,
    )
)
MISCOVERAGE = LOSSES.register(
    Loss(
        "miscoverage",
        LossRange(0, 1),
        of="prediction",
        against_labels=miscoverage,
        against_last=miscoverage_inconsistency,
    )
)
PIXEL_BRIER = LOSSES.register(
    Loss(
        "pixel_brier",
        LossRange(0, 2),
        of="distribution",
        against_labels=pixel_brier,
        against_last=pixel_brier_inconsistency,
    )
)
