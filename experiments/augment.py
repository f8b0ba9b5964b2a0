"""Augmentations of training images, computed on their device."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["augmented", "mixed"]


def augmented(images: Tensor, plan: dict[str, Any], random: torch.Generator) -> Tensor:
    """Return images cropped or shifted, mirrored, shaded and with a hole, as the plan says."""
    if "smallest_crop" in plan:
        images = cropped(images, plan["smallest_crop"], random)
    else:
        images = shifted(images, plan["padding"], random)
    if "shading" in plan:
        images = shaded(images, plan["shading"], random)
    return with_hole(images, plan["hole"], random)


def shifted(images: Tensor, padding: int, random: torch.Generator) -> Tensor:
    """Shift each image by up to `padding` pixels, and mirror half of them."""
    n, _, height, width = images.shape
    device = images.device
    rows = torch.arange(height, device=device).view(1, -1, 1)
    columns = torch.arange(width, device=device).view(1, 1, -1)
    mirrored = torch.where(whole(n, 2, random) == 1, width - 1 - columns, columns)
    padded = functional.pad(images, (padding,) * 4, mode="reflect")
    at_row = rows + whole(n, 2 * padding + 1, random)
    at_column = mirrored + whole(n, 2 * padding + 1, random)
    which = torch.arange(n, device=device).view(-1, 1, 1)
    return padded[which, :, at_row, at_column].permute(0, 3, 1, 2)


def cropped(images: Tensor, smallest: float, random: torch.Generator) -> Tensor:
    """Enlarge a random rectangle, at least a share `smallest`, of each image; mirror half."""
    n = len(images)
    area = uniform(n, smallest, 1.0, random)
    aspect = uniform(n, math.log(3 / 4), math.log(4 / 3), random).exp()
    high = (area / aspect).sqrt().clamp(max=1)
    wide = (area * aspect).sqrt().clamp(max=1)
    down = (1 - high) * uniform(n, -1.0, 1.0, random)
    right = (1 - wide) * uniform(n, -1.0, 1.0, random)
    sign = torch.where(uniform(n, -1.0, 1.0, random) < 0, -1.0, 1.0)
    zero = torch.zeros_like(high)
    places = torch.stack([sign * wide, zero, right, zero, high, down], dim=1).view(n, 2, 3)
    grid = functional.affine_grid(places, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def shaded(images: Tensor, strength: float, random: torch.Generator) -> Tensor:
    """Change brightness, contrast and colour by up to `strength`."""
    n = len(images)

    def factor() -> Tensor:
        return uniform(n, 1 - strength, 1 + strength, random).view(n, 1, 1, 1)

    grey = images.mean(dim=1, keepdim=True)
    images = grey + factor() * (images - grey)
    middle = images.mean(dim=(1, 2, 3), keepdim=True)
    images = middle + factor() * (images - middle)
    return images + (factor() - 1)


def with_hole(images: Tensor, side: int, random: torch.Generator) -> Tensor:
    """Cut a square hole into each image (cutout)."""
    if side == 0:
        return images
    n, _, height, width = images.shape
    rows = torch.arange(height, device=images.device).view(1, -1, 1)
    columns = torch.arange(width, device=images.device).view(1, 1, -1)
    far_down = (rows - whole(n, height, random)).abs()
    far_right = (columns - whole(n, width, random)).abs()
    return images.masked_fill(((far_down < side / 2) & (far_right < side / 2)).unsqueeze(1), 0.0)


def mixed(
    images: Tensor, targets: Tensor, plan: dict[str, Any], random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Apply CutMix to half of all batches and mixup to the others, as far as the plan has them."""
    if "cutmix" in plan and torch.rand(()) < 0.5:
        return cut_and_mixed(images, targets, plan["cutmix"], random)
    if "mixup" in plan:
        share = torch.distributions.Beta(plan["mixup"], plan["mixup"]).sample().item()
        other = torch.randperm(len(images), device=images.device, generator=random)
        return torch.lerp(images[other], images, share), torch.lerp(targets[other], targets, share)
    return images, targets


def cut_and_mixed(
    images: Tensor, targets: Tensor, strength: float, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Paste a rectangle of another image into each, and mix the targets by area (CutMix)."""
    height, width = images.shape[2:]
    share = torch.distributions.Beta(strength, strength).sample().item()
    high, wide = (round(side * (1 - share) ** 0.5) for side in (height, width))
    top = int(torch.randint(0, height - high + 1, ()))
    left = int(torch.randint(0, width - wide + 1, ()))
    other = torch.randperm(len(images), device=images.device, generator=random)
    images = images.clone()
    images[:, :, top : top + high, left : left + wide] = images[
        other, :, top : top + high, left : left + wide
    ]
    area = high * wide / (height * width)
    return images, (1 - area) * targets + area * targets[other]


def uniform(n: int, low: float, high: float, random: torch.Generator) -> Tensor:
    """Return n numbers between `low` and `high`."""
    return low + (high - low) * torch.rand(n, device=random.device, generator=random)


def whole(n: int, high: int, random: torch.Generator) -> Tensor:
    """Return n whole numbers below `high`, (n, 1, 1)."""
    return torch.randint(0, high, (n, 1, 1), device=random.device, generator=random)
