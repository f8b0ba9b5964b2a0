"""Big-little decoding: what is written, what is read for it, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MambaConfig, MambaForCausalLM

from swiftsure.text import (
    BigLittle,
    CalmModel,
    CalmRule,
    ExitHeads,
    Rollback,
    Speculative,
    self_draft,
)
from tests.text.bild.drafting import OTHERS, PAIRS, greedy, inputs, near, slow_bild
from tests.text.builders import EOS, batch, kind, llama, new_tokens, t5
from tests.text.tokenizing import tokenizer

N = 12
EAGER = {"fallback": 0.1, "max_draft": 4}
"""Drafts often, and more than it should."""


def written(pair, source, n=N, **options):
    return BigLittle(*pair).generate(source, max_new_tokens=n, **options).runs[0]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("level", [None, 0.0, 0.69])
def test_the_safe_end_is_the_large_model(name, level):
    large, small = PAIRS[name]()
    drafted = rejected = 0
    for row in range(3):
        source = inputs(large, row)
        run = written((large, small, Rollback(level, **EAGER)), source)
        assert list(run.tokens) == greedy(large, source, N, [EOS])
        drafted += run.drafted
        rejected += run.rollbacks
    if level is None:
        assert drafted == 0
    else:
        assert 0 < rejected < drafted  # else nothing was tried


@pytest.mark.parametrize("name", ["T5", "T5, gated", "mT5", "Llama"])
def test_the_safe_end_is_generate(name):
    large, small = PAIRS[name]()
    given = batch(3, large)
    expected = large.generate(**given, max_new_tokens=N, do_sample=False)
    output = BigLittle(large, small, Rollback(0.0, **EAGER)).generate(**given, max_new_tokens=N)
    assert torch.equal(output.sequences, expected)
    assert (output.large_passes <= 1).all()
    assert output.large_passes.min() < 1


@pytest.mark.parametrize("name", OTHERS)
def test_pairs_of_any_families(name):
    """The safe end is the large model's `generate`; above it, tokens are as from scratch."""
    large, small = OTHERS[name]()
    given = batch(3, large)
    expected = large.generate(**given, max_new_tokens=N, do_sample=False)
    keen = {"fallback": 0.0, "max_draft": 4}
    output = BigLittle(large, small, Rollback(0.0, **keen)).generate(**given, max_new_tokens=N)
    assert torch.equal(output.sequences, expected)
    assert sum(run.rollbacks for run in output.runs) > 0
    rule = Rollback(3.0, **keen)
    for row in range(2):
        source = inputs(large, row)
        run = written((large, small, rule), source)
        assert list(run.tokens) == slow_bild(large, small, source, rule, N, [EOS])


def test_caches_that_cannot_be_cropped():
    config = MambaConfig(vocab_size=48, hidden_size=16, state_size=4, num_hidden_layers=2)
    recurrent = MambaForCausalLM(config).eval()
    with pytest.raises(ValueError, match="`small` must have a cache that can be cropped"):
        BigLittle(llama(), recurrent)


@pytest.mark.parametrize("name", ["T5", "T5, other size", "Llama"])
@pytest.mark.parametrize("level", [1.0, 2.5, 5.0])
def test_any_threshold_is_as_from_scratch(name, level):
    large, small = PAIRS[name]()
    changed = False
    for row, n in [(0, N), (1, 7), (2, 2), (2, 1)]:
        source = inputs(large, row)
        rule = Rollback(level, **EAGER)
        run = written((large, small, rule), source, n)
        assert list(run.tokens) == slow_bild(large, small, source, rule, n, [EOS])
        changed |= list(run.tokens) != greedy(large, source, n, [EOS])
    assert changed or level < 5


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_as_sure_as_the_fallback_says_is_sure_enough(name):
    large, small = PAIRS[name]()
    source = inputs(large, 1)

    def first_draft(fallback):
        run = written((large, small, Rollback(1.0, fallback=fallback)), source)
        return next(call for call in run.calls if call.model == "small")

    surety = first_draft(0.0).confidence
    assert first_draft(surety).event == "accept"
    assert first_draft(float(np.nextafter(surety, 1.0))).event == "fallback"


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_no_token_is_read_twice(name):
    """Each call starts where its model's cache ends, cropped to what was kept."""
    large, small = PAIRS[name]()
    source = inputs(large, 1)
    run = written((large, small, Rollback(1.0, **EAGER)), source, 24, eos_token_id=None)
    assert run.rollbacks > 1
    tokens = [0] if name == "T5" else source[0].tolist()
    read = {"large": 0, "small": 0}
    n_final = len(tokens)
    for call in run.calls:
        assert call.start == read[call.model]
        assert list(call.fed) == tokens[call.start :]
        read[call.model] = len(tokens)
        if call.event == "fallback":
            continue
        if call.event == "rollback":
            bad = next(k for k, each in enumerate(call.distances) if each > 1.0)
            del tokens[n_final + bad :]
            read = {model: min(length, len(tokens)) for model, length in read.items()}
        tokens.append(call.token)
        if call.model == "large":
            n_final = len(tokens)
    assert tuple(tokens[-24:]) == run.tokens


@pytest.mark.parametrize("name", ["T5", "Llama"])
@pytest.mark.parametrize(
    "rule",
    [
        Rollback(3.0, **EAGER),
        Rollback(0.4, **EAGER, published=True),
        Speculative(0.3),
        Speculative(0.1, temperature=1.5, top_k=20, top_p=0.9),
    ],
)
def test_a_run_knows_which_levels_are_the_same(name, rule):
    large, small = PAIRS[name]()
    pair = BigLittle(large, small, rule)
    highest = 1 if rule.samples else 20
    tried = 0
    for row in range(2):
        passage = pair.passage(inputs(large, row), max_new_tokens=16, eos_token_id=None)
        run = passage.run(rule)
        low, high = run.same_from, run.same_below
        assert 0 <= low <= rule.level < high
        for level in (low, np.nextafter(min(high, highest), 0)):
            assert passage.run(rule.at(float(level))).calls == run.calls
        if rule.samples or not rule.published:  # as published, the bounds are cautious
            for level in (np.nextafter(low, -1), high):
                if 0 <= level <= highest:
                    assert passage.run(rule.at(float(level))).calls != run.calls
                    tried += 1
    assert tried or (not rule.samples and rule.published)


def drafted_ends(run):
    """Places of drafted tokens among those that are kept."""
    places, place = [], 0
    for call in run.calls:
        if call.model == "large":
            place = place + len(call.distances) + 1
            places += range(place - len(call.distances) - 1, place - 1)
    return places


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_the_end_of_a_sequence_inside_a_draft(name):
    large, small = PAIRS[name]()
    source = inputs(large, 2)
    trusting = Rollback(1e4, **EAGER)
    whole = written((large, small, trusting), source, 16, eos_token_id=None)
    place = next(k for k in drafted_ends(whole) if whole.tokens.index(whole.tokens[k]) == k)
    end = whole.tokens[place]
    ended = written((large, small, trusting), source, 16, eos_token_id=end)
    assert ended.tokens == whole.tokens[: place + 1]
    assert ended.calls[-1].model == "large"  # it was verified
    unverified = replace(trusting, published=True)
    assert written((large, small, unverified), source, 16, eos_token_id=end).calls[-1].model == (
        "small"
    )
    # An end that the large model does not want is taken back.
    strict = written((large, small, Rollback(0.0, **EAGER)), source, 16, eos_token_id=end)
    assert list(strict.tokens) == greedy(large, source, 16, [end])


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_a_limit_inside_a_draft(name):
    large, small = PAIRS[name]()
    source = inputs(large, 3)
    for n in range(1, 8):
        run = written((large, small, Rollback(1e4, fallback=0)), source, n, eos_token_id=None)
        assert len(run.tokens) == n
        # The large model's token, the draft, and the large model's again.
        assert (run.large_passes, run.small_passes) == (min(n, 2), max(n - 2, 0))


def test_the_published_exception_leaves_drafts_unchecked():
    """A large model's own choice beyond the threshold lets everything after it stand."""
    large, small = PAIRS["T5"]()
    found = 0
    for row in range(4):
        source = inputs(large, row)
        odd = Rollback(0.0, **EAGER, published=True)
        run = written((large, small, odd), source)
        found += any(call.event == "same token" for call in run.calls)
        if list(run.tokens) != greedy(large, source, N, [EOS]):
            break
    else:
        pytest.fail("level 0 was safe, which it is not as published")
    assert found


def test_a_token_of_which_the_large_model_knows_nothing_does_not_stand():
    large, small = PAIRS["T5"]()
    source = inputs(large)
    head = torch.nn.Linear(16, 48, bias=False).eval()
    torch.nn.init.constant_(head.weight, torch.nan)
    large.set_output_embeddings(head)
    run = written((large, small, Rollback(9.0, fallback=0.0)), source)
    assert run.drafted > 0
    assert list(run.tokens) == greedy(large, source, N, [EOS])


def test_batches_are_sequences_one_by_one():
    for name in ("T5", "Llama"):
        large, small = PAIRS[name]()
        given = batch(3, large)
        for rule in (Rollback(2.0, **EAGER), Speculative(0.1)):
            pair = BigLittle(large, small, rule)
            whole = pair.generate(**given, max_new_tokens=N, seed=3)
            said = new_tokens(large, whole.sequences, given)
            for row in range(3):
                alone = pair.generate(
                    inputs(large, row), max_new_tokens=N, seed=3, sequence_ids=[row]
                )
                assert alone.runs[0] == whole.runs[row]
                tokens = list(whole.runs[row].tokens)
                assert said[row].tolist() == tokens + [0] * (said.shape[1] - len(tokens))


@pytest.mark.parametrize("name", ["T5", "Llama", "GPT-2", "BART", "OPT, in no table"])
def test_flops_are_those_that_torch_counts(name):
    large, small = (PAIRS | OTHERS)[name]()
    large.set_attn_implementation("eager")
    # From one token on, so that no pass has scores that a causal mask hides.
    source = inputs(large) if large.config.is_encoder_decoder else inputs(large)[:, :1]
    pair = BigLittle(large, small, Rollback(None))
    with FlopCounterMode(display=False) as counter:
        run = pair.generate(source, max_new_tokens=6, eos_token_id=None).runs[0]
    # Rotary positions are a product of matrices too, which nobody would count.
    assert run.flops == run.alone_flops == pytest.approx(counter.get_total_flops(), rel=2e-3)
    helped = written((large, small, Rollback(0.0, **EAGER)), source, 6, eos_token_id=None)
    assert helped.alone_flops == run.flops
    assert helped.flops > run.flops  # two models of one size


def test_drafts_of_a_model_by_itself():
    model = llama(layers=4)
    draft = self_draft(model, 2)
    source = inputs(model)
    kept = len(list(model.parameters()))
    assert {id(each) for each in draft.parameters()} < {id(each) for each in model.parameters()}
    # The same as a model of two blocks with these weights.
    twin = llama(layers=2)
    twin.load_state_dict(draft.state_dict())
    assert greedy(draft, source, 6) == greedy(twin, source, 6)
    assert greedy(model, source, 6) != greedy(draft, source, 6)
    assert draft.generate(source, max_new_tokens=6).tolist() == (
        twin.generate(source, max_new_tokens=6).tolist()
    )
    run = written((model, draft, Rollback(0.0, **EAGER)), source)
    assert list(run.tokens) == greedy(model, source, N, [EOS])
    assert run.drafted > 0
    assert (len(model.model.layers), model.config.num_hidden_layers) == (4, 4)
    assert len(list(model.parameters())) == kept
    draft.register_forward_hook(lambda *_: pytest.fail("the draft's hooks are its own"))
    model(source)


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_drafts_of_a_model_with_an_encoder(name):
    """The draft has the model's encoder and the first of its decoder blocks."""
    model = t5() if name == "T5" else kind(name)
    draft, source = self_draft(model, 1), inputs(model)
    assert {id(each) for each in draft.parameters()} < {id(each) for each in model.parameters()}
    assert draft.get_encoder() is model.get_encoder()
    run = written((model, draft, Rollback(0.0, **EAGER)), source)
    assert list(run.tokens) == greedy(model, source, N, [EOS])
    assert run.drafted > 0
    own = written((draft, self_draft(model, 1), Rollback(0.0, **EAGER)), source)
    assert list(own.tokens) == greedy(draft, source, N, [EOS])
    assert own.rollbacks == 0  # reading several tokens at once is reading them one by one


@pytest.mark.parametrize("name", ["GPT2", "Qwen2, sliding", "Gemma2", "GPTNeoX", "Phi3"])
def test_drafts_of_other_families(name):
    model = kind(name)
    draft = self_draft(model, 2, own_head=True)
    source = inputs(model)
    # An exit after the second block is the draft; the first token reads the prompt in full.
    exiting = CalmModel(model, CalmRule(-1.0, score="saturation"))
    out = exiting.generate(source, max_new_tokens=2, eos_token_id=None).sequences
    assert draft(out[:, :-1]).logits[0, -1].argmax() == out[0, -1]
    run = written((model, draft, Rollback(0.0, **EAGER)), source)
    assert list(run.tokens) == greedy(model, source, N, [EOS])


def test_a_head_of_its_own():
    model = llama(layers=3, tie_word_embeddings=True)
    draft = self_draft(model, 1, own_head=True)
    before = model.lm_head.weight.clone()
    with torch.no_grad():
        draft.lm_head.weight.zero_()
        draft.model.norm.weight.zero_()
    assert torch.equal(model.lm_head.weight, before)
    assert torch.equal(model.model.embed_tokens.weight, before)
    assert draft.model.embed_tokens is model.model.embed_tokens
    assert model.model.norm.weight.abs().min() > 0


def test_a_draft_with_a_fitted_head_equals_exiting_through_it():
    model = llama(layers=4)
    heads = ExitHeads(model.config.hidden_size, exits=[1]).eval()
    torch.nn.init.orthogonal_(heads.maps["1"].weight)
    draft = self_draft(model, 2, heads=heads)
    source = inputs(model)
    exiting = CalmModel(model, CalmRule(-1.0, score="saturation"), heads=heads)
    out = exiting.generate(source, max_new_tokens=6, eos_token_id=None)
    assert (out.exit_layers[:, 1:] == 2).all()  # the first token reads the whole prompt
    first = out.sequences[:, : source.shape[1] + 1]
    assert draft(first).logits[0, -1].argmax() == out.sequences[0, source.shape[1] + 1]
    assert greedy(self_draft(model, 2), source, 6) != greedy(draft, source, 6)
    # The model's own norm and head are used, and the model is as it was.
    assert draft.model.norm.norm is model.model.norm
    assert draft.lm_head is model.lm_head
    run = written((model, draft, Rollback(0.0, **EAGER)), source)
    assert list(run.tokens) == greedy(model, source, N, [EOS])


def test_the_map_before_the_norm_is_counted():
    model = llama(layers=4)
    model.set_attn_implementation("eager")
    heads = ExitHeads(model.config.hidden_size, exits=[1]).eval()
    draft = self_draft(model, 2, heads=heads)
    source = inputs(model)[:, :1]
    plain = BigLittle(self_draft(model, 2), draft, Rollback(None))
    mapped = BigLittle(draft, self_draft(model, 2), Rollback(None))
    found = []
    for pair in (plain, mapped):
        with FlopCounterMode(display=False) as counter:
            run = pair.generate(source, max_new_tokens=6, eos_token_id=None).runs[0]
        assert run.flops == pytest.approx(counter.get_total_flops(), rel=2e-3)
        found.append(run.flops)
    assert found[1] - found[0] == 6 * heads.flops


def test_what_has_no_first_blocks():
    with pytest.raises(ValueError, match="less than the model's 4 blocks, but got 4"):
        self_draft(llama(), 4)
    with pytest.raises(ValueError, match="at least 1"):
        self_draft(llama(), 0)
    heads = ExitHeads(llama().config.hidden_size, exits=[0, 2])
    with pytest.raises(ValueError, match=r"first 2 blocks, but has those for 1, 3: .*exits=\[1\]"):
        self_draft(llama(), 2, heads=heads)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rollback(-1.0), "`threshold` must be at least 0"),
        (lambda: Rollback(float("nan")), "`threshold` must be at least 0"),
        (lambda: Rollback(float("inf")), "`threshold` must be at least 0"),
        (lambda: Rollback(1.0, fallback=1.5), r"`fallback` must be in \[0, 1\]"),
        (lambda: Rollback(1.0, max_draft=0), "`max_draft` must be at least 1"),
        (lambda: Speculative(1.1), r"`tolerance` must be in \[0, 1\]"),
        (lambda: Speculative(temperature=0.0), r"take Rollback\(0\)"),
        (lambda: Speculative(top_p=0.0), r"`top_p` must be in \(0, 1\]"),
    ],
)
def test_rules_that_are_none(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_rule_of_another_type():
    with pytest.raises(TypeError, match="`threshold` must be a number"):
        Rollback("2")


def _training():
    model = t5()
    model.decoder.train()
    return model


def _static():
    model = llama()
    model.generation_config.cache_implementation = "static"
    return model


def _beams():
    model = t5()
    model.generation_config.num_beams = 4
    return model


@pytest.mark.parametrize(
    ("large", "small", "message"),
    [
        (t5, llama, "both encoder-decoder models or both causal"),
        (t5, lambda: t5(vocab_size=50), "48 tokens and 50 tokens"),
        (t5, lambda: t5(decoder_start_token_id=3), "one start token, but got 0 and 3"),
        (_training, t5, "evaluation mode"),
        (_static, llama, "cache_implementation='static'"),
        (_beams, t5, "num_beams=4"),
    ],
)
def test_models_that_do_not_fit(large, small, message):
    with pytest.raises(ValueError, match=message):
        BigLittle(large(), small(), 1.0)


def test_tokenizers_that_differ():
    large, small = PAIRS["T5"]()
    other = tokenizer()
    other.add_tokens(["w99"])
    BigLittle(large, small, 1.0, tokenizers=(tokenizer(), tokenizer()))
    with pytest.raises(ValueError, match="token 48 is missing in one and 'w99' in the other"):
        BigLittle(large, small, 1.0, tokenizers=(tokenizer(), other))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), {}, "not be empty"),
        (torch.ones(3, dtype=torch.long), {}, r"shape \(n, positions\)"),
        (torch.ones(1, 3, dtype=torch.long), {"max_new_tokens": None}, "is required"),
        (torch.ones(1, 3, dtype=torch.long), {"max_new_tokens": 0}, "at least 1"),
        (torch.ones(1, 60, dtype=torch.long), {}, "more than the large model's 64 positions"),
        (torch.ones(1, 30, dtype=torch.long), {}, "more than the small model's 32 positions"),
        (torch.ones(1, 3, dtype=torch.long), {"sequence_ids": [1, 2]}, "one id per sequence, 1"),
        (
            torch.ones(2, 3, dtype=torch.long),
            {"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
            "number 1 is empty",
        ),
        (
            torch.ones(2, 3, dtype=torch.long),
            {"attention_mask": torch.ones(2, 2)},
            r"shape of `input_ids`, \(2, 3\), but got \(2, 2\)",
        ),
    ],
)
def test_inputs_that_are_none(given, options, message):
    large = llama(layers=2)
    pair = BigLittle(large, llama(layers=1, max_position_embeddings=32), 1.0)
    with pytest.raises(ValueError, match=message):
        pair.generate(given, **{"max_new_tokens": 5} | options)


def test_near_models_are_near():
    """The pairs above agree now and then, or these tests would say little."""
    large = t5(layers=2)
    small = near(large)
    run = written((large, small, Rollback(0.0, **EAGER)), inputs(large), 16, eos_token_id=None)
    assert run.large_passes < 16
