"""Losses for generated text: exact match, multiple choice, ROUGE-L, token-F1, sentence BLEU.

Each is 1 minus a score in [0, 1]; those of exact match and multiple choice are 0 or 1.

Predictions are texts, (n, n_settings), with the full model's in the last column. Labels are one or
several reference texts per sample; the best match counts. Equal texts have loss 0, even if both are
empty.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.losses.base import LOSSES, Loss, LossRange

__all__ = [
    "BLEU",
    "CHOICE",
    "EXACT_MATCH",
    "ROUGE_L",
    "TOKEN_F1",
    "bleu",
    "chosen_option",
    "exact_match",
    "multiple_choice",
    "normalised",
    "rouge_l",
    "token_f1",
]

Array = NDArray[Any]
Score = Callable[[str, Sequence[str]], float]
"""A function from a text and its references to a score in [0, 1]."""


def rouge_l(text: str, references: Sequence[str]) -> float:
    """Return ROUGE-L, the F-measure of the longest common subsequence of stemmed words."""
    return max(float(_rouge().score(each, text)["rougeL"].fmeasure) for each in references)


def token_f1(text: str, references: Sequence[str]) -> float:
    """Return the F1 of words as in SQuAD's evaluation: lower case, no punctuation or articles.

    Examples
    --------
    >>> round(token_f1("The Eiffel Tower, Paris", ["eiffel tower"]), 3)
    0.8
    """
    return max(_f1(_squad_words(text), _squad_words(each)) for each in references)


def exact_match(text: str, references: Sequence[str]) -> float:
    """Return 1 if the text equals a reference after SQuAD's normalisation, else 0.

    Case, punctuation, articles and spaces do not matter.

    Examples
    --------
    >>> exact_match("The Eiffel Tower.", ["eiffel tower"]), exact_match("Big Ben", ["eiffel tower"])
    (1.0, 0.0)
    """
    return float(normalised(text) in [normalised(each) for each in references])


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and extra spaces."""
    return " ".join(_squad_words(text))


OPTION = re.compile(
    r"(?:answer|option|choice)(?:\s+is)?\s*:?\s*\**\(?([A-Za-z])\b(?![\w'])"
    r"|^\W*([A-Za-z])(?=[).:,\]*]|\s*$)",
    re.IGNORECASE | re.MULTILINE,
)
"""How texts name an option of a multiple-choice question: "B", "(b) Paris", "The answer is B."."""


def chosen_option(text: str) -> str | None:
    """Return the letter of the option that a text chooses, in upper case; None if it names none.

    The last mention counts, because reasoning comes before the answer.

    Examples
    --------
    >>> chosen_option("(b) Paris"), chosen_option("So the answer is **C**."), chosen_option("Hm.")
    ('B', 'C', None)
    """
    found = [first or second for first, second in OPTION.findall(text)]
    return found[-1].upper() if found else None


def multiple_choice(text: str, references: Sequence[str]) -> float:
    """Return 1 if the text chooses the option of a reference, else 0."""
    option = chosen_option(text)
    return float(option is not None and option in [chosen_option(each) for each in references])


def bleu(text: str, references: Sequence[str]) -> float:
    """Return sacrebleu's sentence BLEU / 100, with exponential smoothing and effective order."""
    score = _sentence_bleu().sentence_score(text, list(references)).score
    return min(max(float(score) / 100.0, 0.0), 1.0)


def _f1(words: list[str], expected: list[str]) -> float:
    if not words or not expected:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2.0 * common / (len(words) + len(expected))


def _squad_words(text: str) -> list[str]:
    plain = "".join(each for each in text.lower() if each not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


@cache
def _rouge() -> Any:
    module = _package("rouge_score.rouge_scorer", "rouge_l", "rouge-score")
    return module.RougeScorer(["rougeL"], use_stemmer=True)


@cache
def _sentence_bleu() -> Any:
    return _package("sacrebleu", "bleu", "sacrebleu").BLEU(effective_order=True)


def _package(module: str, loss: str, name: str) -> Any:
    """Import a package that a loss needs; the error says how to install it."""
    try:
        return import_module(module)
    except ImportError:
        raise ImportError(f"Loss {loss!r} needs {name}: pip install 'swiftsure[text]'.") from None


def _table(score: Score, texts: list[list[str]], references: list[list[str]]) -> Array:
    """Return 1 minus the score of every text; equal texts of one sample are scored once."""
    rows = []
    for row, expected in zip(texts, references, strict=True):
        known = {text: _loss(score, text, expected) for text in dict.fromkeys(row)}
        rows.append([known[text] for text in row])
    return np.asarray(rows, np.float64)


def _loss(score: Score, text: str, references: list[str]) -> float:
    return 0.0 if text in references else 1.0 - score(text, references)


def _texts(predictions: Any) -> list[list[str]]:
    rows = [list(row) for row in predictions]
    if not all(isinstance(text, str) for row in rows for text in row):
        raise TypeError(
            "`predictions` must hold texts, (n, n_settings): this loss compares generated text."
        )
    return rows


def _references(given: str | Iterable[str]) -> list[str]:
    found = [given] if isinstance(given, str) else list(given)
    if not found or not all(isinstance(each, str) for each in found):
        raise ValueError(f"`labels` must be a text, or several, a sample, but got {given!r}.")
    return found


def _text_loss(name: str, score: Score, whole: bool = False) -> Loss:
    def against_labels(predictions: Array, labels: Any) -> Array:
        texts = _texts(predictions)
        references = [_references(each) for each in labels]
        if len(references) != len(texts):
            raise ValueError(
                f"`labels` must be one a sample, {len(texts)}, but got {len(references)}."
            )
        return _table(score, texts, references)

    def against_last(predictions: Array) -> Array:
        texts = _texts(predictions)
        return _table(score, texts, [[row[-1]] for row in texts])

    declared = LossRange(0, 1, whole=whole)
    return LOSSES.register(Loss(name, declared, "prediction", against_labels, against_last))


ROUGE_L = _text_loss("rouge_l", rouge_l)
TOKEN_F1 = _text_loss("token_f1", token_f1)
BLEU = _text_loss("bleu", bleu)
EXACT_MATCH = _text_loss("exact_match", exact_match, whole=True)
CHOICE = _text_loss("choice", multiple_choice, whole=True)
