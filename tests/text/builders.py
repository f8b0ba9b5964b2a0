"""Tiny models of random weights, and inputs for them."""

import torch
import transformers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

__all__ = ["KINDS", "MODELS", "batch", "blocks_of", "kind", "llama", "opt", "t5"]

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


CAUSAL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,  # else it repeats itself
}
CROSSED = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "bos_token_id": 2,
    "forced_eos_token_id": None,
    "init_std": 0.5,
    "tie_word_embeddings": False,
}
MIXED = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 8,  # not the width over the number of heads
    "query_pre_attn_scalar": 8,
    "final_logit_softcapping": 2.0,
}
KINDS = {
    "Mistral": ("Mistral", CAUSAL | {"sliding_window": 5}),
    "Qwen2": ("Qwen2", CAUSAL),
    "Qwen2, sliding": (
        "Qwen2",
        CAUSAL | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "Qwen3": ("Qwen3", CAUSAL | {"head_dim": 8}),
    "Gemma": ("Gemma", CAUSAL | {"head_dim": 8}),
    "Gemma2": ("Gemma2", CAUSAL | MIXED),
    "Gemma3": ("Gemma3", CAUSAL | MIXED),
    "Phi": ("Phi", CAUSAL | {"partial_rotary_factor": 0.5}),
    "Phi, normed keys": ("Phi", CAUSAL | {"qk_layernorm": True, "num_key_value_heads": 4}),
    "Phi3": ("Phi3", CAUSAL),
    "SmolLM3": ("SmolLM3", CAUSAL | {"no_rope_layers": [1, 0, 1, 0]}),
    "Granite": ("Granite", CAUSAL | {"logits_scaling": 3.0}),
    "GPT2": (
        "GPT2",
        {"n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 64, "initializer_range": 0.5}
        | {"tie_word_embeddings": False},
    ),
    "GPTNeoX": ("GPTNeoX", CAUSAL | {"rotary_pct": 0.5}),
    "Bart": ("Bart", CROSSED),
    "MBart": ("MBart", CROSSED),
    "Marian": ("Marian", CROSSED),
}
"""Prefix of the classes in transformers, and settings."""
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
HEADED = {
    "GPT2": "GPT2LMHeadModel",
    "Bart": "BartForConditionalGeneration",
    "MBart": "MBartForConditionalGeneration",
    "Marian": "MarianMTModel",
}


def kind(name, seed=0, **options):
    """A model of a family, in which nothing that could be forgotten is neutral."""
    prefix, settings = KINDS[name]
    config_class = getattr(transformers, CONFIGS.get(prefix, f"{prefix}Config"))
    model_class = getattr(transformers, HEADED.get(prefix, f"{prefix}ForCausalLM"))
    known = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS}
    torch.manual_seed(seed)
    model = model_class(config_class(**known | settings | options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # norms and biases, which are 1 and 0
                weight.add_(0.3 * torch.randn_like(weight))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model


def opt():
    """A model of a family that is not in the table."""
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        pad_token_id=PAD,
        bos_token_id=2,
        eos_token_id=EOS,
        init_std=0.5,
    )
    return transformers.OPTForCausalLM(config).eval()


def blocks_of(model):
    """The decoder's blocks, found without the table of families."""
    lists = [part for part in model.get_decoder().modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=len)


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
