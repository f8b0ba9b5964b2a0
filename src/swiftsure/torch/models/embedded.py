"""The trained network that comes with the library."""

import numpy as np
import torch
from numpy.typing import ArrayLike
from safetensors.torch import load_file
from torch import Tensor

from swiftsure import assets, checks
from swiftsure.torch.models.msdnet import MSDNet

__all__ = ["embedded_msdnet", "prepared"]


def embedded_msdnet() -> MSDNet:
    """Return an MSDNet with five exits, trained on CIFAR-10, in evaluation mode.

    It takes what `prepared` makes of images, and is what `swiftsure.assets.record()` was measured
    with.

    Examples
    --------
    >>> model = embedded_msdnet()
    >>> images = assets.sample_images().images[:4]
    >>> [tuple(logits.shape) for logits in model(prepared(images))]
    [(4, 10), (4, 10), (4, 10), (4, 10), (4, 10)]
    """
    model = MSDNet(**assets.network()["model"])
    stored = load_file(assets.NETWORK / "weights.safetensors")
    # Stored in half precision to be small, run in single.
    model.load_state_dict(
        {name: t.to(model.state_dict()[name].dtype) for name, t in stored.items()}
    )
    return model.eval()


def prepared(images: ArrayLike) -> Tensor:
    """Return images (n, 3, height, width) of uint8 as the embedded network takes them."""
    array = np.asarray(images)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1] != 3:
        raise ValueError(
            "`images` must be uint8 of shape (n, 3, height, width), but got"
            f" {array.dtype} of shape {checks.shape_text(array.shape)}."
        )
    described = assets.network()
    mean, std = (torch.tensor(described[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (torch.from_numpy(array) / 255 - mean) / std
