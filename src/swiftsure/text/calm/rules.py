"""The exit rule of generation: score, threshold and its decay over the answer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure import checks
from swiftsure.exits import calm_decay, threshold_array
from swiftsure.policy import Policy

__all__ = ["SCORES", "Decay", "ExitRule", "as_rule"]

SCORES = ("softmax", "saturation", "meta")
"""Names of the confidences."""


@dataclass(frozen=True)
class Decay:
    """How the threshold falls over the answer; the scalar λ stays what a control sets.

    Parameters
    ----------
    length : int
        N, the longest answer.
    temperature : float
        τ; 0 makes every token alike.
    form : {"calm", "free"}
        CALM's Eq. 5, 0.9 λ + 0.1 exp(−τ t / N) clipped to [0, 1], t from 0; or what FREE's code
        does, λ (0.9 + 0.1 exp(−τ t / N)), t from 1.

    Examples
    --------
    >>> Decay(length=100).levels([0.8, 0.9], 50).round(3)
    array([0.734, 0.824], dtype=float32)
    """

    length: int
    temperature: float = 4.0
    form: Literal["calm", "free"] = "calm"

    def __post_init__(self) -> None:
        """Refuse what is no decay."""
        checks.count("length", self.length)
        checks.known("form", self.form, ["calm", "free"])
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"`temperature` must be at least 0, but got {self.temperature}.")

    def levels(self, threshold: ArrayLike, step: int) -> NDArray[np.float32]:
        """Return what confidences must reach at the token of this number, from 0."""
        if self.form == "calm":
            return calm_decay(threshold, step, self.length, self.temperature)
        falling = 0.9 + 0.1 * math.exp(-self.temperature * (step + 1) / self.length)
        return (threshold_array(threshold).astype(np.float64) * falling).astype(np.float32)


@dataclass(frozen=True)
class ExitRule:
    """When a token leaves the decoder: at the first block whose confidence reaches the threshold.

    Parameters
    ----------
    threshold : float, optional
        λ, at most 1; None: never, or as `sweep` says.
    score : {"softmax", "saturation", "meta"}
        Difference of the two largest probabilities; cosine of the states before and after a block;
        a classifier's probability that the block's token is the full model's.
    strict : bool
        Leave on `>` rather than `≥`.
    min_exit : int
        Exits before this one are never taken; exit 0 is after the first block.
    decay : Decay, optional
    shortlist : int, optional
        For "softmax": look at this many tokens only, the most probable ones at a token's first
        exit, and at the whole vocabulary only where these make a token leave. Exits are then as
        confident as without it, but some may be missed.

    Examples
    --------
    >>> ExitRule(0.9, score="saturation").settings(n_exits=6)
    {'score': 'saturation', 'n_exits': 6}
    """

    threshold: float | None = None
    score: str = "softmax"
    strict: bool = False
    min_exit: int = 0
    decay: Decay | None = None
    shortlist: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no rule."""
        checks.known("score", self.score, SCORES)
        checks.count("min_exit", self.min_exit, 0)
        if self.threshold is not None:
            checked_thresholds("threshold", [self.threshold])
        if self.shortlist is not None:
            checks.count("shortlist", self.shortlist, 2)
            if self.score != "softmax":
                raise ValueError(
                    "`shortlist` shortens the vocabulary of score 'softmax', not of"
                    f" {self.score!r}."
                )

    def levels(self, thresholds: NDArray[np.float32], step: int) -> NDArray[np.float32]:
        """Return what confidences must reach at the token of this number, for each threshold."""
        return thresholds if self.decay is None else self.decay.levels(thresholds, step)

    def settings(self, n_exits: int) -> dict[str, Any]:
        """Return all but the threshold, as a record and its policies keep it."""
        found: dict[str, Any] = {"score": self.score, "n_exits": n_exits}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("threshold", "score", "decay") or value == field.default:
                continue
            found[field.name] = value
        if self.decay is not None:
            found |= {f"decay_{f.name}": getattr(self.decay, f.name) for f in fields(self.decay)}
        return found

    @classmethod
    def from_settings(cls, threshold: float | None, settings: Mapping[str, Any]) -> "ExitRule":
        """Return the rule that a record or a policy was made for."""
        decay = {
            key.removeprefix("decay_"): value
            for key, value in settings.items()
            if key.startswith("decay_")
        }
        own = {f.name for f in fields(cls)} - {"threshold", "decay"}
        return cls(
            threshold,
            decay=Decay(**decay) if decay else None,
            **{name: value for name, value in settings.items() if name in own},
        )


def checked_thresholds(name: str, thresholds: Any) -> NDArray[np.float32]:
    """Return thresholds as float32; those above 1, which no confidence reaches, are refused."""
    levels = threshold_array(thresholds, name)
    if (np.isfinite(levels) & (levels > 1)).any():
        raise ValueError(
            f"`{name}` must be at most 1, or None for never, but got {float(levels.max()):g}."
        )
    return levels


def as_rule(given: "Policy | ExitRule | float | None", score: str | None, n_exits: int) -> ExitRule:
    """Return the rule of a policy, a rule, or a bare threshold, checked against the model.

    Raises
    ------
    ValueError
        If a policy was made for another score or number of exits, or for no generation at all.
    """
    if isinstance(given, Policy):
        rule = _policy_rule(given, n_exits)
    elif isinstance(given, ExitRule):
        rule = given
    else:
        return ExitRule(given, score=score or "softmax")
    if score is not None and score != rule.score:
        maker = "`policy` was made for" if isinstance(given, Policy) else "`rule` has"
        raise ValueError(f"{maker} score {rule.score!r}, but got {score!r}.")
    if rule.min_exit >= n_exits:
        raise ValueError(
            f"`min_exit` must be less than the model's {n_exits} exits, but got {rule.min_exit}."
        )
    return rule


def _policy_rule(policy: Policy, n_exits: int) -> ExitRule:
    settings = policy.settings
    if "score" not in settings or "n_exits" not in settings or "threshold" not in settings:
        raise ValueError(
            "`policy` was not made for early-exit generation: make its record with"
            " swiftsure.text.sweep."
        )
    if settings["n_exits"] != n_exits:
        raise ValueError(
            f"`policy` was made for {settings['n_exits']} exits, but the model has {n_exits}."
        )
    if isinstance(policy.threshold, tuple):
        raise ValueError("`policy` must have one threshold, not one an exit.")
    return replace(ExitRule.from_settings(None, settings), threshold=policy.threshold)
