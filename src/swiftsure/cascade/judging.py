"""`Judge`: a loss that another model gives, a function or an endpoint."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from swiftsure._lib import checks
from swiftsure.cascade.answers import Answer, plain
from swiftsure.cascade.models import CallableModel, Model, model_of
from swiftsure.losses import LossRange

__all__ = ["Judge", "judge_tables"]

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")

PROMPT = """Grade the answer to the question. Reply with one number and nothing else: {low:g} for a
wrong answer, {high:g} for a right one, or something in between.

Question: {input}
Reference answer: {label}
Answer: {answer}
Grade:"""


@dataclass(frozen=True, eq=False)
class Judge:
    """A bounded loss from a model that grades answers.

    Its loss is 0 for the best grade and 1 for the worst. Grades are asked for once and kept, like
    answers. A reply without a number counts as the worst grade for an early model and as the best
    for the last one, which can only make the promise more cautious.

    Parameters
    ----------
    model : callable or Endpoint
        A function of a mapping with `input`, `answer` and `label` (None without labels; against the
        last model, its answer) to a grade; or an endpoint, which gets `prompt`.
    low, high : float
        Worst and best grade.
    prompt : str
        For an endpoint; `{input}`, `{answer}`, `{label}`, `{low}` and `{high}` are filled in.
    name : str
        Name of the loss.
    """

    model: Any
    low: float = 0.0
    high: float = 1.0
    prompt: str = PROMPT
    name: str = "judge"

    def __post_init__(self) -> None:
        """Check the bounds."""
        if not np.isfinite([self.low, self.high]).all() or not self.low < self.high:
            raise ValueError(f"`low` must be below `high`, but got {self.low:g}, {self.high:g}.")

    @property
    def range(self) -> LossRange:
        """The declared range of the loss."""
        return LossRange(0.0, 1.0)

    def grader(self) -> Model:
        """Return the model that grades."""
        return model_of(self.model, self.name)

    def question(self, value: Any, answer: Any, label: Any) -> Any:
        """Return the grader's input."""
        asked = {"input": value, "answer": answer, "label": label}
        if isinstance(self.grader(), CallableModel):
            return asked
        text = self.prompt.replace("{low:g}", f"{self.low:g}").replace("{high:g}", f"{self.high:g}")
        for name, content in asked.items():
            text = text.replace(f"{{{name}}}", "(none)" if content is None else str(content))
        return text

    def loss(self, reply: Answer) -> float:
        """Return the loss of a reply; NaN if it holds no number, or one out of bounds."""
        value = plain(reply.answer)
        if isinstance(value, str):
            found = NUMBER.findall(value)
            value = float(found[-1]) if found else np.nan
        grade = checks.number("grade", value)
        if not self.low <= grade <= self.high:  # also NaN
            return float("nan")
        return (self.high - grade) / (self.high - self.low)


def judge_tables(losses: list[list[float]]) -> Any:
    """Return a judge's losses, (n, n_models), with the worst case where a grade is missing."""
    table = np.asarray(losses, np.float64)
    table[:, :-1] = np.where(np.isnan(table[:, :-1]), 1.0, table[:, :-1])
    table[:, -1] = np.where(np.isnan(table[:, -1]), 0.0, table[:, -1])
    return table
