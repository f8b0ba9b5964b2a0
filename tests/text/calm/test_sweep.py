"""Sweeps: what K separate runs would have recorded, for less, and after a kill."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.losses import LOSSES, Loss, LossRange
from swiftsure.text import CalmModel, CalmRule, Decay, Texts, calm_fingerprint, sweep, train_meta
from swiftsure.text.inputs import encode
from tests.text.builders import MODELS, t5
from tests.text.tokenizing import texts, tokenizer

GRID = [None, 0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05]
GENERATION = {"max_new_tokens": 6}
N = 7


def one_by_one(model, rule, classifier=None, **options):
    """The same record from one run for each text and threshold."""
    words, data = tokenizer(), texts(N)
    answers, layers, flops = [], [], []
    for k, text in enumerate(data):
        inputs = encode([text], words, model)
        row = []
        for level in GRID:
            fast = CalmModel(model, replace(rule, threshold=level), classifier=classifier)
            output = fast.generate(**inputs, **GENERATION, **options, sequence_ids=[k])
            start = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
            said = words.batch_decode(output.sequences[:, start:], skip_special_tokens=True)[0]
            row.append((said, output.mean_layers[0], output.flops[0]))
        for found, part in zip((answers, layers, flops), zip(*row, strict=True), strict=True):
            found.append(part)
    return np.asarray(answers, object), np.asarray(layers), np.asarray(flops)


@pytest.mark.parametrize(
    ("name", "rule", "options"),
    [
        ("T5", CalmRule(None), {}),
        ("T5", CalmRule(None, strict=True, decay=Decay(6)), {}),
        ("T5", CalmRule(None, shortlist=4), {}),
        ("T5", CalmRule(None, look_at=[0, 2]), {}),
        ("T5 v1.1", CalmRule(None, score="saturation"), {}),
        ("T5", CalmRule(None), {"do_sample": True, "temperature": 0.7, "top_k": 9}),
        ("Llama", CalmRule(None), {}),
    ],
)
def test_a_sweep_is_one_run_for_each_threshold(name, rule, options, monkeypatch):
    model = MODELS[name]()
    answers, layers, flops = one_by_one(model, rule, **options)
    runs = []
    generate = CalmModel.generate

    def counting(self, *args, **kwargs):
        runs.append(len(kwargs["thresholds"]))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(CalmModel, "generate", counting)
    record = sweep(
        CalmModel(model, rule),
        Texts(texts(N), tokenizer(), texts(N, seed=1)),
        thresholds=GRID,
        losses=["token_f1", "rouge_l"],
        generation=GENERATION | options,
        batch_size=3,
    )
    f1 = LOSSES["token_f1"]
    wanted = f1.against_labels(answers, texts(N, seed=1))
    np.testing.assert_allclose(record.losses["token_f1"], wanted)
    wanted = f1.against_labels(answers, answers[:, 0].tolist())
    np.testing.assert_allclose(record.inconsistencies["token_f1"], wanted)
    np.testing.assert_allclose(record.costs["layers"], layers)
    assert sum(runs) < N * len(GRID)
    assert (record.inconsistencies["rouge_l"][:, 0] == 0).all()
    if name == "T5":
        assert record.inconsistencies["rouge_l"].max() > 0
    assert record.fingerprint == calm_fingerprint(model)
    np.testing.assert_allclose(record.costs["flops"], flops)


def small(model, given=None, *, rule=None, classifier=None, **options):
    known = {"thresholds": [0.5, 0.1], "generation": GENERATION}
    fast = CalmModel(model, rule, classifier=classifier)
    return sweep(fast, given or Texts(texts(5), tokenizer()), **known | options)


def test_losses_of_ones_own():
    def length(answers):
        sizes = np.vectorize(len)(answers)
        return np.abs(sizes - sizes[:, -1:]) / 1000

    loss = Loss("length", LossRange(0, 2), "prediction", against_last=length)
    record = small(t5(), Texts(texts(5), tokenizer(), texts(5)), losses=[loss])
    assert not record.losses
    assert record.inconsistency_ranges == {"length": LossRange(0, 2)}
    with pytest.raises(ValueError, match=r"'length' .* set the field `against_last` of its Loss"):
        small(t5(), losses=[replace(loss, against_last=None)])


def test_the_full_model_comes_first():
    record = small(t5())
    assert record.thresholds.tolist()[0] == np.inf
    assert len(record.thresholds) == 3
    assert record.costs["layers"][:, 0].tolist() == [4] * 5
    assert record.losses == {}  # without references


def test_batches_are_of_texts_of_like_length(monkeypatch):
    masks = []
    generate = CalmModel.generate

    def noting(self, *args, **kwargs):
        masks.append(kwargs["attention_mask"])
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(CalmModel, "generate", noting)
    given = [" ".join(["w05"] * (2 + k % 2 * 5)) for k in range(8)]
    small(t5(), Texts(given, tokenizer()), batch_size=4)
    assert {mask.shape[1] for mask in masks[:2]} == {2, 7}
    assert all(mask.all() for mask in masks[:2])


def test_from_a_record_to_generation(tmp_path):
    """The whole way: sweep, calibrate, save, load, generate."""
    model, options = t5(), {"min_exit": 1, "look_at": (1, 2), "decay": Decay(6)}
    record = small(model, Texts(texts(80), tokenizer()), rule=CalmRule(None, **options))
    assert record.settings["look_at"] == [1, 2]
    policy = ss.calibrate(record, risk="consistency", loss="rouge_l", epsilon=0.6)
    policy.save(tmp_path / "policy.json")
    loaded = ss.Policy.load(tmp_path / "policy.json")
    fast = CalmModel(model, loaded)
    assert fast.rule == CalmRule(policy.threshold, **options)  # what was certified is what runs
    output = fast.generate(**encode(texts(3), tokenizer(), model))
    assert output.sequences.shape[1] <= 7
    with pytest.raises(ValueError, match="another model"):
        CalmModel(t5(1), loaded)


def test_a_killed_sweep_goes_on(tmp_path, monkeypatch):
    model = t5()
    run = ss.RunOptions(shards=tmp_path / "shards", shard_size=2)
    given = Texts(texts(5), tokenizer(), texts(5, seed=1))
    same = {"given": given, "run": run, "batch_size": 2}
    wanted = small(model, given)
    encoded = []

    def killing(given, *rest):
        encoded.append(given)
        if len(encoded) == 3:
            raise KeyboardInterrupt
        return encode(given, *rest)

    monkeypatch.setattr("swiftsure.text.inputs.encode", killing)
    with pytest.raises(KeyboardInterrupt):
        small(model, **same)
    assert len(list((tmp_path / "shards").glob("*.parquet"))) == 2
    record = small(model, **same)
    assert len(encoded) == 4  # the last shard alone was run again
    for name in ("losses", "inconsistencies", "costs"):
        for key, values in getattr(wanted, name).items():
            np.testing.assert_allclose(getattr(record, name)[key], values)
    assert record.ids.tolist() == wanted.ids.tolist()
    with pytest.raises(ValueError, match="another run, with other thresholds"):
        small(model, **same, thresholds=[0.6, 0.1])
    with pytest.raises(ValueError, match="another run, with other model"):
        small(t5(1), **same)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"given": Texts(["w03", " "], tokenizer())}, "number 1 is"),
        (
            {"given": Texts(["w03 " * 5], tokenizer(model_max_length=3))},
            "max_source_length=3",
        ),
        ({"thresholds": [0.2, 0.5]}, "must fall"),
        ({"thresholds": [1.5, 0.5]}, "at most 1"),
        ({"thresholds": []}, "list of numbers"),
        ({"losses": ["rouge"]}, "Did you mean 'rouge_l'"),
    ],
)
def test_what_cannot_be_swept(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        small(t5(), run=ss.RunOptions(shards=tmp_path, shard_size=1), **options)
    assert not list(tmp_path.iterdir())  # nothing was run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": []}, "must not be empty"),
        ({"references": ["a"]}, "`references` must have one entry per text, 5, but got 1"),
        ({"ids": [0, 1, 2, 3, 0]}, "`ids` must be unique"),
    ],
)
def test_texts_that_do_not_match(options, message):
    with pytest.raises(ValueError, match=message):
        Texts(**{"texts": texts(5), "tokenizer": tokenizer()} | options)


def test_a_bare_model_is_refused():
    with pytest.raises(TypeError, match=r"`model` must be a CalmModel, .* but got T5"):
        sweep(t5(), Texts(texts(5), tokenizer()), thresholds=[0.5])


def test_long_texts_are_cut_where_told():
    given = Texts(["w03 " * 50], tokenizer(model_max_length=30), max_source_length=10)
    assert small(t5(), given).n == 1


def test_a_classifier_never_calibrates_on_its_training_texts():
    model = t5()
    seen = texts(6)
    judge = train_meta(model, Texts(seen, tokenizer()), max_new_tokens=4, epochs=1, progress=False)
    options = {"rule": CalmRule(score="meta"), "classifier": judge}
    with pytest.raises(ValueError, match="which saw 1 of them in training, number 4 first"):
        small(model, Texts([*texts(4, seed=9), seen[3]], tokenizer()), **options)
    record = small(model, Texts(texts(4, seed=9), tokenizer()), **options)
    assert record.settings["score"] == "meta"
    assert record.fingerprint == calm_fingerprint(model, judge) != calm_fingerprint(model)
