"""Confidence scores of exits: top-1, top difference, entropy, and their aggregates over images.

Every score is in [0, 1], and higher if the exit is more confident. Scores are computed in float64
and returned as float32, the dtype of thresholds. The three scores of classifiers are rounded to
multiples of 2**-24, as in `swiftsure.torch.scoring`: both give the same float32 numbers for the
same logits, so a record made here holds the confidences that the runtime will compute.
"""

import math
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure._lib.registry import Registry

__all__ = [
    "AGGREGATES",
    "IMAGE_SCORES",
    "SCORES",
    "entropy",
    "mean",
    "patch",
    "probabilities",
    "quantile",
    "top1",
    "top_diff",
]

SCORE_VERSION = 1
"""Raise this when a score gives other numbers: it keeps shards with older confidences from being
resumed."""

STEPS = 2.0**24
"""Confidences of classifiers are rounded to multiples of 1 / STEPS.

NumPy and PyTorch agree on float64 values to about 1e-15 only, and float32 is fine enough near 0 to
show such differences. Multiples of 2**-24 are evenly spaced and exact in float32, so both libraries
give the same bits, except with a probability of about 1e-8 per value.
"""

SHIFT = (math.sqrt(5.0) - 1.0) / 2.0
"""Rounding is floor(x * STEPS + SHIFT).

With a shift of 1/2, values would often lie exactly between two multiples, where an error of 1e-16
decides: logits are multiples of a power of 2, and the top difference of two classes is half their
margin where that is small. The golden ratio is the number furthest from all simple fractions.
"""


def probabilities(logits: ArrayLike, temperature: ArrayLike = 1.0) -> NDArray[np.float64]:
    """Return the softmax of `logits` / `temperature` over the last axis, in float64.

    A logit of −inf is a masked class, with probability 0. The class with the largest logit is the
    most probable one, also where rounding makes several probabilities equal.

    Raises
    ------
    ValueError
        If a logit is NaN or +inf, or all logits of a sample are −inf.

    Examples
    --------
    >>> probabilities([0.0, 0.0]).tolist()
    [0.5, 0.5]
    """
    values = checks.numbers("logits", logits, np.float64)
    top, largest = values.argmax(axis=-1), values.max(axis=-1, keepdims=True)
    if not np.isfinite(largest).all():
        _refuse_infinite(largest[..., 0])
    scale = np.asarray(temperature, dtype=np.float64)
    values = np.exp(values / scale - largest / scale)
    result: NDArray[np.float64] = values / values.sum(axis=-1, keepdims=True)
    # Logits that differ by less than 1e-16 have equal probabilities, and argmax takes the
    # first. The runtime predicts from the logits, so raise the right one by the last bit.
    tied = result.argmax(axis=-1) != top
    if tied.any():
        rows = np.nonzero(tied)
        where = *rows, top[rows]
        result[where] = np.nextafter(result[where], 1.0)
    return result


def _refuse_infinite(largest: NDArray[np.float64]) -> NoReturn:
    """Raise for samples whose largest logit is not finite."""
    bad = np.argwhere(~np.isfinite(largest))
    where = tuple(bad[0].tolist())
    raise ValueError(
        "`logits` must be finite, or −inf for masked classes, with at least one finite logit in"
        f" every row, but the largest logit of row {where} is {largest[where]} ({len(bad)} such"
        " rows): look for overflows, or for rows in which every class is masked."
    )


def _as_score(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return _clipped(np.floor(values * STEPS + SHIFT) / STEPS)


def _clipped(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.minimum(np.maximum(values, 0.0), 1.0).astype(np.float32)  # faster than np.clip


def top1(probabilities: ArrayLike) -> NDArray[np.float32]:
    """Return the largest class probability; `probabilities` has the classes last.

    Examples
    --------
    >>> top1([[0.7, 0.2, 0.1]])
    array([0.7], dtype=float32)
    """
    return _as_score(np.asarray(probabilities, dtype=np.float64).max(axis=-1))


def top_diff(probabilities: ArrayLike) -> NDArray[np.float32]:
    """Return the difference between the two largest class probabilities.

    Examples
    --------
    >>> top_diff([[0.7, 0.2, 0.1]])
    array([0.5], dtype=float32)
    """
    values = _with_two_classes(probabilities)
    two = np.partition(values, -2, axis=-1)[..., -2:]
    return _as_score(two[..., 1] - two[..., 0])


def entropy(probabilities: ArrayLike) -> NDArray[np.float32]:
    """Return 1 − H / log(n_classes), where H is the entropy of the class probabilities.

    Examples
    --------
    >>> entropy([[0.5, 0.5], [1.0, 0.0]])
    array([0., 1.], dtype=float32)
    """
    values = _with_two_classes(probabilities)
    logs = np.log(values, out=np.zeros_like(values), where=values > 0)
    return _as_score(1.0 + (values * logs).sum(axis=-1) / np.log(values.shape[-1]))


def _with_two_classes(probabilities: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(probabilities, dtype=np.float64)
    if values.shape[-1] < 2:
        raise ValueError(
            f"`probabilities` must have at least 2 classes, but got {values.shape[-1]}."
        )
    return values


def mean(pixels: ArrayLike) -> NDArray[np.float32]:
    """Return the mean pixel confidence of an image; `pixels` is (..., height, width).

    Examples
    --------
    >>> mean([[[0.0, 1.0], [1.0, 1.0]]])
    array([0.75], dtype=float32)
    """
    return _clipped(_pixels(pixels).mean(axis=(-2, -1)))


def quantile(pixels: ArrayLike, q: float = 0.25) -> NDArray[np.float32]:
    """Return the `q`-quantile of an image's pixel confidences (linear interpolation).

    Examples
    --------
    >>> quantile([[[0.0, 1.0], [1.0, 1.0]]])
    array([0.75], dtype=float32)
    """
    values = _pixels(pixels)
    if not 0 <= q <= 1:
        raise ValueError(f"`q` must be in [0, 1], but got {q}.")
    return _clipped(np.quantile(values.reshape(*values.shape[:-2], -1), q, axis=-1))


def patch(pixels: ArrayLike, size: int | tuple[int, int] = 50) -> NDArray[np.float32]:
    """Return the mean confidence of the least confident patch of an image.

    It uses a summed-area table, so the cost does not depend on the patch size.

    Parameters
    ----------
    pixels : (..., height, width)
        Pixel confidences.
    size : int or (height, width)
        Patch size; a patch larger than the image is cropped to it.

    Examples
    --------
    >>> patch([[[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]], size=2)
    array([0.75], dtype=float32)
    """
    values = _pixels(pixels)
    rows, columns = (size, size) if not isinstance(size, tuple) else size
    rows = min(checks.count("size", rows), values.shape[-2])
    columns = min(checks.count("size", columns), values.shape[-1])
    table = np.zeros((*values.shape[:-2], values.shape[-2] + 1, values.shape[-1] + 1))
    table[..., 1:, 1:] = values.cumsum(axis=-2).cumsum(axis=-1)
    sums = (
        table[..., rows:, columns:]
        - table[..., :-rows, columns:]
        - table[..., rows:, :-columns]
        + table[..., :-rows, :-columns]
    )
    return _clipped(sums.min(axis=(-2, -1)) / (rows * columns))


def _pixels(pixels: ArrayLike) -> NDArray[np.float64]:
    values: NDArray[np.float64] = checks.numbers("pixels", pixels, np.float64)
    if values.ndim < 2 or values.size == 0:
        raise ValueError(
            "`pixels` must have shape (..., height, width) and not be empty, but got "
            f"{checks.shape_text(values.shape)}."
        )
    return values


Score = Callable[[NDArray[Any]], NDArray[np.float32]]

SCORES: Registry[Score] = Registry("score", top1, top_diff, entropy)
"""Scores of one predictive distribution, by name."""

AGGREGATES: Registry[Score] = Registry("aggregate", mean, quantile, patch)
"""Functions from pixel scores to an image score, by name."""

IMAGE_SCORES: Registry[Score] = Registry("score")
"""Scores of images with a distribution at every pixel, (..., height, width, n_classes), by name.

For example, "patch_top1" is the smallest mean over patches of the pixels' top-1. All are in [0, 1].
"""


def _image_score(aggregate: Score, score: Score) -> Score:
    return lambda probabilities: aggregate(score(probabilities))


for (_a, _over_pixels), (_s, _of_pixel) in product(AGGREGATES.items(), SCORES.items()):
    IMAGE_SCORES.register(_image_score(_over_pixels, _of_pixel), f"{_a}_{_s}")


def are_probabilities(values: NDArray[Any]) -> bool:
    """Return whether what may be logits, with the classes last, are probabilities."""
    totals = values.sum(axis=-1, dtype=np.float64)
    return bool(values.shape[-1] > 1 and (values >= 0).all() and np.allclose(totals, 1, atol=1e-3))


def warn_of_probabilities(
    values: NDArray[Any], stacklevel: int = 3, *, what: str = "`logits`", use: str = ""
) -> None:
    """Warn if what should be logits, with the classes last, are probabilities."""
    if are_probabilities(values):
        warnings.warn(
            f"{what} look like probabilities; another softmax would make them less confident: use"
            f" {use}a model without its last softmax.",
            stacklevel=stacklevel,
        )
