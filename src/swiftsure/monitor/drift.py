"""Drift: warnings, without a guarantee, when savings fall or confidences shift."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from swiftsure._lib import checks
from swiftsure.certify.policy import Policy
from swiftsure.certify.wording import percent
from swiftsure.monitor.state import Section

__all__ = ["Drift", "DriftState"]

MEMORY = 2000
"""Approximate number of requests that count as recent."""

LEAST = 500
"""Number of requests before the first warning."""

SAVING_KEPT = 0.8
"""Warn if the saving falls below this share of the saving in calibration."""

FAR_APART = 0.1
"""Warn if the total variation distance to the calibration exceeds this."""

BINS = 10
"""Confidences are compared by deciles of the calibration's."""


@dataclass
class _Recent:
    """Means of recent requests: plain means at first, then exponentially weighted."""

    means: list[float]
    n: int = 0

    def add(self, values: Sequence[float]) -> None:
        self.n += 1
        rate = 1.0 / min(self.n, MEMORY)
        for i, value in enumerate(values):
            self.means[i] += rate * (value - self.means[i])

    @property
    def ready(self) -> bool:
        return self.n >= LEAST

    def state(self) -> "RecentState":
        return RecentState(n=self.n, means=tuple(self.means))

    def restore(self, state: "RecentState") -> None:
        if len(state.means) == len(self.means):  # otherwise it belongs to another policy
            self.n, self.means = state.n, list(state.means)


class RecentState(Section):
    """State of recent means."""

    n: int = Field(ge=0)
    means: tuple[float, ...]


class DriftState(Section):
    """Everything that the warnings depend on, except the policy."""

    cost: RecentState
    exits: RecentState
    confidences: RecentState


@dataclass
class _Shares:
    """Recent shares of each bin, compared with those of the calibration."""

    expected: list[float]
    recent: _Recent = field(init=False)

    def __post_init__(self) -> None:
        self.recent = _Recent([0.0] * len(self.expected))

    def add(self, position: int) -> None:
        self.recent.add([float(i == position) for i in range(len(self.expected))])

    @property
    def apart(self) -> float:
        """Total variation: the share of requests that would have to move to make both equal."""
        pairs = zip(self.recent.means, self.expected, strict=True)
        return 0.5 * sum(abs(now - then) for now, then in pairs)


class Drift:
    """Warns when recent requests save less than the calibration samples did, or look different.

    These warnings carry **no guarantee**: they may be false, and the risk may rise without any.
    They need no labels, so they may come long before a `Monitor`'s alarm.

    Parameters
    ----------
    policy : Policy
        Holds the savings and exit shares of the calibration samples.
    cost : str, optional
        The policy's cost that requests report; by default the number of exits.
    confidences : (n,), optional
        Confidences of the calibration samples, by the same score that requests report.

    Examples
    --------
    >>> drift = Drift(policy)  # doctest: +SKIP
    >>> drift.update(exit=2, confidence=0.93)  # doctest: +SKIP
    >>> drift.warnings()  # doctest: +SKIP
    []
    """

    def __init__(
        self, policy: Policy, *, cost: str | None = None, confidences: ArrayLike | None = None
    ) -> None:
        certificate = policy.certificate
        if cost is not None:
            checks.choice("cost", cost, certificate.costs.means)
        self.cost = cost
        self._full, self._then = certificate.costs.means.get(cost or "exit", (0.0, 0.0))
        self._cost = _Recent([0.0])
        self._exits = _Shares(list(certificate.costs.exit_shares or ()))
        self._edges: list[float] = []
        expected: list[float] = []
        if confidences is not None:
            values = checks.numbers("confidences", confidences, np.float64)
            checks.finite("confidences", checks.of_shape("confidences", values, {"n": None}))
            self._edges = _inner_edges(values)
            places = np.searchsorted(self._edges, values, side="right")
            counts = np.bincount(places, minlength=len(self._edges) + 1)
            expected = (counts / len(values)).tolist()
        self._confidences = _Shares(expected)

    def update(
        self,
        exit: int | None = None,  # noqa: A002 (the name used everywhere here)
        cost: float | None = None,
        confidence: float | None = None,
    ) -> None:
        """Add a request: its exit (from 0), cost and confidence, each optional.

        Raises
        ------
        ValueError
            If the policy has no such exit, or a number is not finite.
        """
        self.refuse(exit, cost, confidence)
        if exit is not None and self._exits.expected:
            self._exits.add(exit)
        spent = cost if self.cost is not None else None if exit is None else exit + 1.0
        if spent is not None:
            self._cost.add([spent])
        if confidence is not None and self._edges:
            self._confidences.add(bisect_right(self._edges, confidence))

    def refuse(
        self,
        exit: int | None = None,  # noqa: A002
        cost: float | None = None,
        confidence: float | None = None,
    ) -> None:
        """Raise if `update` would refuse a request; changes nothing."""
        n_exits = len(self._exits.expected)
        if exit is not None and checks.count("exit", exit, least=0) >= n_exits > 0:
            raise ValueError(f"`exit` must be below {n_exits}, but got {exit}.")
        if cost is not None:
            checks.between("cost", cost, -np.inf, np.inf)
        if confidence is not None:
            checks.between("confidence", confidence, -np.inf, np.inf)

    @property
    def saving(self) -> float | None:
        """Fraction of the full model's cost saved recently; None if not known yet."""
        if not (self._full > 0 and self._cost.ready):
            return None
        return 1.0 - self._cost.means[0] / self._full

    def warnings(self) -> list[str]:
        """Return the current warnings, as sentences."""
        found = []
        saved = self.saving
        before = 1.0 - self._then / self._full if self._full > 0 else 0.0
        if saved is not None and saved < SAVING_KEPT * before:
            found.append(
                f"Recent requests save {percent(saved)} of {self.cost or 'exits'}, where the"
                f" calibration samples saved {percent(before)}."
            )
        for what, shares in (
            ("leave at other exits", self._exits),
            ("have other confidences", self._confidences),
        ):
            if shares.recent.ready and shares.apart > FAR_APART:
                found.append(
                    f"Recent requests {what} than the calibration samples: {percent(shares.apart)}"
                    " of them would have to move."
                )
        return found

    def state(self) -> DriftState:
        """Return the state, for `restore`."""
        return DriftState(
            cost=self._cost.state(),
            exits=self._exits.recent.state(),
            confidences=self._confidences.recent.state(),
        )

    def restore(self, state: DriftState) -> None:
        """Restore a state."""
        self._cost.restore(state.cost)
        self._exits.recent.restore(state.exits)
        self._confidences.recent.restore(state.confidences)


def _inner_edges(values: NDArray[np.float64]) -> list[float]:
    """Return the inner decile edges of values; fewer if many values are equal."""
    shares = np.arange(1, BINS) / BINS
    edges: list[float] = np.unique(np.quantile(values, shares, method="higher")).tolist()
    return edges
