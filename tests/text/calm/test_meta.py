"""The meta-classifier: it learns what its labels say, and leaves the model alone."""

import pytest
import torch

from swiftsure.text import CalmModel, MetaClassifier, Texts, calm_fingerprint, train_meta
from swiftsure.text.calm import training
from swiftsure.text.calm.training import agreement_examples
from swiftsure.text.inputs import encode
from tests.text.builders import MODELS, new_tokens, t5
from tests.text.tokenizing import texts, tokenizer


@pytest.mark.parametrize("name", ["T5", "T5, deeper decoder", "Llama"])
def test_examples_are_what_each_block_would_say(name):
    model = MODELS[name]()
    words, data = tokenizer(), texts(4)
    states, labels = agreement_examples(model, Texts(data, words), max_new_tokens=5, batch_size=2)
    lengths = 0
    for text in data:
        output = CalmModel(model, None).generate(**encode([text], words, model), max_new_tokens=5)
        lengths += int(output.depths.lengths.sum())
    assert states.shape == (3 * lengths, 16)
    assert labels.shape == (3 * lengths,)
    assert 0 < labels.float().mean() < 1
    # A token that exits after the first block is the full model's where the label says so.
    inputs = encode(data[:1], words, model)
    full = new_tokens(
        model, CalmModel(model, None).generate(**inputs, max_new_tokens=1).sequences, inputs
    )
    early = new_tokens(
        model, CalmModel(model, -1.0).generate(**inputs, max_new_tokens=1).sequences, inputs
    )
    if model.config.is_encoder_decoder:
        _, first = agreement_examples(model, Texts(data[:1], words), max_new_tokens=1)
        assert bool(first[0]) == bool(full[0, 0] == early[0, 0])


def test_training_fits():
    model = t5()
    before = calm_fingerprint(model)
    data = texts(24)
    judge = train_meta(model, Texts(data, tokenizer()), max_new_tokens=6, epochs=40, progress=False)
    assert calm_fingerprint(model) == before
    assert not judge.training
    assert len(judge.trained_on) == len(set(data))
    states, labels = agreement_examples(model, Texts(data, tokenizer()), max_new_tokens=6)
    with torch.no_grad():
        right = (judge(states).argmax(dim=1) == labels).float().mean()
    assert right > max(labels.float().mean(), 1 - labels.float().mean())
    again = train_meta(model, Texts(data, tokenizer()), max_new_tokens=6, epochs=40, progress=False)
    assert torch.equal(judge.layers[0].weight, again.layers[0].weight)


def test_training_stops_before_it_learns_by_heart(monkeypatch):
    """Labels are coins: every step past the first few makes the classifier surer, and no better."""
    drawn = torch.Generator().manual_seed(0)
    asked = []

    def coins(_model, chosen, *_args, **_kwargs):
        asked.append(chosen.texts)
        n = 4 * len(chosen)
        states = torch.randn(n, 16, generator=drawn)
        return states, torch.randint(2, (n,), generator=drawn)

    monkeypatch.setattr(training, "agreement_examples", coins)
    data = texts(40)
    options = {"epochs": 200, "progress": False}
    kept = train_meta(t5(), Texts(data, tokenizer()), held_out=0.25, **options)
    learnt = train_meta(t5(), Texts(data, tokenizer()), held_out=0.0, **options)
    assert [len(part) for part in asked] == [30, 10, 40]
    assert sorted(asked[0] + asked[1]) == sorted(data)
    assert len(kept.trained_on) == len(set(data))  # those held out too: they chose the epoch
    new = torch.randn(500, 16, generator=drawn)
    with torch.no_grad():
        sure, surer = (judge(new).softmax(dim=1).amax(dim=1).mean() for judge in (kept, learnt))
    assert sure < 0.65
    assert surer > 0.8
    with pytest.raises(ValueError, match=r"`held_out` must be in \(0, 1\)"):
        train_meta(t5(), Texts(data, tokenizer()), held_out=1.0)


def test_published_weights_without_biases():
    weights = {"cm_head.0.weight": torch.eye(4), "cm_head.2.weight": torch.ones(2, 4)}
    judge = MetaClassifier.from_published(weights)
    assert judge.layers[0].bias is None
    assert judge(torch.ones(1, 4)).tolist() == [[4, 4]]
    with pytest.raises(ValueError, match=r"cm_head\.0\.weight"):
        MetaClassifier.from_published({"lm_head.weight": torch.eye(4)})


@pytest.mark.parametrize("bias", [True, False])
def test_saving(tmp_path, bias):
    judge = MetaClassifier(8, bias=bias, trained_on=["ab", "cd"])
    judge.save(tmp_path / "judge.safetensors")
    loaded = MetaClassifier.load(tmp_path / "judge.safetensors")
    states = torch.randn(3, 8)
    assert torch.equal(loaded(states), judge(states))
    assert loaded.trained_on == {"ab", "cd"}
    assert not loaded.training


def test_files_that_hold_no_classifier(tmp_path):
    with pytest.raises(ValueError, match="existing file"):
        MetaClassifier.load(tmp_path / "none")
    path = tmp_path / "text"
    path.write_text("hello")
    with pytest.raises(ValueError, match="not a readable safetensors"):
        MetaClassifier.load(path)
