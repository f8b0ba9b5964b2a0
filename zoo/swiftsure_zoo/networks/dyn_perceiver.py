"""Dynamic Perceiver: latents that attend to a CNN's features and classify before it finishes.

Han et al., *Dynamic Perceiver for Efficient Visual Recognition* (ICCV 2023), as published by
LeapLabTHU/Dynamic_Perceiver. Submodules keep the published names, so that published weights load
unchanged.

Two branches run in parallel through four stages: a convolutional network on image features, and a
few learned tokens, the latents, which attend to the features and then to each other.

| exit | classifies from |
|---|---|
| 1 | the latents of stage 3 |
| 2 | the latents of stage 4, and the logits of exit 1 |
| 3 | the features after stage 4 |
| 4 | the features after attending to the latents, the latents, and the logits of exit 2 |

The state holds `features` (n, channels, height, width), `latents` (n, tokens, channels) and, from
exit 2 on, `feedback` from the logits of exit 1; at the last exit, only the input of its head.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from swiftsure._lib import checks
from swiftsure.torch.state_dicts import plain_state_dict
from swiftsure_zoo.networks.feature_branches import BRANCHES, STAGES, feature_branch
from swiftsure_zoo.networks.perceiver_layers import CrossLayer, SelfLayer
from swiftsure_zoo.networks.published import (
    PublishedModel,
    check_counts,
    check_hyperparameters,
    check_images,
    check_rate,
)

__all__ = ["DynPerceiver"]

PUBLISHED = {
    "num_classes": "n_classes",
    "num_latents": "n_latents",
    "num_SA_heads": "n_heads",
    "SA_widening_factor": "widening",
    "spatial_reduction": "halve_latents",
}
"""Maps published names of hyperparameters to ours."""

PUBLISHED_PARTS = {
    "with_dwc": "depthwise",
    "with_z2x": "write_features",
    "with_last_CA": "write_last_features",
    "with_isc": "feedback",
}
"""Maps published names of optional parts to ours; all are on by default."""

PUBLISHED_REGNET = {
    "stem_width": "stem_width",
    "depths": "depths",
    "widths": "widths",
    "group_widths": "group_widths",
    "bottleneck_multiplier": "bottleneck",
    "strides": "strides",
    "se_ratio": "squeeze",
}
"""Maps published names of hyperparameters of a RegNet branch to ours."""

PUBLISHED_DEPTHS = (3, 3, 9, 3)
"""Self-attention layers per stage; published networks have multiples of these."""

NARROWING = 8
"""Width of features divided by the width of their attention to latents."""


class DynPerceiver(PublishedModel):
    """A convolutional network and latents that attend to its features, with four exits.

    The defaults are the network published as reg800m_perceiver_t128.

    Parameters
    ----------
    n_classes : int
    branch : str or mapping
        The convolutional network: "regnet_y_400mf", "regnet_y_800mf", "resnet50_0375",
        "mobilenet_v3_large_0x75", or a `kind` with its hyperparameters, as the functions `regnet`,
        `resnet` and `mobilenet_v3` of `swiftsure_zoo.networks.feature_branches` take them. Latents
        of a stage have as many channels as the stage's input features.
    n_latents : int
        Tokens of the first stage; a multiple of 8 if they are halved. Mixing normalises over
        tokens, at the end over a quarter of these, so very few tokens amplify small differences.
    depths : sequence of int
        Self-attention layers per stage.
    n_heads : sequence of int
        Self-attention heads per stage; each must divide the latents' channels.
    widening : int
        Hidden width of the MLP after self-attention, as a multiple of the channels.
    pooled_side : int
        Latents attend to features averaged to this many positions a side, whatever the image size.
        Published: 7; use less for small maps.
    halve_latents : bool
        Whether latents are mixed into half as many before each stage except the first.
    depthwise : bool
        Whether latents attend to the features plus a 7 x 7 depthwise convolution of them.
    write_features : bool
        Whether features also attend to the latents, before stages 2 to 4.
    write_last_features : bool
        Whether they also do so after stage 4, for the last exit.
    feedback : bool
        Whether exits 2 and 4 take the logits of exits 1 and 2.
    dropout : float
        In the classifiers of exits 3 and 4 if they have a hidden layer (MobileNetV3). Published:
        0.2.

    Examples
    --------
    >>> tiny = {"kind": "regnet", "stem_width": 8, "widths": (8, 16, 16, 32)}
    >>> tiny |= {"depths": (1, 1, 1, 1), "group_widths": (8, 8, 8, 8), "strides": (1, 2, 2, 2)}
    >>> model = DynPerceiver(
    ...     10, branch=tiny, n_latents=16, depths=(1, 1, 1, 1), widening=2, pooled_side=4
    ... ).eval()
    >>> [tuple(logits.shape) for logits in model(torch.zeros(3, 3, 32, 32))]
    [(3, 10), (3, 10), (3, 10), (3, 10)]
    """

    n_exits = 4

    def __init__(
        self,
        n_classes: int,
        *,
        branch: str | Mapping[str, Any] = "regnet_y_800mf",
        n_latents: int = 128,
        depths: Sequence[int] = (3, 3, 9, 6),
        n_heads: Sequence[int] = (1, 2, 4, 8),
        widening: int = 4,
        pooled_side: int = 7,
        halve_latents: bool = True,
        depthwise: bool = True,
        write_features: bool = True,
        write_last_features: bool = True,
        feedback: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        checks.count("n_classes", n_classes, 2)
        checks.count("widening", widening)
        self.pooled_side = checks.count("pooled_side", pooled_side)
        check_rate("dropout", dropout)
        tokens = _tokens(n_latents, halve_latents)
        depths = check_counts("depths", depths, STAGES)
        n_heads = check_counts("n_heads", n_heads, STAGES)
        found = feature_branch(branch)
        *widths, last_width = found.widths
        self._stages = found.stages
        for name, module in found.modules.items():
            self.add_module(name, module)

        self.latent = nn.Parameter(0.02 * torch.randn(tokens[0], widths[0]))
        for stage, width in enumerate(widths, start=1):
            heads = n_heads[stage - 1]
            if width % heads:
                raise ValueError(
                    f"`n_heads` must divide the {width} channels of stage {stage}, but got {heads}."
                )
            local = nn.Conv2d(width, width, 7, padding=3, groups=width) if depthwise else None
            read = CrossLayer(width, width, width, n_positions=self.pooled_side**2)
            think = [SelfLayer(width, heads, widening) for _ in range(depths[stage - 1])]
            # The latents of the first stage hold no information about the image yet.
            write = _writing(width, width) if write_features and stage > 1 else None
            self.add_module(f"dwc{stage}_x2z", local)
            self.add_module(f"cross_att{stage}_x2z", read)
            self.add_module(f"self_att{stage}", nn.Sequential(*think))
            self.add_module(f"cross_att{stage}_z2x", write)
        self.token_mixer = _normed_linears(tokens) if halve_latents else None
        self.token_expander = _normed_linears(widths)
        self.last_cross_att_z2x = _writing(last_width, widths[-1]) if write_last_features else None

        fed = widths[-1] if feedback else 0
        self.early_classifier3 = nn.Linear(widths[-2], n_classes)
        self.isc3 = _feedback(n_classes, fed) if feedback else None
        self.classifier_att = nn.Linear(widths[-1] + fed, n_classes)
        self.isc4 = _feedback(n_classes, fed) if feedback else None
        self.classifier_cnn = _classifier(last_width, found.hidden, n_classes, dropout)
        merged = last_width + widths[-1] + fed
        final = _classifier(merged, found.hidden, n_classes, dropout)
        layers = [final] if isinstance(final, nn.Linear) else final
        self.classifier_merge = nn.Sequential(nn.BatchNorm1d(merged), *layers)

    def begin(self, images: Tensor) -> Tensor:
        """Return the images, (n, 3, height, width); raises if the shape is wrong."""
        return check_images(images, range(1, sys.maxsize))

    def advance(self, exit_index: int, state: Any) -> dict[str, Tensor]:
        """Run up to the latents of stage 3, those of stage 4, the features, or the merge.

        Feedback from another exit's logits is computed here, from the state and not from the
        head's output, so that heads run only where they are needed.
        """
        if exit_index == 0:
            features = self.get_submodule("cnn_stem")(state)
            # Not expand(): a view of a parameter requires gradients even in inference mode.
            latents = self._read(1, self.latent.repeat(state.shape[0], 1, 1), features)
            for stage in (2, 3):
                features, latents = self._exchange(stage, features, latents)
            return {"features": features, "latents": latents}
        features, latents = state["features"], state["latents"]
        if exit_index == 1:
            features, latents = self._exchange(4, features, latents)
            after = {"features": features, "latents": latents}
            if self.isc3 is not None:
                after["feedback"] = self.isc3(self.head(0, state))
            return after
        if exit_index == 2:
            return {**state, "features": self._convolve(4, features)}
        features = _written(self.last_cross_att_z2x, features, latents)
        parts = [features.mean((2, 3)), latents.mean(1)]
        if self.isc4 is not None:
            parts.append(self.isc4(self.head(1, state)))
        return {"merged": torch.cat(parts, dim=1)}

    def head(self, exit_index: int, state: dict[str, Tensor]) -> Tensor:
        """Return the logits of one exit."""
        logits: Tensor
        if exit_index == 0:
            logits = self.early_classifier3(state["latents"].mean(1))
        elif exit_index == 1:
            seen = state["latents"].mean(1)
            if "feedback" in state:
                seen = torch.cat([seen, state["feedback"]], dim=1)
            logits = self.classifier_att(seen)
        elif exit_index == 2:
            logits = self.classifier_cnn(state["features"].mean((2, 3)))
        else:
            logits = self.classifier_merge(state["merged"])
        return logits

    def _exchange(self, stage: int, features: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Finish the previous stage, then let both branches attend to each other."""
        features = self._convolve(stage - 1, features)
        if self.token_mixer is not None:
            latents = self.token_mixer[stage - 2](latents.transpose(1, 2)).transpose(1, 2)
        latents = self.token_expander[stage - 2](latents)
        features = _written(getattr(self, f"cross_att{stage}_z2x"), features, latents)
        return features, self._read(stage, latents, features)

    def _convolve(self, stage: int, features: Tensor) -> Tensor:
        result: Tensor = self.get_submodule(self._stages[stage - 1])(features)
        return result

    def _read(self, stage: int, latents: Tensor, features: Tensor) -> Tensor:
        """Return the latents after attending to the features and to each other."""
        local = getattr(self, f"dwc{stage}_x2z")
        if local is not None:
            features = features + local(features)
        pooled = adaptive_avg_pool2d(features, self.pooled_side)
        latents = getattr(self, f"cross_att{stage}_x2z")(latents, _positions(pooled))
        result: Tensor = getattr(self, f"self_att{stage}")(latents)
        return result

    @classmethod
    def from_published(
        cls, hyperparameters: Mapping[str, Any], state_dict: Mapping[str, Any], **options: Any
    ) -> Self:
        """Return a published network with its weights, in evaluation mode.

        Without `backbone` and `cnn`, the convolutional network is the published one that fits the
        state dict best.
        """
        given = dict(hyperparameters)
        if given.get("backbone") is None and given.get("cnn") is None:
            given["backbone"] = _fitting_branch(state_dict)
        return super().from_published(given, state_dict, **options)

    @classmethod
    def from_hyperparameters(cls, hyperparameters: Mapping[str, Any]) -> Self:
        """Return an untrained network from hyperparameters under their published names.

        Parameters
        ----------
        hyperparameters
            num_classes, num_latents, num_SA_heads, SA_widening_factor, spatial_reduction,
            depth_factor; optionally with_x2z, with_dwc, with_z2x, with_last_CA, with_isc, and
            input_size, on which no weight depends. The convolutional network is named by
            `backbone`, or described by `cnn`.
        """
        given = dict(hyperparameters)
        given.pop("input_size", None)
        cnn = given.pop("cnn", None)
        if cnn is not None:
            given["backbone"] = _published_branch(cnn, given.get("num_classes"))
        parts = {ours: given.pop(name, True) for name, ours in PUBLISHED_PARTS.items()}
        if not given.pop("with_x2z", True):
            raise ValueError("`with_x2z` must be true: without it latents never see the image.")
        given = check_hyperparameters(given, [*PUBLISHED, "depth_factor", "backbone"])
        factors = check_counts("depth_factor", given["depth_factor"], STAGES)
        ours = {PUBLISHED[name]: value for name, value in given.items() if name in PUBLISHED}
        return cls(
            **ours,
            **parts,
            branch=given["backbone"],
            depths=[n * factor for n, factor in zip(PUBLISHED_DEPTHS, factors, strict=True)],
            dropout=0.2,
        )


def _writing(width: int, latent_width: int) -> CrossLayer:
    return CrossLayer(width, latent_width, max(1, width // NARROWING))


def _written(layer: nn.Module | None, features: Tensor, latents: Tensor) -> Tensor:
    """Return the features after every position has attended to the latents."""
    if layer is None:
        return features
    tokens: Tensor = layer(_positions(features), latents)
    return tokens.transpose(1, 2).reshape(features.shape)


def _positions(features: Tensor) -> Tensor:
    """Return a map, (n, channels, height, width), as tokens, (n, height * width, channels)."""
    return features.flatten(2).transpose(1, 2)


def _normed_linears(widths: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(nn.LayerNorm(n_in), nn.Linear(n_in, n_out))
        for n_in, n_out in pairwise(widths)
    )


def _feedback(n_classes: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_classes, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True))


def _classifier(
    width: int, hidden: int | None, n_classes: int, dropout: float
) -> nn.Linear | nn.Sequential:
    if hidden is None:
        return nn.Linear(width, n_classes)
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.Hardswish(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, n_classes),
    )


def _tokens(n_latents: int, halve: bool) -> list[int]:
    """Return the number of latents of each stage."""
    checks.count("n_latents", n_latents)
    if not halve:
        return [n_latents] * STAGES
    least = 2 ** (STAGES - 1)
    if n_latents % least:
        raise ValueError(
            f"`n_latents` must be a multiple of {least} to be halved {STAGES - 1} times, but got"
            f" {n_latents}."
        )
    return [n_latents // 2**stage for stage in range(STAGES)]


def _published_branch(cnn: Mapping[str, Any], n_classes: object) -> dict[str, Any]:
    """Return a branch from hyperparameters under their published names."""
    given = dict(cnn)
    if given.pop("num_classes", n_classes) != n_classes:
        raise ValueError(
            f"`cnn` must have as many classes as the other exits, {n_classes}, but got"
            f" {cnn['num_classes']}."
        )
    if "width_mult" in given:
        given = check_hyperparameters(given, ["width_mult", "conf"])
        checks.choice("conf", given["conf"], ["mobilenet_v3_large"])
        return {"kind": "mobilenet_v3", "width_multiplier": given["width_mult"]}
    if "channel_multiplier" in given:
        given = check_hyperparameters(given, ["layers", "channel_multiplier"])
        widths = [int(64 * 2**stage * given["channel_multiplier"]) for stage in range(STAGES)]
        return {
            "kind": "resnet",
            "stem_width": widths[0],
            "depths": given["layers"],
            "widths": widths,
        }
    check_hyperparameters(given, PUBLISHED_REGNET)
    ours = {PUBLISHED_REGNET[name]: value for name, value in given.items()}
    return {"kind": "regnet", **ours}


def _fitting_branch(state_dict: Mapping[str, Any]) -> str:
    """Return the name of the published branch with the most tensors in a state dict."""
    found = {key: value.shape for key, value in plain_state_dict(state_dict).items()}

    def fitting(name: str) -> int:
        with torch.device("meta"):
            expected = nn.ModuleDict(feature_branch(name).modules).state_dict()
        return sum(found.get(key) == value.shape for key, value in expected.items())

    n_fitting = {name: fitting(name) for name in BRANCHES}
    if not any(n_fitting.values()):
        raise ValueError(
            "`state_dict` does not fit any published feature branch: give `backbone` (one of:"
            f" {', '.join(BRANCHES)}) or `cnn` among the hyperparameters."
        )
    return max(n_fitting, key=n_fitting.__getitem__)
