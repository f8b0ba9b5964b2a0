"""A model that reads one sequence as it grows, and takes back what was dropped from it."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from swiftsure.text.families import Family, matrix_flops

__all__ = ["Flops", "ModelReader", "Reader", "RememberingReader"]


class Reader(Protocol):
    """What decoding asks of a model."""

    @property
    def length(self) -> int:
        """How many tokens it has read."""

    def read(self, tokens: Sequence[int], last: int) -> Tensor:
        """Read what is new of a sequence; return logits after its last tokens, (last, vocabulary).

        Of the last tokens all but the first must be new.
        """

    def forget(self, length: int) -> None:
        """Take back all tokens but the first ones."""


class ModelReader:
    """A Hugging Face model with its cache, which is cropped and never computed anew.

    Parameters
    ----------
    family : of the model
    counts : Flops
    source : (1, positions)
        What an encoder is given; a causal model's prompt is read like any other token.
    """

    def __init__(self, family: Family, counts: "Flops", source: Tensor) -> None:
        self.family = family
        self.counts = counts
        self.passes = 0
        self.flops = 0.0
        self._crossed = bool(family.model.config.is_encoder_decoder)
        self._source = source
        self._encoded: BaseModelOutput | None = None
        self._cache: Any = DynamicCache()
        if self._crossed:
            self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    @property
    def source_length(self) -> int:
        """Positions of an encoder's source; 0 for a causal model."""
        return int(self._source.shape[1]) if self._crossed else 0

    def restart(self) -> None:
        """Forget all tokens and counts; a source stays encoded, but will be counted again."""
        self.forget(0)
        self.passes, self.flops = 0, 0.0

    @property
    def length(self) -> int:
        """How many tokens it has read."""
        return int(self._cache.get_seq_length())

    def read(self, tokens: Sequence[int], last: int) -> Tensor:
        """Read what is new of a sequence; return logits after its last tokens."""
        start = self.length
        logits = self._run(tokens[start:], last)
        self._count(start, len(tokens), last)
        return logits

    def _run(self, new: Sequence[int], last: int) -> Tensor:
        """Run the model on tokens after the cached ones; return logits after the last of them."""
        model, fed = self.family.model, torch.tensor([new], device=self.family.model.device)
        if self._crossed:
            output = model(
                decoder_input_ids=fed, encoder_outputs=self._states(), past_key_values=self._cache
            )
        else:
            output = model(input_ids=fed, past_key_values=self._cache, logits_to_keep=last)
        logits: Tensor = output.logits[0, -last:].float()
        return logits

    def _states(self) -> BaseModelOutput:
        """Return the source's states; a model that never reads has none computed."""
        if self._encoded is None:
            states = self.family.model.get_encoder()(input_ids=self._source).last_hidden_state
            self._encoded = BaseModelOutput(last_hidden_state=states)
        return self._encoded

    def _count(self, start: int, end: int, last: int) -> None:
        if self.passes == 0:
            self.flops += self.counts.encoding(self.source_length)
        self.passes += 1
        heads = end - start if self._crossed else last  # T5's runs on all that is fed
        self.flops += self.counts.reading(start, end, heads, self.source_length)

    def forget(self, length: int) -> None:
        """Take back all tokens but the first ones."""
        surplus = self.length - length
        if surplus > 0:
            self._cache.crop(-surplus)


class RememberingReader(ModelReader):
    """A reader for many runs of one sequence, of which the model runs on no beginning twice.

    What it counts is what each run would have cost by itself.
    """

    def __init__(self, family: Family, counts: "Flops", source: Tensor) -> None:
        super().__init__(family, counts, source)
        self._length = 0
        self._cached: list[int] = []
        self._known: dict[tuple[int, ...], Tensor] = {}
        """Logits after every beginning that was asked for."""

    @property
    def length(self) -> int:
        """How many tokens this run has read."""
        return self._length

    def forget(self, length: int) -> None:
        """Take back all tokens but the first ones; they may come again, so the cache stays."""
        self._length = min(self._length, length)

    def read(self, tokens: Sequence[int], last: int) -> Tensor:
        """Read what is new of a sequence; return logits after its last tokens."""
        ends = range(len(tokens) - last + 1, len(tokens) + 1)
        beginnings = [tuple(tokens[:end]) for end in ends]
        unknown = [place for place, each in enumerate(beginnings) if each not in self._known]
        if unknown:
            new = beginnings[unknown[0] :]
            self._known |= zip(new, self._reread(tokens, len(new)), strict=True)
        self._count(self._length, len(tokens), last)
        self._length = len(tokens)
        return torch.stack([self._known[each] for each in beginnings])

    def _reread(self, tokens: Sequence[int], last: int) -> Tensor:
        """Crop the cache to what it shares with a sequence, and run on the rest."""
        pairs = zip(self._cached, tokens[: len(tokens) - last], strict=False)
        shared = next((k for k, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        kept = min(len(self._cached), len(tokens) - last) if shared is None else shared
        if kept < len(self._cached):
            self._cache.crop(kept - len(self._cached))
        self._cached = list(tokens)
        return self._run(tokens[kept:], last)


class Flops:
    """What a model's passes cost; looking through its parts is done once, not at each pass.

    Parameters
    ----------
    family : of the model
    """

    def __init__(self, family: Family) -> None:
        blocks = [family.block_flops(block) for block in family.blocks]
        self._token = float(sum(blocks) + matrix_flops(family.norm))  # which may have a map
        self._attended = 4.0 * family.attention_width * len(blocks)
        self._head = 2.0 * family.head.weight.numel()
        self._source = self._source_attended = 0.0
        if family.model.config.is_encoder_decoder:
            crossing = sum(map(matrix_flops, family.blocks)) - sum(blocks)
            self._source = matrix_flops(family.model.get_encoder()) + crossing
            self._source_attended = 4.0 * family.attention_width * family.model.config.num_layers

    def encoding(self, source: int) -> float:
        """Return the FLOPs of a source's states, and of their keys and values in the decoder."""
        return source * (self._source + self._source_attended * source)

    def reading(self, start: int, end: int, heads: int, source: int) -> float:
        """Return the FLOPs of the decoder on the tokens from one place to another."""
        n = end - start
        attended = n * source + (end * (end + 1) - start * (start + 1)) / 2
        return n * self._token + self._attended * attended + self._head * heads

    def alone(self, begin: int, end: int, source: int) -> float:
        """Return the FLOPs of a model that writes the tokens from one place to another alone."""
        return self.encoding(source) + self.reading(0, end - 1, end - begin, source)
