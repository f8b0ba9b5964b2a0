"""Early exits the slow way, without a cache and without the table of families."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from swiftsure.text import CalmModel, CalmRule, Decay, MetaClassifier, TokenScore
from tests.text.builders import EOS, batch, blocks_of

__all__ = [
    "OPTIONS",
    "RULES",
    "TOKENS",
    "at_once",
    "classifier",
    "fast_model",
    "frozen_after_exit",
]

TOKENS = 10
ENDS = [EOS, 5, 17, 30, 41, 44, 46]
"""Several end tokens, so that answers of random models end at all."""
OPTIONS = {"max_new_tokens": TOKENS, "eos_token_id": ENDS}
RULES = {
    "softmax": CalmRule(1.0),
    "softmax, decay": CalmRule(1.0, decay=Decay(TOKENS)),
    "softmax, strict, late": CalmRule(1.0, strict=True, min_exit=1),
    "softmax, shortlist": CalmRule(1.0, shortlist=4),
    "softmax, few looks": CalmRule(1.0, look_at=(0, 2)),
    "saturation": CalmRule(1.0, score="saturation"),
    "meta": CalmRule(1.0, score="meta"),
    "learned": CalmRule(1.0, score="learned"),
}


def fast_model(model, rule):
    """The model under the rule, at a threshold that its own confidences reach now and then."""
    judge = classifier(rule)
    looking = replace(rule, threshold=0.999, strict=False, shortlist=None)
    seen = CalmModel(model, looking, classifier=judge).generate(
        **batch(6, model), max_new_tokens=TOKENS, eos_token_id=None
    )
    surest = np.nan_to_num(seen.depths.confidences, nan=-1.0).max(axis=2).ravel()
    surest = np.sort(surest[surest > -1])
    middle = surest[len(surest) // 3 : 2 * len(surest) // 3]
    gap = np.diff(middle).argmax()  # where rounding decides nothing
    level = float(middle[gap : gap + 2].mean())
    return CalmModel(model, replace(rule, threshold=level), classifier=judge)


def classifier(rule, seed=3):
    if rule.score == "learned":
        return TokenScore([[0.0, 0.0, 0.0, 0.0], [-1.0, 0.6, 0.4, 0.1], [0.2, 0.5, 0.2, 0.3]])
    if rule.score != "meta":
        return None
    torch.manual_seed(seed)
    return MetaClassifier(16).eval()


@contextmanager
def frozen_after_exit(model, depths):
    """Let each position keep its state once it left; `depths` (n, positions) says after what."""

    def keep(index, inputs, output):
        left = torch.from_numpy(depths <= index)[:, :, None]
        if isinstance(output, tuple):
            return (torch.where(left, inputs[0], output[0]), *output[1:])
        return torch.where(left, inputs[0], output)

    hooks = [
        block.register_forward_hook(lambda _, inputs, output, k=k: keep(k, inputs, output))
        for k, block in enumerate(blocks_of(model))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def at_once(model, inputs, sequences, exit_layers):
    """Logits of all tokens from one pass without a cache, given where each token exited.

    A block makes keys and values from the states that it gets, which are exit states for positions
    that left: state propagation without any cache.
    """
    fed = sequences[:, :-1]
    if model.config.is_encoder_decoder:
        with frozen_after_exit(model, exit_layers):
            return model(**inputs, decoder_input_ids=fed, use_cache=False).logits
    prompt = inputs["input_ids"].shape[1]
    full = np.full((len(fed), prompt - 1), 4)
    mask = inputs["attention_mask"]
    whole = torch.cat([mask, mask.new_ones(len(fed), fed.shape[1] - prompt)], dim=1)
    positions = (whole.cumsum(dim=1) - 1).clamp(min=0)
    with frozen_after_exit(model, np.concatenate([full, exit_layers], axis=1)):
        logits = model(fed, attention_mask=whole, position_ids=positions, use_cache=False).logits
    return logits[:, prompt - 1 :]
