"""`compare_images`: the loss of pairs of images, as tensors."""

from typing import Any

import torch
from torch import Tensor, nn

from swiftsure._lib import checks
from swiftsure.losses import Loss

__all__ = ["compare_images"]

RANGES = ((-1, 1), (0, 1))
"""Supported pixel ranges."""

TOLERANCE = 1e-3
"""Tolerance outside the range, for rounding, including half precision."""


@torch.no_grad()
def compare_images(
    loss: Loss, images: Tensor, others: Tensor, image_range: tuple[float, float] = (-1, 1)
) -> Tensor:
    """Return the loss of each pair of images, (n,), clipped to the range of the loss.

    Parameters
    ----------
    loss : Loss
        Such as `swiftsure.losses.SSIM` or `Lpips.load(file)`; it gets pixels in [0, 1].
    images, others : (n, channels, height, width)
    image_range : (-1, 1) or (0, 1)
        Range of the pixels.

    Raises
    ------
    ValueError
        If the shapes differ, or a pixel is NaN or outside the declared range.

    Examples
    --------
    >>> from swiftsure.losses import MSE
    >>> compare_images(MSE, torch.full((1, 3, 2, 2), -1.0), torch.full((1, 3, 2, 2), 0.0))
    tensor([0.2500])
    """
    if image_range not in [*RANGES, *map(list, RANGES)]:
        raise ValueError(f"`image_range` must be (-1, 1) or (0, 1), but got {image_range!r}.")
    low, high = image_range
    made, true = _scaled("images", images, low, high), _scaled("others", others, low, high)
    if images.ndim != 4 or images.shape != others.shape or images.numel() == 0:
        raise ValueError(
            "`images` and `others` must have one shape (n, channels, height, width), but got"
            f" {checks.shape_text(images.shape)} and {checks.shape_text(others.shape)}."
        )
    function = loss.function("tensors.against_labels")
    if isinstance(function, nn.Module):
        function.to(images.device)
    losses: Tensor = function([made], true)[:, 0]
    return losses.clamp(loss.range.low, loss.range.high)


def _scaled(name: str, images: Any, low: float, high: float) -> Tensor:
    """Return the images rescaled to [0, 1]."""
    if not isinstance(images, Tensor):
        kind = type(images).__name__
        raise TypeError(f"`{name}` must be a tensor, but got a {kind}: torch.from_numpy?")
    values = images.float()
    inside = (values >= low - TOLERANCE) & (values <= high + TOLERANCE)  # False for NaN
    if not inside.all():
        raise ValueError(
            f"`{name}` must lie in [{low:g}, {high:g}], as declared, but got"
            f" {float(values[~inside].flatten()[0]):g}: clip or rescale them, or declare another"
            " `image_range`."
        )
    return ((values - low) / (high - low)).clamp(0, 1)
