"""DViT: vision transformers on finer and finer tokens, each reusing features of the one before.

Wang et al., *Not All Images are Worth 16x16 Words: Dynamic Transformers for Efficient Image
Recognition* (NeurIPS 2021), as published by blackfeather-wang/Dynamic-Vision-Transformer.
Submodules keep the published names, so that published weights load unchanged.

Every exit is a whole transformer, with its own tokens of the same image. From the second on, each
block also takes the last features of the previous transformer, and adds relations (attention
logits) derived from that transformer's to its own, both resized to the finer grid.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import inf
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from swiftsure._lib import checks
from swiftsure_zoo.networks.published import (
    PublishedModel,
    check_hyperparameters,
    check_images,
    check_rate,
)
from swiftsure_zoo.networks.transformer import (
    Attention,
    DropPath,
    Mlp,
    PatchTokens,
    SoftSplitTokens,
    hidden_width,
    initialise,
    sinusoids,
    stretching,
    windows_for,
)

__all__ = ["DViT"]

PUBLISHED_GRIDS, PUBLISHED_SIZE = (7, 10, 14), 224

PUBLISHED = {
    "kind": "kind",
    "num_classes": "n_classes",
    "img_size": "image_size",
    "embed_dim": "width",
    "depth": "depth",
    "num_heads": "n_heads",
    "mlp_ratio": "mlp_ratio",
    "qkv_bias": "qkv_bias",
    "layernorm_eps": "norm_eps",
    "feature_reuse": "feature_reuse",
    "relation_reuse": "relation_reuse",
    "feature_reuse_dim": "feature_width",
    "feature_reuse_hidden": "feature_hidden",
}
"""Maps published names of hyperparameters to ours."""

OPTIONAL = {
    "token_dim": "token_width",
    "drop_rate": "dropout",
    "attn_drop_rate": "attention_dropout",
    "drop_path_rate": "drop_path",
}

DESCRIPTIVE = {
    "backbone",
    "file",
    "n_exits",
    "tokens",
    "relation_conv_channels",
    "attention_scale",
    "n_params",
    "checkpoint_links",
}
"""Entries of published descriptions that are informative or follow from the others; ignored."""


class DViT(PublishedModel):
    """A cascade of vision transformers, one per exit, on growing grids of tokens.

    The defaults are the published DVT (T2T-ViT-12).

    Parameters
    ----------
    n_classes : int
    kind : {"t2t", "deit"}
        How tokens are made: by merging overlapping windows three times, with fixed position
        embeddings (T2T-ViT); or from patches, with learned ones (DeiT).
    image_size : int
        Height and width of images.
    grids : sequence of int
        Tokens along a side, one grid per exit. With kind "t2t", a grid is at most a quarter of the
        image's side. The windows follow from the grids.
    width, depth, n_heads : int
        Width of tokens, number of blocks and attention heads of every transformer.
    mlp_ratio : float
        Hidden width of a block's MLP, as a multiple of `width`.
    token_width : int
        For kind "t2t": width of tokens between the splits.
    position_scale : float
        For kind "t2t": amplitude of the position embeddings. Published: 1. Short training runs on
        small images learn faster with less, especially on fine grids: try 0.03.
    qkv_bias : bool
        Whether queries, keys and values have a bias. Published: only in DeiT.
    norm_eps : float
        Epsilon of layer normalisation. Published: 1e-5 in T2T-ViT, 1e-6 in DeiT.
    feature_reuse, relation_reuse : bool
        Whether a transformer takes features, and relations, of the one before it.
    feature_width, feature_hidden : int
        Channels that reused features add to a block's MLP, and hidden width of the MLP that makes
        them.
    dropout, attention_dropout, drop_path : float
        Rates in training, in [0, 1): of activations, of attention, and of whole branches in the
        last block (linearly less in earlier blocks). Published: a `drop_path` of 0.1.

    Attributes
    ----------
    sides : range
        Image heights and widths that give the network's grids.

    Examples
    --------
    >>> model = DViT(10, image_size=32, grids=(2, 4, 8), width=32, depth=2, n_heads=2).eval()
    >>> [tuple(logits.shape) for logits in model(torch.zeros(3, 3, 32, 32))]
    [(3, 10), (3, 10), (3, 10)]
    """

    def __init__(
        self,
        n_classes: int,
        *,
        kind: str = "t2t",
        image_size: int = PUBLISHED_SIZE,
        grids: Sequence[int] = PUBLISHED_GRIDS,
        width: int = 256,
        depth: int = 12,
        n_heads: int = 4,
        mlp_ratio: float = 2.0,
        token_width: int = 64,
        position_scale: float = 1.0,
        qkv_bias: bool = False,
        norm_eps: float = 1e-5,
        feature_reuse: bool = True,
        relation_reuse: bool = True,
        feature_width: int = 48,
        feature_hidden: int = 128,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        windows = windows_for(kind, image_size, grids)
        checks.count("token_width", token_width, 2)  # half as many random features, at least one
        if checks.count("width", width) % checks.count("n_heads", n_heads):
            raise ValueError(
                f"`width` must be a multiple of `n_heads`, {n_heads}, but got {width}."
            )
        layout = Layout(
            n_classes=checks.count("n_classes", n_classes, 2),
            width=width,
            depth=checks.count("depth", depth),
            n_heads=n_heads,
            hidden=hidden_width("mlp_ratio", mlp_ratio, width),
            position_scale=checks.between("position_scale", position_scale, 0, inf),
            qkv_bias=bool(qkv_bias),
            norm_eps=checks.between("norm_eps", norm_eps, 0, 1),
            feature_width=checks.count("feature_width", feature_width) if feature_reuse else 0,
            feature_hidden=checks.count("feature_hidden", feature_hidden),
            relation_reuse=bool(relation_reuse),
            dropout=check_rate("dropout", dropout),
            attention_dropout=check_rate("attention_dropout", attention_dropout),
            drop_path=check_rate("drop_path", drop_path),
        )
        places = [window.places(image_size) for window in windows]
        fitting = [w.pixels(n) for w, n in zip(windows, places, strict=True)]

        self.n_exits = len(windows)
        self.sides = range(max(r.start for r in fitting), min(r.stop for r in fitting))
        # Published: less_less_token, less_token, normal_token.
        coarser = ["less_" * n + "token" for n in range(self.n_exits - 1, 0, -1)]
        self.names = [*coarser, "normal_token"]
        for k, name in enumerate(self.names):
            tokeniser = (
                SoftSplitTokens(windows[k], places[k], width, token_width, dropout)
                if kind == "t2t"
                else PatchTokens(windows[k], width)
            )
            coarse = grids[k - 1] if k > 0 else None
            last = k == self.n_exits - 1
            self.add_module(name, Transformer(layout, tokeniser, grids[k], coarse, last=last))

    def begin(self, images: Tensor) -> dict[str, Any]:
        """Return the state of images, (n, 3, height, width); raises if their size does not fit."""
        return {"images": check_images(images, self.sides)}

    def advance(self, exit_index: int, state: dict[str, Any]) -> dict[str, Any]:
        """Run one transformer and return what its head and the next transformer need."""
        transformer = self._transformer(exit_index)
        tokens, relations = transformer(
            state["images"], state.get("features"), state.get("relations")
        )
        found: dict[str, Any] = {"class_token": tokens[:, 0]}
        if exit_index < self.n_exits - 1:
            found["images"] = state["images"]
            if transformer.layout.feature_width:
                found["features"] = tokens[:, 1:]
            if transformer.layout.relation_reuse:
                found["relations"] = relations
        return found

    def head(self, exit_index: int, state: dict[str, Any]) -> Tensor:
        """Return the logits of one exit, from the class token of its transformer."""
        transformer = self._transformer(exit_index)
        logits: Tensor = transformer.head(transformer.norm(state["class_token"]))
        return logits

    def _transformer(self, exit_index: int) -> "Transformer":
        transformer: Transformer = getattr(self, self.names[exit_index])
        return transformer

    @classmethod
    def from_hyperparameters(cls, hyperparameters: Mapping[str, Any]) -> Self:
        """Return an untrained network from hyperparameters under their published names.

        Parameters
        ----------
        hyperparameters
            kind ("t2t", "deit"), num_classes, img_size, embed_dim, depth, num_heads, mlp_ratio,
            token_dim (of kind "t2t"), qkv_bias, layernorm_eps, feature_reuse, feature_reuse_dim,
            feature_reuse_hidden, relation_reuse; optionally drop_rate, attn_drop_rate and
            drop_path_rate. Without a kind it is "t2t" if there is a token_dim.
        """
        given = {name: hyperparameters[name] for name in hyperparameters if name not in DESCRIPTIVE}
        kind = given.setdefault("kind", "t2t" if "token_dim" in given else "deit")
        needed = [*PUBLISHED, *(["token_dim"] if kind == "t2t" else [])]
        given = check_hyperparameters(given, needed, OPTIONAL)
        if given["img_size"] != PUBLISHED_SIZE:
            raise ValueError(
                f"`img_size` must be {PUBLISHED_SIZE}, for which the published windows give grids"
                f" of {', '.join(map(str, PUBLISHED_GRIDS))} tokens a side, but got"
                f" {given['img_size']}."
            )
        ours = {**PUBLISHED, **OPTIONAL}
        return cls(**{ours[name]: value for name, value in given.items()})


@dataclass(frozen=True)
class Layout:
    """Hyperparameters shared by all transformers; a `feature_width` of 0 disables feature reuse."""

    n_classes: int
    width: int
    depth: int
    n_heads: int
    hidden: int
    position_scale: float
    qkv_bias: bool
    norm_eps: float
    feature_width: int
    feature_hidden: int
    relation_reuse: bool
    dropout: float
    attention_dropout: float
    drop_path: float

    def norm(self, width: int) -> nn.LayerNorm:
        """Return a layer normalisation."""
        return nn.LayerNorm(width, eps=self.norm_eps)


class Transformer(nn.Module):
    """A vision transformer that can reuse features and relations of a coarser one.

    Parameters
    ----------
    grid : int
        Tokens along a side.
    coarse : int, optional
        Tokens along a side of the previous transformer, if there is one.
    last : bool
        Whether this is the last transformer.
    """

    stretch: Tensor

    def __init__(
        self,
        layout: Layout,
        tokeniser: PatchTokens | SoftSplitTokens,
        grid: int,
        coarse: int | None,
        *,
        last: bool,
    ) -> None:
        super().__init__()
        self.layout = layout
        patches = isinstance(tokeniser, PatchTokens)
        positions = torch.zeros(1, grid**2 + 1, layout.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, layout.width))
        self.pos_embed = nn.Parameter(positions, requires_grad=patches)
        self.tokeniser = "patch_embed" if patches else "tokens_to_token"
        self.add_module(self.tokeniser, tokeniser)
        feature_width = 0 if coarse is None else layout.feature_width
        hands_on = layout.relation_reuse and not last
        self.blocks = nn.ModuleList(
            Block(layout, feature_width, hands_on, layout.drop_path * k / max(1, layout.depth - 1))
            for k in range(layout.depth)
        )
        self.norm = layout.norm(layout.width)
        self.drop = nn.Dropout(layout.dropout)
        self.relation_reuse_conv: nn.Sequential | None = None
        if coarse is not None:
            self.register_buffer("stretch", stretching(coarse, grid), persistent=False)
            if layout.relation_reuse:
                channels = layout.depth * layout.n_heads
                self.relation_reuse_conv = nn.Sequential(
                    nn.Conv2d(channels, 3 * channels, 1),
                    nn.GELU(),
                    nn.Conv2d(3 * channels, channels, 1),
                )
        self.head = nn.Linear(layout.width, layout.n_classes)
        initialise(self)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        if patches:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        else:
            self.pos_embed.copy_(layout.position_scale * sinusoids(grid**2 + 1, layout.width))

    def forward(
        self, images: Tensor, features: Tensor | None, relations: list[Tensor] | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return all tokens, class token first, and the relations of every block.

        `features`, (n, tokens, width), and `relations`, one (n, heads, 1 + tokens, 1 + tokens) per
        block, are those of the coarser transformer.
        """
        tokens = getattr(self, self.tokeniser)(images)
        tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        tokens = self.drop(tokens + self.pos_embed)
        found: list[Tensor | None] = []
        blocks = cast(Iterable[Block], self.blocks)
        for block, added in zip(blocks, self._reused(relations), strict=True):
            reused = None
            if features is not None:
                # The class token gets no features.
                reused = self.stretch @ pad(block.feature_resuse_mlp(features), (0, 0, 1, 0))
            tokens, relation = block(tokens, added, reused)
            found.append(relation)
        return tokens, found

    def _reused(self, relations: list[Tensor] | None) -> Iterator[Tensor | None]:
        """Yield the relations to add in each block, from those of the coarser transformer."""
        if relations is None or self.relation_reuse_conv is None:
            yield from repeat(None, self.layout.depth)
            return
        translated: Tensor = self.relation_reuse_conv(torch.cat(relations, dim=1))
        # Resized one by one: those of all blocks at once would take too much memory.
        for part in translated.chunk(self.layout.depth, dim=1):
            yield self.stretch @ part @ self.stretch.T


class Block(nn.Module):
    """Attention, and an MLP on the tokens together with reused features."""

    def __init__(
        self, layout: Layout, feature_width: int, hands_on: bool, drop_path: float
    ) -> None:
        super().__init__()
        width, seen = layout.width, layout.width + feature_width
        self.norm1 = layout.norm(width)
        self.attn = Attention(
            width,
            layout.n_heads,
            bias=layout.qkv_bias,
            hands_on=hands_on,
            attention_dropout=layout.attention_dropout,
            dropout=layout.dropout,
        )
        self.norm2 = layout.norm(seen)
        self.mlp = Mlp(seen, layout.hidden, width, layout.dropout)
        if feature_width:
            self.feature_resuse_mlp = nn.Sequential(  # the published spelling
                layout.norm(width),
                Mlp(width, layout.feature_hidden, feature_width, layout.dropout),
            )
        self.drop_path = DropPath(drop_path)

    def forward(
        self, tokens: Tensor, added: Tensor | None, reused: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return tokens, and their relations if the next transformer needs them."""
        mixed, relations = self.attn(self.norm1(tokens), added)
        tokens = tokens + self.drop_path(mixed)
        seen = tokens if reused is None else torch.cat([tokens, reused], dim=-1)
        return tokens + self.drop_path(self.mlp(self.norm2(seen))), relations
