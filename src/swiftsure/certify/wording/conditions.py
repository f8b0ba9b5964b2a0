"""Conditions in words: what each key may hold, its clause, and what voids a promise."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import PlainSerializer, PlainValidator

from swiftsure.curves.conditions import Condition
from swiftsure.curves.risks import RISKS, risk_noun

if TYPE_CHECKING:
    from swiftsure.certify.certificate import Certificate

__all__ = ["KnownCondition", "condition_texts", "known_condition", "voids"]


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
    "score pilot": _Kind(
        {"n": int},
        lambda n: (
            f"none of the {n:,} samples that the score was learned on, and none of their groups,"
            " also calibrates"
            if n
            else "the score was learned on other samples than the calibration's"
        ),
        "a pilot that also calibrates",
    ),
    "router pilot": _Kind(
        {"n": int},
        lambda n: (
            f"none of the {n:,} samples that the router was learned on, and none of their groups,"
            " also calibrates"
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
        if isinstance(fact, int | float):
            fits &= 0 <= fact < math.inf
        if not fits:
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
