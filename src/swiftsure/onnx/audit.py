"""Audits on arrays: also run a random fraction of requests in full, without PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.losses import LOSSES, Loss
from swiftsure.onnx.results import ExitOutput, refuse_broken
from swiftsure.scores import probabilities
from swiftsure.systems.auditing import AuditorBase

if TYPE_CHECKING:
    from swiftsure.onnx.runtime import EarlyExit

__all__ = ["Audit", "Auditor"]

Array = NDArray[Any]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Audit:
    """The answers served for some requests of a batch, with the full model's answers.

    Attributes
    ----------
    ids : tuple of str, (m,)
        Ids of the requests, in their order: the caller's own, or new ones (`request_ids`).
    rows : (m,)
        Their rows in the batch.
    exits : (m,)
        Their exits. Requests that ran in full anyway are audited as often as the others.
    outputs, full_outputs
        The outputs served and those of the last exit, with the samples first.
    failed : tuple of str, (k,)
        Ids of chosen requests whose audit failed. Their losses are missing: `expect` and `give_up`
        them in a `RequestOrder`.
    """

    ids: tuple[str, ...]
    rows: Rows
    exits: Rows
    outputs: Any
    full_outputs: Any
    failed: tuple[str, ...] = ()

    def losses(
        self, risk: str, loss: str | Loss, labels: Array | None = None
    ) -> NDArray[np.float64]:
        """Return the losses to add to a monitor, unweighted, (m,).

        Parameters
        ----------
        risk : {"consistency", "gap", "zero-bounded gap"}
            "consistency" compares with the full model's outputs; a gap is the difference between
            both losses against labels.
        loss : str or Loss
            Of classifiers, whose outputs are logits, (m, n_classes).
        labels : (m,), optional
            Class numbers of the audited requests, for a gap; negative ones are missing.

        Returns
        -------
        losses
            NaN if a needed label is missing; a 0-1 gap is 0 without a label if both answers agree.
        """
        kind = checks.choice("risk", risk, ["consistency", "gap", "zero-bounded gap"])
        named, both = LOSSES.choose(loss), self._probabilities()
        if kind == "consistency":
            found: NDArray[np.float64] = named.function("against_last")(both)[:, 0]
            return found
        if labels is None:
            raise ValueError("`labels` must be given for a gap: it compares losses against labels.")
        truth = checks.of_shape("labels", checks.numbers("labels", labels), {"m": len(self.ids)})
        against = named.function("against_labels")(both, np.maximum(truth, 0).astype(np.int64))
        gaps = np.asarray(against[:, 0] - against[:, 1], np.float64)
        if named.of == "prediction":
            differs = self.losses("consistency", named) > 0
            gaps[~differs] = 0.0
            gaps[(truth < 0) & differs] = np.nan
        else:
            gaps[truth < 0] = np.nan
        return gaps if kind == "gap" else np.maximum(gaps, 0.0)

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

    Parameters, attributes and errors are those of `swiftsure.systems.auditing.AuditorBase`, and of
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
        refuse_broken(answered, out.decided[rows], exits, rows)
        full = fast.full_outputs([array[exits < fast.last] for array in chosen.inputs])
        refuse_broken(full, None, np.full(len(rows), fast.last), rows[exits < fast.last])
        merged = [array.copy() for array in answered]
        for target, array in zip(merged, full, strict=True):
            target[exits < fast.last] = array
        return Audit(chosen.ids, rows, exits, build(answered), build(merged), failed)

    def _nothing(self, out: ExitOutput, chosen: _ChosenRequests, failed: tuple[str, ...]) -> Audit:
        none, empty = chosen.rows[:0], out.build([array[:0] for array in out.raw])
        return Audit((), none, none, empty, empty, failed)
