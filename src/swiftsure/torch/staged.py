"""The staged protocol: the four methods of a model that can stop at an exit.

| call | returns |
|---|---|
| `begin(batch)` | the state before the first exit |
| `advance(k, state)` | the state at exit k, from the one before it |
| `head(k, state)` | the output of exit k; called only if a decision needs it |
| `select(state, index)` | the state of some of the samples |

A state is any nesting of tuples, lists and dicts of tensors; every tensor has the batch first.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swiftsure._lib import checks
from swiftsure.torch.modes import refuse_training

__all__ = [
    "Scored",
    "Staged",
    "StagedModel",
    "Tempered",
    "all_outputs",
    "batch_size",
    "check",
    "device_of",
    "exit_output",
    "exit_outputs",
    "flattened",
    "plain_output",
    "refuse_unstaged",
    "rows_of",
    "shapes_of",
]


FROM_ARRAYS = " (torch.from_numpy turns an array into one)"


@runtime_checkable
class StagedModel(Protocol):
    """The methods that the runtime needs from a model."""

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
    """An exit's output with the model's own confidence, (n,) in [0, 1], used by score "model"."""

    output: Any
    confidence: Tensor


class Tempered(NamedTuple):
    """An exit's output at a temperature other than 1, with the original for confidences."""

    given: Any
    """What the head returned: logits, or `Scored`."""
    output: Tensor
    """The logits divided by the temperature."""
    temperature: float


class Staged(nn.Module):
    """Base class of staged models, with `select` for nested tensors and a `forward` over all exits.

    A subclass sets `n_exits` and defines `begin`, `advance` and `head`.
    """

    n_exits: int
    advance: Callable[[int, Any], Any]
    head: Callable[[int, Any], Any]

    def begin(self, batch: Any) -> Any:
        """Return the state before the first exit; by default the batch itself."""
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
    """A sequence of stages with a head after each."""

    def __init__(self, stages: Sequence[nn.Module], heads: Sequence[nn.Module]) -> None:
        super().__init__()
        if len(stages) != len(heads):
            raise ValueError(
                f"`heads` must have one module per stage, {len(stages)}, but got {len(heads)}."
            )
        if len(stages) < 2:
            raise ValueError(f"`stages` must have at least 2 modules, but got {len(stages)}.")
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
    return [plain_output(output) for output in exit_outputs(model, batch)]


def exit_outputs(
    model: StagedModel, batch: Any, temperatures: Sequence[float] | None = None
) -> Iterator[Any]:
    """Yield the output of each exit, `Tempered` if its temperature is not 1."""
    n, last = batch_size(batch), model.n_exits - 1
    state = model.begin(batch)
    for k in range(model.n_exits):
        state = model.advance(k, state)
        output = exit_output(model, k, state, n, 1.0 if temperatures is None else temperatures[k])
        # A head may return its state, which the next stage may overwrite.
        yield output if k == last else pytree.tree_map_only(Tensor, torch.clone, output)


def exit_output(
    model: StagedModel, exit_index: int, state: Any, n: int, temperature: float = 1.0
) -> Any:
    """Return an exit's output for n samples, `Tempered` if the temperature is not 1."""
    output = model.head(exit_index, state)
    for leaf in flattened(output)[0]:
        if isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] != n):
            raise ValueError(
                f"The output of exit {exit_index + 1} must have the samples on its first axis, {n},"
                f" but has shape {tuple(leaf.shape)}."
            )
    if temperature == 1.0:
        return output
    logits = plain_output(output)
    if not isinstance(logits, Tensor):
        raise ValueError(
            "`temperatures` need exits that return one tensor of logits, but exit"
            f" {exit_index + 1} returns {type(logits).__name__}."
        )
    return Tempered(output, _divide(logits, temperature), temperature)


def _divide(logits: Tensor, temperature: float) -> Tensor:
    """Return logits divided by a temperature, in float32 or wider, with the same argmax."""
    divided = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if logits.ndim != 2:
        return divided
    # Rounding can tie the largest logits. Argmax would then take the first, which may differ from
    # the prediction without a temperature and from the one in a record of the logits.
    top = logits.argmax(dim=1, keepdim=True)
    largest = divided.gather(1, top)
    raised = largest.nextafter(torch.full_like(largest, torch.inf))
    tied = divided.argmax(dim=1, keepdim=True) != top
    return divided.scatter_(1, top, torch.where(tied, raised, largest))


def plain_output(output: Any) -> Any:
    """Return the output inside `Scored` or `Tempered`; anything else as it is."""
    return output.output if isinstance(output, Scored | Tempered) else output


def rows_of(tree: Any, index: Tensor) -> Any:
    """Return some rows of every tensor in a nested structure."""
    if isinstance(tree, Tensor):  # pytree takes microseconds
        return tree.index_select(0, index)
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.index_select(0, index), tree)


_LEAF = pytree.tree_structure(0)


def flattened(tree: Any) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
    """Return the leaves of a nested structure, and the structure."""
    if isinstance(tree, Tensor):
        return (tree,), _LEAF
    found, spec = pytree.tree_flatten(tree)
    leaves = tuple(found)
    found.clear()  # PyTorch's list is part of a reference cycle, which would keep the tensors
    return leaves, spec


def shapes_of(tree: Any) -> Any:
    """Return a nested structure with every tensor replaced by its shape per sample."""
    return pytree.tree_map_only(Tensor, lambda leaf: tuple(leaf.shape[1:]), tree)


def batch_size(tree: Any) -> int:
    """Return the length of the first axis of the first tensor in a nested structure."""
    if isinstance(tree, Tensor) and tree.ndim > 0:
        return tree.shape[0]
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    raise TypeError(
        "`batch` must hold at least one tensor with the batch first, but got"
        f" {type(tree).__name__} without any{FROM_ARRAYS}."
    )


def device_of(tree: Any) -> torch.device:
    """Return the device of the first tensor in a nested structure."""
    if isinstance(tree, Tensor):
        return tree.device
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            return leaf.device
    raise TypeError(
        f"`batch` must hold at least one tensor, but got {type(tree).__name__} without any"
        f"{FROM_ARRAYS}."
    )


def refuse_unstaged(model: Any, *, selects: bool = True, fewest: int = 2) -> None:
    """Raise if a model is not staged; `select` is only needed for early exits."""
    for name in ("begin", "advance", "head", *(["select"] if selects else [])):
        if not callable(getattr(model, name, None)):
            raise TypeError(
                f"`model` must have a method `{name}`, but {type(model).__name__} has none:"
                " cut a plain network with `swiftsure.torch.attach_heads`, or write a subclass of"
                " `Staged`."
            )
    checks.count("model.n_exits", getattr(model, "n_exits", 0), fewest)


def check(model: StagedModel, batch: Any) -> None:
    """Run a batch through a staged model and raise if the model breaks the protocol.

    Checks for missing methods, states without the batch axis, samples that depend on others in
    their batch, a `select` that changes results, and outputs whose shapes differ between exits.

    Parameters
    ----------
    batch
        At least 3 samples, all different.

    Raises
    ------
    TypeError, ValueError
        The message says what to fix.
    """
    refuse_unstaged(model)
    refuse_training(model)
    n = batch_size(batch)
    if n < 3:
        raise ValueError(f"`batch` must hold at least 3 samples to check with, but got {n}.")
    two = torch.tensor([n - 1, 0], device=device_of(batch))
    swapped = two.new_tensor([1, 0])
    first_shapes: Any = None
    with torch.no_grad():
        alone = model.begin(rows_of(batch, two))
        state = model.begin(batch)
        selected: Any = None  # the same two, chosen after exit 1 and swapped after each later one
        for k in range(model.n_exits):
            _check_state(f"The state before exit {k + 1}", state, n)
            state, alone = model.advance(k, state), model.advance(k, alone)
            _check_state(f"The state at exit {k + 1}", state, n)
            output = model.head(k, state)
            _check_state(f"The output of exit {k + 1}", output, n)
            shapes = shapes_of(output)
            first_shapes = shapes if k == 0 else first_shapes
            if shapes != first_shapes:
                raise ValueError(
                    f"All exits must return outputs of the same shape, but exit 1 returns"
                    f" {first_shapes} and exit {k + 1} {shapes}."
                )
            _check_same(
                model.head(k, alone),
                rows_of(output, two),
                f"Exit {k + 1} changes its output if other samples of the batch are left out",
                "outputs must not depend on the other samples of a batch",
            )
            if k > 0:
                selected = model.advance(k, selected)
                order = two if k % 2 else two.flip(0)
                _check_same(
                    model.head(k, selected),
                    rows_of(output, order),
                    f"Exit {k + 1} changes its output after `select`",
                    "it must return the rows `index` of every tensor in the state",
                )
            if k < model.n_exits - 1:
                selected = model.select(state, two) if k == 0 else model.select(selected, swapped)
                _check_state(f"The result of `select` at exit {k + 1}", selected, 2)


def _check_state(where: str, tree: Any, n: int) -> None:
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(tree)):
        raise TypeError(f"{where} must hold tensors, but got {type(tree).__name__}.")
    for path, leaf in pytree.tree_leaves_with_path(tree):
        name = pytree.keystr(path) or "itself"
        if isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] != n):
            raise ValueError(
                f"{where} must have the batch on the first axis, {n}, but {name}"
                f" has shape {tuple(leaf.shape)}: expand it, or keep it in the model if all samples"
                " share it."
            )
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            raise ValueError(
                f"{where} must hold tensors, but {name} is the number {leaf}, which cannot be"
                " selected by sample: compute it where it is used, from a tensor's shape."
            )


def _check_same(got: Any, expected: Any, what: str, why: str) -> None:
    for one, two in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        if not isinstance(one, Tensor):
            continue
        if one.shape != two.shape:
            raise ValueError(f"{what} ({tuple(one.shape)}, not {tuple(two.shape)}): {why}.")
        # Matrix products round differently at other batch sizes, more so in half precision.
        loose = 10 * torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
        a, b = one.double(), two.double()
        near = torch.isclose(a, b, rtol=max(1e-3, loose), atol=max(1e-4, loose), equal_nan=True)
        if not near.all():
            difference = (a - b)[~near].abs().max()
            raise ValueError(f"{what} (largest difference {difference:.2g}): {why}.")
