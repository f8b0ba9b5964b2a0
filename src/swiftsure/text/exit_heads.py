"""Exit heads: linear maps that let a model exit early without being trained to.

The state after an early block is not what the model's head expects. An exit head maps it to the
state after the last block. It is fitted in closed form on the model's own answers, without a
training loop, and costs a fraction of a block.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swiftsure.text.weights import load_weights, save_weights

__all__ = ["ExitHeads", "solve_exit_heads"]

EPS = 1e-6
"""Added to the mean square before states are scaled to 1."""


class ExitHeads(nn.Module):
    """Linear maps from the states after some blocks to those after the last block.

    States are scaled to a mean square of 1 first; the model's own norm, which follows, ignores
    their size anyway.

    Parameters
    ----------
    width : int
        Width of the hidden states.
    exits : ints
        Blocks after which tokens may exit, 0-based; tokens never exit after other blocks.
    trained_on : hashes of inputs
        Hashes of the texts they were fitted on (`input_hashes`), which `sweep` refuses to record.

    Examples
    --------
    >>> heads = ExitHeads(8, exits=[3, 5])
    >>> heads(3, torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, width: int, exits: Iterable[int], *, trained_on: Iterable[str] = ()) -> None:
        super().__init__()
        self.exits = tuple(sorted(set(exits)))
        if not self.exits or self.exits[0] < 0:
            raise ValueError(f"`exits` must name blocks, from 0 on, but got {self.exits}.")
        self.width = width
        self.trained_on = frozenset(trained_on)
        self.maps = nn.ModuleDict({str(k): nn.Linear(width, width) for k in self.exits})

    def forward(self, exit_index: int, states: Tensor) -> Tensor:
        """Return the predicted states after the last block, from those after `exit_index`."""
        predicted: Tensor = self.maps[str(exit_index)](scaled(states))
        return predicted

    @property
    def flops(self) -> int:
        """FLOPs of one map for one token."""
        return 2 * self.width**2

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights and the hashes of the training texts to a safetensors file."""
        save_weights(path, self.maps.state_dict(), self.trained_on)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ExitHeads":
        """Read heads that `save` wrote."""
        weights, trained_on = load_weights(path, _shapes)
        exits = {int(name.split(".")[0]) for name in weights}
        first = weights[f"{min(exits)}.weight"]
        heads = cls(len(first), exits, trained_on=trained_on)
        heads.maps.load_state_dict(weights)
        return heads.to(first.dtype).eval()


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of heads: a map and a bias for each exit, of the first one's width."""
    named = {name: re.fullmatch(r"(0|[1-9][0-9]{0,3})\.(weight|bias)", name) for name in weights}
    odd = next((name for name, match in named.items() if match is None), None)
    if odd is not None or not weights:
        raise ValueError(f"it must hold EXIT.weight and EXIT.bias, not {odd!r:.80}")
    width = max(each.shape[0] if each.ndim else 0 for each in weights.values())
    if width == 0:
        raise ValueError("its maps are empty")
    exits = {match[1] for match in named.values() if match is not None}
    return {f"{k}.weight": (width, width) for k in exits} | {f"{k}.bias": (width,) for k in exits}


class HeadedNorm(nn.Module):
    """The final norm of a truncated model, with an exit head's map in front.

    Parameters
    ----------
    heads : ExitHeads
    exit_index : int
        The truncated model's last block.
    norm : nn.Module
        The full model's norm.
    """

    def __init__(self, heads: ExitHeads, exit_index: int, norm: nn.Module) -> None:
        super().__init__()
        self.map = heads.maps[str(exit_index)]
        self.norm = norm
        self.trained_on = heads.trained_on
        self.training = norm.training  # not train(), which would change shared modules

    def forward(self, states: Tensor) -> Tensor:
        """Return the predicted normed states after the full model's last block."""
        normed: Tensor = self.norm(self.map(scaled(states)))
        return normed


def scaled(states: Tensor) -> Tensor:
    """Return the states scaled to mean square 1."""
    wide = states.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)).to(states.dtype)


def solve_exit_heads(
    answers: Iterable[Sequence[Tensor]],
    exits: Iterable[int],
    *,
    ridge: float = 1e-3,
    normed: bool = True,
    trained_on: Iterable[str] = (),
) -> ExitHeads:
    """Fit exit heads by ridge regression.

    Parameters
    ----------
    answers : iterable
        Batches of states after every block, (tokens, width) each.
    exits : ints
        As in `ExitHeads`.
    ridge : float
        Penalty on large weights, as a share of the states' mean square.
    normed : bool
        Whether the model has a norm after its last block, so that the size of states is irrelevant.
    """
    if not ridge >= 0:
        raise ValueError(f"`ridge` must be at least 0, but got {ridge}.")
    chosen = tuple(exits)
    # Sums over all tokens, in float64, of products of the states with each other and the goal.
    squares: dict[int, Any] = dict.fromkeys(chosen, 0.0)
    products: dict[int, Any] = dict.fromkeys(chosen, 0.0)
    n = width = 0
    for states in answers:
        goal = (scaled(states[-1]) if normed else states[-1]).double()
        n, width = n + len(goal), goal.shape[1]
        for k in chosen:
            if k >= len(states) - 1:
                raise ValueError(
                    f"`exits` must come before the last of {len(states)} blocks, but got {k}."
                )
            given = nn.functional.pad(scaled(states[k]).double(), (0, 1), value=1.0)
            squares[k] += given.T @ given
            products[k] += given.T @ goal
    if n == 0:
        raise ValueError("`texts` must not be empty.")
    heads = ExitHeads(width, chosen, trained_on=trained_on)
    for k in chosen:
        penalty = torch.full_like(squares[k][0], ridge * n)
        penalty[-1] = 0.0  # not on the bias
        solved = torch.linalg.solve(squares[k] + torch.diag(penalty), products[k])
        heads.maps[str(k)].load_state_dict({"weight": solved[:-1].T, "bias": solved[-1]})
    return heads.eval()
