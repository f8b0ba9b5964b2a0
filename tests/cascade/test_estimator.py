"""CertifiedCascade as a scikit-learn estimator."""

import warnings

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

import swiftsure as ss

X, Y = make_classification(3000, n_informative=6, n_classes=3, random_state=0)


def cascade(**options):
    models = [LogisticRegression(), DecisionTreeClassifier(max_depth=6, random_state=0)]
    return ss.CertifiedCascade(models, random_state=0, **options)


@parametrize_with_checks(
    [cascade(epsilon=0.05), cascade(promises=[ss.Promise("zero_one", epsilon=0.05)])]
)
def test_it_is_an_estimator(estimator, check):
    with warnings.catch_warnings():  # tiny sets cannot set samples aside, which it says
        warnings.simplefilter("ignore")
        check(estimator)


def test_it_answers_as_its_policy_says():
    model = cascade(epsilon=0.1, costs=[1, 20]).fit(X[:2500], Y[:2500])
    assert model.policy_.certificate.samples.n == 750
    assert not model.policy_.runs_full_model
    exits = model.exits(X[2500:])
    assert set(exits) == {0, 1}
    alone = [each.predict(X[2500:]) for each in model.estimators_]
    np.testing.assert_array_equal(model.predict(X[2500:]), np.where(exits == 0, *alone))
    p = np.stack([each.predict_proba(X[2500:]) for each in model.estimators_], axis=1)
    sure = ss.scores.top1(p[:, :1])
    np.testing.assert_array_equal(exits, model.policy_.exits(sure))
    assert model.predict_proba(X[2500:]).sum(axis=1) == pytest.approx(1)


def test_a_dear_cascade_uses_its_last_estimator():
    model = cascade(epsilon=0.01, costs=[19, 20]).fit(X, Y)
    assert model.policy_.runs_full_model
    assert (model.exits(X) == 1).all()


def test_promises_and_requests():
    asked = ss.Calibration(
        [ss.Promise("zero_one", epsilon=0.1), ss.CostPromise("cost", at_most=19.0)],
        delta=0.2,
        rule=ss.ExitRule(strict=True),
    )
    model = cascade(promises=asked, costs=[1, 20]).fit(X, Y)
    assert model.policy_.calibration.promises == asked.promises
    assert model.policy_.certificate.max_costs == {"cost": 19.0}
    probabilities = np.stack([each.predict_proba(X) for each in model.estimators_], axis=1)
    sure = ss.scores.top1(probabilities[:, :1])
    np.testing.assert_array_equal(model.exits(X), model.policy_.exits(sure))
    one = cascade(promises=ss.Promise("zero_one", epsilon=0.1)).fit(X, Y)
    other = cascade(epsilon=0.1).fit(X, Y)
    assert one.policy_.threshold == other.policy_.threshold


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`epsilon` must be given"),
        ({"epsilon": 0.1, "promises": ss.Promise("brier", epsilon=0.1)}, "each Promise's own"),
        (
            {"delta": 0.2, "promises": ss.Calibration(ss.Promise("brier", epsilon=0.1))},
            "the Calibration's own",
        ),
    ],
)
def test_what_is_promised_must_be_clear(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        cascade(**options).fit(X, Y)


def test_text_labels_data_frames_and_searches():
    pandas = pytest.importorskip("pandas")
    names = np.asarray(["cat", "dog", "cow"])[Y]
    frame = pandas.DataFrame(X).rename(columns=str)
    model = cascade(epsilon=0.1).fit(frame, names)
    assert set(model.predict(frame)) <= {"cat", "dog", "cow"}
    assert cross_val_score(cascade(epsilon=0.1), X, names, cv=2).min() > 0.5
    search = GridSearchCV(cascade(epsilon=0.1), {"epsilon": [0.05, 0.1]}, cv=2).fit(X, Y)
    assert search.best_params_["epsilon"] in (0.05, 0.1)


def test_a_class_that_is_too_rare_is_not_calibrated():
    labels = np.where(np.arange(3000) < 1, 2, Y % 2)
    model = ss.CertifiedCascade(cascade().estimators, epsilon=0.05, random_state=1)
    seen = []
    for seed in range(12):
        model.set_params(random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen.append(model.fit(X, labels).policy_ is None)
    assert any(seen)
    assert not all(seen)
