"""Paths: the settings that a control can choose from, safest first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.curves.branches import Branches
from swiftsure.curves.pareto import pareto_order, upper_estimates
from swiftsure.curves.pilots import PilotPath, PilotSamples
from swiftsure.exits import NEVER, threshold_array

__all__ = [
    "BREAKPOINTS",
    "FRONT",
    "GIVEN_SETTINGS",
    "LEARNED",
    "WITHIN_SCORES",
    "Path",
    "PathLike",
    "exit_candidates",
]

BREAKPOINTS = "every breakpoint"
"""The kind of a path made from the calibration confidences."""

LEARNED = "learned on a pilot: "
"""The beginning of the kind of a path that was learned on other samples."""

FRONT = LEARNED + "front of risk and cost"
"""The kind of a path of settings by their risk and cost on a pilot."""

ROUTER = "router"
"""The setting of a record, and of its policies, that says that the first exit is a router."""

GIVEN_SETTINGS = "given settings"
"""The kind of a path whose settings came with the losses."""

LOGIT_GRID = "logit grid"
WITHIN_SCORES = (BREAKPOINTS, LOGIT_GRID)
"""Kinds of paths whose thresholds lie in [0, 1], as confidences do; given ones may not."""


@dataclass(frozen=True, eq=False)
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
    columns : tuple of int, optional
        For a ThresholdRecord: its settings by number, in the order of the path, from 0, the full
        model, on. `thresholds` then repeats them.
    made_for : str, optional
        Digest of the settings that `columns` number.
    pilot : PilotSamples, optional
        The samples that the path was learned on, which calibration refuses.
    branches : Branches, optional
        Several sequences of positions on the path that share δ, instead of one.
    cost : str, optional
        The cost by which a setting is chosen among those certified on several branches.
    """

    thresholds: NDArray[np.float32]
    kind: str
    columns: tuple[int, ...] | None = None
    made_for: str | None = field(default=None, repr=False)
    pilot: PilotSamples | None = field(default=None, repr=False)
    branches: Branches | None = None
    cost: str | None = None

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

    def __eq__(self, other: object) -> bool:
        """Return whether two paths have the same settings, made in the same way."""
        return isinstance(other, Path) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        """Return a hash of the settings."""
        return hash((self.kind, self.thresholds.tobytes(), self.columns))

    def to_json(self) -> dict[str, Any]:
        """Return the path as JSON; of a pilot, only its size and a hash of its losses."""
        never = [None if np.isposinf(v) else float(v) for v in self.thresholds.ravel()]
        return {
            "thresholds": never,
            "columns_per_row": None if self.thresholds.ndim == 1 else self.thresholds.shape[1],
            "kind": self.kind,
            "columns": None if self.columns is None else list(self.columns),
            "made_for": self.made_for,
            "pilot": None if self.pilot is None else [self.pilot.n, self.pilot.digest],
            "branches": None
            if self.branches is None
            else [[list(branch) for branch in self.branches.settings], self.branches.flow],
            "cost": self.cost,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Path":
        """Return the path that `to_json` wrote; it no longer knows the ids of its pilot."""
        values = threshold_array(content["thresholds"], "path")
        width, pilot, branches = (content[k] for k in ("columns_per_row", "pilot", "branches"))
        return cls(
            values if width is None else values.reshape(-1, width),
            content["kind"],
            None if content["columns"] is None else tuple(content["columns"]),
            content["made_for"],
            None if pilot is None else PilotSamples.forgotten(*pilot),
            None if branches is None else Branches(tuple(map(tuple, branches[0])), branches[1]),
            content["cost"],
        )

    @staticmethod
    def learn(pilot: int | float, *, cost: str | None = None) -> PilotPath:
        """Return a path to be learned on this many of the record's samples, or this share.

        The pilot is drawn at random when the calibration runs, and does not calibrate. Of all
        settings, the path keeps those that trade risk for cost best on it; see `pareto`.

        Examples
        --------
        >>> Path.learn(200, cost="flops")
        PilotPath(share=200, cost='flops')
        """
        return PilotPath(pilot, cost)

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
    def pareto(
        cls,
        pilot: Any,
        risk: str | None = None,
        loss: str | None = None,
        *,
        cost: str | None = None,
        candidates: ArrayLike | None = None,
        **options: Any,
    ) -> "Path":
        """Return the settings that trade risk for cost best, by samples not used to calibrate.

        For systems with several dials. Of the pilot's settings, those are kept that no other one
        beats in both estimated risk and mean cost. They are ordered by estimated risk, so the path
        goes from the safest to the fastest.

        **Guarantee**: calibrating along this path is valid if no sample of the pilot is among the
        calibration samples, even where the pilot has no labels: the path is then fixed before the
        calibration losses are seen. A pilot that estimates badly costs speed, not validity.

        The path remembers its pilot, and calibration refuses a record that shares ids or groups
        with it. The samples of records without ids are only numbered. Parts of one such record are
        still compared if its seed was drawn at random, the default. Otherwise only the very same
        samples are recognised, and a record that holds the pilot among others is accepted: give
        your records ids.

        Parameters
        ----------
        pilot : ThresholdRecord or ExitRecord
            Of the same settings as the calibration record. Labels are needed only if the risk
            needs them.
        risk, loss : str, optional
            As in `record.curve`; by default the gap if the pilot has `losses`, and otherwise the
            consistency with the full model, which needs no labels.
        cost : str, optional
            The cost to save: by default FLOPs if the pilot has them, otherwise its first cost.
        candidates : (K, n_exits - 1), optional
            For an ExitRecord: the thresholds to choose from, one per exit. By default every
            combination of quantiles of the pilot's confidences.
        **options
            Others of `record.curve`, such as `score`.

        Examples
        --------
        >>> import numpy as np, swiftsure as ss
        >>> losses = np.random.default_rng(0).random((200, 4)) < [0, 0.01, 0.3, 0.1]
        >>> pilot = ss.ThresholdRecord(
        ...     dials={"steps": [50, 25, 25, 10], "cache": [0.0, 0.1, 0.4, 0.1]},
        ...     inconsistencies={"mse": losses.astype(float)},
        ...     costs={"seconds": [9.0, 4.0, 3.0, 2.0]},
        ... )
        >>> ss.Path.pareto(pilot).columns
        (0, 1, 3)
        """
        if risk is None:
            risk = "gap" if getattr(pilot, "losses", None) else "consistency"
        if hasattr(pilot, "confidences"):
            options["path"] = exit_candidates(pilot, options.get("score"), candidates)
        elif candidates is not None:
            raise ValueError("`candidates` are for an ExitRecord; others hold theirs.")
        curve = pilot.curve(risk, loss, **options)
        return cls.front([curve], [1.0], pilot, cost)

    @classmethod
    def front(
        cls, curves: Sequence[Any], levels: Sequence[float], pilot: Any, cost: str | None = None
    ) -> "Path":
        """Return the front of one or several risks of a pilot; see `pareto`.

        The largest of the risks counts, each as a share of its level.
        """
        first = curves[0]
        if not first.costs:
            raise ValueError(
                "`pilot` must have costs: its settings are compared by what they save."
            )
        name = str(first.default_cost(cost))
        risks = [
            upper_estimates(curve.losses()) / level
            for curve, level in zip(curves, levels, strict=True)
        ]
        saved = first.mean_cost(name).copy()
        saved[0] = first.full_cost(name)
        order = pareto_order(np.max(risks, axis=0), saved)
        samples = PilotSamples.of(pilot)
        if hasattr(pilot, "confidences"):  # of groups, the curve itself does not show it
            rows = first.thresholds[order]
            if ROUTER in pilot.settings and len(rows) > 1:
                rows = led_to(rows, first.thresholds)
            return cls(rows, FRONT, pilot=samples)
        return replace(cls.settings(order.tolist(), pilot), kind=FRONT, pilot=samples)

    @classmethod
    def settings(cls, columns: Sequence[int], record: Any) -> "Path":
        """Return a path over settings of a ThresholdRecord, by their numbers, in the order given.

        Examples
        --------
        >>> import swiftsure as ss
        >>> record = ss.ThresholdRecord(
        ...     dials={"steps": [50, 25, 10]}, losses={"mse": [[0.1, 0.2, 0.3]]}
        ... )
        >>> Path.settings([2, 1], record).columns
        (0, 2, 1)
        """
        numbers = [checks.count("columns", k, 0) for k in columns]
        numbers = numbers if numbers and numbers[0] == 0 else [0, *numbers]
        if max(numbers) >= record.n_settings or len(set(numbers)) < len(numbers):
            raise ValueError(
                f"`columns` must be numbers of the record's {record.n_settings} settings, each"
                " once."
            )
        thresholds = np.asarray([NEVER, *numbers[1:]], np.float32)
        return cls(thresholds, "given order of settings", tuple(numbers), record.settings_digest())

    @classmethod
    def branching(
        cls,
        branches: Sequence[Sequence[int]],
        record: Any,
        *,
        flow: bool = True,
        cost: str | None = None,
    ) -> "Path":
        """Return a path with several branches of a ThresholdRecord's settings that share δ.

        No pilot is needed, and all samples calibrate; but each branch begins with a part of δ. Of
        all settings that are certified, the one with the lowest cost on the calibration samples is
        chosen.

        Parameters
        ----------
        branches : sequences of int
            Numbers of settings, each sequence safest first; `record.branches(along=...)` makes
            them from a grid. They must not depend on the calibration losses.
        record : ThresholdRecord
            A record with these settings; its losses are not looked at.
        flow : bool
            Whether a branch that is certified to its end passes its δ on to the others (a graph,
            Bretz et al. 2009), rather than each branch keeping its own part (Bonferroni).
        cost : str, optional
            By default FLOPs if the record has them, otherwise its first cost.

        Examples
        --------
        >>> import swiftsure as ss
        >>> record = ss.ThresholdRecord(
        ...     dials=ss.dial_grid({"a": [1, 2], "b": [1, 2]}, full={"a": 0, "b": 0}),
        ...     losses={"mse": [[0.1] * 5]},
        ... )
        >>> Path.branching(record.branches(along="a"), record).branches.settings
        ((1, 2), (3, 4))
        """
        checked = Branches(tuple(map(tuple, branches)), flow)
        path = cls.settings([k for branch in checked.settings for k in branch], record)
        ends = np.cumsum([len(branch) for branch in checked.settings]) + 1
        starts = [1, *ends[:-1].tolist()]
        positions = tuple(tuple(range(a, b)) for a, b in zip(starts, ends.tolist(), strict=True))
        how = "each passes its part of δ on" if flow else "each has its part of δ"
        kind = f"{len(checked)} branches of settings; {how}"
        chosen = None if cost is None else checks.choice("cost", cost, record.costs)
        return replace(path, kind=kind, branches=Branches(positions, flow), cost=chosen)

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

    def refuse(self, record: Any) -> None:
        """Raise if a record holds samples of the pilot that the path was learned on."""
        if self.pilot is not None:
            self.pilot.refuse(record)

    def per_exit(self, n_exits: int) -> NDArray[np.float32]:
        """Return the thresholds as (K, n_exits - 1)."""
        values = self.thresholds
        if values.ndim == 1:
            values = np.repeat(values[:, None], n_exits - 1, axis=1)
        checks.of_shape("path", values, {"K": None, "n_exits - 1": n_exits - 1})
        return np.ascontiguousarray(values)


MOST_CANDIDATES = 4000
"""Combinations of thresholds of exits that `Path.pareto` compares at most."""


def exit_candidates(pilot: Any, score: str | None, given: ArrayLike | None) -> Path:
    """Return combinations of per-exit thresholds: those given, or of quantiles of a pilot's."""
    if given is not None:
        return Path.family(given)
    scores = pilot.confidences
    name = score or ("top1" if "top1" in scores else next(iter(scores)))
    values = np.asarray(scores[checks.choice("score", name, scores)], np.float64)
    n_levels = max(2, int(MOST_CANDIDATES ** (1 / values.shape[1])))
    levels = np.quantile(values, np.linspace(1, 0, n_levels), axis=0)
    levels = np.vstack([np.full(values.shape[1], NEVER), levels])
    grids = np.meshgrid(*levels.T, indexing="ij")
    rows = np.unique(np.stack(grids, axis=-1).reshape(-1, values.shape[1]), axis=0)
    return Path.family(rows[::-1])


LEAD = 20
"""Steps, at most, from the full model to the first setting of a front of a router and exits."""


def led_to(rows: NDArray[np.float32], candidates: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a front with steps to its first setting, which keep the router and let fewer exit.

    A pilot shows no loss at many settings, and the front begins with the cheapest of them. Where
    its risk is above the level after all, the walk would end before it began.
    """
    router, *first_values = rows[1]
    steps = np.full((LEAD, len(rows[1])), router, np.float32)
    for k, first_value in enumerate(first_values, 1):
        values = np.unique(candidates[:, k])
        higher = values[(values > first_value) & np.isfinite(values)]
        places = np.linspace(len(higher) - 1, 0, LEAD).round().astype(int)
        steps[:, k] = higher[places] if len(higher) else first_value
    _, first = np.unique(steps, axis=0, return_index=True)
    return np.vstack([rows[:1], steps[np.sort(first)], rows[1:]])


PathLike = Path | str | ArrayLike | None
