"""U-ViT: a transformer for diffusion with long skips; DeeDiff adds an exit after every block.

Bao et al., *All are Worth Words: A ViT Backbone for Diffusion Models* (CVPR 2023), as published by
baofff/U-ViT; exits after Tang et al., *DeeDiff: Dynamic Uncertainty-Aware Early Exiting for
Accelerating Diffusion Model Generation* (2023), as published by metodj/RC-EENN. Submodules keep the
published names, so that published weights load unchanged.

One run of the network is one denoising step: it estimates the noise in noisy images at given times.
Blocks form a U of n, 1 and n: those of the second half also take the outputs of the first half, in
reverse order. An exit estimates the noise, and its uncertainty at every pixel; all exits share the
uncertainty module. After the exit of the last block comes the network's own output, from normalised
tokens: it is the last exit, and its confidence is always 1.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from swiftsure._lib import checks
from swiftsure.torch.staged import Scored
from swiftsure_zoo.networks.published import PublishedModel, check_hyperparameters
from swiftsure_zoo.networks.transformer import Attention, Mlp, hidden_width, initialise

__all__ = ["UViT"]

TIME_SHARE = 4
"""Width of tokens divided by the width of the time embedding in the uncertainty module."""

PUBLISHED = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "embed_dim": "width",
    "depth": "depth",
    "num_heads": "n_heads",
    "mlp_ratio": "mlp_ratio",
}
"""Maps published names of hyperparameters to ours."""

OPTIONAL = {
    "in_chans": "n_channels",
    "qkv_bias": "qkv_bias",
    "num_classes": "n_classes",
    "conv": "convolution",
    "skip": "skips",
}

State = dict[str, Any]


class UViT(PublishedModel):
    """A U-ViT with DeeDiff's exits: one after every block, and the full output.

    A batch is (images, timesteps), or (images, timesteps, labels) if there are classes. Times are
    on the scale of training: t / T, in [0, 1), for DeeDiff.

    An exit's confidence is 1 minus its mean uncertainty over the image; the last exit has no
    uncertainty, and confidence 1. For training, `uncertainty` returns the uncertainty per pixel.

    The defaults are DeeDiff's published network for CIFAR-10.

    Parameters
    ----------
    image_size, patch_size : int
        Height and width of images, and of the patches that become tokens.
    n_channels : int
        Channels of images.
    width : int
        Width of tokens; a multiple of 8 and of `n_heads`.
    depth : int
        Gives 2 * (depth // 2) + 1 blocks, and as many exits before the last.
    n_heads : int
        Attention heads.
    mlp_ratio : float
        Hidden width of a block's MLP, as a multiple of `width`.
    n_classes : int, optional
        Number of classes to condition on. None: no labels.
    qkv_bias : bool
        Whether queries, keys and values have a bias.
    skips : bool
        Whether blocks of the second half take the outputs of the first half.
    convolution : bool
        Whether a 3 x 3 convolution smooths the patches of every estimate.
    uncertainty_ratio : float
        Hidden width of the uncertainty module, as a multiple of `width`. It runs at every exit that
        is evaluated: the published 4 costs nearly a third of a block each time.
    early_exits : bool
        If False, the network is a plain U-ViT, and the full output is its only exit.

    Examples
    --------
    >>> model = UViT(image_size=8, width=16, depth=2, n_heads=2).eval()
    >>> images, timesteps = torch.zeros(5, 3, 8, 8), torch.full((5,), 0.3)
    >>> [tuple(noise.shape) for noise in model((images, timesteps))]
    [(5, 3, 8, 8), (5, 3, 8, 8), (5, 3, 8, 8), (5, 3, 8, 8)]
    """

    def __init__(
        self,
        *,
        image_size: int = 32,
        patch_size: int = 2,
        n_channels: int = 3,
        width: int = 512,
        depth: int = 12,
        n_heads: int = 8,
        mlp_ratio: float = 4.0,
        n_classes: int | None = None,
        qkv_bias: bool = False,
        skips: bool = True,
        convolution: bool = True,
        uncertainty_ratio: float = 4.0,
        early_exits: bool = True,
    ) -> None:
        super().__init__()
        if checks.count("image_size", image_size) % checks.count("patch_size", patch_size):
            raise ValueError(
                f"`image_size` must be a multiple of `patch_size`, {patch_size}, but got"
                f" {image_size}."
            )
        checks.count("n_channels", n_channels)
        if n_classes is not None:
            checks.count("n_classes", n_classes)
        # Time embeddings, of tokens and of the uncertainty module, are half cosines, half sines.
        for factor in (2 * TIME_SHARE, checks.count("n_heads", n_heads)):
            if checks.count("width", width) % factor:
                raise ValueError(f"`width` must be a multiple of {factor}, but got {width}.")
        hidden = hidden_width("mlp_ratio", mlp_ratio, width)
        uncertainty_hidden = hidden_width("uncertainty_ratio", uncertainty_ratio, width)

        half = checks.count("depth", depth) // 2
        self.n_blocks = 2 * half + 1
        self.n_exits = self.n_blocks + 1 if early_exits else 1
        self.image_shape = (n_channels, image_size, image_size)
        self.patch_size, self.width = patch_size, width
        self.n_patches = (image_size // patch_size) ** 2
        self.skips = bool(skips)
        pixels = n_channels * patch_size**2

        def block(joins: bool = False) -> Block:
            return Block(width, n_heads, hidden, bool(qkv_bias), joins)

        def smoothing() -> nn.Module:
            if not convolution:
                return nn.Identity()
            return nn.Conv2d(n_channels, n_channels, kernel_size=3, padding=1)

        cut = nn.Conv2d(n_channels, width, kernel_size=patch_size, stride=patch_size)
        self.patch_embed = nn.Sequential(OrderedDict(proj=cut))
        self.n_classes = n_classes
        self.label_emb = None if n_classes is None else nn.Embedding(n_classes, width)
        n_tokens = self.n_patches + (1 if n_classes is None else 2)
        self.pos_embed = nn.Parameter(torch.empty(1, n_tokens, width))
        self.in_blocks = nn.ModuleList(block() for _ in range(half))
        self.mid_block = block()
        self.out_blocks = nn.ModuleList(block(self.skips) for _ in range(half))
        self.norm = nn.LayerNorm(width)
        self.decoder_pred = nn.Linear(width, pixels)
        self.final_layer = smoothing()
        if early_exits:
            self.final_layer_in = nn.ModuleList(smoothing() for _ in range(half))
            self.final_layer_mid = smoothing()
            self.final_layer_out = nn.ModuleList(smoothing() for _ in range(half))
            self.UEM = nn.Sequential(
                nn.Linear(width + width // TIME_SHARE, uncertainty_hidden),
                nn.SiLU(),
                nn.Linear(uncertainty_hidden, pixels),
                nn.Sigmoid(),
            )
        initialise(self)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def begin(self, batch: Sequence[Tensor]) -> State:
        """Return the initial state of a batch, (images, timesteps[, labels])."""
        images, timesteps, *labels = self.checked(batch)
        tokens = self.patch_embed(images).flatten(2).transpose(1, 2)
        times = waves(timesteps, self.width)
        extras = [times.to(tokens.dtype)]
        if self.label_emb is not None:
            extras.insert(0, self.label_emb(labels[0]))
        tokens = torch.cat([torch.stack(extras, dim=1), tokens], dim=1) + self.pos_embed
        state = {"tokens": tokens, "skips": []}
        if self.n_exits > 1:
            # The time's part of the uncertainty module, computed once for all exits. Its waves,
            # `waves(timesteps, width // TIME_SHARE)`, are every fourth of those above.
            few = times.view(-1, 2, self.width // 2)[:, :, ::TIME_SHARE].flatten(1).to(tokens.dtype)
            into = cast(nn.Linear, self.UEM[0])
            state["time_doubts"] = linear(few, into.weight[:, self.width :], into.bias)
        return state

    def advance(self, exit_index: int, state: State) -> State:
        """Run one block; for the last exit, normalise (after all blocks if it is the only exit)."""
        if exit_index < self.n_exits - 1:
            return self._after_block(exit_index, state)
        if self.n_exits == 1:
            for k in range(self.n_blocks):
                state = self._after_block(k, state)
        return {"tokens": self.norm(self._patches(state))}

    def head(self, exit_index: int, state: State) -> Scored:
        """Return an exit's noise estimate and its confidence."""
        return Scored(self.estimate(exit_index, state), self.confidence_at(exit_index, state))

    def confidence_at(self, exit_index: int, state: State) -> Tensor:
        """Return an exit's confidence, (n,), without estimating the noise."""
        if exit_index == self.n_exits - 1:
            tokens = state["tokens"]
            return torch.ones(tokens.shape[0], dtype=torch.float32, device=tokens.device)
        # A mean in half precision would be too coarse for thresholds.
        doubts = self.doubts(self._patches(state), state["time_doubts"])
        return 1 - doubts.mean(dim=(1, 2), dtype=torch.float32)

    def estimate(self, exit_index: int, state: State, rows: Tensor | None = None) -> Tensor:
        """Return an exit's noise estimate for all images, or for some rows."""
        tokens = self._patches(state)
        noise = self._image(self.decoder_pred(tokens if rows is None else tokens[rows]))
        if exit_index == self.n_exits - 1:
            smoothing = self.final_layer
        else:
            early = [*self.final_layer_in, self.final_layer_mid, *self.final_layer_out]
            smoothing = early[exit_index]
        smooth: Tensor = smoothing(noise)
        return smooth

    def uncertainty(self, state: State) -> Tensor:
        """Return the uncertainty, in (0, 1), of every pixel, at any exit except the last.

        DeeDiff trains it towards tanh |estimate - noise|.
        """
        return self._image(self.doubts(self._patches(state), state["time_doubts"]))

    @classmethod
    def from_hyperparameters(
        cls, hyperparameters: Mapping[str, Any], *, early_exits: bool = True
    ) -> Self:
        """Return an untrained network from hyperparameters under their published names.

        Parameters
        ----------
        hyperparameters
            img_size, patch_size, embed_dim, depth, num_heads, mlp_ratio; optionally in_chans,
            qkv_bias, num_classes (-1 for none), conv, skip and mlp_time_embed (only False).
        early_exits
            False for a plain U-ViT.
        """
        given = dict(hyperparameters)
        if given.pop("mlp_time_embed", False):
            raise ValueError("`mlp_time_embed` must be False, as in every published network.")
        given = check_hyperparameters(given, PUBLISHED, OPTIONAL)
        if given.get("num_classes") == -1:
            del given["num_classes"]
        ours = {**PUBLISHED, **OPTIONAL}
        named = {ours[name]: value for name, value in given.items()}
        return cls(**named, early_exits=early_exits)

    def checked(self, batch: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return a batch unchanged; raises unless it is (images, timesteps[, labels])."""
        parts = ["images", "timesteps"] + ["labels"] * (self.label_emb is not None)
        if not isinstance(batch, tuple | list) or len(batch) != len(parts):
            kind = type(batch).__name__
            got = f"{kind} of {len(batch)}" if isinstance(batch, tuple | list) else kind
            raise TypeError(f"`batch` must be a tuple ({', '.join(parts)}), but got a {got}.")
        if batch[0].shape[1:] != self.image_shape:
            expected = checks.shape_text(["n", *self.image_shape])
            got = checks.shape_text(batch[0].shape)
            raise ValueError(f"`images` must have shape {expected}, but got {got}.")
        own, device = self.pos_embed.dtype, batch[0].device.type
        if batch[0].dtype != own and not torch.is_autocast_enabled(device):
            raise TypeError(
                f"`images` must be {own} as the network is, but got {batch[0].dtype}. To run it in"
                " half precision, leave it in float32 and use autocast, or `dtype=` of `DeeDiff`."
            )
        n = batch[0].shape[0]
        for name, part in zip(parts[1:], batch[1:], strict=True):
            if part.shape != (n,):
                got = checks.shape_text(part.shape)
                raise ValueError(f"`{name}` must have shape ({n},), one per image, but got {got}.")
        if self.label_emb is not None and batch[2].dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`labels` must be whole numbers, but got {batch[2].dtype}.")
        return batch

    def _after_block(self, k: int, state: State) -> State:
        """Return the state after a block, with the skips that later ones still need."""
        tokens, skips = state["tokens"], state["skips"]
        half = self.n_blocks // 2
        skip = None
        if self.skips and 1 <= k <= half:
            # A block's output becomes a skip only now: until then it is in the state as tokens.
            skips = [*skips, tokens]
        elif self.skips and k > half:
            *skips, skip = skips
        blocks = [*self.in_blocks, self.mid_block, *self.out_blocks]
        return {**state, "tokens": blocks[k](tokens, skip), "skips": skips}

    def doubts(self, patches: Tensor, of_time: Tensor) -> Tensor:
        """Return the uncertainty module's output for patches and time, (n, patches, pixels).

        The published code concatenates both; adding their parts saves a copy at every exit.
        """
        into, silu, out, sigmoid = self.UEM
        seen = linear(patches, cast(nn.Linear, into).weight[:, : self.width])
        doubts: Tensor = sigmoid(out(silu(seen + of_time[:, None])))
        return doubts

    def _patches(self, state: State) -> Tensor:
        """Return the tokens of patches, without those of label and time before them."""
        patches: Tensor = state["tokens"][:, -self.n_patches :]
        return patches

    def _image(self, tokens: Tensor) -> Tensor:
        """Return images from tokens that hold a patch's pixels row by row, channels fastest."""
        channels, height, width = self.image_shape
        side, n = self.patch_size, tokens.shape[0]
        pixels = tokens.reshape(n, height // side, width // side, side, side, channels)
        return pixels.permute(0, 5, 1, 3, 2, 4).reshape(n, channels, height, width)


class Block(nn.Module):
    """Attention and an MLP; if `joins`, a skip is merged into the tokens first."""

    def __init__(self, width: int, n_heads: int, hidden: int, bias: bool, joins: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, n_heads, bias=bias, hands_on=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden, width)
        self.skip_linear = nn.Linear(2 * width, width) if joins else None

    def forward(self, tokens: Tensor, skip: Tensor | None) -> Tensor:
        """Return tokens, (n, tokens, width)."""
        if self.skip_linear is not None and skip is not None:
            tokens = self.skip_linear(torch.cat([tokens, skip], dim=-1))
        mixed, _ = self.attn(self.norm1(tokens), None)
        tokens = tokens + mixed
        result: Tensor = tokens + self.mlp(self.norm2(tokens))
        return result


def waves(timesteps: Tensor, width: int) -> Tensor:
    """Return the embedding of times, (n, width): cosines, then sines, of decreasing frequency.

    Examples
    --------
    >>> waves(torch.tensor([0.0, 100.0]), 4)
    tensor([[ 1.0000,  1.0000,  0.0000,  0.0000],
            [ 0.8623,  0.5403, -0.5064,  0.8415]])
    """
    half = width // 2
    dtype = torch.promote_types(timesteps.dtype, torch.float32)
    powers = torch.arange(half, dtype=dtype, device=timesteps.device) / half
    angles = timesteps[:, None] * 10000.0**-powers
    return torch.cat([angles.cos(), angles.sin()], dim=1)
