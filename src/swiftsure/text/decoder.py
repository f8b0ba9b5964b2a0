"""A model's decoder, taken apart as its family says."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.pytorch_utils import Conv1D

from swiftsure.text.exit_heads import ExitHeads
from swiftsure.text.families import FAMILIES, Family
from swiftsure.text.fast_blocks import FastBlocks
from swiftsure.torch.modes import refuse_training

__all__ = [
    "Decoder",
    "argument_names",
    "attention_width",
    "check_family",
    "decoder_of",
    "matrix_flops",
]

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of positions, (n or 1, positions, rotated width) each."""

HOW_TO_DECLARE = """\
`model` is of type {model_type!r}, but only these families are known: {known}.
To add it, declare where it keeps its parts, and check that with a model
(docs/reference/extending.md):

    from swiftsure.text import FAMILIES, Family, check_family

    family = Family(
        stack="model",  # the decoder; Llama's names are the defaults, so leave out what is equal
        blocks="layers",  # its blocks, and the norm after them, within it
        norm="norm",
        block_norm="input_layernorm",  # within a block
        attention="self_attn",
        keys_values=("k_proj", "v_proj"),  # within attention
        positions="rotary",
    )
    FAMILIES.register(family, {model_type!r})
    check_family(model)"""


@dataclass(frozen=True)
class _Attention:
    """The modules that compute keys and values, in one block."""

    layers: tuple[nn.Module, ...]
    norm: nn.Module | None = None
    key_norm: nn.Module | None = None
    rotates: bool = False


class Decoder:
    """The parts of one model that early exits need.

    Parameters
    ----------
    model : PreTrainedModel
        With its language-model head.
    family : Family

    Attributes
    ----------
    stack : nn.Module
        From token ids to the head's input.
    blocks : nn.ModuleList
        Its blocks, in order.
    norm : nn.Module
        The norm between the last block and the head; `nn.Identity` if there is none.
    exit_heads : ExitHeads or None
    fast : FastBlocks or None
        Compiled blocks, which a `StaticDecoder` runs in their place.

    Raises
    ------
    ValueError
        If the model lacks a part that the family names.
    """

    def __init__(self, model: Any, family: Family) -> None:
        self.model = model
        self.family = family
        self.config = model.config
        self.exit_heads: ExitHeads | None = None
        self.fast: FastBlocks | None = None
        self.stack = self._part(model, family.stack, "stack")
        self.blocks: nn.ModuleList = self._part(self.stack, family.blocks, "blocks")
        self.norm: nn.Module = self._optional(self.stack, family.norm, "norm") or nn.Identity()
        self._own = [self._self_attention(block) for block in self.blocks]
        self._source = [self._cross_attention(block) for block in self.blocks]
        self._widths = attention_width(self.config), _head_width(self.config)
        logits = family.logits
        self._scale_if, self._soft_cap, self._divisor = (
            getattr(self.config, name or "", None)
            for name in (logits.scale_if, logits.soft_cap, logits.divisor)
        )

    def _part(self, owner: nn.Module, path: str, field: str) -> Any:
        try:
            return owner.get_submodule(path)
        except AttributeError:
            raise ValueError(
                f"The family {self.config.model_type!r} of swiftsure.text.FAMILIES has"
                f" {field}={path!r}, but {type(owner).__name__} has no such module; it has"
                f" {', '.join(name for name, _ in owner.named_children())}."
            ) from None

    def _optional(self, owner: nn.Module, path: str | None, field: str) -> nn.Module | None:
        return None if path is None else self._part(owner, path, field)

    def _self_attention(self, block: nn.Module) -> _Attention:
        family = self.family
        attention = self._part(block, family.attention, "attention")
        flag = True if family.rotary_if is None else bool(getattr(attention, family.rotary_if))
        return _Attention(
            layers=self._projections(attention),
            norm=self._optional(block, family.block_norm, "block_norm"),
            key_norm=getattr(attention, family.key_norm or "", None),
            rotates=family.positions == "rotary" and flag,
        )

    def _cross_attention(self, block: nn.Module) -> _Attention | None:
        if self.family.cross_attention is None:
            return None
        attention = self._part(block, self.family.cross_attention, "cross_attention")
        return _Attention(self._projections(attention))

    def _projections(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        names = self.family.keys_values
        return tuple(self._part(attention, name, "keys_values") for name in names)

    # ------------------------------------------------------------------------- keys and values

    def project(self, index: int, states: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Return the self-attention keys and values of a block for these states.

        Parameters
        ----------
        index : the block
        states : (n, positions, width)
        rotary : cosines and sines, for models with rotary positions

        Returns
        -------
        keys, values : (n, heads, positions, head width)
        """
        own = self._own[index]
        keys, values = self._keys_values(own, states if own.norm is None else own.norm(states))
        if own.key_norm is not None:
            keys = own.key_norm(keys)
        if own.rotates:
            if rotary is None:
                raise ValueError("Rotary keys need the positions' cosines and sines.")
            keys = _rotated(keys, *rotary)
        return keys, values

    def _keys_values(self, attention: _Attention, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, split into heads."""
        of_queries, width = self._widths
        if len(attention.layers) == 2:
            keys, values = (_by_head(layer(states), width) for layer in attention.layers)
            return keys, values
        whole = attention.layers[0](states)
        if self.family.fused == "by head":
            _, keys, values = _by_head(whole, 3 * width).chunk(3, dim=-1)
            return keys, values
        rest = (whole.shape[-1] - of_queries) // 2
        _, keys, values = whole.split([of_queries, rest, rest], dim=-1)
        return _by_head(keys, width), _by_head(values, width)

    def source_keys_values(self, index: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a block's attention to the encoder's states."""
        source: _Attention = self._source[index]  # type: ignore[assignment]
        return self._keys_values(source, states)

    def fill_cross_attention(self, index: int, arguments: Mapping[str, Any]) -> None:
        """Cache the source's keys and values, as the block's first call would."""
        cache = arguments[self.family.cache]
        if self._source[index] is not None and not cache.is_updated.get(index):
            pair = self.source_keys_values(index, arguments["encoder_hidden_states"])
            cache.cross_attention_cache.update(*pair, index)
            cache.is_updated[index] = True

    def self_attention(self, index: int) -> Any:
        """Return the self-attention module of a block."""
        return self._part(self.blocks[index], self.family.attention, "attention")

    def skipped(self, states: Tensor, arguments: Mapping[str, Any]) -> Any:
        """Return the output of a skipped block: the states unchanged, in the block's format."""
        handed_on = tuple(arguments.get(name) for name in self.family.hands_on)
        return (states, *handed_on) if handed_on else states

    # ---------------------------------------------------------------------------------- the head

    @property
    def head(self) -> nn.Linear:
        """The language-model head."""
        head: nn.Linear = self.model.get_output_embeddings()
        return head

    def head_input(self, states: Tensor) -> Tensor:
        """Return the head's input for hidden states of any block."""
        normed: Tensor = self.norm(states)
        if self._scale_if:
            normed = normed * normed.shape[-1] ** -0.5
        return normed

    def exit_input(self, exit_index: int, states: Tensor) -> Tensor:
        """Return the head's input for tokens that exit after a block."""
        if self.exit_heads is not None:
            states = self.exit_heads(exit_index, states)
        return self.head_input(states)

    def logits(self, scores: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return the model's logits for the head's output, (n, tokens): scaled, capped, biased.

        `tokens`, (n, tokens), names the columns; all of the vocabulary by default.
        """
        if self._divisor is not None:
            scores = scores / self._divisor
        if self._soft_cap is not None:
            scores = torch.tanh(scores / self._soft_cap) * self._soft_cap
        if self.family.logits.bias is not None:
            bias = getattr(self.model, self.family.logits.bias)[0]
            scores = scores + (bias if tokens is None else bias[tokens])
        return scores

    # ------------------------------------------------------------------------------------- costs

    @cached_property
    def all_block_flops(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """`block_flops` and `kept_flops` of every block."""
        blocks = range(len(self.blocks))
        run = np.asarray([self.block_flops(index) for index in blocks], np.float64)
        kept = np.asarray([self.kept_flops(index) for index in blocks], np.float64)
        return run, kept

    def kept_flops(self, index: int) -> int:
        """Return the FLOPs of one token's keys and values, which a skipped block still computes."""
        return sum(map(matrix_flops, self._own[index].layers))

    def block_flops(self, index: int) -> int:
        """Return the FLOPs of one token in a block, without attention over earlier positions."""
        source = self._source[index]
        of_source = 0 if source is None else sum(map(matrix_flops, source.layers))
        return matrix_flops(self.blocks[index]) - of_source


def decoder_of(model: Any) -> Decoder:
    """Return the decoder of a model from a known family.

    Raises
    ------
    TypeError
        If it is not a Hugging Face model with a language-model head.
    ValueError
        If its family is unknown, or does not fit the model.
    """
    check_generates(model)
    model_type = model.config.model_type
    if model_type not in FAMILIES:
        raise ValueError(HOW_TO_DECLARE.format(model_type=model_type, known=", ".join(FAMILIES)))
    return Decoder(model, FAMILIES[model_type])


def check_generates(model: Any) -> None:
    """Raise if this is not a Hugging Face model with a language-model head."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model, nn.Module) or model_type is None:
        raise TypeError(f"`model` must be a Hugging Face model, but got {type(model).__name__}.")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not hasattr(model, "generate") or head is None:
        raise TypeError(
            f"`model` must have a language-model head and `generate`, but {type(model).__name__}"
            " has none: load it as AutoModelForSeq2SeqLM or AutoModelForCausalLM."
        )


@torch.no_grad()
def check_family(model: Any) -> None:
    """Check that a model is as its family says, on a few tokens.

    Run it after declaring a family: a wrong row may well run, and give wrong answers.

    Raises
    ------
    ValueError
        If the keys, values or logits that the family leads to are not the model's own, the family
        is unknown, or the model is in training mode.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(vocab_size=32, n_embd=8, n_layer=2, n_head=2)
    >>> check_family(GPT2LMHeadModel(config).eval())
    """
    decoder = decoder_of(model)
    refuse_training(model)
    crossed = bool(model.config.is_encoder_decoder)
    ids = torch.arange(3, 8, device=model.device)[None] % decoder.head.weight.shape[0]

    def new_cache() -> Any:
        own = DynamicCache()
        return EncoderDecoderCache(own, DynamicCache()) if crossed else own

    cache, given = new_cache(), {"input_ids": ids}
    if crossed:
        given["decoder_input_ids"] = ids
    seen: list[tuple[dict[str, Any], Tensor]] = []

    def record(block: Any, args: Any, kwargs: Any, output: Any) -> None:
        after = output[0] if isinstance(output, tuple) else output
        names = argument_names(type(block).forward)
        seen.append((dict(zip(names, args, strict=False), **kwargs), after))

    hooks = [block.register_forward_hook(record, with_kwargs=True) for block in decoder.blocks]
    try:
        found = model(**given, past_key_values=cache, use_cache=True).logits
    finally:
        for hook in hooks:
            hook.remove()
    own = (cache.self_attention_cache if crossed else cache).layers
    fast = FastBlocks(decoder)
    fast.refresh()
    for index, (arguments, after) in enumerate(seen):
        states, rotary = arguments["hidden_states"], arguments.get("position_embeddings")
        again = fast.blocks[index](**arguments | {decoder.family.cache: new_cache()})
        merged = again[0] if isinstance(again, tuple) else again
        _check_close(f"the states after block {index}, with merged weights", merged, after, decoder)
        wanted = own[index].keys, own[index].values
        for name, ours, theirs in zip(
            ("keys", "values"), decoder.project(index, states, rotary), wanted, strict=True
        ):
            _check_close(f"the {name} of block {index}", ours, theirs, decoder)
    scores = decoder.head(decoder.head_input(seen[-1][1][0]))
    _check_close("the logits", decoder.logits(scores), found[0], decoder)


def _check_close(what: str, ours: Tensor, theirs: Tensor, decoder: Decoder) -> None:
    tolerance = 100 * torch.finfo(theirs.dtype).eps
    scale = float(theirs.abs().max())
    if ours.shape != theirs.shape or not torch.allclose(
        ours.to(theirs), theirs, rtol=tolerance, atol=tolerance * scale
    ):
        raise ValueError(
            f"The family {decoder.config.model_type!r} does not fit the model: {what} differ from"
            f" the model's own. It is declared as {decoder.family}."
        )


@cache
def argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's arguments in order, without `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]


def attention_width(config: Any) -> int:
    """Return a decoder's number of heads times head width."""
    return _heads(config) * _head_width(config)


def _heads(config: Any) -> int:
    names = ("decoder_attention_heads", "num_attention_heads", "num_heads", "n_head")
    return next(int(getattr(config, name)) for name in names if getattr(config, name, None))


def _head_width(config: Any) -> int:
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return int(width or config.hidden_size // _heads(config))


def _by_head(found: Tensor, width: int) -> Tensor:
    """Split (n, positions, heads · width) into heads: (n, heads, positions, width)."""
    return found.view(*found.shape[:-1], -1, width).transpose(1, 2)


def _rotated(keys: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate keys to their positions; only the first entries of a head where fewer are rotated."""
    width = cosines.shape[-1]
    turned, rest = keys[..., :width], keys[..., width:]
    first, second = turned.chunk(2, dim=-1)
    half = torch.cat([-second, first], dim=-1)
    turned = turned * cosines.unsqueeze(1) + half * sines.unsqueeze(1)
    return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], dim=-1)


def matrix_flops(module: nn.Module) -> int:
    """Return the FLOPs of a module's linear layers for one token."""
    layers = [part for part in module.modules() if isinstance(part, nn.Linear | Conv1D)]
    return sum(2 * layer.weight.numel() for layer in layers)
