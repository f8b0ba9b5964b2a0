"""Parameters of requests: which are one, and which a policy does not cover."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["canonical", "in_common", "other_parameter", "own_spelling", "same_json"]

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


def other_parameter(fields: Mapping[str, Any], known: Mapping[str, Any]) -> str | None:
    """Return which parameter of a request the calibration did not have; None if there is none.

    Parameters
    ----------
    known : mapping
        Parameters of the calibration, by their canonical names. A request may leave them out.
    """
    for name, value in fields.items():
        if name in NEUTRAL:
            continue
        meant = ALIASES.get(name, name)
        if meant not in known:
            return f"`{name[:60]}` was not set when the policy was made"
        if not same_json(value, known[meant]):
            return f"`{name[:60]}` has another value than when the policy was made"
    return None


def in_common(parameters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parameters that all models have, with the same value, by canonical names.

    Examples
    --------
    >>> in_common([{"temperature": 0, "max_tokens": 5}, {"max_completion_tokens": 5}])
    {'max_tokens': 5}
    """
    first, *others = map(canonical, parameters)
    return {
        name: value
        for name, value in first.items()
        if all(name in each and same_json(each[name], value) for each in others)
    }


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
