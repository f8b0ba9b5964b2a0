"""Thresholds for each exit, learned on pilot samples: by temperatures, or one notch at a time.

Exits may be overconfident to different degrees; one shared threshold then treats them unequally.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftsure.exits import reaches

__all__ = ["Pilot", "learned_thresholds"]

Floats = NDArray[np.float64]

NOTCHES = 40
"""Thresholds of each exit that the search tries: quantiles of its confidences."""

MARGIN = 2.0
"""Points of saving by which learned thresholds must beat a shared one on held-out pilot samples.

Smaller differences are mostly noise in pilots of some hundred samples.
"""

TEMPERATURES = np.geomspace(0.25, 8.0, 41)
"""Temperatures to choose from."""


class Pilot(NamedTuple):
    """Arrays of pilot samples.

    Attributes
    ----------
    confidences : (n, n_exits - 1)
    losses : (n, n_exits)
        Relative to the full model; 0 in the last column.
    costs : (n_exits,)
    """

    confidences: Floats
    losses: Floats
    costs: Floats

    def take(self, rows: NDArray[np.int64]) -> "Pilot":
        """Return some of the samples."""
        return Pilot(self.confidences[rows], self.losses[rows], self.costs)

    def means(self, thresholds: Floats) -> tuple[float, float]:
        """Return the mean loss and the mean cost with one threshold per exit."""
        leaves = reaches(self.confidences, thresholds)
        exits = np.where(leaves.any(axis=1), leaves.argmax(axis=1), leaves.shape[1])
        return float(self.losses[np.arange(len(exits)), exits].mean()), float(
            self.costs[exits].mean()
        )


def learned_thresholds(
    pilot: Pilot, shared: Floats, epsilons: tuple[float, ...]
) -> tuple[Floats, str]:
    """Return the thresholds that save most on held-out pilot samples, and how they were found.

    They are (K, n_exits - 1), or (K,) if one shared threshold is as good.

    Compared are one shared threshold, temperatures, and single notches. Each is fitted on one half
    of the pilot and judged on the other, both ways; the winner is fitted again on all of it.
    """
    n_early = pilot.confidences.shape[1]
    ways = {
        "one shared threshold": lambda _: np.repeat(shared[:, None], n_early, axis=1),
        "temperatures": lambda part: _by_temperature(part, shared),
        "a threshold for each exit": _by_notches,
    }
    order = np.random.default_rng(0).permutation(len(pilot.losses))
    halves = np.array_split(order, 2)
    gains = {
        name: np.mean(
            [
                _saving(fit(pilot.take(halves[k])), pilot.take(halves[1 - k]), epsilons)
                for k in (0, 1)
            ]
        )
        for name, fit in ways.items()
    }
    plain, *others = ways
    best = max(others, key=lambda name: gains[name])
    chosen = best if gains[best] >= gains[plain] + MARGIN else plain
    return shared if chosen == plain else ways[chosen](pilot), chosen


def _saving(thresholds: Floats, pilot: Pilot, epsilons: tuple[float, ...]) -> float:
    """Return the mean percentage saved at the last setting before the pilot's risk exceeds ε."""
    means = np.asarray([pilot.means(row) for row in thresholds])
    highest = np.maximum.accumulate(means[:, 0])
    last = [int(np.searchsorted(highest, epsilon, side="right")) - 1 for epsilon in epsilons]
    return float(np.mean([100 * (1 - means[max(k, 0), 1] / pilot.costs[-1]) for k in last]))


def _by_temperature(pilot: Pilot, shared: Floats) -> Floats:
    """Return a shared threshold in the scale of each exit: σ(T logit λ).

    T fits the exit's confidence to how often its loss is not above the full model's.
    """
    logits = _logit(pilot.confidences)
    right = pilot.losses[:, :-1] <= 0
    columns = []
    for exit_ in range(logits.shape[1]):
        scaled = logits[:, exit_, None] / TEMPERATURES
        likelihood = np.where(right[:, exit_, None], -np.logaddexp(0, -scaled), 0.0)
        likelihood += np.where(right[:, exit_, None], 0.0, -np.logaddexp(0, scaled))
        temperature = TEMPERATURES[int(likelihood.sum(axis=0).argmax())]
        columns.append(np.where(np.isinf(shared), np.inf, _sigmoid(temperature * _logit(shared))))
    return np.column_stack(columns)


def _by_notches(pilot: Pilot) -> Floats:
    """Return settings that lower one threshold at a time: the one that costs least per saving."""
    shares = np.linspace(1.0, 0.0, NOTCHES + 1)
    grids = np.quantile(pilot.confidences, shares, axis=0)  # (notches + 1, n_exits - 1), falling
    n_early = grids.shape[1]
    place = np.full(n_early, -1)  # never
    thresholds = np.full(n_early, np.inf)
    found = [thresholds.copy()]
    loss, cost = pilot.means(thresholds)
    while (place < NOTCHES).any():
        best, step = np.inf, None
        for exit_ in np.flatnonzero(place < NOTCHES):
            tried = thresholds.copy()
            tried[exit_] = grids[place[exit_] + 1, exit_]
            new_loss, new_cost = pilot.means(tried)
            saved = cost - new_cost
            price = (new_loss - loss) / saved if saved > 0 else np.inf
            if step is None or price < best:
                best, step = price, (exit_, tried, new_loss, new_cost)
        if step is None:
            break
        exit_, thresholds, loss, cost = step
        place[exit_] += 1
        found.append(thresholds.copy())
    return np.asarray(found)


def _logit(confidences: Floats) -> Floats:
    inside = np.clip(np.asarray(confidences, np.float64), 1e-7, 1 - 1e-7)
    return np.log(inside) - np.log1p(-inside)


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-logits)))
