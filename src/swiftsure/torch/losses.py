"""Losses on tensors, reduced on the device of the outputs so that logits never leave it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swiftsure.losses import LossRange
from swiftsure.torch.staged import device_of

__all__ = ["TENSOR_LOSSES", "TensorLoss", "class_numbers", "stacked_logits"]


@dataclass(frozen=True)
class TensorLoss:
    """A loss of exit outputs, computed on tensors.

    Parameters
    ----------
    name : str
        If it is in `swiftsure.losses.LOSSES`, the range is taken from there.
    against_labels : callable
        (outputs of all exits, labels) -> (n, n_exits); None if it cannot use labels.
    against_last : callable
        outputs of all exits -> (n, n_exits), 0 in the last column.
    range : LossRange, optional
        For a loss that is not in `LOSSES`.
    of_images : bool
        Whether it is a loss of `swiftsure.torch.segmentation`; those are computed together.
    check_labels : callable, optional
        (outputs of all exits, labels); raises if labels are invalid. It is called before they are
        moved to the device, where a check would wait for the network.
    """

    name: str
    against_labels: Callable[[list[Any], Tensor], Tensor] | None
    against_last: Callable[[list[Any]], Tensor] | None
    range: LossRange | None = None
    of_images: bool = False
    check_labels: Callable[[list[Any], Tensor], None] | None = None

    def of_labels(self, outputs: list[Any], labels: Tensor) -> Tensor | None:
        """Return the losses against labels on any device; None if it cannot use labels."""
        if self.against_labels is None:
            return None
        if self.check_labels is not None:
            self.check_labels(outputs, labels)
        return self.against_labels(outputs, labels.to(device_of(outputs), non_blocking=True))


def stacked_logits(outputs: list[Any]) -> Tensor:
    """Return the logits of all exits of a classifier, (n, n_exits, n_classes)."""
    forms = [
        tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        for output in outputs
    ]
    if isinstance(forms[0], str) or len(forms[0]) != 2 or len(set(forms)) > 1:
        raise ValueError(
            "Losses and temperatures of classifiers need outputs of shape (n, n_classes) at every"
            f" exit, but got {', '.join(map(str, forms))}: use 'miou', 'miscoverage' and"
            " 'pixel_brier' for logit maps, or a TensorLoss of your own for other outputs."
        )
    return torch.stack(outputs, dim=1)


def class_numbers(labels: Tensor, n: int, n_classes: int) -> Tensor:
    """Return labels as integers; raises unless they are class numbers of n samples.

    Negative labels are missing.
    """
    if labels.shape != (n,) or labels.is_floating_point() or labels.is_complex():
        raise ValueError(
            f"`labels` must be whole numbers of shape ({n},), but got {labels.dtype} of shape"
            f" {tuple(labels.shape)}."
        )
    largest = int(labels.max()) if n else 0
    if largest >= n_classes:
        raise ValueError(
            f"`labels` must be below the number of classes, {n_classes}, but got {largest}."
        )
    return labels.long()


def _check_classes(outputs: list[Any], labels: Tensor) -> None:
    n, _, n_classes = stacked_logits(outputs).shape
    class_numbers(labels, n, n_classes)


def _zero_one(outputs: list[Any], labels: Tensor) -> Tensor:
    return (stacked_logits(outputs).argmax(dim=2) != labels[:, None]).double()


def _zero_one_last(outputs: list[Any]) -> Tensor:
    predictions = stacked_logits(outputs).argmax(dim=2)
    return (predictions != predictions[:, -1:]).double()


def _probabilities(outputs: list[Any]) -> Tensor:
    """Return class probabilities of all exits, (n, n_exits, n_classes); float64 except on MPS."""
    logits = stacked_logits(outputs)
    return logits.to(torch.float32 if logits.device.type == "mps" else torch.float64).softmax(dim=2)


def _brier(outputs: list[Any], labels: Tensor) -> Tensor:
    p = _probabilities(outputs)
    index = labels.long().clamp(min=0)[:, None, None].expand(-1, p.shape[1], 1)
    return p.square().sum(dim=2) - 2 * p.gather(2, index)[..., 0] + 1


def _brier_last(outputs: list[Any]) -> Tensor:
    p = _probabilities(outputs)
    return (p - p[:, -1:]).square().sum(dim=2)


TENSOR_LOSSES: dict[str, TensorLoss] = {
    loss.name: loss
    for loss in (
        TensorLoss("zero_one", _zero_one, _zero_one_last, check_labels=_check_classes),
        TensorLoss("brier", _brier, _brier_last, check_labels=_check_classes),
    )
}
"""Losses by name."""
