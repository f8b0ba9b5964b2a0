"""Cross-attention and self-attention layers of Dynamic Perceiver.

Submodules keep the published names, so that published weights load unchanged.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

__all__ = ["CrossLayer", "SelfLayer"]


class CrossLayer(nn.Module):
    """Cross-attention from tokens to others, then an MLP on each token."""

    def __init__(
        self, width: int, other_width: int, inner: int, n_positions: int | None = None
    ) -> None:
        super().__init__()
        self.cross_attn = CrossAttention(width, other_width, inner, n_positions)
        self.mlp = Transform(width, widening=1)

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        """Return the tokens, (n, tokens, width), after attending to (n, others, other_width)."""
        tokens = tokens + self.cross_attn(tokens, others)
        result: Tensor = tokens + self.mlp(tokens)
        return result


class SelfLayer(nn.Module):
    """Self-attention between tokens, then an MLP on each token."""

    def __init__(self, width: int, n_heads: int, widening: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width, n_heads)
        self.mlp = Transform(width, widening)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens, (n, tokens, width)."""
        tokens = tokens + self.self_attn(tokens)
        result: Tensor = tokens + self.mlp(tokens)
        return result


class CrossAttention(nn.Module):
    """Attention from tokens to others, both layer-normalised."""

    def __init__(self, width: int, other_width: int, inner: int, n_positions: int | None) -> None:
        super().__init__()
        self.q_norm, self.kv_norm = nn.LayerNorm(width), nn.LayerNorm(other_width)
        self.attention = Attention(width, other_width, inner, 1, n_positions)

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        """Return what is added to the tokens."""
        added: Tensor = self.attention(self.q_norm(tokens), self.kv_norm(others))
        return added


class SelfAttention(nn.Module):
    """Attention between layer-normalised tokens."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, width, width, n_heads)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what is added to the tokens."""
        tokens = self.norm(tokens)
        added: Tensor = self.attention(tokens, tokens)
        return added


class Attention(nn.Module):
    """Scaled dot-product attention, optionally with a learned key bias per position."""

    def __init__(
        self,
        width: int,
        other_width: int,
        inner: int,
        n_heads: int,
        n_positions: int | None = None,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.relative_position_bias = None
        if n_positions is not None:
            self.relative_position_bias = nn.Parameter(0.02 * torch.randn(1, n_positions, inner))
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(other_width, inner, bias=False)
        self.v_proj = nn.Linear(other_width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width)

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        """Return the attention output for the tokens."""
        keys = self.k_proj(others)
        if self.relative_position_bias is not None:
            keys = keys + self.relative_position_bias
        q, k, v = (
            projected.unflatten(2, (self.n_heads, -1)).transpose(1, 2)
            for projected in (self.q_proj(tokens), keys, self.v_proj(others))
        )
        heads = scaled_dot_product_attention(q, k, v)
        read: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return read


class Transform(nn.Module):
    """Layer normalisation and an MLP with one hidden layer, on each token."""

    def __init__(self, width: int, widening: int) -> None:
        super().__init__()
        self.layernorm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, widening * width)
        self.fc2 = nn.Linear(widening * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what is added to the tokens."""
        added: Tensor = self.fc2(gelu(self.fc1(self.layernorm(tokens))))
        return added
