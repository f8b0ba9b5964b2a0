import json
from pathlib import Path

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.cascade import Answer
from swiftsure.reasoning import TRACE_FEATURES, Probe, Trace, TraceRecord, probe_scores
from tests.reasoning.builders import questions

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "thinking"


def probe(tokens, answer, confidence=0.5, spent=0):
    return Probe(tokens, Answer(answer, confidence, {"tokens": spent}))


def test_exits_carry_probes_forward_and_count_their_tokens():
    probes = [probe(100, "A", 0.2, 7), probe(250, "B", 0.6, 8)]
    record = TraceRecord([Trace("q", probes, 700, Answer("C"), label="B")])
    exits = record.exits([100, 200, 300, 500])
    assert exits.confidences["confidence"].tolist() == [
        [np.float32(x) for x in (0.2, 0.2, 0.6, 0.6)]
    ]
    # Each checkpoint is a probe that is paid for, also where the log has none of its own.
    assert exits.costs["tokens"].tolist() == [[107, 214, 322, 530, 730]]
    assert exits.full_costs["tokens"].tolist() == [700]
    assert exits.losses["zero_one"].tolist() == [[1, 1, 0, 0, 1]]
    assert exits.inconsistencies["zero_one"].tolist() == [[1, 1, 1, 1, 0]]
    assert exits.settings["carried"]


def test_after_a_natural_end_every_exit_fires_with_the_full_answer():
    short = Trace("a", [probe(100, "A", 0.1, 5)], 150, Answer("B"), "B")
    long = Trace("b", [probe(k, "A", 0.1, 5) for k in (100, 200, 300)], 390, Answer("A"), "A")
    exits = TraceRecord([short, long]).exits(100)
    assert exits.settings["checkpoints"] == [100, 200, 300]
    assert "carried" not in exits.settings
    assert exits.costs["tokens"].tolist() == [[105, 155, 155, 155], [105, 210, 315, 405]]
    assert (exits.confidences["confidence"][0] == [np.float32(0.1), 1, 1]).all()
    assert exits.losses["zero_one"].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    for name, table in exits.confidences.items():
        assert (table[0, 1:] == 1).all(), name


def test_a_question_is_a_group():
    record = questions(20, np.random.default_rng(0), seeds=3)
    exits = record.exits(200)
    assert (exits.unit, exits.n_units, exits.n) == ("groups", 20, 60)
    policy = ss.calibrate(exits, loss="zero_one", epsilon=0.3, score="confidence")
    assert policy.certificate.samples.unit == "groups"
    assert policy.settings["system"] == "thinking"


def test_labels_may_be_missing_where_answers_agree():
    probes = [probe(100, "A", 0.9)]
    traces = [Trace(k, probes, 200, Answer("A")) for k in range(60)]
    exits = TraceRecord([*traces, Trace("q", probes, 200, Answer("B"), "B")]).exits([100])
    policy = ss.calibrate(exits, loss="zero_one", epsilon=0.2, score="confidence")
    assert policy.threshold is not None
    assert len(exits.needs_label(score="confidence")) == 0


def test_lines_come_back(tmp_path):
    record = questions(5, np.random.default_rng(0), seeds=2)
    record.save(tmp_path / "traces.jsonl")
    again = TraceRecord.load(tmp_path / "traces.jsonl")
    assert [t.to_json() for t in again.traces] == [t.to_json() for t in record.traces]
    assert np.array_equal(again.exits(100).costs["tokens"], record.exits(100).costs["tokens"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 50}, "rising `tokens` of at most 50"),
        ({"answer": None, "probes": [{"tokens": 1}]}, "no 'answer'"),
        ({"probes": [{"tokens": -1, "answer": "A"}]}, "tokens"),
        ({"probes": [{"tokens": 9, "answer": "A", "confidence": 2}]}, "confidence"),
    ],
)
def test_a_bad_line_is_named(tmp_path, change, words):
    good = {
        "question": "q",
        "tokens": 100,
        "answer": "A",
        "probes": [{"tokens": 90, "answer": "A"}],
    }
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(good | change)}\n")
    with pytest.raises(ValueError, match=f"line 2: .*{words}"):
        TraceRecord.load(path)


def test_bad_traces_are_refused():
    with pytest.raises(ValueError, match="each question and seed once"):
        TraceRecord([Trace("q", [], 5, Answer("A")), Trace("q", [], 5, Answer("A"))])
    with pytest.raises(ValueError, match="must not be before the first probe"):
        TraceRecord([Trace("q", [probe(50, "A")], 100, Answer("A"))]).exits([20, 60])
    with pytest.raises(ValueError, match="must rise"):
        TraceRecord([Trace("q", [probe(50, "A")], 100, Answer("A"))]).exits([60, 50])


def test_scores_of_probes():
    found = probe_scores([Answer(0, probabilities=[0.75, 0.25])] * 3, 3000)
    assert found["agreement"] == 0.75
    assert found["progress"] == 0.75
    assert found["top_diff"] == 0.5
    own = probe_scores([Answer("A", logprobs=[-0.1, -2.0], scores={"mine": 0.3})], 0)
    assert own["min_logprob"] == np.float32(np.exp(-2.0))
    assert own["mine"] == 0.3


def test_the_policy_speaks_of_thinking():
    exits = questions(300, np.random.default_rng(1)).exits(100)
    policy = ss.calibrate(exits, loss="zero_one", epsilon=0.1, score="confidence")
    assert "It stops thinking at the first of 22 checkpoints where its confidence is" in str(policy)
    assert "of the tokens" in str(policy)
    assert "for questions like the 300 it was calibrated on" in str(policy)


@pytest.mark.parametrize("name", ["gpqa_matched", "mmlu_pro_matched"])
def test_real_traces(name):
    """75 questions with 10 seeds each: 25 to learn the score, 50 to calibrate."""
    path = SHARED / f"{name}.npz"
    if not path.is_file():
        pytest.skip("the measured traces are not here")
    data = np.load(path)
    record = TraceRecord.from_arrays(
        data["tokens"],
        probabilities=data["probabilities"],
        correct=data["correct"],
        questions=data["question"],
        seeds=data["seed"],
        spent=10,
    )
    exits = record.exits(512)
    assert np.array_equal(exits.losses["zero_one"][:, -1], 1 - data["correct"][:, -1])
    pilot, calibration = exits.split(25, seed=0)
    learned = ss.LearnedScore.fit(pilot, TRACE_FEATURES, shared=True)
    saved = {}
    for score in ("top1", learned):
        policy = ss.calibrate(calibration, loss="zero_one", epsilon=0.1, score=score)
        assert policy.certificate.samples.n == 50
        full, here = policy.certificate.costs.means["tokens"]
        saved[policy.score] = 1 - here / full
    assert saved[learned.name] > max(0.3, saved["top1"])


def test_a_probe_without_any_option_is_not_right():
    """Its most probable option is the first one, which may be the label."""
    record = TraceRecord.from_arrays(
        [[100, 200, 300]],
        probabilities=[[[0.9, 0.1], [0.0, 0.0], [0.8, 0.2]]],
        correct=[[True, False, True]],
    )
    assert [probe.answer.answer for probe in record.traces[0].probes] == [0, None]
    assert record.exits([100, 200]).losses["zero_one"].tolist() == [[0, 1, 0]]
