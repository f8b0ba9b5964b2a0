"""Training batches of noisy images."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.diffusion.images import Images
from swiftsure.diffusion import Schedule

__all__ = ["Batch", "batches", "noisy", "weights_of_times"]


class Batch(NamedTuple):
    """Noisy images, their times, the noise, and labels if there are any."""

    images: Tensor
    times: Tensor
    noise: Tensor
    labels: Tensor | None


def batches(
    part: Images, recipe: dict[str, Any], schedule: Schedule, random: torch.Generator
) -> Iterator[Batch]:
    """Yield batches forever: images in random order, half of them mirrored."""
    plan, n, device = recipe["training"], len(part.labels), part.images.device
    size = plan["batch"]
    if n < size:
        raise ValueError(f"the recipe's batch must be at most the {n} images, but is {size}")
    weights = weights_of_times(schedule, plan.get("most_signal", math.inf)).to(device)
    while True:
        order = torch.randperm(n, device=device, generator=random)
        for index in order[: n - n % size].split(size):
            clean = part.images[index].float() / 127.5 - 1
            mirrored = torch.rand(size, 1, 1, 1, device=device, generator=random) < 0.5
            clean = torch.where(mirrored, clean.flip(3), clean)
            labels = part.labels[index]
            if "guidance" in recipe:
                hidden = torch.rand(size, device=device, generator=random) < plan["unlabelled"]
                labels = labels.masked_fill(hidden, recipe["model"]["n_classes"] - 1)
            times = torch.multinomial(weights, size, replacement=True, generator=random)
            yield noisy(clean, labels, times, recipe, schedule, random)


def weights_of_times(schedule: Schedule, most_signal: float) -> Tensor:
    """Return the sampling weight of each time, (T,).

    Times with little noise dominate the error but hardly change the images. So if the variance of
    the signal exceeds `most_signal` times that of the noise, the weight falls with that ratio
    (Hang et al., 2023).
    """
    signal = torch.from_numpy(schedule.signal).float()
    return (most_signal * (1 - signal) / signal).clamp(max=1)


def noisy(
    clean: Tensor,
    labels: Tensor,
    times: Tensor,
    recipe: dict[str, Any],
    schedule: Schedule,
    random: torch.Generator,
) -> Batch:
    """Return noisy images at given times."""
    noise = torch.randn(clean.shape, device=clean.device, generator=random)
    conditioned = recipe["model"].get("n_classes") is not None
    return Batch(
        schedule.noised(clean, noise, times),
        schedule.times(times),
        noise,
        labels if conditioned else None,
    )
