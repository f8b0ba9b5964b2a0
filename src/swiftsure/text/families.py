"""Model families: where a Hugging Face model has its decoder blocks, norm, head, keys and values.

To add one, write a `Family` and pass it to `FAMILIES.register` with its model types.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from swiftsure.registry import Registry
from swiftsure.text.exit_heads import ExitHeads

__all__ = [
    "FAMILIES",
    "T5",
    "Family",
    "Llama",
    "family_of",
    "matrix_flops",
]

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of positions, (n or 1, positions, head width) each."""


class Family(ABC):
    """Access to the parts of one model that early exits need.

    Parameters
    ----------
    model : PreTrainedModel
        With its language-model head.

    Attributes
    ----------
    stack : nn.Module
        The decoder: from embeddings to the last block's normed hidden states.
    blocks : nn.ModuleList
        The decoder's blocks, in order.
    norm : nn.Module
        The norm between the last block and the head.
    """

    first_token_may_exit: bool
    """Whether the first token comes from a single position rather than a whole prompt."""
    parts: tuple[str, str, str]
    """Names of `stack`, `blocks` and `norm` among the model's submodules."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.stack: nn.Module
        self.blocks: nn.ModuleList
        self.norm: nn.Module
        self.stack, self.blocks, self.norm = map(model.get_submodule, self.parts)
        self.exit_heads: ExitHeads | None = None

    @abstractmethod
    def projections(self, block: Any) -> tuple[nn.Linear, nn.Linear]:
        """Return the linear layers of a block's self-attention keys and values."""

    @abstractmethod
    def project(self, block: nn.Module, states: Tensor, rotary: Rotary | None) -> Rotary:
        """Return the self-attention keys and values of a block for these states.

        Parameters
        ----------
        block : one of `blocks`
        states : (n, positions, width)
        rotary : cosines and sines, for models with rotary positions

        Returns
        -------
        keys, values : (n, heads, positions, head width)
        """

    def skipped(self, states: Tensor, arguments: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Return the output of a skipped block: the states unchanged, in the block's format."""
        return states

    def kept_flops(self, block: nn.Module) -> int:
        """Return the FLOPs of one token's keys and values, which a skipped block still computes."""
        return 2 * sum(layer.weight.numel() for layer in self.projections(block))

    def block_flops(self, block: nn.Module) -> int:
        """Return the FLOPs of one token in a block, without attention over earlier positions."""
        return matrix_flops(block)

    @property
    def head(self) -> nn.Linear:
        """The language-model head."""
        head: nn.Linear = self.model.get_output_embeddings()
        return head

    def head_input(self, states: Tensor) -> Tensor:
        """Return the head's input for hidden states of any block."""
        normed: Tensor = self.norm(states)
        return normed

    def exit_input(self, exit_index: int, states: Tensor) -> Tensor:
        """Return the head's input for tokens that exit after a block."""
        if self.exit_heads is not None:
            states = self.exit_heads(exit_index, states)
        return self.head_input(states)

    def fill_cross_attention(  # noqa: B027 (most decoders have no cross-attention)
        self, block: nn.Module, index: int, arguments: Mapping[str, Any]
    ) -> None:
        """Cache the source's keys and values, if the block needs them and they are missing."""

    @property
    def context_length(self) -> int | None:
        """Maximum number of positions of prompt and answer together; None means no limit."""
        return None

    @property
    def attention_width(self) -> int:
        """Number of heads times head width."""
        config = self.model.config
        heads = getattr(config, "num_attention_heads", None) or config.num_heads
        width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
        return int(heads * (width or config.hidden_size // heads))


class T5(Family):
    """T5, T5 v1.1, Flan-T5 and mT5."""

    first_token_may_exit = True
    parts = ("decoder", "decoder.block", "decoder.final_layer_norm")

    def head_input(self, states: Tensor) -> Tensor:
        """Return normed states, scaled if the head is tied to the embeddings."""
        normed = super().head_input(states)
        if getattr(self.model.config, "scale_decoder_outputs", False):  # mT5 lacks it
            normed = normed * (self.model.model_dim**-0.5)
        return normed

    def projections(self, block: Any) -> tuple[nn.Linear, nn.Linear]:
        """Return the layers of keys and values."""
        attention = block.layer[0].SelfAttention
        return attention.k, attention.v

    def project(self, block: Any, states: Tensor, rotary: Rotary | None) -> Rotary:  # noqa: ARG002
        """Return keys and values, which do not depend on positions in T5."""
        normed = block.layer[0].layer_norm(states)
        return _by_head(self.projections(block), self.model.config.d_kv, normed)

    def skipped(self, states: Tensor, arguments: Mapping[str, Any]) -> Any:
        """Return the states and the position biases, which later blocks share."""
        biases = ("position_bias", "encoder_decoder_position_bias")
        return (states, *(arguments.get(name) for name in biases))

    def fill_cross_attention(self, block: Any, index: int, arguments: Mapping[str, Any]) -> None:
        """Cache the keys and values of the encoder's states, as the block's first call would."""
        cache = arguments["past_key_values"]
        if not cache.is_updated.get(index):
            source = block.layer[1].EncDecAttention
            states = arguments["encoder_hidden_states"]
            keys, values = _by_head((source.k, source.v), self.model.config.d_kv, states)
            cache.cross_attention_cache.update(keys, values, index)
            cache.is_updated[index] = True

    def block_flops(self, block: Any) -> int:
        """Return the FLOPs of all matrices except the source's keys and values."""
        source = block.layer[1].EncDecAttention
        return matrix_flops(block) - 2 * int(source.k.weight.numel() + source.v.weight.numel())


class Llama(Family):
    """Llama, SmolLM2 and others of model type "llama"."""

    first_token_may_exit = False
    parts = ("model", "model.layers", "model.norm")

    def projections(self, block: Any) -> tuple[nn.Linear, nn.Linear]:
        """Return the layers of keys and values."""
        return block.self_attn.k_proj, block.self_attn.v_proj

    def project(self, block: Any, states: Tensor, rotary: Rotary | None) -> Rotary:
        """Return keys, with rotary positions applied, and values."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        if rotary is None:
            raise ValueError("Keys of a Llama model need the positions' cosines and sines.")
        normed = block.input_layernorm(states)
        keys, values = _by_head(self.projections(block), block.self_attn.head_dim, normed)
        _, turned = apply_rotary_pos_emb(keys, keys, *rotary)
        return turned, values

    @property
    def context_length(self) -> int | None:
        """Maximum number of positions of prompt and answer together."""
        return int(self.model.config.max_position_embeddings)


FAMILIES: Registry[type[Family]] = Registry("family")
"""Families by `config.model_type`; `FAMILIES.register(family, *model_types)` adds one."""

FAMILIES.register(T5, "t5", "mt5")
FAMILIES.register(Llama, "llama")


def family_of(model: Any) -> Family:
    """Return the family of a model.

    Raises
    ------
    TypeError
        If it is not a Hugging Face model with a language-model head.
    ValueError
        If its family is unknown.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model, nn.Module) or model_type is None:
        raise TypeError(f"`model` must be a Hugging Face model, but got {type(model).__name__}.")
    if model_type not in FAMILIES:
        raise ValueError(
            f"`model` is of type {model_type!r}, but only these are known: {', '.join(FAMILIES)}."
            " To add it, write a swiftsure.text.Family and pass it to"
            " swiftsure.text.FAMILIES.register with this model type."
        )
    if not hasattr(model, "generate") or getattr(model, "lm_head", None) is None:
        raise TypeError(
            f"`model` must have a language-model head and `generate`, but {type(model).__name__}"
            " has none: load it as AutoModelForSeq2SeqLM or AutoModelForCausalLM."
        )
    return FAMILIES[model_type](model)


def _by_head(
    layers: tuple[nn.Linear, nn.Linear], width: int, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Return keys and values for these states, split into heads of a width."""
    shape = (*states.shape[:-1], -1, width)
    keys, values = (layer(states).view(shape).transpose(1, 2) for layer in layers)
    return keys, values


def matrix_flops(module: nn.Module) -> int:
    """Return the FLOPs of a module's linear layers for one token."""
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return sum(2 * layer.weight.numel() for layer in layers)
