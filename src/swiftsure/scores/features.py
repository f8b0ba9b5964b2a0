"""Features of learned scores: real numbers computed from the plain scores of an exit."""

from collections.abc import Callable
from typing import Any, NamedTuple

from swiftsure._lib.registry import Registry

__all__ = ["DEFAULT_FEATURES", "FEATURES", "Feature", "feature_of", "inputs_of"]

EDGE = 2.0**-25
"""Scores are kept this far from 0 and 1, half a step of their grid, where a logarithm is taken."""


class Feature(NamedTuple):
    """A feature of a learned score.

    Attributes
    ----------
    name : str
    inputs : tuple of str
        Names of the scores that it is computed from.
    function : callable
        (numpy or torch, *scores in float64) -> feature, elementwise. The higher it is, the more
        confident the exit.
    """

    name: str
    inputs: tuple[str, ...]
    function: Callable[..., Any]


def logit(xp: Any, score: Any) -> Any:
    """Return log(c / (1 − c))."""
    inside = xp.clip(score, EDGE, 1 - EDGE)
    return xp.log(inside) - xp.log1p(-inside)


def log_ratio(xp: Any, top1: Any, top_diff: Any) -> Any:
    """Return the log of the largest probability over the second largest."""
    second = xp.clip(top1 - top_diff, EDGE, 1.0)
    return xp.log(xp.clip(top1, EDGE, 1 - EDGE)) - xp.log(second)


def log1p_ratio(xp: Any, top1: Any, top_diff: Any) -> Any:
    """Return log(1 + log_ratio), which bends the curve of agreement."""
    return xp.log1p(log_ratio(xp, top1, top_diff))


FEATURES: Registry[Feature] = Registry(
    "feature",
    Feature("log_ratio", ("top1", "top_diff"), log_ratio),
    Feature("log1p_ratio", ("top1", "top_diff"), log1p_ratio),
)
"""Features by name. Every other name is that of a score, whose logit is the feature."""

DEFAULT_FEATURES = ("log_ratio", "log1p_ratio")
"""Features of a classifier: the log of top over second, and a concave function of it.

The top probability and the entropy add nothing to them on our records.
"""


def feature_of(name: str) -> Feature:
    """Return a registered feature, or the logit of the score with this name.

    Examples
    --------
    >>> feature_of("mean_top1").inputs, feature_of("log_ratio").inputs
    (('mean_top1',), ('top1', 'top_diff'))
    """
    return FEATURES[name] if name in FEATURES else Feature(name, (name,), logit)


def inputs_of(features: tuple[str, ...]) -> tuple[str, ...]:
    """Return the scores that features are computed from, each once.

    Examples
    --------
    >>> inputs_of(DEFAULT_FEATURES)
    ('top1', 'top_diff')
    """
    return tuple(dict.fromkeys(name for each in features for name in feature_of(each).inputs))
