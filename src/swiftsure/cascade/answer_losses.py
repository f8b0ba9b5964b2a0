"""Losses of answers, (n, n_models), against labels and against the last model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.cascade.answers import Answer, plain
from swiftsure.losses import BRIER, LOSSES, ZERO_ONE, Loss, LossRange

__all__ = ["AnswerLoss", "answer_tables", "chosen_losses"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AnswerLoss:
    """A loss of your own: a function from an answer and its label to a number.

    Parameters
    ----------
    name : str
    function : callable
        (answer, label) -> loss. Against the last model, its answer is the label.
    high : float
        The largest loss there can be; the smallest is 0.
    """

    name: str
    function: Callable[[Any, Any], float]
    high: float = 1.0

    @property
    def range(self) -> LossRange:
        """The declared range."""
        return LossRange(0.0, self.high)


def chosen_losses(losses: Any, answers: Sequence[Sequence[Answer]]) -> list[Loss | AnswerLoss]:
    """Return the losses to compute, by default 0-1 for classes and exact match for texts.

    An empty list computes none.
    """
    if losses is None:
        texts = all(isinstance(answer.answer, str) for row in answers for answer in row)
        classes = all(answer.probabilities is not None for row in answers for answer in row)
        losses = "exact_match" if texts and not classes else "zero_one"
    if isinstance(losses, str | Loss | AnswerLoss) or callable(losses):
        losses = [losses]
    found: list[Loss | AnswerLoss] = []
    for each in losses:
        if isinstance(each, Loss | AnswerLoss):
            found.append(each)
        elif callable(each):
            found.append(AnswerLoss(each.__name__, each))
        else:
            found.append(LOSSES.choose(each, "losses"))
    return found


def answer_tables(
    loss: Loss | AnswerLoss, answers: Sequence[Sequence[Answer]], labels: Sequence[Any] | None
) -> tuple[Floats | None, Floats]:
    """Return losses against labels and inconsistencies with the last model, (n, n_models) each.

    `answers` are by model. Samples without a label (None) have NaN in the first table, which is
    None if no sample has a label.
    """
    rows = [list(row) for row in zip(*answers, strict=True)]
    known = [i for i, label in enumerate(labels or ()) if label is not None]
    against: Floats | None = None
    if known:
        some = _against(loss, [rows[i] for i in known], [labels[i] for i in known])  # type: ignore[index]
        against = np.full((len(rows), len(rows[0])), np.nan)
        against[known] = some
    return against, _against(loss, rows, None)


def _against(loss: Loss | AnswerLoss, rows: list[list[Answer]], labels: list[Any] | None) -> Floats:
    """Return losses against labels, or against the last model's answers."""
    table = [[answer.answer for answer in row] for row in rows]
    if isinstance(loss, AnswerLoss):
        targets = [row[-1] for row in table] if labels is None else labels
        values = [
            [loss.function(answer, target) for answer in row]
            for row, target in zip(table, targets, strict=True)
        ]
        return checks.numbers(loss.name, values, np.float64)
    if loss is ZERO_ONE:
        targets = [row[-1] for row in table] if labels is None else [plain(y) for y in labels]
        _refuse_other_kind(table, targets)
        return np.asarray(
            [
                [float(answer != target) for answer in row]
                for row, target in zip(table, targets, strict=True)
            ]
        )
    if loss.of == "distribution" or loss is BRIER:
        return _of_distributions(loss, rows, labels)
    if labels is None:
        return np.asarray(loss.function("against_last")(table), np.float64)
    return np.asarray(loss.function("against_labels")(table, labels), np.float64)


def _refuse_other_kind(table: list[list[Any]], targets: list[Any]) -> None:
    """Raise if texts are compared with numbers: none would be right, and no gap be seen."""
    said = {isinstance(each, str) for row in table for each in row if each is not None}
    right = {isinstance(each, str) for each in targets if each is not None}
    if len(set(map(repr, targets))) > 1 and len(said | right) == 2 and len(said) == len(right) == 1:
        kinds = ("texts", "numbers") if True in said else ("numbers or others", "texts")
        raise TypeError(
            f"`labels` must be of the kind of the answers, but the answers are {kinds[0]} and the"
            f" labels {kinds[1]}: they are never equal, so every answer would count as wrong."
        )


def _of_distributions(loss: Loss, rows: list[list[Answer]], labels: list[Any] | None) -> Floats:
    missing = any(answer.probabilities is None for row in rows for answer in row)
    if missing:
        raise ValueError(f"`losses`: {loss.name} needs models that give probabilities.")
    p = np.asarray([[answer.probabilities for answer in row] for row in rows], np.float64)
    if labels is None:
        return np.asarray(loss.function("against_last")(p), np.float64)
    numbers = checks.numbers("labels", labels)
    if numbers.dtype.kind not in "iu":
        raise ValueError(f"`labels` must be class numbers for the loss {loss.name}.")
    return np.asarray(loss.function("against_labels")(p, numbers), np.float64)
