"""Draft rules: when the small model hands over, and which drafted tokens are kept.

Each rule gives a drafted token a distance from the large model and has one dial, the level: the
first token beyond it is replaced, and the rest of the draft is dropped. At level 0 the output is
the large model's own.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure._lib import checks
from swiftsure.run import PolicyBinding, Rule
from swiftsure.text.generation import warpers

__all__ = ["DraftRule", "Judgement", "Noise", "Proposal", "Rollback", "Speculative"]

Noise = Callable[[int], NDArray[np.float64]]
"""Maps a token's position to its random numbers: for draft, acceptance and large model's draw."""


@dataclass(frozen=True)
class Proposal:
    """A token that the small model would write."""

    token: int
    confidence: float
    """The largest probability of the small model."""
    probabilities: Tensor | None = None
    """The distribution that the token was drawn from; None if it was not drawn."""


@dataclass(frozen=True)
class Judgement:
    """The large model's verdict on a draft, from one pass."""

    distances: list[float]
    """One per drafted token."""
    token_at: Callable[[int], int]
    """The large model's token instead of a drafted one, or after the last one."""


@dataclass(frozen=True)
class DraftRule(Rule):
    """Base class of the draft rules.

    Parameters
    ----------
    fallback : float
        The small model hands over when its largest probability is below this.
    max_draft : int
        Maximum number of tokens in a draft.
    """

    system: ClassVar[str] = "bild"
    record_from: ClassVar[str] = "swiftsure.text.sweep_pair"
    scheme: ClassVar[str]
    """Name of the rule in a policy's settings."""
    dial: ClassVar[str]
    """Name of the level in a policy's settings."""
    level_name: ClassVar[str]
    """Name of the level among a rule's own arguments."""
    samples: ClassVar[bool]
    """Whether tokens are sampled rather than the most probable ones."""
    large_first: ClassVar[bool]
    """Whether the large model writes the first token, before any draft."""
    reads_distributions: ClassVar[bool]
    """Whether it needs both models' distributions, not only their largest probabilities."""

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
        """The dial's setting; None means the large model alone."""
        level: float | None = getattr(self, self.level_name)
        return level

    def at(self, level: float | None) -> Self:
        """Return the same rule at another level."""
        changed: dict[str, Any] = {self.level_name: level}
        return replace(self, **changed)

    @classmethod
    @abstractmethod
    def check_level(cls, level: float | None) -> None:
        """Raise if a level is out of range."""

    @abstractmethod
    def propose(self, logits: Tensor, noise: Noise, place: int) -> Proposal:
        """Return the small model's next token from its logits, (vocabulary,)."""

    @abstractmethod
    def judge(
        self, logits: Tensor, draft: Sequence[Proposal], noise: Noise, first: int
    ) -> Judgement:
        """Return the large model's verdict on a draft.

        Parameters
        ----------
        logits : (drafted tokens + 1, vocabulary)
            The large model's logits for every drafted token and the one after.
        draft : the proposals
        noise : random numbers for each position
        first : position of the first drafted token
        """

    def settings(self) -> dict[str, Any]:
        """Return everything but the level, as stored in a record and its policies."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        del found[self.level_name]
        return {"scheme": self.scheme, **found}

    @classmethod
    def from_policy(cls, binding: PolicyBinding) -> Self:
        """Return the rule of a policy, of the class that its scheme names."""
        settings = binding.policy.settings
        schemes: dict[str, Any] = {rule.scheme: rule for rule in (Rollback, Speculative)}
        scheme = schemes.get(settings.get("scheme", ""))
        if scheme is None:
            raise binding.refusal()
        own = {each.name for each in fields(scheme)} - {scheme.level_name}
        known = {name: value for name, value in settings.items() if name in own}
        # If nothing was certified, the large model runs alone, as in the record's first column.
        known[scheme.level_name] = binding.dial(scheme.dial)
        rule: Self = scheme(**known)
        return rule

    @classmethod
    def from_threshold(cls, threshold: float | None) -> Self:
        """Return the rule for a bare rollback threshold."""
        return Rollback(threshold)  # type: ignore[return-value]


@dataclass(frozen=True)
class Rollback(DraftRule):
    """Big-little decoding (BiLD): greedy, with the distance −log p of the large model.

    A drafted token that is also the large model's choice has distance 0. Any other token has a
    probability of at most 1/2, so all thresholds below log 2 = 0.693 give the large model's own
    output, token for token (except for ties within rounding).

    Parameters
    ----------
    threshold : float, optional
        Largest distance of tokens that are kept, at least 0; None means the large model alone.
    fallback, max_draft
        As in `DraftRule`.
    published : bool
        Behave like the published code: end tokens of the small model are not verified, the large
        model runs twice after a rollback, a small-model pass that ends in a fallback is thrown
        away, and if the first token above the threshold is the large model's own choice, the rest
        of the draft is not checked. Level 0 is then not safe.

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
    reads_distributions: ClassVar[bool] = False

    threshold: float | None
    published: bool = field(default=False, kw_only=True)

    @classmethod
    def check_level(cls, level: float | None) -> None:
        """Raise if a threshold is negative or not a finite number."""
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
        return self.judgement(choices, chances.squeeze(1).neg().tolist(), draft)

    def judgement(
        self, choices: Sequence[int], distances: Sequence[float], draft: Sequence[Proposal]
    ) -> Judgement:
        """Return the verdict, from the large model's tokens and the drafted ones' −log p."""
        if not self.published:
            distances = [
                0.0 if choice == each.token else distance
                for distance, choice, each in zip(distances, choices, draft, strict=False)
            ]
        return Judgement(list(distances), choices.__getitem__)


@dataclass(frozen=True)
class Speculative(DraftRule):
    """Speculative sampling: lossless at tolerance 0, cheaper above it.

    A token drawn from the small model's q is kept with probability min(1, p / ((1 − tolerance) q)),
    where p is the large model's distribution; otherwise it is redrawn from the positive part of
    p − q.

    Guarantee: given the tokens before it, every token's distribution is within `tolerance` of the
    large model's, in total variation; at tolerance 0 it is the large model's.

    Random numbers depend on seed, sequence and position. A token's distance is 1 − p / (u q), where
    u is the number that decides its acceptance, so runs at different tolerances can be compared.

    Parameters
    ----------
    tolerance : float, optional
        In [0, 1]; None means the large model alone.
    fallback, max_draft
        As in `DraftRule`. Neither changes the distribution; by default every draft has full length.
    temperature, top_k, top_p
        As in `generate`, for both models; `top_k=0` keeps all tokens.

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
    reads_distributions: ClassVar[bool] = True

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
        """Return the distances, and a function that draws the large model's tokens."""
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
                1.0 - ratio / (1.0 - float(noise(place)[1]))  # divide by a number in (0, 1]
                for place, ratio in enumerate(ratios.squeeze(1).tolist(), first)
            ]
        return Judgement(distances, token_at)

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Return the sampling distribution in float64, (n, vocabulary)."""
        process = warpers(self.temperature, self.top_k, self.top_p)
        warped: Tensor = process(None, logits)  # type: ignore[arg-type]
        return warped.double().softmax(dim=-1)


def excess(large: Tensor, small: Tensor) -> Tensor:
    """Return the positive part of large − small, not normalised.

    Redrawing rejected tokens from it restores the large model's distribution.
    """
    more = (large - small).clamp(min=0)
    # If rounding leaves nothing, the two distributions are the same.
    return more if bool(more.sum() > 0) else large


def _draw(chances: Tensor, uniform: float) -> int:
    """Return a token drawn with a uniform number in [0, 1); probabilities need not sum to 1."""
    heights = chances.cumsum(dim=-1)
    return int(
        torch.searchsorted(heights, heights[-1:] * uniform, right=True).clamp(max=len(heights) - 1)
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"`{name}` must be a number, but got {value!r}.")
    return float(value)
