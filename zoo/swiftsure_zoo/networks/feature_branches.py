"""Convolutional feature branches with a stem and four stages: RegNet-Y, ResNet and MobileNetV3.

Dynamic Perceiver runs one in parallel with its latents. Submodules keep the published names, so
that published weights load unchanged.

| kind | paper | layout as in |
|---|---|---|
| "regnet" | Radosavovic et al., *Designing Network Design Spaces* (CVPR 2020) | torchvision |
| "resnet" | He et al., *Deep Residual Learning for Image Recognition* (CVPR 2016) | timm |
| "mobilenet_v3" | Howard et al., *Searching for MobileNetV3* (ICCV 2019), large | torchvision |
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import relu

from swiftsure._lib import checks
from swiftsure_zoo.networks.published import check_counts

__all__ = [
    "BRANCHES",
    "FeatureBranch",
    "feature_branch",
    "mobilenet_v3",
    "regnet",
    "resnet",
]

STAGES = 4

Activation = type[nn.ReLU] | type[nn.Hardswish]

BRANCHES: dict[str, dict[str, Any]] = {
    "regnet_y_400mf": {
        "kind": "regnet",
        "depths": (1, 3, 6, 6),
        "widths": (48, 104, 208, 440),
        "group_widths": (8, 8, 8, 8),
    },
    "regnet_y_800mf": {
        "kind": "regnet",
        "depths": (1, 3, 8, 2),
        "widths": (64, 144, 320, 784),
        "group_widths": (16, 16, 16, 16),
    },
    "resnet50_0375": {
        "kind": "resnet",
        "stem_width": 24,
        "depths": (3, 4, 6, 3),
        "widths": (24, 48, 96, 192),
    },
    "mobilenet_v3_large_0x75": {"kind": "mobilenet_v3", "width_multiplier": 0.75},
}
"""Branches published with Dynamic Perceiver: kind and hyperparameters."""


class FeatureBranch(NamedTuple):
    """The modules of a branch, for a network to register as its own.

    Parameters
    ----------
    modules : dict of str to Module
        All modules by their published names; "cnn_stem" is the stem.
    stages : list of str
        Paths of the four stages among the modules, such as "cnn_body.block1".
    widths : list of int
        Channels after the stem and after each stage.
    hidden : int, optional
        Width of the classifiers' hidden layer, if this kind has one.
    """

    modules: dict[str, nn.Module]
    stages: list[str]
    widths: list[int]
    hidden: int | None = None


def feature_branch(branch: str | Mapping[str, Any]) -> FeatureBranch:
    """Return a published branch by name, or any branch by `kind` and hyperparameters.

    Examples
    --------
    >>> feature_branch("resnet50_0375").widths
    [24, 96, 192, 384, 768]
    >>> feature_branch({"kind": "mobilenet_v3", "width_multiplier": 0.25}).widths
    [8, 16, 24, 40, 240]
    """
    if isinstance(branch, str):
        branch = BRANCHES[checks.choice("branch", branch, BRANCHES)]
    elif not isinstance(branch, Mapping):
        raise TypeError(
            f"`branch` must be a name, or a kind with its hyperparameters, but got {branch!r}."
        )
    options = dict(branch)
    build = KINDS[checks.choice("branch.kind", options.pop("kind", ""), KINDS)]
    for name in options:
        checks.choice("branch", name, ["kind", *signature(build).parameters])
    return build(**options)


# ---------------------------------------------------------------------------------------- RegNet


def regnet(
    *,
    stem_width: int = 32,
    depths: Sequence[int] = (1, 3, 8, 2),
    widths: Sequence[int] = (64, 144, 320, 784),
    group_widths: Sequence[int] = (16, 16, 16, 16),
    stem_stride: int = 2,
    strides: Sequence[int] = (2, 2, 2, 2),
    squeeze: float = 0.25,
    bottleneck: float = 1.0,
) -> FeatureBranch:
    """Return a RegNet-Y: residual blocks with grouped convolutions and channel attention.

    Parameters
    ----------
    stem_width, stem_stride : int
        Of the first 3 x 3 convolution.
    depths, widths, group_widths, strides : sequence of int
        One per stage: blocks, channels, channels per group, and the stride of the first block.
    squeeze : float
        Hidden channels of channel attention, as a share of the block's input channels.
    bottleneck : float
        Channels inside a block, as a share of its output channels.
    """
    checks.count("branch.stem_width", stem_width)
    checks.count("branch.stem_stride", stem_stride)
    checks.between("branch.squeeze", squeeze, 0, inf)
    checks.between("branch.bottleneck", bottleneck, 0, inf)
    depths = check_counts("branch.depths", depths, STAGES)
    widths = check_counts("branch.widths", widths, STAGES)
    group_widths = check_counts("branch.group_widths", group_widths, STAGES)
    strides = check_counts("branch.strides", strides, STAGES)
    body = nn.ModuleDict()
    every_width = [stem_width, *widths]
    for stage, (n_in, n_out) in enumerate(pairwise(every_width)):
        inner, group = round(n_out * bottleneck), group_widths[stage]
        if inner < group or inner % group:
            raise ValueError(
                f"`branch.group_widths` must divide the {inner} channels inside a block of stage"
                f" {stage + 1}, but got {group}."
            )
        name = f"block{stage + 1}"
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        for block in range(depths[stage]):
            comes, stride = (n_in, strides[stage]) if block == 0 else (n_out, 1)
            squeezed = max(1, round(squeeze * comes))
            blocks[f"{name}-{block}"] = RegNetBlock(comes, inner, n_out, group, squeezed, stride)
        body[name] = nn.Sequential(blocks)
    stem = _conv_norm(3, stem_width, 3, stem_stride, activation=nn.ReLU)
    stages = [f"cnn_body.{name}" for name in body]
    return FeatureBranch({"cnn_stem": stem, "cnn_body": body}, stages, every_width)


class RegNetBlock(nn.Module):
    """1 x 1 convolution, grouped 3 x 3, channel attention and 1 x 1, with a shortcut."""

    def __init__(
        self, n_in: int, inner: int, n_out: int, group_width: int, squeezed: int, stride: int
    ) -> None:
        super().__init__()
        changes = n_in != n_out or stride != 1
        self.proj = _conv_norm(n_in, n_out, 1, stride) if changes else nn.Identity()
        groups = inner // group_width
        self.f = nn.Sequential(
            OrderedDict(
                a=_conv_norm(n_in, inner, 1, activation=nn.ReLU),
                b=_conv_norm(inner, inner, 3, stride, groups=groups, activation=nn.ReLU),
                se=ChannelAttention(inner, squeezed, nn.Sigmoid),
                c=_conv_norm(inner, n_out, 1),
            )
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return the features after the block."""
        return relu(self.proj(features) + self.f(features))


# ---------------------------------------------------------------------------------------- ResNet


def resnet(
    *,
    stem_width: int = 64,
    depths: Sequence[int] = (3, 4, 6, 3),
    widths: Sequence[int] = (64, 128, 256, 512),
    stem_kernel: int = 7,
    stem_stride: int = 4,
    strides: Sequence[int] = (1, 2, 2, 2),
) -> FeatureBranch:
    """Return a ResNet of bottleneck blocks.

    Parameters
    ----------
    stem_width, stem_kernel : int
        Of the first convolution.
    depths, widths, strides : sequence of int
        One per stage: blocks, channels inside a block (its output has four times as many), and the
        stride of the first block.
    stem_stride : {1, 2, 4}
        The convolution has a stride of up to 2, and pooling after it another 2.
    """
    checks.count("branch.stem_width", stem_width)
    if checks.count("branch.stem_kernel", stem_kernel) % 2 == 0:
        raise ValueError(f"`branch.stem_kernel` must be odd, but got {stem_kernel}.")
    first, pooling = _stem_strides(stem_stride)
    depths = check_counts("branch.depths", depths, STAGES)
    widths = check_counts("branch.widths", widths, STAGES)
    strides = check_counts("branch.strides", strides, STAGES)
    every_width = [stem_width, *(ResNetBlock.EXPANSION * width for width in widths)]
    stem = _conv_norm(3, stem_width, stem_kernel, first, activation=nn.ReLU)
    if pooling > 1:
        stem.append(nn.MaxPool2d(3, pooling, padding=1))
    modules: dict[str, nn.Module] = {"cnn_stem": stem}
    for stage, (n_in, n_out) in enumerate(pairwise(every_width)):
        blocks = [ResNetBlock(n_in, widths[stage], strides[stage])]
        blocks += [ResNetBlock(n_out, widths[stage], 1) for _ in range(1, depths[stage])]
        modules[f"cnn_body_stage{stage + 1}"] = nn.Sequential(*blocks)
    return FeatureBranch(modules, list(modules)[1:], every_width)


class ResNetBlock(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, with a shortcut."""

    EXPANSION = 4

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = self.EXPANSION * width
        self.conv1, self.bn1 = _conv(n_in, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, n_out, 1), nn.BatchNorm2d(n_out)
        changes = n_in != n_out or stride != 1
        self.downsample = _conv_norm(n_in, n_out, 1, stride) if changes else nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        """Return the features after the block."""
        inner = relu(self.bn1(self.conv1(features)))
        inner = relu(self.bn2(self.conv2(inner)))
        return relu(self.downsample(features) + self.bn3(self.conv3(inner)))


# ----------------------------------------------------------------------------------- MobileNetV3


class _Row(NamedTuple):
    """A block of MobileNetV3, at full width."""

    kernel: int
    inner: int
    n_out: int
    attends: bool
    activation: Activation


def _rows(activation: Activation, *rows: tuple[int, int, int, bool]) -> list[_Row]:
    return [_Row(*row, activation) for row in rows]


_MOBILENET_V3_LARGE = [
    _rows(nn.ReLU, (3, 16, 16, False), (3, 64, 24, False)),
    _rows(nn.ReLU, (3, 72, 24, False), (5, 72, 40, True)),
    _rows(nn.ReLU, (5, 120, 40, True), (5, 120, 40, True))
    + _rows(nn.Hardswish, (3, 240, 80, False)),
    _rows(nn.Hardswish, (3, 200, 80, False), (3, 184, 80, False), (3, 184, 80, False))
    + _rows(nn.Hardswish, (3, 480, 112, True), (3, 672, 112, True), (5, 672, 160, True)),
    _rows(nn.Hardswish, (5, 960, 160, True), (5, 960, 160, True)),
]
"""Stem and stages, split so that the strided block is the last of each."""


def mobilenet_v3(
    *,
    width_multiplier: float = 1.0,
    stem_stride: int = 4,
    strides: Sequence[int] = (2, 2, 2, 1),
) -> FeatureBranch:
    """Return a MobileNetV3-large.

    Parameters
    ----------
    width_multiplier : float
        Multiplies the published channels; the results are rounded to multiples of 8.
    stem_stride : {1, 2, 4}
        The first convolution has a stride of up to 2, and the last block of the stem another 2.
    strides : sequence of int
        Stride of the last block of each stage.
    """
    checks.between("branch.width_multiplier", width_multiplier, 0, inf)
    first, second = _stem_strides(stem_stride)
    last_strides = [second, *check_counts("branch.strides", strides, STAGES)]

    def scaled(channels: int) -> int:
        return _multiple_of_8(channels * width_multiplier)

    names = ["cnn_stem", *(f"cnn_body_stage{stage + 1}" for stage in range(STAGES))]
    modules: dict[str, nn.Module] = {}
    every_width = []
    width = scaled(16)
    for name, rows, last_stride in zip(names, _MOBILENET_V3_LARGE, last_strides, strict=True):
        layers: list[nn.Module] = []
        if name == "cnn_stem":
            layers.append(_mobile_conv(3, width, 3, first, activation=nn.Hardswish))
        for row in rows:
            stride = last_stride if row is rows[-1] else 1
            layers.append(MobileNetBlock(width, scaled(row.inner), scaled(row.n_out), row, stride))
            width = scaled(row.n_out)
        if name == names[-1]:
            layers.append(_mobile_conv(width, 6 * width, 1, activation=nn.Hardswish))
            width = 6 * width
        modules[name] = nn.Sequential(*layers)
        every_width.append(width)
    return FeatureBranch(modules, names[1:], every_width, hidden=scaled(1280))


class MobileNetBlock(nn.Module):
    """A depthwise convolution between 1 x 1 ones that widen and narrow, with a shortcut."""

    def __init__(self, n_in: int, inner: int, n_out: int, row: _Row, stride: int) -> None:
        super().__init__()
        self.has_shortcut = stride == 1 and n_in == n_out
        act = row.activation
        layers: list[nn.Module] = []
        if inner != n_in:
            layers.append(_mobile_conv(n_in, inner, 1, activation=act))
        layers.append(_mobile_conv(inner, inner, row.kernel, stride, groups=inner, activation=act))
        if row.attends:
            layers.append(ChannelAttention(inner, _multiple_of_8(inner // 4), nn.Hardsigmoid))
        layers.append(_mobile_conv(inner, n_out, 1))
        self.block = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """Return the features after the block."""
        result: Tensor = self.block(features)
        return features + result if self.has_shortcut else result


# ----------------------------------------------------------------------------------------- parts


class ChannelAttention(nn.Module):
    """Squeeze and excitation: scales each channel by a function of all channels' averages."""

    def __init__(self, width: int, squeezed: int, gate: type[nn.Module]) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(width, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, width, 1)
        self.gate = gate()

    def forward(self, features: Tensor) -> Tensor:
        """Return the scaled features."""
        average = features.mean((2, 3), keepdim=True)
        scales: Tensor = self.gate(self.fc2(relu(self.fc1(average))))
        return features * scales


def _conv(n_in: int, n_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(n_in, n_out, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _conv_norm(
    n_in: int,
    n_out: int,
    kernel: int,
    stride: int = 1,
    *,
    groups: int = 1,
    activation: Activation | None = None,
    eps: float = 1e-5,
    momentum: float = 0.1,
) -> nn.Sequential:
    layers = [_conv(n_in, n_out, kernel, stride, groups), nn.BatchNorm2d(n_out, eps, momentum)]
    return nn.Sequential(*layers, *([] if activation is None else [activation(inplace=True)]))


_mobile_conv = partial(_conv_norm, eps=1e-3, momentum=0.01)


def _multiple_of_8(channels: float) -> int:
    """Return a multiple of 8 near `channels`, at most a tenth below it."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _stem_strides(stride: int) -> tuple[int, int]:
    """Return the strides of the two halves of a stem."""
    if stride not in (1, 2, 4):
        raise ValueError(f"`branch.stem_stride` must be 1, 2 or 4, but got {stride!r}.")
    return min(stride, 2), max(stride // 2, 1)


KINDS: dict[str, Callable[..., FeatureBranch]] = {
    "regnet": regnet,
    "resnet": resnet,
    "mobilenet_v3": mobilenet_v3,
}
"""Functions that build a branch, by kind."""
