"""Several drafts at a time over fixed buffers: both models' passes captured as CUDA graphs.

Sequences are accepted to different lengths, so each row has its own position. Rows draft until none
of them is sure enough or has room; then the large model reads all drafts in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from swiftsure.text.bild.decoding import Decoding, Question, Questions
from swiftsure.text.bild.rules import DraftRule, Judgement, Proposal, Rollback
from swiftsure.text.decoder import decoder_of
from swiftsure.text.sessions import Sessions
from swiftsure.text.static_decoder import StaticDecoder, StaticShape
from swiftsure.text.static_encoder import StaticEncoder
from swiftsure.torch.capture import CaptureBudget, CaptureLimits, Recorder

__all__ = ["CapturedPair", "StaticReader"]

WIDTHS = (1, 2, 4, 6, 8, 11, 16, 24, 32)
"""Numbers of tokens that a captured pass reads at once."""


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


class StaticReader:
    """A model that reads several tokens of each of n sequences, each from its own position.

    Parameters
    ----------
    model : PreTrainedModel
        From a known family.
    shape : StaticShape
    recorder : Recorder
    """

    def __init__(self, model: Any, shape: StaticShape, recorder: Recorder) -> None:
        self.model, self.recorder = model, recorder
        self.decoder = decoder_of(model)
        self.static = StaticDecoder(self.decoder, shape, recorder)
        self._encoder = StaticEncoder(self.static, recorder) if shape.source else None
        self.n, self.capacity = shape.n, shape.capacity
        self.read_already = np.zeros(shape.n, np.int64)
        """Positions of each prompt that are in the cache."""
        self._fed: dict[int, tuple[Tensor, Tensor]] = {}
        self._graphs: dict[int, Any] = {}
        self._found: dict[int, Any] = {}
        self._event = recorder.event()

    def load(self, sources: Sequence[Tensor]) -> None:
        """Encode the sources, or read the prompts up to their last token."""
        self.static.reset()
        if self._encoder is not None:
            self._encoder.run(*self._padded(sources))
        else:
            for row, source in enumerate(sources):
                self._prefill(row, source)

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

    def _prefill(self, row: int, source: Tensor) -> None:
        self.read_already[row] = source.shape[1] - 1
        if source.shape[1] > 1:
            cache = DynamicCache()
            self.model(input_ids=source[:, :-1], past_key_values=cache, use_cache=True)
            self.static.cache.load(cache.layers, row)

    def read(self, fed: Sequence[Sequence[int]], starts: Sequence[int]) -> Reading:
        """Read tokens of every row from its position on; rows without tokens are idle."""
        longest = max(map(len, fed))
        width = next((each for each in WIDTHS if each >= longest), longest)
        tokens = np.zeros((2, self.n, width), np.int64)
        tokens[1] = self.capacity - 1  # a position that nothing else uses
        for row, (new, start) in enumerate(zip(fed, starts, strict=True)):
            if new:
                tokens[0, row, : len(new)] = new
                tokens[1, row] = np.minimum(np.arange(start, start + width), self.capacity - 1)
        if not self.recorder.captures:
            active = [s + len(new) for new, s in zip(fed, starts, strict=True) if new]
            self.static.cache.visible = min(max(active) + width, self.capacity)
        return self._run(width, torch.from_numpy(tokens))

    def _run(self, width: int, given: Tensor) -> Reading:
        device = self.model.device
        if width not in self._fed:
            self._fed[width] = (
                torch.zeros((2, self.n, width), dtype=torch.long, device=device),
                self.recorder.pinned(3 * self.n * width, torch.float32).view(3, self.n, width),
            )
        fed, host = self._fed[width]
        fed.copy_(given)

        def function() -> Tensor:
            logits = self._logits(fed[0], fed[1])
            chances, choices = logits.softmax(dim=-1).max(dim=-1)
            following = fed[0].roll(-1, dims=1).unsqueeze(-1)
            distances = logits.log_softmax(dim=-1).gather(2, following).squeeze(2).neg()
            # Token ids below 2**24 are exact in float32, so that one copy takes everything.
            host.copy_(torch.stack([choices.float(), chances, distances]), non_blocking=True)
            return logits

        if not self.recorder.captures:
            logits = function()
        else:
            if width not in self._graphs:
                self._graphs[width] = self.recorder.record(function)
            self._graphs[width].replay()
            logits = self._graphs[width].result
            self._event.record()
            self._event.synchronize()
        choices, chances, distances = host.numpy()
        return Reading(choices.astype(np.int64), chances.copy(), distances.copy(), logits)

    def _logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        static = self.static
        states = static.begin(tokens, positions)
        arguments = static.arguments(None, tokens.shape[1])
        for index in range(len(static.blocks)):
            states = static.run_block(index, states, positions, arguments)
        scores = self.decoder.head(self.decoder.head_input(states))
        return self.decoder.logits(scores).float()


class CapturedPair:
    """A large and a small model that generate several sequences together.

    Parameters
    ----------
    large, small : PreTrainedModel
    limits : CaptureLimits
    """

    def __init__(self, large: Any, small: Any, limits: CaptureLimits) -> None:
        self.models = large, small
        for model in self.models:
            decoder_of(model)  # raises if its family is unknown
        self.budget = CaptureBudget(limits)
        self._readers: Sessions[tuple[StaticReader, StaticReader]] = Sessions(self.models)

    @torch.inference_mode()
    def run(
        self, sources: Sequence[Tensor], decodings: Sequence[Decoding], rule: DraftRule
    ) -> None:
        """Generate all sequences to their ends."""
        large, small = self._prepared(sources, decodings, rule)
        rows = [_Row(each, each.questions()) for each in decodings]
        for row in rows:
            row.start()
        while any(row.question is not None for row in rows):
            if any(row.question == "propose" for row in rows):
                _answer(rows, "propose", small, rule)
            else:
                _answer(rows, "judge", large, rule)

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
        readers = self._readers.get(shape, lambda: self._made(shape), unlimited=captures)
        for reader in readers if rule.level is not None else readers[:1]:
            reader.load(sources)
        return readers

    def _made(self, shape: StaticShape) -> tuple[StaticReader, StaticReader]:
        large, small = (self._reader(model, shape) for model in self.models)
        return large, small

    def _reader(self, model: Any, shape: StaticShape) -> StaticReader:
        recorder = Recorder(model.device, budget=self.budget)
        with recorder.buffers():
            return StaticReader(model, shape, recorder)


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
    """Run a model on all rows that ask for it, and answer them."""
    fed: list[list[int]] = []
    starts: list[int] = []
    for number, row in enumerate(rows):
        decoding = row.decoding
        own: Any = decoding.small if question == "propose" else decoding.large
        asks = row.question == question
        start = max(own.length, int(reader.read_already[number]))
        start = min(start, len(decoding.tokens) - 1)
        starts.append(start)
        fed.append(list(decoding.tokens[start:]) if asks else [])
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
