"""Paths: the settings that a control can choose from, safest first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure import checks
from swiftsure.exits import NEVER, threshold_array
from swiftsure.path_learning import Pilot, learned_thresholds

__all__ = ["BREAKPOINTS", "LEARNED", "WITHIN_SCORES", "Path", "PathLike"]

BREAKPOINTS = "every breakpoint"
"""The kind of a path made from the calibration confidences."""

LEARNED = "learned on a pilot: "
"""The beginning of the kind of a path that was learned on other samples."""

LOGIT_GRID = "logit grid"
WITHIN_SCORES = (BREAKPOINTS, LOGIT_GRID)
"""Kinds of paths whose thresholds lie in [0, 1], as confidences do; given ones may not."""


@dataclass(frozen=True)
class Path:
    """Threshold settings in the order in which they are tested; the first is the full model.

    A guarantee holds for a path that is fixed before the calibration losses are seen. The one
    exception is `Path.breakpoints`, which takes *every* point where the calibration exits change.

    Parameters
    ----------
    thresholds : (K,) or (K, n_exits - 1)
        One shared threshold per setting, or one per exit.
    kind : str
        How the path was made, for certificates.
    """

    thresholds: NDArray[np.float32]
    kind: str

    def __post_init__(self) -> None:
        """Convert thresholds to float32; refuse a path that does not start at the full model."""
        values = threshold_array(self.thresholds, "path")
        if values.ndim not in (1, 2) or values.size == 0:
            raise ValueError(
                "`path` must have shape (K,) or (K, n_exits - 1), but got"
                f" {checks.shape_text(values.shape)}."
            )
        if not np.isposinf(values[0]).all():
            raise ValueError("`path` must begin with the full model: never (None, or infinity).")
        object.__setattr__(self, "thresholds", values)

    def __len__(self) -> int:
        """Return the number of settings, including the full model."""
        return len(self.thresholds)

    @classmethod
    def logit_grid(cls, step: float = 0.05, high: float = 16.0, low: float = -8.0) -> "Path":
        """Return the default path: thresholds evenly spaced in the logit of the confidence.

        Confidences of overconfident exits cluster near 1, where a linear grid has too few points.

        Examples
        --------
        >>> path = Path.logit_grid()
        >>> path.thresholds[:2], path.thresholds[-1]
        (array([inf,  1.], dtype=float32), np.float32(0.0))
        """
        if not (step > 0 and high > low):
            raise ValueError(f"`step` must be positive and `high` above `low`, but got {step}.")
        logits = np.linspace(high, low, round((high - low) / step) + 1)
        values = np.concatenate([[1.0], 1.0 / (1.0 + np.exp(-logits)), [0.0]])
        return cls._descending(values, LOGIT_GRID)

    @classmethod
    def grid(cls, thresholds: ArrayLike) -> "Path":
        """Return a path over shared thresholds, sorted safest first after an added "never".

        Examples
        --------
        >>> Path.grid([0.5, 0.9]).thresholds
        array([inf, 0.9, 0.5], dtype=float32)
        """
        values = threshold_array(thresholds, "path")
        return cls._descending(checks.of_shape("path", values, {"K": None}), "given grid")

    @classmethod
    def breakpoints(cls, confidences: ArrayLike) -> "Path":
        """Return every threshold at which some sample's exit changes.

        They represent all possible thresholds. Just above the largest confidence c, none of these
        samples exits, but new samples may. That setting is tested first, unless c is 1, which no
        confidence exceeds. Skipping it is invalid if losses can be negative: with few samples its
        test fails, since all losses are 0, although the test of a faster setting passes.

        Examples
        --------
        >>> Path.breakpoints([[0.5, 0.5], [1.0, 0.7]]).thresholds
        array([inf, 1. , 0.7, 0.5], dtype=float32)
        >>> Path.breakpoints([[0.5], [0.75]]).thresholds
        array([       inf, 0.75000006, 0.75      , 0.5       ], dtype=float32)
        """
        values = checks.numbers("confidences", confidences, np.float32).ravel()
        if values.size and values.max() < 1:
            values = np.append(values, np.nextafter(values.max(), NEVER, dtype=np.float32))
        return cls._descending(values, BREAKPOINTS)

    @classmethod
    def family(cls, thresholds: ArrayLike) -> "Path":
        """Return a path over vectors of per-exit thresholds, in the order given.

        Parameters
        ----------
        thresholds : (K, n_exits - 1)
            Safest first; a first row of "never" is added if it is missing.

        Examples
        --------
        >>> Path.family([[0.9, 0.8], [0.7, 0.5]]).thresholds.shape
        (3, 2)
        """
        values = threshold_array(thresholds, "path")
        checks.of_shape("path", values, {"K": None, "n_exits - 1": None})
        if not np.isposinf(values[0]).all():
            values = np.vstack([np.full((1, values.shape[1]), NEVER), values])
        return cls(values, "family of per-exit thresholds")

    @classmethod
    def learned(
        cls,
        pilot: Any,
        loss: str | None = None,
        *,
        score: str | None = None,
        cost: str | None = None,
        epsilons: tuple[float, ...] = (0.01, 0.02, 0.05),
    ) -> "Path":
        """Return thresholds for each exit, learned on samples that are not used to calibrate.

        Compared are one shared threshold, temperatures and a threshold for each exit; the one that
        saves most on held-out samples of the pilot is used. It pays where exits are overconfident
        to different degrees; elsewhere the result is the default path.

        **Guarantee**: calibrating along this path is valid only if no sample of the pilot is among
        the calibration samples, even where the pilot has no labels. Certificates state this.

        Parameters
        ----------
        pilot : ExitRecord
            Labels may be missing: the loss is then the inconsistency with the full model.
        loss, score, cost : str, optional
            Which to use, if the pilot has several; by default zero_one, top1, and FLOPs or the exit
            number.
        epsilons : tuple of float
            Levels at which savings are compared.

        Examples
        --------
        >>> import swiftsure as ss
        >>> pilot = ss.ExitRecord.from_logits(ss.simulate.Population().sample(300, seed=0).logits)
        >>> ss.Path.learned(pilot).kind.startswith("learned on a pilot: ")
        True
        """
        for table in ("confidences", "inconsistencies"):
            if not isinstance(getattr(pilot, table, None), Mapping) or not getattr(pilot, table):
                raise TypeError("`pilot` must be an ExitRecord with `inconsistencies`.")
        known = pilot.inconsistencies
        loss = checks.choice("loss", loss or ("zero_one" if "zero_one" in known else ""), known)
        scores = pilot.confidences
        score = score or ("top1" if "top1" in scores else next(iter(scores)))
        confidences = np.asarray(scores[checks.choice("score", score, scores)], np.float64)
        values = np.asarray(known[loss], np.float64)
        against = pilot.losses.get(loss)
        if against is not None and not np.isnan(against).any():
            values = np.asarray(against - against[:, -1:], np.float64)
        name = cost or ("flops" if "flops" in pilot.costs else "exit")
        costs = np.asarray(pilot.costs[checks.choice("cost", name, pilot.costs)], np.float64)
        costs = costs.mean(axis=0) if costs.ndim == 2 else costs
        shared = cls.logit_grid().thresholds.astype(np.float64)
        rows, way = learned_thresholds(Pilot(confidences, values, costs), shared, epsilons)
        return cls(rows.astype(np.float32), LEARNED + way)

    @classmethod
    def of(cls, path: "PathLike", confidences: NDArray[Any]) -> "Path":
        """Return `path` as a Path: None, "logit", "breakpoints", thresholds, or a Path."""
        if isinstance(path, Path):
            return path
        if path is None:
            return cls.logit_grid()
        if isinstance(path, str):
            checks.choice("path", path, ["logit", "breakpoints"])
            return cls.logit_grid() if path == "logit" else cls.breakpoints(confidences)
        values = threshold_array(path, "path")
        return cls.family(values) if values.ndim == 2 else cls.grid(values)

    @classmethod
    def _descending(cls, values: NDArray[Any], kind: str) -> "Path":
        unique = np.unique(values.astype(np.float32))[::-1]
        finite = unique[np.isfinite(unique)]
        return cls(np.concatenate([[NEVER], finite]).astype(np.float32), kind)

    def per_exit(self, n_exits: int) -> NDArray[np.float32]:
        """Return the thresholds as (K, n_exits - 1)."""
        values = self.thresholds
        if values.ndim == 1:
            values = np.repeat(values[:, None], n_exits - 1, axis=1)
        checks.of_shape("path", values, {"K": None, "n_exits - 1": n_exits - 1})
        return np.ascontiguousarray(values)


PathLike = Path | str | ArrayLike | None
