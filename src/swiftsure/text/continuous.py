"""Continuous batching: generations join a running batch and leave it between two tokens."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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

    models: Sequence[Any]
    """The models that run."""

    def takes(self, system: Any) -> bool:
        """Return whether sequences can run under another system's policy beside the others."""

    def prepare(self, system: Any, input_ids: Tensor, *, full: bool, **options: Any) -> Any:
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
        How the sequence was generated; None before its end, or if it never began.
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
        """End the generation here, and free its row."""
        self._batch.cancel(self)


class ContinuousBatch:
    """Generates many sequences, each of which begins and ends at a time of its own.

    A sequence that ends frees its row at once, and the next one takes it while the others go on.
    The tokens are those of `generate` with this sequence alone. Call it from one thread at a time.

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
    ...     vocab_size=32,
    ...     hidden_size=8,
    ...     intermediate_size=8,
    ...     num_attention_heads=2,
    ...     eos_token_id=None,
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
        self.rows = checks.count("rows", rows)
        checks.count("positions", positions, 2)
        self.system = system
        self._rows: Rows = system.rows(rows, positions, source)
        self._free = list(range(rows))
        self._waiting: deque[tuple[Generation, Any]] = deque()
        self._running: dict[int, Generation] = {}

    def __len__(self) -> int:
        """Return how many sequences run or wait."""
        return len(self._running) + len(self._waiting)

    def submit(
        self, input_ids: Tensor, *, full: bool = False, under: Any = None, **options: Any
    ) -> Generation:
        """Add a sequence.

        Parameters
        ----------
        input_ids : (1, positions)
            A prompt or a source, without padding.
        full : bool
            Run the full model, or the large one of a pair alone.
        under : CalmModel or BigLittle, optional
            Another system of the same models, whose policy applies to this sequence.
        **options
            As for the system's `generate`.

        Raises
        ------
        ValueError
            If `generate` would refuse them, the batch has not as many positions, or the other
            system differs by more than its dial.
        """
        system = self.system if under is None else under
        if not self._rows.takes(system):
            raise ValueError("`under` must differ from the batch's system by its dial only.")
        with self._exclusive():
            asked = self._rows.prepare(system, input_ids, full=full, **options)
        generation = Generation(self)
        self._waiting.append((generation, asked))
        return generation

    def step(self) -> list[Generation]:
        """Let waiting sequences join, and advance; return those with new tokens.

        Returns nothing only if no sequence is left.
        """
        found: list[Written] = []
        with self._exclusive():
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
        """End a generation that runs or waits."""
        self._waiting = deque(each for each in self._waiting if each[0] is not generation)
        for row, running in list(self._running.items()):
            if running is generation:
                self._end(row)
        generation.ended = True

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with ExitStack() as held:
            for model in self._rows.models:
                held.enter_context(exclusive(model))
            yield

    def _note(self, found: Sequence[Written]) -> list[Generation]:
        changed: dict[int, Generation] = {}
        for each in found:
            generation = changed[each.row] = self._running[each.row]
            generation.tokens.append(each.token)
            if each.ended:
                self._end(each.row)
        return list(changed.values())

    def _end(self, row: int) -> None:
        generation = self._running.pop(row)
        generation.result, generation.ended = self._rows.result(row), True
        self._rows.leave(row)
        self._free.append(row)
