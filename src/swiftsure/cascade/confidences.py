"""Confidences of answers, by name: the model's own, and those of an answer's tokens.

Each is in [0, 1], and higher where the model is more sure. Log-probabilities are given as
probabilities, exp(log p), because thresholds are on this scale.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from swiftsure import scores
from swiftsure._lib.registry import Registry
from swiftsure.cascade.answers import Answer

__all__ = [
    "ANSWER_SCORES",
    "answer_confidence",
    "confidence",
    "first_margin",
    "mean_logprob",
    "min_logprob",
]

AnswerScore = Callable[[Answer], float | None]
"""A function from an answer to its confidence; None if it has none."""


def confidence(answer: Answer) -> float | None:
    """Return the model's own confidence; else the top-1 probability; else `mean_logprob`."""
    if answer.confidence is not None:
        return answer.confidence
    if answer.probabilities is not None:
        return float(scores.top1(answer.probabilities))
    return mean_logprob(answer)


def mean_logprob(answer: Answer) -> float | None:
    """Return the geometric mean of the tokens' probabilities, which is 1 / perplexity.

    Examples
    --------
    >>> round(mean_logprob(Answer("ab", logprobs=[math.log(0.5), math.log(0.125)])), 6)
    0.25
    """
    if not answer.logprobs:
        return None
    return math.exp(math.fsum(answer.logprobs) / len(answer.logprobs))


def min_logprob(answer: Answer) -> float | None:
    """Return the probability of the least probable token.

    Examples
    --------
    >>> round(min_logprob(Answer("ab", logprobs=[math.log(0.5), math.log(0.125)])), 6)
    0.125
    """
    return math.exp(min(answer.logprobs)) if answer.logprobs else None


def first_margin(answer: Answer) -> float | None:
    """Return the difference between the two most probable first tokens.

    Where only one token is listed, the second has at most the rest of the probability.
    """
    if not answer.top_logprobs or not answer.top_logprobs[0]:
        return None
    first, *others = sorted((math.exp(p) for p in answer.top_logprobs[0].values()), reverse=True)
    return max(0.0, first - (others[0] if others else 1.0 - first))


def _class_score(name: str) -> AnswerScore:
    def score(answer: Answer) -> float | None:
        if answer.probabilities is None:
            return None
        return float(np.asarray(scores.SCORES[name](answer.probabilities)))

    score.__name__ = name
    return score


ANSWER_SCORES: Registry[AnswerScore] = Registry(
    "scores",
    confidence,
    mean_logprob,
    min_logprob,
    first_margin,
    *(_class_score(name) for name in ("top1", "top_diff", "entropy")),
)
"""Confidences of answers by name; `ANSWER_SCORES.register(function, name)` adds one."""
ANSWER_SCORES.register(mean_logprob, "perplexity")


def answer_confidence(answer: Answer, score: str) -> float | None:
    """Return an answer's confidence under a score, as the float32 number that a record holds."""
    value: Any = answer.scores.get(score)
    if value is None and score in ANSWER_SCORES:
        value = ANSWER_SCORES[score](answer)
    return None if value is None else float(np.float32(min(max(value, 0.0), 1.0)))
