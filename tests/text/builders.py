"""Tiny models of random weights, and inputs for them."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

__all__ = ["MODELS", "batch", "llama", "t5"]

VOCABULARY, PAD, EOS = 48, 0, 1


def t5(seed=0, *, layers=4, gated=False, tied=True, multilingual=False, **options):
    """A T5 whose exits disagree now and then, and whose answers end at different places."""
    torch.manual_seed(seed)
    config_class, model_class = (
        (MT5Config, MT5ForConditionalGeneration)
        if multilingual
        else (T5Config, T5ForConditionalGeneration)
    )
    settings = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": tied,
        "scale_decoder_outputs": tied,
        "decoder_start_token_id": PAD,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "initializer_factor": 2.0 if tied else 1.0,
    }
    config = config_class(**settings | options)
    config.tie_word_embeddings = tied  # which some versions do not take at once
    return model_class(config).eval()


def llama(seed=0, *, layers=4, **options):
    """A Llama with fewer key heads than query heads."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": PAD,
        "bos_token_id": 2,
        "eos_token_id": EOS,
        "initializer_range": 0.5,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | options)).eval()


MODELS = {
    "T5": t5,
    "T5, sdpa off": lambda: t5(attn_implementation="eager"),
    "T5 v1.1": lambda: t5(gated=True, tied=False),
    "T5, gated and tied": lambda: t5(gated=True),
    "mT5": lambda: t5(multilingual=True, gated=True, tied=False),
    "T5, deeper decoder": lambda: t5(num_layers=2),
    "Llama": llama,
    "Llama, tied": lambda: llama(tie_word_embeddings=True),
}


def batch(n, model, seed=0, longest=9):
    """Inputs of unequal lengths, padded where the family pads."""
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (n, longest))
    lengths = 2 + torch.arange(n) * 5 % (longest - 1)
    place = torch.arange(longest)
    if model.config.is_encoder_decoder:
        mask = place < lengths[:, None]
    else:
        mask = place >= longest - lengths[:, None]  # prompts end together
    return {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}


def single(inputs, row):
    """One of the inputs by itself, without padding."""
    kept = inputs["attention_mask"][row].bool()
    return {name: value[row : row + 1, kept] for name, value in inputs.items()}


def new_tokens(model, sequences, inputs):
    """What was generated: without the start token, or without the prompt."""
    start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return sequences[:, start:]
