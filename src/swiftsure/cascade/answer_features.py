"""Features of a question and its answer, from which a confidence is learned without labels."""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from swiftsure._lib.registry import Registry
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.confidences import mean_logprob
from swiftsure.losses.text import normalised

__all__ = ["ANSWER_FEATURES", "DEFAULT_ANSWER_FEATURES", "feature_values", "question_text"]

AnswerFeature = Callable[[str, Answer], float]
"""A function from a question's text and an answer to a finite number."""

REFUSALS = (
    r"\bI('m| am) (sorry|unable|not able)\b|\bI (cannot|can't|can not|won't)\b"
    r"|\bI (do not|don't) know\b|\bas an AI\b|\bnot enough (information|context)\b"
)
HEDGES = r"\b(maybe|perhaps|probably|possibly|likely|might|unsure|not sure|I think|I believe)\b"

_REFUSAL, _HEDGE = (re.compile(each, re.IGNORECASE) for each in (REFUSALS, HEDGES))

DIMENSIONS = 16
"""Length of the small embedding of a question."""


def question_text(value: Any) -> str:
    """Return the text of an input: itself, the last message, or the prompt of a request.

    Examples
    --------
    >>> question_text(
    ...     [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7?"}]
    ... )
    '7?'
    """
    if isinstance(value, Mapping):
        value = value.get("messages", value.get("prompt"))
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        last = value[-1]
        value = last.get("content") if isinstance(last, Mapping) else last
    if isinstance(value, list):  # parts of a message
        parts = [each.get("text") for each in value if isinstance(each, Mapping)]
        value = " ".join(each for each in parts if isinstance(each, str))
    return value if isinstance(value, str) else ""


def question_length(question: str, _answer: Answer) -> float:
    """Return the logarithm of the question's number of words."""
    return math.log1p(len(question.split()))


def answer_length(_question: str, answer: Answer) -> float:
    """Return the logarithm of the answer's number of words."""
    return math.log1p(len(str(answer.answer).split()))


def agreement(_question: str, answer: Answer) -> float:
    """Return the share of samples that give the answer, from `SelfConsistency`; else 0."""
    return answer.scores.get("agreement", 0.0)


def verdict(_question: str, answer: Answer) -> float:
    """Return what a verifier said, from `Verified`; else 0."""
    return answer.scores.get("verifier", 0.0)


def logprob(_question: str, answer: Answer) -> float:
    """Return the mean log-probability of the answer's tokens; 0 without log-probabilities."""
    found = mean_logprob(answer)
    return 0.0 if found is None else math.log(max(found, 1e-6))


def refusal(_question: str, answer: Answer) -> float:
    """Return 1 if the answer says that the model cannot answer, else 0.

    Examples
    --------
    >>> refusal("", Answer("I'm sorry, I don't know.")), refusal("", Answer("Paris"))
    (1.0, 0.0)
    """
    return float(_REFUSAL.search(str(answer.answer)) is not None)


def hedge(_question: str, answer: Answer) -> float:
    """Return 1 if the answer hedges, with words such as "perhaps", else 0."""
    return float(_HEDGE.search(str(answer.answer)) is not None)


def overlap(question: str, answer: Answer) -> float:
    """Return the share of the answer's words that the question has."""
    words = normalised(str(answer.answer)).split()
    known = set(normalised(question).split())
    return sum(word in known for word in words) / max(1, len(words))


def _embedding(k: int) -> AnswerFeature:
    def feature(question: str, _answer: Answer) -> float:
        return _embedded(question)[k]

    feature.__name__ = f"embedding {k}"
    return feature


@lru_cache(64)
def _embedded(question: str) -> tuple[float, ...]:
    """Return the sum of a random direction per word, the same in every process, of length 1."""
    total = [0.0] * DIMENSIONS
    for word in normalised(question).split():
        digest = hashlib.blake2b(word.encode(), digest_size=DIMENSIONS).digest()
        for k, byte in enumerate(digest):
            total[k] += byte - 127.5
    length = math.sqrt(math.fsum(each * each for each in total)) or 1.0
    return tuple(each / length for each in total)


EMBEDDING = tuple(f"embedding {k}" for k in range(DIMENSIONS))

ANSWER_FEATURES: Registry[AnswerFeature] = Registry(
    "features",
    question_length,
    answer_length,
    agreement,
    verdict,
    logprob,
    refusal,
    hedge,
    overlap,
    *map(_embedding, range(DIMENSIONS)),
)
"""Features by name; `ANSWER_FEATURES.register(function, name)` adds one."""

DEFAULT_ANSWER_FEATURES = (
    *("question_length", "answer_length", "agreement", "verdict", "logprob"),
    *("refusal", "hedge", "overlap"),
    *EMBEDDING,
)


def feature_values(names: Sequence[str], value: Any, answer: Answer) -> list[float]:
    """Return the features of an input and its answer, in the order of their names."""
    question = question_text(value)
    return [ANSWER_FEATURES.choose(name)(question, answer) for name in names]
