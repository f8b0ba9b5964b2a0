"""Continuous batching: generations join a running batch and leave it between two tokens."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from swiftsure._lib import checks
from swiftsure.text.generation import exclusive

__all__ = ["ContinuousBatch", "Generation"]


class Written(Protocol):
    """A token that a row wrote."""

    @property
    def row(self) -> int:
        """Its row."""

    @property
    def token(self) -> int:
        """The token."""

    @property
    def ended(self) -> bool:
        """Whether it is the last one."""


class Rows(Protocol):
    """What a batch needs from a system: rows in which sequences are generated."""

    model: Any

    def prepare(self, input_ids: Tensor, **options: Any) -> Any:
        """Check and prepare the generation of one sequence."""

    def join(self, row: int, asked: Any) -> Sequence[Written]:
        """Begin it in a free row; return its first tokens, if they are known."""

    def advance(self) -> Sequence[Written]:
        """Run for a while; return the tokens that were written."""

    def leave(self, row: int) -> None:
        """Free a row."""

    def result(self, row: int) -> Any:
        """Return how a row's sequence was generated."""


class Generation:
    """One sequence of a `ContinuousBatch`; iterate over it to get its tokens as they come.

    Attributes
    ----------
    tokens : list of int
        Those written so far, with the end token.
    ended : bool
        Whether no more will come.
    result : Depths or BildRun, optional
        How the sequence was generated; None before its end, or if it was cancelled.
    """

    def __init__(self, batch: "ContinuousBatch") -> None:
        self._batch = batch
        self.tokens: list[int] = []
        self.ended = False
        self.result: Any = None

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens, and advance the whole batch while none is there."""
        place = 0
        while True:
            while place < len(self.tokens):
                yield self.tokens[place]
                place += 1
            if self.ended:
                return
            self._batch.step()

    def cancel(self) -> None:
        """Stop the generation and free its row."""
        self._batch.cancel(self)


class ContinuousBatch:
    """Generates many sequences, each of which begins and ends at a time of its own.

    A sequence that ends frees its row at once, and the next one takes it while the others go on.
    The tokens are those of `generate` with this sequence alone. Not for several threads at once.

    Parameters
    ----------
    system : CalmModel or BigLittle
        Of a known family (`swiftsure.text.FAMILIES`). Each sequence runs under its policy.
    rows : int
        Number of sequences that run at once; further ones wait.
    positions : int
        Largest number of positions of a prompt and its answer together; for models with an
        encoder, of an answer.
    source : int
        Largest number of tokens that an encoder reads.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from swiftsure.text import CalmModel
    >>> config = LlamaConfig(
    ...     vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2
    ... )
    >>> fast = CalmModel(LlamaForCausalLM(config).eval(), 0.9)
    >>> batch = ContinuousBatch(fast, rows=2, positions=32)
    >>> prompts = torch.tensor([[3, 4, 5], [6, 7, 8], [9, 10, 11]])
    >>> running = [batch.submit(prompt[None], max_new_tokens=5) for prompt in prompts]
    >>> [len(list(each)) for each in running]
    [5, 5, 5]
    """

    def __init__(
        self, system: Any, *, rows: int = 8, positions: int = 512, source: int = 512
    ) -> None:
        checks.count("rows", rows)
        checks.count("positions", positions, 2)
        self.rows = rows
        self._rows: Rows = system.rows(rows, positions, source)
        self._free = list(range(rows))
        self._waiting: deque[tuple[Generation, Any]] = deque()
        self._running: dict[int, Generation] = {}

    def __len__(self) -> int:
        """Return how many sequences run or wait."""
        return len(self._running) + len(self._waiting)

    def submit(self, input_ids: Tensor, **options: Any) -> Generation:
        """Add a sequence; arguments are those of the system's `generate`.

        Parameters
        ----------
        input_ids : (1, positions)
            A prompt or a source, without padding.
        **options
            As for `generate`.

        Raises
        ------
        ValueError
            If `generate` would refuse them, or the batch has not as many positions.
        """
        with exclusive(self._rows.model):
            asked = self._rows.prepare(input_ids, **options)
        generation = Generation(self)
        self._waiting.append((generation, asked))
        return generation

    def step(self) -> list[Generation]:
        """Let waiting sequences join, and advance; return those with new tokens.

        Returns nothing only if no sequence is left.
        """
        found: list[Written] = []
        with exclusive(self._rows.model):
            while self._waiting and self._free:
                generation, asked = self._waiting.popleft()
                row = self._free.pop(0)
                self._running[row] = generation
                found += self._rows.join(row, asked)
            changed = self._note(found)
            while self._running and not changed:
                changed = self._note(self._rows.advance())
        return changed

    def cancel(self, generation: Generation) -> None:
        """Stop a generation that runs or waits."""
        self._waiting = deque(each for each in self._waiting if each[0] is not generation)
        for row, running in list(self._running.items()):
            if running is generation:
                self._end(row)
        generation.ended = True

    def _note(self, found: Sequence[Written]) -> list[Generation]:
        changed: dict[int, Generation] = {}
        for each in found:
            generation = changed[each.row] = self._running[each.row]
            generation.tokens.append(each.token)
            if each.ended:
                generation.result, generation.ended = self._rows.result(each.row), True
                self._end(each.row)
        return list(changed.values())

    def _end(self, row: int) -> None:
        del self._running[row]
        self._rows.leave(row)
        self._free.append(row)
