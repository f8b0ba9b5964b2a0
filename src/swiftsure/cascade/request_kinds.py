"""What the messages of requests are like: roles, turns, images, tools and system prompts.

A policy is about requests like those of its calibration. Each request has a few features, such as
"content of type image_url" or "3 messages"; one that has a feature which no request of the
calibration had is unlike them.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from swiftsure.cascade.answer_log import input_digest
from swiftsure.certify.policy import Policy
from swiftsure.certify.slices import SlicedPolicy, any_part

__all__ = [
    "REQUESTS",
    "calibrated_features",
    "features_of_inputs",
    "request_features",
    "unlike",
]

REQUESTS = "requests"
"""Name of the features among the settings of a record and a policy."""

MOST_PROMPTS = 100
"""With more system prompts than this in a calibration, they vary, and any other is like them."""

ANY_PROMPT, LATE_PROMPT = "system prompt: any", "system prompt after other messages"

SYSTEM = ("system", "developer")


def request_features(value: Any) -> frozenset[str] | None:
    """Return the features of a request: a text, a list of messages, or a mapping with either.

    None if it is something else, such as the input of a function.

    Examples
    --------
    >>> for each in sorted(request_features("Is 7 prime?")):
    ...     print(each)
    1 message
    content of type text
    last message from user
    message from user
    system prompt: none
    """
    if isinstance(value, Mapping):
        value = value.get("messages", value.get("prompt"))
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list | tuple) or not messages:
        return None
    if not all(
        isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages
    ):
        return None
    found = {f"message from {each['role']}" for each in messages}
    for each in messages:
        found.update(_content_features(each.get("content")))
        more = each.keys() - {"role", "content"}
        found.update(f"message with {name}" for name in more if each[name] is not None)
    system = [each for each in messages if each["role"] in SYSTEM]
    if any(each["role"] in SYSTEM for each in messages[len(system) :]):
        found.add(LATE_PROMPT)
    prompt = input_digest([each.get("content") for each in system]) if system else "none"
    turns = len(messages) - len(system)
    found |= {
        f"system prompt: {prompt}",
        _turns(turns),
        f"last message from {messages[-1]['role']}",
    }
    return frozenset(found)


def features_of_inputs(inputs: Any) -> list[str] | None:
    """Return the features that requests may have to be like these; None if some are no requests."""
    if not isinstance(inputs, list | tuple):
        return None
    each = [request_features(value) for value in inputs]
    known = [found for found in each if found is not None]
    if not known or len(known) < len(each):
        return None
    found = frozenset[str]().union(*known)
    prompts = {name for name in found if _is_prompt(name)}
    if len(prompts) > MOST_PROMPTS:
        found = (found - prompts) | {ANY_PROMPT}
    turns = [int(name.split()[0]) for name in found if _is_turns(name)]
    return sorted(found | {_turns(n) for n in range(min(turns), max(turns) + 1)})


def calibrated_features(policy: Policy | SlicedPolicy | None) -> frozenset[str] | None:
    """Return what the messages of a policy's calibration were like; None if it does not say."""
    found = None if policy is None else any_part(policy).settings.get(REQUESTS)
    if isinstance(found, list | tuple) and all(isinstance(each, str) for each in found):
        return frozenset(found)
    return None


def unlike(value: Any, features: Collection[str]) -> str | None:
    """Return how a request differs from those that have these features; None if it does not.

    Examples
    --------
    >>> known = features_of_inputs(["Is 7 prime?", "Is 8 prime?"])
    >>> unlike("Is 9 prime?", known) is None
    True
    >>> unlike([{"role": "user", "content": [{"type": "image_url"}]}], known)
    'the calibration had no content of type image_url'
    """
    found = request_features(value)
    if found is None:
        return "its messages have another form than those of the calibration"
    other = sorted(found - frozenset(features))
    if ANY_PROMPT in features:
        other = [name for name in other if not _is_prompt(name)]
    if not other:
        return None
    if any(_is_prompt(name) for name in other):
        return "the calibration had no such system prompt"
    counted = next((name for name in other if _is_turns(name)), None)
    if counted is not None:
        return "the calibration had no conversation of this length"
    return f"the calibration had no {other[0][:60]}"


def _content_features(content: Any) -> Iterable[str]:
    if isinstance(content, str):
        return ["content of type text"]
    if content is None:
        return ["message without content"]
    if not isinstance(content, list | tuple):
        return ["content of this form"]
    kinds = [each.get("type") if isinstance(each, Mapping) else None for each in content]
    return [
        f"content of type {kind}" if isinstance(kind, str) else "such content" for kind in kinds
    ]


def _turns(n: int) -> str:
    return f"{n} message{'s' * (n != 1)}"


def _is_turns(name: str) -> bool:
    return name.endswith((" message", " messages")) and name[0].isdigit()


def _is_prompt(name: str) -> bool:
    return name.startswith("system prompt: ")
