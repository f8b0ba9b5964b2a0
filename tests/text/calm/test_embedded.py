"""The translator that comes with the library, and its records."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import swiftsure as ss
from experiments.calm.reproduce import SCORES, load_sweeps
from swiftsure.text import CalmModel, CalmRule, MetaClassifier, Texts, sweep
from swiftsure_zoo.records import CALM, TRANSLATOR

CAPTIONS = [
    "Ein Mann fährt mit einem roten Fahrrad durch den Park.",
    "Zwei kleine Kinder spielen am Strand mit einem Ball.",
]
RULES = {
    "softmax": CalmRule(None),
    "shortlist": CalmRule(None, shortlist=64),
    "saturation": CalmRule(None, score="saturation"),
    "meta": CalmRule(None, score="meta"),
    "softmax-second": CalmRule(None, look_at=(1,)),
    "meta-second": CalmRule(None, score="meta", look_at=(1,)),
}
SECOND = ("softmax-second", "meta-second")
"""Records of rules that look after the second block only."""
DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "multi30k"


@pytest.fixture(scope="module")
def model():
    return AutoModelForSeq2SeqLM.from_pretrained(TRANSLATOR, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TRANSLATOR)


@pytest.fixture(scope="module")
def records():
    found = load_sweeps(CALM)
    for name in SECOND:
        found[name] = ss.ThresholdRecord.load(CALM / f"t5_multi30k_{name}.parquet")
    return found


def classifier_of(score):
    file = TRANSLATOR / "meta.safetensors"
    return MetaClassifier.load(file) if score.startswith("meta") else None


def test_it_translates(model, tokenizer):
    given = tokenizer(CAPTIONS, padding=True, return_tensors="pt")
    ids = CalmModel(model, None).generate(**given, max_new_tokens=64).sequences
    said = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert all(word in said[0].lower() for word in ("a man", "red", "through", "park"))
    assert all(word in said[1].lower() for word in ("two", "children", "beach", "ball"))


@pytest.mark.parametrize("score", [*SCORES, *SECOND])
def test_a_policy_of_its_records_runs_it(model, tokenizer, records, score):
    record = records[score]
    assert record.n == 2461
    policy = ss.calibrate(record, risk="gap", loss="bleu", epsilon=0.05)
    fast = CalmModel(model, policy, classifier=classifier_of(score))
    out = fast.generate(**tokenizer(CAPTIONS, padding=True, return_tensors="pt"))
    assert (out.mean_layers < 6).all()
    assert "man" in tokenizer.decode(out.sequences[0], skip_special_tokens=True)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    try:
        with pytest.raises(ValueError, match="another model"):
            CalmModel(model, policy, classifier=classifier_of(score))
    finally:
        with torch.no_grad():
            model.lm_head.weight[0, 0] -= 1


@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the captions in {DATA}")
@pytest.mark.parametrize("score", [*SCORES, *SECOND])
def test_its_records_are_what_it_does(model, tokenizer, records, score):
    record, n = records[score], 24
    german, english = (
        gzip.decompress((DATA / f"test_2016_flickr.{language}.gz").read_bytes())
        .decode()
        .splitlines()[:n]
        for language in ("de", "en")
    )
    some = [0, 2, 8, 16, 25]  # of the thresholds
    found = sweep(
        CalmModel(model, RULES[score], classifier=classifier_of(score)),
        Texts(german, tokenizer, english),
        thresholds=record.thresholds[some[1:]],
        losses=["bleu"],
        generation={"max_new_tokens": 64},
    )
    assert found.fingerprint == record.fingerprint
    assert list(record.ids[:2]) == ["test_2016_flickr_0", "test_2016_flickr_1"]
    # A tie of floats may fall otherwise on another machine, and change what follows.
    alike = np.isclose(found.losses["bleu"], record.losses["bleu"][:n, some], atol=1e-6)
    assert alike.mean() > 0.97
    layers = np.isclose(found.costs["layers"], record.costs["layers"][:n, some], atol=1e-6)
    assert layers.mean() > 0.97
