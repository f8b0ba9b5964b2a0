"""When a draft is handed over, and which of its tokens stand: the dials of big-little decoding.

Each rule turns a drafted token into a distance from the large model, and has one dial, a level: the
first token that is further away is replaced, and what follows it is dropped. At level 0 nothing
but the large model's own output comes out.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swiftsure import checks
from swiftsure.policy import Policy
from swiftsure.systems import PolicyBinding

__all__ = ["DraftRule", "Judgement", "Noise", "Proposal", "Rollback", "Speculative"]

Noise = Callable[[int], NDArray[np.float64]]
"""From a token's place to its random numbers: of draft, acceptance and the large model's draw."""


@dataclass(frozen=True)
class Proposal:
    """A token that the small model would write."""

    token: int
    confidence: float
    """The largest probability of the small model."""
    probabilities: Tensor | None = None
    """What the token was drawn from; None where it was not drawn."""


@dataclass(frozen=True)
class Judgement:
    """What the large model says of a draft, from one pass."""

    distances: list[float]
    """One a drafted token."""
    token_at: Callable[[int], int]
    """The large model's token in place of a drafted one, or after the last of them."""


@dataclass(frozen=True)
class DraftRule(ABC):
    """What all rules share.

    Parameters
    ----------
    fallback : float
        The small model hands over as soon as its largest probability is below this.
    max_draft : int
        The most tokens that it writes in a row.
    """

    scheme: ClassVar[str]
    """Name of the rule in a policy's settings."""
    dial: ClassVar[str]
    """Name of the level in a policy's settings."""
    level_name: ClassVar[str]
    """Name of the level among a rule's own arguments."""
    samples: ClassVar[bool]
    """Whether tokens are drawn, and not the most probable ones."""
    large_first: ClassVar[bool]
    """Whether the first token is the large model's, before any draft."""

    fallback: float = field(default=0.5, kw_only=True)
    max_draft: int = field(default=10, kw_only=True)

    def __post_init__(self) -> None:
        """Check every field."""
        if not 0 <= _number("fallback", self.fallback) <= 1:
            raise ValueError(f"`fallback` must be in [0, 1], but got {self.fallback:g}.")
        checks.count("max_draft", self.max_draft)
        self.check_level(self.level)

    @property
    def level(self) -> float | None:
        """The setting of the dial; None: the large model alone."""
        level: float | None = getattr(self, self.level_name)
        return level

    def at(self, level: float | None) -> Self:
        """Return the same rule with another setting of its dial."""
        changed: dict[str, Any] = {self.level_name: level}
        return replace(self, **changed)

    @classmethod
    @abstractmethod
    def check_level(cls, level: float | None) -> None:
        """Raise if a setting of the dial is out of range."""

    @abstractmethod
    def propose(self, logits: Tensor, noise: Noise, place: int) -> Proposal:
        """Return the token that the small model would write, from its logits, (vocabulary,)."""

    @abstractmethod
    def judge(
        self, logits: Tensor, draft: Sequence[Proposal], noise: Noise, first: int
    ) -> Judgement:
        """Return what the large model says of a draft.

        Parameters
        ----------
        logits : (drafted tokens + 1, vocabulary)
            Of the large model, for every drafted token and the one after.
        draft : the proposals
        noise : random numbers of each place
        first : place of the first drafted token
        """

    def settings(self) -> dict[str, Any]:
        """Return everything but the level, as a record and its policies keep it."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        del found[self.level_name]
        return {"scheme": self.scheme, **found}

    @classmethod
    def bind(cls, policy: Policy) -> PolicyBinding:
        """Return the binding of a policy for drafting."""
        return PolicyBinding(policy, "drafting with a small model", "swiftsure.text.sweep_pair")

    @classmethod
    def from_policy(cls, policy: Policy) -> "DraftRule":
        """Return the rule of a policy, which must be for drafting."""
        binding, settings = cls.bind(policy), policy.settings
        schemes = {rule.scheme: rule for rule in (Rollback, Speculative)}
        scheme: type[DraftRule] | None = schemes.get(settings.get("scheme", ""))
        if scheme is None:
            raise binding.refusal()
        own = {each.name for each in fields(scheme)} - {scheme.level_name}
        known: dict[str, Any] = {name: value for name, value in settings.items() if name in own}
        # If nothing was certified, the large model runs alone: the record's first column.
        known[scheme.level_name] = binding.dial(scheme.dial)
        return scheme(**known)

    @classmethod
    def from_threshold(cls, threshold: float | None) -> "DraftRule":
        """Return the rule of a bare rollback threshold."""
        return Rollback(threshold)


@dataclass(frozen=True)
class Rollback(DraftRule):
    """Big-little decoding (BiLD): greedy, with the distance −log p of the large model.

    A drafted token that is the large model's own choice has nothing to be replaced by: its distance
    is 0. Any other has a probability of at most 1/2, so all thresholds below log 2 = 0.693 give the
    large model's own output, token for token (but for ties within rounding).

    Parameters
    ----------
    threshold : float, optional
        The largest distance of tokens that stand, at least 0; None: the large model alone.
    fallback, max_draft
        As in `DraftRule`.
    published : bool
        Do as the published code does: ends of a sequence by the small model stand unverified, the
        large model runs twice after a rollback, a look at the small model that ends in a fallback
        is thrown away, and where the first distance above the threshold is that of the large
        model's own choice, the rest of the draft goes unchecked. Level 0 is then not safe.

    References
    ----------
    Kim et al., *Speculative Decoding with Big Little Decoder*, NeurIPS 2023.

    Examples
    --------
    >>> Rollback(2.0).settings()
    {'scheme': 'rollback', 'fallback': 0.5, 'max_draft': 10, 'published': False}
    """

    scheme: ClassVar[str] = "rollback"
    dial: ClassVar[str] = "rollback"
    level_name: ClassVar[str] = "threshold"
    samples: ClassVar[bool] = False
    large_first: ClassVar[bool] = True

    threshold: float | None
    published: bool = field(default=False, kw_only=True)

    @classmethod
    def check_level(cls, level: float | None) -> None:
        """Raise if a threshold is negative or no number."""
        if level is not None and not (_number("threshold", level) >= 0 and math.isfinite(level)):
            raise ValueError(
                f"`threshold` must be at least 0, or None for the large model alone, but got"
                f" {level:g}."
            )

    def propose(self, logits: Tensor, noise: Noise, place: int) -> Proposal:  # noqa: ARG002
        """Return the most probable token."""
        top, token = logits.softmax(dim=-1).max(dim=-1)
        return Proposal(int(token), float(top))

    def judge(
        self,
        logits: Tensor,
        draft: Sequence[Proposal],
        noise: Noise,  # noqa: ARG002
        first: int,  # noqa: ARG002
    ) -> Judgement:
        """Return the distances, and the large model's most probable tokens."""
        choices: list[int] = logits.argmax(dim=-1).tolist()
        if not draft:
            return Judgement([], choices.__getitem__)
        tokens = torch.tensor([each.token for each in draft], device=logits.device)
        chances = logits[:-1].log_softmax(dim=-1).gather(1, tokens[:, None])
        distances: list[float] = chances.squeeze(1).neg().tolist()
        if not self.published:
            distances = [
                0.0 if choice == each.token else distance
                for distance, choice, each in zip(distances, choices, draft, strict=False)
            ]
        return Judgement(distances, choices.__getitem__)


@dataclass(frozen=True)
class Speculative(DraftRule):
    """Speculative sampling: lossless at tolerance 0, and cheaper above it.

    A token drawn from the small model's q stands with probability min(1, p / ((1 − tolerance) q)),
    p being the large model's; else one is drawn in its place from what p has more than q.

    Guarantee: given what stands before it, every token's distribution is within `tolerance` of the
    large model's, in total variation; at tolerance 0 it is the large model's.

    Random numbers belong to seed, sequence and place, and a token's distance is
    1 − p / (u q), with the u that decides: so runs at different tolerances can be compared.

    Parameters
    ----------
    tolerance : float, optional
        In [0, 1]; None: the large model alone.
    fallback, max_draft
        As in `DraftRule`. Neither changes the distribution; by default every draft is full.
    temperature, top_k, top_p
        As in `generate`, for both models; `top_k=0` for all tokens.

    References
    ----------
    Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, ICML 2023, with
    its lenience 1 − tolerance. Chen et al., *Accelerating Large Language Model Decoding with
    Speculative Sampling*, 2023.

    Examples
    --------
    >>> Speculative().at(0.2).level
    0.2
    """

    scheme: ClassVar[str] = "speculative"
    dial: ClassVar[str] = "tolerance"
    level_name: ClassVar[str] = "tolerance"
    samples: ClassVar[bool] = True
    large_first: ClassVar[bool] = False

    tolerance: float | None = 0.0
    fallback: float = field(default=0.0, kw_only=True)
    max_draft: int = field(default=5, kw_only=True)
    temperature: float = field(default=1.0, kw_only=True)
    top_k: int = field(default=0, kw_only=True)
    top_p: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        checks.count("top_k", self.top_k, 0)
        if not (_number("temperature", self.temperature) > 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"`temperature` must be above 0, but got {self.temperature:g}: for the most"
                " probable tokens, take Rollback(0)."
            )
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise ValueError(f"`top_p` must be in (0, 1], but got {self.top_p:g}.")

    @classmethod
    def check_level(cls, level: float | None) -> None:
        """Raise if a tolerance is not in [0, 1]."""
        if level is not None and not 0 <= _number("tolerance", level) <= 1:
            raise ValueError(
                f"`tolerance` must be in [0, 1], or None for the large model alone, but got"
                f" {level:g}."
            )

    def propose(self, logits: Tensor, noise: Noise, place: int) -> Proposal:
        """Return a token drawn from the small model."""
        chances = self._probabilities(logits[None])[0]
        return Proposal(_draw(chances, noise(place)[0]), float(chances.max()), chances)

    def judge(
        self, logits: Tensor, draft: Sequence[Proposal], noise: Noise, first: int
    ) -> Judgement:
        """Return the distances, and what draws the large model's tokens."""
        large = self._probabilities(logits)
        small = [each.probabilities for each in draft if each.probabilities is not None]

        def token_at(place: int) -> int:
            rejected = place < len(draft)
            chances = excess(large[place], small[place]) if rejected else large[place]
            return _draw(chances, noise(first + place)[2])

        distances = []
        if draft:
            tokens = torch.tensor([each.token for each in draft], device=logits.device)[:, None]
            ratios = large[:-1].gather(1, tokens) / torch.stack(small).gather(1, tokens)
            distances = [
                1.0 - ratio / (1.0 - float(noise(place)[1]))  # by a number in (0, 1]
                for place, ratio in enumerate(ratios.squeeze(1).tolist(), first)
            ]
        return Judgement(distances, token_at)

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Return what tokens are drawn from, in double precision, (n, vocabulary)."""
        warped: Tensor = self._warpers(None, logits)  # type: ignore[arg-type]
        return warped.double().softmax(dim=-1)

    @property
    def _warpers(self) -> LogitsProcessorList:
        found = LogitsProcessorList()
        if self.temperature != 1.0:
            found.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            found.append(TopPLogitsWarper(float(self.top_p)))
        return found


def excess(large: Tensor, small: Tensor) -> Tensor:
    """Return what one distribution has more than the other, not normalised.

    Drawn from where a token of the other was rejected, it makes up for what rejection took away.
    """
    more = (large - small).clamp(min=0)
    # Where rounding leaves nothing, both say the same.
    return more if bool(more.sum() > 0) else large


def _draw(chances: Tensor, uniform: float) -> int:
    """Return a token drawn from probabilities, which need not sum to 1, with a number in [0, 1)."""
    heights = chances.cumsum(dim=-1)
    return int(
        torch.searchsorted(heights, heights[-1:] * uniform, right=True).clamp(max=len(heights) - 1)
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"`{name}` must be a number, but got {value!r}.")
    return float(value)
