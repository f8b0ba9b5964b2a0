"""Numbers and fragments of sentences; rounding never promises more."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiftsure.certify.certificate import Certificate

__all__ = [
    "average_sentence",
    "average_words",
    "dial",
    "joined",
    "labelled",
    "number",
    "one_line",
    "percent",
    "rounded_up",
    "setting_words",
    "share_words",
    "slice_names",
    "surety",
    "times_100",
]

AVERAGES = {
    "group": (
        "average of group averages",
        "Risks and costs are averages over groups of each group's average: every group counts the"
        " same, whatever its size.",
    ),
    "sample": (
        "average per sample of groups",
        "Risks and costs are averages per sample: every sample counts the same, whatever its"
        " group.",
    ),
}
"""What is averaged for grouped samples, in a few words and in a sentence."""


def average_words(unit: str, average: str) -> str:
    """Return how groups are averaged, for tables; "" for plain samples.

    Examples
    --------
    >>> average_words("groups", "group"), average_words("groups", "sample")
    ('average of group averages', 'average per sample of groups')
    """
    return "" if unit == "samples" else AVERAGES[average][0]


def average_sentence(unit: str, average: str) -> str:
    """Return a sentence on how groups are averaged; "" for plain samples."""
    return "" if unit == "samples" else AVERAGES[average][1]


def percent(share: float) -> str:
    """Return a fraction as a percentage without needless digits.

    Examples
    --------
    >>> percent(0.9), percent(0.333)
    ('90 %', '33.3 %')
    """
    # Sums differ in their last digit between processors, which must not decide a tie.
    return f"{round(100 * share, 9):.1f}".removesuffix(".0") + " %"


def surety(certificate: "Certificate") -> str:
    """Return 1 − δ with all its digits: rounding must not promise more."""
    return f"{100 * (1 - (certificate.delta or 0)):.12g} %"


def share_words(share: float) -> str:
    """Return a share with all its digits: the mean of a smaller worst share is larger.

    Examples
    --------
    >>> share_words(0.1), share_words(0.1004)
    ('10 %', '10.04 %')
    """
    return f"{100 * share:.12g} %"


def rounded_up(epsilon: float) -> str:
    """Return a level in up to 6 digits, rounded up: rounding must not promise more.

    Examples
    --------
    >>> rounded_up(0.05), rounded_up(0.01111051), rounded_up(-0.01111059)
    ('0.05', '0.0111106', '-0.0111105')
    """
    if float(f"{epsilon:g}") >= epsilon:
        return f"{epsilon:g}"
    unit = 10.0 ** (math.floor(math.log10(abs(epsilon))) - 5)
    return f"{math.ceil(epsilon / unit) * unit:g}"


def number(value: object, digits: int = 4) -> str:
    """Return a dial's value in as few digits as tell it apart, also from 1.

    Examples
    --------
    >>> number(0.74081), number(0.9999995), number(None)
    ('0.7408', '0.9999995', 'never')
    """
    if value is None:
        return "never"
    if isinstance(value, tuple):
        return f"({', '.join(number(each, digits) for each in value)})"
    if not isinstance(value, float):
        return str(value)
    for precision in range(digits, 17):
        text = f"{value:.{precision}g}"
        if abs(float(text) - value) <= 1e-3 * min(abs(value), abs(1 - value)):
            return text
    return repr(value)


def dial(value: Any) -> str:
    """Return the value of a dial in words; for one with a name and details, only the name."""
    if not isinstance(value, Mapping):
        return number(value, 6)
    return str(value["name"]) if "name" in value else f"({setting_words(value)})"


def setting_words(settings: Mapping[str, Any]) -> str:
    """Return the dials in words; for a dial with a name and details, only the name."""
    return ", ".join(f"{name} = {dial(value)}" for name, value in settings.items())


def labelled(labels: int, unit: str) -> str:
    """Return how many are labelled, as a clause.

    Examples
    --------
    >>> labelled(100, "samples"), labelled(1, "groups")
    ('100 are labelled', '1 sample is labelled')
    """
    number = "none" if labels == 0 else f"{labels:,}"
    what = "" if unit == "samples" else " sample" if labels == 1 else " samples"
    return f"{number}{what} {'is' if labels == 1 else 'are'} labelled"


def slice_names(slices: Mapping[str, int]) -> str:
    """Return which slices a promise is about."""
    return f"{'slice' if len(slices) == 1 else 'the slices'} {joined(list(slices))}"


def joined(texts: list[str]) -> str:
    """Return texts as a list in a sentence."""
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def one_line(text: str) -> str:
    """Return text on one line: names of losses, costs and slices must not begin lines."""
    return " ".join(text.split())


def times_100(level: float) -> str:
    """Return 100 times a level, rounded up.

    Examples
    --------
    >>> times_100(0.07), times_100(0.005), times_100(0.01111051)
    ('7', '0.5', '1.11106')
    """
    return rounded_up(float(Decimal(repr(float(level))) * 100))
