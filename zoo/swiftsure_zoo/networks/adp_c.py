"""ADP-C: semantic segmentation that keeps the pixels that an earlier exit was confident about.

Liu et al., *Anytime Dense Prediction with Confidence Adaptivity* (ICLR 2022), as published in
PyTorch by liuzhuang13/anytime. Submodules keep the published names, so that published weights load
unchanged.

The state holds the maps of the branches, finest first. With masking it also holds the logits: later
stages update the pixels that the previous exit was unsure about, and keep its answer elsewhere.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from swiftsure._lib import checks
from swiftsure.torch.staged import Scored
from swiftsure.torch.state_dicts import plain_state_dict
from swiftsure_zoo.networks.hrnet import (
    EXPANSION,
    Bottleneck,
    Chain,
    Conv,
    Exchange,
    Pixels,
    Transition,
    joined,
    norm,
    run,
)
from swiftsure_zoo.networks.published import (
    PublishedModel,
    check_counts,
    check_hyperparameters,
    check_images,
)

__all__ = ["ADPC"]

N_STAGES = 4
STEM_WIDTH = 64
HEADS = ("exit1", "exit2", "exit3", "last_layer")
SIDE_STEP = 32
"""Image sides must be multiples: redesigned heads halve quarter-size maps up to three times."""

HEAD_KINDS = {"flex": "redesigned", "original": "original"}
"""Maps published names of head kinds to ours."""

PUBLISHED = (
    "stages",
    "exit_type",
    "exit_inter_channel",
    "mask_use",
    "mask_conf_threshold",
    "num_classes",
)

FIXED = {"mask_criterion": "conf_thre", "stem_channels": STEM_WIDTH, "n_exits": N_STAGES}
"""Published hyperparameters that may be left out, with the only supported value."""

DERIVED = ("n_params", "n_keys", "head_input_channels", "checkpoint_link")
"""Entries of published configurations that follow from the others and are ignored."""


class ADPC(PublishedModel):
    """An HRNet for segmentation with an exit after each of its four stages.

    Exits return logits, (n, n_classes, height, width), at a quarter of the images' resolution. The
    defaults are the network published as W18; W48 has `widths` (48, 96, 192, 384), `n_modules` (1,
    4, 3), `n_blocks` (4, 4, 4, 4) and `head_width` 128.

    Parameters
    ----------
    n_classes : int
    first_width : int
        Width of the bottlenecks of the first stage, which outputs four times as many channels.
    widths : sequence of int
        Channels of the four branches, finest first; stages 2, 3 and 4 have the first two, three and
        four of them.
    n_modules : sequence of int
        Modules in stages 2, 3 and 4; branches exchange features at the end of each.
    n_blocks : sequence
        Blocks in each of the four stages; in the last three, on every branch of every module.
        Instead of a number, an entry may be a sequence with one number per branch.
    heads : {"redesigned", "original"}
        Heads of the first three exits. "redesigned": pooling, 1 x 1 convolutions and upsampling;
        image sides must be multiples of 32. "original": two 1 x 1 convolutions, for images of any
        size. The last exit always has the original head.
    head_width : int, optional
        Channels of redesigned heads.
    masked : bool
        Whether the network supports masking: each convolution after the first exit then has two
        more entries in the state dict.
    threshold : float
        Pixels whose largest class probability at an exit exceeds this keep their logits at all
        later exits. 1 or more: no masking, and exits do not depend on each other. It may be set at
        any time, and is part of the network's fingerprint, since outputs depend on it.
    confidence : callable, optional
        Maps logits to the confidence of each image, (n,) in [0, 1]. If given, exits return
        `Scored`, for the score "model".

    Notes
    -----
    With masking, later stages need the logits of earlier exits, so `advance` computes them and
    `head` returns them. Without, a head runs only when called. Either way all pixels are computed
    and masks only select among them, as in the published code: masking changes outputs, not time.

    Examples
    --------
    >>> tiny = {"first_width": 4, "widths": (4, 4, 4, 4), "n_modules": (1, 1, 1)}
    >>> model = ADPC(n_classes=5, n_blocks=(1, 1, 1, 1), head_width=4, **tiny).eval()
    >>> [tuple(logits.shape) for logits in model(torch.zeros(2, 3, 32, 64))]
    [(2, 5, 8, 16), (2, 5, 8, 16), (2, 5, 8, 16), (2, 5, 8, 16)]
    """

    n_exits = N_STAGES

    def __init__(
        self,
        n_classes: int,
        *,
        first_width: int = 64,
        widths: Sequence[int] = (18, 36, 72, 144),
        n_modules: Sequence[int] = (1, 3, 2),
        n_blocks: Sequence[int | Sequence[int]] = (2, 2, 2, 2),
        heads: str = "redesigned",
        head_width: int | None = 64,
        masked: bool = True,
        threshold: float = 0.998,
        confidence: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        checks.count("n_classes", n_classes, 2)
        checks.count("first_width", first_width)
        widths = check_counts("widths", widths, N_STAGES)
        n_modules = check_counts("n_modules", n_modules, N_STAGES - 1)
        blocks = _blocks(n_blocks)
        checks.choice("heads", heads, HEAD_KINDS.values())
        self.redesigned = heads == "redesigned"
        inner = checks.count("head_width", head_width or 0) if self.redesigned else 0
        self.masked = masked
        self.confidence = confidence
        # Only for the fingerprint: comparing with a tensor would synchronise the device.
        self.register_buffer("masking", torch.tensor(2.0), persistent=False)
        self.threshold = threshold

        self.conv1 = Conv(3, STEM_WIDTH, stride=2)
        self.bn1 = norm(STEM_WIDTH)
        self.conv2 = Conv(STEM_WIDTH, STEM_WIDTH, stride=2)
        self.bn2 = norm(STEM_WIDTH)
        before = [EXPANSION * first_width]
        n_ins = [STEM_WIDTH, *before * (blocks[0][0] - 1)]
        self.layer1 = nn.Sequential(*(Bottleneck(n_in, first_width) for n_in in n_ins))
        for k, name in enumerate(HEADS):
            if k > 0:
                after = widths[: k + 1]
                modules = [Exchange(after, blocks[k], masked) for _ in range(n_modules[k - 1])]
                self.add_module(f"transition{k}", Transition(before, after, masked))
                self.add_module(f"stage{k + 1}", nn.ModuleList(modules))
                before = after
            # The first head has no earlier exit to take a mask from.
            options = (sum(before), n_classes, masked and k > 0)
            n_halvings = N_STAGES - 1 - k
            if self.redesigned and n_halvings > 0:
                self.add_module(name, _redesigned_head(*options, inner, n_halvings))
            else:
                self.add_module(name, _original_head(*options))

    @property
    def threshold(self) -> float:
        """Confidence above which pixels keep their logits; 1 or more disables masking."""
        return self._threshold

    @threshold.setter
    def threshold(self, value: float) -> None:
        self._threshold = checks.between("threshold", value, 0, float("inf"))
        # All thresholds without masking share one fingerprint.
        self.get_buffer("masking").fill_(self._threshold if self._masks else 2.0)

    @property
    def _masks(self) -> bool:
        return self.masked and self._threshold < 1

    def begin(self, images: Tensor) -> Tensor:
        """Return the images, (n, 3, height, width); raises if their size does not fit the heads."""
        step = SIDE_STEP if self.redesigned else 1
        return check_images(images, range(step, sys.maxsize, step))

    def advance(self, exit_index: int, state: Any) -> dict[str, Any]:
        """Run one stage; the first includes the stem."""
        before = None if exit_index == 0 else state.get("logits")
        pixels = None if before is None else Pixels(before, self.threshold)
        if exit_index == 0:
            features = self.bn1(self.conv1(state)).relu()
            features = self.bn2(self.conv2(features)).relu()
            maps = [self.layer1(features)]
        else:
            maps = self.get_submodule(f"transition{exit_index}")(state["maps"], pixels)
            for module in self.get_submodule(f"stage{exit_index + 1}").children():
                maps = module(maps, pixels)
        masking = self._masks if exit_index == 0 else before is not None
        if not masking:
            return {"maps": maps}
        logits = self._logits(exit_index, maps, pixels)
        if before is not None and pixels is not None:
            logits = torch.where(pixels.at(logits.shape[2:]), logits, before)
        if exit_index == self.n_exits - 1:
            return {"logits": logits}
        return {"maps": maps, "logits": logits}

    def head(self, exit_index: int, state: dict[str, Any]) -> Tensor | Scored:
        """Return the logits of one exit, from the maps of all branches."""
        logits: Tensor
        if "logits" in state:
            logits = state["logits"]
        else:
            logits = self._logits(exit_index, state["maps"], None)
        return logits if self.confidence is None else Scored(logits, self.confidence(logits))

    def _logits(self, exit_index: int, maps: list[Tensor], pixels: Pixels | None) -> Tensor:
        return run(self.get_submodule(HEADS[exit_index]), joined(maps), pixels)

    @classmethod
    def from_published(
        cls, hyperparameters: Mapping[str, Any], state_dict: Mapping[str, Any], **options: Any
    ) -> Self:
        """Return a published network with its weights, in evaluation mode.

        The authors save the network inside its loss: a leading `model.`, and tensors of the loss,
        are dropped.
        """
        tensors = _without_loss(plain_state_dict(state_dict))
        return super().from_published(hyperparameters, tensors, **options)

    @classmethod
    def from_hyperparameters(cls, hyperparameters: Mapping[str, Any]) -> Self:
        """Return an untrained network from hyperparameters under their published names.

        Parameters
        ----------
        hyperparameters
            stages (four, each with modules, block, blocks and channels), exit_type ("flex",
            "original"), exit_inter_channel, mask_use, mask_conf_threshold, num_classes; optionally
            mask_criterion ("conf_thre") and stem_channels (64). Derived entries of a published
            configuration are ignored.
        """
        given = {name: value for name, value in hyperparameters.items() if name not in DERIVED}
        for name, only in FIXED.items():
            if given.pop(name, only) != only:
                raise ValueError(f"`{name}` must be {only!r}, but got {hyperparameters[name]!r}.")
        given = check_hyperparameters(given, PUBLISHED)
        kind = checks.choice("exit_type", given["exit_type"], HEAD_KINDS)
        masked = bool(given["mask_use"])
        threshold = {"threshold": given["mask_conf_threshold"]} if masked else {}
        return cls(
            given["num_classes"],
            **_published_stages(given["stages"]),
            heads=HEAD_KINDS[kind],
            head_width=given["exit_inter_channel"],
            masked=masked,
            **threshold,
        )


def _original_head(n_in: int, n_classes: int, masked: bool) -> Chain:
    return Chain(
        Conv(n_in, n_in, 1, bias=True, masked=masked),
        norm(n_in),
        nn.ReLU(inplace=True),
        Conv(n_in, n_classes, 1, bias=True, masked=masked),
    )


def _redesigned_head(n_in: int, n_classes: int, masked: bool, inner: int, n_halvings: int) -> Chain:
    layers: list[nn.Module] = []
    halvings = [nn.AvgPool2d(2) for _ in range(n_halvings)]
    doublings = [_doubling() for _ in range(n_halvings - 1)]
    for resizing in [*halvings, *doublings]:
        convolution = Conv(n_in, inner, 1, bias=True, masked=masked)
        layers += [resizing, convolution, norm(inner), nn.ReLU(inplace=True)]
        n_in = inner
    return Chain(*layers, _doubling(), Conv(inner, n_classes, 1, bias=True, masked=masked))


def _doubling() -> nn.Module:
    return nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)


def _blocks(values: object) -> list[list[int]]:
    """Return the number of blocks on every branch of every stage."""
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != N_STAGES:
        raise ValueError(
            f"`n_blocks` must have one entry per stage, {N_STAGES}, but got {values!r}."
        )
    return [
        check_counts("n_blocks", value if isinstance(value, Sequence) else [value] * n, n)
        for n, value in enumerate(values, start=1)
    ]


def _published_stages(stages: object) -> dict[str, Any]:
    """Return published stages as our hyperparameters."""
    if isinstance(stages, str) or not isinstance(stages, Sequence) or len(stages) != N_STAGES:
        raise ValueError(f"`stages` must be {N_STAGES} descriptions, but got {stages!r}.")
    for stage in stages:
        check_hyperparameters(stage, ["modules", "block", "blocks", "channels"])
    first, *later = stages
    widths = list(later[-1]["channels"])
    if first["block"] != "BOTTLENECK" or first["modules"] != 1 or len(first["channels"]) != 1:
        raise ValueError(
            "`stages` must begin with 1 module of block 'BOTTLENECK' and one number of channels,"
            f" but got {dict(first)!r}."
        )
    for k, stage in enumerate(later, start=2):
        # If a branch changed its width, the published code would feed it from another branch.
        if stage["block"] != "BASIC" or list(stage["channels"]) != widths[:k]:
            raise ValueError(
                f"`stages` must have block 'BASIC' and channels {widths[:k]} in stage {k}, as in"
                f" the last stage, but got {stage['block']!r} and {stage['channels']!r}."
            )
    return {
        "first_width": first["channels"][0],
        "widths": widths,
        "n_modules": [stage["modules"] for stage in later],
        "n_blocks": [stage["blocks"] for stage in stages],
    }


def _without_loss(state_dict: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the state dict without `loss.` entries and without the prefix `model.`."""
    if not any(key.startswith("model.") for key in state_dict):
        return state_dict
    return {
        key.removeprefix("model."): value
        for key, value in state_dict.items()
        if not key.startswith("loss.")
    }
