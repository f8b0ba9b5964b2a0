"""The staged protocol: a model that can stop, and what it takes to satisfy it.

| call | gives |
|---|---|
| `begin(batch)` | the state before the first exit |
| `advance(k, state)` | the state at exit k, from the one before it |
| `head(k, state)` | the output of exit k; asked for only where a decision needs it |
| `select(state, index)` | the state of some of the samples |

A state is any nesting of tuples, lists and dicts of tensors; every tensor has the batch first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swiftsure import checks

__all__ = [
    "Scored",
    "Staged",
    "StagedModel",
    "all_outputs",
    "batch_size",
    "check",
    "device_of",
    "rows_of",
]


@runtime_checkable
class StagedModel(Protocol):
    """What the runtime needs of a model."""

    n_exits: int

    def begin(self, batch: Any) -> Any:
        """Return the state before the first exit."""

    def advance(self, exit_index: int, state: Any) -> Any:
        """Return the state at an exit, from the one before it."""

    def head(self, exit_index: int, state: Any) -> Any:
        """Return the output of an exit: tensors with the batch first, or `Scored`."""

    def select(self, state: Any, index: Tensor) -> Any:
        """Return the state of some of the samples."""


class Scored(NamedTuple):
    """An exit's output with the model's own confidence, (n,), in [0, 1]; its score is "model"."""

    output: Any
    confidence: Tensor


class Staged(nn.Module):
    """Base of staged models: `select` for any nesting of tensors, and `forward` through all exits.

    A subclass sets `n_exits` and writes `begin`, `advance` and `head`.
    """

    n_exits: int
    advance: Callable[[int, Any], Any]
    head: Callable[[int, Any], Any]

    def begin(self, batch: Any) -> Any:
        """Return the state before the first exit: by default the batch itself."""
        return batch

    def select(self, state: Any, index: Tensor) -> Any:
        """Return the state of some of the samples."""
        return rows_of(state, index)

    def forward(self, batch: Any) -> list[Any]:
        """Return the outputs of all exits, in order."""
        return all_outputs(cast(StagedModel, self), batch)

    @classmethod
    def from_sequential(
        cls, stages: Sequence[nn.Module], heads: Sequence[nn.Module]
    ) -> "SequentialStaged":
        """Return a staged model whose exit k runs `heads[k]` after `stages[0..k]`.

        Examples
        --------
        >>> model = Staged.from_sequential(
        ...     [nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)]
        ... )
        >>> [tuple(output.shape) for output in model(torch.zeros(2, 4))]
        [(2, 3), (2, 3)]
        """
        return SequentialStaged(stages, heads)


class SequentialStaged(Staged):
    """Stages in a row, with a head after each."""

    def __init__(self, stages: Sequence[nn.Module], heads: Sequence[nn.Module]) -> None:
        super().__init__()
        if len(stages) != len(heads):
            raise ValueError(
                f"`heads` must be as many as stages, {len(stages)}, but got {len(heads)}."
            )
        if len(stages) < 2:
            raise ValueError(f"`stages` must be at least 2, but got {len(stages)}.")
        self.stages = nn.ModuleList(stages)
        self.heads = nn.ModuleList(heads)
        self.n_exits = len(stages)

    def advance(self, exit_index: int, state: Any) -> Any:
        """Run one stage."""
        return self.stages[exit_index](state)

    def head(self, exit_index: int, state: Any) -> Any:
        """Run one head."""
        return self.heads[exit_index](state)


def all_outputs(model: StagedModel, batch: Any) -> list[Any]:
    """Return the outputs of all exits, in order, without the model's own confidences."""
    outputs = []
    state = model.begin(batch)
    for k in range(model.n_exits):
        state = model.advance(k, state)
        output = model.head(k, state)
        outputs.append(output.output if isinstance(output, Scored) else output)
    return outputs


def rows_of(tree: Any, index: Tensor) -> Any:
    """Return some rows of every tensor in a nesting of them."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.index_select(0, index), tree)


def batch_size(tree: Any) -> int:
    """Return the length of the first axis of the first tensor in a nesting."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    raise TypeError("`batch` must hold at least one tensor with the batch first.")


def check(model: StagedModel, batch: Any) -> None:
    """Run a batch through a staged model and say what is wrong with it, if anything is.

    Looks for a missing method, states without the batch axis, `select` that changes results, and
    outputs whose shapes differ between exits.

    Parameters
    ----------
    batch
        At least 3 samples, all different.

    Raises
    ------
    TypeError, ValueError
        With what to mend.
    """
    for name in ("begin", "advance", "head", "select"):
        if not callable(getattr(model, name, None)):
            raise TypeError(f"`model` must have a method `{name}`; see swiftsure.torch.staged.")
    checks.count("model.n_exits", getattr(model, "n_exits", 0), 2)
    n = batch_size(batch)
    if n < 3:
        raise ValueError(f"`batch` must hold at least 3 samples to check with, but got {n}.")
    training = isinstance(model, nn.Module) and model.training
    if training:
        raise ValueError("`model` must be in evaluation mode: call model.eval() first.")
    shapes: Any = None
    with torch.no_grad():
        state = model.begin(batch)
        chosen = torch.tensor([n - 1, 0])
        part = None
        for k in range(model.n_exits):
            _check_state(f"the state before exit {k + 1}", state, n)
            if k == 1:
                part = model.select(state, chosen.to(device_of(state)))
            state = model.advance(k, state)
            _check_state(f"the state at exit {k + 1}", state, n)
            output = model.head(k, state)
            _check_state(f"the output of exit {k + 1}", output, n)
            found = pytree.tree_map(lambda leaf: tuple(leaf.shape[1:]), output)
            if shapes is not None and found != shapes:
                raise ValueError(
                    f"Exit {k + 1} gives outputs of shape {found}, but exit 1 of {shapes}; all"
                    " exits must agree."
                )
            shapes = found
            if part is not None:
                part = model.advance(k, part)
                _check_same(k, model.head(k, part), rows_of(output, chosen.to(device_of(output))))


def _check_state(where: str, tree: Any, n: int) -> None:
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError(f"{where} must hold tensors, but got {type(tree).__name__}.")
    for path, leaf in pytree.tree_leaves_with_path(tree):
        name = pytree.keystr(path) or "itself"
        if isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] != n):
            raise ValueError(
                f"A leaf of {where} ({name}) has shape {tuple(leaf.shape)}: its first axis must be"
                f" the batch, {n}. Expand it, or keep what all samples share in the model."
            )
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            raise ValueError(
                f"A leaf of {where} ({name}) is the number {leaf}: numbers in a state cannot follow"
                " the samples. Compute it from a tensor's shape where it is used."
            )


def _check_same(k: int, got: Any, expected: Any) -> None:
    for one, two in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        if not torch.allclose(one.float(), two.float(), rtol=1e-3, atol=1e-4):
            raise ValueError(
                f"Exit {k + 1} gives other outputs after `select` than for the whole batch (largest"
                f" difference {(one - two).abs().max():.2g}): some part of the state is not"
                " selected, or samples of a batch depend on each other."
            )


def device_of(tree: Any) -> torch.device:
    """Return the device of the first tensor in a nesting."""
    return next(leaf.device for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
