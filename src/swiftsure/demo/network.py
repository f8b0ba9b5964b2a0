"""The small network of the demonstration, plain and with exits."""

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
    "prepared",
    "small_exits",
    "small_network",
    "untrained_exits",
    "untrained_network",
]

Model = TypeVar("Model", bound=nn.Module)


def small_network() -> nn.Module:
    """Return the small network, trained on Fashion-MNIST, without exits, in evaluation mode.

    Examples
    --------
    >>> images = demo.sample_images().images[:4]
    >>> small_network()(prepared(images)).shape
    torch.Size([4, 10])
    """
    return load_weights(untrained_network(), demo.FOLDER / "weights.safetensors")


def small_exits() -> CutModel | ReplayedModel:
    """Return the small network with three exits, trained, in evaluation mode.

    `swiftsure.demo.record()` was measured with it.

    Examples
    --------
    >>> images = demo.sample_images().images[:4]
    >>> [tuple(logits.shape) for logits in small_exits()(prepared(images))]
    [(4, 10), (4, 10), (4, 10)]
    """
    model = untrained_exits(small_network())
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


def untrained_network() -> nn.Module:
    """Return an untrained network with three convolutions for Fashion-MNIST."""
    layers: list[nn.Module] = []
    for n_in, n_out in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(n_in, n_out, 3, stride=2, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(n_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def untrained_exits(network: nn.Module) -> CutModel | ReplayedModel:
    """Return the small network with untrained exits after its first and second convolutions."""
    example = torch.zeros(1, 3, demo.IMAGE_SIDE, demo.IMAGE_SIDE)
    return attach_heads(network, ["2", "5"], example)


def load_weights(model: Model, file: Path) -> Model:
    """Return a model with weights of a file, which may be in half precision to save space."""
    own = model.state_dict()
    model.load_state_dict({name: t.to(own[name].dtype) for name, t in load_file(file).items()})
    return model.eval()
