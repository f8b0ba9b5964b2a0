"""The table of model families: where Hugging Face models keep the parts that early exits need.

| family | blocks | last norm | keys and values | positions |
|---|---|---|---|---|
| Llama, Mistral, Qwen2, Gemma and others | `model.layers` | `norm` | two layers | rotary |
| GPT-2, GPT-NeoX, Phi-3 | `transformer.h`, ... | `ln_f`, ... | one layer | learned or rotary |
| T5, mT5 | `decoder.block` | `final_layer_norm` | two layers | relative |
| BART, MarianMT | `model.decoder.layers` | none | two layers | learned, sinusoidal |

A release of transformers that moves a module changes a row here and nothing else. To add a family,
pass a `Family` to `FAMILIES.register` with its model types, and a model of it to `check_family`.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from swiftsure._lib.registry import Registry

__all__ = ["FAMILIES", "Family", "Logits"]


@dataclass(frozen=True, kw_only=True)
class Logits:
    """What a family does around the head, besides its linear layer; Llama's does nothing.

    Parameters
    ----------
    scale_if : str, optional
        Entry of the configuration; if true, the head's input is divided by the root of its width.
    soft_cap, divisor : str, optional
        Entries of the configuration: logits x become cap · tanh(x / cap), or are divided.
    bias : str, optional
        Buffer of the model that is added to the logits.
    """

    scale_if: str | None = None
    soft_cap: str | None = None
    divisor: str | None = None
    bias: str | None = None


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where models of a family keep their parts; the defaults are Llama's.

    Paths are those of `get_submodule`. A block must compute the keys and values of its
    self-attention from its input states: norm, linear layer, norm of each head, rotary positions.

    Parameters
    ----------
    stack : str
        The decoder within the model: from token ids to the head's input.
    blocks, norm : str
        Its blocks, and the norm after the last one, within the stack; None: no norm.
    block_norm, attention : str
        The norm before self-attention, and self-attention, within a block; None: no norm before.
    keys_values : one or two names
        Linear layers of keys and of values within attention; or one that computes queries, too.
    fused : {"in turn", "by head"}
        Output of one layer for all three: all queries, all keys, all values; or the three of each
        head.
    key_norm : str, optional
        Norm of each head's keys within attention; models whose configuration omits it lack it.
    positions : {"rotary", "learned", "sinusoidal", "relative"}
        Only rotary ones concern keys; the others are in the states, or added to the scores.
    rotary_if : str, optional
        Attribute of attention that says whether this block rotates its keys.
    cross_attention : str, optional
        Attention to an encoder's states, within a block; its layers are named as `keys_values`.
    cache : str
        The block's argument for the cache.
    hands_on : names
        The block's arguments that it returns after the states, for the next block.
    merged : groups of names
        Linear layers of a block that have the same input, the one that it calls first before the
        others: compiled blocks run each group as one. Groups that a model lacks are left out.
    logits : Logits
        What is done to the head's input and output.

    Examples
    --------
    >>> FAMILIES["gpt2"].blocks
    'h'
    """

    stack: str = "model"
    blocks: str = "layers"
    norm: str | None = "norm"
    block_norm: str | None = "input_layernorm"
    attention: str = "self_attn"
    keys_values: tuple[str, ...] = ("k_proj", "v_proj")
    fused: Literal["in turn", "by head"] = "in turn"
    key_norm: str | None = None
    positions: Literal["rotary", "learned", "sinusoidal", "relative"] = "rotary"
    rotary_if: str | None = None
    cross_attention: str | None = None
    cache: str = "past_key_values"
    hands_on: tuple[str, ...] = ()
    merged: tuple[tuple[str, ...], ...] = (_QKV, ("mlp.gate_proj", "mlp.up_proj"))
    logits: Logits = field(default_factory=Logits)


FAMILIES: Registry[Family] = Registry("family")
"""Families by `config.model_type`; `FAMILIES.register(family, *model_types)` adds one."""

_CAPPED = Logits(soft_cap="final_logit_softcapping")
_BIASED = Logits(bias="final_logits_bias")

FAMILIES.register(Family(), "llama", "mistral", "qwen2", "gemma")
FAMILIES.register(Family(key_norm="k_norm"), "qwen3")
FAMILIES.register(Family(rotary_if="use_rope"), "smollm3")
FAMILIES.register(Family(logits=Logits(divisor="logits_scaling")), "granite")
FAMILIES.register(Family(logits=_CAPPED), "gemma2")
FAMILIES.register(Family(logits=_CAPPED, key_norm="k_norm"), "gemma3_text")
FAMILIES.register(Family(norm="final_layernorm", key_norm="k_layernorm"), "phi")
FAMILIES.register(Family(keys_values=("qkv_proj",)), "phi3")
FAMILIES.register(
    Family(
        stack="transformer",
        blocks="h",
        norm="ln_f",
        block_norm="ln_1",
        attention="attn",
        keys_values=("c_attn",),
        positions="learned",
    ),
    "gpt2",
)
FAMILIES.register(
    Family(
        stack="gpt_neox",
        norm="final_layer_norm",
        attention="attention",
        keys_values=("query_key_value",),
        fused="by head",
        cache="layer_past",
    ),
    "gpt_neox",
)
_MT5 = Family(
    stack="decoder",
    blocks="block",
    norm="final_layer_norm",
    block_norm="layer.0.layer_norm",
    attention="layer.0.SelfAttention",
    keys_values=("k", "v"),
    positions="relative",
    cross_attention="layer.1.EncDecAttention",
    hands_on=("position_bias", "encoder_decoder_position_bias"),
    merged=(
        tuple(f"layer.0.SelfAttention.{name}" for name in "qkv"),
        ("layer.2.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_1"),
    ),
)
FAMILIES.register(_MT5, "mt5")
FAMILIES.register(replace(_MT5, logits=Logits(scale_if="scale_decoder_outputs")), "t5")
FAMILIES.register(
    Family(
        stack="model.decoder",
        norm=None,
        block_norm=None,
        positions="learned",
        cross_attention="encoder_attn",
        logits=_BIASED,
    ),
    "bart",
)
FAMILIES.register(
    Family(
        stack="model.decoder",
        norm=None,
        block_norm=None,
        positions="sinusoidal",
        cross_attention="encoder_attn",
        logits=_BIASED,
    ),
    "marian",
)
FAMILIES.register(
    Family(
        stack="model.decoder",
        norm="layer_norm",
        block_norm="self_attn_layer_norm",
        positions="learned",
        cross_attention="encoder_attn",
        logits=_BIASED,
    ),
    "mbart",
)
