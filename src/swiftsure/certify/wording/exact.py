"""Promises in exact terms, and why nothing is certified."""

import math
from typing import TYPE_CHECKING

from swiftsure.certify.bounds import minimum_samples
from swiftsure.certify.wording.measures import WORDS, risk_words
from swiftsure.certify.wording.numbers import (
    joined,
    labelled,
    percent,
    rounded_up,
    slice_names,
    surety,
)
from swiftsure.curves.risks import RISKS
from swiftsure.losses import LossRange

if TYPE_CHECKING:
    from swiftsure.certify.certificate import Certificate, PromiseResult, Selection

__all__ = [
    "always_full",
    "averaged",
    "fewest_samples",
    "holds_twofold",
    "promise_name",
    "promise_sentence",
    "promise_words",
    "selection_words",
]


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
        over += f" ({whose} {labelled(labels, samples.unit)})"
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
    listed = joined([f"{name} ({n:,})" for name, n in slices.items()])
    return f"in each of the slices {listed} at once, and so in every mixture of them, "


def _risks(certificate: "Certificate") -> str:
    """Return all that is bounded; what holds in every slice apart from what holds over all."""
    bounded: dict[bool, list[str]] = {True: [], False: []}
    mixed = holds_twofold(certificate)
    for each in certificate.promises:
        text = f"{averaged(certificate, each, 'the expected')} is at most"
        overall = mixed and each.within is None
        bounded[not overall].append(f"{text} {rounded_up(each.epsilon)}")
    for name, limit in certificate.max_costs.items():
        bounded[not mixed].append(f"the mean {name} is at most {rounded_up(limit)}")
    parts = [_where(certificate) + " and ".join(bounded[True])]
    if bounded[False]:
        parts.append("over all samples together, " + " and ".join(bounded[False]))
    return ", and ".join(parts)


def averaged(certificate: "Certificate", promise: "PromiseResult", article: str = "the") -> str:
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
    if promise.kind:
        return WORDS[promise.kind].exact(promise, str(promise), weighted) + counted
    if certificate.samples.unit == "samples":
        return f"{article} {promise}{weighted}"
    if certificate.samples.average == "group":
        return f"the average over groups of each group's average {promise}{weighted}{counted}"
    return f"the average {promise} per sample{weighted}{counted}"


def promise_name(promise: "PromiseResult") -> str:
    """Return a loss and its bounded quantity, such as "zero_one gap" or "brier gap of exits"."""
    words = risk_words(promise.loss, promise.risk, promise)
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
        how = f"on {selection.n_pilot:,} pilot {selection.unit} that were not used to calibrate"
    else:
        how = f"each tested at δ / {k}, so that all their promises hold at once"
    return f"chosen for its {selection.cost} among {k} candidates, {how}"


def _budget_in_full(certificate: "Certificate") -> str:
    promise, samples = certificate.promises[0], certificate.samples
    if promise.upper_bound is None:  # nothing was tested
        return "the budget allows it"
    return (
        f"for the setting that meets the budget, no level of {averaged(certificate, promise)}"
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
            f" ({joined(dearer)}, on the calibration {certificate.samples.unit})" if dearer else ""
        )
        return f"the setting that was certified costs more than the full model alone{numbers}"
    goals = " and ".join(
        f"{averaged(certificate, p)} within {p.epsilon:g}" for p in certificate.promises
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
        few = joined([f"{name} ({n:,})" for name, n in certificate.samples.small_slices.items()])
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
        have = labelled(certificate.samples.labels or 0, certificate.samples.unit)
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


def holds_twofold(certificate: "Certificate") -> bool:
    """Return whether some promises hold in every slice, and others over all samples only."""
    within = {each.within is not None for each in certificate.promises}
    within |= {False} if certificate.max_costs else set()
    return len(within) == 2


def always_full(certificate: "Certificate") -> str:
    """Return why the full model always runs, as a sentence."""
    reason = _budget_in_full if certificate.by_budget else _nothing_certified
    best = certificate.selection
    among = "" if best is None else f" of the candidate {best.chosen!r} ({best})"
    return f"Always runs the full model{among}: {reason(certificate)}."
