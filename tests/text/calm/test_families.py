"""Every family of the table: as its own `generate`, as the slow way, and refused if it is wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from swiftsure.text import (
    FAMILIES,
    CalmModel,
    Family,
    Logits,
    Texts,
    check_family,
    early_exits,
    fit_exit_heads,
)
from tests.text.builders import (
    EOS,
    KINDS,
    MODELS,
    batch,
    blocks_of,
    kind,
    llama,
    new_tokens,
    opt,
    single,
    t5,
)
from tests.text.calm.slow import OPTIONS, RULES, TOKENS, at_once, fast_model
from tests.text.tokenizing import texts, tokenizer

SOME_RULES = {name: RULES[name] for name in ("softmax, shortlist", "saturation", "meta")}


def test_every_family_is_tested():
    tested = {kind(name).config.model_type for name in KINDS}
    assert tested | {"t5", "mt5", "llama"} == set(FAMILIES) - {"opt"}  # of the documentation


@pytest.mark.parametrize("name", [*KINDS, *MODELS])
def test_the_table_fits(name):
    check_family(kind(name) if name in KINDS else MODELS[name]())


@pytest.mark.parametrize("name", KINDS)
def test_never_exiting_is_generate(name):
    model = kind(name)
    details = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": TOKENS}
    for n in (5, 1):
        inputs = batch(n, model)
        full = model.generate(**inputs, **OPTIONS)
        output = CalmModel(model, None).generate(**inputs, **OPTIONS)
        assert torch.equal(output.sequences, full)
        assert set(np.unique(output.exit_layers)) <= {0, 4}
        # Models of random weights like to repeat themselves.
        varied = {"no_repeat_ngram_size": 1, "eos_token_id": None} | details
        full = model.generate(**inputs, **varied)
        with early_exits(model, None, eos_token_id=None):
            found = model.generate(**inputs, **varied)
        assert torch.equal(found.sequences, full.sequences)
        torch.testing.assert_close(found.logits, full.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", SOME_RULES.values(), ids=SOME_RULES)
@pytest.mark.parametrize("name", KINDS)
def test_early_exits_are_as_the_slow_way(name, rule, way):
    """Tokens and logits are those of one pass without a cache, given where each token exited."""
    model = kind(name)
    inputs = batch(5, model)
    fast = fast_model(model, rule)
    with early_exits(model, fast.rule, classifier=fast.classifier, eos_token_id=None) as run:
        output = model.generate(
            **inputs,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
    depths = run.depths.exit_layers
    wanted = at_once(model, inputs, output.sequences, depths)
    found = torch.stack(output.logits, dim=1)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    wanted[..., EOS] = -torch.inf  # by `min_new_tokens`
    assert torch.equal(wanted.argmax(dim=2), new_tokens(model, output.sequences, inputs))
    passed = np.nan_to_num(run.depths.confidences, nan=-2.0) >= np.float32(fast.rule.threshold)
    assert np.array_equal(np.where(passed.any(axis=2), passed.argmax(axis=2) + 1, 4), depths)
    assert len(np.unique(depths)) > 1


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_is_its_sequences(name, way):
    model = kind(name)
    fast = fast_model(model, RULES["softmax"])
    inputs = batch(4, model)
    together = fast.generate(**inputs, **OPTIONS)
    tokens = new_tokens(model, together.sequences, inputs)
    for row in range(len(tokens)):
        alone = single(inputs, row)
        one = fast.generate(**alone, **OPTIONS)
        length = one.depths.lengths[0]
        assert torch.equal(tokens[row, :length], new_tokens(model, one.sequences, alone)[0])
        assert np.array_equal(together.exit_layers[row, :length], one.exit_layers[0])
        assert together.flops[row] == pytest.approx(one.flops[0])


@pytest.mark.parametrize("name", KINDS)
def test_confidences_are_those_of_the_models_own_logits(name):
    """The softmax score of the last exit is that of the logits which `generate` would see."""
    model = kind(name)
    blocks_of(model)[3].forward = lambda *args, **_: args[0]  # so that exit 2 gives the answer
    fast = CalmModel(model, 0.9999)
    with early_exits(model, fast.rule, eos_token_id=None) as run:
        output = model.generate(
            **batch(3, model), max_new_tokens=4, return_dict_in_generate=True, output_logits=True
        )
    two = torch.stack(output.logits, dim=1).softmax(dim=2).topk(2).values
    gaps, seen = (two[..., 0] - two[..., 1]).numpy(), run.depths.confidences[..., 2]
    known = np.isfinite(seen)
    assert known.any()
    np.testing.assert_allclose(seen[known], gaps[known], atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_skipped_blocks_do_not_run(name):
    model = kind(name)
    ran = []
    *_, inner = (part for part in blocks_of(model)[2].children() if list(part.parameters()))
    hook = inner.register_forward_hook(lambda *_: ran.append(1))
    fast = CalmModel(model, -1.0)
    output = fast.generate(**batch(3, model), max_new_tokens=6, eos_token_id=None)
    hook.remove()
    first = 0 if model.config.is_encoder_decoder else 1
    assert len(ran) == first  # a prompt runs in full
    assert (output.exit_layers[:, first:] == 1).all()
    full = CalmModel(model, None).generate(**batch(3, model), max_new_tokens=6, eos_token_id=None)
    assert (output.flops < full.flops).all()


@pytest.mark.parametrize("name", KINDS)
def test_exit_heads_are_fitted(name):
    model = kind(name)
    heads = fit_exit_heads(model, Texts(texts(12), tokenizer()), max_new_tokens=6)
    output = CalmModel(model, 0.3, heads=heads).generate(**batch(3, model), max_new_tokens=6)
    assert output.sequences.shape[0] == 3


def test_a_window_that_has_dropped_positions_is_refused():
    model = kind("Mistral")
    inputs = batch(1, model)
    cache = DynamicCache(config=model.config)
    first = model.generate(**inputs, max_new_tokens=8, past_key_values=cache, eos_token_id=None)
    with pytest.raises(ValueError, match="dropped positions"), early_exits(model, None):
        model.generate(first, max_new_tokens=3, past_key_values=cache)


# ----------------------------------------------------------------------------- families to declare


OPT = Family(
    stack="model.decoder",
    norm="final_layer_norm",
    block_norm="self_attn_layer_norm",
    positions="learned",
)


def test_an_unknown_family_says_how_to_declare_it(monkeypatch):
    monkeypatch.delitem(FAMILIES, "opt", raising=False)  # an example of the documentation adds it
    model = opt()
    with pytest.raises(ValueError, match="'opt'") as error:
        CalmModel(model, 0.5)
    code = str(error.value).split("\n\n", 1)[1]
    lines = [line.strip() for line in code.splitlines() if line.strip()]
    assert "FAMILIES.register(family, 'opt')" in lines
    monkeypatch.setattr(FAMILIES, "register", lambda family, *_: families.append(family))
    families = []
    exec("\n".join(line[4:] for line in code.splitlines()).replace("check_family(model)", ""))  # noqa: S102
    assert families == [Family()]  # what it shows are the defaults


def test_a_declared_family_runs(monkeypatch):
    monkeypatch.setitem(FAMILIES, "opt", OPT)
    model = opt()
    check_family(model)
    inputs = batch(4, model)
    full = model.generate(**inputs, **OPTIONS)
    assert torch.equal(CalmModel(model, None).generate(**inputs, **OPTIONS).sequences, full)
    fast = fast_model(model, RULES["softmax"])
    assert fast.generate(**inputs, **OPTIONS).mean_layers.min() < 4


@pytest.mark.parametrize(
    ("build", "wrong", "message"),
    [
        (lambda: kind("Qwen3"), {"key_norm": None}, "the keys of block 0"),
        (lambda: kind("GPTNeoX"), {"fused": "in turn"}, "the keys of block 0"),
        (lambda: kind("Gemma2"), {"logits": Logits()}, "the logits"),
        (lambda: kind("Bart"), {"logits": Logits()}, "the logits"),
        (lambda: kind("Granite"), {"logits": Logits()}, "the logits"),
        (lambda: kind("MBart"), {"block_norm": None}, "the keys of block 0"),
        (llama, {"positions": "learned"}, "the keys of block 0"),
        (t5, {"logits": Logits()}, "the logits"),
    ],
)
def test_a_wrong_family_is_noticed(build, wrong, message, monkeypatch):
    model = build()
    name = model.config.model_type
    monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], **wrong))
    with pytest.raises(ValueError, match=message):
        check_family(model)


def test_a_module_that_moved_is_named(monkeypatch):
    monkeypatch.setitem(FAMILIES, "llama", Family(norm="last_norm"))
    with pytest.raises(
        ValueError, match=r"'llama'.*norm='last_norm', but LlamaModel.*layers, norm"
    ):
        CalmModel(llama(), 0.5)
