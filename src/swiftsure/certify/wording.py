"""Wording: every sentence about what a policy promises, runs, rests on and saves.

| function | says |
|---|---|
| `headline` | what is promised and what runs, on one line |
| `statement` | the same, then what voids it, what is not promised, and the exact terms |
| `promise_sentence` | the exact probability statement |
| `condition_texts` | what the promise rests on |
"""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import PlainSerializer, PlainValidator

from swiftsure.certify.bounds import minimum_samples
from swiftsure.curves.conditions import Condition
from swiftsure.curves.curve import ZERO_BOUNDED
from swiftsure.curves.risks import RISKS, risk_noun
from swiftsure.losses import LossRange

if TYPE_CHECKING:
    from swiftsure.certify.certificate import Certificate, PromiseResult, Selection
    from swiftsure.certify.policy import Policy

__all__ = [
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
    "slice_names",
    "statement",
    "surety",
    "voids",
]

# -------------------------------------------------------------------------------------- conditions


class _Kind(NamedTuple):
    """How conditions of one key are checked and worded."""

    facts: Mapping[str, Any]
    """The values that each fact may have, or its type."""
    text: Callable[..., str]
    """What is assumed, as a clause, from the facts."""
    voided_by: str
    """What voids a promise that rests on it."""


UNIT = ("samples", "groups")

DRAWS = {
    "same": "calibration and production {unit} are independent draws of one distribution",
    "slices": (
        "calibration and production {unit} of each slice are independent draws of the slice's own"
        " distribution"
    ),
    "weights": (
        "calibration {unit} are independent draws of one distribution, and production samples of"
        " another whose density, relative to the first, is the weight of each sample"
    ),
    "weighted slices": (
        "calibration {unit} of each slice are independent draws of one distribution, and production"
        " samples of the slice of another whose density, relative to the first, is proportional to"
        " the weight of each sample"
    ),
    "population": "calibration {unit} were drawn from the finite population without replacement",
}
FIXED = {
    "calibration": "path, losses, ε, δ and method were fixed before the calibration losses were"
    " seen",
    "growing": "path, losses, ε, δ, horizon and method were fixed before any calibration loss was"
    " seen",
    "budget": "path, losses, budget and method were fixed before the calibration losses were seen",
}
LOSS = {
    "at most": "no {what} exceeds {most:g}",
    "weight": "no weight exceeds {most:g}",
    "weighted": "no {what} times its weight exceeds {most:g}",
    "0 or 1": "every {what} is 0 or 1",
    "-1, 0 or 1": "every {what} is -1, 0 or 1",
    "above 0 is 1": "every {what} above 0 is 1",
}
ORDER = {
    "drawn": "the {unit} were tested in an order drawn at random from the operating system,"
    " independent of the data",
    "chose": "the {unit} that chose the setting were drawn at random, whatever the data",
    "given": "the calibration {unit} came in random order, or the seed was itself drawn at random,"
    " once",
    "added": "{unit} were added in an order that does not depend on their losses",
    "added in drawn order": "{unit} were added in an order that does not depend on their losses,"
    " each update in an order drawn at random",
}


def _draws(kind: str, unit: str, estimated: bool = False) -> str:
    text = DRAWS[kind].format(unit=unit)
    return text + " (they were estimated, and the promise holds as far as they are exact)" * (
        estimated
    )


def _loss(loss: str, risk: str, kind: str, most: float) -> str:
    what = f"{loss} {risk_noun(risk) if risk else ''}".rstrip()
    return LOSS[kind].format(what=what, most=most)


def _chosen_by_budget(cost: str, n: int, unit: str) -> str:
    source = f"{n:,} other {unit if n > 1 else unit.removesuffix('s')}" if n else "each setting"
    return f"{cost} costs of {source} chose the setting, and its risk's upper bound is the level"


CONDITIONS: Mapping[str, _Kind] = {
    "draws": _Kind(
        {"kind": tuple(DRAWS), "unit": UNIT, "estimated": (True, False)}, _draws, "other inputs"
    ),
    "chosen by budget": _Kind(
        {"cost": str, "n": int, "unit": UNIT}, _chosen_by_budget, "another choice of the setting"
    ),
    "fixed beforehand": _Kind(
        {"what": tuple(FIXED)},
        lambda what: FIXED[what],
        "a choice made after seeing results, such as another ε",
    ),
    "loss": _Kind(
        {"loss": str, "risk": (*RISKS, ""), "kind": tuple(LOSS), "most": float},
        _loss,
        "a loss out of its range",
    ),
    "number of samples": _Kind(
        {"unit": UNIT},
        lambda unit: f"the number of calibration {unit} was fixed before the model was run on them",
        "adding samples until the result pleases",
    ),
    "group size": _Kind(
        {"most": int},
        lambda most: f"no group has more than {most:,} samples, a limit fixed beforehand",
        "a larger group",
    ),
    "pilot": _Kind(
        {"unit": UNIT},
        lambda unit: (
            f"no {unit.removesuffix('s')} of the pilot that the path was learned on also calibrates"
        ),
        "a pilot that also calibrates",
    ),
    "labels missing": _Kind(
        {},
        lambda: "whether a sample's label is missing depends on that sample alone",
        "labels that are missing because of other samples",
    ),
    "temperatures": _Kind(
        {},
        lambda: "the temperatures were fitted on other samples than the calibration's",
        "temperatures fitted on the calibration samples",
    ),
    "split": _Kind(
        {"unit": UNIT},
        lambda unit: (
            f"the {unit} were split by a seed drawn at random from the operating system,"
            " independent of the data"
        ),
        "a choice among several splits",
    ),
    "split by seed": _Kind(
        {"seed": int, "unit": UNIT},
        lambda seed, unit: (
            f"the {unit} came in random order before they were split by seed {seed}, or that seed"
            " was itself drawn at random, once"
        ),
        "a seed of the split that was chosen",
    ),
    "order": _Kind(
        {"how": tuple(ORDER), "unit": UNIT},
        lambda how, unit: ORDER[how].format(unit=unit),
        "a choice among several orders of the samples",
    ),
}
"""Every condition that a certificate can state: its facts, its clause, and what voids it."""

OPTIONAL = {"estimated"}
"""Facts that may be left out."""


def known_condition(value: Any) -> Condition:
    """Return a condition whose key and facts are known; raise ValueError for any other."""
    condition = value if isinstance(value, Condition) else Condition.from_json(value)
    kind, facts = CONDITIONS.get(condition.key), dict(condition.facts)
    if kind is None:
        raise ValueError(f"a condition cannot be {condition.key!r}")
    missing = set(kind.facts) - OPTIONAL - set(facts)
    if missing or set(facts) - set(kind.facts):
        raise ValueError(f"the condition {condition.key!r} must have {', '.join(kind.facts)}")
    for name, fact in facts.items():
        allowed = kind.facts[name]
        fits = fact in allowed if isinstance(allowed, tuple) else type(fact) is allowed
        if not fits or (allowed in (int, float) and not 0 <= fact < math.inf):
            raise ValueError(f"{name} of the condition {condition.key!r} cannot be {fact!r}")
    return condition


KnownCondition = Annotated[
    Condition, PlainValidator(known_condition), PlainSerializer(lambda each: each.to_json())
]
"""A condition that this module can word, as JSON in files."""


def _condition_text(condition: Condition) -> str:
    return CONDITIONS[condition.key].text(**dict(condition.facts))


def condition_texts(certificate: "Certificate") -> tuple[str, ...]:
    """Return what the promise rests on, as clauses."""
    return tuple(_condition_text(each) for each in certificate.conditions)


UNBOUND = "not bound to a particular model, because its record has no fingerprint of one"


def voids(certificate: "Certificate") -> list[str]:
    """Return what voids the promise, and what is assumed instead."""
    found = [
        f"{CONDITIONS[each.key].voided_by}: it is assumed that {_condition_text(each)}"
        for each in certificate.conditions
    ]
    model = certificate.provenance.model
    whose = (
        f"(the policy is {UNBOUND})"
        if model is None
        else f"(fingerprint {model.removeprefix('sha256:')[:12]})"
    )
    found.append(
        "another or a changed model: it is assumed that the model is the one that these samples"
        f" came from {whose}"
    )
    return found


# ------------------------------------------------------------------------------------ plain promise


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
    "choice": _Counted("wrong choice", "wrong choices"),
    "token_error": _Counted("wrong tag", "wrong tags", "100 tokens of a sequence"),
    "brier": _Measured("Brier score"),
    "pixel_brier": _Measured("Brier score of pixels"),
    "miou": _Measured("mIoU of an image", "lower", 100),
    "bleu": _Measured("sentence BLEU", "lower", 100),
    "rouge_l": _Measured("ROUGE-L", "lower", 100),
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
    if promise.worst is not None:
        where = f"over the {_share(promise.worst)} of {inputs} where it does worst, "
    else:
        where = "among the inputs that exit early, " * promise.selective
        if promise.above is not None:
            return where + _tail(promise, words if gap else None, inputs)
    if gap and isinstance(words, _Counted):
        return where + _more_failures(words, promise.epsilon, kind != promise.risk)
    if gap:
        by = _difference(promise.epsilon, words or _Measured(promise.loss))
        better = ", with inputs where it is better counted as equal" * (kind != promise.risk)
        noun = promise.loss if words is None else words.noun
        return f"{where}its mean {noun} is {by} than the full model's{better}"
    if promise.relative and kind == "consistency":
        if isinstance(words, _Counted):
            what = "tags" if promise.loss == "token_error" else "answers"
            return (
                f"{where}at most {_times_100(promise.epsilon)} of its {what} per {words.per} differ"
                " from the full model's, on average"
            )
        noun = words.noun if words is not None and words.worse == "higher" else promise.loss
        return (
            f"{where}the mean {noun} of its outputs against the full model's is at most"
            f" {_rounded_up(promise.epsilon)}"
        )
    noun = promise_words(promise) if promise.relative else promise.loss
    return f"{where}its mean {noun} is at most {_rounded_up(promise.epsilon)}"


def _tail(promise: "PromiseResult", words: _Counted | _Measured | None, inputs: str) -> str:
    """Return how often a loss is above a limit, as a clause."""
    often = f"at most {_times_100(promise.epsilon)} of 100 {inputs} have a"
    limit = promise.above or 0.0
    if not isinstance(words, _Measured) or promise.risk.startswith(ZERO_BOUNDED):
        return f"{often} {promise_words(promise)} above {_rounded_up(limit)}"
    by = _difference(limit, words).replace("at most", "more than")
    return f"{often} {words.noun} {by} than the full model's"


def _difference(level: float, words: _Measured) -> str:
    """Return how far a mean may be from the full model's.

    Examples
    --------
    >>> _difference(0.02, _Measured("BLEU", "lower", 100)), _difference(-0.5, _Measured("Brier"))
    ('at most 2 points lower', 'at least 0.5 lower')
    """
    rounded = _times_100(level) if words.scale == 100 else _rounded_up(level)
    size = rounded.removeprefix("-")
    points = "" if words.scale == 1 else " point" if size == "1" else " points"
    if level < 0:
        return f"at least {size}{points} {OPPOSITE[words.worse]}"
    return f"at most {size}{points} {words.worse}"


def _more_failures(words: _Counted, level: float, only_worse: bool) -> str:
    count = _times_100(level).removeprefix("-")
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


def _times_100(level: float) -> str:
    """Return 100 times a level, rounded up.

    Examples
    --------
    >>> _times_100(0.07), _times_100(0.005), _times_100(0.01111051)
    ('7', '0.5', '1.11106')
    """
    return _rounded_up(float(Decimal(repr(float(level))) * 100))


def _plain_promises(certificate: "Certificate") -> str:
    """Return all promises as one sentence, without its full stop."""
    samples = certificate.samples
    inputs = "groups" if samples.average == "group" else "inputs"
    most = samples.max_weight or 1.0
    mixed = _within_and_overall(certificate)
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
        "over all slices together, " * mixed + f"its mean {name} is at most {_rounded_up(limit)}"
        for name, limit in certificate.max_costs.items()
    ]
    text = ", and ".join(clauses)
    return f"{text}, {_whose_inputs(certificate)}"


def _whose_inputs(certificate: "Certificate") -> str:
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
    if slices is not None and not _within_and_overall(certificate):
        one = len(slices) == 1
        where = f" of {slice_names(slices)}" if one else f" in {_each_slice(slices)}"
    if samples.max_weight is not None:
        return (
            f"for inputs{where} of the distribution that the weights describe (it was calibrated on"
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
    return f"for inputs{where} like the {n} it was calibrated on{so_far}"


def _within_and_overall(certificate: "Certificate") -> bool:
    """Return whether some promises hold in every slice, and others over all samples only."""
    within = {each.within is not None for each in certificate.promises}
    within |= {False} if certificate.max_costs else set()
    return len(within) == 2


def _each_slice(slices: Mapping[str, int]) -> str:
    return f"each of the slices {_and(list(slices))}"


def _strength(certificate: "Certificate") -> str:
    """Return how sure the promise is, as the end of a sentence."""
    if certificate.guarantee == "expectation":
        return "; this holds on average over calibration sets, not for each"
    several = len(certificate.promises) + len(certificate.max_costs) > 1
    return f"; {surety(certificate)} sure" + " of all this together" * several


# --------------------------------------------------------------------------------- the whole policy


def headline(policy: "Policy") -> str:
    """Return what a policy promises and what runs, in plain words on one line."""
    certificate = policy.certificate
    if policy.runs_full_model:
        return _one_line(_always_full(certificate))
    promised = _plain_promises(certificate)
    if certificate.guarantee == "none":
        promised = f"Nothing is promised: the aim was that {promised}"
    else:
        promised = promised[0].upper() + promised[1:] + _strength(certificate)
    return _one_line(f"{promised}. {_runs(policy)}.")


def statement(policy: "Policy") -> tuple[str, str]:
    """Return the headline, and everything else that is to be said; joined, they are the text."""
    certificate, head = policy.certificate, headline(policy)
    if policy.runs_full_model:
        return head, ""
    lines: list[str] = []
    if certificate.guarantee != "none":
        lines += ["What voids this:", *(f"- {each}." for each in voids(certificate))]
    elif certificate.provenance.model is None:
        lines.append(f"The policy is {UNBOUND}.")
    lines += ["Not promised:", *(f"- {each}." for each in not_promised(certificate))]
    exact = promise_sentence(certificate)
    lines += ["In exact terms:", f"- {exact[0].upper()}{exact[1:]}.", f"- {_tested(policy)}."]
    return head, "".join(f"\n{_one_line(line)}" for line in lines)


def _one_line(text: str) -> str:
    """Return text on one line: names of losses, costs and slices must not begin lines."""
    return " ".join(text.split())


def not_promised(certificate: "Certificate") -> list[str]:
    """Return what a reader may expect, but nothing here promises."""
    if certificate.guarantee == "none":
        return ["anything: this rule is for comparison"]
    slices = certificate.samples.slices
    parts = "any customer, class, group or other part of the inputs alone"
    if slices is not None:
        parts = "any part of the inputs smaller than, or other than, the slices named above"
    found = [f"any single answer: the promise is about {_averages_over(certificate)}", parts]
    if any(each.relative for each in certificate.promises):
        found.append("how good the full model is: the promise compares with it")
    promised = set(certificate.max_costs)
    measured = [name for name in certificate.costs.means if name not in promised]
    if measured:
        found.append("the saving, which was measured on the calibration samples")
    return [*found, "a changed model, or other inputs"]


def _averages_over(certificate: "Certificate") -> str:
    counted = {
        "a share of inputs" if each.above is not None and each.worst is None else "an average"
        for each in certificate.promises
    }
    return _and(sorted(counted))


def _tested(policy: "Policy") -> str:
    """Return which test chose the setting, in symbols."""
    certificate = policy.certificate
    bounds = _and(list(dict.fromkeys(str(each.bound) for each in certificate.promises)))
    levels = ", ".join(f"ε = {_rounded_up(each.epsilon)}" for each in certificate.promises)
    delta = "" if certificate.delta is None else f", δ = {certificate.delta:.12g}"
    bound = "" if bounds == "None" else f" with the {bounds} bound{'s' * (' and ' in bounds)}"
    seed = certificate.provenance.seed
    text = (
        f"Chosen by {certificate.control}{bound} among {certificate.n_settings:,} settings of the"
        f" path {certificate.path!r}: {levels}{delta}, n = {certificate.samples.n:,}"
        f" {certificate.samples.unit}"
    )
    text += "" if seed is None else f", seed {seed}"
    best = certificate.selection
    return text if best is None else f"{text}; {best}"


def _runs(policy: "Policy") -> str:
    """Return what runs, and how much of the full model that is, as a sentence."""
    certificate = policy.certificate
    best = certificate.selection
    among = "" if best is None else f", in the candidate {best.chosen!r}"
    return f"{_action(policy)}{among}{_needs(certificate)}"


SCORES = {"top1": "top-1 confidence", "confidence": "confidence"}


def _action(policy: "Policy") -> str:
    if policy.n_exits is None:
        return f"It runs at {_settings(policy.settings)}"
    sign = "above" if policy.strict else "at least"
    score = SCORES.get(policy.score or "", f"{policy.score} confidence")
    later = f", from exit {policy.min_exit + 1} on," if policy.min_exit else ""
    limit = number(policy.threshold)
    if isinstance(policy.threshold, tuple):
        limit = f"its own of {limit}"
    return (
        f"It exits at the first of {policy.n_exits} exits{later} with a {score} of {sign} {limit}"
    )


COST_WORDS = {"flops": "the FLOPs", "seconds": "the time", "exit": "the stages"}


def _needs(certificate: "Certificate") -> str:
    """Return the cost that is left, as the end of a sentence; stages only if no other is known."""
    costs, samples = certificate.costs, certificate.samples
    means = {name: pair for name, pair in costs.means.items() if pair[0] > 0}
    if len(means) > 1:
        means.pop("exit", None)
    shares = [
        f"{percent(here / full)} of {COST_WORDS.get(name, f'the {name}')}"
        for name, (full, here) in means.items()
    ]
    if not shares:
        return ""
    verb = "runs" if next(iter(means)) in ("flops", "exit") else "needs"
    where = "on the calibration samples"
    if certificate.by_budget:
        where = f"on all {samples.n_samples:,} samples of the record"
    if samples.average == "group":
        where = "on average over the calibration groups"
    if samples.max_weight is not None:
        where += ", by their weights"
    if costs.baseline == "first setting":
        where = f"against the first setting of the path, {where}"
    return f", and {verb} {_and(shares)} {where}"


def _always_full(certificate: "Certificate") -> str:
    reason = _budget_in_full if certificate.by_budget else _nothing_certified
    best = certificate.selection
    among = "" if best is None else f" of the candidate {best.chosen!r} ({best})"
    return f"Always runs the full model{among}: {reason(certificate)}."


# ----------------------------------------------------------------------------------- exact sentence


def promise_sentence(certificate: "Certificate") -> str:
    """Return the probability statement of a certificate."""
    risks, samples = _risks(certificate), certificate.samples
    if certificate.guarantee == "none":
        return f"no guarantee is made (the aim was that {risks})"
    over = f"over the draw of the {samples.n:,} calibration {samples.unit}"
    if samples.horizon is not None:
        over = (
            f"over the draw of all calibration {samples.unit}, at every moment of a calibration"
            f" that may grow for ever ({samples.n:,} {samples.unit} so far)"
        )
    if samples.pilot is not None:
        over += f" (the path was learned on {samples.pilot:,} others)"
    labels = samples.labels
    if labels is not None and labels < samples.n_samples:
        whose = "of which" if samples.unit == "samples" else "in which"
        over += f" ({whose} {_labelled(labels, samples.unit)})"
    if samples.population is not None:
        over += f" from a finite population of {samples.population:,}, on that population"
    if certificate.guarantee == "expectation":
        return f"on average {over}, {risks}"
    return f"with probability at least {surety(certificate)} {over}, {risks}"


def _where(certificate: "Certificate") -> str:
    """Return on which slices the promises hold, as the beginning of a clause."""
    slices = certificate.samples.slices
    if slices is None:
        return ""
    if len(slices) == 1:
        return f"on samples of {slice_names(slices)}, "
    listed = _and([f"{name} ({n:,})" for name, n in slices.items()])
    return f"in each of the slices {listed} at once, and so in every mixture of them, "


def _risks(certificate: "Certificate") -> str:
    """Return all that is bounded; what holds in every slice apart from what holds over all."""
    bounded: dict[bool, list[str]] = {True: [], False: []}
    mixed = _within_and_overall(certificate)
    for each in certificate.promises:
        text = f"{_averaged(certificate, each, 'the expected')} is at most"
        overall = mixed and each.within is None
        bounded[not overall].append(f"{text} {_rounded_up(each.epsilon)}")
    for name, limit in certificate.max_costs.items():
        bounded[not mixed].append(f"the mean {name} is at most {_rounded_up(limit)}")
    parts = [_where(certificate) + " and ".join(bounded[True])]
    if bounded[False]:
        parts.append("over all samples together, " + " and ".join(bounded[False]))
    return ", and ".join(parts)


def _averaged(certificate: "Certificate", promise: "PromiseResult", article: str = "the") -> str:
    """Return the quantity that is bounded; for groups, with what has equal weight."""
    weighted = " under the distribution that the weights describe" * (
        certificate.samples.max_weight is not None
    )
    counted = ""
    if certificate.samples.unit == "groups":
        counted = (
            " (every group counts the same, whatever its size)"
            if certificate.samples.average == "group"
            else " (every sample counts the same, whatever its group: the expected sum of a group"
            " over the expected size of a group)"
        )
    if promise.worst is not None:
        share = _share(promise.worst)
        return f"the mean {promise} of the worst {share} of samples{weighted}{counted}"
    if promise.above is not None:
        limit = _rounded_up(promise.above)
        return f"the probability{weighted} that the {promise} is above {limit}{counted}"
    if certificate.samples.unit == "samples":
        return f"{article} {promise}{weighted}"
    if certificate.samples.average == "group":
        return f"the average over groups of each group's average {promise}{weighted}{counted}"
    return f"the average {promise} per sample{weighted}{counted}"


def promise_name(promise: "PromiseResult") -> str:
    """Return a loss and its bounded quantity, such as "zero_one gap" or "brier gap of exits"."""
    words = risk_words(promise.loss, promise.risk, promise.above, promise.worst)
    return words + " of exits" * promise.selective


def promise_words(promise: "PromiseResult") -> str:
    """Return a loss and its bounded quantity, with the full model."""
    kind = RISKS.get(promise.risk)
    whose = " of the samples that exit early" * promise.selective
    if not promise.relative or kind is None:
        return f"{promise.loss}{whose}"
    return f"{promise.loss} {kind.phrase}{whose}"


def selection_words(selection: "Selection") -> str:
    """Return how a policy was chosen among several candidates, as a clause."""
    k = len(selection.candidates)
    if selection.method == "pilot":
        how = f"on {selection.n_pilot:,} pilot samples that were not used to calibrate"
    else:
        how = f"each tested at δ / {k}, so that all their promises hold at once"
    return f"chosen for its {selection.cost} among {k} candidates, {how}"


# ----------------------------------------------------------------------------------- why it is full


def _budget_in_full(certificate: "Certificate") -> str:
    promise, samples = certificate.promises[0], certificate.samples
    if promise.upper_bound is None:  # nothing was tested
        return "the budget allows it"
    return (
        f"for the setting that meets the budget, no level of {_averaged(certificate, promise)}"
        f" below {promise.epsilon:g} was certified with probability at least"
        f" {surety(certificate)} on {samples.n:,} calibration {samples.unit}"
    )


def _nothing_certified(certificate: "Certificate") -> str:
    if certificate.costs.not_worth:
        costs = certificate.costs.means
        dearer = [
            f"{here:.4g} {name} instead of {full:.4g}"
            + (f", {percent(here / full - 1)} more" if full else "")
            for name, here in certificate.costs.dearer.items()
            for full in (costs[name][0],)
        ]
        numbers = (
            f" ({_and(dearer)}, on the calibration {certificate.samples.unit})" if dearer else ""
        )
        return f"the setting that was certified costs more than the full model alone{numbers}"
    goals = " and ".join(
        f"{_averaged(certificate, p)} within {p.epsilon:g}" for p in certificate.promises
    )
    goals += "".join(f" and the mean {k} within {v:g}" for k, v in certificate.max_costs.items())
    verb = "found" if certificate.guarantee == "none" else "certified"
    text = f"nothing faster was {verb} to keep {goals}"
    if certificate.guarantee == "probability":
        text += f" with probability at least {surety(certificate)}"
    text += f" on {certificate.samples.n:,} calibration {certificate.samples.unit}"
    if certificate.samples.slices is not None:
        text += f" of {slice_names(certificate.samples.slices)}"
    if certificate.samples.small_slices:
        few = _and([f"{name} ({n:,})" for name, n in certificate.samples.small_slices.items()])
        text += (
            f", because too few samples are of {few}, with the numbers needed if every loss were 0"
            " (add samples, leave these slices out, or give each slice a setting of its own)"
        )
    fewest = fewest_samples(certificate)
    if fewest > certificate.samples.n:
        text += f" (even if every loss were 0, the tests here would need at least {fewest:,})"
    if not all(promise.relative for promise in certificate.promises):
        text += "; no promise is made about the full model"
    if certificate.stopped_at is not None:
        have = _labelled(certificate.samples.labels or 0, certificate.samples.unit)
        return f"{text}, of which {have}; label more, or allow a larger loss"
    return f"{text}; allow a larger loss, or calibrate on more {certificate.samples.unit}"


def fewest_samples(certificate: "Certificate") -> int:
    """Return how many samples the tests here need even if every loss is 0; 0 if unknown."""
    return max(_needed(certificate, promise) for promise in certificate.promises)


def _needed(certificate: "Certificate", promise: "PromiseResult") -> int:
    without_pool = certificate.guarantee == "probability" and certificate.samples.population is None
    if without_pool and certificate.delta is not None:
        declared = LossRange(*promise.loss_range)
        return minimum_samples(promise.epsilon, certificate.delta, declared) or 0
    if certificate.guarantee == "expectation" and certificate.options.get("method") != "ucb":
        return math.ceil(promise.loss_range[1] / promise.epsilon * (1 - 1e-14)) - 1
    return 0


# ---------------------------------------------------------------------------- numbers and fragments


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


def risk_words(loss: str, risk: str, above: float | None = None, worst: float | None = None) -> str:
    """Return a loss and its bounded quantity.

    Examples
    --------
    >>> risk_words("brier", "gap", above=0.1), risk_words("brier", "gap", above=0.0, worst=0.1)
    ('brier gap > 0.1', 'brier gap, worst 10 %')
    """
    tail = "" if above is None else f" > {_rounded_up(above)}"
    if worst is not None:
        tail = f", worst {_share(worst)}"
    return f"{loss} {risk_noun(risk)}{tail}"


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
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def surety(certificate: "Certificate") -> str:
    """Return 1 − δ with all its digits: rounding must not promise more."""
    return f"{100 * (1 - (certificate.delta or 0)):.12g} %"


def _share(share: float) -> str:
    """Return a share with all its digits: the mean of a smaller worst share is larger.

    Examples
    --------
    >>> _share(0.1), _share(0.1004)
    ('10 %', '10.04 %')
    """
    return f"{100 * share:.12g} %"


def _rounded_up(epsilon: float) -> str:
    """Return a level in up to 6 digits, rounded up: rounding must not promise more.

    Examples
    --------
    >>> _rounded_up(0.05), _rounded_up(0.01111051), _rounded_up(-0.01111059)
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
    return str(value["name"]) if "name" in value else f"({_settings(value)})"


def _settings(settings: Mapping[str, Any]) -> str:
    """Return the dials in words; for a dial with a name and details, only the name."""
    return ", ".join(f"{name} = {dial(value)}" for name, value in settings.items())


def _labelled(labels: int, unit: str) -> str:
    """Return how many are labelled, as a clause.

    Examples
    --------
    >>> _labelled(100, "samples"), _labelled(1, "groups")
    ('100 are labelled', '1 sample is labelled')
    """
    number = "none" if labels == 0 else f"{labels:,}"
    what = "" if unit == "samples" else " sample" if labels == 1 else " samples"
    return f"{number}{what} {'is' if labels == 1 else 'are'} labelled"


def slice_names(slices: Mapping[str, int]) -> str:
    """Return which slices a promise is about."""
    return f"{'slice' if len(slices) == 1 else 'the slices'} {_and(list(slices))}"


def _and(texts: list[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last
