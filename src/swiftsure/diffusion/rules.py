"""DeeDiff's exit rule."""

from dataclasses import dataclass
from typing import ClassVar, Self

from swiftsure.systems import PolicyBinding, ThresholdRule

__all__ = ["DeeDiffRule"]


@dataclass(frozen=True)
class DeeDiffRule(ThresholdRule):
    """A step stops at the first exit whose confidence reaches the threshold.

    Parameters
    ----------
    threshold : float, optional
        λ, the same at all steps and exits; None means never exit.
    strict : bool
        Exit on `>` instead of `≥`, as the published code does.
    min_exit : int
        Exits before this one are never taken. (In the published code, an image that is confident
        at the first exit exits at the second.)
    look_at : ints, optional
        The exits at which to measure the confidence; all by default. A look costs a third of a
        block or more, so leave out the exits that are rarely taken. Choose them from other images
        than those of the calibration.
    """

    system: ClassVar[str] = "deediff"
    record_from: ClassVar[str] = "swiftsure.diffusion.sweep"
    score: ClassVar[str] = "model"
    """The network's own confidence, 1 minus its mean uncertainty."""

    @classmethod
    def from_policy(cls, binding: PolicyBinding) -> Self:
        """Return the rule of a policy; raise if its score is not the network's own."""
        rule = super().from_policy(binding)
        binding.check_score(cls.score)
        return rule
