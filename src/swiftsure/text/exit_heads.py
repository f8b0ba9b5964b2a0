"""Exit heads: light maps that let a model leave early which was never trained to.

The state after an early block is not what the model's head expects. A linear map from it to the
state after the last block, fitted in closed form on the model's own answers, is a fraction of a
block's cost, and needs no training loop.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swiftsure.text.weights import load_weights, save_weights

__all__ = ["ExitHeads", "solve_exit_heads"]

EPS = 1e-6
"""Of the scaling of states to a mean square of 1."""


class ExitHeads(nn.Module):
    """For some blocks, a linear map from the states after it to those after the last block.

    States are scaled to a mean square of 1 first, which is all that the model's own norm, which
    follows, would see of their size.

    Parameters
    ----------
    width : int
        Of the hidden states.
    exits : ints
        Blocks after which tokens may leave, 0-based; after the others none does.
    trained_on : hashes of inputs
        What they were fitted on (`input_hashes`), which `sweep` refuses to record.

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
        """Return states after the last block, guessed from those after block `exit_index`."""
        guessed: Tensor = self.maps[str(exit_index)](scaled(states))
        return guessed

    @property
    def flops(self) -> int:
        """FLOPs of one map for one token."""
        return 2 * self.width**2

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights, and what they were fitted on, to a safetensors file."""
        save_weights(path, self.maps.state_dict(), self.trained_on)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ExitHeads":
        """Read heads that `save` wrote."""
        weights, trained_on = load_weights(path)
        exits = [int(name.split(".")[0]) for name in weights if name.endswith(".weight")]
        if not exits:
            raise ValueError(f"{path} holds no exit heads.")
        first = weights[f"{exits[0]}.weight"]
        heads = cls(first.shape[1], exits, trained_on=trained_on)
        heads.maps.load_state_dict(weights)
        return heads.to(first.dtype).eval()


class HeadedNorm(nn.Module):
    """The norm before the head of a model that ends early: an exit head's map comes first.

    Parameters
    ----------
    heads : ExitHeads
    exit_index : int
        The last block that the model has.
    norm : nn.Module
        The full model's.
    """

    def __init__(self, heads: ExitHeads, exit_index: int, norm: nn.Module) -> None:
        super().__init__()
        self.map = heads.maps[str(exit_index)]
        self.norm = norm
        self.trained_on = heads.trained_on
        self.training = norm.training  # by itself: the parts are of others

    def forward(self, states: Tensor) -> Tensor:
        """Return normed states after the last block of the full model, as they are guessed."""
        normed: Tensor = self.norm(self.map(scaled(states)))
        return normed


def scaled(states: Tensor) -> Tensor:
    """Return states of mean square 1."""
    wide = states.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)).to(states.dtype)


def solve_exit_heads(
    answers: Iterable[Sequence[Tensor]],
    exits: Iterable[int],
    *,
    ridge: float = 1e-3,
    trained_on: Iterable[str] = (),
) -> ExitHeads:
    """Return the heads of least squared error, with a small penalty on large weights.

    Parameters
    ----------
    answers : iterable
        States of tokens after every block, (tokens, width) each, in as many parts as one likes.
    exits : ints
        As in `ExitHeads`.
    ridge : float
        The penalty, as a share of the states' mean square.
    """
    chosen = tuple(exits)
    sums = _Sums(chosen)
    for states in answers:
        sums.add(states)
    heads = ExitHeads(sums.width, chosen, trained_on=trained_on)
    with torch.no_grad():
        for k, (weight, bias) in zip(chosen, sums.solved(ridge), strict=True):
            found: Any = heads.maps[str(k)]
            found.weight.copy_(weight)
            found.bias.copy_(bias)
    return heads.eval()


class _Sums:
    """What least squares needs of all tokens: products of states, in float64."""

    def __init__(self, exits: Sequence[int]) -> None:
        self.exits = exits
        self.squares: list[Tensor] = []
        self.products: list[Tensor] = []
        self.n = 0

    @property
    def width(self) -> int:
        if not self.n:
            raise ValueError("`texts` must not be empty.")
        return int(self.products[0].shape[1])

    def add(self, states: Sequence[Tensor]) -> None:
        goal = scaled(states[-1]).double()
        self.n += len(goal)
        for place, k in enumerate(self.exits):
            if k >= len(states) - 1:
                raise ValueError(
                    f"`exits` must come before the last of {len(states)} blocks, but got {k}."
                )
            given = nn.functional.pad(scaled(states[k]).double(), (0, 1), value=1.0)
            if len(self.squares) <= place:
                self.squares.append(given.new_zeros(given.shape[1], given.shape[1]))
                self.products.append(given.new_zeros(given.shape[1], goal.shape[1]))
            self.squares[place] += given.T @ given
            self.products[place] += given.T @ goal

    def solved(self, ridge: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield weight and bias of each exit."""
        if not ridge >= 0:
            raise ValueError(f"`ridge` must be at least 0, but got {ridge}.")
        for squares, products in zip(self.squares, self.products, strict=True):
            penalty = torch.full_like(squares[0], ridge * self.n)
            penalty[-1] = 0.0  # not on the bias
            found = torch.linalg.solve(squares + torch.diag(penalty), products)
            yield found[:-1].T.float(), found[-1].float()
