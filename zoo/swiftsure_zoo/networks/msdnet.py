"""MSDNet: feature maps at several scales in parallel, so that early exits see coarse features.

Huang et al., *Multi-Scale Dense Networks for Resource Efficient Image Classification* (ICLR 2018),
as published in PyTorch by kalviny/MSDNet-PyTorch. Submodules keep the published names, so that
published weights load unchanged.

The state is the list of feature maps, finest first. Layers count from 1 through the whole network.
Some dense layers drop the finest scale, so lists are indexed from the coarsest: -1 is the map that
the heads read, -2 the next finer one, and so on.
"""

from collections.abc import Mapping, Sequence
from itertools import count, islice, pairwise
from math import ceil, floor
from typing import Any, Self

import torch
from torch import Tensor, nn

from swiftsure._lib import checks
from swiftsure_zoo.networks.published import (
    PublishedModel,
    check_counts,
    check_hyperparameters,
    check_images,
)

__all__ = ["MSDNet"]

STEM_STRIDES = {"cifar": 1, "imagenet": 4}
DATA = {"cifar10": ("cifar", 10), "cifar100": ("cifar", 100), "ImageNet": ("imagenet", 1000)}
"""Stem and number of classes for each data set with published networks."""

PUBLISHED = {
    "nBlocks": "n_blocks",
    "base": "base",
    "step": "step",
    "stepmode": "step_mode",
    "nChannels": "n_channels",
    "growthRate": "growth",
    "grFactor": "scale_factors",
    "bnFactor": "bottleneck_factors",
    "prune": "prune",
    "reduction": "reduction",
}
"""Maps published names of hyperparameters to ours."""


class MSDNet(PublishedModel):
    """A multi-scale dense network with an exit after every block.

    The defaults are the network published for anytime prediction on CIFAR.

    Parameters
    ----------
    n_classes : int
    stem : {"cifar", "imagenet"}
        First layers and width of the heads. "cifar": a 3 x 3 convolution and 128 channels, for
        images about 32 pixels wide at three scales. "imagenet": a strided 7 x 7 convolution with
        pooling and as many channels as the coarsest map, for images about 224 pixels wide at four
        scales.
    n_blocks : int
        Number of blocks, and of exits.
    base : int
        Dense layers in the first block.
    step : int
        Dense layers in every later block; with `step_mode` "lin_grow", step * i + 1 in block i,
        counted from 0.
    step_mode : {"even", "lin_grow"}
    n_channels : int
        Output channels of the stem, times the factor of the scale.
    growth : int
        Channels that a dense layer adds, times the factor of the scale. From the second scale on
        the product must be even: half comes from the scale itself, half from the finer one.
    scale_factors : sequence of int
        One per scale, finest first; each scale is half as wide and high as the one before.
    bottleneck_factors : sequence of int, optional
        One per scale: a 1 x 1 convolution before each 3 x 3 one has at most this many times the
        channels of its output. None: no such convolutions.
    prune : {"max", "min"}
        When the finest scales are dropped: "max" drops one at a time at equal intervals, each
        followed by a transition; "min" drops a scale only when no exit depends on it any more, with
        transitions after one third and two thirds of the layers.
    reduction : float
        Share of channels that transitions keep, in [0, 1]; 0 for no transitions.

    Examples
    --------
    >>> model = MSDNet(n_classes=10, n_blocks=2, base=1, step=1, n_channels=4, growth=2).eval()
    >>> [tuple(logits.shape) for logits in model(torch.zeros(3, 3, 32, 32))]
    [(3, 10), (3, 10)]
    """

    def __init__(
        self,
        n_classes: int,
        *,
        stem: str = "cifar",
        n_blocks: int = 7,
        base: int = 4,
        step: int = 2,
        step_mode: str = "even",
        n_channels: int = 16,
        growth: int = 6,
        scale_factors: Sequence[int] = (1, 2, 4),
        bottleneck_factors: Sequence[int] | None = (1, 2, 4),
        prune: str = "max",
        reduction: float = 0.5,
    ) -> None:
        super().__init__()
        checks.count("n_classes", n_classes, 2)
        checks.choice("stem", stem, STEM_STRIDES)
        checks.choice("prune", prune, ["max", "min"])
        checks.count("n_channels", n_channels)
        if not 0 <= reduction <= 1:
            raise ValueError(f"`reduction` must be in [0, 1], but got {reduction}.")
        factors = check_counts("scale_factors", scale_factors)
        bottlenecks: Sequence[int | None] = [None] * len(factors)
        if bottleneck_factors is not None:
            bottlenecks = check_counts("bottleneck_factors", bottleneck_factors, len(factors))
        _check_growth(growth, factors)
        sizes = _block_sizes(n_blocks, base, step, step_mode)
        n_layers, n_scales = sum(sizes), len(factors)

        self.n_exits = n_blocks
        self.stride = STEM_STRIDES[stem] * 2 ** (n_scales - 1)
        self.blocks = nn.ModuleList()
        self.classifier = nn.ModuleList()
        width, numbers = n_channels, count(1)
        stage: list[nn.Module] = [Stem(stem, width, factors, min(n_scales, n_layers + 1))]
        for size in sizes:
            for layer in islice(numbers, size):
                before = _scales_after(layer - 1, n_layers, n_scales, prune)
                after = _scales_after(layer, n_layers, n_scales, prune)
                # Heads read the coarsest map, and features move down one scale per layer: near
                # the end, the finer maps can no longer reach a head and are not computed.
                n_live = min(after, n_layers - layer + 1)
                dropping = before > after
                stage.append(
                    DenseLayer(width, growth, factors, bottlenecks, after, n_live, dropping)
                )
                width += growth
                thirds = (n_layers // 3, 2 * n_layers // 3)
                narrows = dropping if prune == "max" else layer in thirds
                if narrows and reduction > 0:
                    kept = floor(reduction * width)
                    stage.append(Transition(width, kept, factors[-after:]))
                    width = kept
            self.blocks.append(nn.Sequential(*stage))
            self.classifier.append(Head(width * factors[-1], n_classes, stem))
            stage = []

    def begin(self, images: Tensor) -> Tensor:
        """Return the images, (n, 3, height, width); raises if their size does not fit the heads."""
        # Two strided convolutions and a pooling over 2 x 2 must leave one pixel.
        return check_images(images, range(4 * self.stride + 1, 12 * self.stride + 1))

    def advance(self, exit_index: int, state: Any) -> list[Tensor]:
        """Run one block; the first includes the stem."""
        maps: list[Tensor] = self.blocks[exit_index](state)
        return maps

    def head(self, exit_index: int, state: list[Tensor]) -> Tensor:
        """Return the logits of one exit, from the coarsest map."""
        logits: Tensor = self.classifier[exit_index](state[-1])
        return logits

    @classmethod
    def from_hyperparameters(cls, hyperparameters: Mapping[str, Any]) -> Self:
        """Return an untrained network from hyperparameters under their published names.

        Parameters
        ----------
        hyperparameters
            data ("cifar10", "cifar100", "ImageNet"), nBlocks, base, step, stepmode, nChannels,
            growthRate, grFactor, bnFactor, bottleneck, prune, reduction; optionally nScales.
        """
        given = check_hyperparameters(
            hyperparameters, ["data", "bottleneck", *PUBLISHED], ["nScales"]
        )
        n_scales = given.get("nScales")
        factors = check_counts("grFactor", given["grFactor"])
        if n_scales not in (None, len(factors)):
            raise ValueError(
                f"`nScales` must be the number of factors in grFactor, {len(factors)}, but got"
                f" {n_scales}."
            )
        stem, n_classes = DATA[checks.choice("data", given["data"], DATA)]
        ours = {PUBLISHED[name]: value for name, value in given.items() if name in PUBLISHED}
        if not given["bottleneck"]:
            ours["bottleneck_factors"] = None
        return cls(n_classes, stem=stem, **ours)


class ConvUnit(nn.Module):
    """Convolution, normalisation and ReLU, optionally after the same at 1 x 1 to `inner`."""

    def __init__(
        self, n_in: int, n_out: int, *, kernel: int = 3, stride: int = 1, inner: int | None = None
    ) -> None:
        super().__init__()
        layers = [] if inner is None else _conv_norm_relu(n_in, inner, 1, 1)
        layers += _conv_norm_relu(n_in if inner is None else inner, n_out, kernel, stride)
        self.net = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """Return the features after all layers."""
        result: Tensor = self.net(features)
        return result


class Stem(nn.Module):
    """Makes maps at every scale from images, and returns the `n_live` coarsest."""

    def __init__(self, kind: str, width: int, factors: Sequence[int], n_live: int) -> None:
        super().__init__()
        self.n_live = n_live
        widths = [width * factor for factor in factors]
        first: nn.Module = ConvUnit(3, widths[0])
        if kind == "imagenet":
            first = nn.Sequential(
                nn.Conv2d(3, widths[0], kernel_size=7, stride=2, padding=3),
                nn.BatchNorm2d(widths[0]),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            )
        rest = [ConvUnit(n_in, n_out, stride=2) for n_in, n_out in pairwise(widths)]
        self.layers = nn.ModuleList([first, *rest])

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the maps, finest first."""
        maps = []
        features = images
        for layer in self.layers:
            features = layer(features)
            maps.append(features)
        return maps[-self.n_live :]


class DenseLayer(nn.Module):
    """Adds channels to the map of every kept scale, from that map and the next finer one.

    Parameters
    ----------
    width, growth : int
        Input channels and added channels, both before the factor of a scale.
    n_kept : int
        Number of coarsest scales that the layer has weights for.
    n_live : int
        Number of coarsest scales that later layers need.
    dropping : bool
        Whether the input has one more, finer scale.
    """

    def __init__(
        self,
        width: int,
        growth: int,
        factors: Sequence[int],
        bottlenecks: Sequence[int | None],
        n_kept: int,
        n_live: int,
        dropping: bool,
    ) -> None:
        super().__init__()
        self.n_live = n_live
        finest = len(factors) - n_kept
        self.layers = nn.ModuleList()
        for scale in range(finest, len(factors)):
            added = growth * factors[scale]
            own = (width * factors[scale], bottlenecks[scale])
            finer = None
            if scale > finest or dropping:
                finer = (width * factors[scale - 1], bottlenecks[scale - 1])
            self.layers.append(ScaleGrowth(added, own, finer))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the maps with the new channels, for the scales needed later."""
        return [self.layers[scale](maps, scale) for scale in range(-self.n_live, 0)]


class ScaleGrowth(nn.Module):
    """One scale of a dense layer; `own` and `finer` are (channels, bottleneck factor)."""

    def __init__(
        self, added: int, own: tuple[int, int | None], finer: tuple[int, int | None] | None
    ) -> None:
        super().__init__()
        n_out = added if finer is None else added // 2
        self.conv_down = None if finer is None else _bottlenecked(*finer, n_out, stride=2)
        self.conv_normal = _bottlenecked(*own, n_out, stride=1)

    def forward(self, maps: list[Tensor], scale: int) -> Tensor:
        """Return the map of a scale (counted from the coarsest, -1) with the new channels."""
        parts = [maps[scale]]
        if self.conv_down is not None:
            parts.append(self.conv_down(maps[scale - 1]))
        parts.append(self.conv_normal(maps[scale]))
        return torch.cat(parts, dim=1)


class Transition(nn.Module):
    """Narrows the map of every scale by a 1 x 1 convolution."""

    def __init__(self, width: int, kept: int, factors: Sequence[int]) -> None:
        super().__init__()
        if kept < 1:
            raise ValueError(f"`reduction` must keep at least one of {width} channels: raise it.")
        self.m = nn.ModuleList(ConvUnit(width * f, kept * f, kernel=1) for f in factors)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the maps with fewer channels."""
        return [self.m[scale](maps[scale]) for scale in range(-len(maps), 0)]


class Head(nn.Module):
    """Classifier on the coarsest map."""

    def __init__(self, n_in: int, n_classes: int, stem: str) -> None:
        super().__init__()
        width = 128 if stem == "cifar" else n_in
        self.m = nn.Sequential(
            ConvUnit(n_in, width, stride=2), ConvUnit(width, width, stride=2), nn.AvgPool2d(2)
        )
        self.linear = nn.Linear(width, n_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits, (n, n_classes)."""
        logits: Tensor = self.linear(self.m(features).flatten(1))
        return logits


def _conv_norm_relu(n_in: int, n_out: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(n_in, n_out, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(n_out), nn.ReLU(inplace=True)]


def _bottlenecked(n_in: int, factor: int | None, n_out: int, stride: int) -> ConvUnit:
    inner = None if factor is None else min(n_in, factor * n_out)
    return ConvUnit(n_in, n_out, stride=stride, inner=inner)


def _scales_after(layer: int, n_layers: int, n_scales: int, prune: str) -> int:
    """Return how many scales are left after a layer; 0 is the stem."""
    if prune == "min":
        return min(n_scales, n_layers - layer + 1)
    return n_scales - max(0, layer - 1) // ceil(n_layers / n_scales)


def _block_sizes(n_blocks: int, base: int, step: int, step_mode: str) -> list[int]:
    """Return the number of dense layers of each block."""
    checks.count("n_blocks", n_blocks)
    checks.count("base", base)
    checks.count("step", step)
    grows = checks.choice("step_mode", step_mode, ["even", "lin_grow"]) == "lin_grow"
    return [base] + [step * i + 1 if grows else step for i in range(1, n_blocks)]


def _check_growth(growth: int, factors: list[int]) -> None:
    checks.count("growth", growth)
    odd = [growth * factor for factor in factors[1:] if growth * factor % 2]
    if odd:
        raise ValueError(
            f"`growth` times a factor of `scale_factors` must be even from the second scale on, but"
            f" got {odd[0]}."
        )
