"""Statistic: which risk the losses of a curve measure."""

from dataclasses import dataclass

from swiftsure.curves.measures import Measure

__all__ = ["UNNAMED", "ZERO_BOUNDED", "Statistic"]

UNNAMED, ZERO_BOUNDED = "loss", "zero-bounded "
"""The name of an unnamed loss, and the prefix of a risk whose losses are cut at 0."""


@dataclass(frozen=True)
class Statistic(Measure):
    """Which statistic of which loss a curve holds, and the measure that made it.

    Attributes
    ----------
    risk, loss : str
        Their names.
    relative : bool
        Whether losses are relative to the full model, whose own loss is then 0.
    selective : bool
        Whether the risk is the mean loss of the samples that exit early, and not of all.
    """

    risk: str = "gap"
    loss: str = UNNAMED
    relative: bool = True
    selective: bool = False
