"""Reads the answer in what a model wrote: after its thinking, or when it was asked on the way."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from swiftsure.cascade.answers import Answer

__all__ = ["options_answer", "read_answer"]

BOXED = re.compile(r"\\boxed\{\s*((?:[^{}]|\{[^{}]*\})*?)\s*\}")
SAID = re.compile(r"answer(?:\s+is)?\s*:?\s*\**\s*([^\n]+)", re.IGNORECASE)


def read_answer(text: str, prompt: str = "", options: Sequence[str] = ()) -> str | None:
    r"""Return the answer in a text; None if there is none that can be read.

    It is, in this order, what follows the text that asks for answers, the last `\boxed{}`, the last
    of the options, or what follows the last "answer is" or "answer:".

    Parameters
    ----------
    prompt : str
        The text that asks for an answer, which the model may have written itself.
    options : sequence of str
        The only answers that there are, if there are options.

    Examples
    --------
    >>> read_answer("So it is **\\boxed{42}**."), read_answer("I do not know.")
    ('42', None)
    >>> read_answer("Not (A), so (C).", options="ABCD")
    'C'
    """
    asked = prompt.strip()
    found: str | None = None
    if asked and asked in text:
        rest = text.rpartition(asked)[2]
        found = _until(rest, "}" if asked.endswith("{") else "\n")
    elif boxed := BOXED.findall(text):
        found = boxed[-1]
    elif options:
        marks = "|".join(re.escape(each) for each in options)
        every = re.findall(rf"(?<!\w)({marks})(?!\w)", text)
        found = every[-1] if every else None
    elif said := SAID.findall(text):
        found = said[-1].strip(" .*")
    if found is not None:
        found = found.strip()
    if options:
        return _option(found, options)
    return found or None


def _until(text: str, stop: str) -> str:
    return text.strip().partition(stop)[0]


def _option(text: str | None, options: Sequence[str]) -> str | None:
    plain = "" if text is None else text.strip(" ().*")
    return next((each for each in options if plain.upper() == each.upper()), None)


def options_answer(top: Sequence[Any], options: Sequence[str], cost: Any) -> Answer | None:
    """Return an answer with the probability of each option, from the first token's alternatives.

    Options that the server did not list have none; None if it listed no option at all.

    Examples
    --------
    >>> found = options_answer([{" A": -0.1, "B": -2.5, "so": -9}], "ABC", {})
    >>> found.answer, found.probabilities.round(2)
    ('A', array([0.92, 0.08, 0.  ]))
    """
    table = np.zeros(len(options))
    for token, logprob in (top[0] if top else {}).items():
        option = _option(token, options)
        if option is not None:
            table[list(options).index(option)] += np.exp(logprob)
    if not table.sum() > 0:
        return None
    return Answer(options[int(table.argmax())], cost=cost, probabilities=table / table.sum())
