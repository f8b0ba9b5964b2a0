"""Confidences without log-probabilities: features, learned scores, verifiers behind an API."""

import json

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.cascade import (
    ANSWER_FEATURES,
    Answer,
    Judge,
    LearnedConfidence,
    SelfConsistency,
    Verified,
)
from swiftsure.cascade.answer_features import feature_values, question_text


def small(question):
    """Refuses every third question, and is wrong about every third."""
    number = int(question.split()[-1])
    if number % 3 == 0:
        return Answer("I'm sorry, I cannot answer that.", cost={"usd": 0.1})
    return Answer(f"It is perhaps {number + 1}." if number % 3 == 1 else str(number), None, 0.1)


def large(question):
    return Answer(question.split()[-1], cost={"usd": 1.0})


def priced(question):
    found = small(question)
    return Answer(found.answer, cost={"usd": 0.1})


QUESTIONS = [f"Repeat {k}" for k in range(900)]
CASCADE = {"small": priced, "large": large}


def learned():
    return ss.Cascade(CASCADE).learn(QUESTIONS[:300], ids=range(300))


def test_learned_confidences_tell_refusals_from_answers():
    cascade = learned()
    record = cascade.collect(QUESTIONS[300:], ids=range(300, 900))
    policy = cascade.calibrate(record, risk="consistency", epsilon=0.02)
    assert policy.certificate.costs.means["usd"][1] < 0.8
    assert "none of the 300 samples that the score was learned on" in str(policy)
    out = cascade.run(policy)(QUESTIONS[300:])
    expected = [question.split()[-1] for question in QUESTIONS[300:]]
    assert np.mean(np.asarray(out.answers) != expected) <= 0.02
    assert set(out.exits.tolist()) == {0, 1}


def test_pilot_questions_do_not_calibrate():
    with pytest.raises(ValueError, match="pilot that the score was learned on, but holds 100"):
        learned().collect(QUESTIONS[200:500], ids=range(200, 500))


def test_a_cascade_learns_several_models_and_keeps_their_names():
    cascade = ss.Cascade({"a": priced, "b": large, "c": large}).learn(QUESTIONS[:60])
    assert cascade.names == ["a", "b", "c"]
    assert [type(each).__name__ for each in cascade.models[:2]] == ["LearnedConfidence"] * 2
    record = cascade.collect(QUESTIONS[300:400])
    assert record.confidences["confidence"][:, 1].min() > 0.9  # b always agrees with c


def test_features_are_plain_numbers():
    answer = Answer("Maybe Paris", logprobs=[-0.5], scores={"agreement": 0.8, "verifier": 0.9})
    values = feature_values(ANSWER_FEATURES, "Capital of France, Paris?", answer)
    found = dict(zip(ANSWER_FEATURES, values, strict=True))
    assert found["agreement"] == 0.8
    assert found["verdict"] == 0.9
    assert found["logprob"] == pytest.approx(-0.5)
    assert (found["hedge"], found["refusal"], found["overlap"]) == (1.0, 0.0, 0.5)
    assert sum(found[f"embedding {k}"] ** 2 for k in range(16)) == pytest.approx(1.0)
    assert all(np.isfinite(values))
    assert feature_values(["embedding 0"], "", Answer("")) == [0.0]


@pytest.mark.parametrize(
    "value",
    [
        "Is 7 prime?",
        [{"role": "system", "content": "Hm."}, {"role": "user", "content": "Is 7 prime?"}],
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Is 7 prime?"}]}]},
        {"prompt": "Is 7 prime?"},
    ],
)
def test_questions_of_every_form_have_a_text(value):
    assert question_text(value) == "Is 7 prime?"
    assert question_text(5) == ""


def test_a_language_model_verifies(server):
    """The grade is the number in its answer, and its price is added."""
    verifier = ss.Endpoint(server.url, "verifier", key=None, logprobs=None)
    model = Verified(priced, verifier)
    grade = {"choices": [{"message": {"content": "Sure: 80"}}], "usage": {"prompt_tokens": 9}}
    server.faults += [(200, {}, json.dumps(grade).encode())]
    found = ss.Cascade({"small": model, "large": large}).run(None).models[0]
    answer = ss.cascade.running.run_coroutine(_closed(found, "Repeat 5"))
    assert answer.confidence == pytest.approx(0.8)
    assert answer.scores["verifier"] == pytest.approx(0.8)
    assert answer.cost == {"usd": 0.1, "tokens": 9.0}
    asked = server.requests[-1][1]["messages"][-1]["content"]
    assert "Question: Repeat 5\nAnswer: 5" in asked
    assert "surely right" in asked


async def _closed(model, value):
    try:
        return await model.answer(value)
    finally:
        await model.close()


def test_a_verifier_without_a_grade_asks_the_last_model(server):
    silent = {"choices": [{"message": {"content": "No idea"}}]}
    server.faults += [(200, {}, json.dumps(silent).encode())]
    model = Verified(priced, ss.Endpoint(server.url, "verifier", key=None, logprobs=None))
    with pytest.raises(ValueError, match="must give a confidence"):
        ss.cascade.running.run_coroutine(_closed(model, "Repeat 5"))


def test_wrappers_have_identities():
    inner = ss.Endpoint("http://localhost/v1", "small", key=None)
    judge = ss.Endpoint("http://localhost/v1", "judge", key=None)
    one = Verified(SelfConsistency(inner, 3), judge).identity()
    assert one["Verified"]["model"]["SelfConsistency"]["k"] == 3
    assert one != Verified(SelfConsistency(inner, 3), Judge(judge, 0, 10)).identity()
    score = learned().models[0].score
    assert LearnedConfidence(inner, score).identity()["LearnedConfidence"]["score"] == score.name
    assert LearnedConfidence(priced, score).identity() is None


def test_wrappers_go_around_another_model():
    inner = ss.Endpoint("http://localhost/v1", "small", key=None)
    wrapped = Verified(SelfConsistency(inner, 3), lambda question, answer: 0.5)
    other = ss.Endpoint("http://localhost/v1", "other", key=None)
    again = wrapped.around(other)
    assert again.model.model is other
    assert wrapped.model.model is inner
    assert again.model.k == 3
