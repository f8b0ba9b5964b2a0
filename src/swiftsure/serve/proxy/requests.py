"""Which requests a policy covers: those with the options that its models were calibrated with."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from swiftsure.cascade.request_kinds import REQUESTS, unlike
from swiftsure.certify.slices import any_part
from swiftsure.serve.engine import AnyPolicy
from swiftsure.serve.openai import ApiRequest, Kind

__all__ = [
    "calibrated_features",
    "canonical",
    "not_covered_reason",
    "own_spelling",
    "same_json",
]

log = logging.getLogger("swiftsure.serve")

NEUTRAL = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", "user", "metadata", "store"}
    | {"logprobs", "top_logprobs", "n", "best_of", "service_tier", "safety_identifier"}
)
"""Fields on which the text of an answer does not depend, or that are checked apart."""

ALIASES = {"max_completion_tokens": "max_tokens"}
"""Parameters that mean the same as another one, whose name is used to compare them."""


def canonical(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with one name for those that mean the same.

    Examples
    --------
    >>> canonical({"max_completion_tokens": 5})
    {'max_tokens': 5}
    """
    return {ALIASES.get(name, name): value for name, value in parameters.items()}


def own_spelling(fields: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's fields with the names that a model's own parameters have.

    A model that got both names of one parameter would refuse the request.

    Examples
    --------
    >>> own_spelling({"max_tokens": 5}, {"max_completion_tokens": 9})
    {'max_completion_tokens': 5}
    """
    names = {ALIASES.get(name, name): name for name in parameters}
    return {names.get(ALIASES.get(name, name), name): value for name, value in fields.items()}


def not_covered_reason(
    request: ApiRequest,
    kinds: Collection[Kind],
    parameters: Mapping[str, Any],
    features: Collection[str] | None = None,
) -> str | None:
    """Return why a policy says nothing about a request; None if it covers it.

    Parameters
    ----------
    kinds : set of "chat" and "completions"
        Of the models that were calibrated. If they differ, no request is for all of them.
    parameters : mapping
        With which they were calibrated. A request may leave them out, or must have the same.
    features : set of str, optional
        What the messages of the calibration were like; see `cascade.request_kinds`.
    """
    fields = request.fields
    if {request.kind} != set(kinds):
        return f"the policy is for {' and '.join(sorted(kinds))}"
    for name in ("n", "best_of"):
        if not same_json(fields.get(name, 1), 1):
            return f"`{name}` is not 1"
    if request.kind == "completions" and not isinstance(fields["prompt"], str):
        return "`prompt` is not one text"
    known = canonical(parameters)
    for name, value in fields.items():
        if name in NEUTRAL:
            continue
        meant = ALIASES.get(name, name)
        if meant not in known:
            return f"`{name[:60]}` was not set when the policy was made"
        if not same_json(value, known[meant]):
            return f"`{name[:60]}` has another value than when the policy was made"
    return None if features is None else unlike(fields, features)


def calibrated_features(policy: AnyPolicy) -> frozenset[str] | None:
    """Return what the messages of the calibration were like; None if the policy does not say."""
    found = any_part(policy).settings.get(REQUESTS)
    if isinstance(found, list | tuple) and all(isinstance(each, str) for each in found):
        return frozenset(found)
    log.warning(
        "The policy does not say what its calibration's messages were like, so requests with other"
        " roles, images or system prompts cannot be told apart. Collect and calibrate again."
    )
    return None


def same_json(one: Any, other: Any) -> bool:
    """Return whether two values are the same in JSON, where true is not 1.

    Examples
    --------
    >>> same_json(0, 0.0), same_json(0, False)
    (True, False)
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_json(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
