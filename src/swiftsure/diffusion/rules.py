"""When a step stops: the exit rule of a generation, and what a policy says of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.exits import threshold_array
from swiftsure.policy import Policy

__all__ = ["ExitRule", "checked_thresholds", "rule_of"]

SCORE = "model"
"""The score of all these policies: the network's own confidence, one less its mean uncertainty."""


@dataclass(frozen=True)
class ExitRule:
    """A step stops at the first exit whose confidence reaches the threshold.

    Parameters
    ----------
    threshold : float, optional
        λ, the same at all steps and exits; None: never.
    strict : bool
        Leave on `>` rather than `≥`, as the published code does.
    min_exit : int
        Exits before this one are never taken. (In the published code, who is sure at the first
        exit leaves at the second.)
    """

    threshold: float | None = None
    strict: bool = False
    min_exit: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no rule."""
        checks.count("min_exit", self.min_exit, 0)
        checked_thresholds("threshold", [self.threshold])

    def reachable(self, levels: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return which thresholds some confidence can reach: none is above 1."""
        return levels < 1 if self.strict else levels <= 1

    def settings(self, n_exits: int) -> dict[str, Any]:
        """Return all but the threshold, as a record and its policies keep it."""
        found: dict[str, Any] = {"score": SCORE, "n_exits": n_exits}
        if self.strict:
            found["strict"] = True
        if self.min_exit:
            found["min_exit"] = self.min_exit
        return found


def checked_thresholds(name: str, thresholds: Any) -> NDArray[np.float32]:
    """Return thresholds as float32; those above 1, which no confidence reaches, are refused."""
    levels = threshold_array(thresholds, name)
    if levels.size and (np.isfinite(levels) & (levels > 1)).any():
        raise ValueError(
            f"`{name}` must be at most 1, or None for never, but got"
            f" {float(levels[np.isfinite(levels)].max()):g}."
        )
    return levels


def rule_of(given: Policy | ExitRule | float | None, n_exits: int) -> ExitRule:
    """Return the rule of a policy, of a bare threshold, or as it is, checked against the model.

    Raises
    ------
    ValueError
        If a policy was made for another score or number of exits, or for no generation at all.
    """
    if isinstance(given, Policy):
        rule = _policy_rule(given, n_exits)
    else:
        rule = given if isinstance(given, ExitRule) else ExitRule(given)
    if rule.min_exit >= n_exits:
        raise ValueError(
            f"`min_exit` must be less than the model's {n_exits} exits, but got {rule.min_exit}."
        )
    return rule


def _policy_rule(policy: Policy, n_exits: int) -> ExitRule:
    if policy.n_exits is not None:
        raise ValueError(
            "`policy` was made for single answers of a network, not for whole generations: make its"
            " record with swiftsure.diffusion.sweep."
        )
    if isinstance(policy.threshold, tuple):
        raise ValueError("`policy` must have one threshold, not one an exit.")
    settings: Mapping[str, Any] = policy.settings
    if "threshold" not in settings or "generation" in settings:
        raise ValueError(
            "`policy` was made for another kind of system: make its record with"
            " swiftsure.diffusion.sweep."
        )
    # A policy that was made from arrays alone says nothing of these, and is bound to nothing.
    score = settings.get("score", SCORE)
    if score != SCORE:
        raise ValueError(f"`policy` was made for score {score!r}, but this model has {SCORE!r}.")
    made_for = settings.get("n_exits", n_exits)
    if made_for != n_exits:
        raise ValueError(f"`policy` was made for {made_for} exits, but the model has {n_exits}.")
    return ExitRule(
        policy.threshold,
        strict=bool(settings.get("strict", False)),
        min_exit=int(settings.get("min_exit", 0)),
    )
