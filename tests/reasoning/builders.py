"""Traces of an imaginary model, whose losses are known."""

import numpy as np

from swiftsure.cascade import Answer
from swiftsure.reasoning import Probe, Trace, TraceRecord


def questions(n, rng, seeds=1, spent=5):
    """Traces of n questions that differ in difficulty; confidences say how hard they are.

    The answer is found after `need` tokens, and the model thinks on to twice that.
    """
    traces = []
    for question in range(n):
        hard = rng.random()
        for seed in range(seeds):
            need = int(100 + 900 * hard * rng.uniform(0.8, 1.2))
            end = 2 * need
            probes = []
            for at in range(100, end + 1, 100):
                sure = 1 / (1 + np.exp(-(at - need) / 60))
                found = rng.random() < sure
                probes.append(
                    Probe(at, Answer("right" if found else "wrong", sure, {"tokens": spent}))
                )
            final = "right" if rng.random() < 0.95 else "wrong"
            traces.append(Trace(f"q{question}", tuple(probes), end, Answer(final), "right", seed))
    return TraceRecord(traces)


def tiny_reasoner():
    """Return an untrained decoder of transformers, and its tokenizer of digits and marks."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<think>", "</think>", *map(str, range(10)), "so", "then"]
    table = Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="<pad>"))
    table.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=table, eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = "{{ messages[-1]['content'] }} <think>"
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.6,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config).eval(), tokenizer
