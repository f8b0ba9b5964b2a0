"""Rules: what a system does, given a policy, a rule or a bare threshold."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.certify.policy import Policy
from swiftsure.exits import can_exit, reaches, threshold_array
from swiftsure.run.binding import PolicyBinding

__all__ = ["Rule", "ThresholdRule", "same_exits", "threshold_levels"]


class Rule(ABC):
    """What a system does at a setting of its dial."""

    system: ClassVar[str]
    """Name of the system; policies made for other systems are refused."""
    record_from: ClassVar[str]
    """Name of the function that makes its records."""

    @classmethod
    def of(cls, given: "Policy | Self | float | None") -> Self:
        """Return the rule for a policy or a bare threshold; a rule is returned unchanged."""
        if isinstance(given, cls):
            return given
        if isinstance(given, Policy):
            return cls.from_policy(cls.bind(given))
        return cls.from_threshold(given)  # type: ignore[arg-type]

    @classmethod
    def bind(cls, policy: Policy) -> PolicyBinding:
        """Return the binding of a policy; raises if it was made for another system."""
        return PolicyBinding(policy, cls.system, cls.record_from)

    @classmethod
    @abstractmethod
    def from_policy(cls, binding: PolicyBinding) -> Self:
        """Return the rule of a policy, given its binding."""

    @classmethod
    @abstractmethod
    def from_threshold(cls, threshold: float | None) -> Self:
        """Return the default rule at a threshold; None for the full model."""


@dataclass(frozen=True)
class ThresholdRule(Rule):
    """Exit at the first exit whose confidence reaches the threshold.

    Parameters
    ----------
    threshold : float, optional
        λ, at most 1. None means never exit, unless `sweep` documents otherwise.
    strict : bool
        Exit on `>` instead of `≥`.
    min_exit : int
        Exits before this one are never taken.
    look_at : ints, optional
        The exits at which to measure the confidence; all by default. A look may cost more than it
        saves, and only the exits that are looked at can be taken.
    """

    threshold: float | None = None
    score: ClassVar[str]  # rules with several scores make it a field, second in position
    strict: bool = field(default=False, kw_only=True)
    min_exit: int = field(default=0, kw_only=True)
    look_at: Sequence[int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check every field."""
        checks.count("min_exit", self.min_exit, 0)
        threshold_levels("threshold", [self.threshold])
        if self.look_at is not None:
            exits = sorted({checks.count("look_at", each, 0) for each in self.look_at})
            if not exits:
                raise ValueError("`look_at` must name at least one exit, but is empty.")
            object.__setattr__(self, "look_at", tuple(exits))

    def reachable(self, levels: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return which thresholds a confidence can reach, given that it is at most 1."""
        found: NDArray[np.bool_] = can_exit(levels, strict=self.strict)
        return found

    def check_exits(self, n_exits: int) -> None:
        """Raise if an exit that the rule names is not one of the model's."""
        if self.min_exit >= n_exits:
            raise ValueError(
                f"`min_exit` must be less than the model's {n_exits} exits, but got"
                f" {self.min_exit}."
            )
        if self.look_at is not None and self.look_at[-1] >= n_exits - 1:
            raise ValueError(
                f"`look_at` must name exits before the last of the model's {n_exits}, from 0 on,"
                f" but got {self.look_at[-1]}."
            )

    def looks(self, n_exits: int) -> list[int]:
        """Return the exits at which the confidence is measured.

        Examples
        --------
        >>> ThresholdRule(0.9, min_exit=1, look_at=[0, 1, 3]).looks(n_exits=6)
        [1, 3]
        """
        exits = range(self.min_exit, n_exits - 1)
        return [k for k in exits if self.look_at is None or k in self.look_at]

    def settings(self, n_exits: int) -> dict[str, Any]:
        """Return everything but the threshold, as stored in a record and its policies."""
        found: dict[str, Any] = {"score": self.score, "n_exits": n_exits}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("threshold", "score") and value != each.default:
                found[each.name] = list(value) if each.name == "look_at" else value
        return found

    @classmethod
    def from_policy(cls, binding: PolicyBinding) -> Self:
        """Return the rule of a policy, given its binding."""
        own = {each.name for each in fields(cls)} - {"threshold"}
        stored = binding.policy.settings.items()
        return cls(
            binding.dial("threshold"), **{name: value for name, value in stored if name in own}
        )

    @classmethod
    def from_threshold(cls, threshold: float | None) -> Self:
        """Return the default rule at a threshold."""
        return cls(threshold)


def threshold_levels(name: str, thresholds: Any) -> NDArray[np.float32]:
    """Return thresholds as float32, with infinity for never; raises if one is above 1."""
    levels = threshold_array(thresholds, name)
    above = levels[np.isfinite(levels) & (levels > 1)]
    if above.size:
        raise ValueError(
            f"`{name}` must be at most 1, or None for never, but got {float(above.max()):g}."
        )
    return levels


def same_exits(
    levels: NDArray[np.float32],
    skipped: NDArray[np.float32],
    taken: NDArray[np.float32],
    *,
    strict: bool,
) -> NDArray[np.bool_]:
    """Return the thresholds at which a run would take the same exits.

    Parameters
    ----------
    levels
        Thresholds.
    skipped, taken
        Largest confidence at an exit that was not taken, and smallest at one that was. NaN means
        that no confidence is known; no threshold then counts as the same.

    Examples
    --------
    >>> levels = np.asarray([0.9, 0.6, 0.3], np.float32)
    >>> same_exits(levels, np.float32(0.4), np.float32(0.8), strict=False)
    array([False,  True, False])
    """
    same: NDArray[np.bool_] = (
        reaches(taken, levels, strict=strict)
        & ~reaches(skipped, levels, strict=strict)
        & ~np.isnan(skipped)
    )
    return same
