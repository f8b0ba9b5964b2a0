"""A tokenizer of whole words, and texts for it."""

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.text.builders import EOS, PAD, VOCABULARY

__all__ = ["WORDS", "texts", "tokenizer"]

WORDS = [f"w{k:02d}" for k in range(3, VOCABULARY)]


def tokenizer(**options):
    numbers = {"<pad>": PAD, "</s>": EOS, "<unk>": 2}
    numbers |= {word: 3 + k for k, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        **options,
    )


def texts(n, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=2 + k % 6)) for k in range(n)]
