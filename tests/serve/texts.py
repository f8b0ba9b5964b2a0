"""Text systems of random weights under a policy, saved in folders as users save them."""

from functools import cache

import swiftsure as ss
from swiftsure.run import RunOptions
from swiftsure.text import (
    BigLittle,
    CalmModel,
    CalmRule,
    Texts,
    save_system,
    self_draft,
    sweep_pair,
)
from swiftsure.text import sweep as calm_sweep
from tests.text.builders import llama, t5
from tests.text.calm.slow import fast_model
from tests.text.tokenizing import texts, tokenizer

TOKENS = 8
CHAT = "{% for each in messages %}{{ each['content'] }} {% endfor %}"


def policy_from(record, loss="token_f1", epsilon=0.6):
    return ss.calibrate(record, risk="consistency", loss=loss, epsilon=epsilon)


@cache
def calm(kind="llama", epsilon=0.6):
    """A model whose tokens exit at different depths, under a policy."""
    model = {"llama": llama, "t5": t5}[kind]()
    threshold = fast_model(model, CalmRule(1.0)).rule.threshold
    record = calm_sweep(
        CalmModel(model, CalmRule(None)),
        Texts(texts(60), tokenizer()),
        thresholds=[threshold],
        losses=["token_f1"],
        generation={"max_new_tokens": TOKENS},
        run=RunOptions(progress=False),
    )
    return CalmModel(model, policy_from(record, epsilon=epsilon))


@cache
def pair():
    """A model with a draft of its own first blocks, under a policy."""
    model = llama()
    both = BigLittle(model, self_draft(model, 2), 1.0)
    record = sweep_pair(
        both,
        Texts(texts(60), tokenizer()),
        thresholds=[3.0],
        losses=["token_f1"],
        max_new_tokens=TOKENS,
        run=RunOptions(progress=False),
    )
    return BigLittle(model, both.small, policy_from(record, epsilon=0.9))


def saved(system, folder):
    """Save a system with its tokenizer, which has a chat template; return the folder."""
    words = tokenizer()
    words.chat_template = CHAT
    save_system(system, words, folder)
    return folder
