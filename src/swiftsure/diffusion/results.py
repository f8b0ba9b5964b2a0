"""Results of early-exit diffusion: images, exits and costs."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from swiftsure.run import same_exits, threshold_levels

__all__ = ["Generated", "joined"]


@dataclass(frozen=True)
class Generated:
    """Generated images, their exits and costs.

    Attributes
    ----------
    images : (n, channels, height, width)
        Clipped to [-1, 1].
    exits : (n, n_steps)
        Exit that each image took at each step, 0-based.
    layers : (n,)
        Mean number of blocks per step.
    flops : (n,)
        FLOPs of the whole generation.
    max_skipped, min_taken : (n,)
        Largest confidence at an exit that was not taken, and smallest at one that was: every
        threshold between them gives the same image. NaN if no confidences were computed.
    """

    images: Tensor
    exits: NDArray[np.int64]
    layers: NDArray[np.float64]
    flops: NDArray[np.float64]
    max_skipped: NDArray[np.float32]
    min_taken: NDArray[np.float32]
    strict: bool = False

    def same_at(self, thresholds: ArrayLike) -> NDArray[np.bool_]:
        """Return a mask of the thresholds, (K,), that give each image unchanged, (n, K)."""
        levels = threshold_levels("thresholds", thresholds)
        skipped, taken = self.max_skipped[:, None], self.min_taken[:, None]
        return same_exits(levels, skipped, taken, strict=self.strict)

    def pixels(self) -> NDArray[np.uint8]:
        """Return the images as bytes, (n, height, width, channels)."""
        scaled = (self.images + 1).mul(127.5).round().clamp(0, 255)
        return scaled.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()


def joined(parts: list[Generated]) -> Generated:
    """Concatenate the results of all batches."""
    if len(parts) == 1:
        return parts[0]
    arrays = ("exits", "layers", "flops", "max_skipped", "min_taken")
    return Generated(
        images=torch.cat([part.images for part in parts]),
        strict=parts[0].strict,
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays},
    )
