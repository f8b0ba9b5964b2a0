"""Pairs of tiny models whose drafts are good now and then, and plain ways to decode with them."""

import copy

import torch

from tests.text.builders import PAD, batch, kind, llama, opt, single, t5

__all__ = ["OTHERS", "PAIRS", "greedy", "inputs", "logits", "near", "slow_bild"]


def near(model, scale=0.15, seed=0):
    """A model whose weights differ a little, so that it says the same most of the time."""
    torch.manual_seed(seed)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.add_(scale * weight.std() * torch.randn_like(weight))
    return twin


def _pair(build, scale=0.15):
    def made():
        large = build()
        return large, near(large, scale)

    return made


PAIRS = {
    "T5": _pair(lambda: t5(layers=2)),
    "T5, other size": lambda: (t5(layers=3), t5(1, layers=1, d_model=8, d_ff=8)),
    "T5, gated": _pair(lambda: t5(layers=2, gated=True, attn_implementation="eager")),
    "T5, deeper decoder": _pair(lambda: t5(layers=2, num_layers=1)),
    "mT5": _pair(lambda: t5(layers=2, multilingual=True, gated=True)),
    "Llama": _pair(lambda: llama(layers=2), 0.25),
    "Llama, tied": _pair(lambda: llama(layers=2, tie_word_embeddings=True), 0.25),
}
OTHERS = {
    "GPT-2": _pair(lambda: kind("GPT2")),
    "Qwen2": _pair(lambda: kind("Qwen2")),
    "Gemma 3, sliding windows": _pair(lambda: kind("Gemma3"), 0.3),
    "Mistral, sliding windows": _pair(lambda: kind("Mistral")),
    "GPT-NeoX": _pair(lambda: kind("GPTNeoX")),
    "OPT, in no table": _pair(opt),
    "BART": _pair(lambda: kind("Bart"), 0.6),
    "Marian": lambda: (kind("Marian"), kind("Marian", 1)),
    "Qwen2 and GPT-2": lambda: (kind("Qwen2"), kind("GPT2")),
    "T5 and BART": lambda: (t5(), kind("Bart", decoder_start_token_id=PAD)),
}
"""Of other families, and of two."""


def inputs(model, row=0, seed=0):
    """One input without padding, (1, positions)."""
    return single(batch(4, model, seed), row)["input_ids"]


def logits(model, source, tokens):
    """Logits after every new token and before the first, without a cache."""
    given = torch.tensor([tokens], dtype=torch.long)
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            start = torch.full((1, 1), model.config.decoder_start_token_id)
            answer = torch.cat([start, given], dim=1)
            return model(input_ids=source, decoder_input_ids=answer).logits[0]
        return model(input_ids=torch.cat([source, given], dim=1)).logits[0, source.shape[1] - 1 :]


def greedy(model, source, n, ends=()):
    """The model's most probable tokens, without a cache."""
    tokens = []
    while len(tokens) < n and not (tokens and tokens[-1] in ends):
        tokens.append(int(logits(model, source, tokens)[-1].argmax()))
    return tokens


def slow_bild(large, small, source, rule, n, ends=()):
    """Big-little decoding of each token from scratch."""
    tokens = [int(logits(large, source, [])[-1].argmax())]
    while len(tokens) < n and tokens[-1] not in ends:
        draft = []
        while len(draft) < min(rule.max_draft, n - len(tokens) - 1):
            chances = logits(small, source, tokens + draft)[-1].softmax(0)
            if chances.max() < rule.fallback:
                break
            draft.append(int(chances.argmax()))
            if draft[-1] in ends:
                break
        said = logits(large, source, tokens + draft)[len(tokens) :]
        for token, row in zip(draft, said, strict=False):
            best = int(row.argmax())
            if token != best and -row.log_softmax(0)[token] > rule.threshold:
                tokens.append(best)
                break
            tokens.append(token)
        else:
            if not (draft and draft[-1] in ends):
                tokens.append(int(said[-1].argmax()))
    return tokens
