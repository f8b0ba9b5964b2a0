"""Confidence of a token after a block: softmax, hidden-state saturation, meta-classifier (CALM).

The first two can be learned into one, `Learned`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from swiftsure.exits import reaches
from swiftsure.text.calm.looks import cosine, gap_and_token
from swiftsure.text.calm.meta import MetaClassifier
from swiftsure.text.calm.rules import CalmRule
from swiftsure.text.calm.token_score import TokenScore, token_features
from swiftsure.text.decoder import Decoder
from swiftsure.text.static_cache import chosen_rows

__all__ = [
    "Confidence",
    "Learned",
    "Look",
    "Meta",
    "Saturation",
    "Softmax",
    "StaticShortlist",
    "confidence_of",
    "look_exits",
    "probability_gap",
]


@dataclass(frozen=True)
class Look:
    """Input of a confidence: the m tokens of a batch still running after a block."""

    exit_index: int
    """Index of the block, 0-based."""
    states: Tensor
    """(m, width), after the block."""
    previous: Tensor
    """(m, width), before the block."""
    rows: Tensor | None
    """Rows of these tokens in the batch of n; None: all rows."""
    n: int
    levels: float | Tensor
    """Thresholds to reach: one for all tokens, or (m,)."""


@dataclass(frozen=True)
class Logits:
    """The head's output over the whole vocabulary, which a confidence computed on the way."""

    index: Tensor | None
    """Positions among the m tokens; None: all of them."""
    values: Tensor

    def of(self, index: Tensor | None, m: int) -> Tensor:
        """Return the logits of these tokens, which must have been computed; None: of all m."""
        if self.index is not None:
            place = torch.zeros(m, dtype=torch.long, device=self.values.device)
            place[self.index] = torch.arange(len(self.index), device=place.device)
            index = place if index is None else place[index]
        return self.values if index is None else self.values[index]


class Confidence(ABC):
    """A measure of how sure a block is of the next token."""

    first_exit = 0
    """The first exit at which it is defined."""
    through_heads = False
    """Whether states go through the exit heads, if there are any, before they are measured."""
    gives_logits = False
    """Whether every look of a token that exits computes its logits over the whole vocabulary."""
    computed: Logits | None = None
    """Logits that the last look computed, so that the head need not compute them again."""
    tokens: Tensor | None = None
    """The most probable token of each row, (m,), if the last look found it."""

    def begin(self) -> None:
        """Reset for the next token."""
        self.computed = None

    @abstractmethod
    def measure(self, look: Look) -> Tensor:
        """Return confidences, (m,) in float32."""

    @abstractmethod
    def flops(self) -> int:
        """Return the FLOPs of one look at one token, without heads over the whole vocabulary."""


class Softmax(Confidence):
    """Difference of the two largest probabilities of the next token.

    With a shortlist, the first look uses the whole vocabulary and later looks only the tokens that
    were most probable then. If these reach the threshold, the whole vocabulary is checked before
    the token exits. So a token may exit later than without a shortlist, if its most probable token
    is not listed, but never less confidently.

    Measured on SmolLM2-135M, from its tenth block on, with 768 tokens and a shortlist of 64 of its
    49,152 tokens: at threshold 0.7 every token exited at the same block, at 0.9 6 of 700 did not.
    The list is not renewed within a token: it must not depend on the threshold, or `sweep` could
    not tell which thresholds give the same answer.
    """

    through_heads = True
    gives_logits = True

    def __init__(self, decoder: Decoder, shortlist: int | None = None) -> None:
        self.decoder = decoder
        self.size = shortlist
        if shortlist is not None and shortlist >= decoder.head.weight.shape[0]:
            self.size = None  # it would be the whole vocabulary
        self.listed: Tensor | None = None

    def begin(self) -> None:
        """Forget the shortlists."""
        super().begin()
        self.listed = None

    def measure(self, look: Look) -> Tensor:
        """Return p₁ − p₂ of each token."""
        inputs = self.decoder.exit_input(look.exit_index, look.states)
        if self.listed is not None:
            return self._shortlist_scores(look, inputs)
        scores = self.decoder.head(inputs)
        self.computed = Logits(None, scores)
        logits = self.decoder.logits(scores)
        if self.size is not None:
            likely = logits.topk(self.size, dim=1, sorted=False).indices
            self.listed = likely if look.rows is None else _scatter_rows(likely, look.rows, look.n)
        gaps, self.tokens = gap_and_token(logits)
        return gaps

    def _shortlist_scores(self, look: Look, inputs: Tensor) -> Tensor:
        listed = self.listed if look.rows is None else self.listed[look.rows]  # type: ignore[index]
        head = self.decoder.head
        short = torch.bmm(head.weight[listed], inputs.unsqueeze(2)).squeeze(2)
        if head.bias is not None:
            short = short + head.bias[listed]
        scores = probability_gap(self.decoder.logits(short, listed))
        candidates = reaches(scores, look.levels).nonzero().squeeze(1)
        self.computed = None
        if len(candidates):
            logits = head(inputs[candidates])
            self.computed = Logits(candidates, logits)
            whole = probability_gap(self.decoder.logits(logits))
            sure = torch.minimum(scores[candidates], whole)
            scores = scores.index_copy(0, candidates, sure)
        return scores

    def flops(self) -> int:
        """Return the FLOPs of the shortlist."""
        return 2 * (self.size or 0) * int(self.decoder.head.weight.shape[1])


class StaticShortlist:
    """The most probable tokens of each row at its first look, and their scores at later looks.

    Parameters
    ----------
    softmax : Softmax
        With a shortlist.
    n : int
        Number of sequences.
    """

    def __init__(self, softmax: Softmax, n: int) -> None:
        self.decoder, self.n = softmax.decoder, n
        head = self.decoder.head.weight
        self.listed = torch.zeros((n + 1, softmax.size or 0), dtype=torch.long, device=head.device)

    @classmethod
    def of(cls, confidence: Confidence, n: int) -> Self | None:
        """Return the shortlist of a confidence; None if it has none."""
        has_one = isinstance(confidence, Softmax) and confidence.size is not None
        return cls(confidence, n) if has_one else None  # type: ignore[arg-type]

    def keep(self, listed: Tensor, rows: Tensor | None) -> None:
        """Store the lists of some rows."""
        if rows is None:
            self.listed[: self.n].copy_(listed)
        else:
            self.listed.index_copy_(0, rows, listed)

    def scores(self, look: Look, rows: Tensor | None) -> Tensor:
        """Return the confidence among the listed tokens."""
        listed = chosen_rows(self.listed, rows, self.n)
        head = self.decoder.head
        inputs = self.decoder.exit_input(look.exit_index, look.states)
        short = torch.bmm(head.weight[listed], inputs.unsqueeze(2)).squeeze(2)
        if head.bias is not None:
            short = short + head.bias[listed]
        return probability_gap(self.decoder.logits(short, listed))

    def checked(self, short: Tensor, whole: Tensor, levels: Tensor) -> Tensor:
        """Return the smaller confidence of list and vocabulary where the list's reaches a level."""
        gap = probability_gap(self.decoder.logits(whole))
        return torch.where(reaches(short, levels), torch.minimum(short, gap), short)


class Saturation(Confidence):
    """Cosine similarity of the states before and after a block, from the second block on (CALM)."""

    first_exit = 1

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def measure(self, look: Look) -> Tensor:
        """Return the cosine similarity of each token."""
        return cosine(look.states, look.previous)

    def flops(self) -> int:
        """Return the FLOPs of three inner products."""
        return 6 * int(self.decoder.head.weight.shape[1])


class Meta(Confidence):
    """A classifier's probability that the block gives the same token as the full model."""

    def __init__(self, decoder: Decoder, classifier: MetaClassifier) -> None:
        width = int(decoder.head.weight.shape[1])
        if classifier.width != width:
            raise ValueError(
                f"`classifier` takes states of width {classifier.width}, but the model's have"
                f" {width}."
            )
        self.decoder = decoder
        self.classifier = classifier

    def measure(self, look: Look) -> Tensor:
        """Return the probability of each token."""
        logits: Tensor = self.classifier(self.decoder.norm(look.states))
        return logits.float().softmax(dim=1)[:, 1]

    def flops(self) -> int:
        """Return the FLOPs of the classifier."""
        return 2 * sum(p.numel() for p in self.classifier.parameters() if p.ndim == 2)


class Learned(Confidence):
    """How likely the block gives the full model's token, learned from softmax and saturation."""

    first_exit = 1
    through_heads = True
    gives_logits = True

    def __init__(self, decoder: Decoder, classifier: TokenScore) -> None:
        n_exits = len(decoder.blocks)
        if len(classifier.weights) != n_exits - 1:
            raise ValueError(
                f"`classifier` was learned for {len(classifier.weights) + 1} blocks, but the model"
                f" has {n_exits}."
            )
        self.decoder = decoder
        self.classifier = classifier

    def measure(self, look: Look) -> Tensor:
        """Return the probability of each token."""
        scores = self.decoder.head(self.decoder.exit_input(look.exit_index, look.states))
        self.computed = Logits(None, scores)
        logits = self.decoder.logits(scores)
        self.tokens = logits.argmax(dim=1)
        features = token_features(logits, look.states, look.previous)
        confidences: Tensor = self.classifier(look.exit_index, features)
        return confidences

    def flops(self) -> int:
        """Return the FLOPs of three inner products."""
        return 6 * int(self.decoder.head.weight.shape[1])


def confidence_of(
    rule: CalmRule, decoder: Decoder, classifier: MetaClassifier | TokenScore | None = None
) -> Confidence:
    """Return the confidence that a rule asks for."""
    if rule.score in TRAINED:
        kind, train, measure = TRAINED[rule.score]
        if not isinstance(classifier, kind):
            raise ValueError(
                f"`score` {rule.score!r} needs its `classifier`, a {kind.__name__}: train one with"
                f" swiftsure.text.{train}, or load one."
            )
        return measure(decoder, classifier)
    if classifier is not None:
        raise ValueError(
            f"`classifier` belongs to score 'meta' or 'learned', but the score is {rule.score!r}."
        )
    if rule.score == "saturation":
        return Saturation(decoder)
    return Softmax(decoder, rule.shortlist)


TRAINED: dict[str, tuple[type, str, Callable[[Decoder, Any], Confidence]]] = {
    "meta": (MetaClassifier, "train_meta", Meta),
    "learned": (TokenScore, "learn_token_score", Learned),
}
"""Scores with a classifier: its class, what trains it, and the confidence."""


def look_exits(decoder: Decoder, rule: CalmRule, confidence: Confidence) -> list[int]:
    """Return the exits at which a rule measures the confidence."""
    exits = [k for k in rule.looks(len(decoder.blocks)) if k >= confidence.first_exit]
    if decoder.exit_heads is not None:
        exits = [k for k in exits if k in decoder.exit_heads.exits]
    return exits


def probability_gap(logits: Tensor) -> Tensor:
    """Return p₁ − p₂ of each token."""
    return gap_and_token(logits)[0]


def _scatter_rows(values: Tensor, rows: Tensor, n: int) -> Tensor:
    """Scatter values of some rows into a tensor of n rows; the other rows are never read."""
    whole = values.new_zeros((n, *values.shape[1:]))
    return whole.index_copy_(0, rows, values)
