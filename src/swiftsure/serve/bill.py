"""`Bill`: what answers and audits cost, and what they saved against the full model alone."""

from collections import Counter
from collections.abc import Mapping

__all__ = ["Bill"]


class Bill:
    """Costs by unit.

    Attributes
    ----------
    spent : Counter
        On answers.
    audits : Counter
        On audits; those of a server run in idle moments, and are not counted.

    Examples
    --------
    >>> bill = Bill()
    >>> bill.answer({"usd": 1.0}, {"usd": 10.0})
    >>> bill.audit({"usd": 4.0})
    >>> bill.saved, bill.shares
    ({'usd': 5.0}, {'usd': 0.5})
    """

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.audits: Counter[str] = Counter()
        self._alone: Counter[str] = Counter()

    def answer(self, spent: Mapping[str, float], alone: Mapping[str, float]) -> None:
        """Add what an answer cost, and an estimate of what the full model alone would have cost."""
        self.spent.update(spent)
        self._alone.update(alone)

    def audit(self, spent: Mapping[str, float]) -> None:
        """Add what an audit cost."""
        self.audits.update(spent)

    @property
    def saved(self) -> dict[str, float]:
        """What was saved after audits; negative if the full model alone would have cost less."""
        units = dict.fromkeys([*self.spent, *self._alone, *self.audits])
        return {unit: self._alone[unit] - self.spent[unit] - self.audits[unit] for unit in units}

    @property
    def shares(self) -> dict[str, float]:
        """What was saved as a share of the cost of the full model alone."""
        saved = self.saved
        return {unit: saved[unit] / cost for unit, cost in self._alone.items() if cost > 0}
