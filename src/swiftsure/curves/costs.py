"""Which cost is meant where none is named: one rule for plans, studies, reports and policies."""

from collections.abc import Iterable

from swiftsure._lib import checks

__all__ = ["deciding_costs", "default_cost", "price_of"]

LAST = {"seconds": 1, "exit": 2}
"""Costs that stand behind all others: a time depends on the machine, an exit number is not one."""


def price_of(full_costs: Iterable[str]) -> str | None:
    """Return the price of a cascade: the first of its `full_costs` besides FLOPs and seconds."""
    return next((name for name in full_costs if name not in ("flops", "seconds")), None)


def default_cost(
    costs: Iterable[str], full_costs: Iterable[str] = (), cost: str | None = None
) -> str | None:
    """Return the cost that is named, or the one that is meant if none is.

    That is FLOPs, or the price of a cascade, or the first of the others: seconds only if there is
    none of these, and the exit number last. None if there are no costs.

    Examples
    --------
    >>> default_cost(["exit", "usd", "flops"]), default_cost(["exit", "tokens", "usd"], ["usd"])
    ('flops', 'usd')
    >>> default_cost(["exit", "seconds", "layers"]), default_cost(["exit"]), default_cost([])
    ('layers', 'exit', None)
    """
    names = list(costs)
    if cost is not None:
        return checks.choice("cost", cost, names)
    ordered = sorted(names, key=lambda name: LAST.get(name, 0))
    preferred = ("flops", price_of(full_costs), *ordered)
    return next((name for name in preferred if name in names), None)


def deciding_costs(
    costs: Iterable[str], full_costs: Iterable[str] = (), cost: str | None = None
) -> list[str]:
    """Return the costs of which a setting must save at least one to be worth running.

    It is the one named, else the price; else all, without the exit number if there are others.
    """
    names = list(costs)
    if cost is not None:
        return [checks.choice("cost", cost, names)]
    price = price_of(full_costs)
    if price is not None:
        return [price]
    return [name for name in names if name != "exit"] or names
