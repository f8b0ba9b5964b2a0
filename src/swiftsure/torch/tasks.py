"""What a network's output means: how exits are trained, how sure they are, and their losses.

| task | output | confidence | loss |
|---|---|---|---|
| classification | logits (n, classes) | any score | zero_one, brier |
| tokens | logits (n, tokens, classes) | mean top-1 probability of the tokens | token_error |
| answers | start and end logits (n, tokens, 2) | probability of start times that of end | span_f1 |
| embedding | (n, width) | learned | cosine |
| regression | (n, numbers) | learned | absolute_error(low, high) |

Padding is NaN in the outputs of tokens and answers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from swiftsure._lib.registry import Registry
from swiftsure.losses import Loss, LossRange, TensorFunctions
from swiftsure.torch.losses import of_pairs

__all__ = ["COSINE", "SPAN_F1", "TASKS", "TOKEN_ERROR", "Task", "absolute_error"]


@dataclass(frozen=True)
class Task:
    """How the exits of a network are trained and how sure they are.

    Parameters
    ----------
    against_labels : callable
        (output, labels, label_smoothing) -> training losses (n,).
    against_last : callable
        (output, the last exit's output) -> training losses (n,).
    agreement : callable
        (output, the last exit's output) -> how well they agree, (n,) in [0, 1].
    confidence : callable, optional
        output -> confidences (n,).
    per_token : bool
        Whether outputs have tokens on axis 1.
    learned : bool
        Whether exits learn to predict their agreement, as their confidence.
    """

    name: str
    against_labels: Callable[[Tensor, Tensor, float], Tensor]
    against_last: Callable[[Tensor, Tensor], Tensor]
    agreement: Callable[[Tensor, Tensor], Tensor]
    confidence: Callable[[Tensor], Tensor] | None = None
    per_token: bool = False
    learned: bool = False


# ------------------------------------------------------------------------------- classification


def _class_losses(output: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return cross_entropy(
        output, labels, reduction="none", label_smoothing=smoothing, ignore_index=-100
    )


def _soft_losses(output: Tensor, last: Tensor) -> Tensor:
    return cross_entropy(output, last.softmax(dim=-1), reduction="none")


def _same_class(output: Tensor, last: Tensor) -> Tensor:
    return (output.argmax(dim=-1) == last.argmax(dim=-1)).float()


# ---------------------------------------------------------------------------------------- tokens


def _present(output: Tensor) -> Tensor:
    """Return which tokens are not padding, (n, tokens)."""
    return ~output.isnan().any(dim=-1)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen tokens of each sequence; 0 if there are none."""
    return values.where(chosen, 0.0).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)


def _tag_losses(output: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    tagged = (labels >= 0) & _present(output)
    losses = cross_entropy(
        output.nan_to_num().transpose(1, 2),
        labels.clamp(min=0),
        reduction="none",
        label_smoothing=smoothing,
    )
    return _mean(losses, tagged)


def _soft_tag_losses(output: Tensor, last: Tensor) -> Tensor:
    targets = last.nan_to_num().softmax(dim=-1)
    losses = -(output.nan_to_num().log_softmax(dim=-1) * targets).sum(dim=-1)
    return _mean(losses, _present(last))


def _wrong_tags(output: Tensor, last: Tensor) -> Tensor:
    differ = output.nan_to_num().argmax(dim=-1) != last.nan_to_num().argmax(dim=-1)
    return _mean(differ.double(), _present(last))


def _tag_errors(output: Tensor, labels: Tensor) -> Tensor:
    differ = output.nan_to_num().argmax(dim=-1) != labels
    return _mean(differ.double(), labels >= 0)


def _tag_confidence(output: Tensor) -> Tensor:
    top = output.nan_to_num().float().softmax(dim=-1).amax(dim=-1)
    return _mean(top, _present(output)).clamp(0.0, 1.0)


TOKEN_ERROR = TensorFunctions(
    lambda outputs, labels: torch.stack([_tag_errors(each, labels) for each in outputs], dim=1),
    lambda outputs: torch.stack([_wrong_tags(each, outputs[-1]) for each in outputs], dim=1),
)


# --------------------------------------------------------------------------------------- answers


def _log_places(output: Tensor) -> Tensor:
    """Return log-probabilities of the start's and the end's place, (n, 2, tokens)."""
    padding = ~_present(output)[:, None]
    return output.nan_to_num().transpose(1, 2).masked_fill(padding, -1e9).log_softmax(dim=-1)


def _place_losses(output: Tensor, labels: Tensor) -> Tensor:
    places = _log_places(output)
    return -places.gather(2, labels[:, :, None].clamp(min=0))[..., 0].mean(dim=1)


def _soft_place_losses(output: Tensor, last: Tensor) -> Tensor:
    return -(_log_places(output) * _log_places(last).exp()).sum(dim=-1).mean(dim=1)


def _spans(output: Tensor) -> Tensor:
    """Return the most probable span of each sample, (n, 2): first and last token."""
    start, end = _log_places(output).unbind(dim=1)
    scores = start[:, :, None] + end[:, None, :]
    n_tokens = scores.shape[1]
    backwards = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=scores.device).tril(-1)
    best = scores.masked_fill(backwards, -torch.inf).flatten(1).argmax(dim=1)
    return torch.stack([best // n_tokens, best % n_tokens], dim=1)


def _span_f1(spans: Tensor, others: Tensor) -> Tensor:
    shared = torch.minimum(spans[:, 1], others[:, 1]) - torch.maximum(spans[:, 0], others[:, 0]) + 1
    lengths = (spans[:, 1] - spans[:, 0]) + (others[:, 1] - others[:, 0]) + 2
    return 2.0 * shared.clamp(min=0).double() / lengths


def _answer_confidence(output: Tensor) -> Tensor:
    return _log_places(output.float()).amax(dim=-1).sum(dim=1).exp()


SPAN_F1 = TensorFunctions(
    lambda outputs, labels: torch.stack(
        [1.0 - _span_f1(_spans(each), labels) for each in outputs], dim=1
    ),
    lambda outputs: torch.stack(
        [1.0 - _span_f1(_spans(each), _spans(outputs[-1])) for each in outputs], dim=1
    ),
)


# ------------------------------------------------------------------- embeddings and numbers


def _cosine_losses(output: Tensor, other: Tensor) -> Tensor:
    # (1 - cosine) / 2, in a form that is exactly 0 for equal embeddings.
    difference = normalize(output, dim=1) - normalize(other, dim=1)
    return (difference.square().sum(dim=1) / 4).clamp(0.0, 1.0)


def _squared_errors(output: Tensor, other: Tensor) -> Tensor:
    return (output - other.reshape(output.shape)).flatten(1).square().mean(dim=1)


def _closeness(output: Tensor, last: Tensor) -> Tensor:
    """Return exp(-error / spread): 1 for the same numbers, about 0.4 for unrelated ones."""
    spread = last.std(correction=0).clamp(min=1e-6)
    return (-_squared_errors(output, last).sqrt() / spread).exp()


COSINE = of_pairs(lambda output, other: _cosine_losses(output.double(), other.double()))


def absolute_error(low: float, high: float) -> Loss:
    """Return the absolute error of numbers in a declared range, to pass to `collect`.

    Numbers outside the range count as its ends, so that the loss is at most `high - low`.

    Examples
    --------
    >>> absolute_error(1, 5).range
    LossRange(low=0.0, high=4.0, whole=False)
    """

    def distance(output: Tensor, other: Tensor) -> Tensor:
        one, two = output.double().clamp(low, high), other.double().clamp(low, high)
        return (one - two.reshape(one.shape)).abs().flatten(1).mean(dim=1)

    errors = of_pairs(distance)
    return Loss("absolute_error", LossRange(0, high - low), "prediction", tensors=errors)


TASKS: Registry[Task] = Registry(
    "task",
    Task("classification", _class_losses, _soft_losses, _same_class),
    Task(
        "tokens",
        _tag_losses,
        _soft_tag_losses,
        lambda output, last: 1.0 - _wrong_tags(output, last),
        _tag_confidence,
        per_token=True,
    ),
    Task(
        "answers",
        lambda output, labels, _: _place_losses(output, labels),
        _soft_place_losses,
        lambda output, last: _span_f1(_spans(output), _spans(last)),
        _answer_confidence,
        per_token=True,
    ),
    Task(
        "embedding",
        lambda output, labels, _: _cosine_losses(output, labels),
        _cosine_losses,
        lambda output, last: 1.0 - _cosine_losses(output, last),
        learned=True,
    ),
    Task(
        "regression",
        lambda output, labels, _: _squared_errors(output, labels),
        _squared_errors,
        _closeness,
        learned=True,
    ),
)
"""Tasks by name."""
