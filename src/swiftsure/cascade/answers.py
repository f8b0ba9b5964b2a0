"""`Answer`: what a model says to one input, how sure it is, and what the answer cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure import scores
from swiftsure._lib import checks

__all__ = ["UNIT", "Answer"]

UNIT = "cost"
"""Name of a cost that is given as a bare number."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A model's answer to one input.

    Parameters
    ----------
    answer : object
        A text, a class, a number, or anything else that JSON can hold.
    confidence : float, optional
        In [0, 1]. By default the largest of `probabilities`, or the geometric mean of the
        probabilities of the answer's tokens.
    cost : float or mapping, optional
        What the answer cost, by unit: `{"usd": 0.002, "tokens": 310}`; a bare number is "cost".
    probabilities : (n_classes,), optional
        Of a classifier's classes.
    logprobs : (n_tokens,), optional
        Natural log-probability of each token of a text.
    top_logprobs : sequence of mappings, optional
        At each token, log-probabilities of the most probable ones.
    scores : mapping, optional
        Other confidences in [0, 1], by name.
    version : str, optional
        Which version of the model gave it.
    response : object, optional
        What the model sent, as it came; not kept in files.

    Examples
    --------
    >>> Answer.of(("Paris", 0.9)).confidence
    0.9
    >>> Answer.of([0.25, 0.75]).answer
    1
    """

    answer: Any
    confidence: float | None = None
    cost: Mapping[str, float] = field(default_factory=dict)
    probabilities: NDArray[np.float64] | None = None
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Mapping[str, float], ...] | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    version: str | None = None
    response: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check every field and store its checked form."""
        given: Any = self.cost  # may be a number, or None
        cost = {} if given is None else given if isinstance(given, Mapping) else {UNIT: given}
        checked: dict[str, Any] = {
            "answer": plain(self.answer),
            "cost": {str(name): _cost(name, value) for name, value in cost.items()},
            "scores": {str(k): _confidence(f"scores['{k}']", v) for k, v in self.scores.items()},
        }
        if self.probabilities is not None:
            checked["probabilities"] = _distribution(self.probabilities)
        if self.logprobs is not None:
            checked["logprobs"] = tuple(_logprob(each) for each in self.logprobs)
        if self.top_logprobs is not None:
            checked["top_logprobs"] = tuple(
                {str(token): _logprob(value) for token, value in each.items()}
                for each in self.top_logprobs
            )
        if self.confidence is not None:
            checked["confidence"] = _confidence("confidence", self.confidence)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: Any, classes: Sequence[Any] | None = None) -> "Answer":
        """Return what a model returned as an Answer.

        Parameters
        ----------
        value : Answer, mapping, tuple, array or object
            A mapping has the fields of an Answer; a tuple is (answer, confidence) or
            (answer, confidence, cost). An array of at least 2 floats holds probabilities if they
            are at least 0 and sum to 1, else logits. Anything else is an answer without
            confidence, which only the last model may give.
        classes : sequence, optional
            Names of the classes of a distribution; by default their numbers.
        """
        if isinstance(value, Answer):
            return value
        if isinstance(value, Mapping) and "answer" in value:
            known = cls.__dataclass_fields__
            return cls(**{checks.choice("answer", name, known): v for name, v in value.items()})
        if isinstance(value, tuple) and 2 <= len(value) <= 3:
            return cls(*value)
        if _is_distribution(value):
            return cls.of_distribution(value, classes)
        return cls(value)

    @classmethod
    def of_distribution(cls, values: Any, classes: Sequence[Any] | None = None) -> "Answer":
        """Return the answer of a classifier, given its probabilities or logits."""
        array = checks.numbers("outputs", values, np.float64)
        checks.of_shape("outputs", array, {"n_classes": None})
        p = array
        if (array < 0).any() or abs(float(array.sum()) - 1.0) > 1e-3:
            p = scores.probabilities(array)
        best = int(array.argmax())
        return cls(best if classes is None else classes[best], probabilities=p)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set, as JSON can hold them."""
        content: dict[str, Any] = {"answer": self.answer}
        for name in ("confidence", "cost", "logprobs", "top_logprobs", "scores", "version"):
            value = getattr(self, name)
            if value is not None and value != {}:
                content[name] = value
        if self.probabilities is not None:
            content["probabilities"] = self.probabilities.tolist()
        return content


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it; NumPy's numbers and arrays become Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if hasattr(value, "detach"):
        return plain(value.detach().cpu().numpy())
    return value


def _is_distribution(value: Any) -> bool:
    if not (isinstance(value, list | tuple | np.ndarray) or hasattr(value, "detach")):
        return False
    try:
        array = checks.numbers("outputs", value)
    except (TypeError, ValueError):
        return False
    return array.ndim == 1 and len(array) >= 2 and array.dtype.kind == "f"


def _distribution(values: Any) -> NDArray[np.float64]:
    array = checks.finite("probabilities", checks.numbers("probabilities", values, np.float64))
    checks.of_shape("probabilities", array, {"n_classes": None})
    total = float(array.sum())
    if (array < 0).any() or abs(total - 1.0) > 1e-3:
        raise ValueError(f"`probabilities` must be at least 0 and sum to 1, but sum to {total:g}.")
    normalised: NDArray[np.float64] = array / total
    return normalised


def _confidence(name: str, value: Any) -> float:
    given = checks.number(name, plain(value))
    if not -1e-6 <= given <= 1 + 1e-6:  # also refuses NaN
        raise ValueError(f"`{name}` must be in [0, 1], but got {given:g}.")
    return min(max(given, 0.0), 1.0)


def _logprob(value: Any) -> float:
    if type(value) is float and -1e4 <= value <= 0.0:  # nearly all of hundreds in a response
        return value
    given = checks.number("logprobs", plain(value))
    if math.isnan(given) or given > 1e-3:
        raise ValueError(f"`logprobs` must be at most 0, but got {given:g}.")
    return max(min(given, 0.0), -1e4)  # JSON has no infinity


def _cost(name: str, value: Any) -> float:
    given = checks.number(f"cost['{name}']", plain(value))
    if not 0 <= given < math.inf:
        raise ValueError(f"`cost['{name}']` must be at least 0 and finite, but got {given:g}.")
    return given
