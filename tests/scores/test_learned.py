"""Learned scores: what they are fitted to, that a pilot never calibrates, and files."""

import json
from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.scores import SCORES
from swiftsure.scores.fitting import logistic_weights
from swiftsure.study.simulate import Population


@pytest.fixture(scope="module")
def record():
    sample = Population(n_exits=4).sample(1500, seed=0)
    return ss.ExitRecord.from_logits(sample.logits, sample.labels, score=SCORES)


@pytest.fixture(scope="module")
def parts(record):
    return record.split(400)


@pytest.fixture(scope="module")
def learned(parts):
    return ss.LearnedScore.fit(parts[0])


def test_the_score_is_the_probability_of_agreement(learned, parts):
    _, rest = parts
    sure = learned.confidences(rest.confidences)
    agrees = rest.inconsistencies["zero_one"][:, :-1] == 0
    assert np.abs(sure.mean(axis=0) - agrees.mean(axis=0)).max() < 0.06
    assert sure[agrees].mean() > sure[~agrees].mean() + 0.1


def test_labels_are_not_looked_at(learned, parts):
    pilot, _ = parts
    unlabelled = replace(pilot, losses={})
    assert np.array_equal(ss.LearnedScore.fit(unlabelled).weights, learned.weights)


def test_records_logits_and_probabilities_give_one_score():
    sample = Population(n_exits=4).sample(800, seed=3)
    record = ss.ExitRecord.from_logits(sample.logits[:500])
    assert list(record.confidences) == ["top1"]
    learned = ss.LearnedScore.fit(record)
    shares = np.exp(sample.logits - sample.logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    others = [
        ss.LearnedScore.fit(ss.ExitRecord.from_logits(sample.logits[:500], score=SCORES)),
        ss.LearnedScore.fit(ss.ExitRecord.from_logits(sample.logits[:500], score="entropy")),
        ss.LearnedScore.fit(ss.ExitRecord.from_probabilities(shares[:500])),
        ss.LearnedScore.fit(sample.logits[:500]),
        ss.LearnedScore.fit(shares[:500]),
    ]
    assert all(np.allclose(each.weights, learned.weights, atol=1e-4) for each in others)
    rest = ss.ExitRecord.from_logits(sample.logits[500:], sample.labels[500:])
    assert ss.calibrate(rest, loss="zero_one", epsilon=0.1, score=learned).threshold is not None
    asked = ss.ExitRecord.from_logits(sample.logits[500:], score=learned)
    assert list(asked.confidences) == list(learned.inputs)


def test_logits_with_ids_do_not_calibrate():
    sample = Population(n_exits=4).sample(600, seed=0)
    ids = np.arange(1000, 1600)
    learned = ss.LearnedScore.fit(sample.logits[:300], ids=ids[:300])
    record = ss.ExitRecord.from_logits(sample.logits[200:], sample.labels[200:], ids=ids[200:])
    with pytest.raises(ValueError, match="100 of them"):
        ss.calibrate(record, loss="zero_one", epsilon=0.1, score=learned)
    with pytest.raises(ValueError, match="`ids` are those of the record"):
        ss.LearnedScore.fit(record, ids=ids[200:])


def test_features_stay_with_the_record(tmp_path):
    sample = Population(n_exits=4).sample(60, seed=0)
    record = ss.ExitRecord.from_logits(sample.logits, sample.labels)
    record.save(tmp_path / "record.parquet")
    loaded = ss.ExitRecord.load(tmp_path / "record.parquet")
    assert np.array_equal(loaded.features["top_diff"], record.features["top_diff"])
    assert record.take([3, 5]).features["top_diff"].shape == (2, 3)
    both = ss.ExitRecord.concatenate(record.split(20))
    assert both.features["top_diff"].shape == (60, 3)
    assert record.routed(np.zeros(60)).features == {}
    with pytest.raises(ValueError, match="features"):
        replace(record, features={"length": np.full((60, 3), 7.0)})


def test_other_records_use_the_scores_they_hold():
    rng = np.random.default_rng(0)
    sure = {"mean": rng.random((300, 2)), "patch": rng.random((300, 2))}
    apart = {"miou": np.column_stack([rng.random((300, 2)), np.zeros(300)])}
    record = ss.ExitRecord(sure, inconsistencies=apart)
    assert ss.LearnedScore.fit(record).features == ("mean", "patch")
    with pytest.raises(ValueError, match="must hold `inconsistencies`"):
        ss.LearnedScore.fit(ss.ExitRecord(sure, losses=apart, loss_ranges={"miou": (0, 1)}))


def test_the_same_pilot_gives_the_same_score(learned, parts):
    again = ss.LearnedScore.fit(parts[0].take(np.arange(400)[::-1]))
    assert np.allclose(again.weights, learned.weights, rtol=1e-6)
    assert ss.LearnedScore.fit(parts[0]) == learned
    assert hash(ss.LearnedScore.fit(parts[0])) == hash(learned)


def test_slopes_of_confident_features_are_never_negative():
    """Of two correlated features one slope would be negative, and rank unusual samples first."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 1, 1))
    values = np.concatenate([x, x + 0.6 * rng.normal(size=x.shape)], axis=2)
    agrees = (values[:, :, 0] * 3 - values[:, :, 1] * 2 > rng.normal(size=(300, 1))).astype(float)
    free = logistic_weights(values, agrees, np.zeros(2, bool))
    rising = logistic_weights(values, agrees, np.ones(2, bool))
    assert free[:, 1:].min() < 0 <= rising[:, 1:].min()


def test_an_exit_that_always_agrees_is_not_certain(parts):
    pilot, _ = parts
    apart = pilot.inconsistencies["zero_one"].copy()
    apart[:, 1] = 0.0
    learned = ss.LearnedScore.fit(replace(pilot, inconsistencies={"zero_one": apart}))
    sure = learned.confidences(pilot.confidences)[:, 1]
    assert sure.mean() > 0.95
    assert 0.9 < sure.min() < sure.max() < 1.0


def test_a_pilot_does_not_calibrate(learned, record, parts):
    promise = ss.Promise("zero_one", epsilon=0.05)
    request = ss.Calibration(promise, rule=learned)
    with pytest.raises(ValueError, match=r"score was learned on, but holds 400 of them"):
        request.run(record)
    with pytest.raises(ValueError, match="learned on"):
        record.curve(loss="zero_one", score=learned)
    assert request.run(parts[1]).certificate.conditions[-2].key == "score pilot"
    given = ss.ExitRecord(
        dict(record.confidences),
        losses=record.losses,
        inconsistencies=record.inconsistencies,
        ids=np.arange(record.n),
        groups=np.arange(record.n) // 2,
    )
    pilot, rest = given.take(range(0, 801, 2)), given.take(range(1, 1500, 2))
    with pytest.raises(ValueError, match="of their groups"):
        ss.Calibration(promise, rule=ss.LearnedScore.fit(pilot)).run(rest)


def test_policies_know_their_score(learned, parts, tmp_path):
    _, rest = parts
    policy = ss.calibrate(rest, loss="zero_one", epsilon=0.05, score=learned)
    assert "learned confidence of at least" in str(policy)
    policy.save(tmp_path / "policy.json")
    loaded = ss.Policy.load(tmp_path / "policy.json")
    assert loaded == policy
    assert loaded.rule.score == learned
    assert loaded.calibration == policy.calibration
    assert loaded.exits(learned.confidences(rest.confidences)).max() > 0
    content = json.loads((tmp_path / "policy.json").read_text())
    content["calibration"]["rule"]["score"]["learned"]["weights"][0][0] += 1
    (tmp_path / "edited.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="must be the learned score of the calibration"):
        ss.Policy.load(tmp_path / "edited.json", accept_edited=True)


def test_a_file_holds_the_score(learned, parts, tmp_path):
    learned.save(tmp_path / "score.json")
    loaded = ss.LearnedScore.load(tmp_path / "score.json")
    assert loaded == learned
    assert loaded.name == learned.name
    with pytest.raises(ValueError, match="learned on"):
        loaded.refuse(parts[0])
    (tmp_path / "score.json").write_text('{"format": "swiftsure-score"}')
    with pytest.raises(ValueError, match="damaged"):
        ss.LearnedScore.load(tmp_path / "score.json")


def test_studies_leave_the_pilot_out(learned, record):
    request = ss.Calibration(ss.Promise("zero_one", epsilon=0.05), rule=learned)
    study = request.evaluate(record, n_calibration=300, splits=2, draws=2, progress=False)
    assert study.n_pool == 1100
    study = ss.evaluate(record, risk=request, controls=["ucb"], splits=2, n_calibration=300)
    assert study.n_calibration == 300
    policy = request.run(record.take(np.setdiff1d(record.ids, learned.pilot.ids)))
    assert policy.evaluate(record).n == 1100


def test_studies_of_folders_leave_the_pilot_out(learned, record, tmp_path):
    record.save(tmp_path / "record.parquet")
    folder = ss.ShardedRecord(tmp_path)
    request = ss.Calibration(ss.Promise("zero_one", epsilon=0.05), rule=learned)
    with pytest.raises(ValueError, match="score was learned on"):
        request.run(folder)
    study = request.evaluate(folder, n_calibration=300, splits=2, draws=2, progress=False)
    assert study.n_pool == 1100


def test_a_record_without_the_scores_is_refused(learned):
    record = ss.ExitRecord([[0.9] * 3] * 50, losses={"zero_one": [[0.0] * 4] * 50})
    with pytest.raises(ValueError, match="lacks top_diff: `from_logits`"):
        ss.calibrate(record, loss="zero_one", epsilon=0.1, score=learned)


def test_features_of_ones_own():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(500, 5, 3))
    agrees = (values[:, :, 0] > 0.5 * rng.normal(size=(500, 5))).astype(float)
    agrees[:, 4] = np.nan
    score = ss.LearnedScore.fit_features(values, agrees, ["a", "b", "c"], shared=True)
    assert score.weights.shape == (1, 4)
    sure = score.of_features(values)
    assert np.array_equal(score.of_features(values[:, 3], 3), sure[:, 3])
    assert score.of_features(values[:, :2]).shape == (500, 2)
    assert np.corrcoef(sure[:, 4], values[:, 4, 0])[0, 1] > 0.8
    rebuilt = ss.LearnedScore.from_json(json.loads(json.dumps(score.to_json())))
    assert rebuilt == score
    with pytest.raises(ValueError, match="agrees"):
        ss.LearnedScore.fit_features(values, agrees[:, :2], ["a", "b", "c"])
    with pytest.raises(TypeError, match="sequence of names"):
        ss.LearnedScore.fit_features(values, agrees, "abc")
