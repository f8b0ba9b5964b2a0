"""Scores of tokens learned without labels: what they are fitted to, files, and a certified run."""

import numpy as np
import pytest
import torch

import swiftsure as ss
from swiftsure.text import (
    CalmModel,
    Texts,
    TokenScore,
    calm_fingerprint,
    learn_token_score,
    load_system,
    save_system,
    sweep,
)
from swiftsure.text.calm.token_score import token_features
from tests.text.builders import MODELS, t5
from tests.text.tokenizing import texts, tokenizer


@pytest.fixture(scope="module")
def learned():
    model, data = t5(), texts(24)
    return model, data, learn_token_score(model, Texts(data[:12], tokenizer()), max_new_tokens=6)


def test_features_do_not_look_at_scale():
    logits = torch.tensor([[2.0, 0.5, -1.0], [0.0, 0.0, -9.0]])
    now = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    found = token_features(logits, now, torch.tensor([[5.0, 0.0], [1.0, -1.0]]))
    assert found[:, 0].tolist() == [1.5, 0.0]
    assert found[:, 1].tolist() == pytest.approx([np.log(2.5), 0.0])
    assert found[:, 2].tolist() == pytest.approx([25 * np.log(2), 0.0], abs=1e-6)


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_it_is_learned_from_the_second_block_on_and_never_falls(name):
    score = learn_token_score(MODELS[name](), Texts(texts(8), tokenizer()), max_new_tokens=5)
    assert score.weights.shape == (3, 4)
    assert not score.weights[0].any()
    assert score.weights[1:].any()
    assert (score.weights[:, 1:] >= 0).all()


def test_it_is_certified_and_runs(learned, tmp_path):
    model, data, score = learned
    fast = CalmModel(model, score="learned", classifier=score)
    with pytest.raises(ValueError, match="classifier"):
        sweep(fast, Texts(data[6:], tokenizer()), thresholds=[0.9], losses=["exact_match"])
    record = sweep(
        fast,
        Texts(data[12:], tokenizer()),
        thresholds=[0.9, 0.6, 0.3, 0.0],
        losses=["exact_match"],
        generation={"max_new_tokens": 6},
    )
    policy = ss.calibrate(record, risk="consistency", epsilon=0.9, delta=0.5)
    assert policy.settings["score"] == "learned"
    again = CalmModel(model, policy, classifier=score)
    assert again.rule.score == "learned"
    save_system(again, tokenizer(), tmp_path / "system")
    loaded, _ = load_system(tmp_path / "system")
    assert torch.equal(loaded.classifier.weights, score.weights)
    assert loaded.classifier.trained_on == score.trained_on
    other = TokenScore(score.weights + 1.0)
    with pytest.raises(ValueError, match="another model"):
        CalmModel(model, policy, classifier=other)


def test_what_does_not_fit_is_refused(learned):
    model, _, score = learned
    assert calm_fingerprint(model, score) != calm_fingerprint(model)
    with pytest.raises(ValueError, match="a TokenScore: train one with"):
        CalmModel(model, score="learned")
    with pytest.raises(ValueError, match="learned for 2 blocks, but the model has 4"):
        CalmModel(model, score="learned", classifier=TokenScore([[0.0] * 4]))
    with pytest.raises(ValueError, match="belongs to score 'meta' or 'learned'"):
        CalmModel(model, score="softmax", classifier=score)
    with pytest.raises(ValueError, match="must have shape"):
        TokenScore([[0.0] * 3])
