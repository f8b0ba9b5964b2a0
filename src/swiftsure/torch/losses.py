"""Losses on tensors: reduced where the outputs are, so that logits never leave the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftsure import checks
from swiftsure.losses import LossRange

__all__ = ["TENSOR_LOSSES", "TensorLoss", "resolve"]


@dataclass(frozen=True)
class TensorLoss:
    """A loss of exit outputs, computed on tensors.

    Parameters
    ----------
    name : str
        As in `swiftsure.losses.LOSSES` if it is known there; its range is then that one's.
    against_labels : callable
        (outputs of all exits, labels) -> (n, n_exits); None if it has no such form.
    against_last : callable
        outputs of all exits -> (n, n_exits), 0 in the last column.
    range : LossRange, optional
        For a loss that is not a known one.
    """

    name: str
    against_labels: Callable[[list[Tensor], Tensor], Tensor] | None
    against_last: Callable[[list[Tensor]], Tensor] | None
    range: LossRange | None = None


def _probabilities(outputs: list[Tensor]) -> Tensor:
    """Return class probabilities of all exits, (n, n_exits, n_classes), in float64 where it can."""
    wide = torch.float32 if outputs[0].device.type == "mps" else torch.float64
    return torch.stack([output.to(wide).softmax(dim=1) for output in outputs], dim=1)


def _zero_one(outputs: list[Tensor], labels: Tensor) -> Tensor:
    return torch.stack([o.argmax(dim=1) != labels for o in outputs], dim=1).double()


def _zero_one_last(outputs: list[Tensor]) -> Tensor:
    last = outputs[-1].argmax(dim=1)
    return torch.stack([o.argmax(dim=1) != last for o in outputs], dim=1).double()


def _brier(outputs: list[Tensor], labels: Tensor) -> Tensor:
    p = _probabilities(outputs)
    index = labels.clamp(min=0)[:, None, None].expand(-1, p.shape[1], 1)
    return p.square().sum(dim=2) - 2 * p.gather(2, index)[..., 0] + 1


def _brier_last(outputs: list[Tensor]) -> Tensor:
    p = _probabilities(outputs)
    return (p - p[:, -1:]).square().sum(dim=2)


TENSOR_LOSSES: dict[str, TensorLoss] = {
    loss.name: loss
    for loss in (
        TensorLoss("zero_one", _zero_one, _zero_one_last),
        TensorLoss("brier", _brier, _brier_last),
    )
}
"""Losses by name."""


def resolve(loss: str | TensorLoss) -> TensorLoss:
    """Return a loss by name, or as it is."""
    if isinstance(loss, TensorLoss):
        return loss
    return TENSOR_LOSSES[checks.known("losses", loss, TENSOR_LOSSES)]
