"""What a policy says of itself: promise, what runs, what voids it, what is not promised."""

from typing import TYPE_CHECKING, Any

from swiftsure.certify.wording.conditions import UNBOUND, voids
from swiftsure.certify.wording.exact import always_full, promise_sentence
from swiftsure.certify.wording.measures import WORDS
from swiftsure.certify.wording.numbers import (
    joined,
    number,
    one_line,
    percent,
    rounded_up,
    setting_words,
)
from swiftsure.certify.wording.plain import plain_promises, strength
from swiftsure.records.routing import ROUTER

if TYPE_CHECKING:
    from swiftsure.certify.certificate import Certificate
    from swiftsure.certify.policy import Policy

__all__ = ["headline", "not_promised", "statement"]


def headline(policy: "Policy") -> str:
    """Return what a policy promises and what runs, in plain words on one line."""
    certificate = policy.certificate
    if policy.runs_full_model:
        return one_line(always_full(certificate))
    asked = policy.settings.get("system") in STOPPING and certificate.samples.unit == "samples"
    promised = plain_promises(certificate, "questions" if asked else "inputs")
    if certificate.guarantee == "none":
        promised = f"Nothing is promised: the aim was that {promised}"
    else:
        promised = promised[0].upper() + promised[1:] + strength(certificate)
    return one_line(f"{promised}. {_runs(policy)}.")


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
    return head, "".join(f"\n{one_line(line)}" for line in lines)


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
    return joined(sorted({WORDS[each.kind].averages for each in certificate.promises}))


def _tested(policy: "Policy") -> str:
    """Return which test chose the setting, in symbols."""
    certificate = policy.certificate
    bounds = joined(list(dict.fromkeys(str(each.bound) for each in certificate.promises)))
    levels = ", ".join(f"ε = {rounded_up(each.epsilon)}" for each in certificate.promises)
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


def score_words(score: str | None) -> str:
    """Return the name of a score in words."""
    if (score or "").startswith("learned-"):
        return "learned confidence"
    return SCORES.get(score or "", f"{score} confidence")


def _action(policy: "Policy") -> str:
    if policy.n_exits is None:
        return f"It runs at {setting_words(policy.settings)}"
    system = policy.settings.get("system")
    if system in STOPPING:
        return _stopping(policy, *STOPPING[system])
    sign = "above" if policy.strict else "at least"
    score = score_words(policy.score)
    later = f", from exit {policy.min_exit + 1} on," if policy.min_exit else ""
    if policy.threshold == 0 and not policy.strict:
        return f"It always takes exit {policy.min_exit + 1} of {policy.n_exits}{_better(policy)}"
    limit = number(policy.threshold)
    if isinstance(policy.threshold, tuple) and ROUTER in policy.settings:
        return _routes(policy, sign, score)
    if isinstance(policy.threshold, tuple):
        limit = f"its own of {limit}"
    return (
        f"It exits at the first of {policy.n_exits} exits{later} with a {score} of {sign} {limit}"
    )


def _routes(policy: "Policy", sign: str, score: str) -> str:
    """Return what a router and the exits behind it do."""
    threshold: Any = policy.threshold
    first, *levels = threshold
    own = number(levels[0]) if len(levels) == 1 else f"its own of {number(tuple(levels))}"
    kept = f"the first of {len(levels) + 1} exits with a {score} of {sign} {own}"
    if first is None:
        return f"It exits at {kept}"
    return (
        f"It sends inputs to which its router gives {sign} {number(first)} straight to the full"
        f" model, exits at {kept} on the others"
    )


STOPPING = {
    "thinking": ("stops thinking", "checkpoint", "thinks to the end"),
    "voting": ("stops sampling", "sample", "draws all samples"),
}
"""What a system does at its exits, what they are, and what it does otherwise."""


def _stopping(policy: "Policy", stops: str, place: str, otherwise: str) -> str:
    """Return when a system stops that thinks, or draws samples."""
    first, places = policy.min_exit + 1, (policy.n_exits or 1) - 1
    if policy.threshold == 0 and not policy.strict:
        return f"It always {stops} at {place} {first} of {places}{_better(policy)}"
    sign = "above" if policy.strict else "at least"
    limit = number(policy.threshold)
    if isinstance(policy.threshold, tuple):
        limit = f"its own of {limit}"
    return (
        f"It {stops} at the first of {places} {place}s{f', from {place} {first} on,' * (first > 1)}"
        f" where its {score_words(policy.score)} is {sign} {limit}, and {otherwise} if there is"
        " none"
    )


def _better(policy: "Policy") -> str:
    """Return by how much an exit that is always taken is better than the last, if it is."""
    certificate = policy.certificate
    promise, samples = certificate.promises[0], certificate.samples
    plain = promise.risk == "gap" and not promise.kind and not samples.max_weight
    if not plain or promise.calibration_risk >= 0:
        return ""
    return (
        f", which is better than the last (its mean {promise.loss} is lower by"
        f" {-promise.calibration_risk:.3g} on the calibration {samples.unit})"
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
    return f", and {verb} {joined(shares)} {where}"
