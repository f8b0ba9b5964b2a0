"""Wording: every sentence about what a policy promises, runs, rests on and saves.

| function | says |
|---|---|
| `headline` | what is promised and what runs, on one line |
| `statement` | the same, then what voids it, what is not promised, and the exact terms |
| `promise_sentence` | the exact probability statement |
| `condition_texts` | what the promise rests on |
"""

from swiftsure.certify.wording.conditions import KnownCondition, condition_texts, voids
from swiftsure.certify.wording.exact import (
    fewest_samples,
    promise_name,
    promise_sentence,
    promise_words,
    selection_words,
)
from swiftsure.certify.wording.measures import WORDS, risk_words
from swiftsure.certify.wording.numbers import (
    average_sentence,
    average_words,
    dial,
    number,
    percent,
    setting_words,
    slice_names,
    surety,
)
from swiftsure.certify.wording.plain import LOSS_WORDS
from swiftsure.certify.wording.policies import headline, not_promised, statement

__all__ = [
    "LOSS_WORDS",
    "WORDS",
    "KnownCondition",
    "average_sentence",
    "average_words",
    "condition_texts",
    "dial",
    "fewest_samples",
    "headline",
    "not_promised",
    "number",
    "percent",
    "promise_name",
    "promise_sentence",
    "promise_words",
    "risk_words",
    "selection_words",
    "setting_words",
    "slice_names",
    "statement",
    "surety",
    "voids",
]
