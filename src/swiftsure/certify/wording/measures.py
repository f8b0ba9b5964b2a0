"""Kinds of promises in words: what is averaged of a loss, in each place that says so."""

from collections.abc import Callable
from typing import NamedTuple

from swiftsure.certify.wording.numbers import rounded_up, share_words
from swiftsure.curves.measures import Measure
from swiftsure.curves.risks import risk_noun

__all__ = ["WORDS", "MeasureWords", "risk_words"]

Worded = Callable[[Measure, str], str]
"""(measure, words for the loss and the risk) -> words for what is averaged of it."""


class MeasureWords(NamedTuple):
    """Words for one kind of measure."""

    short: Worded
    """In a request: "P(brier gap > 0.1)"."""
    name: Worded
    """In tables, and as the name of what is watched: "brier gap > 0.1"."""
    exact: Callable[[Measure, str, str], str]
    """In exact terms, from the words for the quantity and for its weights."""
    request: Worded
    """As the command line reads it: "P(gap brier > 0.1)"."""
    watched: Worded = lambda _measure, what: f"the {what}"
    """In a monitor's sentences."""
    whose: Worded = lambda _measure, _inputs: ""
    """Whose losses count, as the beginning of a plain sentence, from the word for inputs."""
    plain: Worded | None = None
    """In a plain sentence: what is averaged, if it is neither a loss nor how often it is large."""
    averages: str = "an average"
    """What the promise is about, as opposed to a single answer."""


def _asked(measure: Measure, what: str) -> str:
    """Return a loss with what is asked of it, as the command line reads any measure."""
    return what + "".join(
        f" with {name}={value!r}" for name, value in measure.measure_values.items()
    )


def _worst_request(measure: Measure, what: str) -> str:
    text = f"worst {measure.worst!r} of {what}"
    return text + (f" above {measure.above!r}" if measure.above is not None else "")


WORDS = {
    "worst": MeasureWords(
        short=lambda measure, what: f"mean of the worst {measure.worst:g} of {what}",
        name=lambda measure, what: f"{what}, worst {share_words(measure.worst or 1.0)}",
        exact=lambda measure, what, weighted: (
            f"the mean {what} of the worst {share_words(measure.worst or 1.0)} of samples{weighted}"
        ),
        request=_worst_request,
        whose=lambda measure, inputs: (
            f"over the {share_words(measure.worst or 1.0)} of {inputs} where it does worst, "
        ),
    ),
    "above": MeasureWords(
        short=lambda measure, what: f"P({what} > {measure.above:g})",
        name=lambda measure, what: f"{what} > {rounded_up(measure.above or 0.0)}",
        exact=lambda measure, what, weighted: (
            f"the probability{weighted} that the {what} is above {rounded_up(measure.above or 0.0)}"
        ),
        request=lambda measure, what: f"P({what} > {measure.above!r})",
        watched=lambda measure, what: f"the share of losses above {measure.above:g} of the {what}",
        averages="a share of inputs",
    ),
    "": MeasureWords(
        short=lambda _, what: f"mean {what}",
        name=lambda _, what: what,
        exact=lambda _, what, weighted: f"the {what}{weighted}",
        request=_asked,
    ),
}
"""Words by the keys of `swiftsure.curves.measures.READINGS`."""


def risk_words(loss: str, risk: str, measure: Measure) -> str:
    """Return a loss and what is bounded of it.

    Examples
    --------
    >>> (
    ...     risk_words("brier", "gap", Measure(above=0.1)),
    ...     risk_words("brier", "gap", Measure(worst=0.1)),
    ... )
    ('brier gap > 0.1', 'brier gap, worst 10 %')
    """
    return WORDS[measure.kind].name(measure, f"{loss} {risk_noun(risk)}")
