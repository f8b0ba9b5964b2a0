"""Compiled blocks: the tokens of the model's own blocks, with less work."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from swiftsure.text import FAMILIES, BigLittle, CalmModel, check_family, fast_blocks, self_draft
from swiftsure.text.calm import capture
from swiftsure.text.decoder import decoder_of
from tests.text.builders import KINDS, MODELS, batch, blocks_of, kind, llama, t5
from tests.text.calm.slow import OPTIONS, RULES, TOKENS, fast_model
from tests.text.recording import PretendingRecorder

EVERY = [*KINDS, *MODELS]
MERGED = {"Phi3": 0, "GPT2": 0, "GPTNeoX": 0, "Phi": 1, "Phi, normed keys": 1} | dict.fromkeys(
    ["Bart", "MBart", "Marian", "T5", "T5, sdpa off", "T5, deeper decoder"], 1
)
"""How many groups of layers are merged; two where nothing else is said."""
FOLDED = {*EVERY} - {"Phi, normed keys", "GPT2", "GPTNeoX", "Bart", "MBart", "Marian"}
FOLDED -= {name for name in EVERY if "T5" in name}
"""Whose queries share keys."""


COMPILES = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(fast_blocks, "_compile", lambda _, **__: fast_blocks.run_block)


def model_of(name):
    return MODELS[name]() if name in MODELS else kind(name)


def check_same(model, **settings):
    rule = fast_model(model, RULES["softmax"]).rule
    inputs = batch(4, model)
    wanted = CalmModel(model, rule, capture=True).generate(**inputs, **OPTIONS)
    fast = CalmModel(model, rule, capture=True, compile=True, **settings)
    found = fast.generate(**inputs, **OPTIONS)
    assert torch.equal(found.sequences, wanted.sequences)
    assert np.array_equal(found.exit_layers, wanted.exit_layers)
    np.testing.assert_allclose(found.depths.confidences, wanted.depths.confidences, atol=1e-4)
    return fast


@pytest.mark.parametrize("name", EVERY)
def test_every_family_with_merged_weights(name, uncompiled):
    model = model_of(name)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    fast = check_same(model)
    for block in fast.decoder.fast.blocks:
        parts = list(block.modules())
        merged = [part for part in parts if isinstance(part, fast_blocks._First)]
        assert len(merged) == MERGED.get(name, 2)
        assert not any(part.waiting for part in merged)
        folded = any(hasattr(part, "unfolded") for part in parts)
        assert folded == (name in FOLDED)
    for key, value in model.state_dict().items():
        assert torch.equal(value, values[key])
    check_family(model)


@pytest.mark.parametrize("name", ["Llama", "T5 v1.1", "Gemma3"])
def test_blocks_that_would_be_captured(name, uncompiled, monkeypatch):
    monkeypatch.setattr(capture, "Recorder", PretendingRecorder)
    check_same(model_of(name))


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_family_compiled(name):
    check_same(model_of(name))


@pytest.mark.parametrize("causal", [True, False])
def test_pairs(causal, uncompiled):
    model = llama() if causal else t5(gated=True, tied=False)
    draft, inputs = self_draft(model, 2), batch(3, model)
    wanted, found = (
        BigLittle(model, draft, 1.0, capture=True, compile=compiled).generate(
            **inputs, max_new_tokens=TOKENS
        )
        for compiled in (False, True)
    )
    assert torch.equal(found.sequences, wanted.sequences)
    passes = [
        [(call.model, call.fed, call.event) for run in each.runs for call in run.calls]
        for each in (wanted, found)
    ]
    assert passes[0] == passes[1]


@COMPILES
@pytest.mark.slow
def test_pairs_compiled():
    test_pairs(True, None)


@pytest.mark.parametrize("in_place", [True, False])
def test_weights_may_change(in_place, uncompiled):
    model = llama()
    fast = check_same(model)
    other = llama(seed=7)
    if in_place:
        model.load_state_dict(other.state_dict())
    else:
        model.load_state_dict(other.state_dict(), assign=True)
    inputs = batch(4, model)
    found = fast.generate(**inputs, **OPTIONS).sequences
    wanted = CalmModel(other, fast.rule, capture=True).generate(**inputs, **OPTIONS).sequences
    assert torch.equal(found, wanted)
    assert len(fast._captured._loops) == 1


def test_no_weight_is_stored_twice(uncompiled):
    model = llama()
    fast = check_same(model)
    first = next(p for p in fast.decoder.fast.blocks[0].modules() if hasattr(p, "waiting"))
    attention = model.model.layers[0].self_attn
    assert first.weight.data_ptr() == attention.q_proj.weight.data_ptr()
    attention.v_proj.weight.data[-1, -1] = 12.0
    assert first.weight[-1, -1] == 12.0


def test_merged_weights_are_saved_as_before(uncompiled, tmp_path):
    model = llama()
    values = {key: value.clone() for key, value in model.state_dict().items()}
    check_same(model)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for key, value in again.state_dict().items():
        assert torch.equal(value, values[key])


def test_layers_that_differ_are_not_merged():
    model = llama()
    attention = model.model.layers[0].self_attn
    attention.k_proj.bias = nn.Parameter(torch.zeros(len(attention.k_proj.weight)))
    fast = fast_blocks.FastBlocks(decoder_of(model))
    fast.refresh()
    merged = [
        sum(isinstance(part, fast_blocks._First) for part in block.modules())
        for block in fast.blocks
    ]
    assert merged == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (("self_attn.q_proj", "mlp.gate_proj"), "with merged weights differ"),
        (("mlp.gate_proj", "self_attn.q_proj"), "called first"),
    ],
    ids=["another input", "wrong order"],
)
def test_a_wrong_group_is_noticed(group, message, monkeypatch):
    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], merged=(group,)))
    with pytest.raises(ValueError, match=message):
        check_family(llama(intermediate_size=16, num_key_value_heads=4))


def test_compiling_needs_fixed_buffers():
    with pytest.raises(ValueError, match="`compile` needs `capture`"):
        CalmModel(llama(), 0.5, compile=True)
    with pytest.raises(ValueError, match="`compile` needs `capture`"):
        BigLittle(llama(), self_draft(llama(), 2), 1.0, compile=True)


def test_queries_fold_over_several_positions():
    torch.manual_seed(0)
    attention = blocks_of(llama())[0].self_attn
    folded = fast_blocks._folding(attention)
    query, key, value = (torch.randn(3, heads, q, 4) for heads, q in ((4, 2), (2, 7), (2, 7)))
    mask = torch.where(torch.rand(3, 1, 2, 7) < 0.3, -1e9, 0.0)
    for added in (mask, None):
        wanted, _ = folded.unfolded(attention, query, key, value, added, scaling=0.5)
        found, _ = fast_blocks._folded(folded, query, key, value, added, scaling=0.5)
        torch.testing.assert_close(found, wanted)
