"""Pairs of models: compatibility checks, and a draft model made of a model's first blocks."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from swiftsure._lib import checks
from swiftsure.text.decoder import check_generates, decoder_of
from swiftsure.text.exit_heads import ExitHeads, HeadedNorm
from swiftsure.text.twins import replace_submodule, shallow_copy
from swiftsure.torch.fingerprinting import fingerprint
from swiftsure.torch.modes import refuse_training

__all__ = ["check_pair", "pair_fingerprint", "refuse_other_tokenizer", "self_draft"]

NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None,),
    "guidance_scale": (None, 1.0),
    "cache_implementation": (None, "dynamic", "dynamic_full"),
}
"""Values that a generation config may have for options that are not supported here."""


def pair_fingerprint(large: nn.Module, small: nn.Module) -> str:
    """Return the fingerprint of a pair; which model is the large one matters."""
    return fingerprint(nn.ModuleDict({"large": large, "small": small}))


def check_pair(large: Any, small: Any) -> None:
    """Raise if two models cannot draft and verify for each other.

    Raises
    ------
    TypeError
        If one is not a Hugging Face model with a language-model head.
    ValueError
        If a model is in training mode or its cache cannot be cropped, they differ in kind,
        vocabulary, start token or device, or the large model's generation config has unsupported
        options.
    """
    for name, model in (("large", large), ("small", small)):
        check_generates(model)
        _check_cache(name, model)
        refuse_training(model)
    facts: dict[str, Callable[[Any], object]] = {
        "are both encoder-decoder models or both causal": lambda m: m.config.is_encoder_decoder,
        "have one vocabulary": lambda m: f"{m.get_output_embeddings().weight.shape[0]} tokens",
        "have one start token": start_token,
        "are on one device": lambda m: m.device,
    }
    for what, fact in facts.items():
        found = [fact(model) for model in (large, small)]
        if found[0] != found[1]:
            raise ValueError(
                f"`large` and `small` must be models that {what}, but got {found[0]} and"
                f" {found[1]}."
            )
    _check_generation_config(large)


def start_token(model: Any) -> int | None:
    """Return an encoder-decoder model's start token; None for causal models."""
    if not model.config.is_encoder_decoder:
        return None
    for config in (model.generation_config, model.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            token = getattr(config, name, None)
            if token is not None:
                return int(token)
    raise ValueError("`model` must have a start token: set config.decoder_start_token_id.")


def _check_cache(name: str, model: Any) -> None:
    """Raise if a model cannot forget the last tokens that it read, as a rejected draft requires."""
    if getattr(model, "_is_stateful", False):
        why = "it folds all tokens into one state"
    elif "past_key_values" not in inspect.signature(model.forward).parameters:
        why = "its `forward` takes no `past_key_values`"
    else:
        return
    raise ValueError(
        f"`{name}` must have a cache that can be cropped, to drop rejected tokens, but"
        f" {type(model).__name__} has none: {why}."
    )


def _check_generation_config(model: Any) -> None:
    """Raise if `generate` would do more than take or sample the next token."""
    for name, neutral in NEUTRAL_OPTIONS.items():
        value = getattr(model.generation_config, name, None)
        if value not in neutral:
            raise ValueError(
                f"`large` has {name}={value!r}, which drafting does not support: set"
                f" large.generation_config.{name} = {neutral[-1]!r}."
            )


def refuse_other_tokenizer(large: Any, small: Any) -> None:
    """Raise if two tokenizers differ.

    Raises
    ------
    ValueError
        If a token id means another token, or none, in the other tokenizer; names the first one.
    """
    of_large, of_small = (
        {number: token for token, number in each.get_vocab().items()} for each in (large, small)
    )
    found = {
        f"token {number}": (of_large.get(number), of_small.get(number))
        for number in sorted({*of_large, *of_small})
    }
    for name in ("eos_token_id", "pad_token_id"):
        found[name] = getattr(large, name), getattr(small, name)
    for what, values in found.items():
        if values[0] != values[1]:
            ours, theirs = ("missing" if each is None else repr(each) for each in values)
            raise ValueError(
                "The large and the small model's tokenizers must be the same, but"
                f" {what} is {ours} in one and {theirs} in the other."
            )


def self_draft(
    model: Any, n_layers: int, *, heads: ExitHeads | None = None, own_head: bool = False
) -> Any:
    """Return a draft model made of a model's first decoder blocks; it shares their weights.

    The model's own norm and head follow the last block that is kept. An encoder is shared whole.

    Parameters
    ----------
    model : PreTrainedModel
        From a known family.
    n_layers : int
        Number of decoder blocks to keep; fewer than the model has.
    heads : ExitHeads, optional
        From `fit_exit_heads`, with a head for the last block that is kept. It maps that block's
        states to those of the model's last block, which the norm and the head expect.
    own_head : bool
        Copy norm and head, so that they can be trained for the draft without changing the model.

    Raises
    ------
    ValueError
        If the model has no more than `n_layers` blocks, or `heads` has none for the last block
        that is kept.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> draft = self_draft(model, 4)
    >>> len(draft.model.layers), draft.lm_head is model.lm_head
    (4, True)
    """
    decoder = decoder_of(model)
    n_blocks = len(decoder.blocks)
    if checks.count("n_layers", n_layers) >= n_blocks:
        raise ValueError(
            f"`n_layers` must be less than the model's {n_blocks} blocks, but got {n_layers}."
        )
    if heads is not None and n_layers - 1 not in heads.exits:
        fitted = ", ".join(str(k + 1) for k in heads.exits)
        raise ValueError(
            f"`heads` must have one for the model's first {n_layers} blocks, but has those for"
            f" {fitted}: fit_exit_heads(..., exits=[{n_layers - 1}])."
        )
    draft, family = shallow_copy(model), decoder.family
    draft.config = _shorter(model.config, n_layers)
    draft.generation_config = copy.deepcopy(model.generation_config)
    blocks = nn.ModuleList(list(decoder.blocks)[:n_layers])
    blocks.training = decoder.blocks.training  # not train(), which would change the model's blocks
    replace_submodule(draft, f"{family.stack}.{family.blocks}", blocks)
    norm = copy.deepcopy(decoder.norm) if own_head else decoder.norm
    if heads is not None:
        norm = HeadedNorm(heads, n_layers - 1, norm)
    if family.norm is not None:
        replace_submodule(draft, f"{family.stack}.{family.norm}", norm)
    if own_head:
        head = next(name for name, part in model.named_modules() if part is decoder.head)
        replace_submodule(draft, head, copy.deepcopy(decoder.head))
    stack = draft.get_submodule(family.stack)
    # A decoder beside an encoder may have a config of its own, which says that it is a decoder.
    own = stack.config is not model.config
    stack.config = _shorter(stack.config, n_layers) if own else draft.config
    return draft


def _shorter(config: Any, n_layers: int) -> Any:
    """Return a copy of a config with another number of decoder blocks."""
    shorter = copy.deepcopy(config)
    names = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")
    setattr(shorter, next(name for name in names if hasattr(shorter, name)), n_layers)
    return shorter
