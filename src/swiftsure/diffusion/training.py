"""DeeDiff's training losses: denoising, and two that teach exits to estimate their own error."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from swiftsure.diffusion.network import DiffusionNetwork, check_network

__all__ = ["DeeDiffLosses", "deediff_losses"]


class DeeDiffLosses(NamedTuple):
    """Losses of a batch; DeeDiff minimises their unweighted sum.

    Attributes
    ----------
    denoising
        Mean squared error of the full output's noise.
    uncertainty
        Sum over exits of the mean squared error between the uncertainty and tanh of the absolute
        error of the exit's noise.
    layers
        Sum over exits of the mean squared error of their noise, weighted by 1 minus the uncertainty
        ("uncertainty-aware layer-wise").
    exits : (n_exits,)
        Mean squared error of each exit's noise, with the full output last; detached, for reports.
    """

    denoising: Tensor
    uncertainty: Tensor
    layers: Tensor
    exits: Tensor

    @property
    def total(self) -> Tensor:
        """Sum of the three losses."""
        return self.denoising + self.uncertainty + self.layers


def deediff_losses(
    model: DiffusionNetwork,
    images: Tensor,
    times: Tensor,
    noise: Tensor,
    labels: Tensor | None = None,
) -> DeeDiffLosses:
    """Return DeeDiff's training losses on a batch.

    Parameters
    ----------
    model : DiffusionNetwork
        With early exits, such as `swiftsure_zoo.UViT`.
    images : (n, channels, height, width)
        Noisy images, from `Schedule.noised`.
    times : (n,)
        As the network sees them, from `Schedule.times`.
    noise
        The noise in the images.

    Examples
    --------
    >>> from swiftsure.diffusion import Schedule
    >>> from swiftsure_zoo import UViT
    >>> schedule, model = Schedule(), UViT(image_size=8, width=16, depth=2, n_heads=2)
    >>> clean, noise, times = torch.zeros(4, 3, 8, 8), torch.randn(4, 3, 8, 8), torch.arange(4)
    >>> noisy = schedule.noised(clean, noise, times)
    >>> losses = deediff_losses(model, noisy, schedule.times(times), noise)
    >>> losses.total.backward()
    >>> tuple(losses.exits.shape)
    (4,)
    """
    check_network(model, "; guidance comes after training")
    if noise.shape != images.shape:
        raise ValueError(
            f"`noise` must have the images' shape {tuple(images.shape)}, but got"
            f" {tuple(noise.shape)}."
        )
    batch = (images, times) if labels is None else (images, times, labels)
    uncertainty = layers = torch.zeros((), device=images.device)
    errors = []
    last = model.n_exits - 1
    state = model.begin(batch)
    for k in range(last):
        state = model.advance(k, state)
        off = model.estimate(k, state).float() - noise
        unsure = model.uncertainty(state).float()
        squares = off.square()
        uncertainty = uncertainty + mse_loss(unsure, off.detach().abs().tanh())
        layers = layers + ((1 - unsure.detach()) * squares).mean()
        errors.append(squares.detach().mean())
    estimate = model.estimate(last, model.advance(last, state)).float()
    denoising = mse_loss(estimate, noise)
    return DeeDiffLosses(denoising, uncertainty, layers, torch.stack([*errors, denoising.detach()]))
