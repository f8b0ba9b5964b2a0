"""Exit rules of systems, made from a policy, a rule or a bare threshold."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.exits import threshold_array
from swiftsure.policy import Policy
from swiftsure.systems.binding import PolicyBinding

__all__ = ["Rule", "ThresholdRule", "resolve_rule", "threshold_levels"]


class Rule(Protocol):
    """The exit rule of a system, with a dial that a controller can set."""

    @classmethod
    def bind(cls, policy: Policy) -> PolicyBinding:
        """Return the binding of a policy for this kind of system."""

    @classmethod
    def from_policy(cls, policy: Policy) -> Self:
        """Return the rule of a policy; raises if it is for another kind of system."""

    @classmethod
    def from_threshold(cls, threshold: float | None) -> Self:
        """Return the default rule at a threshold; None for the full model."""


SomeRule = TypeVar("SomeRule", bound=Rule)


def resolve_rule(given: Policy | SomeRule | float | None, kind: type[SomeRule]) -> SomeRule:
    """Return the rule of a policy or a bare threshold; a rule is returned unchanged."""
    if isinstance(given, kind):
        return given
    if isinstance(given, Policy):
        return kind.from_policy(given)
    return kind.from_threshold(given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ThresholdRule:
    """Exit at the first exit whose confidence reaches the threshold.

    Parameters
    ----------
    threshold : float, optional
        λ, at most 1. None: never exit, or as `sweep` documents.
    strict : bool
        Exit on `>` instead of `≥`.
    min_exit : int
        Exits before this one are never taken.
    """

    system: ClassVar[str]
    """What is run, in words for error messages."""
    record_from: ClassVar[str]
    """Name of the function that makes its records."""

    threshold: float | None = None
    score: ClassVar[str]  # rules with several scores make it a field, second in position
    strict: bool = field(default=False, kw_only=True)
    min_exit: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Check every field."""
        checks.count("min_exit", self.min_exit, 0)
        threshold_levels("threshold", [self.threshold])

    def reachable(self, levels: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return which thresholds a confidence can reach, given that it is at most 1."""
        return levels < 1 if self.strict else levels <= 1

    def check_exits(self, n_exits: int) -> None:
        """Raise if `min_exit` is not an exit of the model."""
        if self.min_exit >= n_exits:
            raise ValueError(
                f"`min_exit` must be less than the model's {n_exits} exits, but got"
                f" {self.min_exit}."
            )

    def settings(self, n_exits: int) -> dict[str, Any]:
        """Return everything but the threshold, as a record and its policies keep it."""
        found: dict[str, Any] = {"score": self.score, "n_exits": n_exits}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("threshold", "score") and value != each.default:
                found[each.name] = value
        return found

    @classmethod
    def bind(cls, policy: Policy) -> PolicyBinding:
        """Return the binding of a policy for this kind of system."""
        return PolicyBinding(policy, cls.system, cls.record_from)

    @classmethod
    def from_policy(cls, policy: Policy) -> Self:
        """Return the rule of a policy; raises if it is for another kind of system."""
        own = {each.name for each in fields(cls)} - {"threshold"}
        settings = {name: value for name, value in policy.settings.items() if name in own}
        return cls(cls.bind(policy).dial("threshold"), **settings)

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
