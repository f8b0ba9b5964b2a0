"""Captured decoding: the tokens, depths and confidences of the engine without capture."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from swiftsure.text import CalmModel, CalmRule, ExitHeads
from swiftsure.text.calm import capture
from swiftsure.text.calm.loops import RegroupingLoop
from swiftsure.torch import CaptureLimits
from tests.text.builders import KINDS, MODELS, batch, kind, llama, t5
from tests.text.calm.slow import OPTIONS, RULES, TOKENS, fast_model
from tests.text.recording import PretendingRecorder

DEVICES = [
    "called",
    "pretended",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
LOOPS = ["device", "queues"]
"""Whether the device or the host decides, where conditional graphs are possible."""


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Functions are called, as on a CPU; called as if they were captured; or captured."""
    if request.param == "pretended":
        monkeypatch.setattr(capture, "Recorder", PretendingRecorder)
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture(params=LOOPS)
def loop(request, monkeypatch):
    for name in ("cpu", "cuda"):
        monkeypatch.setitem(capture.LARGEST_GROUP, name, 3)
    if request.param == "queues":
        own = capture.CapturedDecoding.loop
        monkeypatch.setattr(
            capture.CapturedDecoding,
            "loop",
            lambda self, shape, plan, *, by_host: own(self, shape, plan, by_host=True),
        )
    return request.param


def both(fast, device):
    """The model on a device, without capture and with."""
    fast.model.to(device)
    if fast.classifier is not None:
        fast.classifier.to(device)
    parts = {"classifier": fast.classifier, "heads": fast.heads}
    plain = CalmModel(fast.model, fast.rule, **parts)
    return plain, CalmModel(fast.model, fast.rule, **parts, capture=True)


def check_same(plain, captured, inputs, **options):
    inputs = {name: value.to(plain.model.device) for name, value in inputs.items()}
    wanted, found = (each.generate(**inputs, **options) for each in (plain, captured))
    assert torch.equal(found.sequences, wanted.sequences)
    assert np.array_equal(found.exit_layers, wanted.exit_layers)
    np.testing.assert_allclose(found.depths.confidences, wanted.depths.confidences, atol=1e-4)
    np.testing.assert_allclose(found.flops, wanted.flops)
    return found


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule(rule, device, loop):
    model = t5()
    plain, captured = both(fast_model(model, rule), device)
    depths = set()
    for n, seed in ((5, 0), (5, 1), (1, 2)):  # the second reuses the buffers of the first
        found = check_same(plain, captured, batch(n, model, seed), **OPTIONS)
        depths |= set(found.exit_layers.flat)
    assert len(depths - {0}) > 1


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Bart"])
def test_families_as_captured(name, device, loop):
    model = llama() if name == "Llama" else kind(name)
    plain, captured = both(fast_model(model, RULES["softmax, shortlist"]), device)
    check_same(plain, captured, batch(4, model), **OPTIONS)


@pytest.mark.parametrize("name", [*KINDS, *(name for name in MODELS if name != "T5")])
def test_every_family(name):
    model = (MODELS[name] if name in MODELS else lambda: kind(name))().double()
    plain, captured = both(fast_model(model, RULES["softmax"]), "cpu")
    check_same(plain, captured, batch(4, model), **OPTIONS)


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_never_exiting_is_generate(name, device):
    model = MODELS[name]().to(device)
    inputs = {name: value.to(device) for name, value in batch(5, model).items()}
    output = CalmModel(model, None, capture=True).generate(**inputs, **OPTIONS)
    assert torch.equal(output.sequences, model.generate(**inputs, **OPTIONS))


@pytest.mark.parametrize("name", ["T5", "Llama"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 5, "seed": 3},
        {"min_new_tokens": 6},
        {"min_length": 5, "repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
    ],
    ids=["sampled", "not too short", "two processors", "processor"],
)
def test_options_of_generate(name, options, device):
    model = MODELS[name]()
    plain, captured = both(fast_model(model, RULES["softmax"]), device)
    check_same(plain, captured, batch(4, model), **OPTIONS | options)


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_a_stopping_criterion(name, device):
    model = MODELS[name]()
    plain, captured = both(fast_model(model, RULES["softmax"]), device)
    inputs = {name: value.to(device) for name, value in batch(4, model).items()}
    options = {"max_new_tokens": TOKENS, "stopping_criteria": [lambda ids, _: ids[:, -1] % 3 == 1]}
    wanted, found = (each.generate(**inputs, **options).sequences for each in (plain, captured))
    assert torch.equal(found, wanted)


def test_thresholds_of_each_sequence(device, loop):
    plain, captured = both(CalmModel(t5(), CalmRule(0.5)), device)
    levels = [None, 0.2, 0.5, 0.9]
    check_same(plain, captured, batch(4, plain.model), max_new_tokens=TOKENS, thresholds=levels)


def test_a_decoder_prompt(device, loop):
    plain, captured = both(fast_model(t5(), RULES["saturation"]), device)
    given = batch(3, plain.model) | {"decoder_input_ids": torch.tensor([[0, 7, 9]] * 3)}
    check_same(plain, captured, given, **OPTIONS)


@pytest.mark.parametrize("score", ["softmax", "saturation"])
def test_exit_heads(score, device, loop):
    model = llama()
    torch.manual_seed(0)
    heads = ExitHeads(16, [0, 2]).eval().to(device)
    fast = CalmModel(model, CalmRule(0.1, score=score), heads=heads)
    plain, captured = both(fast, device)
    found = check_same(plain, captured, batch(4, model), max_new_tokens=TOKENS, eos_token_id=None)
    assert len(np.unique(found.exit_layers)) > 1


def test_rows_that_exited_go_on_while_others_are_deep(monkeypatch):
    """A group of rows may be at other tokens than the rest of its batch."""
    monkeypatch.setitem(capture.LARGEST_GROUP, "cpu", 3)
    seen = []
    run = RegroupingLoop._run
    monkeypatch.setattr(
        RegroupingLoop, "_run", lambda self, k: (seen.append(np.ptp(self.steps)), run(self, k))[1]
    )
    plain, captured = both(fast_model(t5(), RULES["softmax"]), "cpu")
    check_same(plain, captured, batch(8, plain.model), max_new_tokens=TOKENS, eos_token_id=None)
    assert max(seen) > 0


def test_captured_sizes_are_reused(monkeypatch):
    monkeypatch.setattr(capture, "Recorder", PretendingRecorder)
    captured = CalmModel(t5(), 0.5, capture=CaptureLimits(graphs=400))
    for seed in range(3):
        captured.generate(**batch(4, captured.model, seed), **OPTIONS)
        graphs = captured._captured.budget.graphs
        assert graphs < 40
    assert len(captured._captured._loops) == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_weights_may_change(in_place, device):
    plain, captured = both(CalmModel(t5(), CalmRule(0.5)), device)
    model, inputs = plain.model, batch(4, plain.model)
    check_same(plain, captured, inputs, **OPTIONS)
    other = t5(seed=7).to(device).state_dict()
    if in_place:
        model.load_state_dict(other)
    else:
        model.load_state_dict(other, assign=True)
        model.tie_weights()
    check_same(plain, captured, inputs, **OPTIONS)


@pytest.mark.parametrize("slow", ["early", "full"])
def test_measure_keeps_the_faster_way(slow, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(capture, "perf_counter", lambda: next(clock))
    plain, captured = both(fast_model(t5(), RULES["softmax"]), "cpu")
    model, inputs = plain.model, batch(4, plain.model)
    wanted = {"early": plain.generate(**inputs, **OPTIONS).sequences}
    wanted["full"] = model.generate(**inputs, **OPTIONS)
    assert not torch.equal(wanted["early"], wanted["full"])
    run = capture.CapturedDecoding.join

    def slowed(self, loop, rows, prepared, thresholds):
        if np.isinf(thresholds).all() == (slow == "full"):
            for _ in range(1000):
                next(clock)
        return run(self, loop, rows, prepared, thresholds)

    monkeypatch.setattr(capture.CapturedDecoding, "join", slowed)
    seconds = captured.measure(**inputs, **OPTIONS)
    assert (seconds["early exits"] > seconds["full decoder"]) == (slow == "early")
    fast = "full" if slow == "early" else "early"
    assert torch.equal(captured.generate(**inputs, **OPTIONS).sequences, wanted[fast])
    other = batch(2, model)  # another size
    alone = plain.generate(**other, **OPTIONS).sequences
    assert torch.equal(captured.generate(**other, **OPTIONS).sequences, alone)


def test_what_is_not_supported_says_so():
    model = llama()
    with pytest.raises(ValueError, match="`measure` needs"):
        CalmModel(model, 0.5).measure(**batch(1, model))
    captured = CalmModel(model, 0.5, capture=True)
    inputs = batch(1, model)
    cache = DynamicCache()
    model(**inputs, past_key_values=cache, use_cache=True)
    longer = torch.cat([inputs["input_ids"], torch.full((1, 1), 3)], dim=1)
    with pytest.raises(ValueError, match="`past_key_values` must be empty with capture=True"):
        captured.generate(longer, past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="`thresholds` must be one number or one per sequence, 1"):
        captured.generate(**inputs, thresholds=[0.1, 0.2], max_new_tokens=2)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="needs attention 'eager' or 'sdpa', but the model has"):
        captured.generate(**batch(2, model), max_new_tokens=2)
    stretched = llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="rotary positions of type 'dynamic'"):
        CalmModel(stretched, 0.5, capture=True).generate(**inputs, max_new_tokens=2)
