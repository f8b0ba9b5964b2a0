"""Conditions: what a promise rests on, as small values; `swiftsure.certify.wording` words them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LABELS_MISSING", "Condition", "Fact", "dropped", "replaced"]

Fact = bool | int | float | str


@dataclass(frozen=True)
class Condition:
    """One thing that a promise rests on: what kind it is, and its facts.

    Conditions are added, replaced and dropped by key, never by position.

    Attributes
    ----------
    key : str
    facts : tuple of (str, value)
        Sorted by name.

    Examples
    --------
    >>> Condition.of("draws", unit="groups", kind="same")
    Condition(key='draws', facts=(('kind', 'same'), ('unit', 'groups')))
    """

    key: str
    facts: tuple[tuple[str, Fact], ...] = ()

    @classmethod
    def of(cls, key: str, **facts: Fact) -> "Condition":
        """Return a condition with these facts."""
        return cls(key, tuple(sorted(facts.items())))

    def __getitem__(self, name: str) -> Any:
        """Return one fact."""
        return dict(self.facts)[name]

    def to_json(self) -> dict[str, Any]:
        """Return the key and the facts, as JSON."""
        return {"key": self.key, "facts": dict(self.facts)}

    @classmethod
    def from_json(cls, value: Any) -> "Condition":
        """Return the condition that `to_json` wrote."""
        if not isinstance(value, Mapping) or set(value) != {"key", "facts"}:
            raise ValueError("a condition must have a key and facts, and nothing else")
        key, facts = value["key"], value["facts"]
        if not isinstance(key, str) or not isinstance(facts, Mapping):
            raise ValueError("a condition must have a key and facts, and nothing else")
        return cls.of(key, **facts)


LABELS_MISSING = Condition("labels missing")
"""The condition of bets on losses that were assumed to be the worst; monotone tests need none."""


def dropped(conditions: Iterable[Condition], *keys: str) -> tuple[Condition, ...]:
    """Return the conditions without those of some keys.

    Examples
    --------
    >>> dropped([Condition("pilot"), Condition("temperatures")], "pilot")
    (Condition(key='temperatures', facts=()),)
    """
    return tuple(each for each in conditions if each.key not in keys)


def replaced(conditions: Iterable[Condition], condition: Condition) -> tuple[Condition, ...]:
    """Return the conditions with all of this one's key replaced by it, in their place.

    Examples
    --------
    >>> found = replaced([Condition("draws"), Condition("pilot")], Condition.of("draws", n=1))
    >>> [each.key for each in found], found[0]["n"]
    (['draws', 'pilot'], 1)
    """
    found = dict.fromkeys(condition if each.key == condition.key else each for each in conditions)
    return tuple(found | {condition: None})
