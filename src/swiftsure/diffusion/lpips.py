"""LPIPS: perceptual distance between two images, by their AlexNet features.

Zhang et al., *The Unreasonable Effectiveness of Deep Features as a Perceptual Metric* (CVPR 2018),
version 0.1, with AlexNet: the same as `lpips.LPIPS(net="alex")`, which the paper uses. Weights are
read from published files; the library ships none.
"""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate, max_pool2d, relu

from swiftsure._lib import checks
from swiftsure._lib.files import npz
from swiftsure.diffusion.image_losses import compare_images
from swiftsure.losses import LPIPS, Loss, TensorFunctions
from swiftsure.torch.state_dicts import plain_state_dict

__all__ = ["Lpips"]

MEAN = (-0.030, -0.088, -0.188)
DEVIATION = (0.458, 0.448, 0.450)
"""Normalisation of images in [-1, 1]: subtract the mean, divide by the deviation."""

MIN_SIDE = 31
"""Minimum image side; smaller images leave nothing for AlexNet's later layers."""

TINY = 1e-10


class Layer(NamedTuple):
    """A convolution of AlexNet, and its number in torchvision's `features`."""

    number: int
    shape: tuple[int, int, int, int]
    stride: int
    padding: int
    pooled: bool


LAYERS = (
    Layer(0, (64, 3, 11, 11), 4, 2, pooled=False),
    Layer(3, (192, 64, 5, 5), 1, 2, pooled=True),
    Layer(6, (384, 192, 3, 3), 1, 1, pooled=True),
    Layer(8, (256, 384, 3, 3), 1, 1, pooled=False),
    Layer(10, (256, 256, 3, 3), 1, 1, pooled=False),
)
"""AlexNet's convolutions; `pooled` ones have 3 x 3 max pooling in front."""

Weights = Mapping[str, Tensor]


class Lpips(Loss):
    """LPIPS as a loss in [0, 1]: the published distance, clipped at 1.

    Distances above 1 are possible but rare; a policy's promise is about the clipped distance.

    Parameters
    ----------
    weights
        Tensors under any of the published names; see `load`.
    side : int, optional
        First enlarge images whose shorter side is smaller than this (bilinear); the loss is then
        called "lpips_64", for example. LPIPS was made for images of 64 pixels and more: AlexNet's
        first layer keeps only 7 x 7 positions of a 32-pixel image, and noisy images get nearly as
        small a distance as blurred ones.

    Raises
    ------
    ValueError
        If a tensor is missing or has the wrong shape; the error names it.
    """

    def __init__(self, weights: Mapping[str, Any], side: int | None = None) -> None:
        network = LpipsNetwork(weights, side)
        super().__init__(
            LPIPS.name if side is None else f"{LPIPS.name}_{side}",
            LPIPS.range,
            LPIPS.of,
            tensors=TensorFunctions(network, lambda outputs: network(outputs, outputs[-1])),
        )

    def __call__(
        self, images: Tensor, others: Tensor, image_range: tuple[float, float] = (-1, 1)
    ) -> Tensor:
        """Return the loss of each pair of images, (n,); see `compare_images`."""
        return compare_images(self, images, others, image_range)

    @classmethod
    def load(cls, *files: str | os.PathLike[str], side: int | None = None) -> Self:
        """Read the weights.

        Parameters
        ----------
        *files
            One file with all weights, or separate files for AlexNet and LPIPS's own linear layers.
            Each is npz (kernels height first, as in the JAX ports), safetensors, or a state dict of
            `lpips` or torchvision (`.pth`, read as plain tensors). If AlexNet is missing,
            torchvision's is used; without any file, the `lpips` package's weights are.
        side : int, optional
            Enlarge smaller images to this side.

        Raises
        ------
        ValueError
            If a file does not hold LPIPS weights; the error names the missing tensor.
        ImportError
            If torchvision or `lpips` is needed but not installed.
        """
        if not files:
            return cls(_installed("lpips", "LPIPS", net="alex", verbose=False), side)
        weights: dict[str, Any] = {}
        for file in files:
            weights |= _read(Path(file))
        linear = any(name in weights for k in range(len(LAYERS)) for name in _linear_names(k))
        alexnet = any(n in weights for k, la in enumerate(LAYERS) for n in _kernel_names(k, la))
        if linear and not alexnet:
            weights |= _installed("torchvision.models", "alexnet", weights="DEFAULT")
        return cls(weights, side)


class LpipsNetwork(nn.Module):
    """The network of LPIPS; parameters as in `Lpips`."""

    def __init__(self, weights: Mapping[str, Any], side: int | None) -> None:
        super().__init__()
        self.side = None if side is None else checks.count("side", side, MIN_SIDE)
        found = plain_state_dict(weights)
        for k, layer in enumerate(LAYERS):
            kernel = _find_tensor(found, _kernel_names(k, layer), layer.shape)
            bias = _find_tensor(
                found,
                [
                    each.replace("weight", "bias").replace("kernel", "bias")
                    for each in _kernel_names(k, layer)
                ],
                layer.shape[:1],
            )
            linear = _find_tensor(found, _linear_names(k), (1, layer.shape[0], 1, 1))
            self.register_buffer(f"kernel{k}", kernel)
            self.register_buffer(f"bias{k}", bias)
            self.register_buffer(f"linear{k}", linear)
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1))
        self.register_buffer("deviation", torch.tensor(DEVIATION).view(1, 3, 1, 1))

    def forward(self, outputs: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return the distance of images in [0, 1] to those in `labels`, (n, len(outputs))."""
        return torch.stack([self.distance(images, labels) for images in outputs], dim=1)

    def distance(self, images: Tensor, others: Tensor) -> Tensor:
        """Return the distance of each pair of images in [0, 1]."""
        channels, height, width = images.shape[1:]
        smallest = min(height, width)
        if channels != 3 or (self.side is None and smallest < MIN_SIDE):
            raise ValueError(
                f"`images` must have 3 channels and at least {MIN_SIDE} x {MIN_SIDE} pixels for"
                f" LPIPS, but got {checks.shape_text((channels, height, width))}."
            )
        if self.side is not None and smallest < self.side:
            size = [round(self.side * n / smallest) for n in (height, width)]
            images, others = (
                interpolate(each, size=size, mode="bilinear") for each in (images, others)
            )
        # Both in one batch, which takes less than twice as long.
        both = torch.cat([images, others]) * 2 - 1
        layer = (both - self.get_buffer("mean")) / self.get_buffer("deviation")
        total = torch.zeros(len(images), device=images.device)
        for k, described in enumerate(LAYERS):
            layer = self._layer(k, described, layer)
            length = layer.square().sum(dim=1, keepdim=True).sqrt()
            one, two = (layer / (length + TINY)).chunk(2)
            weighted = conv2d((one - two).square(), self.get_buffer(f"linear{k}"))
            total = total + weighted.mean(dim=(1, 2, 3))
        return total

    def _layer(self, k: int, described: Layer, before: Tensor) -> Tensor:
        if described.pooled:
            before = max_pool2d(before, kernel_size=3, stride=2)
        kernel, bias = self.get_buffer(f"kernel{k}"), self.get_buffer(f"bias{k}")
        return relu(conv2d(before, kernel, bias, described.stride, described.padding))


def _kernel_names(k: int, layer: Layer) -> list[str]:
    """Return the names of a convolution's kernel in torchvision, `lpips` and the JAX ports."""
    number = layer.number
    return [
        f"features.{number}.weight",
        f"net.slice{k + 1}.{number}.weight",
        f"AlexNet_0.Conv_{k}.kernel",
    ]


def _linear_names(k: int) -> list[str]:
    return [
        f"lin{k}.model.1.weight",
        f"lins.{k}.model.1.weight",
        f"NetLinLayer_{k}.Conv_0.kernel",
    ]


def _find_tensor(weights: Weights, names: Sequence[str], shape: Sequence[int]) -> Tensor:
    """Return the tensor with one of these names, in PyTorch's layout."""
    name = next((each for each in names if each in weights), None)
    if name is None:
        raise ValueError(
            f"The weights are not those of LPIPS with AlexNet: {names[0]} is missing (also called"
            f" {', '.join(names[1:])})."
        )
    tensor = weights[name].float()
    if name.endswith(".kernel"):
        tensor = tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"The weights are not those of LPIPS with AlexNet: {name} must have shape"
            f" {checks.shape_text(shape)}, but got {checks.shape_text(tensor.shape)}."
        )
    return tensor.contiguous().clone()


def _read(file: Path) -> dict[str, Any]:
    """Return the tensors of a file, by name."""
    if not file.is_file():
        raise ValueError(f"`files` must be existing files, but {file} is not one.")
    try:
        if file.suffix == ".npz":
            with npz(file) as arrays:
                held = {name: arrays[name] for name in arrays}
            numeric = {name: array for name, array in held.items() if array.dtype.kind in "fiu"}
            return {name: torch.from_numpy(array) for name, array in numeric.items()}
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(file))
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        return dict(plain_state_dict(loaded))
    except ImportError:
        raise
    except Exception as error:  # always name the broken file
        raise ValueError(
            f"{file} is not a state dict of plain tensors ({type(error).__name__})."
        ) from None


def _installed(module: str, maker: str, **options: Any) -> dict[str, Any]:
    """Return the state dict of a network from another package."""
    package = module.partition(".")[0]
    try:
        found: nn.Module = getattr(import_module(module), maker)(**options)
    except ImportError:
        raise ImportError(
            f"LPIPS needs weights: name a file that holds all of them, Lpips.load('FILE.npz'), or"
            f" install {package}."
        ) from None
    return dict(found.state_dict())
