"""Statistic: which risk the losses of a curve measure."""

from dataclasses import dataclass

__all__ = ["UNNAMED", "ZERO_BOUNDED", "Statistic"]

UNNAMED, ZERO_BOUNDED = "loss", "zero-bounded "
"""The name of an unnamed loss, and the prefix of a risk whose losses are cut at 0."""


@dataclass(frozen=True)
class Statistic:
    """Which statistic of which loss a curve holds; see `swiftsure.curves.transforms`.

    Attributes
    ----------
    risk, loss : str
        Their names.
    relative : bool
        Whether losses are relative to the full model, whose own loss is then 0.
    above : float or None
        If losses are 1 where another loss is above this, else 0: that limit.
    worst : float or None
        If the risk bounds the mean of the worst share of the losses: that share.
    selective : bool
        Whether the risk is the mean loss of the samples that exit early, and not of all.
    """

    risk: str = "gap"
    loss: str = UNNAMED
    relative: bool = True
    above: float | None = None
    worst: float | None = None
    selective: bool = False
