"""Confidence scores of exits: of one output, of an image, and learned from several numbers."""

from swiftsure.scores.features import FEATURES
from swiftsure.scores.learned import LearnedScore
from swiftsure.scores.outputs import (
    AGGREGATES,
    IMAGE_SCORES,
    SCORE_VERSION,
    SCORES,
    SHIFT,
    STEPS,
    entropy,
    mean,
    patch,
    probabilities,
    quantile,
    top1,
    top_diff,
    warn_of_probabilities,
)

__all__ = [
    "AGGREGATES",
    "FEATURES",
    "IMAGE_SCORES",
    "SCORES",
    "SCORE_VERSION",
    "SHIFT",
    "STEPS",
    "LearnedScore",
    "entropy",
    "mean",
    "patch",
    "probabilities",
    "quantile",
    "top1",
    "top_diff",
    "warn_of_probabilities",
]
