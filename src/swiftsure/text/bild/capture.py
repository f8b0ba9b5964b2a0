"""Several drafts at a time over fixed buffers: both models' passes captured as CUDA graphs.

Sequences are accepted to different lengths, so each row has its own position. Rows draft until none
of them is sure enough or has room; then the large model reads all drafts in one pass. Where graphs
can have conditional parts, the small model writes several tokens before the host reads them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.run.graphs.conditional import run_if
from swiftsure.run.graphs.recorder import CaptureBudget, CaptureLimits, Recorder
from swiftsure.text.bild.decoding import Decoding, Question, Questions
from swiftsure.text.bild.rules import DraftRule, Judgement, Proposal, Rollback
from swiftsure.text.decoder import Decoder, decoder_of
from swiftsure.text.fast_blocks import FastBlocks
from swiftsure.text.session_cache import SessionCache
from swiftsure.text.static_decoder import StaticDecoder, StaticEncoder, StaticShape

__all__ = ["CapturedPair", "StaticReader"]

WIDTHS = (1, 2, 4, 6, 8, 11, 16, 24, 32)
"""Numbers of tokens that a captured pass reads at once."""
PROMPT_WIDTHS = (32, 128)
"""The same for prompts, whose tokens need no head."""
DRAFTED = 5
"""Tokens that the small model writes at most before the host reads them."""


@dataclass(frozen=True)
class Reading:
    """What one pass over q tokens of every row found."""

    choices: NDArray[np.int64]
    """(n, q): the most probable next token after each one."""
    chances: NDArray[np.float32]
    """(n, q): its probability."""
    distances: NDArray[np.float32]
    """(n, q): −log p of the token that was fed next."""
    logits: Tensor
    """(n, q, vocabulary), on the device, until the next pass."""


@dataclass(frozen=True)
class Draft:
    """Tokens that a model wrote one after another."""

    tokens: NDArray[np.int64]
    """(n, steps)."""
    chances: NDArray[np.float32]
    """(n, steps): their probabilities; -1 where the model did not run."""


class StaticReader:
    """A model that reads several tokens of each of n sequences, each from its own position.

    Parameters
    ----------
    decoder : Decoder
        The model's.
    shape : StaticShape
    recorder : Recorder
    """

    def __init__(self, decoder: Decoder, shape: StaticShape, recorder: Recorder) -> None:
        self.decoder, self.model, self.recorder = decoder, decoder.model, recorder
        self.static = StaticDecoder(self.decoder, shape, recorder)
        self._encoder = StaticEncoder(self.static, recorder) if shape.source else None
        self.n, self.capacity = shape.n, shape.capacity
        self.read_already = np.zeros(shape.n, np.int64)
        """Positions of each prompt that are in the cache."""
        self._fed: dict[int, Tensor] = {}
        self._found: dict[tuple[int, int], Tensor] = {}
        self._graphs: dict[tuple[str, int], Any] = {}
        self._event = recorder.event()
        device = self.model.device
        self._chain = torch.zeros((2, shape.n, DRAFTED), device=device)
        """Tokens of a draft, and their probabilities."""
        self._sure = torch.zeros(shape.n, dtype=torch.bool, device=device)
        """Rows that draft on."""
        self._any_sure = torch.zeros((), dtype=torch.bool, device=device)
        self._fallback = torch.zeros((), device=device)
        self._ends = torch.zeros(0, dtype=torch.long, device=device)

    # -------------------------------------------------------------------------------- the sources

    def load(self, sources: Sequence[Tensor]) -> None:
        """Encode the sources, or read the prompts up to their last token."""
        self.static.reset()
        if self._encoder is not None:
            self._encoder.run(*self._padded(sources))
        else:
            self._read_prompts(sources)

    def _padded(self, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sources as a batch, and its mask."""
        lengths = [source.shape[1] for source in sources]
        device = self.model.device
        ids = torch.zeros((self.n, max(lengths)), dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for row, source in enumerate(sources):
            ids[row, : lengths[row]] = source[0]
            mask[row, : lengths[row]] = 1
        return ids, mask

    def _read_prompts(self, sources: Sequence[Tensor]) -> None:
        prompts = [source[0, :-1].tolist() for source in sources]
        self.read_already[:] = list(map(len, prompts))
        start, longest = 0, max(map(len, prompts))
        while start < longest:
            left = longest - start
            width = next((each for each in PROMPT_WIDTHS if each >= left), PROMPT_WIDTHS[-1])
            part = [each[start : start + width] for each in prompts]
            given = self._feed(part, [start] * self.n, width)
            self._play(("prompt", width), partial(self._states, given[0], given[1]))
            start += width

    # ---------------------------------------------------------------------------------- the tokens

    def read(self, fed: Sequence[Sequence[int]], starts: Sequence[int]) -> Reading:
        """Read tokens of every row from its position on; rows without tokens are idle."""
        width = _width(fed)
        given, host = self._feed(fed, starts, width), self._host(3, width)

        def function() -> Tensor:
            logits = self._logits(self._states(given[0], given[1]))
            chances, choices = logits.softmax(dim=-1).max(dim=-1)
            following = given[0].roll(-1, dims=1).unsqueeze(-1)
            distances = logits.log_softmax(dim=-1).gather(2, following).squeeze(2).neg()
            # Token ids below 2**24 are exact in float32, so that one copy takes everything.
            host.copy_(torch.stack([choices.float(), chances, distances]), non_blocking=True)
            return logits

        logits = self._play(("read", width), function)
        choices, chances, distances = self._waited(host)
        return Reading(choices.astype(np.int64), chances, distances, logits)

    def begin_drafts(self, fallback: float, ends: Collection[int]) -> None:
        """Let rows draft until a probability is below `fallback`, or to one of the end tokens."""
        self._fallback.fill_(fallback)
        if len(ends) != len(self._ends):
            self._ends = self._ends.new_zeros(len(ends))
            self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != "draft"}
        self._ends.copy_(torch.tensor(sorted(ends), dtype=torch.long))

    def draft(self, fed: Sequence[Sequence[int]], starts: Sequence[int]) -> Draft:
        """Read tokens as `read` does, and write tokens as long as a row is sure of its own."""
        width = _width(fed)
        given, host = self._feed(fed, starts, width), self._host(2, DRAFTED)

        def function() -> None:
            last = given[2, :, :1]
            states = self._states(given[0], given[1])
            states = states.gather(1, last[:, :, None].expand(-1, -1, states.shape[2]))
            self._chain[1].fill_(-1)
            positions = given[1].gather(1, last)
            self._sure.copy_(positions[:, 0] < self.capacity - 1)
            self._write(0, states, positions)
            host.copy_(self._chain, non_blocking=True)

        self._play(("draft", width), function)
        tokens, chances = self._waited(host)
        return Draft(tokens.astype(np.int64), chances)

    def _write(self, step: int, states: Tensor, positions: Tensor) -> None:
        """Write the tokens that follow states, (n, 1, width), and go on while a row is sure."""
        chances, tokens = self._logits(states)[:, 0].softmax(dim=-1).max(dim=-1)
        self._chain[0, :, step] = tokens.float()
        self._chain[1, :, step] = chances
        if step + 1 == DRAFTED:
            return
        ended = (tokens[:, None] == self._ends).any(dim=1)
        self._sure &= (chances >= self._fallback) & ~ended
        self._any_sure.copy_(self._sure.any())
        after = (positions + 1).clamp_(max=self.capacity - 1)
        run_if(
            self._any_sure,
            lambda: self._write(step + 1, self._states(tokens[:, None], after), after),
        )

    def _states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        static = self.static
        states = static.begin(tokens, positions)
        arguments = static.arguments(None, tokens.shape[1])
        for index in range(len(static.blocks)):
            states = static.run_block(index, states, positions, arguments)
        return states

    def _logits(self, states: Tensor) -> Tensor:
        return self.decoder.logits(self.decoder.head(self.decoder.head_input(states))).float()

    # --------------------------------------------------------------------------- host and device

    def _feed(self, fed: Sequence[Sequence[int]], starts: Sequence[int], width: int) -> Tensor:
        """Return tokens, positions and the place of each row's last token, (3, n, width)."""
        given = np.zeros((3, self.n, width), np.int64)
        given[1] = self.capacity - 1  # a position that nothing else uses
        for row, (new, start) in enumerate(zip(fed, starts, strict=True)):
            if new:
                given[0, row, : len(new)] = new
                given[1, row] = np.minimum(np.arange(start, start + width), self.capacity - 1)
                given[2, row] = len(new) - 1
        if not self.recorder.captures:
            active = [s + len(new) for new, s in zip(fed, starts, strict=True) if new]
            self.static.cache.show(max(active) + width + DRAFTED)
        if width not in self._fed:
            size = 3, self.n, width
            self._fed[width] = torch.zeros(size, dtype=torch.long, device=self.model.device)
        self._fed[width].copy_(torch.from_numpy(given))
        return self._fed[width]

    def _host(self, count: int, width: int) -> Tensor:
        """Return a buffer on the host for what a pass finds, (count, n, width)."""
        if (count, width) not in self._found:
            size = count, self.n, width
            found = self.recorder.pinned(count * self.n * width, torch.float32).view(size)
            self._found[count, width] = found
        return self._found[count, width]

    def _play(self, key: tuple[str, int], function: Callable[[], Any]) -> Any:
        """Run a function: captured and replayed on a GPU, called elsewhere; return its result."""
        if not self.recorder.captures:
            return function()
        if key not in self._graphs:
            with self.static.blas(self.n * key[1]):
                self._graphs[key] = self.recorder.record(function)
        self._graphs[key].replay()
        return self._graphs[key].result

    def _waited(self, host: Tensor) -> NDArray[np.float32]:
        if self._event is not None:
            self._event.record()
            self._event.synchronize()
        found: NDArray[np.float32] = host.numpy().copy()
        return found


class CapturedPair:
    """A large and a small model that generate several sequences together.

    Parameters
    ----------
    large, small : PreTrainedModel
    limits : CaptureLimits
    compile : bool
        Run compiled blocks.
    """

    def __init__(
        self,
        large: Any,
        small: Any,
        limits: CaptureLimits,
        *,
        compile: bool = False,  # noqa: A002 (what torch calls it)
    ) -> None:
        self.models = large, small
        self._decoders = decoder_of(large), decoder_of(small)
        for decoder in self._decoders:
            decoder.fast = FastBlocks(decoder) if compile else None
        self.budget = CaptureBudget(limits)
        self._readers: SessionCache[tuple[StaticReader, StaticReader]] = SessionCache(self.models)

    @torch.inference_mode()
    def run(
        self, sources: Sequence[Tensor], decodings: Sequence[Decoding], rule: DraftRule
    ) -> None:
        """Generate all sequences to their ends."""
        large, small = self._prepared(sources, decodings, rule)
        rows = [_Row(each, each.questions()) for each in decodings]
        for row in rows:
            row.start()
        chained = small.recorder.branches and not rule.reads_distributions
        while any(row.question is not None for row in rows):
            if not any(row.question == "propose" for row in rows):
                _answer(rows, "judge", large, rule)
            elif chained:
                _answer_drafts(rows, small)
            else:
                _answer(rows, "propose", small, rule)

    def _prepared(
        self, sources: Sequence[Tensor], decodings: Sequence[Decoding], rule: DraftRule
    ) -> tuple[StaticReader, StaticReader]:
        device = self.models[0].device
        step = 64 if device.type == "cuda" else 32  # few sizes are captured
        longest = max(each.limit for each in decodings) + max(WIDTHS[-1], rule.max_draft) + 2
        capacity = -(-longest // step) * step
        source = 0
        if self.models[0].config.is_encoder_decoder:
            source = -(-max(each.shape[1] for each in sources) // 32) * 32
        shape = StaticShape(len(sources), capacity, source)
        captures = device.type == "cuda"
        for decoder in self._decoders:
            if decoder.fast is not None:
                decoder.fast.refresh()  # before `get`, which sees weights that move
        readers = self._readers.get(shape, lambda: self._made(shape), unlimited=captures)
        large, small = readers
        large.load(sources)
        if rule.level is not None:
            small.load(sources)
            small.begin_drafts(rule.fallback, decodings[0].ends)
        return readers

    def _made(self, shape: StaticShape) -> tuple[StaticReader, StaticReader]:
        large, small = (self._reader(decoder, shape) for decoder in self._decoders)
        return large, small

    def _reader(self, decoder: Decoder, shape: StaticShape) -> StaticReader:
        recorder = Recorder(decoder.model.device, budget=self.budget)
        with recorder.buffers():
            return StaticReader(decoder, shape, recorder)


class _Row:
    """One sequence and the question that it waits with."""

    def __init__(self, decoding: Decoding, questions: Questions) -> None:
        self.decoding, self._questions = decoding, questions
        self.question: Question | None = None

    def start(self) -> None:
        self.question = next(self._questions, None)

    def answer(self, found: Proposal | Judgement) -> None:
        try:
            self.question = self._questions.send(found)
        except StopIteration:
            self.question = None


def _answer(rows: list[_Row], question: Question, reader: StaticReader, rule: DraftRule) -> None:
    """Run a model once on all rows that ask for it, and answer them."""
    fed, starts = _asked(rows, question, reader)
    reading = reader.read(fed, starts)
    for number, row in enumerate(rows):
        if not fed[number]:
            continue
        decoding, last = row.decoding, len(fed[number]) - 1
        if question == "propose":
            found = _proposal(reading, number, last, decoding, rule)
            decoding.small.note(decoding.tokens, 1)  # type: ignore[attr-defined]
        else:
            found = _judgement(reading, number, last, decoding, rule)
            decoding.large.note(decoding.tokens, len(decoding.draft) + 1)  # type: ignore[attr-defined]
        row.answer(found)


def _answer_drafts(rows: list[_Row], reader: StaticReader) -> None:
    """Let the small model write several tokens, and answer all rows that ask for them."""
    fed, starts = _asked(rows, "propose", reader)
    draft = reader.draft(fed, starts)
    for number, row in enumerate(rows):
        pairs = zip(draft.tokens[number].tolist(), draft.chances[number].tolist(), strict=True)
        for token, chance in pairs:
            if row.question != "propose" or chance < 0:
                break
            row.decoding.small.note(row.decoding.tokens, 1)  # type: ignore[attr-defined]
            row.answer(Proposal(token, chance))


def _asked(
    rows: list[_Row], question: Question, reader: StaticReader
) -> tuple[list[list[int]], list[int]]:
    """Return the tokens that a model has to read for the rows that ask for it, and from where."""
    fed: list[list[int]] = []
    starts: list[int] = []
    for number, row in enumerate(rows):
        decoding = row.decoding
        own: Any = decoding.small if question == "propose" else decoding.large
        start = max(own.length, int(reader.read_already[number]))
        start = min(start, len(decoding.tokens) - 1)
        starts.append(start)
        fed.append(list(decoding.tokens[start:]) if row.question == question else [])
    return fed, starts


def _width(fed: Sequence[Sequence[int]]) -> int:
    """Return the captured width for these tokens."""
    longest = max(map(len, fed))
    return next((each for each in WIDTHS if each >= longest), longest)


def _proposal(reading: Reading, row: int, last: int, decoding: Decoding, rule: DraftRule) -> Any:
    if rule.reads_distributions:
        place = len(decoding.tokens) - decoding.begin
        return rule.propose(reading.logits[row, last], decoding.noise, place)
    return Proposal(int(reading.choices[row, last]), float(reading.chances[row, last]))


def _judgement(reading: Reading, row: int, last: int, decoding: Decoding, rule: DraftRule) -> Any:
    drafted = len(decoding.draft)
    window = slice(last - drafted, last + 1)
    if isinstance(rule, Rollback):
        choices = reading.choices[row, window].tolist()
        distances = reading.distances[row, window][:drafted].tolist()
        return rule.judgement(choices, distances, decoding.draft)
    first = len(decoding.tokens) - drafted - decoding.begin
    return rule.judge(reading.logits[row, window], decoding.draft, decoding.noise, first)
