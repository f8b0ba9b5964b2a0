"""`CertifiedCascade`: scikit-learn classifiers in a row, calibrated inside `fit`."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.cascade.collecting import rows_of
from swiftsure.certify.calibration import DELTA, Calibration, stated_promises
from swiftsure.certify.policy import Policy
from swiftsure.curves.sample_order import SampleOrder
from swiftsure.exits import ExitRule, exit_indices, exits_in_use
from swiftsure.records import ExitRecord
from swiftsure.scores import SCORES

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, clone
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise ImportError(
        "CertifiedCascade needs scikit-learn: pip install 'swiftsure[sklearn]'."
    ) from None

__all__ = ["CertifiedCascade"]

Array = NDArray[Any]


class CertifiedCascade(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifiers in a row, cheapest first; those that are not sure enough ask the next.

    `fit` sets aside some samples, fits the estimators on the others, and calibrates the confidence
    that is enough on those set aside.

    **Guarantee**: with probability at least 1 − δ over the draw of the samples set aside, accuracy
    on new samples of the same distribution is at most ε below that of the last estimator alone; or
    what `promises` say.

    Parameters
    ----------
    estimators : list of classifiers
        With `predict_proba`, cheapest first.
    epsilon : float
        The largest loss of accuracy against the last estimator. It must be given, or `promises`.
    promises : Promise, CostPromise, several, or a Calibration, optional
        What is to hold instead, of the losses "zero_one" and "brier" and of the cost "cost"; a
        Calibration also has its own δ and exit rule.
    delta : float
        Failure probability.
    calibration_size : float
        Share of the samples to calibrate on.
    costs : (n_estimators,), optional
        What each estimator costs alone, in any unit. If the certified cascade costs more than the
        last estimator, only that is used.
    confidence : {"top1", "top_diff", "entropy"}
        What decides; among `swiftsure.scores`.
    random_state : int, RandomState or None
        Of the split. By default it is drawn from the operating system's random numbers, so the
        order of the samples does not matter. Otherwise they must be in random order, and the
        certificate says so.

    Attributes
    ----------
    estimators_ : list
        Fitted.
    policy_ : Policy or None
        With its certificate. None if some class occurs only among the samples set aside: then all
        samples fit the estimators, and the last one answers alone.
    record_ : ExitRecord or None
        Of the samples set aside.
    classes_ : (n_classes,)

    Examples
    --------
    >>> from sklearn.datasets import make_classification
    >>> from sklearn.ensemble import RandomForestClassifier
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = make_classification(3000, random_state=0)
    >>> models = [LogisticRegression(), RandomForestClassifier(20, random_state=0)]
    >>> cascade = CertifiedCascade(models, epsilon=0.05, costs=[1, 20], random_state=0).fit(X, y)
    >>> cascade.policy_.runs_full_model
    False
    """

    def __init__(
        self,
        estimators: Sequence[Any],
        *,
        epsilon: float | None = None,
        promises: Any = None,
        delta: float = DELTA,
        calibration_size: float = 0.3,
        costs: Sequence[float] | None = None,
        confidence: str = "top1",
        random_state: Any = None,
    ) -> None:
        self.estimators = estimators
        self.epsilon = epsilon
        self.promises = promises
        self.delta = delta
        self.calibration_size = calibration_size
        self.costs = costs
        self.confidence = confidence
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "CertifiedCascade":
        """Fit the estimators on most samples, and calibrate on the others."""
        request = self._request()
        X, y = self._checked(X, y)
        y = np.asarray(y)
        check_classification_targets(y)
        if len(self.estimators) < 2:
            raise ValueError(f"`estimators` must be at least 2, but got {len(self.estimators)}.")
        if not 0 < self.calibration_size < 1:
            raise ValueError(
                f"`calibration_size` must be in (0, 1), but got {self.calibration_size}."
            )
        self.classes_, numbers = np.unique(y, return_inverse=True)
        order = self._split_order()
        held = order.draw_units(len(y), round(self.calibration_size * len(y)))
        train = np.setdiff1d(np.arange(len(y)), held)
        # Moving samples by their label would bias those set aside, so nothing is calibrated then.
        whole = len(held) == 0 or len(np.unique(numbers[train])) < len(self.classes_)
        if whole:
            warnings.warn(
                "A class has too few samples to set some aside: nothing was calibrated, and the"
                " last estimator answers alone.",
                UserWarning,
                stacklevel=2,
            )
            train = np.arange(len(y))
        part = rows_of(X, train)
        self.estimators_ = [clone(each).fit(part, y[train]) for each in self.estimators]
        self.policy_: Policy | None = None
        self.record_: ExitRecord | None = None
        if not whole and len(self.classes_) > 1:
            record = self._record(rows_of(X, held), numbers[held])
            self.record_ = replace(record, order=order.after(order))
            policy: Any = request.run(self.record_)
            self.policy_ = policy
        return self

    def _request(self) -> Calibration:
        """Return what is to hold, as a request that decides by `confidence`."""
        if isinstance(self.promises, Calibration):
            if self.epsilon is not None or self.delta != DELTA:
                raise ValueError("`epsilon` and `delta` are the Calibration's own; leave them out.")
            request = self.promises
        else:
            promises = stated_promises(self.promises or "zero_one", self.epsilon, None)
            request = Calibration(promises, delta=self.delta)
        if request.rule.score not in (None, self.confidence):
            raise ValueError(
                f"`confidence` decides, which is {self.confidence!r}, but the Calibration's rule"
                f" names {request.rule.score!r}."
            )
        return replace(request, rule=replace(request.rule, score=self.confidence))

    def _split_order(self) -> SampleOrder:
        """Return the seed of the split; it was drawn unless `random_state` determines it."""
        if self.random_state is None:  # scikit-learn's own generator may have been seeded
            return SampleOrder.draw()
        return SampleOrder(int(check_random_state(self.random_state).randint(2**31)), drawn=False)

    def predict(self, X: Any) -> Array:
        """Return the class of each sample."""
        found = self.predict_proba(X)
        classes: Array = self.classes_[found.argmax(axis=1)]
        return classes

    def predict_proba(self, X: Any) -> Array:
        """Return class probabilities of the estimator that answered, (n, n_classes)."""
        return self._run(X)[0]

    def exits(self, X: Any) -> NDArray[np.int64]:
        """Return the number of the estimator that answers each sample, from 0."""
        return self._run(X)[1]

    def _run(self, X: Any) -> tuple[Array, NDArray[np.int64]]:
        check_is_fitted(self)
        X = self._checked(X)
        n, last = X.shape[0], len(self.estimators_) - 1
        thresholds = None if self.policy_ is None else self.policy_.thresholds
        rule = ExitRule() if self.policy_ is None else self.policy_.rule
        if thresholds is None:
            thresholds = np.full(last, np.inf, np.float32)
        used = exits_in_use(thresholds, strict=rule.strict, min_exit=rule.min_exit)
        found = np.zeros((n, len(self.classes_)))
        exits = np.full(n, last)
        rows = np.arange(n)
        for k in range(last + 1):
            if not len(rows) or (k < last and k not in used):  # no sample can keep its answer
                continue
            p = self._probabilities(k, rows_of(X, rows))
            leaves = np.full(len(rows), k == last)
            if k < last:
                sure = SCORES[self.confidence](p)[:, None]
                leaves = exit_indices(sure, thresholds[k], strict=rule.strict) == 0
            found[rows[leaves]], exits[rows[leaves]] = p[leaves], k
            rows = rows[~leaves]
        return found, exits

    def _probabilities(self, k: int, X: Any) -> Array:
        """Return the probabilities of one estimator, with a column for every class."""
        estimator = self.estimators_[k]
        p = np.asarray(estimator.predict_proba(X), np.float64)
        found = np.zeros((len(p), len(self.classes_)))
        found[:, np.searchsorted(self.classes_, estimator.classes_)] = p
        return found

    def _record(self, X: Any, labels: Array) -> ExitRecord:
        p = np.stack([self._probabilities(k, X) for k in range(len(self.estimators_))], axis=1)
        options: dict[str, Any] = {"score": self.confidence, "losses": ["zero_one", "brier"]}
        record = ExitRecord.from_probabilities(p, labels, **options)
        if self.costs is None:
            return record
        own = np.asarray(self.costs, np.float64)
        if own.shape != (len(self.estimators_),):
            raise ValueError(f"`costs` must be one per estimator, {len(self.estimators_)}.")
        costs = {"cost": np.cumsum(own)}
        return replace(record, costs=costs, full_costs={"cost": float(own[-1])})

    def _checked(self, X: Any, y: Any = "no_validation") -> Any:
        """Return checked inputs; data frames stay what they are, for the estimators' own use."""
        fitting = not (isinstance(y, str) and y == "no_validation")
        return validate_data(self, X, y, reset=fitting, skip_check_array=hasattr(X, "iloc"))
