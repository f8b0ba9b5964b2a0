"""Parts of vision transformers: tokenisers, attention, MLPs and position embeddings.

Submodules keep the published names of DeiT and T2T-ViT, so that published weights load unchanged.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from math import ceil, inf, sqrt
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool1d, pad, scaled_dot_product_attention

from swiftsure._lib import checks

__all__ = [
    "Attention",
    "DropPath",
    "Mlp",
    "PatchTokens",
    "Performer",
    "SoftSplitTokens",
    "Window",
    "hidden_width",
    "initialise",
    "sinusoids",
    "stretching",
    "windows_for",
]


class Window(NamedTuple):
    """A square window that slides over an image; each position becomes a token."""

    kernel: int
    stride: int
    padding: int

    def places(self, pixels: int) -> int:
        """Return the number of positions along a side of this many pixels."""
        return (pixels + 2 * self.padding - self.kernel) // self.stride + 1

    def pixels(self, places: int) -> range:
        """Return the side lengths that give this many positions."""
        fewest = (places - 1) * self.stride + self.kernel - 2 * self.padding
        return range(fewest, fewest + self.stride)

    @classmethod
    def patches(cls, pixels: int, grid: int) -> Self | None:
        """Return the window that cuts images into grid x grid patches, or None."""
        kernel = ceil(pixels / grid)
        padding = ceil((kernel * grid - pixels) / 2)
        return cls(kernel, kernel, padding) if padding < kernel else None

    @classmethod
    def soft(cls, pixels: int, grid: int) -> Self | None:
        """Return the window after which two halvings leave grid x grid tokens, or None.

        Windows overlap by three quarters of the stride, as in T2T-ViT. The number of positions is
        even, so that the first halving is exact.
        """
        stride = ceil(pixels / (4 * grid))
        kernel = max(3, ceil(1.75 * stride))
        # Less padding than the kernel: every window must see some of the image.
        for padding in range(ceil((kernel - stride) / 2), kernel):
            window = cls(kernel, stride, padding)
            if window.places(pixels) in (4 * grid - 2, 4 * grid):
                return window
        return None


WINDOWS = {"t2t": Window.soft, "deit": Window.patches}
"""Functions that return the tokenising window, by kind of transformer."""


class PatchTokens(nn.Module):
    """DeiT's tokeniser: one token per patch, by a convolution."""

    def __init__(self, window: Window, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, window.kernel, window.stride, window.padding)

    def forward(self, images: Tensor) -> Tensor:
        """Return tokens, (n, tokens, width)."""
        tokens: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return tokens


class SoftSplitTokens(nn.Module):
    """T2T-ViT's tokeniser: merges overlapping windows into fewer and fewer tokens.

    Parameters
    ----------
    window : Window
        Window of the first split; the next two are 3 x 3 and halve the side.
    side : int
        Number of positions of the first window along a side.
    width, inner_width : int
        Width of the output tokens, and of those between the splits.
    """

    def __init__(
        self, window: Window, side: int, width: int, inner_width: int, dropout: float
    ) -> None:
        super().__init__()
        self.window = window
        self.sides = (side, ceil(side / 2))
        self.attention1 = Performer(3 * window.kernel**2, inner_width, dropout)
        self.attention2 = Performer(9 * inner_width, inner_width, dropout)
        self.project = nn.Linear(9 * inner_width, width)

    def forward(self, images: Tensor) -> Tensor:
        """Return tokens, (n, tokens, width)."""
        windows = _gathered(images, self.window)
        windows = _halved(self.attention1(windows), self.sides[0])
        windows = _halved(self.attention2(windows), self.sides[1])
        tokens: Tensor = self.project(windows)
        return tokens


class Performer(nn.Module):
    """Linear-time attention, by random features of the softmax kernel, and an MLP.

    The shortcut starts from the values, because the width of tokens changes here.
    """

    def __init__(self, n_in: int, width: int, dropout: float) -> None:
        super().__init__()
        n_features = width // 2
        directions = nn.init.orthogonal_(torch.empty(n_features, width)) * sqrt(n_features)
        self.w = nn.Parameter(directions, requires_grad=False)
        self.kqv = nn.Linear(n_in, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(n_in)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens, (n, tokens, width)."""
        keys, queries, values = self.kqv(self.norm1(tokens)).chunk(3, dim=-1)
        keys, queries = self._features(keys), self._features(queries)
        # Not a matrix product: autocast would round small sums and the 1e-8 to zero.
        totals = (queries * keys.sum(dim=1, keepdim=True)).sum(dim=-1, keepdim=True)
        mixed = queries @ (keys.transpose(1, 2) @ values.to(keys.dtype)) / (totals + 1e-8)
        tokens = values + self.drop(self.proj(mixed))
        result: Tensor = tokens + self.drop(self.mlp(self.norm2(tokens)))
        return result

    def _features(self, vectors: Tensor) -> Tensor:
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        exponents = vectors @ self.w.T - vectors.square().sum(dim=-1, keepdim=True) / 2
        return exponents.exp() / sqrt(len(self.w))


class Attention(nn.Module):
    """Self-attention whose logits, the relations, can be added to and returned.

    Parameters
    ----------
    hands_on : bool
        Whether to return the relations; if not, they are never held in memory.
    """

    def __init__(
        self,
        width: int,
        n_heads: int,
        *,
        bias: bool,
        hands_on: bool,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.hands_on = hands_on
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return tokens, and relations, (n, heads, tokens, tokens), including `added`."""
        packed = self.qkv(tokens).unflatten(-1, (3, self.n_heads, -1))
        queries, keys, values = packed.transpose(1, 3).unbind(dim=2)
        rate = self.attention_dropout if self.training else 0.0
        relations: Tensor | None = None
        if self.hands_on:
            relations = queries * queries.shape[-1] ** -0.5 @ keys.transpose(-1, -2)
            relations = relations if added is None else relations + added
            shares = nn.functional.dropout(relations.softmax(dim=-1), rate)
            mixed = shares @ values
        else:
            mixed = scaled_dot_product_attention(queries, keys, values, added, rate)
        return self.drop(self.proj(mixed.transpose(1, 2).flatten(2))), relations


class Mlp(nn.Module):
    """Two linear layers with GELU between them, on each token."""

    def __init__(self, n_in: int, hidden: int, n_out: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(n_in, hidden)
        self.fc2 = nn.Linear(hidden, n_out)
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens, (n, tokens, n_out)."""
        result: Tensor = self.drop(self.fc2(self.drop(self.act(self.fc1(tokens)))))
        return result


class DropPath(nn.Module):
    """Stochastic depth: drops a residual branch for a share of the samples in training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """Return the branch: zero for some samples, scaled up for the others."""
        if self.rate == 0 or not self.training:
            return branch
        kept = branch.new_empty(len(branch), 1, 1).bernoulli_(1 - self.rate)
        return branch * kept / (1 - self.rate)


def hidden_width(name: str, ratio: float, width: int) -> int:
    """Return `ratio` times the width of tokens, as a whole number of at least 1."""
    hidden = int(width * checks.between(name, ratio, 0, inf))
    if hidden < 1:
        raise ValueError(
            f"`{name}` must give at least one hidden unit for width {width}, but got {ratio}."
        )
    return hidden


def initialise(module: nn.Module) -> None:
    """Initialise the linear layers of a transformer as its authors do: small, with zero bias.

    Layers of `SoftSplitTokens` start larger: otherwise tokens would start far smaller than their
    position embeddings.
    """
    for layer in _linear_layers(module):
        nn.init.trunc_normal_(layer.weight, std=0.02)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    for part in module.modules():
        if isinstance(part, SoftSplitTokens):
            for layer in _linear_layers(part):
                nn.init.xavier_normal_(layer.weight)


def sinusoids(n_tokens: int, width: int) -> Tensor:
    """Return the fixed position embedding, (n_tokens, width): alternating sines and cosines."""
    frequencies = 10000.0 ** (-2 * (torch.arange(width, dtype=torch.float64) // 2) / width)
    angles = torch.arange(n_tokens, dtype=torch.float64)[:, None] * frequencies
    even = torch.arange(width) % 2 == 0
    return torch.where(even, angles.sin(), angles.cos()).float()


def stretching(coarse: int, fine: int) -> Tensor:
    """Return the matrix, (1 + fine**2, 1 + coarse**2), that resizes tokens to another grid.

    Along each side, tokens are repeated until there are enough, then averaged; the class token,
    which comes first, is kept. A matrix product is faster than resizing maps.

    Examples
    --------
    >>> stretching(2, 3) @ torch.tensor([9.0, 1, 2, 3, 4])
    tensor([9.0000, 1.0000, 1.5000, 2.0000, 2.0000, 2.5000, 3.0000, 3.0000, 3.5000,
            4.0000])
    """
    repeated = torch.eye(coarse).repeat_interleave(ceil(fine / coarse), dim=1)
    side = adaptive_avg_pool1d(repeated, fine).T
    squares = torch.kron(side, side)
    matrix = squares.new_zeros(1 + fine**2, 1 + coarse**2)
    matrix[0, 0] = 1
    matrix[1:, 1:] = squares
    return matrix


def windows_for(kind: str, image_size: int, grids: object) -> list[Window]:
    """Return the window for each grid; if a grid has none, the error lists the nearest that do."""
    make = WINDOWS[checks.choice("kind", kind, WINDOWS)]
    checks.count("image_size", image_size)
    if isinstance(grids, str) or not isinstance(grids, Sequence) or len(grids) < 2:
        raise TypeError(f"`grids` must be two whole numbers or more, but got {grids!r}.")
    windows = []
    for grid in grids:
        checks.count("grids", grid)
        window = make(image_size, grid)
        if window is None:
            possible = [other for other in range(1, image_size + 1) if make(image_size, other)]
            below, above = bisect(possible, grid) - 2, bisect(possible, grid) + 2
            nearest = ", ".join(map(str, possible[max(0, below) : above]))
            raise ValueError(
                f"`grids` must be sides that kind {kind!r} can cut {image_size} pixels into, but"
                f" got {grid}; the nearest are {nearest}."
            )
        windows.append(window)
    return windows


def _linear_layers(module: nn.Module) -> Iterator[nn.Linear]:
    return (part for part in module.modules() if isinstance(part, nn.Linear))


def _halved(tokens: Tensor, side: int) -> Tensor:
    """Return 3 x 3 windows with stride 2 of tokens arranged in a square."""
    square = tokens.transpose(1, 2).reshape(tokens.shape[0], -1, side, side)
    return _gathered(square, Window(3, 2, 1))


def _gathered(maps: Tensor, window: Window) -> Tensor:
    """Return the windows of maps, (n, windows, channels * kernel**2).

    Same as `torch.nn.functional.unfold`, which on a GPU processes one sample at a time.
    """
    kernel, stride, padding = window
    views = pad(maps, (padding,) * 4).unfold(2, kernel, stride).unfold(3, kernel, stride)
    return views.permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
