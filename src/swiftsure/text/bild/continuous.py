"""Drafted generations that join and leave a running batch: the rows of a `ContinuousBatch`.

Each row runs passes of its own, since drafts end at different times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from swiftsure.text.bild.decoding import Decoding, Questions
from swiftsure.text.bild.results import BildRun

if TYPE_CHECKING:
    from swiftsure.text.bild.model import BigLittle, Passage

__all__ = ["BildRows"]


class _Token(NamedTuple):
    row: int
    token: int
    ended: bool


@dataclass
class _Running:
    passage: "Passage"
    decoding: Decoding
    questions: Questions
    question: Any
    told: int
    """How many tokens were returned, with those before the first new one."""


class BildRows:
    """Rows of a pair of models, each for one generation at a time.

    Parameters
    ----------
    pair : BigLittle
    positions, source : int
        Largest numbers of positions, and of tokens that an encoder reads.
    """

    def __init__(self, pair: "BigLittle", positions: int, source: int) -> None:
        self.pair, self.positions, self.source = pair, positions, source
        self.models = (pair.large, pair.small)
        self._running: dict[int, _Running] = {}

    def takes(self, pair: Any) -> bool:
        """Return whether another pair can run here: one of the same models."""
        return bool(pair.large is self.pair.large and pair.small is self.pair.small)

    def prepare(self, pair: "BigLittle", input_ids: Tensor, *, full: bool, **options: Any) -> Any:
        """Check and prepare a generation of one sequence; arguments are those of `generate`."""
        passages = pair.passages(input_ids, **options)
        if len(passages) != 1:
            raise ValueError(f"`input_ids` must hold one sequence, but got {len(passages)}.")
        (passage,) = passages
        causal = not pair.large.config.is_encoder_decoder
        needed = passage.max_new_tokens + causal * input_ids.shape[1]
        if needed > self.positions or input_ids.shape[1] > max(self.source, causal * needed):
            raise ValueError(
                f"The prompt of {input_ids.shape[1]} tokens and the answer of up to"
                f" {passage.max_new_tokens} are too long for this batch: give it more `positions`"
                " or `source`."
            )
        return passage, pair.rule.at(None) if full else pair.rule

    @torch.inference_mode()
    def join(self, row: int, asked: Any) -> Sequence[_Token]:
        """Begin a generation in a free row."""
        passage, rule = asked
        decoding = passage.decoding(rule)
        questions = decoding.questions()
        first = next(questions, None)
        self._running[row] = _Running(passage, decoding, questions, first, len(passage.begin))
        return ()

    @torch.inference_mode()
    def advance(self) -> list[_Token]:
        """Run one pass for each row; return the tokens that will not be taken back."""
        found: list[_Token] = []
        for row, each in self._running.items():
            if each.question is None:
                continue
            each.question = each.decoding.answer(each.questions, each.question)
            tokens, ended = each.decoding.tokens, each.question is None
            sure = len(tokens) if ended else len(tokens) - len(each.decoding.draft)
            found += [
                _Token(row, tokens[place], ended and place == sure - 1)
                for place in range(each.told, sure)
            ]
            each.told = max(each.told, sure)
        return found

    def leave(self, row: int) -> None:
        """Free a row, whether or not its generation has ended."""
        del self._running[row]

    def result(self, row: int) -> BildRun:
        """Return how a row's sequence was generated."""
        running = self._running[row]
        return running.passage.result(running.decoding)
