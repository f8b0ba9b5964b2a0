"""Big-little decoding of one sequence: the small model drafts, the large one verifies."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from swiftsure.text.bild.readers import Reader
from swiftsure.text.bild.rules import DraftRule, Judgement, Noise, Proposal, Rollback

__all__ = ["Call", "Decoding", "PublishedDecoding", "decoding_of"]


@dataclass(frozen=True)
class Call:
    """One pass of a model.

    Attributes
    ----------
    model : {"large", "small"}
    start : int
        Tokens that it had read before.
    fed : tuple of int
        Tokens that it read.
    event : str
        "accept": its token is written; "fallback": the small model was not sure enough;
        "rollback": the large model replaced a drafted token; "same token": it would have, but by
        the same (`Rollback.published`).
    token : int
        The token that it wrote or, on a fallback, would have written.
    confidence : float, optional
        The small model's largest probability.
    distances : tuple of float
        One a drafted token that was verified.
    """

    model: Literal["large", "small"]
    start: int
    fed: tuple[int, ...]
    event: Literal["accept", "fallback", "rollback", "same token"]
    token: int
    confidence: float | None = None
    distances: tuple[float, ...] = ()


class Decoding:
    """The state of one sequence while it is written.

    Parameters
    ----------
    large, small : Reader
    rule : DraftRule
    tokens : what is there before the first new token
    limit : int
        The most tokens, those included.
    ends : tokens that end the sequence
    noise : random numbers of each place

    Attributes
    ----------
    tokens : list of int
        All tokens so far.
    calls : list of Call
    low, high : float
        Every level from `low` on, and below `high`, leads to the same tokens and calls.
    """

    def __init__(
        self,
        large: Reader,
        small: Reader,
        rule: DraftRule,
        *,
        tokens: Sequence[int],
        limit: int,
        ends: Collection[int],
        noise: Noise,
    ) -> None:
        self.large, self.small, self.rule, self.noise = large, small, rule, noise
        self.tokens = list(tokens)
        self.begin, self.limit, self.ends = len(tokens), limit, frozenset(ends)
        self.calls: list[Call] = []
        self.low, self.high = 0.0, float("inf")
        self._draft: list[Proposal] = []
        """Proposals among the tokens, which are the last ones, still to be verified."""

    def run(self) -> None:
        """Write the sequence to its end."""
        if self.rule.large_first:
            self._verify()
        while not self._ended:
            self._write_draft()
            self._verify()

    @property
    def _ended(self) -> bool:
        written = len(self.tokens) > self.begin
        return len(self.tokens) >= self.limit or (written and self.tokens[-1] in self.ends)

    @property
    def _room(self) -> int:
        """How long a draft may be: the large model adds a token to it."""
        return self.limit - len(self.tokens) - 1

    def _write_draft(self) -> None:
        longest = 0 if self.rule.level is None else min(self.rule.max_draft, self._room)
        for _ in range(longest):
            proposal = self._propose()
            if proposal is None:
                return
            self.tokens.append(proposal.token)
            self._draft.append(proposal)
            if proposal.token in self.ends:
                return

    def _propose(self) -> Proposal | None:
        """Return the small model's next token; None if it is not sure enough."""
        start, place = self.small.length, len(self.tokens)
        logits = self.small.read(self.tokens, 1)[0]
        proposal = self.rule.propose(logits, self.noise, place - self.begin)
        sure = proposal.confidence >= self.rule.fallback
        self.calls.append(
            Call(
                "small",
                start,
                tuple(self.tokens[start:]),
                "accept" if sure else "fallback",
                proposal.token,
                proposal.confidence,
            )
        )
        return proposal if sure else None

    def _verify(self) -> None:
        """Let the large model read the draft, replace a token of it, or add one."""
        start, fed, judgement = self._judge()
        rejected = self._first_beyond(judgement.distances)
        if rejected is None:
            if not (self._draft and self.tokens[-1] in self.ends):
                self.tokens.append(judgement.token_at(len(self._draft)))
        else:
            self._replace(rejected, judgement)
            self.large.forget(len(self.tokens) - 1)
        self._note(start, fed, "accept" if rejected is None else "rollback", judgement)
        self._draft = []

    def _judge(self) -> tuple[int, tuple[int, ...], Judgement]:
        """Return what the large model had read and was fed, and what it says of the draft."""
        start = self.large.length
        logits = self.large.read(self.tokens, len(self._draft) + 1)
        first = len(self.tokens) - len(self._draft) - self.begin
        judgement = self.rule.judge(logits, self._draft, self.noise, first)
        return start, tuple(self.tokens[start:]), judgement

    def _first_beyond(self, distances: Sequence[float]) -> int | None:
        """Return which token is the first beyond the level; note which levels say the same."""
        level = self.rule.level or 0.0
        for place, distance in enumerate(distances):
            if not distance <= level:  # nor does a token stand of which nothing is known, NaN
                self.high = min(self.high, distance)
                return place
            self.low = max(self.low, distance)
        return None

    def _replace(self, place: int, judgement: Judgement) -> None:
        """Put the large model's token where a drafted one was; drop what follows."""
        del self.tokens[len(self.tokens) - len(self._draft) + place :]
        self.tokens.append(judgement.token_at(place))
        self.small.forget(len(self.tokens) - 1)

    def _note(
        self,
        start: int,
        fed: tuple[int, ...],
        event: Literal["accept", "rollback", "same token"],
        judgement: Judgement,
    ) -> None:
        distances = tuple(judgement.distances)
        self.calls.append(Call("large", start, fed, event, self.tokens[-1], distances=distances))


class PublishedDecoding(Decoding):
    """Big-little decoding with the oddities of the published code; see `Rollback.published`."""

    def run(self) -> None:
        """Write the sequence to its end, which may be the small model's, unverified."""
        self._verify()
        while not self._ended:
            self._write_draft()
            if not self._ended:
                self._verify()

    @property
    def _room(self) -> int:
        return self.limit - len(self.tokens)

    def _propose(self) -> Proposal | None:
        start = self.small.length
        proposal = super()._propose()
        if proposal is None:
            self.small.forget(start)
        return proposal

    def _verify(self) -> None:
        """As published: after a rollback the large model reads what is kept once more."""
        while True:
            start, fed, judgement = self._judge()
            rejected = self._first_beyond(judgement.distances)
            if rejected is None or judgement.token_at(rejected) == self._draft[rejected].token:
                break
            self._replace(rejected, judgement)
            self._note(start, fed, "rollback", judgement)
            self.large.forget(start)
            self._draft = [*self._draft[:rejected], Proposal(self.tokens[-1], confidence=1.0)]
        self.tokens.append(judgement.token_at(len(self._draft)))
        self._note(start, fed, "accept" if rejected is None else "same token", judgement)
        self._draft = []


def decoding_of(rule: DraftRule) -> type[Decoding]:
    """Return how a rule decodes."""
    published = isinstance(rule, Rollback) and rule.published
    return PublishedDecoding if published else Decoding
