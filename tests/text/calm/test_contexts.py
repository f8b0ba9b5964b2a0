"""Contexts: the model is as it was afterwards, whatever happened, and is never shared."""

import threading

import pytest
import torch

import swiftsure as ss
from swiftsure.text import CalmModel, CalmRule, MetaClassifier, early_exits
from tests.text.builders import batch, llama, t5


def forwards(model):
    return [name for name, part in model.named_modules() if "forward" in vars(part)]


def test_the_model_is_restored():
    model = t5()
    with early_exits(model, 0.5):
        assert forwards(model)
    assert not forwards(model)


def test_the_model_is_restored_after_an_error():
    model = t5()
    inputs = batch(3, model)
    before = model.generate(**inputs, max_new_tokens=5)

    def broken(*_):
        raise KeyError("broken")

    hook = model.decoder.block[1].layer[-1].register_forward_hook(broken)
    with pytest.raises(KeyError, match="broken"), early_exits(model, 0.5):
        model.generate(**inputs, max_new_tokens=5)
    hook.remove()
    assert not forwards(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5), before)
    assert torch.equal(
        CalmModel(model, None).generate(**inputs, max_new_tokens=5).sequences, before
    )


def test_a_context_goes_on_after_an_error():
    model = t5()
    inputs = batch(3, model)
    fast = CalmModel(model, 0.3).generate(**inputs, max_new_tokens=5)
    with early_exits(model, 0.3) as run:
        with pytest.raises(ValueError, match="DynamicCache"):
            model.generate(**inputs, max_new_tokens=5, cache_implementation="static")
        again = model.generate(**inputs, max_new_tokens=5)
    assert torch.equal(again, fast.sequences)
    assert (run.depths.exit_layers == fast.exit_layers).all()


def test_a_forward_method_set_by_others_comes_back():
    model = t5()
    block = model.decoder.block[1]
    mine = block.forward
    block.forward = mine
    with early_exits(model, 0.5):
        assert vars(block)["forward"] is not mine
    assert vars(block)["forward"] is mine


def test_nesting_is_refused():
    model = t5()
    with (
        early_exits(model, 0.5),
        pytest.raises(RuntimeError, match="already"),
        early_exits(model, 0.6),
    ):
        pass
    assert not forwards(model)
    with early_exits(model, 0.5):
        pass


def test_two_models_run_side_by_side():
    models = [t5(0), t5(1)]
    alone = [CalmModel(m, 0.3).generate(**batch(2, m), max_new_tokens=5) for m in models]
    with early_exits(models[0], 0.3), early_exits(models[1], 0.3):
        for model, wanted in zip(models, alone, strict=True):
            found = model.generate(**batch(2, model), max_new_tokens=5)
            assert torch.equal(found, wanted.sequences)


def test_another_thread_is_refused():
    model = t5()
    caught = []

    def other():
        try:
            model.generate(**batch(2, model), max_new_tokens=3)
        except RuntimeError as error:
            caught.append(str(error))

    with early_exits(model, 0.5):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert caught
    assert "another thread" in caught[0]


def test_depths_before_anything_ran():
    with early_exits(t5(), 0.5) as run, pytest.raises(RuntimeError, match="generate"):
        _ = run.depths


def test_a_plain_forward_pass_is_untouched():
    model = t5()
    inputs = batch(2, model)
    labels = torch.randint(3, 40, (2, 5))
    with torch.no_grad():
        before = model(**inputs, labels=labels).logits
        with early_exits(model, -1.0):
            assert torch.equal(model(**inputs, labels=labels).logits, before)


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (1.5, {}, "`threshold` must be at most 1, or None for never, but got 1.5"),
        (float("nan"), {}, "NaN"),
        (0.5, {"score": "softmx"}, "Did you mean 'softmax'"),
        (0.5, {"score": "meta"}, "classifier"),
        (0.5, {"classifier": MetaClassifier(16)}, "belongs to score 'meta'"),
        (CalmRule(0.5, "meta"), {"classifier": MetaClassifier(8)}, "width 8"),
        (CalmRule(0.5), {"score": "saturation"}, "`policy` is a rule with score 'softmax'"),
        (
            CalmRule(0.5, look_at=[1, 3]),
            {},
            "`look_at` must name exits before the last .* 4.*got 3",
        ),
        (CalmRule(0.5, min_exit=4), {}, "`min_exit` must be less than the model's 4 exits"),
    ],
)
def test_rules_that_do_not_fit(rule, options, message):
    with pytest.raises(ValueError, match=message):
        CalmModel(t5(), rule, **options)


def test_rules_that_are_none():
    with pytest.raises(ValueError, match="shortlist"):
        CalmRule(0.5, "saturation", shortlist=8)
    with pytest.raises(ValueError, match="shortlist"):
        CalmRule(0.5, shortlist=1)
    with pytest.raises(ValueError, match="at least one exit"):
        CalmRule(0.5, look_at=[])
    with pytest.raises(ValueError, match="look_at"):
        CalmRule(0.5, look_at=[-1])


def test_models_that_do_not_fit():
    with pytest.raises(ValueError, match=r"call model\.eval"):
        CalmModel(t5().train(), 0.5)
    with pytest.raises(TypeError, match="Hugging Face"):
        CalmModel(torch.nn.Linear(2, 2), 0.5)
    with pytest.raises(TypeError, match="AutoModelForSeq2SeqLM"):
        CalmModel(llama().model, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"use_cache": False}, "use_cache"),
        ({"prompt_lookup_num_tokens": 3}, "several tokens at once"),
        ({"cache_implementation": "static"}, "DynamicCache"),
        ({"thresholds": [0.5]}, "one per sequence, 2"),
        ({"thresholds": [0.5, 2.0]}, "at most 1"),
    ],
)
def test_generation_that_exits_cannot_follow(options, message):
    model = t5()
    with pytest.raises(ValueError, match=message):
        CalmModel(model, 0.5).generate(**batch(2, model), max_new_tokens=3, **options)


def test_beams_of_the_generation_config_are_refused():
    model = t5()
    model.generation_config.num_beams = 4
    with pytest.raises(ValueError, match="is 4 here or in the model's generation_config"):
        CalmModel(model, 0.5).generate(**batch(2, model), max_new_tokens=3)
    CalmModel(model, 0.5).generate(**batch(2, model), max_new_tokens=3, num_beams=1)


def test_inputs_that_do_not_fit():
    model = llama()
    fast = CalmModel(model, 0.5)
    with pytest.raises(ValueError, match="empty"):
        fast.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=3)
    with pytest.raises(ValueError, match="more than the model's 64 positions"):
        fast.generate(torch.full((1, 60), 5), max_new_tokens=10)


# ------------------------------------------------------------------------------------- policies


def policy(model, **settings):
    known = {"score": "softmax", "n_exits": 4} | settings
    record = ss.ThresholdRecord(
        [None, 0.5],
        inconsistencies={"rouge_l": [[0.0, 0.0]] * 60},
        fingerprint=None if model is None else ss_fingerprint(model),
        settings={name: value for name, value in known.items() if value is not None},
    )
    return ss.calibrate(record, risk="consistency", loss="rouge_l", epsilon=0.1)


def ss_fingerprint(model):
    from swiftsure.text import calm_fingerprint

    return calm_fingerprint(model)


def test_a_policy_sets_the_rule():
    model = t5()
    made = policy(
        model, min_exit=1, strict=True, decay_length=9, decay_temperature=2.0, decay_form="calm"
    )
    rule = CalmModel(model, made).rule
    assert (rule.threshold, rule.score, rule.min_exit, rule.strict) == (0.5, "softmax", 1, True)
    assert (rule.decay.length, rule.decay.temperature) == (9, 2.0)


def test_a_policy_of_no_certified_threshold_runs_in_full():
    made = policy(None).model_copy(update={"threshold": None})
    assert CalmModel(t5(), made).rule.threshold is None


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"n_exits": 6}, {}, "made for 6 exits, but the model has 4"),
        ({"score": "saturation"}, {"score": "softmax"}, "made for score='saturation'"),
        ({"score": None}, {}, "not made for calm"),
    ],
)
def test_policies_made_for_others(settings, options, message):
    with pytest.raises(ValueError, match=message):
        CalmModel(t5(), policy(None, **settings), **options)


def test_a_policy_for_another_model():
    made = policy(t5(0))
    CalmModel(t5(0), made)
    for refuse in (CalmModel, lambda *given: early_exits(*given).__enter__()):
        with pytest.raises(ValueError, match="another model"):
            refuse(t5(1), made)


def test_a_policy_insists_on_its_generation():
    model = t5()
    made = policy(model, generation={"max_new_tokens": 3, "eos_token_id": None})
    fast = CalmModel(model, made)
    assert fast.generate(**batch(2, model)).exit_layers.shape[1] <= 3
    with pytest.raises(ValueError, match="made for max_new_tokens=3, but got 9"):
        fast.generate(**batch(2, model), max_new_tokens=9)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"temperature": 5.0},
        {"repetition_penalty": 3.0},
        {"eos_token_id": None},
        {"min_new_tokens": 3},
        {"logits_processor": [lambda ids, scores: scores]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_policy_refuses_what_would_change_its_answers(options):
    model = t5()
    fast = CalmModel(model, policy(model, generation={"max_new_tokens": 3}))
    with pytest.raises(ValueError, match=f"`policy` was made for {next(iter(options))}="):
        fast.generate(**batch(2, model), **options)
    usual = {"do_sample": False, "eos_token_id": [model.generation_config.eos_token_id]}
    found = fast.generate(**batch(2, model), **usual, return_dict_in_generate=True)
    assert torch.equal(found.sequences, fast.generate(**batch(2, model)).sequences)


def test_nan_confidences_never_exit():
    model = t5()
    with torch.no_grad():
        model.decoder.block[1].layer[-1].DenseReluDense.wo.weight.fill_(torch.nan)
    fast = CalmModel(model, CalmRule(0.0, score="saturation"))
    found = fast.generate(**batch(2, model), max_new_tokens=2, eos_token_id=None)
    assert (found.exit_layers == model.config.num_decoder_layers).all()
