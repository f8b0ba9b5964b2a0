"""Generation with early exits: equal to the full model, to the rule, and at every batch size."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from swiftsure.exits import exit_indices
from swiftsure.text import CalmModel, CalmRule, early_exits
from swiftsure.text.calm import steps
from tests.text.builders import MODELS, batch, llama, new_tokens, single, t5
from tests.text.calm.slow import (
    OPTIONS,
    RULES,
    TOKENS,
    at_once,
    classifier,
    fast_model,
    frozen_after_exit,
)


@pytest.mark.parametrize("name", [name for name in MODELS if "deeper" not in name])
def test_never_exiting_is_the_full_model(name):
    model = MODELS[name]()
    inputs = batch(5, model)
    full = model.generate(**inputs, **OPTIONS)
    output = CalmModel(model, None).generate(**inputs, **OPTIONS)
    assert torch.equal(output.sequences, full)
    assert set(np.unique(output.exit_layers)) <= {0, 4}
    assert torch.equal(model.generate(**inputs, **OPTIONS), full)  # the model is as it was


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["T5", "T5 v1.1", "mT5", "T5, deeper decoder", "Llama"])
def test_a_batch_is_its_sequences(name, rule, way):
    model = MODELS[name]()
    fast = fast_model(model, rule)
    inputs = batch(6, model)
    together = fast.generate(**inputs, **OPTIONS)
    tokens = new_tokens(model, together.sequences, inputs)
    for row in range(len(tokens)):
        alone = single(inputs, row)
        one = fast.generate(**alone, **OPTIONS)
        length = one.depths.lengths[0]
        assert together.depths.lengths[row] == length
        expected = new_tokens(model, one.sequences, alone)[0]
        assert torch.equal(tokens[row, :length], expected)
        assert np.array_equal(together.exit_layers[row, :length], one.exit_layers[0])
        np.testing.assert_allclose(
            together.depths.confidences[row, :length], one.depths.confidences[0], atol=1e-5
        )
        assert together.flops[row] == pytest.approx(one.flops[0])
    assert len(np.unique(together.exit_layers[together.exit_layers > 0])) > 1
    assert len(set(together.depths.lengths)) > 1


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_exits_are_the_rules(name, rule):
    """Given the confidences of the run, each token exits where `swiftsure.exits` says."""
    model = MODELS[name]()
    fast = fast_model(model, rule)
    rule = fast.rule
    output = fast.generate(**batch(6, model), max_new_tokens=TOKENS)
    first = 0 if model.config.is_encoder_decoder else 1  # a prompt runs in full
    for step in range(first, TOKENS):
        looks = np.nan_to_num(output.depths.confidences[:, step], nan=-1.0)
        level = rule.levels(np.float32(rule.threshold), step)
        wanted = exit_indices(looks, level, strict=rule.strict, min_exit=rule.min_exit)
        running = output.exit_layers[:, step] > 0
        assert np.array_equal(output.exit_layers[running, step], wanted[running] + 1)
    if first:
        assert (output.exit_layers[:, 0] == 4).all()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["T5", "T5 v1.1", "T5, sdpa off", "Llama", "Llama, tied"])
def test_later_tokens_attend_to_exit_states(name, rule, way):
    model = MODELS[name]()
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
    assert len(np.unique(depths)) > 1
    cache = output.past_key_values
    layers = getattr(cache, "self_attention_cache", cache).layers
    fed = output.sequences.shape[1] - 1
    assert {(layer.get_seq_length(), layer.keys.shape[2]) for layer in layers} == {(fed, fed)}


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_all_sequences_end_at_once(name):
    model = MODELS[name]()
    inputs = batch(3, model)
    every = list(range(model.config.vocab_size))
    output = CalmModel(model, 0.1).generate(**inputs, max_new_tokens=TOKENS, eos_token_id=every)
    assert output.depths.lengths.tolist() == [1, 1, 1]
    assert output.exit_layers.shape == (3, 1)


@pytest.mark.parametrize("score", ["softmax", "saturation", "meta"])
def test_a_token_at_the_threshold_exits_unless_the_rule_is_strict(score):
    model, rule = t5(), CalmRule(0.999, score=score)
    judge, inputs = classifier(rule), batch(1, t5())

    def first_token(rule):
        fast = CalmModel(model, rule, classifier=judge)
        output = fast.generate(**inputs, max_new_tokens=2, eos_token_id=None)
        return output.exit_layers[0, 0], output.depths.confidences[0, 0]

    looks = first_token(rule)[1]
    place = int(np.flatnonzero(np.isfinite(looks))[0])
    tied = replace(rule, threshold=float(looks[place]))
    assert first_token(tied)[0] == place + 1
    assert first_token(replace(tied, strict=True))[0] > place + 1


def test_the_lowest_threshold_always_exits_first():
    model = t5()
    output = CalmModel(model, -1.0).generate(**batch(3, model), max_new_tokens=4, eos_token_id=None)
    assert (output.exit_layers == 1).all()
    assert output.mean_layers.tolist() == [1, 1, 1]


def test_thresholds_of_each_sequence(way):
    model = t5()
    inputs = batch(4, model)
    levels = [None, 0.2, 0.5, 0.9]
    mixed = CalmModel(model, None).generate(**inputs, max_new_tokens=TOKENS, thresholds=levels)
    for row, level in enumerate(levels):
        one = CalmModel(model, level).generate(**inputs, max_new_tokens=TOKENS)
        assert torch.equal(mixed.sequences[row], one.sequences[row])
        assert np.array_equal(mixed.exit_layers[row], one.exit_layers[row])


def test_costs_count_what_runs():
    model = t5()
    inputs = batch(3, model)
    options = {"max_new_tokens": 6, "eos_token_id": None}
    full = CalmModel(model, None).generate(**inputs, **options)
    early = CalmModel(model, -1.0, score="saturation").generate(**inputs, **options)
    assert (early.exit_layers == 2).all()
    source = int(inputs["attention_mask"][0].sum())
    width, inner, wide, positions = 16, 16, 24, source + np.arange(1, 7)
    block = 2 * (6 * width * inner + 2 * width * wide)
    attention = 4 * inner * positions
    head = 2 * 48 * width
    assert full.flops[0] == pytest.approx(4 * (6 * block + attention.sum()) + 6 * head)
    kept, look = 2 * 2 * width * inner, 6 * width
    expected = 2 * (6 * block + attention.sum()) + 6 * (2 * kept + look + head)
    assert early.flops[0] == pytest.approx(expected)


def test_looks_only_where_it_is_told():
    model = t5()
    fast = CalmModel(model, CalmRule(-1.0, look_at=[2]))
    output = fast.generate(**batch(3, model), max_new_tokens=4, eos_token_id=None)
    assert (output.exit_layers == 3).all()
    seen = np.isfinite(output.depths.confidences)
    assert seen[..., 2].all()
    assert not seen[..., :2].any()


def test_skipped_blocks_do_not_run():
    model = t5()
    calls = []
    hook = model.decoder.block[2].layer[-1].register_forward_hook(lambda *_: calls.append(1))
    output = CalmModel(model, -1.0).generate(**batch(2, model), max_new_tokens=5)
    hook.remove()
    assert not calls
    assert output.mean_layers.max() == 1


def test_half_precision_runs():
    model = t5().to(torch.bfloat16)
    output = CalmModel(model, 0.3).generate(**batch(4, model), max_new_tokens=5)
    assert output.sequences.shape == (4, 6)


@torch.no_grad()
def test_a_cache_that_owes_can_be_handed_on():
    """Blocks that never ran owe all their keys, to whoever comes next."""
    model = t5()
    inputs = batch(3, model)
    with early_exits(model, -1.0):
        output = model.generate(
            **inputs, max_new_tokens=4, eos_token_id=None, return_dict_in_generate=True
        )
    rest = {
        "attention_mask": inputs["attention_mask"],
        "encoder_outputs": (model.get_encoder()(**inputs).last_hidden_state,),
    }
    last = output.sequences[:, -1:]
    cache = copy.deepcopy(output.past_key_values)
    plain = model(**rest, decoder_input_ids=last, past_key_values=cache).logits
    with early_exits(model, None):
        again = model(**rest, decoder_input_ids=last, past_key_values=output.past_key_values).logits
    torch.testing.assert_close(plain, again)
    depths = np.full((3, 5), 4)
    depths[:, :4] = 1
    with frozen_after_exit(model, depths):
        wanted = model(**inputs, decoder_input_ids=output.sequences, use_cache=False).logits
    torch.testing.assert_close(plain[:, 0], wanted[:, -1], atol=1e-3, rtol=1e-3)


def test_a_cache_of_ones_own_goes_on():
    """A conversation: the second call continues from the cache of the first."""
    model = llama()
    inputs = batch(1, model)
    cache = DynamicCache(config=model.config)
    plain = DynamicCache(config=model.config)
    with early_exits(model, None) as run:
        first = model.generate(**inputs, max_new_tokens=4, past_key_values=cache, eos_token_id=None)
        more = torch.ones(1, 4, dtype=torch.long)
        mask = torch.cat([inputs["attention_mask"], more], dim=1)
        second = model.generate(
            first, attention_mask=mask, max_new_tokens=3, past_key_values=cache, eos_token_id=None
        )
    assert run.depths.exit_layers.shape[0] == 1
    again = model.generate(**inputs, max_new_tokens=4, past_key_values=plain, eos_token_id=None)
    wanted = model.generate(
        again, attention_mask=mask, max_new_tokens=3, past_key_values=plain, eos_token_id=None
    )
    assert torch.equal(second, wanted)


def test_rows_are_split_once_for_all_blocks():
    split = steps.SplitRows([0, 3], 4, torch.device("cpu"))
    mask, shared = torch.arange(8).reshape(4, 2), torch.zeros(1, 2)
    assert split.of(mask).tolist() == [[0, 1], [6, 7]]
    assert split.of(mask) is split.of(mask)
    assert split.of(shared) is shared
    assert split.exited.tolist() == [1, 2]
    assert split.exited_mask.flatten().tolist() == [False, True, True, False]


def test_a_step_records_exits_and_remaining_thresholds():
    step = steps.Step(4, 6, torch.device("cpu"), [0.1, 0.2, 0.3, 0.4], may_exit=True)
    assert step.results() == (None, None, None)
    step.record_look(0, [0.0, 0.5, 0.0, 0.0], None)
    step.exit_rows(1, [1])
    step.record_look(1, [0.5, 0.0, 0.5], None)
    step.exit_rows(2, [0, 2])
    depths, looks, _ = step.results()
    assert depths.tolist() == [2, 1, 6, 2]
    assert (list(step.active_rows), step.levels) == ([2], [0.3])
    assert looks[:, 1].isnan().tolist() == [False, True, False, False]
