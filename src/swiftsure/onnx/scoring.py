"""Confidences and temperatures on arrays: the same functions that make records from logits."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.onnx.stages import Answer
from swiftsure.scores import IMAGE_SCORES, SCORES, LearnedScore, probabilities
from swiftsure.scores import warn_of_probabilities as warn_of_rows
from swiftsure.scores.features import DEFAULT_FEATURES
from swiftsure.scores.kernels import (
    CLASS_SCORES,
    MOST_LOGITS,
    class_confidences,
    learned_confidences,
)

__all__ = [
    "MODEL_SCORE",
    "broken_rows",
    "confidence",
    "known_score",
    "tempered",
    "warn_of_probabilities",
]

Array = NDArray[Any]

MODEL_SCORE = "model"
"""Name of the score for confidences that the model computes itself."""


def known_score(argument: str, score: str | LearnedScore | None) -> str | LearnedScore:
    """Return `score` if it is one of classifiers or images, or the model's own, or is learned."""
    if isinstance(score, LearnedScore):
        for name in score.inputs:
            known_score(argument, name)
        return score
    return checks.choice(argument, str(score), [*SCORES, *IMAGE_SCORES, MODEL_SCORE])


def confidence(
    name: str | LearnedScore, answer: Answer, temperature: float = 1.0, exit_index: int = 0
) -> NDArray[np.float32]:
    """Return the confidence of each sample, (n,), under a score; NaN for invalid logits.

    `exit_index` is only read by a learned score.
    """
    if isinstance(name, LearnedScore):
        logits = answer.arrays[0]
        of_classes = len(answer.arrays) == 1 and logits.ndim == 2 and logits.shape[1] > 1
        if name.features == DEFAULT_FEATURES and of_classes:
            rows, weights = (
                np.ascontiguousarray(logits, np.float64),
                np.asarray(name.slopes(exit_index)),
            )
            sure: NDArray[np.float32] = learned_confidences(rows, temperature, weights)
            return sure
        parts = {each: confidence(each, answer, temperature) for each in name.inputs}
        doubles = {each: values.astype(np.float64) for each, values in parts.items()}
        found: NDArray[np.float64] = name.at(np, exit_index, doubles)
        return found.astype(np.float32)
    if name == MODEL_SCORE:
        if answer.confidence is None:
            raise ValueError("`score` 'model' needs heads that return their own confidence.")
        return answer.confidence
    logits = answer.arrays[0]
    ndim = 4 if name in IMAGE_SCORES else 2
    if len(answer.arrays) != 1 or logits.ndim != ndim:
        form = "(n, n_classes, height, width)" if ndim == 4 else "(n, n_classes)"
        raise ValueError(
            f"`score` {name!r} needs outputs of shape {form}, but got"
            f" {', '.join(str(array.shape) for array in answer.arrays)}."
        )
    if name in CLASS_SCORES and 0 < logits.size <= MOST_LOGITS and logits.shape[1] > 1:
        rows = np.ascontiguousarray(logits, np.float64)
        few: NDArray[np.float32] = class_confidences(rows, temperature, CLASS_SCORES[name])
        return few
    broken = _bad_logits(logits)
    if broken.any():
        scores = np.full(len(logits), np.nan, np.float32)
        scores[~broken] = _scored(name, logits[~broken], temperature)
        return scores
    return _scored(name, logits, temperature)


def warn_of_probabilities(name: str | LearnedScore, answer: Answer) -> None:
    """Warn if a named score is to be computed from probabilities, not logits."""
    if name != MODEL_SCORE:
        logits = np.moveaxis(answer.arrays[0], 1, -1)
        warn_of_rows(logits, stacklevel=5, what="The model's outputs")


def _scored(name: str, logits: Array, temperature: float) -> NDArray[np.float32]:
    if logits.ndim == 2:
        return SCORES[name](probabilities(logits, temperature))
    return IMAGE_SCORES[name](probabilities(np.moveaxis(logits, 1, -1), temperature))


def _bad_logits(logits: Array) -> NDArray[np.bool_]:
    """Return which rows have a largest logit that is not finite; for maps, any NaN or infinity."""
    if logits.ndim == 2:
        good = np.isfinite(logits.max(axis=1, initial=-np.inf))  # the maximum of NaN is NaN
    else:
        good = np.isfinite(logits).all(axis=tuple(range(1, logits.ndim)))
    bad: NDArray[np.bool_] = np.logical_not(good)
    return bad


def broken_rows(arrays: Sequence[Array]) -> NDArray[np.bool_]:
    """Return which samples have invalid logits or maps of logits."""
    first = arrays[0]
    of_logits = len(arrays) == 1 and first.ndim in (2, 4) and first.dtype.kind == "f"
    if of_logits and math.prod(first.shape[1:]):
        return _bad_logits(first)
    return np.zeros(len(first), bool)


def tempered(arrays: list[Array], temperature: float) -> list[Array]:
    """Return logits divided by a temperature, with the same argmax."""
    if temperature == 1.0:
        return arrays
    logits = arrays[0]
    if len(arrays) != 1:
        raise ValueError(
            f"`temperatures` need exits that return one array, but they return {len(arrays)}."
        )
    divided = logits.astype(np.promote_types(logits.dtype, np.float32)) / np.float32(temperature)
    if logits.ndim != 2:
        return [divided]
    # Rounding can tie the largest logits; raise the one that was largest before.
    top = logits.argmax(axis=1)
    rows = np.flatnonzero(divided.argmax(axis=1) != top)
    raised = np.nextafter(divided[rows, top[rows]], np.asarray(np.inf, divided.dtype))
    divided[rows, top[rows]] = raised
    return [divided]
