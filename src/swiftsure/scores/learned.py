"""`LearnedScore`: how likely an exit agrees with the full model, learned without labels."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure._lib.files import read_json, write_text
from swiftsure.curves.conditions import Condition
from swiftsure.curves.pilots import PilotSamples
from swiftsure.scores.features import DEFAULT_FEATURES, feature_of, inputs_of
from swiftsure.scores.fitting import logistic_weights
from swiftsure.scores.outputs import (
    SCORES,
    SHIFT,
    STEPS,
    are_probabilities,
    probabilities,
)

__all__ = ["LearnedScore"]

Floats = NDArray[np.float64]

FORMAT = "swiftsure-score"


@dataclass(frozen=True, eq=False)
class LearnedScore:
    """A confidence: the probability that an exit agrees with the full model.

    It is a logistic regression per exit on a few numbers of that exit's own output, fitted on
    samples that need no labels. Use it wherever a score is named, such as
    `calibrate(record, score=learned)`; the record then needs the scores in `inputs`, which those of
    classifiers hold.

    **Guarantee**: calibrating with a learned score is valid only if no sample of the pilot, nor one
    of its group, is among the calibration samples. Ids and groups are compared, and certificates
    state the condition.

    Attributes
    ----------
    features : tuple of str
        Names in `swiftsure.scores.FEATURES`, or of scores, which enter by their logit; or of
        features of one's own, whose values are passed to `of_features`.
    weights : (n_exits - 1, 1 + n_features)
        Intercept and slopes of each exit but the last; one row if all exits share them.
    pilot : PilotSamples or None
        The samples that it was learned on.

    Examples
    --------
    >>> import swiftsure as ss
    >>> sample = ss.simulate.Population().sample(2000, seed=0)
    >>> record = ss.ExitRecord.from_logits(sample.logits, sample.labels)
    >>> pilot, rest = record.split(500)
    >>> learned = ss.LearnedScore.fit(pilot)
    >>> policy = ss.calibrate(rest, loss="zero_one", epsilon=0.02, score=learned)
    >>> policy.rule.score == learned
    True
    """

    features: tuple[str, ...]
    weights: Floats
    pilot: PilotSamples | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the weights."""
        names = tuple(self.features)
        weights = checks.finite("weights", checks.numbers("weights", self.weights, np.float64))
        checks.of_shape("weights", weights, {"exits": None, "1 + n_features": 1 + len(names)})
        object.__setattr__(self, "features", names)
        object.__setattr__(self, "weights", weights)

    @classmethod
    def fit(
        cls,
        pilot: Any,
        features: Sequence[str] | None = None,
        *,
        loss: str | None = None,
        shared: bool = False,
        ids: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> "LearnedScore":
        """Learn the score from a record, or from logits, without looking at labels.

        Parameters
        ----------
        pilot : ExitRecord, or (n, n_exits, n_classes)
            Samples that will not calibrate: a record with `inconsistencies`, as `from_logits`,
            `from_probabilities` and `collect` make it without labels; or logits, or probabilities.
        features : sequence of str, optional
            As in the class. By default those of classifiers, `DEFAULT_FEATURES`, where the record
            has what they need, else the logits of all its scores.
        loss : str, optional
            The inconsistency that is to be small; by default zero_one, or the pilot's first.
        shared : bool
            Whether all exits share one regression, without an intercept of their own.
        ids, groups : (n,), optional
            Of the samples of logits, by which calibration recognises them.

        Examples
        --------
        >>> import swiftsure as ss
        >>> logits = ss.simulate.Population().sample(300, seed=0).logits
        >>> score = ss.LearnedScore.fit(ss.ExitRecord.from_logits(logits))
        >>> score.features, score.weights.shape
        (('log_ratio', 'log1p_ratio'), (4, 3))
        """
        if not hasattr(pilot, "confidences"):
            return cls._of_outputs(pilot, features, loss, shared, ids, groups)
        given = [name for name, value in (("ids", ids), ("groups", groups)) if value is not None]
        if given:
            raise ValueError(f"`{given[0]}` are those of the record, and only of use with logits.")
        known = pilot.inconsistencies
        if not known:
            raise ValueError(
                "`pilot` must hold `inconsistencies`, to see where exits agree with the full model;"
                " `from_logits`, `from_probabilities` and `collect` store them."
            )
        loss = loss or ("zero_one" if "zero_one" in known else next(iter(known)))
        apart = known[checks.choice("loss", loss, known)][:, :-1]
        high = pilot.inconsistency_ranges[loss].high
        scores = {**pilot.features, **pilot.confidences}
        if features is None:
            of_classes = all(name in scores for name in inputs_of(DEFAULT_FEATURES))
            features = DEFAULT_FEATURES if of_classes else tuple(pilot.confidences)
        names = _names(features)
        values = _feature_values(names, scores)
        agreement = np.clip(1.0 - apart / high, 0.0, 1.0)
        rising = np.ones(len(names), bool)
        weights = logistic_weights(values, agreement, rising, shared)
        return cls(names, weights, PilotSamples.of(pilot))

    @classmethod
    def _of_outputs(
        cls,
        outputs: Any,
        features: Sequence[str] | None,
        loss: str | None,
        shared: bool,
        ids: ArrayLike | None,
        groups: ArrayLike | None,
    ) -> "LearnedScore":
        """Learn the score of a classifier from logits or probabilities."""
        checks.choice("loss", loss or "zero_one", ["zero_one"])
        values = checks.numbers("pilot", outputs, np.float64)
        checks.of_shape("pilot", values, {"n": None, "n_exits": None, "n_classes": None})
        shares = values if are_probabilities(values) else probabilities(values)
        answers = shares.argmax(axis=-1)
        agrees = (answers[:, :-1] == answers[:, -1:]).astype(np.float64)
        names = _names(DEFAULT_FEATURES if features is None else features)
        scores = {name: SCORES.choose(name)(shares[:, :-1]) for name in inputs_of(names)}
        found = _feature_values(names, scores)
        weights = logistic_weights(found, agrees, np.ones(len(names), bool), shared)
        pilot = PilotSamples.of_arrays(values, ids=ids, groups=groups)
        return cls(names, weights, pilot)

    @classmethod
    def fit_features(
        cls,
        values: ArrayLike,
        agrees: ArrayLike,
        features: Sequence[str],
        *,
        rising: bool | Sequence[bool] = False,
        shared: bool = False,
        ids: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> "LearnedScore":
        """Learn a score from features of one's own.

        Parameters
        ----------
        values : (n, n_exits - 1, n_features)
            What is known at each exit, or look, but the last; any finite numbers.
        agrees : (n, n_exits - 1)
            1 where the answer there is the full system's, else 0, or an agreement in between; NaN
            where it is not known.
        features : sequence of str
            Names of the features.
        rising : bool, or one per feature
            Whether the score may only rise with the feature.
        shared : bool
            Whether all exits share one regression, so that there may be any number of them.
        ids, groups : (n,), optional
            Of the samples, by which calibration recognises them.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> values = rng.normal(size=(200, 3, 2))
        >>> agrees = values.sum(axis=2) > rng.normal(size=(200, 3))
        >>> score = LearnedScore.fit_features(values, agrees, ["margin", "length"], shared=True)
        >>> score.of_features(values).shape, score.of_features(values[:, 0], 0).shape
        ((200, 3), (200,))
        """
        names = _names(features)
        x = checks.finite("values", checks.numbers("values", values, np.float64))
        axes = {"n": None, "n_exits - 1": None, "n_features": len(names)}
        checks.of_shape("values", x, axes)
        y = checks.numbers("agrees", agrees, np.float64)
        checks.of_shape("agrees", y, {"n": len(x), "n_exits - 1": x.shape[1]})
        checks.within("agrees", y[~np.isnan(y)], 0.0, 1.0)
        signs = np.broadcast_to(np.asarray(rising, bool), len(names))
        weights = logistic_weights(x, y, signs, shared)
        return cls(names, weights, PilotSamples.of_arrays(x, y, ids=ids, groups=groups))

    @property
    def name(self) -> str:
        """Name in policies: "learned-", and a hash of what decides the confidences."""
        content = json.dumps([self.features, self.weights.tolist()])
        return f"learned-{hashlib.sha256(content.encode()).hexdigest()[:8]}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The scores that a record must hold."""
        return inputs_of(self.features)

    @property
    def condition(self) -> Condition:
        """What a promise about exits by this score rests on."""
        return Condition.of("score pilot", n=0 if self.pilot is None else self.pilot.n)

    def slopes(self, exit_index: int) -> list[float]:
        """Return intercept and slopes of an exit."""
        row: list[float] = self.weights[0 if len(self.weights) == 1 else exit_index].tolist()
        return row

    def confidences(self, scores: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Return the confidences at all exits but the last, from their plain scores.

        Parameters
        ----------
        scores : mapping of (n, n_exits - 1)
            As `ExitRecord.confidences` holds them.
        """
        return self.of_features(_feature_values(self.features, scores))

    def of_features(self, values: ArrayLike, exit_index: int | None = None) -> NDArray[np.float32]:
        """Return confidences from the features of all exits, or of one.

        Parameters
        ----------
        values : (n, n_exits - 1, n_features), or (n, n_features) with `exit_index`
        """
        x = checks.numbers("values", values, np.float64)
        if exit_index is not None:
            weights = np.asarray(self.slopes(exit_index))
            checks.of_shape("values", x, {"n": None, "n_features": len(self.features)})
        else:
            n_exits = None if len(self.weights) == 1 else len(self.weights)
            axes = {"n": None, "n_exits - 1": n_exits, "n_features": len(self.features)}
            checks.of_shape("values", x, axes)
            weights = self.weights
        # Added in a fixed order, feature by feature, as every runtime does.
        z = weights[..., 0] + np.zeros(x.shape[:-1])
        for k in range(len(self.features)):
            z = z + weights[..., 1 + k] * x[..., k]
        found: Floats = on_grid(np, 1.0 / (1.0 + np.exp(-z)))
        return found.astype(np.float32)

    def at(self, xp: Any, exit_index: int, scores: Mapping[str, Any]) -> Any:
        """Return the confidences at one exit in float64, from its plain scores in float64.

        `xp` is numpy or torch, whose arrays these are.
        """
        constant, *slopes = self.slopes(exit_index)
        z: Any = constant
        for name, slope in zip(self.features, slopes, strict=True):
            each = feature_of(name)
            z = z + slope * each.function(xp, *[scores[part] for part in each.inputs])
        return on_grid(xp, 1.0 / (1.0 + xp.exp(-z)))

    def refuse(self, record: Any) -> None:
        """Raise if a record holds samples, or groups, that the score was learned on."""
        if self.pilot is not None:
            self.pilot.refuse(record, "score")

    def left_out(self, record: Any) -> Any:
        """Return a record without the samples, or groups, that the score was learned on."""
        return record if self.pilot is None else self.pilot.left_out(record)

    def __eq__(self, other: object) -> bool:
        """Return whether two scores have the same features, weights and pilot."""
        return isinstance(other, LearnedScore) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        """Return a hash of features and weights."""
        return hash(self.name)

    def __str__(self) -> str:
        """Return the score in words."""
        n = "" if self.pilot is None else f" on {self.pilot.n:,} samples"
        return f"learned{n} from {', '.join(self.features)}"

    def to_json(self) -> dict[str, Any]:
        """Return the score as JSON."""
        return {
            "features": list(self.features),
            "weights": self.weights.tolist(),
            "pilot": None if self.pilot is None else self.pilot.to_json(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "LearnedScore":
        """Return the score that `to_json` wrote."""
        pilot = content["pilot"]
        return cls(
            tuple(content["features"]),
            np.asarray(content["weights"], np.float64),
            None if pilot is None else PilotSamples.from_json(pilot),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the score as JSON."""
        write_text(path, json.dumps({"format": FORMAT} | self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LearnedScore":
        """Read a score that `save` wrote."""
        content = read_json(path, "a learned score", FORMAT)
        try:
            return cls.from_json(content)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from None


def on_grid(xp: Any, values: Any) -> Any:
    """Return probabilities on the grid of all confidences; see `STEPS`."""
    return xp.clip(xp.floor(values * STEPS + SHIFT) / STEPS, 0.0, 1.0)


def _names(features: Sequence[str]) -> tuple[str, ...]:
    if isinstance(features, str) or not features:
        raise TypeError(f"`features` must be a sequence of names, but got {features!r}.")
    return tuple(str(each) for each in features)


def _feature_values(names: tuple[str, ...], scores: Mapping[str, Any]) -> Floats:
    """Return the features, (..., n_features), of the scores of a record."""
    missing = [each for each in inputs_of(names) if each not in scores]
    if missing:
        raise ValueError(
            f"A learned score with the features {', '.join(names)} needs the scores"
            f" {', '.join(inputs_of(names))}, but the record lacks {', '.join(missing)}:"
            " `from_logits`, `from_probabilities` and `collect` store them."
        )
    columns = []
    for name in names:
        each = feature_of(name)
        parts = [np.asarray(scores[part], np.float64) for part in each.inputs]
        columns.append(each.function(np, *parts))
    return np.stack(columns, axis=-1)
