"""Readers: a model and its cache for one sequence, which can be extended and cropped."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.pytorch_utils import Conv1D

from swiftsure.text.decoder import attention_width, matrix_flops

__all__ = ["CountingReader", "Flops", "ModelReader", "RememberingReader"]


class ModelReader:
    """A Hugging Face model with its cache, which is cropped and never recomputed.

    Parameters
    ----------
    model : PreTrainedModel
    counts : Flops
    source : (1, positions)
        The encoder's input; a causal model's prompt is read like any other tokens.
    """

    def __init__(self, model: Any, counts: "Flops", source: Tensor) -> None:
        self.model = model
        self.counts = counts
        self.passes = 0
        self.flops = 0.0
        self._crossed = bool(model.config.is_encoder_decoder)
        self._source = source
        self._encoded: BaseModelOutput | None = None
        # Without its configuration, so that sliding windows keep all positions and can be cropped;
        # the model's own mask hides the old ones.
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
        fed = torch.tensor([new], device=self.model.device)
        given: dict[str, Any] = {"past_key_values": self._cache, "use_cache": True}
        if self._crossed:
            given |= {"decoder_input_ids": fed, "encoder_outputs": self._states()}
        else:
            given["input_ids"] = fed
            if self.counts.keeps_last:
                given["logits_to_keep"] = last
        logits: Tensor = self.model(**given).logits[0, -last:].float()
        return logits

    def _states(self) -> BaseModelOutput:
        """Return the encoder's states, computed on first use."""
        if self._encoded is None:
            states = self.model.get_encoder()(input_ids=self._source).last_hidden_state
            self._encoded = BaseModelOutput(last_hidden_state=states)
        return self._encoded

    def _count(self, start: int, end: int, last: int) -> None:
        if self.passes == 0:
            self.flops += self.counts.encoding(self.source_length)
        self.passes += 1
        heads = last if self.counts.keeps_last else end - start
        self.flops += self.counts.reading(start, end, heads, self.source_length)

    def forget(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        surplus = self.length - length
        if surplus > 0:
            self._cache.crop(-surplus)


class CountingReader(ModelReader):
    """Counts the passes of one sequence that is read together with others, elsewhere."""

    def __init__(self, model: Any, counts: "Flops", source: Tensor) -> None:
        super().__init__(model, counts, source)
        self._length = 0

    @property
    def length(self) -> int:
        """Number of tokens read."""
        return self._length

    def forget(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self._length = min(self._length, length)

    def note(self, tokens: Sequence[int], last: int) -> None:
        """Count a pass over the new tokens of a sequence, of which `last` logits were asked."""
        self._count(self._length, len(tokens), last)
        self._length = len(tokens)


class RememberingReader(ModelReader):
    """A reader for many runs of one sequence; the model never runs on the same prefix twice.

    FLOPs are counted as if each run were alone.
    """

    def __init__(self, model: Any, counts: "Flops", source: Tensor) -> None:
        super().__init__(model, counts, source)
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
    model : PreTrainedModel
    """

    def __init__(self, model: Any) -> None:
        config, head = model.config, model.get_output_embeddings()
        self.keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        """Whether the head can run on the last tokens only."""
        self._head: float = 2.0 * head.weight.numel()
        self._source = self._source_attended = 0.0
        token: float = matrix_flops(model)
        if config.is_encoder_decoder:
            token, self._source = _probed_flops(model)
            encoder = _entry(config, "encoder_layers", "num_layers", "num_hidden_layers")
            self._source_attended = 4.0 * attention_width(config) * encoder
        self._token = float(token - matrix_flops(head))
        layers = _entry(config, "decoder_layers", "num_decoder_layers", "num_hidden_layers")
        self._attended = 4.0 * attention_width(config) * layers

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


@torch.inference_mode()
def _probed_flops(model: Any) -> tuple[float, float]:
    """Return the FLOPs of linear layers per token of an answer, and per token of its source.

    One pass tells them apart: cross-attention has layers for both.
    """
    flops = {2: 0.0, 3: 0.0}
    source = torch.ones((1, 3), dtype=torch.long, device=model.device)

    def count(layer: Any, inputs: tuple[Tensor, ...], _output: Any) -> None:
        positions = inputs[0].shape[:-1].numel()
        if positions in flops:
            flops[positions] += matrix_flops(layer)

    layers = [part for part in model.modules() if isinstance(part, nn.Linear | Conv1D)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        model(input_ids=source, decoder_input_ids=source[:, :2], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return flops[2], flops[3]


def _entry(config: Any, *names: str) -> int:
    """Return the first of these entries that a configuration has."""
    return next(int(getattr(config, name)) for name in names if getattr(config, name, None))
