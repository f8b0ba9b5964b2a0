"""Ways to learn a score that were tried: (pilot, rest) -> confidences of the rest.

Each is learned on the pilot alone. "the loss" needs labels of the pilot; the others need none.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import swiftsure as ss
from swiftsure.scores.features import DEFAULT_FEATURES, feature_of
from swiftsure.scores.fitting import logistic_weights

__all__ = ["ATTEMPTS"]

Floats = NDArray[np.float64]
Attempt = Callable[[ss.ExitRecord, ss.ExitRecord], Any]


def features(record: ss.ExitRecord, names: Sequence[str]) -> Floats:
    """Return features, (n, n_exits - 1, n_features)."""
    scores = {**record.features, **record.confidences}
    columns = []
    for name in names:
        each = feature_of(name)
        columns.append(each.function(np, *[np.float64(scores[part]) for part in each.inputs]))
    return np.stack(columns, axis=-1)


def agreement(record: ss.ExitRecord) -> Floats:
    """Return 1 where an exit's answer is the full model's, (n, n_exits - 1)."""
    return 1.0 - np.float64(record.inconsistencies["zero_one"][:, :-1])


def learned(*names: str, **options: Any) -> Attempt:
    """Return the attempt of `LearnedScore` with some features."""

    def attempt(pilot: ss.ExitRecord, rest: ss.ExitRecord) -> Any:
        score = ss.LearnedScore.fit(pilot, names or DEFAULT_FEATURES, **options)
        return score.confidences({**rest.features, **rest.confidences})

    return attempt


def on_loss(pilot: ss.ExitRecord, rest: ss.ExitRecord) -> Any:
    """Learn (1 − gap) / 2, which needs the pilot's labels, in place of agreement."""
    gaps = np.float64(pilot.losses["zero_one"])
    wanted = (1.0 - (gaps[:, :-1] - gaps[:, -1:])) / 2
    rising = np.ones(len(DEFAULT_FEATURES), bool)
    weights = logistic_weights(features(pilot, DEFAULT_FEATURES), wanted, rising)
    # Half of the samples' gaps are 0, whose target is 1/2: stretched, so that the grid of
    # thresholds tells the confidences apart. Any monotone function would do.
    z = weights[:, 0] + (features(rest, DEFAULT_FEATURES) * weights[:, 1:]).sum(axis=-1)
    return 1.0 / (1.0 + np.exp(-4.0 * z))


def each_alone(pilot: ss.ExitRecord, rest: ss.ExitRecord) -> Any:
    """Fit an ordinary logistic regression to each exit, with slopes of any sign."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    names = ("top1", "log_ratio", "entropy") if "entropy" in rest.confidences else DEFAULT_FEATURES

    def fitted(x: Floats, y: Floats) -> Any:
        return make_pipeline(StandardScaler(), LogisticRegression(C=0.3, max_iter=500)).fit(x, y)

    return _by_exit(pilot, rest, lambda record, k: features(record, names)[:, k], fitted)


def trees(pilot: ss.ExitRecord, rest: ss.ExitRecord) -> Any:
    """Fit boosted trees to the features of an exit and of all before it."""
    from sklearn.ensemble import GradientBoostingClassifier

    def inputs(record: ss.ExitRecord, k: int) -> Floats:
        values = features(record, DEFAULT_FEATURES)[:, : k + 1]
        return values.reshape(len(values), -1)

    def fitted(x: Floats, y: Floats) -> Any:
        return GradientBoostingClassifier(n_estimators=40, max_depth=2, random_state=0).fit(x, y)

    return _by_exit(pilot, rest, inputs, fitted)


def earlier(pilot: ss.ExitRecord, rest: ss.ExitRecord) -> Any:
    """Add the features of the exit before to those of an exit."""

    def values(record: ss.ExitRecord) -> Floats:
        own = features(record, DEFAULT_FEATURES)
        before = np.concatenate([own[:, :1], own[:, :-1]], axis=1)
        return np.concatenate([own, before], axis=-1)

    x = values(pilot)
    rising = np.ones(x.shape[-1], bool)
    score = ss.LearnedScore(
        tuple(f"f{k}" for k in range(x.shape[-1])), logistic_weights(x, agreement(pilot), rising)
    )
    return score.of_features(values(rest))


def isotonic(pilot: ss.ExitRecord, rest: ss.ExitRecord) -> Any:
    """Fit a rising step function of the log of top over second to each exit."""
    from sklearn.isotonic import IsotonicRegression

    class Steps(IsotonicRegression):  # type: ignore[misc]
        def predict_proba(self, x: Floats) -> Floats:
            # A little of the feature itself, so that confidences within a step differ.
            sure = np.clip(self.predict(x[:, 0]) + 1e-3 * np.tanh(x[:, 0] / 10), 0.0, 1.0)
            return np.column_stack([1 - sure, sure])

    def fitted(x: Floats, y: Floats) -> Any:
        return Steps(y_min=0.0, y_max=0.999, out_of_bounds="clip").fit(x[:, 0], y)

    return _by_exit(pilot, rest, lambda r, k: features(r, DEFAULT_FEATURES)[:, k], fitted)


def _by_exit(
    pilot: ss.ExitRecord,
    rest: ss.ExitRecord,
    inputs: Callable[[ss.ExitRecord, int], Floats],
    fitted: Callable[[Floats, Floats], Any],
) -> Floats:
    """Return the probability of agreement at each exit by a model of scikit-learn."""
    agrees = agreement(pilot)
    columns = []
    for k in range(agrees.shape[1]):
        if agrees[:, k].min() == agrees[:, k].max():
            columns.append(np.full(rest.n, agrees[0, k]))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few samples
            model = fitted(inputs(pilot, k), agrees[:, k])
            columns.append(model.predict_proba(inputs(rest, k))[:, 1])
    return np.column_stack(columns)


ATTEMPTS: dict[str, Attempt] = {
    "learned (default)": learned(),
    "shared by all exits": learned(shared=True),
    "top probability": learned("top1"),
    "and entropy": learned(*DEFAULT_FEATURES, "entropy"),
    "each exit alone": each_alone,
    "and the exit before": earlier,
    "boosted trees": trees,
    "monotone steps": isotonic,
    "the loss, with labels": on_loss,
}
