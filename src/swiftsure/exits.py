"""The exit rule: a sample takes the first exit where its confidence reaches the threshold.

Every runtime calls `reaches` and `can_exit`. Compiled kernels cannot; a test compares each of them
with this file. A confidence that is NaN reaches no threshold, not even 0: the sample goes on to the
full model, whose answer loses nothing. If it exited instead, an answer would be given of which the
certificate knows nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure._lib import kernels as _kernels

if TYPE_CHECKING:
    from swiftsure.scores import LearnedScore

__all__ = [
    "NEVER",
    "ExitRule",
    "calm_decay",
    "can_exit",
    "exit_indices",
    "exits_in_use",
    "reaches",
    "threshold_array",
]

NEVER = np.float32(np.inf)
"""A threshold that no confidence reaches. 1.0 would not do: confidences can reach 1.0."""


@dataclass(frozen=True)
class ExitRule:
    """When a sample exits: at the first exit whose confidence reaches the threshold.

    Attributes
    ----------
    score : str, LearnedScore or None
        Name of the confidence, or one that was learned; None for the record's only one, or top1.
    threshold : float, tuple of float, or None
        One for all exits, or one per exit but the last. None means never, and in a request that it
        is to be found.
    strict : bool
        Exit on `>` rather than `≥`; published systems use either.
    min_exit : int
        Exits before this index are never taken.

    Examples
    --------
    >>> ExitRule(threshold=0.8).exits([[0.9, 0.2], [0.3, 0.8], [0.1, 0.1]])
    array([0, 1, 2])
    """

    score: "str | LearnedScore | None" = None
    threshold: float | tuple[float | None, ...] | None = None
    strict: bool = False
    min_exit: int = 0

    def __post_init__(self) -> None:
        """Check the first exit that may be taken."""
        if self.score is not None and not isinstance(self.score, str) and not self.is_learned:
            raise TypeError(
                f"`score` must be the name of a score, or a LearnedScore, but got {self.score!r}."
            )
        checks.count("min_exit", self.min_exit, 0)

    @property
    def is_learned(self) -> bool:
        """Whether the score is a LearnedScore, which computes confidences from others."""
        return hasattr(self.score, "confidences")

    @property
    def score_name(self) -> str | None:
        """Name of the score, also of a learned one."""
        return self.score if self.score is None else str(getattr(self.score, "name", self.score))

    def exits(self, confidences: ArrayLike) -> NDArray[np.int64]:
        """Return the exit that each sample takes; see `exit_indices`."""
        return exit_indices(confidences, self.threshold, strict=self.strict, min_exit=self.min_exit)


def reaches(confidences: Any, thresholds: Any, *, strict: bool = False) -> Any:
    """Return whether confidences reach thresholds, so that their samples exit.

    Parameters
    ----------
    confidences, thresholds
        Numbers, arrays, or tensors of any framework, which broadcast against each other; both
        rounded to float32. A confidence of NaN reaches no threshold.
    strict : bool
        Ask for `>` rather than `≥`.

    Examples
    --------
    >>> reaches(np.float32([0.4, 0.5, np.nan, 1.0]), np.float32(0.5))
    array([False,  True, False,  True])
    """
    return confidences > thresholds if strict else confidences >= thresholds


def can_exit(thresholds: Any, *, strict: bool = False) -> Any:
    """Return whether a confidence, which is at most 1, can reach thresholds.

    Where it cannot, neither a head nor a small model need run.

    Examples
    --------
    >>> can_exit(1.0), can_exit(1.0, strict=True), can_exit(NEVER)
    (True, False, np.False_)
    """
    return reaches(1.0, thresholds, strict=strict)


def exits_in_use(thresholds: ArrayLike, *, strict: bool = False, min_exit: int = 0) -> list[int]:
    """Return the exits at which some confidence can make a sample exit.

    Parameters
    ----------
    thresholds : (n_exits - 1,) or (n, n_exits - 1)
        One per exit, or one per sample and exit.

    Examples
    --------
    >>> exits_in_use([0.9, NEVER, 1.0, 0.5], min_exit=1)
    [2, 3]
    """
    can = np.atleast_2d(can_exit(np.asarray(thresholds, np.float32), strict=strict)).any(axis=0)
    return [exit_ for exit_ in np.flatnonzero(can).tolist() if exit_ >= min_exit]


def threshold_array(
    thresholds: ArrayLike | Sequence[float | None], name: str = "thresholds"
) -> NDArray[np.float32]:
    """Return thresholds as float32, with `None` (never exit) as infinity.

    Confidences are float32 too, so both sides of the comparison are rounded the same way: 0.7 in
    float32 is less than 0.7 in float64.

    Examples
    --------
    >>> threshold_array([None, 0.5])
    array([inf, 0.5], dtype=float32)
    """
    try:
        values = np.asarray(thresholds)
    except ValueError:
        raise ValueError(
            f"`{name}` must have rows of one length, but got {thresholds!r}."
        ) from None
    if values.dtype == object:
        flat = [np.inf if value is None else value for value in values.ravel()]
        try:
            values = np.asarray(flat, dtype=np.float64).reshape(values.shape)
        except (TypeError, ValueError):
            raise TypeError(
                f"`{name}` must hold numbers or None, but got {thresholds!r}."
            ) from None
    array = checks.numbers(name, values)
    if np.isnan(array).any():
        raise ValueError(f"`{name}` must not hold NaN.")
    return array.astype(np.float32)


def exit_indices(
    confidences: ArrayLike,
    thresholds: ArrayLike | Sequence[float | None] | None,
    *,
    strict: bool = False,
    min_exit: int = 0,
) -> NDArray[np.int64]:
    """Return the exit that each sample takes (Eq. 1 of the paper).

    Parameters
    ----------
    confidences : (n, n_exits - 1)
        Confidence at every exit but the last, which takes all samples that are left.
    thresholds : scalar or (n_exits - 1,)
        One shared threshold, or one per exit; `None` means never.
    strict : bool
        Exit on `>` rather than `≥`; published systems use either.
    min_exit : int
        Exits before this index are never taken.

    Returns
    -------
    exits : (n,)
        0-based; `n_exits - 1` is the full model.

    Raises
    ------
    ValueError
        If the shapes do not match or a value is NaN.

    Examples
    --------
    >>> exit_indices([[0.9, 0.2], [0.3, 0.8], [0.1, 0.1]], 0.8)
    array([0, 1, 2])
    """
    scores = checks.numbers("confidences", confidences, np.float32)
    checks.of_shape("confidences", scores, {"n": None, "n_exits - 1": None})
    checks.finite("confidences", scores)
    values = threshold_array(np.inf if thresholds is None else thresholds)
    if values.ndim == 0:
        values = np.full(scores.shape[1], values)
    checks.of_shape("thresholds", values, {"n_exits - 1": scores.shape[1]})
    checks.count("min_exit", min_exit, 0)
    exits: NDArray[np.int64] = _kernels.exit_indices(
        np.ascontiguousarray(scores), values, strict, min_exit
    )
    return exits


def calm_decay(
    threshold: ArrayLike, step: ArrayLike, length: int, temperature: float = 4.0
) -> NDArray[np.float32]:
    """Return CALM's threshold at a decoding step (its Eq. 5): early tokens need more confidence.

    λ(t) = clip(0.9 λ + 0.1 exp(−τ t / N), 0, 1). The scalar λ is what a control sets. An infinite
    λ (never exit) stays infinite.

    Parameters
    ----------
    threshold : array_like
        λ; infinity means never exit.
    step : array_like
        t, from 0; broadcast against `threshold`.
    length : int
        N, the longest output.
    temperature : float
        τ; with 0 the threshold is the same at every step.

    Examples
    --------
    >>> calm_decay(0.8, [0, 50, 100], length=100, temperature=4.0).round(3)
    array([0.82 , 0.734, 0.722], dtype=float32)
    """
    checks.count("length", length)
    if not temperature >= 0:
        raise ValueError(f"`temperature` must be at least 0, but got {temperature}.")
    values = threshold_array(threshold, "threshold").astype(np.float64)
    steps = checks.numbers("step", step, np.float64)
    decayed = np.clip(0.9 * values + 0.1 * np.exp(-temperature * steps / length), 0.0, 1.0)
    return np.where(np.isposinf(values), np.inf, decayed).astype(np.float32)
