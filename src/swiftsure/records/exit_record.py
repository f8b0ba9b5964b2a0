"""ExitRecord: confidences, losses and costs of samples at every exit of a network."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.curves.checks import cost_array
from swiftsure.curves.conditions import LABELS_MISSING, Condition
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import Path, PathLike
from swiftsure.curves.pilots import PilotSamples, pilots_of
from swiftsure.curves.risks import RISKS
from swiftsure.curves.statistic import Statistic
from swiftsure.exits import ExitRule
from swiftsure.losses import Loss
from swiftsure.records import checks as record_checks
from swiftsure.records import files as record_files
from swiftsure.records import frames as record_frames
from swiftsure.records import labels as record_labels
from swiftsure.records import plain_arrays
from swiftsure.records.base import Record
from swiftsure.records.checks import (
    choose,
    chosen_loss,
    declared_ranges,
    gap_is_known_by_agreement,
    replace_fields,
)
from swiftsure.records.logits import reduced_logits, reduced_probabilities
from swiftsure.records.routing import ROUTER, routed
from swiftsure.scores import LearnedScore

__all__ = ["ExitRecord"]

Array = NDArray[Any]
Missing = Literal["raise", "worst", "stop"]
"""What to do where a needed label is missing."""

TEMPERATURES_FITTED = Condition("temperatures")
"""A condition of a promise made from such a record."""


@dataclass(frozen=True, eq=False)
class ExitRecord(Record):
    """Confidences and losses of n samples at every exit of a network, and the cost of each exit.

    Parameters
    ----------
    confidences : (n, n_exits - 1) or a mapping of such
        In [0, 1], at every exit but the last; a bare array is called "top1".
    losses : mapping of (n, n_exits)
        Losses against labels, for the gap risk (Eq. 6). NaN means "no label yet"; it is allowed in
        prediction losses if `inconsistencies` of the same name show whether the label matters.
    inconsistencies : mapping of (n, n_exits)
        Losses against the last exit, for the consistency risk (Eq. 8); the last column is 0.
    costs : mapping of (n_exits,) or (n, n_exits)
        Cumulative cost of each exit, including everything that runs before it, in any unit. The
        exit number is always included, as "exit".
    loss_ranges, inconsistency_ranges : mapping, optional
        (low, high) of losses that are not among `swiftsure.losses.LOSSES`; (0, 1) if not given.
    ids : (n,), optional
        Sample ids, whole numbers or text; duplicates are refused, since they void guarantees. By
        default samples are numbered 0 … n − 1.
    groups : (n,), optional
        Group labels of samples that depend on each other (one user's rows, one video's frames).
    slices : (n,), optional
        The slice of each sample (class, language, tenant, device), for promises that hold in each.
    fingerprint : str, optional
        Fingerprint of the model that made the record; None for a record made from arrays.
    temperatures : (n_exits,), optional
        Temperatures that the logits were divided by.
    dtype : str, optional
        Inference dtype of the model.
    order : SampleOrder or int, optional
        Seed of the order in which betting tests see the samples. By default one is drawn from the
        operating system's random numbers. The record and its file keep it, so that calibrating
        again gives the same policy.
    full_costs : mapping of scalars or (n,), optional
        Cost of running the full model alone, by name, if it differs from the cost of the last exit:
        in a cascade, the last model without those before it, on average or for each sample. Savings
        are measured against it.
    predictions : (n, n_exits), optional
        Class numbers that a classifier's exits predict, from which `with_labels` computes losses.
    features : mapping of (n, n_exits - 1), optional
        Other scores of the exits, in [0, 1], that a `LearnedScore` may need; of classifiers, the
        difference of the two largest probabilities, "top_diff".
    sampling : Sampling
        How samples were drawn; see `grouped`, `weighted` and `drawn_from`, which set it.
    has_ids : bool, optional
        Whether `ids` identify samples. By default they do if they are given; the numbers that the
        samples of a record without ids get do not.
    settings : mapping
        What else belongs to the policy, such as a cascade's kinds of requests.

    Raises
    ------
    ValueError, TypeError
        For anything that would void a guarantee: NaN, losses out of range, confidences outside
        [0, 1], mismatched shapes, duplicate ids.

    Examples
    --------
    >>> record = ExitRecord([[0.9], [0.4]], losses={"zero_one": [[0, 0], [1, 0]]})
    >>> record.n, record.n_exits
    (2, 2)
    """

    tables = ("confidences", "losses", "inconsistencies", "features")
    identity = (
        "loss_ranges",
        "inconsistency_ranges",
        "fingerprint",
        "temperatures",
        "dtype",
    )

    confidences: Mapping[str, Array]
    losses: Mapping[str, Array] = field(default_factory=dict)
    inconsistencies: Mapping[str, Array] = field(default_factory=dict)
    costs: Mapping[str, Array] = field(default_factory=dict)
    temperatures: tuple[float, ...] | None = field(default=None, kw_only=True)
    dtype: str | None = field(default=None, kw_only=True)
    full_costs: Mapping[str, float | Array] = field(default_factory=dict, kw_only=True)
    predictions: Array | None = field(default=None, kw_only=True)
    features: Mapping[str, Array] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        """Check every array and store its checked form."""
        given: Any = self.confidences  # may be a bare array
        scores: dict[str, Any] = dict(given if isinstance(given, Mapping) else {"top1": given})
        if not scores:
            raise ValueError("`confidences` must hold at least one score.")
        shape: tuple[int, ...] | None = None
        for name, values in scores.items():
            title = f"confidences['{name}']"
            scores[name] = record_checks.confidence_array(title, values, shape)
            shape = scores[name].shape
        features = {
            name: record_checks.confidence_array(f"features['{name}']", values, shape)
            for name, values in self.features.items()
        }
        n, n_early = next(iter(scores.values())).shape
        axes = {"n": n, "n_exits": n_early + 1}
        ranges, soft = declared_ranges(self)
        aside = {
            name: record_checks.inconsistency_array(
                f"inconsistencies['{name}']", values, axes, soft[name], full=n_early
            )
            for name, values in self.inconsistencies.items()
        }
        losses = {
            name: record_checks.loss_array_with_gaps(
                f"losses['{name}']",
                values,
                axes,
                ranges[name],
                aside.get(name) if gap_is_known_by_agreement(name) else None,
            )
            for name, values in self.losses.items()
        }
        record_checks.warn_of_accuracies(losses, full=-1, fastest=0)
        costs = {"exit": np.arange(1.0, n_early + 2)}
        for name, values in self.costs.items():
            costs[name] = cost_array(name, values, (n, n_early + 1), "n_exits")
            # Where a router fires, only the full model runs.
            after_router = costs[name][..., 1:] if ROUTER in self.settings else costs[name]
            record_checks.warn_of_falling_costs(name, after_router)
        full_costs = record_checks.full_cost_mapping(self.full_costs, costs, n)
        if ROUTER not in self.settings:
            record_checks.warn_of_a_large_first_model(costs, full_costs)
        replace_fields(
            self,
            confidences=scores,
            features=features,
            losses=losses,
            inconsistencies=aside,
            costs=costs,
            loss_ranges=ranges,
            inconsistency_ranges=soft,
            **self._checked_draw(n),
            temperatures=record_checks.temperature_tuple(self.temperatures, n_early + 1),
            dtype=record_checks.check_dtype(self.dtype),
            full_costs=full_costs,
            predictions=record_labels.prediction_array(self.predictions, n, n_early + 1),
        )

    @classmethod
    def from_logits(
        cls,
        logits: ArrayLike,
        labels: ArrayLike | None = None,
        score: str | LearnedScore | Iterable[str] = "top1",
        *,
        losses: str | Loss | Iterable[str | Loss] = ("zero_one", "brier"),
        label: Literal["expected", "sample", "argmax"] = "expected",
        temperatures: ArrayLike = 1.0,
        costs: Mapping[str, ArrayLike] | None = None,
        ids: ArrayLike | None = None,
        full_costs: Mapping[str, ArrayLike] | None = None,
        seed: int = 0,
    ) -> "ExitRecord":
        """Make a record of a classifier from its logits.

        Parameters
        ----------
        logits : (n, n_exits, n_classes)
            In the deployed network's dtype, so that confidences are exactly those that
            `swiftsure.torch.EarlyExit` will compute.
        labels : (n,), optional
            Class numbers; negative ones are missing labels. Without labels only consistency risks
            can be controlled.
        score : str or several
            Names among `swiftsure.scores.SCORES`. What the default `LearnedScore` needs is always
            there, among `features` if not named here.
        losses : str or several
            Names among `swiftsure.losses.LOSSES`, or `Loss` objects.
        label : {"expected", "sample", "argmax"}
            Consistency of distributions against the last exit's q: in closed form ‖p − q‖² (the
            mean over labels drawn from q), with one label drawn from q for each sample (the paper),
            or with q's most probable class (the paper's code; another risk).
        temperatures : scalar or (n_exits,)
            Logits are divided by these; they must not be fitted on the calibration data.
        costs, ids, full_costs
            As in `ExitRecord`; `grouped` and `sliced` add what depends.
        seed : int
            For `label="sample"`.

        Examples
        --------
        >>> record = ExitRecord.from_logits([[[2.0, 0.0], [3.0, 0.0]]], labels=[0])
        >>> float(record.losses["zero_one"].sum())
        0.0
        """
        fields = reduced_logits(logits, labels, score, losses, label, temperatures, seed)
        given: Any = {"costs": costs or {}, "full_costs": full_costs or {}}
        return cls(**fields, **given, ids=ids)  # type: ignore[arg-type]

    @classmethod
    def from_probabilities(
        cls,
        probabilities: ArrayLike,
        labels: ArrayLike | None = None,
        classes: Sequence[Any] | None = None,
        *,
        score: str | LearnedScore | Iterable[str] = "top1",
        losses: str | Loss | Iterable[str | Loss] = ("zero_one", "brier"),
        costs: Mapping[str, ArrayLike] | None = None,
        ids: ArrayLike | None = None,
        full_costs: Mapping[str, ArrayLike] | None = None,
    ) -> "ExitRecord":
        """Make a record of a classifier from class probabilities, as `predict_proba` gives them.

        Parameters
        ----------
        probabilities : (n, n_exits, n_classes)
            Zeros are fine; each distribution must sum to 1.
        labels : (n,), optional
            Class numbers, or names among `classes`; None or a negative number for a missing label.
        classes : sequence, optional
            Names of the classes, in the order of the probabilities; needed if labels are names.
        score, losses, costs, ids, full_costs
            As in `from_logits`.

        Examples
        --------
        >>> probabilities = [[[0.6, 0.4], [1.0, 0.0]]]
        >>> record = ExitRecord.from_probabilities(probabilities, ["cat"], classes=["dog", "cat"])
        >>> record.losses["zero_one"]
        array([[1., 1.]])
        """
        fields = reduced_probabilities(probabilities, labels, score, losses, classes)
        given: Any = {"costs": costs or {}, "full_costs": full_costs or {}}
        return cls(**fields, **given, ids=ids)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        """Return a one-line summary of the record."""
        held = [
            f"{part}={list(getattr(self, part))}"
            for part in ("confidences", "losses", "inconsistencies", "costs")
        ]
        return f"ExitRecord({', '.join([f'n={self.n}, n_exits={self.n_exits}', *held])})"

    @property
    def n_exits(self) -> int:
        """Number of exits, including the last."""
        return int(next(iter(self.confidences.values())).shape[1]) + 1

    def curve(
        self,
        risk: str = "gap",
        loss: str | None = None,
        score: str | LearnedScore | None = None,
        path: PathLike = None,
        *,
        missing: Missing = "raise",
        rule: ExitRule | None = None,
    ) -> RiskCurve:
        """Return the losses and costs along a path of thresholds, the input to every control.

        Parameters
        ----------
        risk : {"gap", "consistency", "zero-bounded …"}
            Against labels (Eq. 6), or against the last exit (Eq. 8). The zero-bounded risks count a
            loss as 0 if the exit does better than the last one (Eq. 16).
        loss : str, optional
            Needed if the record holds several.
        score : str or LearnedScore, optional
            top1 by default, if the record holds several.
        path : None, "logit", "breakpoints", thresholds, or Path
            Settings from safest to fastest; by default a fixed grid, evenly spaced in the logit.
        missing : {"raise", "worst", "stop"}
            What to do if a needed label is missing. "raise" refuses. "worst" assumes the worst
            loss, which is valid whatever decided which labels are there, except with bets: they
            need that whether a sample's label is missing depends on that sample alone. "stop" cuts
            the path before the first setting that lacks a label, which is always valid;
            `needs_label` says which labels to get.
        rule : ExitRule, optional
            When samples exit, apart from the threshold. Its score takes the place of `score`.
        """
        plain = self.plain_curve(risk, loss, rule or ExitRule(score), path, missing)
        return self.sampling.applied(plain, self.groups)

    def plain_curve(
        self,
        risk: str,
        loss: str | None,
        rule: ExitRule,
        path: PathLike = None,
        missing: Missing = "raise",
    ) -> RiskCurve:
        """Return `curve` with every sample counted alike, without groups and weights."""
        checks.choice("missing", missing, ["raise", "worst", "stop"])
        if missing != "raise" and not self.losses and RISKS.choose(risk).table == "losses":
            return self._without_labels().plain_curve(risk, loss, rule, path, missing)
        loss = chosen_loss(self, risk, loss)
        confidences = self.confidences_of(rule)
        values, declared = RISKS[risk].relative_losses(self, loss, full=-1)
        route = Path.of(path, confidences)
        route.refuse(self)
        conditions: tuple[Condition, ...] = ()
        if self.temperatures is not None:
            conditions = (TEMPERATURES_FITTED,)
        if isinstance(rule.score, LearnedScore):
            rule.score.refuse(self)
            conditions += (rule.score.condition,)
        for what, pilot in pilots_of(self).items():
            pilot.refuse(self, what)
            conditions += (Condition.of(f"{what} pilot", n=pilot.n),)
        labelled, n_known = self.n, len(route)
        if np.isnan(values).any():
            labelled = int((~np.isnan(values[:, -1])).sum())
            if loss in self.inconsistencies and gap_is_known_by_agreement(loss):
                values[(self.inconsistencies[loss] == 0) & np.isnan(values)] = 0.0
            unknown = np.isnan(values)
            first = record_labels.first_setting(confidences, unknown, route, rule)
            needed = first < len(route)
            if missing == "raise" and needed.any():
                raise record_labels.MissingLabelsError(
                    f"{needed.sum()} missing label(s) matter: `record.needs_label(loss={loss!r})`"
                    ' lists the samples. Label them, pass `missing="stop"` to stop before the first'
                    ' setting that lacks a label, or `missing="worst"` to assume the worst.'
                )
            values[unknown] = declared.high
            if missing == "stop":
                n_known = int(first.min())
            if missing == "worst" and needed.any():
                conditions += (LABELS_MISSING,)
        curve = RiskCurve.from_exits(
            confidences,
            values,
            route,
            declared,
            rule=rule,
            statistic=Statistic(risk, loss),
            costs=self.costs,
            full_costs=self.full_costs,
            order=self.order,
        )
        n_labels = labelled if RISKS[risk].table == "losses" else None
        return replace(curve, conditions=conditions, n_labels=n_labels).cut(n_known)

    def routed(
        self,
        hopeless: ArrayLike,
        *,
        cost: Mapping[str, float | ArrayLike] | None = None,
        pilot: PilotSamples | None = None,
    ) -> "ExitRecord":
        """Return the record with a router in front, a dial of its own: a new first exit.

        Inputs whose `hopeless` is at least the first threshold go straight to the full model, which
        costs `full_costs` alone. Calibrate with `path=Path.learn(share)`: the two dials have no
        common order.

        Parameters
        ----------
        hopeless : (n,)
            In [0, 1]: how likely the exits before the last are of no use, known before they run.
        cost : mapping of scalars or (n,), optional
            What the router itself costs, by names of `costs`; 0 if not given.
        pilot : PilotSamples, optional
            The samples that the router was learned on, none of which may be here.

        Examples
        --------
        >>> record = ExitRecord(
        ...     [[0.9], [0.4]],
        ...     inconsistencies={"zero_one": [[0, 0], [1, 0]]},
        ...     costs={"usd": [1.0, 11.0]},
        ...     full_costs={"usd": 10.0},
        ... )
        >>> two_dials = record.routed([0.1, 0.8], cost={"usd": 0.1})
        >>> two_dials.n_exits, two_dials.costs["usd"].tolist()
        (3, [10.1, 1.1, 11.1])
        """
        return routed(self, hopeless, cost, pilot)

    def score_of(self, rule: ExitRule) -> str:
        """Return the name of the score that a rule uses."""
        if rule.is_learned:
            return str(rule.score_name)
        return choose("score", rule.score_name, self.confidences, preferred="top1")

    def confidences_of(self, rule: ExitRule) -> Array:
        """Return the confidences, (n, n_exits - 1), by which a rule decides."""
        if isinstance(rule.score, LearnedScore):
            return rule.score.confidences({**self.features, **self.confidences})
        return self.confidences[self.score_of(rule)]

    def needs_label(
        self,
        loss: str = "zero_one",
        score: str | LearnedScore | None = None,
        path: PathLike = None,
        *,
        budget: int | None = None,
        threshold: float | None = None,
        rule: ExitRule | None = None,
    ) -> Array:
        """Return the ids of samples whose label is needed but missing, in the order of the walk.

        The gap of a prediction loss is 0 if the exit agrees with the full model, so a label
        matters only if at some setting of the path the sample takes an exit that disagrees. The
        walk tests the safest setting first; so the samples come first that disagree there.

        Parameters
        ----------
        budget : int, optional
            Return at most this many. With them labelled, `missing="stop"` calibrates on all samples
            of the record, down to the first setting that lacks a label.
        threshold : float, optional
            Consider only settings whose threshold is at least this.
        rule : ExitRule, optional
            As in `curve`.

        Examples
        --------
        >>> from swiftsure.study.simulate import Population
        >>> sample = Population().sample(600, seed=0)
        >>> record = ExitRecord.from_logits(sample.logits)
        >>> rows = record.needs_label("zero_one", budget=100)
        >>> record = record.with_labels(rows, sample.labels[rows])
        >>> record.curve(loss="zero_one", missing="stop").n
        600
        """
        checks.choice(
            "loss", loss, [k for k in self.inconsistencies if gap_is_known_by_agreement(k)]
        )
        differs = self.inconsistencies[loss] != 0
        if loss in self.losses:
            differs = differs & np.isnan(self.losses[loss])
        rule = rule or ExitRule(score)
        confidences = self.confidences_of(rule)
        route = Path.of(path, confidences)
        if threshold is not None:
            reached = (route.thresholds >= np.float32(threshold)).reshape(len(route), -1)
            route = Path(route.thresholds[reached.all(axis=1)], route.kind)
        first = record_labels.first_setting(confidences, differs, route, rule)
        order = np.argsort(first, kind="stable")
        order = order[: int((first < len(route)).sum())]
        if budget is not None:
            order = order[: checks.count("budget", budget, 0)]
        chosen: Array = self.ids[order]
        return chosen

    def with_labels(
        self,
        rows: ArrayLike,
        labels: ArrayLike | None = None,
        *,
        classes: Sequence[Any] | None = None,
        losses: Mapping[str, ArrayLike] | None = None,
    ) -> "ExitRecord":
        """Return the record with labels of some samples added.

        Parameters
        ----------
        rows : (m,)
            Ids of the samples, as `needs_label` returns them; none may have a label already.
        labels : (m,)
            Class numbers, or names among `classes`; None or a negative number if unknown. The
            losses follow from the record's `predictions`.
        classes : sequence, optional
            Names of the classes, in the order of the class numbers.
        losses : mapping of (m, n_exits), optional
            Instead of labels: losses against them, by name, for any loss that is known where
            answers agree.

        Examples
        --------
        >>> record = ExitRecord.from_logits([[[2.0, 0.0], [0.0, 3.0]]], losses="zero_one")
        >>> record.with_labels(record.needs_label(), [1]).losses["zero_one"]
        array([[1., 0.]])
        """
        if np.size(np.asarray(rows)) == 0:
            return self if self.losses else self._without_labels()
        found = record_labels.positions(self.ids, rows)
        if (labels is None) == (losses is None):
            raise ValueError("`labels` or `losses` must be given, and not both.")
        if losses is not None:
            return replace(self, losses=record_labels.with_losses(self, found, losses))
        numbers = record_labels.class_numbers(labels, classes, len(found))
        return replace(self, losses=record_labels.losses_with_labels(self, found, numbers))

    def _without_labels(self) -> "ExitRecord":
        """Return the record with unknown losses for every prediction loss."""
        unknown = {
            name: np.full((self.n, self.n_exits), np.nan)
            for name in self.inconsistencies
            if gap_is_known_by_agreement(name)
        }
        return replace(self, losses=unknown)

    @classmethod
    def from_frame(cls, frame: Any) -> "ExitRecord":
        """Make a record from a table: a data frame, an Arrow table, or a mapping of columns.

        Its columns, with exits counted from 1, are any of these:

        | column | what it holds |
        |---|---|
        | `confidence.K`, or `confidence.SCORE.K` | the confidence at exit K, all but the last |
        | `prediction.K` and `label` | answers, from which the 0-1 losses follow |
        | `loss.NAME.K`, `inconsistency.NAME.K` | a loss at exit K |
        | `cost.NAME.K`, `full_cost.NAME` | a cost up to exit K, and of the full model alone |
        | `id`, `group`, `slice` | as in `ExitRecord` |

        A label that is empty is missing. `load`, and the command line, read the same columns from a
        .csv file.

        Examples
        --------
        >>> record = ExitRecord.from_frame(
        ...     {
        ...         "confidence.1": [0.9, 0.4],
        ...         "prediction.1": ["cat", "dog"],
        ...         "prediction.2": ["cat", "cat"],
        ...         "label": ["cat", "cat"],
        ...     }
        ... )
        >>> record.losses["zero_one"]
        array([[0., 0.],
               [1., 0.]])
        """
        return cls(**record_frames.arguments(frame))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        scores: Iterable[str] | None = None,
        losses: Iterable[str] | None = None,
    ) -> "ExitRecord":
        """Read a record from Parquet, npz or CSV, with all scores and losses or only those named.

        An npz may hold `logits` or `probabilities` (and `labels`) instead of a record's arrays; a
        CSV has the columns of `from_frame`, and is read as a whole.
        """
        with record_files.reading(path):
            if record_frames.is_csv(path):
                return cls.from_frame(record_frames.read_csv(path))
            raw = plain_arrays.logits(path)
            if raw is not None:
                make = cls.from_logits if "logits" in raw else cls.from_probabilities
                kept = losses or ("zero_one", "brier")
                draw = {name: raw.pop(name, None) for name in ("groups", "slices")}
                return replace(make(**raw, score=scores or "top1", losses=kept), **draw)
            only = {"confidences": scores, "losses": losses}
            return cls(**record_files.load(path, "exits", only))
