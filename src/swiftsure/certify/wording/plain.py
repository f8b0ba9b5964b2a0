"""Promises without symbols, for a reader outside machine learning."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from swiftsure.certify.wording.exact import holds_twofold, promise_words
from swiftsure.certify.wording.measures import WORDS
from swiftsure.certify.wording.numbers import (
    joined,
    rounded_up,
    slice_names,
    surety,
    times_100,
)
from swiftsure.curves.statistic import ZERO_BOUNDED

if TYPE_CHECKING:
    from swiftsure.certify.certificate import Certificate, PromiseResult

__all__ = ["LOSS_WORDS", "plain_promises", "strength"]


class _Counted(NamedTuple):
    """Words for a loss that counts failures; its mean times 100 is a number of them."""

    one: str
    many: str
    per: str = "100"


class _Measured(NamedTuple):
    """Words for a loss that measures: its noun, and where a larger loss moves it."""

    noun: str
    worse: str = "higher"
    scale: int = 1


LOSS_WORDS: Mapping[str, _Counted | _Measured] = {
    "zero_one": _Counted("wrong answer", "wrong answers"),
    "exact_match": _Counted("answer without an exact match", "answers without an exact match"),
    "acc": _Counted("wrong answer", "wrong answers"),
    "acc_norm": _Counted("wrong answer", "wrong answers"),
    "accuracy": _Counted("wrong answer", "wrong answers"),
    "choice": _Counted("wrong choice", "wrong choices"),
    "token_error": _Counted("wrong tag", "wrong tags", "100 tokens of a sequence"),
    "brier": _Measured("Brier score"),
    "pixel_brier": _Measured("Brier score of pixels"),
    "miou": _Measured("mIoU of an image", "lower", 100),
    "bleu": _Measured("sentence BLEU", "lower", 100),
    "rouge_l": _Measured("ROUGE-L", "lower", 100),
    "f1": _Measured("F1", "lower", 100),
    "token_f1": _Measured("F1 of tokens", "lower", 100),
    "span_f1": _Measured("F1 of extracted answers", "lower", 100),
    "lpips": _Measured("LPIPS"),
    "mse": _Measured("squared error"),
}
"""Losses in words that a reader outside machine learning knows; others go by their names."""

OPPOSITE = {"higher": "lower", "lower": "higher"}


def _plain_promise(promise: "PromiseResult", inputs: str, most: float = 1.0) -> str:
    """Return one promise as a clause without symbols; `most` is the largest weight."""
    words = LOSS_WORDS.get(promise.loss)
    scaled = isinstance(words, _Counted) or (words is not None and words.scale > 1)
    if scaled and promise.loss_range[1] > most:  # a loss of its own by that name
        words = None
    kind = promise.risk.removeprefix(ZERO_BOUNDED)
    gap = promise.relative and kind == "gap"
    measure = WORDS[promise.kind]
    where = (
        measure.whose(promise, inputs) or "among the inputs that exit early, " * promise.selective
    )
    if promise.kind == "above":
        return where + _tail(promise, words if gap else None, inputs)
    if measure.plain is not None:
        what = measure.plain(promise, promise_words(promise))
        return f"{where}{what} is at most {rounded_up(promise.epsilon)}"
    if gap and isinstance(words, _Counted):
        return where + _more_failures(words, promise.epsilon, kind != promise.risk)
    if gap:
        measured = words if isinstance(words, _Measured) else _Measured(promise.loss)
        by = _difference(promise.epsilon, measured)
        better = ", with inputs where it is better counted as equal" * (kind != promise.risk)
        return f"{where}its mean {measured.noun} is {by} than the full model's{better}"
    if promise.relative and kind == "consistency":
        if isinstance(words, _Counted):
            what = "tags" if promise.loss == "token_error" else "answers"
            return (
                f"{where}at most {times_100(promise.epsilon)} of its {what} per {words.per} differ"
                " from the full model's, on average"
            )
        noun = words.noun if words is not None and words.worse == "higher" else promise.loss
        return (
            f"{where}the mean {noun} of its outputs against the full model's is at most"
            f" {rounded_up(promise.epsilon)}"
        )
    noun = promise_words(promise) if promise.relative else promise.loss
    return f"{where}its mean {noun} is at most {rounded_up(promise.epsilon)}"


def _tail(promise: "PromiseResult", words: _Counted | _Measured | None, inputs: str) -> str:
    """Return how often a loss is above a limit, as a clause."""
    often = f"at most {times_100(promise.epsilon)} of 100 {inputs} have a"
    limit = promise.above or 0.0
    if not isinstance(words, _Measured) or promise.risk.startswith(ZERO_BOUNDED):
        return f"{often} {promise_words(promise)} above {rounded_up(limit)}"
    by = _difference(limit, words).replace("at most", "more than")
    return f"{often} {words.noun} {by} than the full model's"


def _difference(level: float, words: _Measured) -> str:
    """Return how far a mean may be from the full model's.

    Examples
    --------
    >>> _difference(0.02, _Measured("BLEU", "lower", 100)), _difference(-0.5, _Measured("Brier"))
    ('at most 2 points lower', 'at least 0.5 lower')
    """
    rounded = times_100(level) if words.scale == 100 else rounded_up(level)
    size = rounded.removeprefix("-")
    points = "" if words.scale == 1 else " point" if size == "1" else " points"
    if level < 0:
        return f"at least {size}{points} {OPPOSITE[words.worse]}"
    return f"at most {size}{points} {words.worse}"


def _more_failures(words: _Counted, level: float, only_worse: bool) -> str:
    count = times_100(level).removeprefix("-")
    what = words.one if count == "1" else words.many
    if level < 0:
        return (
            f"it gives at least {count} fewer {what} per {words.per} than the full model, on"
            " average"
        )
    if only_worse:
        return (
            f"it gives at most {count} {what} per {words.per} where the full model gives none, on"
            " average"
        )
    return f"it gives at most {count} more {what} per {words.per} than the full model, on average"


def plain_promises(certificate: "Certificate", word: str = "inputs") -> str:
    """Return all promises as one sentence, without its full stop; `word` is that for inputs."""
    samples = certificate.samples
    inputs = "groups" if samples.average == "group" else word
    most = samples.max_weight or 1.0
    mixed = holds_twofold(certificate)
    clauses = []
    for each in certificate.promises:
        text = _plain_promise(each, inputs, most)
        if mixed:
            within = each.within is not None
            where = (
                f"in {_each_slice(samples.slices or {})}" if within else "over all slices together"
            )
            text = f"{where}, {text}"
        clauses.append(text)
    clauses += [
        "over all slices together, " * mixed + f"its mean {name} is at most {rounded_up(limit)}"
        for name, limit in certificate.max_costs.items()
    ]
    text = ", and ".join(clauses)
    return f"{text}, {_whose_inputs(certificate, word)}"


def _whose_inputs(certificate: "Certificate", word: str) -> str:
    """Return which inputs a promise is about, as the end of a clause."""
    samples = certificate.samples
    n, slices = f"{samples.n:,}", samples.slices
    so_far = " so far, at every moment of the calibration" * (samples.horizon is not None)
    if samples.population is not None:
        return (
            f"over the finite population of {samples.population:,} {samples.unit} that the {n} it"
            " was calibrated on were drawn from"
        )
    where = ""
    if slices is not None and not holds_twofold(certificate):
        one = len(slices) == 1
        where = f" of {slice_names(slices)}" if one else f" in {_each_slice(slices)}"
    if samples.max_weight is not None:
        return (
            f"for {word}{where} of the distribution that the weights describe (it was calibrated on"
            f" {n} {samples.unit} of another{so_far})"
        )
    if samples.average == "group":
        return (
            f"for groups of inputs{where} like the {n} it was calibrated on{so_far}, where every"
            " group counts the same, whatever its size"
        )
    if samples.unit == "groups":
        return (
            f"for inputs{where} in groups like the {n} it was calibrated on{so_far}, where every"
            " input counts the same"
        )
    return f"for {word}{where} like the {n} it was calibrated on{so_far}"


def _each_slice(slices: Mapping[str, int]) -> str:
    return f"each of the slices {joined(list(slices))}"


def strength(certificate: "Certificate") -> str:
    """Return how sure the promise is, as the end of a sentence."""
    if certificate.guarantee == "expectation":
        return "; this holds on average over calibration sets, not for each"
    several = len(certificate.promises) + len(certificate.max_costs) > 1
    return f"; {surety(certificate)} sure" + " of all this together" * several
