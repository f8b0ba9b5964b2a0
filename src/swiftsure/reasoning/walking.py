"""Follows a model's thinking and asks it at checkpoints; collection and runtime share it."""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from swiftsure.cascade.answers import Answer
from swiftsure.cascade.retrying import UpstreamError, described
from swiftsure.reasoning.clients import Piece, Question, ThinkingClient

__all__ = ["Due", "Written", "due_every", "walk"]

Due = Callable[[int], int | None]
"""From the number of probes so far to the tokens at which the next is due; None for never."""


def due_every(checkpoints: int | Iterable[int]) -> Due:
    """Return when probes are due: at a distance from each other, or at some tokens.

    Examples
    --------
    >>> due_every(256)(2), due_every([100, 400])(1), due_every([100])(1)
    (768, 400, None)
    """
    if isinstance(checkpoints, int):
        return lambda probes: (probes + 1) * checkpoints
    grid = list(checkpoints)
    return lambda probes: grid[probes] if probes < len(grid) else None


@dataclass
class Written:
    """What a model wrote about a question so far, so that it can go on from there.

    Attributes
    ----------
    text : str
        All of it, thinking and answer.
    tokens : int
        Of the thinking.
    probes : list of (int, Answer)
        Tokens before each, and the answers as they were written.
    last : Answer, optional
        The answer at the end, where the model was asked there too.
    finished : bool
    """

    mark: str
    text: str = ""
    tokens: int = 0
    probes: list[tuple[int, Answer]] = field(default_factory=list)
    last: Answer | None = None
    finished: bool = False
    _end: int = -1

    def __post_init__(self) -> None:
        """Find the end of the thinking."""
        self._end = self.text.find(self.mark)

    @property
    def thought(self) -> str:
        """The thinking, without a mark of its end that is only half there."""
        if self.ended:
            return self.text[: self._end]
        for size in range(min(len(self.mark) - 1, len(self.text)), 0, -1):
            if self.text.endswith(self.mark[:size]):
                return self.text[:-size]
        return self.text

    @property
    def ended(self) -> bool:
        """Whether the thinking has come to its end."""
        return self._end >= 0

    @property
    def said(self) -> str:
        """What the model wrote after its thinking."""
        return self.text[self._end + len(self.mark) :] if self.ended else ""

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        if not self.ended:
            start = max(0, len(self.text) - len(self.mark))
            found = self._end = (self.text + piece.text).find(self.mark, start)
            self.tokens += piece.tokens if found < 0 else 0
        self.text += piece.text
        self.finished = piece.finish is not None


async def walk(
    client: ThinkingClient,
    question: Question,
    written: Written,
    due: Due,
    *,
    seed: int = 0,
    failures: list[str] | None = None,
) -> AsyncIterator[tuple[str, Any]]:
    """Yield ("probe", thinking) after each probe, ("text", piece) after each piece, and the "end".

    What is yielded is in `written` already. If an error comes, another walk goes on from there.
    With `failures`, an error of a probe is added there, and the model is asked no more on the way.
    """
    if written.finished and (written.last is not None or written.said.strip()):
        return
    async with client.think(question, written.text, seed=seed, tokens=written.tokens) as thinking:
        while True:
            while not written.ended and not failures:
                at = due(len(written.probes))
                if at is None or at > written.tokens:
                    break
                try:
                    written.probes.append((at, await thinking.ask(written.thought)))
                except UpstreamError as error:
                    if failures is None:
                        raise
                    failures.append(described(error))
                    break
                yield "probe", thinking
            if written.finished:
                break
            piece = await thinking.next()
            written.add(piece)
            yield "text", piece
        if not written.said.strip() and written.last is None:  # out of tokens, or no answer
            written.last = await thinking.ask(written.thought)
        yield "end", thinking
