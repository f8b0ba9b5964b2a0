"""Losses on tensors, reduced on the outputs' device so that logits never leave it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swiftsure.losses import Loss, TensorFunctions, classification, image
from swiftsure.torch.staged import device_of

__all__ = [
    "class_numbers",
    "label_losses",
    "of_classes",
    "of_pairs",
    "probabilities",
    "stacked_logits",
]


def label_losses(loss: Loss, outputs: list[Any], labels: Tensor) -> Tensor:
    """Return the losses against labels on any device, (n, n_exits)."""
    against_labels, check = loss.function("tensors.against_labels"), loss.on_tensors().check_labels
    if check is not None:
        check(outputs, labels)
    losses: Tensor = against_labels(outputs, labels.to(device_of(outputs), non_blocking=True))
    return losses


def of_classes(
    against_labels: Callable[[Tensor, Tensor], Tensor] | None,
    against_last: Callable[[Tensor], Tensor] | None,
    inputs: Callable[[list[Any]], Tensor] | None = None,
) -> TensorFunctions:
    """Return the tensor functions of a classification loss.

    Parameters
    ----------
    against_labels, against_last : callable
        As in `Loss`, but they get tensors: `inputs`, (n, n_exits, n_classes), and class numbers.
    inputs : callable
        `probabilities` by default, or `stacked_logits`.
    """
    given = inputs or probabilities
    return TensorFunctions(
        against_labels
        and (lambda outputs, labels: against_labels(given(outputs), labels.long().clamp(min=0))),
        against_last and (lambda outputs: against_last(given(outputs))),
        _check_classes,
    )


def of_pairs(distance: Callable[[Tensor, Tensor], Tensor]) -> TensorFunctions:
    """Return the tensor functions of a loss given a distance, (n, ...), (n, ...) -> (n,)."""

    def against_labels(outputs: list[Tensor], labels: Tensor) -> Tensor:
        return torch.stack([distance(output, labels) for output in outputs], dim=1)

    return TensorFunctions(against_labels, lambda outputs: against_labels(outputs, outputs[-1]))


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
            " 'pixel_brier' for logit maps, or a Loss of your own for other outputs."
        )
    return torch.stack(outputs, dim=1)


def probabilities(outputs: list[Any]) -> Tensor:
    """Return class probabilities of all exits, (n, n_exits, n_classes); float64 except on MPS."""
    logits = stacked_logits(outputs)
    return logits.to(torch.float32 if logits.device.type == "mps" else torch.float64).softmax(dim=2)


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


ZERO_ONE = of_classes(
    classification.zero_one, classification.zero_one_inconsistency, stacked_logits
)
BRIER = of_classes(classification.brier, classification.brier_inconsistency)
MSE = of_pairs(image.mse)
SSIM = of_pairs(lambda images, others: image.ssim(images.double(), others.double()))
