"""The network of the demonstration, plain and with exits."""

from collections import OrderedDict
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from safetensors.torch import load_file
from torch import Tensor, nn

from swiftsure import demo
from swiftsure._lib import checks
from swiftsure.torch.cutting import CutModel
from swiftsure.torch.heads import attach_heads
from swiftsure.torch.replaying import ReplayedModel

__all__ = [
    "load_weights",
    "plain_network",
    "prepared",
    "trained_exits",
    "untrained_exits",
    "untrained_network",
]

Model = TypeVar("Model", bound=nn.Module)

CUTS = ("first", "second", "third")
"""The stages of the network after which there is a head."""


def plain_network() -> nn.Module:
    """Return the network, trained on Fashion-MNIST, without exits, in evaluation mode.

    Examples
    --------
    >>> images = demo.sample_images().images[:4]
    >>> plain_network()(prepared(images)).shape
    torch.Size([4, 10])
    """
    return load_weights(untrained_network(), demo.FOLDER / "weights.safetensors")


def trained_exits() -> CutModel | ReplayedModel:
    """Return the network with four exits, trained, in evaluation mode.

    `swiftsure.demo.record()` was measured with it.

    Examples
    --------
    >>> images = demo.sample_images().images[:4]
    >>> [tuple(logits.shape) for logits in trained_exits()(prepared(images))]
    [(4, 10), (4, 10), (4, 10), (4, 10)]
    """
    model = untrained_exits(plain_network())
    load_weights(model.heads, demo.FOLDER / "heads.safetensors")
    return model.eval()


def prepared(images: ArrayLike) -> Tensor:
    """Return uint8 images (n, 3, height, width) as normalised inputs of the networks."""
    array = np.asarray(images)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1] != 3:
        raise ValueError(
            "`images` must be uint8 of shape (n, 3, height, width), but got"
            f" {array.dtype} of shape {checks.shape_text(array.shape)}."
        )
    described = demo.description()
    mean, std = (torch.tensor(described[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (torch.from_numpy(array) / 255 - mean) / std


class Residual(nn.Module):
    """Two convolutions whose result is added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        inner = torch.relu(self.first(x))
        return torch.relu(x + self.second(inner))


def untrained_network() -> nn.Sequential:
    """Return an untrained network for Fashion-MNIST: three cheap stages and a deep, wide one."""
    return nn.Sequential(
        OrderedDict(
            first=nn.Sequential(_conv(3, 32, stride=2), _conv(32, 32)),
            second=nn.Sequential(_conv(32, 64), _conv(64, 64)),
            third=nn.Sequential(_conv(64, 96), _conv(96, 96)),
            fourth=nn.Sequential(*(Residual(96) for _ in range(3))),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            linear=nn.Linear(96, 10),
        )
    )


def _conv(n_in: int, n_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1), nn.ReLU())


def untrained_exits(network: nn.Module) -> CutModel | ReplayedModel:
    """Return the network with an untrained linear head on pooled features after three stages."""
    example = torch.zeros(1, 3, demo.IMAGE_SIDE, demo.IMAGE_SIDE)
    heads = [
        nn.Sequential(nn.AvgPool2d(pool), nn.Flatten(), nn.Linear(width * (14 // pool) ** 2, 10))
        for width, pool in ((32, 2), (64, 2), (96, 7))
    ]
    return attach_heads(network, CUTS, example, heads=heads)


def load_weights(model: Model, file: Path) -> Model:
    """Return a model with weights of a file, which may be in half precision to save space."""
    own = model.state_dict()
    model.load_state_dict({name: t.to(own[name].dtype) for name, t in load_file(file).items()})
    return model.eval()
