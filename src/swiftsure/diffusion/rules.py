"""DeeDiff's exit rule."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

from swiftsure._lib import checks
from swiftsure.run import PolicyBinding, ThresholdRule

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
    look_steps : int, optional
        Look only in so many first steps of the sampler; in all by default. The later steps run the
        full network, without the cost of looks. Choose it like `look_at`.
    """

    look_steps: int | None = field(default=None, kw_only=True)

    system: ClassVar[str] = "deediff"
    record_from: ClassVar[str] = "swiftsure.diffusion.sweep"
    score: ClassVar[str] = "model"
    """The network's own confidence, 1 minus its mean uncertainty."""

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        if self.look_steps is not None:
            checks.count("look_steps", self.look_steps)

    def looks_in(self, step: int) -> bool:
        """Return whether a step of the sampler, from 0 on, looks at all."""
        return self.look_steps is None or step < self.look_steps

    @classmethod
    def from_policy(cls, binding: PolicyBinding) -> Self:
        """Return the rule of a policy; raise if its score is not the network's own."""
        rule = super().from_policy(binding)
        binding.check_score(cls.score)
        return rule
