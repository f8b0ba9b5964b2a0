"""Results of a run with PyTorch: of whole batches, and of samples that exited together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure.run.results import (
    ExitOutputBase,
    InvalidSampleError,
    StreamResultBase,
    refuse_output,
)
from swiftsure.torch.staged import flattened, plain_output, shapes_of

__all__ = [
    "ExitOutput",
    "InvalidSampleError",
    "StreamResult",
    "assembled",
    "broken_rows",
    "joined",
    "owned",
    "refuse_broken",
    "refuse_confidence",
    "refuse_output",
]


@dataclass(frozen=True, repr=False)
class ExitOutput(ExitOutputBase):
    """Results of a batch, in the order of the batch, as tensors.

    Attributes are those of `swiftsure.run.results.ExitOutputBase`.
    """

    @cached_property
    def invalid(self) -> Tensor:
        """Whether each sample has no valid answer, (n,)."""
        found = _invalid_rows(self.raw, len(self.exits))
        if self.failures:
            found = found.index_fill(0, torch.tensor([*self.failures], device=found.device), True)
        return found

    def _refuse_broken(self) -> None:
        refuse_broken(self.raw, self.exits)

    def _built(self) -> Any:
        return ordinary(self.raw)

    def _on_host(self) -> NDArray[np.int64]:
        exits: NDArray[np.int64] = self.exits.cpu().numpy()
        return exits

    @property
    def predictions(self) -> Tensor:
        """Most probable class of each sample, for classifiers."""
        if not isinstance(self.outputs, Tensor) or self.outputs.ndim < 2:
            raise ValueError(
                "`predictions` needs outputs of shape (n, n_classes, ...), but got"
                f" {shapes_of(self.outputs)} per sample: use `outputs`."
            )
        return self.outputs.argmax(dim=1)


@dataclass(frozen=True)
class StreamResult(StreamResultBase):
    """Samples that exited together, as tensors.

    Attributes are those of `swiftsure.run.results.StreamResultBase`.
    """

    @cached_property
    def invalid(self) -> Tensor:
        """Whether each sample has no valid answer, (m,)."""
        return _invalid_rows(self.raw, len(self.ids))

    def _refuse_broken(self) -> None:
        refuse_broken(self.raw, self.exit, self.ids)

    def _built(self) -> Any:
        return ordinary(self.raw)


@torch.inference_mode(False)
def assembled(parts: Sequence[tuple[Tensor, Any]], n: int) -> Any:
    """Return outputs of n samples from those of some rows each; raises unless all are alike."""
    first, structure = flattened(parts[0][1])
    whole = list(first)
    for _, values in parts[1:]:
        leaves, other = flattened(values)
        if other != structure or not all(map(_same_form, whole, leaves)):
            what = "shape" if other == structure else "structure"
            raise ValueError(
                f"Exits must return outputs of the same {what}, but got {shapes_of(values)} after"
                f" {shapes_of(parts[0][1])}: find the exit with `swiftsure.torch.check`."
            )
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                # Use the widest dtype: the first exit must not set the precision of later ones.
                whole[k] = whole[k].to(torch.promote_types(whole[k].dtype, leaf.dtype))
    for k, leaf in enumerate(whole):
        if isinstance(leaf, Tensor):
            whole[k] = leaf.new_empty((n, *leaf.shape[1:]))
            for rows, values in parts:
                whole[k].index_copy_(0, rows, flattened(values)[0][k].to(leaf.dtype))
    return pytree.tree_unflatten(whole, structure)


@torch.inference_mode(False)
def joined(parts: Sequence[tuple[Tensor, ExitOutput]]) -> ExitOutput:
    """Return the results of a batch from those of its parts, each given with its rows."""
    back = torch.cat([rows for rows, _ in parts]).argsort()
    found = [part for _, part in parts]

    def whole(*leaves: Any) -> Any:
        return torch.cat(leaves)[back] if isinstance(leaves[0], Tensor) else leaves[0]

    seen = [each.confidences for each in found if each.confidences is not None]
    return ExitOutput(
        pytree.tree_map(whole, *(each.raw for each in found)),
        whole(*(each.exits for each in found)),
        whole(*seen) if len(seen) == len(found) else None,
        whole(*(each.decided for each in found)),
        on_invalid=found[0].on_invalid,
        failures={int(rows[k]): why for rows, each in parts for k, why in each.failures.items()},
    )


@torch.inference_mode(False)
def ordinary(tree: Any) -> Any:
    """Return a nested structure with inference tensors cloned, so that gradients work."""
    if isinstance(tree, Tensor):
        return tree.clone() if tree.is_inference() else tree
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf.clone() if leaf.is_inference() else leaf, tree
    )


@torch.inference_mode(False)
def owned(tree: Any) -> Any:
    """Return a copy of a head's output, which may alias its state, the batch or a weight."""
    if isinstance(tree, Tensor):
        return tree.clone()
    return pytree.tree_map_only(Tensor, torch.clone, tree)


def _same_form(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.shape[1:] == two.shape[1:]
    return bool(one == two)


def broken_rows(output: Any) -> Tensor | None:
    """Return which rows of an output are not valid, (n,).

    A classifier's largest logit must be finite; others may be −inf, for masked classes. Maps
    (n, n_classes, height, width) must be finite, since they are interpolated. None if there is
    nothing to check: in outputs of other shapes NaN may have a meaning.
    """
    values = plain_output(output)
    if isinstance(values, Tensor) and values.is_floating_point() and values.shape[1:].numel():
        # The largest and the smallest of some numbers are NaN if any of them is.
        if values.ndim == 2:
            return ~values.amax(dim=1).isfinite()
        if values.ndim == 4:
            low, high = values.flatten(1).aminmax(dim=1)
            return ~(low.isfinite() & high.isfinite())
    return None


def _invalid_rows(output: Any, n: int) -> Tensor:
    found = broken_rows(output)
    return torch.zeros(n, dtype=torch.bool) if found is None else found


def refuse_broken(output: Any, exits: int | Tensor, samples: Tensor | None = None) -> None:
    """Raise if a row's output is not valid; the message is about the first one.

    Parameters
    ----------
    exits : int or (n,)
        Exits of the samples.
    samples : (n,), optional
        Their numbers, for the error; positions by default.
    """
    values = plain_output(output)
    on_host = isinstance(values, Tensor) and values.ndim == 2 and values.device.type == "cpu"
    # One number tells most of the time: a sum is not finite if any of its parts is not.
    if on_host and values.numel() and math.isfinite(values.amax(dim=1).sum().item()):
        return
    broken = broken_rows(output)
    if broken is None or not broken.any():
        return
    rows = broken.nonzero()[:, 0]
    row = int(rows[0])
    exit_index = exits if isinstance(exits, int) else int(exits[row])
    named: list[int] = (rows if samples is None else samples[rows.to(samples.device)]).tolist()
    refuse_output(exit_index, *named)


def refuse_confidence(exit_index: int, sample: int) -> NoReturn:
    """Raise for a sample whose confidence is NaN, which a record must not hold."""
    raise InvalidSampleError(
        f"The confidence of exit {exit_index + 1} is NaN for sample {sample}:"
        " look for NaN and very large numbers in its inputs, or run in a wider dtype.",
        [sample],
    )
