"""Trained networks that come with the library: a small CNN, and the MSDNet of its assets."""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from safetensors.torch import load_file
from torch import Tensor, nn

from swiftsure import assets
from swiftsure._lib import checks
from swiftsure.torch.cutting import CutModel
from swiftsure.torch.heads import attach_heads
from swiftsure.torch.models.msdnet import MSDNet
from swiftsure.torch.replaying import ReplayedModel

__all__ = [
    "embedded_msdnet",
    "embedded_small_exits",
    "embedded_small_network",
    "prepared",
    "small_exits",
    "small_network",
]

Model = TypeVar("Model", bound=nn.Module)


def embedded_msdnet() -> MSDNet:
    """Return an MSDNet with five exits, trained on Fashion-MNIST, in evaluation mode.

    Its inputs come from `prepared`. `swiftsure.assets.record()` was measured with it.

    Examples
    --------
    >>> model = embedded_msdnet()
    >>> images = assets.sample_images().images[:4]
    >>> [tuple(logits.shape) for logits in model(prepared(images))]
    [(4, 10), (4, 10), (4, 10), (4, 10), (4, 10)]
    """
    weights = load_file(assets.NETWORK / "weights.safetensors")
    return _loaded(MSDNet(**assets.network()["model"]), weights)


def small_network() -> nn.Module:
    """Return an untrained network with three convolutions for Fashion-MNIST."""
    layers: list[nn.Module] = []
    for n_in, n_out in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(n_in, n_out, 3, stride=2, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(n_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def small_exits(network: nn.Module) -> CutModel | ReplayedModel:
    """Return the small network with untrained exits after its first and second convolutions."""
    return attach_heads(
        network, ["2", "5"], torch.zeros(1, 3, assets.IMAGE_SIDE, assets.IMAGE_SIDE)
    )


def embedded_small_network() -> nn.Module:
    """Return the small network, trained on Fashion-MNIST, in evaluation mode.

    Examples
    --------
    >>> images = assets.sample_images(small=True).images[:4]
    >>> embedded_small_network()(prepared(images)).shape
    torch.Size([4, 10])
    """
    return _loaded(small_network(), load_file(assets.SMALL / "weights.safetensors"))


def embedded_small_exits() -> CutModel | ReplayedModel:
    """Return the small network with three exits, trained, in evaluation mode.

    `swiftsure.assets.record(small=True)` was measured with it.

    Examples
    --------
    >>> images = assets.sample_images(small=True).images[:4]
    >>> [tuple(logits.shape) for logits in embedded_small_exits()(prepared(images))]
    [(4, 10), (4, 10), (4, 10)]
    """
    model = small_exits(embedded_small_network())
    _loaded(model.heads, load_file(assets.SMALL / "heads.safetensors"))
    return model.eval()


def _loaded(model: Model, stored: dict[str, Tensor]) -> Model:
    # Stored in half precision to save space, run in single precision.
    model.load_state_dict(
        {name: t.to(model.state_dict()[name].dtype) for name, t in stored.items()}
    )
    return model.eval()


def prepared(images: ArrayLike) -> Tensor:
    """Return uint8 images (n, 3, height, width) as normalised inputs of the embedded networks."""
    array = np.asarray(images)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1] != 3:
        raise ValueError(
            "`images` must be uint8 of shape (n, 3, height, width), but got"
            f" {array.dtype} of shape {checks.shape_text(array.shape)}."
        )
    described = assets.network(small=True)  # same mean and std as the MSDNet
    mean, std = (torch.tensor(described[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (torch.from_numpy(array) / 255 - mean) / std
