"""The exit rule for diffusion."""

from dataclasses import dataclass
from typing import ClassVar, Self

from swiftsure.policy import Policy
from swiftsure.systems import ThresholdRule

__all__ = ["ExitRule"]


@dataclass(frozen=True)
class ExitRule(ThresholdRule):
    """A step stops at the first exit whose confidence reaches the threshold.

    Parameters
    ----------
    threshold : float, optional
        λ, the same at all steps and exits; None: never exit.
    strict : bool
        Exit on `>` instead of `≥`, as the published code does.
    min_exit : int
        Exits before this one are never taken. (In the published code, an image that is confident
        at the first exit exits at the second.)
    """

    system: ClassVar[str] = "early-exit diffusion"
    record_from: ClassVar[str] = "swiftsure.diffusion.sweep"
    score: ClassVar[str] = "model"
    """The network's own confidence, 1 minus its mean uncertainty."""

    @classmethod
    def from_policy(cls, policy: Policy) -> Self:
        """Return a policy's rule; raise if the policy is for text generation."""
        binding = cls.bind(policy)
        if "generation" in policy.settings:
            raise binding.refusal()
        rule = super().from_policy(policy)
        binding.check_score(cls.score)
        return rule
