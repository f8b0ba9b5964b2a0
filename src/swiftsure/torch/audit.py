"""Audits: also run a random fraction of requests in full, to measure what early exits cost."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure.losses import PIXEL_LOSSES, Loss
from swiftsure.run.auditing import AuditBase, AuditorBase
from swiftsure.torch.losses import label_losses
from swiftsure.torch.results import ExitOutput, refuse_broken
from swiftsure.torch.segmentation import image_losses, image_size
from swiftsure.torch.staged import batch_size, device_of, rows_of

if TYPE_CHECKING:
    from swiftsure.torch.runtime import EarlyExit

__all__ = ["Audit", "Auditor"]


@dataclass(frozen=True)
class Audit(AuditBase):
    """The answers served for some requests of a batch, with the full model's answers, as tensors.

    Logit maps are compared at the images' size, as `collect` does without labels, and for a gap at
    the labels' size. Other attributes are those of `swiftsure.run.auditing.AuditBase`.

    Attributes
    ----------
    size : (height, width), optional
        Size of the input images.
    """

    size: tuple[int, int] | None = None

    def _gaps(self, loss: Loss, labels: Any) -> NDArray[np.float64]:
        truth = torch.as_tensor(labels)
        against = label_losses(loss, [self.outputs, self.full_outputs], truth)
        gaps = _array(against[:, 0] - against[:, 1])
        if truth.ndim == 1 and not truth.is_floating_point():
            gaps[_array(truth < 0).astype(bool) & self._differ(loss)] = np.nan
        return gaps

    def _inconsistencies(self, loss: Loss) -> NDArray[np.float64]:
        both = [self.outputs, self.full_outputs]
        if loss in PIXEL_LOSSES:
            found = image_losses(both, None, self.size, [loss.name])
            return _array(found[f"inconsistencies/{loss.name}"][:, 0])
        return _array(loss.function("tensors.against_last")(both)[:, 0])

    def _differ(self, loss: Loss) -> NDArray[np.bool_]:
        """Return where the two answers' losses may differ for some label."""
        if loss.of != "prediction" or loss.on_tensors().against_last is None:
            return np.ones(len(self.ids), bool)
        differ: NDArray[np.bool_] = self._inconsistencies(loss) > 0
        return differ


@dataclass(frozen=True)
class _ChosenRequests:
    """Requests of a batch chosen for an audit, with copies of their inputs.

    Only tensors as long as the batch are indexed: others, such as a scale, apply to all requests.
    """

    ids: tuple[str, ...]
    rows: Tensor
    leaves: list[Any]
    by_request: list[bool]
    spec: pytree.TreeSpec
    size: tuple[int, int] | None

    @classmethod
    def of(cls, batch: Any, n: int, ids: tuple[str, ...], rows: Tensor) -> "_ChosenRequests":
        """Return some rows of a batch of n requests."""
        leaves, spec = pytree.tree_flatten(batch)
        by_request = [
            isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == n for leaf in leaves
        ]
        whole = cls(ids, rows, leaves, by_request, spec, image_size(batch))
        return replace(whole, leaves=whole._cut(rows) if len(ids) else [])

    def some(self, keep: Tensor) -> "_ChosenRequests":
        """Return those of these requests where `keep` is true."""
        index = keep.nonzero()[:, 0]
        ids, rows = tuple(self.ids[k] for k in index.tolist()), self.rows[index]
        return replace(self, ids=ids, rows=rows, leaves=self._cut(index))

    def inputs(self, index: Tensor) -> Any:
        """Return the inputs of some of these requests."""
        return pytree.tree_unflatten(self._cut(index), self.spec)

    def _cut(self, index: Tensor) -> list[Any]:
        pairs = zip(self.leaves, self.by_request, strict=True)
        return [leaf.index_select(0, index) if cut else leaf for leaf, cut in pairs]


class Auditor(AuditorBase):
    """Runs randomly chosen requests in full and passes their losses to a monitor.

    Parameters, attributes and errors are those of `swiftsure.run.auditing.AuditorBase`.
    """

    against_last = "tensors.against_last"

    def _n(self, _fast: "EarlyExit", batch: Any) -> int:
        return batch_size(batch)

    def _kept(
        self, _fast: "EarlyExit", batch: Any, ids: Sequence[str], rows: NDArray[np.int64]
    ) -> _ChosenRequests:
        where = torch.from_numpy(rows).to(device_of(batch))
        return _ChosenRequests.of(batch, batch_size(batch), tuple(ids), where)

    def _answered(
        self, out: ExitOutput, chosen: _ChosenRequests
    ) -> tuple[_ChosenRequests, _ChosenRequests | None]:
        if out.on_invalid != "mark":
            return chosen, None
        valid = ~out.invalid[chosen.rows]
        return chosen.some(valid), chosen.some(~valid)

    def _context(self, fast: "EarlyExit", out: ExitOutput) -> AbstractContextManager[None]:
        return fast.context(out.raw)

    def _compared(
        self,
        fast: "EarlyExit",
        out: ExitOutput,
        chosen: _ChosenRequests,
        failed: tuple[str, ...],
    ) -> Audit:
        answered, exits = rows_of(out.outputs, chosen.rows), out.exits[chosen.rows]
        full = _full_outputs(fast, chosen, exits, answered)
        return Audit(chosen.ids, chosen.rows, exits, answered, full, failed, chosen.size)

    def _nothing(self, out: ExitOutput, chosen: _ChosenRequests, failed: tuple[str, ...]) -> Audit:
        none = chosen.rows[:0]
        empty = pytree.tree_map_only(Tensor, lambda leaf: leaf[:0] if leaf.ndim else leaf, out.raw)
        return Audit((), none, none, empty, empty, failed, chosen.size)


def _full_outputs(fast: "EarlyExit", chosen: _ChosenRequests, exits: Tensor, answered: Any) -> Any:
    """Return the last exit's outputs, reusing the answers of requests that got there."""
    last = fast.model.n_exits - 1
    early = (exits < last).nonzero()[:, 0]
    if len(early) == 0:
        return answered
    output = fast.full_outputs(chosen.inputs(early))
    refuse_broken(output, last, chosen.rows[early])
    if len(early) == len(exits):
        return output
    return pytree.tree_map(
        lambda before, now: (
            before.index_copy(0, early, now.to(before.dtype)) if isinstance(now, Tensor) else now
        ),
        answered,
        output,
    )


def _array(losses: Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = losses.double().cpu().numpy()
    return array
