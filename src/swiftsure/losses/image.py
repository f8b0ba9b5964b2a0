"""Losses of generated images, one number per pair: LPIPS, SSIM and mean squared error, in [0, 1].

Predictions are images, (n, n_settings, channels, height, width), with the full model's last; labels
are images of the same size, one per sample. Images are uint8, or floats in [0, 1].

LPIPS runs a network, so only its name and range are here: `swiftsure.diffusion` computes it, and
the other two on tensors.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.losses.base import LOSSES, Loss, LossRange

__all__ = ["LPIPS", "MSE", "SSIM", "mse", "ssim"]

Array = NDArray[Any]

WINDOW = 11
"""Side of SSIM's window, a Gaussian with standard deviation `DEVIATION` (Wang et al., 2004)."""
DEVIATION = 1.5
STABILISERS = (0.01**2, 0.03**2)


def mse(images: Array, others: Array) -> Array:
    """Return the mean squared difference of each pair of images in [0, 1].

    Examples
    --------
    >>> mse(np.zeros((1, 3, 2, 2)), np.full((1, 3, 2, 2), 0.5))
    array([0.25])
    """
    loss: Array = np.square(images - others).mean(axis=(-3, -2, -1))
    return loss


def ssim(images: Array, others: Array) -> Array:
    """Return (1 - SSIM) / 2 of each pair of images in [0, 1].

    SSIM (Wang et al., 2004) is in [-1, 1] and is 1 for equal images, so the loss is in [0, 1]. It
    is the mean over channels and over all positions where the window fits.
    """
    from scipy import ndimage

    height, width = images.shape[-2:]
    if min(height, width) < WINDOW:
        raise ValueError(
            f"`images` must be at least {WINDOW} pixels wide and high for SSIM, but got"
            f" {height} x {width}."
        )

    def blurred(values: Array) -> Array:
        deviations = (0.0,) * (values.ndim - 2) + (DEVIATION, DEVIATION)
        edge = WINDOW // 2
        radius = (0,) * (values.ndim - 2) + (edge, edge)
        smooth: Array = ndimage.gaussian_filter(values, deviations, radius=radius)
        return smooth[..., edge:-edge, edge:-edge]

    a, b = blurred(images), blurred(others)
    luminance, contrast = STABILISERS
    variances = blurred(images**2) - a**2 + blurred(others**2) - b**2
    covariance = blurred(images * others) - a * b
    alike = (2 * a * b + luminance) * (2 * covariance + contrast)
    similarity = alike / ((a**2 + b**2 + luminance) * (variances + contrast))
    loss: Array = (1 - similarity.mean(axis=(-3, -2, -1))) / 2
    return np.clip(loss, 0.0, 1.0)  # rounding


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
        return distance(made, np.broadcast_to(true[:, None], made.shape))

    def against_last(predictions: Array) -> Array:
        made = _images("predictions", predictions, 5)
        return distance(made, np.broadcast_to(made[:, -1:], made.shape))

    return LOSSES.register(Loss(name, LossRange(0, 1), "prediction", against_labels, against_last))


def _needs_a_network(images: Array, others: Array) -> Array:  # noqa: ARG001 (as all distances)
    raise ValueError(
        "Loss 'lpips' runs a network: record it with swiftsure.diffusion.sweep, or compute it with"
        " swiftsure.diffusion.Lpips."
    )


MSE = _loss("mse", mse)
SSIM = _loss("ssim", ssim)
LPIPS = _loss("lpips", _needs_a_network)
