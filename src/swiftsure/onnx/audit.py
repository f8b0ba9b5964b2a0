"""Audits on arrays: also run a random fraction of requests in full, without PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.losses import Loss
from swiftsure.onnx import trees
from swiftsure.onnx.results import ExitOutput, refuse_broken
from swiftsure.run.auditing import AuditBase, AuditorBase
from swiftsure.scores import probabilities

if TYPE_CHECKING:
    from swiftsure.onnx.runtime import EarlyExit

__all__ = ["Audit", "Auditor"]

Array = NDArray[Any]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Audit(AuditBase):
    """The answers served for some requests of a batch, with the full model's answers, as arrays.

    Attributes are those of `swiftsure.run.auditing.AuditBase`. Losses are those of classifiers,
    whose outputs are logits, (m, n_classes); labels are class numbers.
    """

    def _inconsistencies(self, loss: Loss) -> NDArray[np.float64]:
        found: NDArray[np.float64] = loss.function("against_last")(self._probabilities())[:, 0]
        return found

    def _gaps(self, loss: Loss, labels: Any) -> NDArray[np.float64]:
        truth = checks.of_shape("labels", checks.numbers("labels", labels), {"m": len(self.ids)})
        classes = np.maximum(truth, 0).astype(np.int64)
        against = loss.function("against_labels")(self._probabilities(), classes)
        gaps = np.asarray(against[:, 0] - against[:, 1], np.float64)
        if loss.of == "prediction":
            differs = self._inconsistencies(loss) > 0
            gaps[~differs] = 0.0
            gaps[(truth < 0) & differs] = np.nan
        else:
            gaps[truth < 0] = np.nan
        return gaps

    def _probabilities(self) -> NDArray[np.float64]:
        """Return the distributions served and those of the last exit, (m, 2, n_classes)."""
        if not isinstance(self.outputs, np.ndarray) or self.outputs.ndim != 2:
            raise ValueError(
                "`loss`: audits of exported models compute losses of logits, (n, n_classes), only;"
                " compare `outputs` with `full_outputs` yourself."
            )
        if not len(self.outputs):
            return np.zeros((0, 2, max(1, self.outputs.shape[1])))
        return probabilities(np.stack([self.outputs, self.full_outputs], axis=1))


@dataclass(frozen=True)
class _ChosenRequests:
    """Requests of a batch chosen for an audit, with copies of their inputs."""

    ids: tuple[str, ...]
    rows: Rows
    inputs: list[Array]


class Auditor(AuditorBase):
    """Runs randomly chosen requests in full and passes their losses to a monitor.

    Parameters, attributes and errors are those of `swiftsure.run.auditing.AuditorBase`, and of
    `swiftsure.torch.Auditor`.
    """

    against_last = "against_last"

    def _n(self, fast: "EarlyExit", batch: Any) -> int:
        return len(fast.stages.begin(batch)[0])

    def _kept(
        self, fast: "EarlyExit", batch: Any, ids: Sequence[str], rows: Rows
    ) -> _ChosenRequests:
        inputs = [array[rows] for array in fast.stages.begin(batch)]  # indexing copies
        return _ChosenRequests(tuple(ids), rows, inputs)

    def _compared(
        self, fast: "EarlyExit", out: ExitOutput, chosen: _ChosenRequests, failed: tuple[str, ...]
    ) -> Audit:
        rows, exits, build = chosen.rows, out.exits[chosen.rows], out.build
        answered = [array[rows] for array in out.raw]
        refuse_broken(answered, exits, rows)
        early = [array[exits < fast.last] for array in chosen.inputs]
        full = fast.full_outputs(trees.build(fast.stages.manifest.inputs, early))
        refuse_broken(full, np.full(len(rows), fast.last), rows[exits < fast.last])
        merged = [array.copy() for array in answered]
        for target, array in zip(merged, full, strict=True):
            target[exits < fast.last] = array
        return Audit(chosen.ids, rows, exits, build(answered), build(merged), failed)

    def _nothing(self, out: ExitOutput, chosen: _ChosenRequests, failed: tuple[str, ...]) -> Audit:
        none, empty = chosen.rows[:0], out.build([array[:0] for array in out.raw])
        return Audit((), none, none, empty, empty, failed)
