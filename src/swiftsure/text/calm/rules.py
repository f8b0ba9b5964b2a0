"""The exit rule for generation: score, threshold and the threshold's decay over the answer."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.exits import calm_decay, threshold_array
from swiftsure.run import PolicyBinding, ThresholdRule

__all__ = ["SCORES", "CalmRule", "Decay", "check_thresholds"]

SCORES = ("softmax", "saturation", "meta", "learned")
"""Names of the confidences."""


@dataclass(frozen=True)
class Decay:
    """How the threshold decays over the answer; calibration still sets the scalar λ.

    Parameters
    ----------
    length : int
        N, the length of the longest answer.
    temperature : float
        τ; 0 treats all tokens alike.
    form : {"calm", "free"}
        CALM's Eq. 5, 0.9 λ + 0.1 exp(−τ t / N) clipped to [0, 1], t from 0; or FREE's code,
        λ (0.9 + 0.1 exp(−τ t / N)), t from 1.

    Examples
    --------
    >>> Decay(length=100).levels([0.8, 0.9], 50).round(3)
    array([0.734, 0.824], dtype=float32)
    """

    length: int
    temperature: float = 4.0
    form: Literal["calm", "free"] = "calm"

    def __post_init__(self) -> None:
        """Check every field."""
        checks.count("length", self.length)
        checks.choice("form", self.form, ["calm", "free"])
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"`temperature` must be at least 0, but got {self.temperature}.")

    def levels(self, threshold: ArrayLike, step: int) -> NDArray[np.float32]:
        """Return the thresholds that apply at this token, counted from 0."""
        if self.form == "calm":
            return calm_decay(threshold, step, self.length, self.temperature)
        falling = 0.9 + 0.1 * math.exp(-self.temperature * (step + 1) / self.length)
        return (threshold_array(threshold).astype(np.float64) * falling).astype(np.float32)


@dataclass(frozen=True)
class CalmRule(ThresholdRule):
    """A token exits after the first decoder block whose confidence reaches the threshold.

    Parameters
    ----------
    threshold : float, optional
        λ, at most 1; None means never exit or, in a `sweep`, the sweep's own thresholds.
    score : {"softmax", "saturation", "meta", "learned"}
        Difference between the two largest probabilities; cosine similarity of the states before
        and after a block; the probability that the block gives the full model's token, by a
        classifier of the states, or by a `TokenScore` of softmax, saturation and block together.
    strict : bool
        Exit on `>` instead of `≥`.
    min_exit : int
        Exits before this one are never taken; exit 0 is after the first block.
    decay : Decay, optional
    shortlist : int, optional
        For "softmax": after the first exit, score only the tokens that are most probable there,
        this many of them, and check the whole vocabulary only before a token exits. Exits are as
        confident as without it, but some may be missed.
    look_at : ints, optional
        The exits at which to measure the confidence; all by default. A look may cost more than the
        block that it saves.

    Examples
    --------
    >>> CalmRule(0.9, score="saturation").settings(n_exits=6)
    {'score': 'saturation', 'n_exits': 6}
    """

    system: ClassVar[str] = "calm"
    record_from: ClassVar[str] = "swiftsure.text.sweep"

    score: str = "softmax"  # type: ignore[misc]
    decay: Decay | None = field(default=None, kw_only=True)
    shortlist: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        checks.choice("score", self.score, SCORES)
        if self.shortlist is not None:
            checks.count("shortlist", self.shortlist, 2)
            if self.score != "softmax":
                raise ValueError(
                    "`shortlist` shortens the vocabulary of score 'softmax', not of"
                    f" {self.score!r}."
                )

    def levels(self, thresholds: NDArray[np.float32], step: int) -> NDArray[np.float32]:
        """Return each threshold as it applies at this token, counted from 0."""
        return thresholds if self.decay is None else self.decay.levels(thresholds, step)

    def settings(self, n_exits: int) -> dict[str, Any]:
        """Return everything but the threshold, as stored in a record and its policies."""
        found = super().settings(n_exits)
        if found.pop("decay", None) is not None:
            found |= {f"decay_{f.name}": getattr(self.decay, f.name) for f in fields(Decay)}
        return found

    @classmethod
    def from_policy(cls, binding: PolicyBinding) -> Self:
        """Return the rule of a policy, which must name its score and number of exits."""
        if binding.score is None or binding.n_exits is None:
            raise binding.refusal()
        stored, prefix = binding.policy.settings, "decay_"
        decay = {
            key.removeprefix(prefix): value
            for key, value in stored.items()
            if key.startswith(prefix) and value is not None  # None: another setting has a decay
        }
        return replace(super().from_policy(binding), decay=Decay(**decay) if decay else None)


def check_thresholds(thresholds: NDArray[np.float32], n: int) -> None:
    """Raise unless there is one threshold for all sequences, or one for each of n."""
    if thresholds.ndim and len(thresholds) != n:
        raise ValueError(
            f"`thresholds` must be one number or one per sequence, {n}, but got {len(thresholds)}."
        )
