"""Losses for generated images, one number per pair in [0, 1]: LPIPS, SSIM and mean squared error.

Predictions are images, (n, n_settings, channels, height, width), with the full model's last; labels
are images of the same size, one per sample. Images are uint8, or floats in [0, 1].

LPIPS runs a network, so only its name and range are here: `swiftsure.diffusion.Lpips` computes it.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.losses.base import LOSSES, Loss, LossRange

__all__ = ["LPIPS", "MSE", "SSIM", "mse", "ssim"]

Array = NDArray[Any]

_BELL = [math.exp(-(place**2) / (2 * 1.5**2)) for place in range(-5, 6)]
WINDOW = [height / sum(_BELL) for height in _BELL]
"""SSIM's window along one axis, a Gaussian with standard deviation 1.5 (Wang et al., 2004)."""
STABILISERS = (0.01**2, 0.03**2)


def mse(images: Any, others: Any) -> Any:
    """Return the mean squared difference between paired images in [0, 1], arrays or tensors.

    Examples
    --------
    >>> mse(np.zeros((1, 3, 2, 2)), np.full((1, 3, 2, 2), 0.5))
    array([0.25])
    """
    return ((images - others) ** 2).mean((-3, -2, -1))


def ssim(images: Any, others: Any) -> Any:
    """Return (1 - SSIM) / 2 of each pair of images in [0, 1], arrays or tensors.

    SSIM (Wang et al., 2004) is in [-1, 1] and is 1 for equal images, so the loss is in [0, 1]. It
    is the mean over channels and over all positions where the window fits. Give float64:
    variances are small differences of large numbers.
    """
    height, width = images.shape[-2:]
    if min(height, width) < len(WINDOW):
        raise ValueError(
            f"`images` must be at least {len(WINDOW)} pixels wide and high for SSIM, but got"
            f" {height} x {width}."
        )
    a, b = _blurred(images), _blurred(others)
    luminance, contrast = STABILISERS
    variances = _blurred(images**2) - a**2 + _blurred(others**2) - b**2
    covariance = _blurred(images * others) - a * b
    alike = (2 * a * b + luminance) * (2 * covariance + contrast)
    similarity = alike / ((a**2 + b**2 + luminance) * (variances + contrast))
    return ((1 - similarity.mean((-3, -2, -1))) / 2).clip(0.0, 1.0)  # rounding


def _blurred(images: Any) -> Any:
    """Return the window's mean at every position where it fits."""
    height, width = (side - len(WINDOW) + 1 for side in images.shape[-2:])
    across = sum(w * images[..., k : k + width] for k, w in enumerate(WINDOW))
    return sum(w * across[..., k : k + height, :] for k, w in enumerate(WINDOW))


def _images(name: str, given: Any, ndim: int) -> Array:
    """Return images as float64 in [0, 1]."""
    array = checks.numbers(name, given)
    if array.ndim != ndim:
        axes = "(n, n_settings, channels, height, width)" if ndim == 5 else "(n, channels, …)"
        raise ValueError(
            f"`{name}` must be images of shape {axes}, but got {checks.shape_text(array.shape)}."
        )
    if array.dtype == np.uint8:
        return array / 255.0
    checks.finite(name, array)
    return checks.within(name, array.astype(np.float64), 0.0, 1.0, slack=1e-6)


def _loss(name: str, distance: Callable[[Array, Array], Array]) -> Loss:
    def against_labels(predictions: Array, labels: Array) -> Array:
        made, true = _images("predictions", predictions, 5), _images("labels", labels, 4)
        if true.shape != (made.shape[0], *made.shape[2:]):
            raise ValueError(
                f"`labels` must be one image a sample, of shape"
                f" {checks.shape_text((made.shape[0], *made.shape[2:]))}, but got"
                f" {checks.shape_text(true.shape)}."
            )
        return distance(made, true[:, None])

    def against_last(predictions: Array) -> Array:
        made = _images("predictions", predictions, 5)
        return distance(made, made[:, -1:])

    tensors = f"swiftsure.torch.losses:{name.upper()}"
    return LOSSES.register(
        Loss(name, LossRange(0, 1), "prediction", against_labels, against_last, tensors)
    )


MSE = _loss("mse", mse)
SSIM = _loss("ssim", ssim)
LPIPS = LOSSES.register(Loss("lpips", LossRange(0, 1), "prediction"))
