"""`BySlice`: the runtimes of a policy of slices, each with the samples of its slice."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from swiftsure.certify.policy import Policy
from swiftsure.certify.slices import SlicedPolicy

__all__ = ["BySlice", "full_model_policy"]

R = TypeVar("R")


class BySlice(Generic[R]):
    """One runtime per slice; samples of slices that the policy does not know run the full model.

    Parameters
    ----------
    policy : SlicedPolicy
    full : runtime
        Of `full_model_policy(policy)`.
    make : callable
        Policy -> runtime.
    """

    def __init__(self, policy: SlicedPolicy, full: R, make: Callable[[Policy], R]) -> None:
        self.policy = policy
        self._full = full
        self._runtimes = {name: make(policy[name]) for name in policy}

    def parts(self, slices: Sequence[Any] | None, n: int) -> list[tuple[R, NDArray[np.int64]]]:
        """Return each runtime with the rows of its samples; raise unless all have a slice."""
        if slices is None:
            raise ValueError(
                "`slices` must be given under a policy of slices: the slice of each sample."
            )
        if len(slices) != n:
            raise ValueError(
                f"`slices` must name the slice of each of {n} samples, but has {len(slices)}."
            )
        rows: dict[str | None, list[int]] = {}
        for row, name in enumerate(map(str, slices)):
            rows.setdefault(name if name in self._runtimes else None, []).append(row)
        return [
            (self._full if name is None else self._runtimes[name], np.asarray(own))
            for name, own in rows.items()
        ] or [(self._full, np.empty(0, np.int64))]


def full_model_policy(policy: SlicedPolicy) -> Policy:
    """Return a policy that always runs the full model, for the same model as these.

    Examples
    --------
    >>> import swiftsure as ss
    >>> sample = ss.simulate.Population().sample(600, seed=0)
    >>> record = ss.ExitRecord.from_logits(sample.logits, sample.labels).sliced(["a", "b"] * 300)
    >>> promise = ss.Promise("zero_one", epsilon=0.1, within="each slice")
    >>> full_model_policy(ss.calibrate(record, promise)).runs_full_model
    True
    """
    first = next(iter(policy.policies.values()))
    return first.model_copy(update={"threshold": None, "settings": {"threshold": None}})
