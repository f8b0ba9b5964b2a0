"""`CostCount`: what the answers of a server cost, against the full model alone."""

from collections.abc import Mapping
from typing import Protocol

from swiftsure.serve.engine import Engine, ExitCosts

__all__ = ["CostCount", "Costs"]


class Costs(Protocol):
    """What the metrics and the live page show of costs, by unit."""

    @property
    def spent(self) -> Mapping[str, float]:
        """On answers."""

    @property
    def audits(self) -> Mapping[str, float]:
        """On audits; 0 where they run in idle moments, which is not counted."""

    @property
    def saved(self) -> Mapping[str, float]:
        """Against the full model alone, after the audits that are counted."""

    @property
    def shares(self) -> Mapping[str, float]:
        """What was saved as a share of the full model's cost."""


class CostCount:
    """Adds up the cost of answers in each unit that an engine knows."""

    def __init__(self, engine: Engine) -> None:
        self._costs: dict[str, ExitCosts] = dict(getattr(engine, "costs", {}))
        self.spent = dict.fromkeys(self._costs, 0.0)
        self.saved = dict.fromkeys(self._costs, 0.0)
        self.audits = dict.fromkeys(self._costs, 0.0)  # in idle moments, and not counted

    def add(self, exit_: int, *, full: bool) -> None:
        """Count an answer; one of the full model costs what the full model alone costs."""
        for unit, costs in self._costs.items():
            spent = costs.full if full else costs.exits[exit_]
            self.spent[unit] += spent
            self.saved[unit] += costs.full - spent

    @property
    def shares(self) -> dict[str, float]:
        """Share of the full model's cost that was saved, in each unit; negative if it was more."""
        return {
            unit: saved / (saved + self.spent[unit])
            for unit, saved in self.saved.items()
            if saved + self.spent[unit] > 0
        }
