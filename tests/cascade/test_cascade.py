"""Cascades of functions and estimators: answers, records, costs, policies, runs."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.cascade import (
    Answer,
    AnswerLoss,
    Backoff,
    CollectionError,
    Judge,
    Recalibrated,
    Recalibration,
    SelfConsistency,
    Verified,
)
from swiftsure.cascade.models import model_of
from swiftsure.cascade.running import CascadeRunner
from swiftsure.exits import exit_indices


def small(n):
    return Answer("odd", confidence=0.9 if n % 2 else 0.3, cost={"usd": 1.0})


async def large(n):
    return Answer("odd" if n % 2 else "even", cost={"usd": 10.0})


LABELS = ["even", "odd"] * 200


@pytest.fixture
def cascade():
    return ss.Cascade({"small": small, "large": large})


def test_functions_become_a_record(cascade):
    record = cascade.collect(range(400), LABELS, progress=False)
    assert record.confidences["confidence"][:2, 0].tolist() == pytest.approx([0.3, 0.9])
    assert record.losses["exact_match"][:2].tolist() == [[1, 0], [0, 0]]
    assert record.costs["usd"][0].tolist() == [1.0, 11.0]
    assert record.full_costs["usd"].tolist() == [10.0] * 400
    assert record.fingerprint is None
    policy = cascade.calibrate(record, epsilon=0.02)
    assert policy.certificate.costs.means["usd"] == (10.0, pytest.approx(6.0))
    out = cascade.run(policy)(range(10))
    assert out.answers == LABELS[:10]
    assert out.exits.tolist() == [1, 0] * 5
    assert out.cost == {"usd": 60.0}


def test_promises_and_requests(cascade):
    record = cascade.collect(range(400), LABELS, progress=False)
    policy = cascade.calibrate(record, epsilon=0.02)
    promise = ss.Promise("exact_match", epsilon=0.02)
    assert cascade.calibrate(record, promise) == cascade.calibrate(
        record, loss="exact_match", epsilon=0.02
    )
    request = ss.Calibration([promise, ss.Promise("exact_match", epsilon=0.1, above=0.5)])
    both = cascade.calibrate(record, request)
    assert both.threshold == policy.threshold
    assert both.calibration.promises == request.promises
    assert both.score == cascade.scores[0]
    with pytest.raises(ValueError, match="leave the other arguments out"):
        cascade.calibrate(record, request, delta=0.2)
    with pytest.raises(ValueError, match="each Promise's own"):
        cascade.calibrate(record, promise, epsilon=0.1)


def test_the_run_follows_the_exit_rule():
    rng = np.random.default_rng(0)
    sure = rng.random((300, 2)).round(2)
    models = [lambda i, k=k: (k, sure[i, k], float(k + 1)) for k in range(2)]
    cascade = ss.Cascade({"a": models[0], "b": models[1], "c": lambda i: (2, 1.0, 9.0)})
    record = cascade.collect(range(300), [2] * 300, losses="zero_one", progress=False)
    policy = cascade.calibrate(record, epsilon=0.9, path=[0.7], cost="exit")
    out = cascade.run(policy)(range(300))
    expected = exit_indices(sure, policy.threshold)
    assert out.exits.tolist() == expected.tolist()
    assert out.cost["cost"] == np.cumsum([1, 2, 9])[expected].sum()
    assert out.answers == expected.tolist()


@pytest.mark.parametrize("strict", [False, True])
def test_one_answer_leaves_as_the_exit_rule_says(strict):
    level = np.float32(0.7)
    record = ss.ExitRecord(np.full((200, 1), 0.9), losses={"zero_one": np.zeros((200, 2))})
    policy = ss.calibrate(record, epsilon=0.9, path=[float(level)]).model_copy(
        update={"strict": strict}
    )
    runner = CascadeRunner([model_of(lambda _: 0), model_of(lambda _: 1)], policy, "confidence")
    near = [
        0.7,
        float(level),
        np.nextafter(level, np.float32(0)),
        np.nextafter(level, 1.0),
        0.0,
        1.0,
    ]
    expected = exit_indices(np.asarray(near)[:, None], level, strict=strict) == 0
    assert [runner.leaves(0, each) for each in near] == expected.tolist()


def test_a_cascade_that_costs_more_than_its_last_model_is_refused():
    cascade = ss.Cascade(
        {"small": lambda n: ("odd", n % 10 / 10, 4.0), "large": lambda n: ("odd", 1, 5.0)}
    )
    record = cascade.collect(range(400), ["odd"] * 400, progress=False)
    policy = cascade.calibrate(record, epsilon=0.02, path=[0.8])
    assert policy.runs_full_model
    assert policy.certificate.costs.dearer == {"cost": pytest.approx(4 + 5 * 0.8)}
    assert "costs more than the full model alone (8 cost instead of 5, 60 % more" in str(policy)
    asked = []
    cascade = ss.Cascade({"small": asked.append, "large": lambda n: ("odd", 1, 5.0)})
    assert cascade.run(policy)([1, 2]).cost == {"cost": 10.0}
    assert asked == []
    study = ss.evaluate(
        record, controls=["ucb"], epsilons=[0.02], n_calibration=200, splits=5, path=[0.8]
    )
    assert (study.cost, study.full_cost) == ("cost", 5.0)
    assert (study.gain["ucb"] == 0).all()
    chosen = cascade.calibrate(record, epsilon=0.02, path=[0.8], cost="exit")
    assert chosen.evaluate(record).savings["cost"] == pytest.approx(-0.6)
    assert chosen.evaluate(record).saving == pytest.approx(-0.6)


def test_savings_are_against_the_last_model_on_the_same_samples(tmp_path):
    """Long prompts cost more for every model, so the full cost differs between parts."""
    rng = np.random.default_rng(0)
    n = 1000
    length = rng.lognormal(size=n)
    own = np.column_stack([0.1 * length, length])
    sure = rng.random((n, 1))
    record = ss.ExitRecord(
        sure,
        losses={"zero_one": np.column_stack([sure[:, 0] < 0.3, np.zeros(n)])},
        costs={"usd": np.cumsum(own, axis=1)},
        full_costs={"usd": own[:, 1]},
    )
    record.save(tmp_path / "record.parquet")
    loaded = ss.ExitRecord.load(tmp_path / "record.parquet")
    np.testing.assert_array_equal(loaded.full_costs["usd"], own[:, 1])
    calibration, rest = loaded.split(500)
    policy = ss.calibrate(calibration, epsilon=0.05)
    rows = np.flatnonzero(np.isin(record.ids, rest.ids))
    exits = policy.exits(sure[rows])
    paid = np.cumsum(own, axis=1)[rows, exits].sum()
    assert policy.evaluate(rest).saving == pytest.approx(1 - paid / own[rows, 1].sum())
    full, here = policy.certificate.costs.means["usd"]
    assert full == pytest.approx(calibration.full_costs["usd"].mean())
    assert here < full
    joined = ss.ExitRecord.concatenate([calibration, rest])
    assert joined.full_costs["usd"].sum() == pytest.approx(own[:, 1].sum())
    study = ss.evaluate(record, controls=["ucb"], epsilons=[0.05], n_calibration=500, splits=20)
    assert study.cost == "usd"
    assert study.gain["ucb"].mean() == pytest.approx(100 * policy.evaluate(rest).saving, abs=8)
    grouped = ss.ExitRecord(
        sure,
        losses=record.losses,
        costs=record.costs,
        full_costs=record.full_costs,
        groups=np.arange(n) // 2,
    )
    curve = grouped.curve("gap", "zero_one")
    assert curve.full_cost("usd") == pytest.approx(own[:, 1].mean())


def test_selective_risks_do_not_change_mean_costs():
    rng = np.random.default_rng(0)
    sure = rng.random((500, 1))
    costs = rng.random((500, 2)).cumsum(axis=1)
    record = ss.ExitRecord(sure, losses={"zero_one": np.zeros((500, 2))}, costs={"usd": costs})
    plain, selective = (
        ss.Promise("zero_one", epsilon=0.1, among=among).curve(record, ss.ExitRule())
        for among in ("all", "exits")
    )
    np.testing.assert_allclose(selective.mean_cost("usd"), plain.mean_cost("usd"))
    assert selective.mean_cost_at("usd", 40) == pytest.approx(plain.mean_cost_at("usd", 40))


def test_sklearn_models_are_a_cascade():
    linear = pytest.importorskip("sklearn.linear_model")
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier

    X, y = make_classification(1500, random_state=0)
    models = [
        linear.LogisticRegression().fit(X[:500], y[:500]),
        RandomForestClassifier(10, random_state=0).fit(X[:500], y[:500]),
    ]
    cascade = ss.Cascade(models)
    record = cascade.collect(X[500:], y[500:], progress=False)
    p = np.stack([model.predict_proba(X[500:]) for model in models], axis=1)
    direct = ss.ExitRecord.from_probabilities(p, y[500:], losses="zero_one")
    np.testing.assert_array_equal(record.losses["zero_one"], direct.losses["zero_one"])
    np.testing.assert_array_equal(record.confidences["confidence"], direct.confidences["top1"])
    policy = cascade.calibrate(record, epsilon=0.1, cost="exit")
    out = cascade.run(policy)(X[500:600])
    assert out.exits.tolist() == policy.exits(record.confidences["confidence"][:100]).tolist()
    models[0].coef_ = models[0].coef_ + 1.0
    with pytest.raises(ValueError, match="another model"):
        ss.Cascade(models).run(policy)


def test_torch_modules_are_a_cascade_and_a_staged_model():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 3).eval(), torch.nn.Linear(4, 3).eval()]
    cascade = ss.Cascade(models)
    inputs = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    record = cascade.collect(inputs, losses=["zero_one", "brier"], progress=False)
    staged = ss.Cascade(models).staged()
    logits = torch.stack(list(staged(torch.as_tensor(inputs))), dim=1)
    direct = ss.ExitRecord.from_logits(logits)
    np.testing.assert_allclose(
        record.confidences["confidence"], direct.confidences["top1"], atol=1e-6
    )
    np.testing.assert_array_equal(
        record.inconsistencies["zero_one"], direct.inconsistencies["zero_one"]
    )
    assert ss.Cascade([small, large]).fingerprint is None
    with pytest.raises(TypeError, match="torch modules"):
        ss.Cascade([small, large]).staged()


def test_models_that_give_no_confidence_or_other_units_are_refused():
    silent = ss.Cascade({"small": lambda n: "odd", "large": lambda n: "odd"})
    with pytest.raises(ValueError, match="small gave no confidence 'confidence' for input 0"):
        silent.collect(range(3), progress=False)
    units = ss.Cascade({"small": lambda n: ("odd", 0.5, 1.0), "large": large})
    with pytest.raises(ValueError, match="large gave none in cost for input 0"):
        units.collect(range(3), progress=False)
    with pytest.raises(ValueError, match="at least 2"):
        ss.Cascade([small])
    with pytest.raises(ValueError, match="one per input, 3, but got 2"):
        ss.Cascade([small, large]).collect(range(3), ["a", "b"])


def test_missing_labels_and_agreement(cascade):
    labels = [None if n % 2 else "even" for n in range(400)]
    record = cascade.collect(range(400), labels, progress=False)
    assert np.isnan(record.losses["exact_match"][1]).all()
    policy = cascade.calibrate(record, epsilon=0.05)  # answers agree where labels are missing
    assert policy.threshold is not None
    without = cascade.collect(range(400), progress=False)
    assert without.losses == {}
    assert not cascade.calibrate(without, epsilon=0.05, risk="consistency").runs_full_model


def test_losses_of_your_own_and_judges(tmp_path):
    asked = []

    def grade(question):
        asked.append(question)
        if question["answer"] == "unreadable":
            return "no idea"
        return "Grade: 4" if question["answer"] == question["label"] else "1"

    models = {
        "small": lambda n: ("unreadable" if n == 3 else "b", 0.5),
        "large": lambda n: ("a" if n else "b", 1.0),
    }
    cascade = ss.Cascade(models)
    own = AnswerLoss("length", lambda answer, label: abs(len(answer) - len(label)), high=20)
    losses = [Judge(grade, low=1, high=4), own]
    record = cascade.collect(range(4), ["a"] * 4, losses=losses, folder=tmp_path, progress=False)
    assert record.losses["judge"].tolist() == [[1, 1], [1, 0], [1, 0], [1, 0]]
    assert record.losses["length"][:, 0].tolist() == [0, 0, 0, 9]
    assert len(asked) == 7  # equal answers to one input are graded once
    cascade.collect(range(4), ["a"] * 4, losses=losses, folder=tmp_path, progress=False)
    assert len(asked) == 7
    agreed = cascade.collect(range(4), losses=Judge(grade, low=1, high=4), progress=False)
    assert agreed.inconsistencies["judge"].tolist() == [[0, 0], [1, 0], [1, 0], [1, 0]]


def test_self_consistency_verifier_and_recalibration():
    said = iter(["Paris.", "paris", "Rome", "Paris"])
    sampled = SelfConsistency(lambda q: Answer(next(said), cost=1.0), k=4)
    cascade = ss.Cascade([sampled, lambda q: ("Paris", 1.0, 5.0)])
    record = cascade.collect(["capital?"], ["Paris"], concurrency=1, progress=False)
    assert record.confidences["confidence"].tolist() == [[0.75]]
    assert record.costs["cost"].tolist() == [[4.0, 9.0]]
    checked = Verified(lambda q: Answer("x", cost=1.0), lambda q, a: Answer(None, 0.25, 2.0))
    answer = ss.Cascade([checked, large]).models[0]
    import asyncio

    found = asyncio.run(answer.answer(1))
    assert (found.confidence, found.cost) == (0.25, {"cost": 3.0})
    rng = np.random.default_rng(0)
    sure = rng.random(4000)
    right = rng.random(4000) < sure**2
    for method in ("isotonic", "logistic"):
        fitted = Recalibration.fit(sure, right, method)
        again = Recalibration.from_json(json.loads(json.dumps(fitted.to_json())))
        grid = np.linspace(0.05, 0.95, 10)
        np.testing.assert_allclose(again(grid), grid**2, atol=0.09)
        assert (np.diff(fitted(np.linspace(0, 1, 50))) >= 0).all()
    mapped = Recalibrated(lambda n: ("odd", 0.5), fitted)
    assert asyncio.run(mapped.answer(1)).confidence == pytest.approx(0.25, abs=0.05)


PROGRAM = """
import sys, time
import swiftsure as ss
def slow(n):
    with open(sys.argv[2], "a") as file: file.write(f"{n}\\n")
    time.sleep(0.02)
    return ("odd", 0.5, 1.0)
cascade = ss.Cascade({"small": slow, "large": slow})
cascade.collect(range(200), folder=sys.argv[1], progress=False, concurrency=4)
"""


def test_a_killed_collection_pays_for_no_finished_answer_again(tmp_path):
    paid, folder = tmp_path / "paid.txt", tmp_path / "answers"
    command = [sys.executable, "-c", PROGRAM, str(folder), str(paid)]
    process = subprocess.Popen(command)
    log = folder / "answers.jsonl"
    while not (log.exists() and len(log.read_bytes().splitlines()) > 40):
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = len(log.read_bytes().splitlines()) - 1
    before = len(paid.read_text().splitlines())
    log.write_bytes(log.read_bytes() + b'{"model": "torn')  # the write that the kill cut short
    subprocess.run(command, check=True)
    again = len(paid.read_text().splitlines()) - before
    assert again == 400 - kept
    assert before - kept <= 4  # at most the calls under way were lost


def test_damaged_answers_are_asked_for_again(tmp_path, cascade):
    cascade.collect(range(5), folder=tmp_path, progress=False)
    log = tmp_path / "answers.jsonl"
    text = log.read_text()
    log.write_text(text.replace('"even"', '"evil"', 1))
    with pytest.warns(UserWarning, match=r"1 damaged line\(s\), the first of them line"):
        record = cascade.collect(range(5), LABELS[:5], folder=tmp_path, progress=False)
    assert record.losses["exact_match"][:, 1].tolist() == [0] * 5
    log.write_text("something else\n")
    with pytest.raises(ValueError, match="not a file of Swiftsure answers"):
        cascade.collect(range(5), folder=tmp_path, progress=False)


def test_models_shared_by_cascades_are_asked_once(tmp_path):
    calls = []

    def counted(name, cost):
        def model(n):
            calls.append(name)
            return ("odd", 0.5, cost)

        model.__name__ = name
        return model

    a, b, c = counted("a", 1.0), counted("b", 2.0), counted("c", 9.0)
    for models in ([a, c], [b, c], [a, b, c]):
        record = ss.Cascade(models).collect(range(20), folder=tmp_path, progress=False)
    assert {name: calls.count(name) for name in "abc"} == {"a": 20, "b": 20, "c": 20}
    assert record.costs["cost"][0].tolist() == [1.0, 3.0, 12.0]


def test_errors_of_functions_stop_the_collection(cascade):
    def broken(n):
        raise RuntimeError("out of memory")

    with pytest.raises(CollectionError, match="RuntimeError: out of memory"):
        ss.Cascade({"small": broken, "large": large}).collect(range(3), progress=False)
    tries = []

    def flaky(n):
        tries.append(n)
        if len(tries) < 3:
            raise ConnectionError("reset")
        return ("odd", 0.5, {"usd": 1.0})

    again = ss.Cascade({"small": flaky, "large": large})
    options = {"backoff": Backoff(first=0.01), "concurrency": 1, "progress": False}
    assert again.collect([1], **options).n == 1
    assert len(tries) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"confidence": 1.5}, r"`confidence` must be in \[0, 1\]"),
        ({"confidence": float("nan")}, r"`confidence` must be in \[0, 1\]"),
        ({"cost": -1.0}, "must be at least 0 and finite"),
        ({"logprobs": [0.5]}, "`logprobs` must be at most 0"),
        ({"probabilities": [0.5, 0.9]}, "sum to 1"),
    ],
)
def test_impossible_answers_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Answer("a", **fields)


def test_pilots_of_recalibrations_are_refused_and_stated():
    """Fitted on the calibration samples, maps violated a promise in 53 of 300 draws at 10 %."""
    rng = np.random.default_rng(0)
    sure, right = rng.random(300), rng.random(300) < 0.9
    ids = [f"pilot {k}" for k in range(300)]
    fitted = Recalibration.fit(sure[:200], right[:200], ids=ids[:200])
    again = Recalibration.from_json(json.loads(json.dumps(fitted.to_json())))
    other = Recalibration.fit(sure[200:], right[200:], ids=ids[200:])

    def model(found, name):
        return Recalibrated(lambda k: (k % 2, 0.5 + k % 50 / 100, 1.0), found, name=name)

    cascade = ss.Cascade([model(again, "a"), model(other, "b"), lambda k: (k % 2, 1.0, 9.0)])
    with pytest.raises(ValueError, match="pilot that the score was learned on"):
        cascade.collect(range(2), ids=["x", "pilot 7"], progress=False)
    record = cascade.collect(range(300), ids=range(300), progress=False)
    policy = cascade.calibrate(record, risk="consistency", epsilon=0.05)
    assert "none of the 300 samples that the score was learned on" in str(policy)
    assert model(fitted, "a").identity() == model(again, "a").identity()
    inner = Recalibrated(model(fitted, "a"), other)
    assert inner.pilots["score"].n == 300
