"""Results of a run: samples that exited together, and whole batches assembled from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure._lib.html import html_card
from swiftsure.torch.staged import flattened, plain_output, shapes_of

if TYPE_CHECKING:
    from swiftsure.torch.audit import Audit

__all__ = [
    "ExitOutput",
    "Gathered",
    "InvalidSampleError",
    "StreamResult",
    "broken_rows",
    "joined",
    "owned",
    "refuse_broken",
    "refuse_confidence",
    "refuse_output",
]


class InvalidSampleError(ValueError):
    """Some samples have no valid answer: their output is NaN or infinite.

    Attributes
    ----------
    samples : (m,)
        Which ones: rows of the batch, or numbers of samples in a stream.
    """

    def __init__(self, message: str, samples: Sequence[int]) -> None:
        super().__init__(message)
        self.samples: NDArray[np.int64] = np.asarray(samples, np.int64)


@dataclass(frozen=True)
class ExitOutput:
    """Results of a batch, in the order of the batch.

    Attributes
    ----------
    outputs
        What the heads return, with the batch first. Logits are divided by the exit's temperature
        if it is not 1, in float32 or wider. Reading this raises `InvalidSampleError` if a sample's
        largest logit is not finite, unless invalid samples are marked.
    invalid : (n,)
        Whether each sample has no valid answer. With `EarlyExit(..., on_invalid="mark")` their rows
        of `outputs` mean nothing, and those of all other samples are valid.
    failures : dict
        Why the model raised an error, by row; such samples are invalid and have exit -1.
    exits : (n,)
        Exit of each sample, 0-based.
    confidences : (n, n_exits - 1)
        Confidences that the decisions used; NaN if an exit was not reached or its head not needed.
        None from a stream.
    audit : Audit, optional
        The full model's answers to some of the samples, if the runtime audits.
    """

    raw: Any
    exits: Tensor
    confidences: Tensor | None
    decided: Tensor
    audit: "Audit | None" = None
    on_invalid: str = "raise"
    failures: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def outputs(self) -> Any:
        """Outputs of all samples, checked on first read.

        On a GPU the check waits for the device, so it is delayed to let the next batch start.
        """
        if self.on_invalid == "raise":
            refuse_broken(self.raw, self.exits)
        return ordinary(self.raw)

    @cached_property
    def invalid(self) -> Tensor:
        """Whether each sample has no valid answer, (n,)."""
        found = _invalid_rows(self.raw, len(self.exits))
        if self.failures:
            found = found.index_fill(0, torch.tensor([*self.failures], device=found.device), True)
        return found

    @property
    def _counts(self) -> list[int]:
        counts: list[int] = self.exits[self.exits >= 0].bincount().tolist()
        return counts

    def __repr__(self) -> str:
        return f"ExitOutput(n={len(self.exits)}, samples_per_exit={self._counts})"

    def _repr_html_(self) -> str:
        counts = self._counts
        facts = {f"exited at exit {k + 1}": f"{count:,}" for k, count in enumerate(counts)}
        return html_card("ExitOutput", {"samples": f"{len(self.exits):,}"} | facts)

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
class StreamResult:
    """Samples that exited together.

    Attributes
    ----------
    ids : (m,)
        Numbers of the samples, ascending, counted from 0 in the order in which they were pushed.
    outputs
        What the exit's head returned, with the samples first; checked on first read.
    exit : int
        Their exit, 0-based.
    invalid : (m,)
        Whether each sample has no valid answer, as in `ExitOutput`.
    """

    ids: Tensor
    raw: Any
    exit: int
    decided: Tensor | None = None  # the confidences at which they exited; None at the last exit
    on_invalid: str = "raise"

    @cached_property
    def outputs(self) -> Any:
        """Outputs of these samples; raises if one is not valid, unless invalid ones are marked."""
        if self.on_invalid == "raise":
            refuse_broken(self.raw, self.exit, self.ids)
        return ordinary(self.raw)

    @cached_property
    def invalid(self) -> Tensor:
        """Whether each sample has no valid answer, (m,)."""
        return _invalid_rows(self.raw, len(self.ids))

    def rows(self, first: int, stop: int) -> "StreamResult":
        """Return the samples from `first` up to `stop`."""
        part = slice(first, stop)
        raw = pytree.tree_map_only(Tensor, lambda leaf: leaf[part], self.raw)
        decided = None if self.decided is None else self.decided[part]
        return StreamResult(self.ids[part], raw, self.exit, decided, self.on_invalid)


class Gathered:
    """A batch of n samples, numbered from `start`, assembled as they exit."""

    @torch.inference_mode(False)  # users may compute with these tensors, also with gradients
    def __init__(self, n: int, device: torch.device, start: int = 0) -> None:
        self.n, self.start, self.missing = n, start, n
        self.exits = torch.zeros(n, dtype=torch.long, device=device)
        self.decided = torch.zeros(n, device=device)
        self._leaves: list[Any] = []
        self._structure: Any = None

    def put(self, left: StreamResult) -> None:
        """Store the outputs and exits of some samples of this batch."""
        where = left.ids - self.start if self.start else left.ids
        self.exits.index_fill_(0, where, left.exit)
        if left.decided is not None:
            self.decided.index_copy_(0, where, left.decided)
        self.missing -= len(where)
        leaves, structure = flattened(left.raw)
        if self._structure is None:
            self._structure = structure
            if len(where) == self.n:  # all at once, and in order
                self._leaves = list(leaves)
                return
            self._leaves = [_empty_like(leaf, self.n) for leaf in leaves]
        if structure != self._structure or not all(map(_same_form, self._leaves, leaves)):
            what = "shape" if structure == self._structure else "structure"
            before = pytree.tree_unflatten(self._leaves, self._structure)
            raise ValueError(
                f"Exits must return outputs of the same {what}, but got {shapes_of(left.raw)} after"
                f" {shapes_of(before)}: find the exit with `swiftsure.torch.check`."
            )
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                # Use the wider dtype: the first exit must not set the precision of later ones.
                dtype = torch.promote_types(self._leaves[i].dtype, leaf.dtype)
                self._leaves[i] = self._leaves[i].to(dtype).index_copy_(0, where, leaf.to(dtype))

    def whole(self, confidences: Tensor | None = None) -> ExitOutput:
        """Return the batch; call it once no sample is missing."""
        raw = pytree.tree_unflatten(self._leaves, self._structure)
        return ExitOutput(raw, self.exits, confidences, self.decided)


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
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf.clone() if leaf.is_inference() else leaf, tree
    )


@torch.inference_mode(False)
def owned(tree: Any) -> Any:
    """Return a copy of a head's output, which may alias its state, the batch or a weight."""
    return pytree.tree_map_only(Tensor, torch.clone, tree)


@torch.inference_mode(False)
def _empty_like(leaf: Any, n: int) -> Any:
    """Return an empty tensor for n samples like this one; anything else as it is."""
    return leaf.new_empty((n, *leaf.shape[1:])) if isinstance(leaf, Tensor) else leaf


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
    broken = broken_rows(output)
    if broken is None or not broken.any():
        return
    rows = broken.nonzero()[:, 0]
    row = int(rows[0])
    exit_index = exits if isinstance(exits, int) else int(exits[row])
    named: list[int] = (rows if samples is None else samples[rows.to(samples.device)]).tolist()
    refuse_output(exit_index, *named)


def refuse_output(exit_index: int, sample: int, *others: int) -> NoReturn:
    """Raise for samples whose answers are not valid; the first one's logits at an exit are not."""
    raise InvalidSampleError(
        f"The output of exit {exit_index + 1} is NaN or infinite for sample"
        f" {_and_others(sample, others)}. Logits must"
        " be finite; a classifier may mask some classes, but not all, with −inf. Look for NaN and"
        " very large numbers in the inputs, or run in a wider dtype.",
        [sample, *others],
    )


def refuse_confidence(exit_index: int, sample: int) -> NoReturn:
    """Raise for a sample whose confidence is NaN, which a record must not hold."""
    raise InvalidSampleError(
        f"The confidence of exit {exit_index + 1} is NaN for sample {sample}:"
        " look for NaN and very large numbers in its inputs, or run in a wider dtype.",
        [sample],
    )


def _and_others(sample: int, others: Sequence[int]) -> str:
    return f"{sample} (and {len(others):,} more: see `samples`)" if others else str(sample)
