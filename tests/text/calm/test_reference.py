"""Agreement with the published early-exit T5: confidences, exits, tokens, logits, caches."""

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from swiftsure.text import CalmModel, CalmRule, Decay, MetaClassifier, early_exits
from swiftsure.torch.scoring import top_diff
from tests.torch.reference import Reference

REFERENCE = Reference("calm_t5")
pytestmark = REFERENCE.needed


@pytest.fixture(scope="module")
def published():
    hyperparameters, weights, tensors = REFERENCE.parity()
    model = T5ForConditionalGeneration(T5Config(**hyperparameters)).eval()
    own = {key: value for key, value in weights.items() if not key.startswith("cm_head.")}
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert not missing
    assert unexpected == ["decoder.lm_head.weight"]  # an alias of the head
    return model, MetaClassifier.from_published(weights), tensors


@pytest.fixture(scope="module")
def scenarios():
    return REFERENCE.facts("parity_small.json")["scenarios"]


def rule_of(settings):
    temperature = settings.get("exit_position_temp")
    return CalmRule(
        settings["exit_conf_threshold"],
        score=settings["exit_conf_type"],
        strict=True,
        min_exit=settings.get("exit_min_layer", 1) - 1,
        decay=None if temperature is None else Decay(12, temperature, form="free"),
    )


@pytest.mark.parametrize("name", ["calm_softmax", "calm_softmax_decay", "calm_meta"])
def test_published_runs(published, scenarios, name):
    model, classifier, tensors = published
    expected = scenarios[name]
    rule = rule_of(expected["settings"])
    with early_exits(model, rule, classifier=classifier if rule.score == "meta" else None) as run:
        output = model.generate(
            input_ids=tensors["in.input_ids"],
            attention_mask=tensors["in.attention_mask"],
            max_new_tokens=11,
            return_dict_in_generate=True,
            output_logits=True,
        )
    assert output.sequences[0].tolist() == expected["ids"]
    depths = run.depths
    assert depths.exit_layers[0].tolist() == [step["blocks_run"] for step in expected["steps"]]
    for looks, step in zip(depths.confidences[0], expected["steps"], strict=True):
        seen = looks[np.isfinite(looks)]
        np.testing.assert_allclose(seen, step["confidence_checks"], atol=2e-6)
    logits = torch.cat(output.logits)
    torch.testing.assert_close(logits, tensors[f"out.{name}.step_logits"], atol=2e-5, rtol=0)
    layers = output.past_key_values.self_attention_cache.layers
    for part in ("keys", "values"):
        cached = torch.stack([getattr(layer, part)[0] for layer in layers])
        wanted = tensors[f"out.{name}.self_{part[0]}"]
        torch.testing.assert_close(cached, wanted, atol=2e-5, rtol=0)


def test_the_full_model(published):
    model, _, tensors = published
    given = {key: tensors[f"in.{key}"] for key in ("input_ids", "attention_mask")}
    output = CalmModel(model, None).generate(**given, max_new_tokens=2)
    assert torch.equal(output.sequences, tensors["out.full_ids"])


def test_functions():
    _, tensors = (
        REFERENCE.facts("functional_traces.json"),
        pytest.importorskip("safetensors.torch").load_file(
            REFERENCE.folder / "functional_traces.safetensors"
        ),
    )
    found = top_diff(tensors["in.conf_logits"])
    torch.testing.assert_close(found, tensors["out.conf_softmax_top2diff"], atol=1e-6, rtol=0)
    weights = {key[3:]: value for key, value in tensors.items() if key.startswith("in.cm_head")}
    classifier = MetaClassifier.from_published(weights)
    chances = classifier(tensors["in.meta_hidden"]).softmax(dim=1)[:, 1]
    torch.testing.assert_close(chances, tensors["out.conf_meta"], atol=1e-6, rtol=0)
    for level, temperature, length, step, wanted in tensors["out.threshold_decay"].tolist():
        if temperature > 0 and np.isfinite(temperature):
            decay = Decay(int(length), temperature, form="free")
            assert float(decay.levels(level, int(step) - 1)) == pytest.approx(wanted, abs=1e-6)
