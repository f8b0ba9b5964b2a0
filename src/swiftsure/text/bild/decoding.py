"""The decoding loop for one sequence: the small model drafts, the large model verifies.

The loop is a generator that asks for one proposal or judgement at a time, so that the questions of
several sequences can be answered together.
"""

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swiftsure.text.bild.readers import ModelReader
from swiftsure.text.bild.rules import DraftRule, Judgement, Noise, Proposal, Rollback

__all__ = ["Call", "Decoding", "PublishedDecoding", "Question", "Questions", "decoding_of"]

Question = Literal["propose", "judge"]
"""What a decoding asks for: the small model's next token, or the large model's verdict."""
Questions = Generator[Question, Any, None]


@dataclass(frozen=True)
class Call:
    """One forward pass of a model.

    Attributes
    ----------
    model : {"large", "small"}
    start : int
        Number of tokens that the model had read before.
    fed : tuple of int
        Tokens that the model read.
    event : str
        "accept": its token is kept; "fallback": the small model was not sure enough; "rollback":
        the large model replaced a drafted token; "same token": it rejected a drafted token, but its
        own choice is the same (`Rollback.published`).
    token : int
        The token that it wrote or, on a fallback, would have written.
    confidence : float, optional
        The small model's largest probability.
    distances : tuple of float
        One per verified token of the draft.
    """

    model: Literal["large", "small"]
    start: int
    fed: tuple[int, ...]
    event: Literal["accept", "fallback", "rollback", "same token"]
    token: int
    confidence: float | None = None
    distances: tuple[float, ...] = ()


class Decoding:
    """The state of one sequence while it is generated.

    Parameters
    ----------
    large, small : ModelReader
    rule : DraftRule
    tokens : tokens before the first new one
    limit : int
        Maximum number of tokens, including those.
    ends : tokens that end the sequence
    noise : random numbers for each position

    Attributes
    ----------
    tokens : list of int
        All tokens so far.
    calls : list of Call
    low, high : float
        Every level in [low, high) leads to the same tokens and calls.
    """

    def __init__(
        self,
        large: ModelReader,
        small: ModelReader,
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
        """Proposals for the last tokens, not yet verified."""

    def run(self) -> None:
        """Generate the sequence to its end."""
        questions = self.questions()
        question = next(questions, None)
        while question is not None:
            question = self.answer(questions, question)

    def answer(self, questions: Questions, question: Question) -> Question | None:
        """Answer a question with a pass of a model; return the next one, None at the end."""
        found = self._proposal() if question == "propose" else self._judgement()
        try:
            return questions.send(found)
        except StopIteration:
            return None

    def questions(self) -> Questions:
        """Generate the sequence, asking for a `Proposal` or `Judgement` at each pass of a model."""
        if self.rule.large_first:
            yield from self._verify()
        while not self._ended:
            yield from self._write_draft()
            yield from self._verify()

    @property
    def draft(self) -> Sequence[Proposal]:
        """Proposals for the last tokens, not yet verified."""
        return self._draft

    def _proposal(self) -> Proposal:
        """Run the small model."""
        logits = self.small.read(self.tokens, 1)[0]
        return self.rule.propose(logits, self.noise, len(self.tokens) - self.begin)

    def _judgement(self) -> Judgement:
        """Run the large model."""
        logits = self.large.read(self.tokens, len(self._draft) + 1)
        first = len(self.tokens) - len(self._draft) - self.begin
        return self.rule.judge(logits, self._draft, self.noise, first)

    @property
    def _ended(self) -> bool:
        written = len(self.tokens) > self.begin
        return len(self.tokens) >= self.limit or (written and self.tokens[-1] in self.ends)

    @property
    def _room(self) -> int:
        """Longest possible draft; the large model adds one token to it."""
        return self.limit - len(self.tokens) - 1

    def _write_draft(self) -> Questions:
        longest = 0 if self.rule.level is None else min(self.rule.max_draft, self._room)
        for _ in range(longest):
            proposal = yield from self._propose()
            if proposal is None:
                return
            self.tokens.append(proposal.token)
            self._draft.append(proposal)
            if proposal.token in self.ends:
                return

    def _propose(self) -> Generator[Question, Any, Proposal | None]:
        """Return the small model's next token, or None if it is not sure enough."""
        start = self.small.length
        proposal: Proposal = yield "propose"
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

    def _verify(self) -> Questions:
        """Let the large model read the draft, and replace one of its tokens or add one."""
        start, fed, judgement = yield from self._judge()
        rejected = self._first_beyond(judgement.distances)
        if rejected is None:
            if not (self._draft and self.tokens[-1] in self.ends):
                self.tokens.append(judgement.token_at(len(self._draft)))
        else:
            self._replace(rejected, judgement)
            self.large.forget(len(self.tokens) - 1)
        self._note(start, fed, "accept" if rejected is None else "rollback", judgement)
        self._draft = []

    def _judge(self) -> Generator[Question, Any, tuple[int, tuple[int, ...], Judgement]]:
        """Return the large model's position before the pass, the tokens fed, and its judgement."""
        start = self.large.length
        judgement: Judgement = yield "judge"
        return start, tuple(self.tokens[start:]), judgement

    def _first_beyond(self, distances: Sequence[float]) -> int | None:
        """Return the first token beyond the level; narrow [low, high) to levels that agree."""
        level = self.rule.level or 0.0
        for place, distance in enumerate(distances):
            if not distance <= level:  # written so that NaN is rejected too
                self.high = min(self.high, distance)
                return place
            self.low = max(self.low, distance)
        return None

    def _replace(self, place: int, judgement: Judgement) -> None:
        """Replace a drafted token with the large model's, and drop the rest of the draft."""
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
    """Big-little decoding with the quirks of the published code; see `Rollback.published`."""

    def questions(self) -> Questions:
        """Generate the sequence; an end token of the small model is not verified."""
        yield from self._verify()
        while not self._ended:
            yield from self._write_draft()
            if not self._ended:
                yield from self._verify()

    @property
    def _room(self) -> int:
        return self.limit - len(self.tokens)

    def _propose(self) -> Generator[Question, Any, Proposal | None]:
        start = self.small.length
        proposal = yield from super()._propose()
        if proposal is None:
            self.small.forget(start)
        return proposal

    def _verify(self) -> Questions:
        """Verify as published: after a rollback the large model reads the kept tokens again."""
        while True:
            start, fed, judgement = yield from self._judge()
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
    """Return the decoding class for a rule."""
    published = isinstance(rule, Rollback) and rule.published
    return PublishedDecoding if published else Decoding
