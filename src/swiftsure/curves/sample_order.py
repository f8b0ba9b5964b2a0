"""SampleOrder: the seeds by which samples were drawn from others and are put in order."""

from dataclasses import dataclass, replace
from secrets import randbits

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.curves.conditions import Condition

__all__ = ["SampleOrder", "shuffling"]

SEED_BITS = 53
"""Bits of a drawn seed, few enough for JSON readers that store numbers as doubles."""

SPLIT_STREAM = 0x50494C4F54
"""Separates the random numbers of splits from those of the order of the tests."""
SHUFFLE_STREAM = 0x5357495654


def shuffling(seed: int) -> np.random.Generator:
    """Return the random stream that shuffles samples.

    It is a stream of its own, so that a caller who sampled with the same seed gets an independent
    order.
    """
    return np.random.default_rng([seed, SHUFFLE_STREAM])


@dataclass(frozen=True)
class SampleOrder:
    """A seed that fixes the order of the samples, and whether it was drawn at random.

    A drawn seed is independent of the data, so betting tests are valid however the samples were
    ordered before, for example in a file sorted by loss. With a seed chosen by a person, the
    samples must already be in random order. The same holds for the seed of a split, whatever tests
    the samples afterwards.

    Attributes
    ----------
    seed : int
    drawn : bool
        Whether the seed was drawn from the operating system's random numbers.
    splits : tuple of SampleOrder
        The seeds of the splits, first to last, that drew these samples from others.
    """

    seed: int
    drawn: bool
    splits: tuple["SampleOrder", ...] = ()

    @classmethod
    def draw(cls) -> "SampleOrder":
        """Return an order with a seed from the operating system's random numbers."""
        return cls(randbits(SEED_BITS), drawn=True)

    @classmethod
    def of(cls, value: "SampleOrder | int | None", name: str = "seed") -> "SampleOrder":
        """Return a SampleOrder: `value` itself, a drawn seed for None, or a given seed.

        Examples
        --------
        >>> SampleOrder.of(7)
        SampleOrder(seed=7, drawn=False, splits=())
        >>> SampleOrder.of(None).drawn
        True
        """
        if value is None:
            return cls.draw()
        if isinstance(value, SampleOrder):
            return value
        return cls(checks.count(name, value, 0), drawn=False)

    def replaced_by(self, seed: int | None) -> "SampleOrder":
        """Return this order, or one with another seed if it is given."""
        if seed is None or checks.count("seed", seed, 0) == self.seed:
            return self
        return replace(self, seed=int(seed), drawn=False)

    def is_shared_with(self, other: "SampleOrder") -> bool:
        """Return whether two records have one drawn seed, as parts of one record do."""
        return self.drawn and other.drawn and self.seed == other.seed

    def draw_units(self, n: int, size: int) -> NDArray[np.int64]:
        """Return the positions of `size` of n samples or groups, drawn by this seed, ascending.

        Everything that splits samples draws them here.
        """
        stream = np.random.default_rng([self.seed, SPLIT_STREAM])
        return np.sort(stream.choice(n, size, replace=False, shuffle=False))

    def after(self, *splits: "SampleOrder") -> "SampleOrder":
        """Return the order of samples that these splits drew from those with this order."""
        seeds = (SampleOrder(each.seed, each.drawn) for each in splits)
        return replace(self, splits=tuple(dict.fromkeys((*self.splits, *seeds))))

    def condition(self, unit: str = "samples", tested: bool = True) -> Condition:
        """Return the condition about the order that a certificate states.

        With `tested=False` the order only decided which samples, or groups, chose the setting.
        """
        how = "given" if not self.drawn else "drawn" if tested else "chose"
        return Condition.of("order", how=how, unit=unit)

    def split_conditions(self, unit: str = "samples") -> tuple[Condition, ...]:
        """Return the conditions about the splits that a certificate states."""
        drawn, given = Condition.of("split", unit=unit), "split by seed"
        found = (
            drawn if each.drawn else Condition.of(given, seed=each.seed, unit=unit)
            for each in self.splits
        )
        return tuple(dict.fromkeys(found))
