"""Scores on tensors: the twins of `swiftsure.scores`, computed where the outputs are."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, special

from swiftsure import checks
from swiftsure.torch.staged import Scored, plain_output

__all__ = ["MODEL_SCORE", "SCORES", "confidence"]

MODEL_SCORE = "model"
"""Name of the confidence that a model gives itself."""


def top1(logits: Tensor) -> Tensor:
    """Return the largest class probability; classes on axis 1."""
    return logits.softmax(dim=1).amax(dim=1)


def top_diff(logits: Tensor) -> Tensor:
    """Return the difference between the two largest class probabilities."""
    two = logits.softmax(dim=1).topk(2, dim=1).values
    return two[:, 0] - two[:, 1]


def entropy(logits: Tensor) -> Tensor:
    """Return 1 minus the entropy over log(n_classes)."""
    spread = special.entr(logits.softmax(dim=1)).sum(dim=1)  # 0 log 0 = 0, and NaN stays NaN
    score: Tensor = (1.0 - spread / math.log(logits.shape[1])).clamp(0.0, 1.0)
    return score


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "top1": top1,
    "top_diff": top_diff,
    "entropy": entropy,
}


def confidence(name: str, output: Any) -> Tensor:
    """Return the confidence of each sample, (n,) in float32, by the score's name."""
    if name == MODEL_SCORE:
        if not isinstance(output, Scored):
            raise ValueError(
                "`score` 'model' needs heads that give their own confidence"
                " (swiftsure.torch.Scored), and this model's do not."
            )
        if output.confidence.ndim != 1:
            raise ValueError(
                "`score` 'model' needs one confidence a sample, of shape (n,), but got shape"
                f" {tuple(output.confidence.shape)}."
            )
        return output.confidence.float()
    measure = SCORES[checks.known("score", name, [*SCORES, MODEL_SCORE])]
    values = plain_output(output)
    if not isinstance(values, Tensor) or values.ndim != 2:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"`score` {name!r} needs outputs of shape (n, n_classes), but got {shape}; let the head"
            " return Scored(output, confidence) and use score 'model'."
        )
    return measure(values.float())
