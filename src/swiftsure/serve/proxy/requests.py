"""Which requests a policy covers: those with the options that its models were calibrated with."""

from collections.abc import Collection, Mapping
from typing import Any

from swiftsure.cascade.request_kinds import unlike
from swiftsure.cascade.request_parameters import canonical, other_parameter, same_json
from swiftsure.serve.openai import ApiRequest, Kind

__all__ = ["not_covered_reason"]


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
    other = other_parameter(fields, canonical(parameters))
    return other or (None if features is None else unlike(fields, features))
