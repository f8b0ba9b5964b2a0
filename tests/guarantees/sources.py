"""Where losses come from: distributions of known risk, and ways to list all their outcomes."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb

import numpy as np
from numpy.typing import NDArray
from scipy.stats import multinomial

__all__ = ["Columns", "Sequences", "Types", "independent_columns", "two_settings"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Types:
    """Samples of a few types: type t has losses `vectors[t]` (K,) and probability `weights[t]`."""

    vectors: Floats
    weights: Floats

    @cached_property
    def risk(self) -> Floats:
        """True risk of each setting, (K,)."""
        return self.weights @ self.vectors

    def sample(self, n: int, rng: np.random.Generator) -> Floats:
        """Draw the losses of n samples, (n, K)."""
        return self.vectors[rng.choice(len(self.weights), size=n, p=self.weights)]

    def calibration_sets(self, n: int) -> Iterator[tuple[Floats, float]]:
        """Every set of n samples, but for their order, with its probability."""
        splits = itertools.combinations_with_replacement(range(len(self.weights)), n)
        counts = [np.bincount(split, minlength=len(self.weights)) for split in splits]
        for count, probability in zip(
            counts, multinomial.pmf(counts, n, self.weights), strict=True
        ):
            yield np.repeat(self.vectors, count, axis=0), float(probability)


@dataclass(frozen=True, eq=False)
class Columns:
    """Settings with independent losses of 0 or `high`; setting 0, the full model, has none."""

    risk: Floats
    high: float = 1.0

    def sample(self, n: int, rng: np.random.Generator) -> Floats:
        """Draw the losses of n samples, (n, K)."""
        return self.high * (rng.random((n, len(self.risk))) < self.risk / self.high)


def independent_columns(*risks: float, high: float = 1.0) -> Columns:
    """Return settings of given risks after the full model."""
    return Columns(np.asarray([0.0, *risks]), high)


def two_settings(risk: float, high: float = 1.0) -> Types:
    """Return the full model and one setting whose loss is 0 or `high`: the least favourable."""
    return Types(np.asarray([[0.0, 0.0], [0.0, high]]), np.asarray([1 - risk / high, risk / high]))


class Sequences:
    """Every sequence of n losses from a finite support, and distributions over that support."""

    def __init__(self, support: Sequence[float], n: int) -> None:
        self.support = np.asarray(support, float)
        symbols = np.asarray(list(itertools.product(range(len(support)), repeat=n)))
        self.rows = self.support[symbols]
        counts = np.stack([(symbols == t).sum(axis=1) for t in range(len(support))], axis=1)
        self.counts, self._which = np.unique(counts, axis=0, return_inverse=True)

    def weights_with_mean(self, at_least: float | None = None, parts: int = 20) -> Floats:
        """Distributions on a grid, (D, T): all, or those of mean `at_least` or more.

        Among the latter are mixtures of the two-point distributions whose mean is just `at_least`,
        where tests are least favoured.
        """
        size = len(self.support)
        grid = np.asarray(
            [
                np.diff([-1, *bars, parts + size - 1]) - 1
                for bars in itertools.combinations(range(parts + size - 1), size - 1)
            ]
        )
        grid = grid / parts
        if at_least is None:
            return grid
        edges = []
        for low, high in itertools.combinations(range(size), 2):
            a, b = self.support[low], self.support[high]
            if a <= at_least <= b:
                edge = np.zeros(size)
                edge[high] = (at_least - a) / (b - a)
                edge[low] = 1 - edge[high]
                edges.append(edge)
        shares = np.linspace(0, 1, parts + 1)[:, None]
        mixed = [s * shares + t * (1 - shares) for s, t in itertools.combinations(edges, 2)]
        above = grid[grid @ self.support >= at_least]
        return np.concatenate([above, np.asarray(edges), *mixed])

    def probability(self, chosen: NDArray[np.bool_], weights: Floats) -> Floats:
        """Probability of a set of sequences under each distribution, (D,)."""
        favourable = np.bincount(self._which.ravel(), weights=chosen, minlength=len(self.counts))
        return np.prod(weights[:, None, :] ** self.counts, axis=2) @ favourable

    def probability_in_pool(self, chosen: NDArray[np.bool_], pool: Sequence[int]) -> float:
        """Probability of a set of sequences drawn without replacement.

        `pool[t]` says how often value t of the support is in the pool.
        """
        favourable = np.bincount(self._which.ravel(), weights=chosen, minlength=len(self.counts))
        orders = np.bincount(self._which.ravel(), minlength=len(self.counts))
        n = int(self.counts[0].sum())
        ways = [
            np.prod([comb(m, c) for m, c in zip(pool, row, strict=True)]) for row in self.counts
        ]
        return float(np.asarray(ways) @ (favourable / orders)) / comb(sum(pool), n)
