"""Image losses in [0, 1] on tensors; the counterpart of `swiftsure.losses.image`."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from swiftsure import checks
from swiftsure.losses import LossRange
from swiftsure.losses.image import DEVIATION, STABILISERS, WINDOW

__all__ = ["IMAGE_LOSSES", "ImageLoss", "Mse", "Ssim", "image_loss"]

RANGES = ((-1, 1), (0, 1))
"""Supported pixel ranges."""

TOLERANCE = 1e-3
"""Tolerance outside the range, for rounding, including half precision."""


class ImageLoss(nn.Module):
    """A distance between pairs of images, clipped to [0, 1].

    To add one, set `name`, implement `distance` and pass it to `sweep`.
    """

    name: str
    range = LossRange(0, 1)

    @abstractmethod
    def distance(self, images: Tensor, others: Tensor) -> Tensor:
        """Return the distance of each pair of images in [0, 1], (n,)."""

    @torch.no_grad()
    def forward(
        self, images: Tensor, others: Tensor, image_range: tuple[float, float] = (-1, 1)
    ) -> Tensor:
        """Return the loss of each pair, (n,).

        Parameters
        ----------
        images, others : (n, channels, height, width)
        image_range : (-1, 1) or (0, 1)
            Range of the pixels.

        Raises
        ------
        ValueError
            If the shapes differ, or a pixel is NaN or outside the declared range.
        """
        _refuse_arrays(images=images, others=others)
        if image_range not in [*RANGES, *map(list, RANGES)]:
            raise ValueError(f"`image_range` must be (-1, 1) or (0, 1), but got {image_range!r}.")
        if images.ndim != 4 or images.shape != others.shape or images.numel() == 0:
            raise ValueError(
                "`images` and `others` must have one shape (n, channels, height, width), but got"
                f" {checks.shape_text(images.shape)} and {checks.shape_text(others.shape)}."
            )
        low, high = image_range
        pair = [_scaled(name, x, low, high) for name, x in (("images", images), ("others", others))]
        return self.distance(*pair).clamp(self.range.low, self.range.high)


def _refuse_arrays(**given: Any) -> None:
    for name, images in given.items():
        if not isinstance(images, Tensor):
            kind = type(images).__name__
            raise TypeError(f"`{name}` must be a tensor, but got a {kind}: torch.from_numpy?")


def _scaled(name: str, images: Tensor, low: float, high: float) -> Tensor:
    """Return the images rescaled to [0, 1]."""
    values = images.float()
    inside = (values >= low - TOLERANCE) & (values <= high + TOLERANCE)  # False for NaN
    if not inside.all():
        raise ValueError(
            f"`{name}` must lie in [{low:g}, {high:g}], as declared, but got"
            f" {float(values[~inside].flatten()[0]):g}: clip or rescale them, or declare another"
            " `image_range`."
        )
    return ((values - low) / (high - low)).clamp(0, 1)


class Mse(ImageLoss):
    """Mean squared difference of pixels in [0, 1].

    Examples
    --------
    >>> Mse()(torch.full((1, 3, 2, 2), -1.0), torch.full((1, 3, 2, 2), 0.0))
    tensor([0.2500])
    """

    name = "mse"

    def distance(self, images: Tensor, others: Tensor) -> Tensor:
        """Return the distance of each pair."""
        return (images - others).square().mean(dim=(1, 2, 3))


class Ssim(ImageLoss):
    """(1 - SSIM) / 2, with the Gaussian window of Wang et al. (2004)."""

    name = "ssim"

    def __init__(self) -> None:
        super().__init__()
        places = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
        bell = (-places.square() / (2 * DEVIATION**2)).exp()
        self.register_buffer("window", bell / bell.sum())

    def distance(self, images: Tensor, others: Tensor) -> Tensor:
        """Return the distance of each pair."""
        if min(images.shape[2:]) < WINDOW:
            raise ValueError(
                f"`images` must be at least {WINDOW} pixels wide and high for SSIM, but got"
                f" {images.shape[2]} x {images.shape[3]}."
            )
        # In float64: variances are small differences of large numbers.
        x, y = images.double(), others.double()
        a, b = self._blurred(x), self._blurred(y)
        luminance, contrast = STABILISERS
        variances = self._blurred(x * x) - a * a + self._blurred(y * y) - b * b
        covariance = self._blurred(x * y) - a * b
        alike = (2 * a * b + luminance) * (2 * covariance + contrast)
        similarity = alike / ((a * a + b * b + luminance) * (variances + contrast))
        return (1 - similarity.mean(dim=(1, 2, 3))) / 2

    def _blurred(self, images: Tensor) -> Tensor:
        channels = images.shape[1]
        window: Tensor = self.window.expand(channels, 1, 1, WINDOW)  # type: ignore[operator]
        across = conv2d(images, window, groups=channels)
        return conv2d(across, window.transpose(2, 3), groups=channels)


def _lpips() -> ImageLoss:
    from swiftsure.diffusion.lpips import Lpips

    return Lpips.load()


IMAGE_LOSSES: dict[str, Callable[[], ImageLoss]] = {"lpips": _lpips, "ssim": Ssim, "mse": Mse}
"""Losses by name; "lpips" needs the `lpips` package."""


def image_loss(loss: str | ImageLoss) -> ImageLoss:
    """Return a loss by name; a loss object is returned unchanged."""
    if isinstance(loss, ImageLoss):
        return loss
    return IMAGE_LOSSES[checks.choice("losses", loss, IMAGE_LOSSES)]()
