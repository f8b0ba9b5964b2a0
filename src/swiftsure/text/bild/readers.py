"""Readers: a model and its cache for one sequence, which can be extended and cropped."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from swiftsure.text.families import Family, matrix_flops

__all__ = ["Flops", "ModelReader", "RememberingReader"]


class ModelReader:
    """A Hugging Face model with its cache, which is cropped and never recomputed.

    Parameters
    ----------
    family : the model's family
    counts : Flops
    source : (1, positions)
        The encoder's input; a causal model's prompt is read like any other tokens.
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
        """Forget all tokens and counts; the source stays encoded, but is counted again."""
        self.forget(0)
        self.passes, self.flops = 0, 0.0

    @property
    def length(self) -> int:
        """Number of tokens read."""
        return int(self._cache.get_seq_length())

    def read(self, tokens: Sequence[int], last: int) -> Tensor:
        """Read the new tokens of a sequence; return the last logits, (last, vocabulary).

        All but the first of the last tokens must be new.
        """
        start = self.length
        logits = self._run(tokens[start:], last)
        self._count(start, len(tokens), last)
        return logits

    def _run(self, new: Sequence[int], last: int) -> Tensor:
        """Run the model on tokens after the cached ones; return the last logits."""
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
        """Return the encoder's states, computed on first use."""
        if self._encoded is None:
            states = self.family.model.get_encoder()(input_ids=self._source).last_hidden_state
            self._encoded = BaseModelOutput(last_hidden_state=states)
        return self._encoded

    def _count(self, start: int, end: int, last: int) -> None:
        if self.passes == 0:
            self.flops += self.counts.encoding(self.source_length)
        self.passes += 1
        heads = end - start if self._crossed else last  # T5's head runs on all fed tokens
        self.flops += self.counts.reading(start, end, heads, self.source_length)

    def forget(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        surplus = self.length - length
        if surplus > 0:
            self._cache.crop(-surplus)


class RememberingReader(ModelReader):
    """A reader for many runs of one sequence; the model never runs on the same prefix twice.

    FLOPs are counted as if each run were alone.
    """

    def __init__(self, family: Family, counts: "Flops", source: Tensor) -> None:
        super().__init__(family, counts, source)
        self._length = 0
        self._cached: list[int] = []
        self._known: dict[tuple[int, ...], Tensor] = {}
        """Logits after every prefix that was asked for."""

    @property
    def length(self) -> int:
        """Number of tokens read in this run."""
        return self._length

    def forget(self, length: int) -> None:
        """Forget all but the first `length` tokens; the cache stays, as they may come again."""
        self._length = min(self._length, length)

    def read(self, tokens: Sequence[int], last: int) -> Tensor:
        """Read the new tokens of a sequence; return the last logits."""
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
        """Crop the cache to the prefix shared with a sequence, and run on the rest."""
        pairs = zip(self._cached, tokens[: len(tokens) - last], strict=False)
        shared = next((k for k, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        kept = min(len(self._cached), len(tokens) - last) if shared is None else shared
        if kept < len(self._cached):
            self._cache.crop(kept - len(self._cached))
        self._cached = list(tokens)
        return self._run(tokens[kept:], last)


class Flops:
    """FLOPs of a model's passes; its modules are counted once, not at each pass.

    Parameters
    ----------
    family : the model's family
    """

    def __init__(self, family: Family) -> None:
        blocks = [family.block_flops(block) for block in family.blocks]
        self._token = float(sum(blocks) + matrix_flops(family.norm))  # `HeadedNorm` has a map
        self._attended = 4.0 * family.attention_width * len(blocks)
        self._head = 2.0 * family.head.weight.numel()
        self._source = self._source_attended = 0.0
        if family.model.config.is_encoder_decoder:
            crossing = sum(map(matrix_flops, family.blocks)) - sum(blocks)
            self._source = matrix_flops(family.model.get_encoder()) + crossing
            self._source_attended = 4.0 * family.attention_width * family.model.config.num_layers

    def encoding(self, source: int) -> float:
        """Return the FLOPs of encoding a source, including its keys and values in the decoder."""
        return source * (self._source + self._source_attended * source)

    def reading(self, start: int, end: int, heads: int, source: int) -> float:
        """Return the FLOPs of the decoder on the tokens from `start` to `end`."""
        n = end - start
        attended = n * source + (end * (end + 1) - start * (start + 1)) / 2
        return n * self._token + self._attended * attended + self._head * heads

    def alone(self, begin: int, end: int, source: int) -> float:
        """Return the FLOPs of a model that generates the tokens from `begin` to `end` alone."""
        return self.encoding(source) + self.reading(0, end - 1, end - begin, source)
