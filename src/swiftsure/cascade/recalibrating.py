"""`Recalibration`: maps a confidence to the probability of being right, fitted on pilot samples."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

from swiftsure._lib import checks
from swiftsure.curves.pilots import PilotSamples

__all__ = ["Recalibration"]

Floats = NDArray[np.float64]

EDGE = 1e-6
"""Confidences are kept this far from 0 and 1 where their logit is taken."""


@dataclass(frozen=True, eq=False)
class Recalibration:
    """A rising map from confidences to probabilities of being right.

    Parameters
    ----------
    method : {"isotonic", "logistic"}
    x, y : (m,)
        Isotonic: the map goes through these points, and straight between them. Logistic: `x` is
        empty and `y` is (slope, intercept) of the logit.
    pilot : PilotSamples, optional
        The samples that it was fitted on, which calibration refuses, and certificates state.

    Examples
    --------
    >>> sure, right = [0.2, 0.4, 0.6, 0.8], [0, 1, 0, 1]
    >>> Recalibration.fit(sure, right)([0.2, 0.5, 0.8]).tolist()
    [0.0, 0.5, 1.0]
    """

    method: Literal["isotonic", "logistic"]
    x: Floats
    y: Floats
    pilot: PilotSamples | None = field(default=None, repr=False)

    @classmethod
    def fit(
        cls,
        confidences: ArrayLike,
        right: ArrayLike,
        method: Literal["isotonic", "logistic"] = "isotonic",
        *,
        ids: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> "Recalibration":
        """Fit the map on pilot samples, which must not be used to calibrate.

        Parameters
        ----------
        confidences : (n,)
            In [0, 1].
        right : (n,)
            1 where the answer was right, else 0; or a quality in [0, 1].
        method : {"isotonic", "logistic"}
            The best rising step function, joined by straight lines; or a logistic curve in the
            logit of the confidence, for small pilots.
        ids, groups : (n,), optional
            Of the samples, by which calibration recognises them.
        """
        checks.choice("method", method, ["isotonic", "logistic"])
        sure = checks.finite("confidences", checks.numbers("confidences", confidences, np.float64))
        checks.of_shape("confidences", sure, {"n": None})
        checks.within("confidences", sure, 0.0, 1.0)
        quality = checks.finite("right", checks.numbers("right", right, np.float64))
        checks.of_shape("right", quality, {"n": len(sure)})
        checks.within("right", quality, 0.0, 1.0)
        pilot = PilotSamples.of_arrays(sure, quality, ids=ids, groups=groups)
        if method == "logistic":
            return cls(method, np.empty(0), _logistic(sure, quality), pilot)
        x, codes = np.unique(sure, return_inverse=True)
        weights = np.bincount(codes).astype(np.float64)
        means = np.bincount(codes, quality) / weights
        return cls(method, x, optimize.isotonic_regression(means, weights=weights).x, pilot)

    def __call__(self, confidences: ArrayLike) -> Floats:
        """Return the mapped confidences."""
        sure = checks.numbers("confidences", confidences, np.float64)
        if self.method == "logistic":
            slope, intercept = self.y
            return np.asarray(special.expit(slope * _logit(sure) + intercept))
        return np.asarray(np.interp(sure, self.x, self.y))

    def to_json(self) -> dict[str, Any]:
        """Return the map as JSON can hold it."""
        pilot = None if self.pilot is None else self.pilot.to_json()
        return {**self.map_json(), "pilot": pilot}

    def map_json(self) -> dict[str, Any]:
        """Return the map alone, without its pilot."""
        return {"method": self.method, "x": self.x.tolist(), "y": self.y.tolist()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Recalibration":
        """Return the map that `to_json` wrote."""
        pilot = content.get("pilot")
        known = None if pilot is None else PilotSamples.from_json(pilot)
        return cls(content["method"], np.asarray(content["x"]), np.asarray(content["y"]), known)


def _logit(sure: Floats) -> Floats:
    return np.asarray(special.logit(np.clip(sure, EDGE, 1 - EDGE)))


def _logistic(sure: Floats, quality: Floats) -> Floats:
    """Return slope (at least 0) and intercept that maximise the likelihood, slightly damped."""
    x = _logit(sure)

    def loss(p: Floats) -> float:
        z = p[0] * x + p[1]
        return float((np.logaddexp(0.0, z) - quality * z).mean() + 1e-4 * (p**2).sum())

    found = optimize.minimize(loss, np.asarray([1.0, 0.0]), bounds=[(0.0, None), (None, None)])
    return np.asarray(found.x)
