"""SampleOrder: the seed of the order in which betting tests see the samples."""

from dataclasses import dataclass
from secrets import randbits

from swiftsure._lib import checks

__all__ = ["SampleOrder"]

SEED_BITS = 53
"""Bits of a drawn seed, few enough for JSON readers that store numbers as doubles."""


@dataclass(frozen=True)
class SampleOrder:
    """A seed that fixes the order of the samples, and whether it was drawn at random.

    A drawn seed is independent of the data, so betting tests are valid however the samples were
    ordered before, for example in a file sorted by loss. With a seed chosen by a person, the
    samples must already be in random order.

    Attributes
    ----------
    seed : int
    drawn : bool
        Whether the seed was drawn from the operating system's random numbers.
    """

    seed: int
    drawn: bool

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
        SampleOrder(seed=7, drawn=False)
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
        return SampleOrder(int(seed), drawn=False)

    def condition(self, unit: str = "samples", tested: bool = True) -> str:
        """Return the assumption about the order that a certificate states.

        With `tested=False` the order only decided which samples, or groups, chose the setting.
        """
        if self.drawn and tested:
            return (
                f"the {unit} were tested in an order drawn at random from the operating system,"
                " independent of the data"
            )
        if self.drawn:
            return f"the {unit} that chose the setting were drawn at random, whatever the data"
        return (
            f"the calibration {unit} came in random order, or the seed was itself drawn at random,"
            " once"
        )
