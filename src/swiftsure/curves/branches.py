"""Branches: several sequences of settings that share δ, tested side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swiftsure._lib import checks

__all__ = ["Branches"]


@dataclass(frozen=True)
class Branches:
    """Sequences of settings, each tested from its safe end with its share of δ.

    With `flow`, a branch that is certified to its end gives its δ to the others in equal parts,
    also to those that failed, which are then tested again. This is the graphical procedure of Bretz
    et al. for chains whose last settings point to the first of all other branches. Without `flow`,
    each branch keeps δ divided by their number (Bonferroni).

    **Guarantee**: with probability at least 1 − δ, no certified setting has a risk above ε,
    however the settings depend on each other; so any of them may be chosen, by cost for example.

    Parameters
    ----------
    settings : sequences of int
        Positions of the settings, each in one branch only; the full model, 0, is in none.
    flow : bool

    References
    ----------
    Bretz, Maurer, Brannath and Posch (2009), A graphical approach to sequentially rejective
    multiple test procedures, Statistics in Medicine 28.
    """

    settings: tuple[tuple[int, ...], ...]
    flow: bool = True

    def __post_init__(self) -> None:
        """Check that every setting is in one branch only."""
        branches = tuple(tuple(int(k) for k in branch) for branch in self.settings)
        listed = [k for branch in branches for k in branch]
        for k in listed:
            checks.count("branches", k)
        if not branches or not all(branches) or len(set(listed)) < len(listed):
            raise ValueError(
                "`branches` must be lists of settings, none of them empty, with each setting in one"
                " branch only, and without the full model, 0."
            )
        object.__setattr__(self, "settings", branches)

    def __len__(self) -> int:
        """Return the number of branches."""
        return len(self.settings)

    def certified(self, p_value: Callable[[int], float], delta: float) -> list[int]:
        """Return the settings that are certified, given a p-value for each.

        Examples
        --------
        >>> p = {1: 0.01, 2: 0.04, 3: 0.08}
        >>> Branches(((1, 2), (3,))).certified(p.__getitem__, 0.1)
        [1, 2, 3]
        >>> Branches(((1, 2), (3,)), flow=False).certified(p.__getitem__, 0.1)
        [1, 2]
        """
        places = [0] * len(self.settings)
        shares = [1.0 / len(self.settings)] * len(self.settings)
        found: list[int] = []
        moved = True
        while moved:
            moved = False
            for number, branch in enumerate(self.settings):
                while places[number] < len(branch):
                    setting = branch[places[number]]
                    if not p_value(setting) <= shares[number] * delta:
                        break
                    found.append(setting)
                    places[number] += 1
                    moved = True
                if self.flow and places[number] == len(branch) and shares[number] > 0:
                    self._pass_on(shares, places, number)
                    moved = True
        return found

    def _pass_on(self, shares: list[float], places: Sequence[int], number: int) -> None:
        """Give the share of a branch that ended to those that have settings left."""
        open_ = [k for k, branch in enumerate(self.settings) if places[k] < len(branch)]
        for k in open_:
            shares[k] += shares[number] / len(open_)
        shares[number] = 0.0
