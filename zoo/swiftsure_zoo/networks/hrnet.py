"""Parts of HRNet, whose branches at several resolutions run in parallel and exchange features.

Wang et al., *Deep High-Resolution Representation Learning for Visual Recognition* (TPAMI 2020).
Submodules keep the published names. Every part takes its input and the pixels to compute, and
passes these to its convolutions, which interpolate the other pixels (`Conv`).
"""

from collections.abc import Sequence
from functools import reduce
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate

__all__ = [
    "EXPANSION",
    "Bottleneck",
    "Chain",
    "Conv",
    "Exchange",
    "Pixels",
    "Transition",
    "joined",
    "norm",
    "run",
]

EXPANSION = 4
"""Output channels of a bottleneck, as a multiple of its width."""

REACH = 3
"""Radius, in pixels, from which a masked convolution interpolates."""

MOMENTUM = 0.01
"""Momentum of batch normalisation, in training."""


class Pixels:
    """The pixels to compute, at any resolution: those that an exit is not confident about.

    Parameters
    ----------
    logits : (n, n_classes, height, width)
    threshold : float
        Pixels with a class probability above this are left out.
    """

    def __init__(self, logits: Tensor, threshold: float) -> None:
        self.confidence = logits.softmax(dim=1).amax(dim=1, keepdim=True)
        self.threshold = threshold
        self.known: dict[tuple[int, ...], Tensor] = {}

    def at(self, size: Sequence[int]) -> Tensor:
        """Return whether to compute each pixel of a map, (n, 1, height, width)."""
        key = tuple(size)
        if key not in self.known:  # cached: many convolutions share a size
            confidence = interpolate(self.confidence, key, mode="nearest")
            self.known[key] = confidence <= self.threshold
        return self.known[key]


class Guided:
    """Marks modules that take their input and the pixels to compute (None: all)."""


def run(layer: nn.Module, features: Tensor, pixels: Pixels | None) -> Tensor:
    """Return a layer's output; passes the pixels to compute if it takes them."""
    result: Tensor = layer(features, pixels) if isinstance(layer, Guided) else layer(features)
    return result


class Conv(nn.Conv2d, Guided):
    """A convolution; if `masked`, only of some pixels, with the others interpolated from these.

    Interpolation weights fall with the squared distance at a learned rate. As published, they sum
    to one over the whole neighbourhood, computed or not, so pixels far from any computed one get
    values near zero.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        bias: bool = False,
        masked: bool = False,
    ) -> None:
        super().__init__(n_in, n_out, kernel, stride, padding=kernel // 2, bias=bias)
        self.masked = masked
        if masked:
            self.Lambda = nn.Parameter(torch.tensor(3.0))
            # Not a buffer: in published networks the table is a parameter.
            self.square_dis = nn.Parameter(_squared_distances(), requires_grad=False)

    def forward(self, features: Tensor, pixels: Pixels | None = None) -> Tensor:
        """Return the convolved features."""
        found = super().forward(features)
        if pixels is None or not self.masked:
            return found
        computed = pixels.at(found.shape[2:])
        weights = torch.exp(-self.Lambda.square() * self.square_dis)
        weights = weights / (weights.sum() + 1e-5)
        # All channels share the weights, so convolve them as samples with one channel.
        kept = (found * computed).flatten(0, 1).unsqueeze(1)
        filled = conv2d(kept, weights[None, None].to(kept.dtype), padding=REACH)
        return torch.where(computed, found, filled.view_as(found))


class Chain(nn.Sequential, Guided):
    """A sequence of layers."""

    def forward(self, features: Tensor, pixels: Pixels | None = None) -> Tensor:
        """Return the features after all layers."""
        for layer in self:
            features = run(layer, features, pixels)
        return features


class BasicBlock(nn.Module, Guided):
    """Two 3 x 3 convolutions with a shortcut."""

    def __init__(self, width: int, masked: bool) -> None:
        super().__init__()
        self.conv1 = Conv(width, width, masked=masked)
        self.bn1 = norm(width)
        self.conv2 = Conv(width, width, masked=masked)
        self.bn2 = norm(width)

    def forward(self, features: Tensor, pixels: Pixels | None) -> Tensor:
        """Return features of the same shape."""
        inner = self.bn1(self.conv1(features, pixels)).relu()
        result: Tensor = (self.bn2(self.conv2(inner, pixels)) + features).relu()
        return result


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, with a shortcut."""

    def __init__(self, n_in: int, width: int) -> None:
        super().__init__()
        n_out = EXPANSION * width
        self.conv1 = Conv(n_in, width, 1)
        self.bn1 = norm(width)
        self.conv2 = Conv(width, width)
        self.bn2 = norm(width)
        self.conv3 = Conv(width, n_out, 1)
        self.bn3 = norm(n_out)
        self.downsample = None
        if n_in != n_out:
            self.downsample = nn.Sequential(Conv(n_in, n_out, 1), norm(n_out))

    def forward(self, features: Tensor) -> Tensor:
        """Return features with `EXPANSION` times the width."""
        inner = self.bn1(self.conv1(features)).relu()
        inner = self.bn2(self.conv2(inner)).relu()
        around = features if self.downsample is None else self.downsample(features)
        result: Tensor = (self.bn3(self.conv3(inner)) + around).relu()
        return result


class Transition(nn.ModuleList):
    """Adds a branch at half the resolution, and adapts the widths of the existing ones."""

    def __init__(self, before: Sequence[int], after: Sequence[int], masked: bool) -> None:
        super().__init__()
        for n_in, n_out in zip(before, after, strict=False):
            same = n_in == n_out
            self.append(nn.Identity() if same else Chain(*_conv_norm(n_in, n_out, masked=masked)))
        new = _conv_norm(before[-1], after[-1], stride=2, masked=masked)
        self.append(Chain(Chain(*new)))

    def forward(self, maps: list[Tensor], pixels: Pixels | None) -> list[Tensor]:
        """Return the maps, finest first; the new one comes from the coarsest."""
        sources = [*maps, maps[-1]]
        return [run(layer, source, pixels) for layer, source in zip(self, sources, strict=True)]


class Exchange(nn.Module):
    """Blocks on every branch; then every branch gets the sum of all, resized to its resolution."""

    def __init__(self, widths: Sequence[int], n_blocks: Sequence[int], masked: bool) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            Chain(*(BasicBlock(width, masked) for _ in range(n)))
            for width, n in zip(widths, n_blocks, strict=True)
        )
        every = range(len(widths))
        self.fuse_layers = nn.ModuleList(
            nn.ModuleList(_between(widths, source, target, masked) for source in every)
            for target in every
        )

    def forward(self, maps: list[Tensor], pixels: Pixels | None) -> list[Tensor]:
        """Return maps of the same shapes."""
        maps = [branch(map_, pixels) for branch, map_ in zip(self.branches, maps, strict=True)]
        return [self._fused(target, maps, pixels) for target in range(len(maps))]

    def _fused(self, target: int, maps: list[Tensor], pixels: Pixels | None) -> Tensor:
        size = maps[target].shape[2:]
        layers = cast(nn.ModuleList, self.fuse_layers[target])
        parts = (
            resized(run(layer, map_, pixels), size)
            for layer, map_ in zip(layers, maps, strict=True)
        )
        return reduce(torch.add, parts).relu()


def resized(features: Tensor, size: Sequence[int]) -> Tensor:
    """Return a map at another resolution."""
    if features.shape[2:] == size:
        return features
    return interpolate(features, tuple(size), mode="bilinear", align_corners=False)


def joined(maps: list[Tensor]) -> Tensor:
    """Return all maps concatenated along channels, at the resolution of the first."""
    return torch.cat([resized(map_, maps[0].shape[2:]) for map_ in maps], dim=1)


def norm(width: int) -> nn.BatchNorm2d:
    """Return batch normalisation with the published momentum."""
    return nn.BatchNorm2d(width, momentum=MOMENTUM)


def _conv_norm(
    n_in: int, n_out: int, kernel: int = 3, *, stride: int = 1, masked: bool, relu: bool = True
) -> list[nn.Module]:
    layers = [Conv(n_in, n_out, kernel, stride=stride, masked=masked), norm(n_out)]
    return [*layers, nn.ReLU(inplace=True)] if relu else layers


def _between(widths: Sequence[int], source: int, target: int, masked: bool) -> nn.Module:
    """Return the layer from one branch to another, without upsampling to a finer one."""
    n_in, n_out = widths[source], widths[target]
    if source == target:
        return nn.Identity()
    if source > target:
        return Chain(*_conv_norm(n_in, n_out, 1, masked=masked, relu=False))
    halvings = [
        Chain(*_conv_norm(n_in, n_in, stride=2, masked=masked)) for _ in range(source + 1, target)
    ]
    return Chain(*halvings, Chain(*_conv_norm(n_in, n_out, stride=2, masked=masked, relu=False)))


def _squared_distances() -> Tensor:
    """Return squared distances to the centre, with a huge one at the centre to exclude it."""
    squares = torch.arange(-REACH, REACH + 1, dtype=torch.float32).square()
    table = squares[:, None] + squares
    table[REACH, REACH] = 1e5
    return table
