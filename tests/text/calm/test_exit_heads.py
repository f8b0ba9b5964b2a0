"""Exit heads: fitted by least squares, and what tokens that leave go through."""

import numpy as np
import pytest
import torch

from swiftsure.text import (
    CalmModel,
    ExitHeads,
    Texts,
    calm_fingerprint,
    fit_exit_heads,
    sweep,
    train_meta,
)
from swiftsure.text.decoder import decoder_of
from swiftsure.text.exit_heads import scaled, solve_exit_heads
from tests.text.builders import MODELS, batch, llama, t5
from tests.text.tokenizing import texts, tokenizer


def test_least_squares_finds_a_linear_map():
    torch.manual_seed(0)
    states = torch.randn(400, 6)
    weight, bias = torch.randn(6, 6), torch.randn(6)
    # Of mean square 1, so that scaling leaves it alone.
    late = scaled(states) @ weight.T + bias
    heads = solve_exit_heads([[states, late]], [0], ridge=0.0)
    goal, found = scaled(late), heads(0, states)
    fitted = torch.linalg.lstsq(
        torch.cat([scaled(states), torch.ones(400, 1)], dim=1).double(), goal.double()
    ).solution
    best = torch.cat([scaled(states), torch.ones(400, 1)], dim=1).double() @ fitted
    torch.testing.assert_close(found.double(), best, atol=1e-4, rtol=1e-4)
    # In parts it is the same.
    parts = [[states[:100], late[:100]], [states[100:], late[100:]]]
    torch.testing.assert_close(solve_exit_heads(parts, [0], ridge=0.0)(0, states), found)


@pytest.mark.parametrize("name", ["T5", "T5 v1.1", "Llama"])
@pytest.mark.parametrize("score", ["softmax", "saturation"])
def test_tokens_that_leave_go_through_their_head(name, score):
    """The logits of a first token that exits at a known block, computed by hand."""
    model = MODELS[name]()
    decoder = decoder_of(model)
    torch.manual_seed(1)
    heads = ExitHeads(16, [1, 2]).eval()
    inputs = batch(3, model)
    fast = CalmModel(model, -1.0, score=score, heads=heads)
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 2}
    seen, states = [], {}
    block = decoder.blocks[1]

    def note(_module, _inputs, output):
        states[len(states)] = output[0] if isinstance(output, tuple) else output

    hook = block.register_forward_hook(note)
    original = model.generate

    def kept(**given):
        seen.append(original(**given))
        return seen[-1]

    model.generate = kept
    try:
        out = fast.generate(**inputs, **options)
    finally:
        hook.remove()
        del model.generate
    # All leave after the second block, the first with a head; a prompt runs in full.
    first = 0 if model.config.is_encoder_decoder else 1
    exiting = out.exit_layers[:, first]
    assert (exiting[exiting > 0] == 2).all()
    exit_states = states[first][:, -1]
    expected = decoder.head(decoder.head_input(heads(1, exit_states)))
    running = torch.from_numpy(exiting > 0)
    torch.testing.assert_close(
        seen[0].logits[first][running], expected[running].detach(), atol=1e-4, rtol=1e-4
    )


def test_no_token_exits_without_a_head():
    model = llama(layers=6)
    heads = ExitHeads(16, [2, 4]).eval()
    out = CalmModel(model, 0.2, score="softmax", heads=heads).generate(
        **batch(5, model), max_new_tokens=8
    )
    assert set(np.unique(out.exit_layers)) <= {0, 3, 5, 6}
    looks = np.isfinite(out.depths.confidences).any(axis=(0, 1))
    assert looks.tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_a_batch_is_its_members(name):
    model = MODELS[name]()
    torch.manual_seed(2)
    heads = ExitHeads(16, [0, 1, 2]).eval()
    fast = CalmModel(model, 0.15, score="softmax", heads=heads)
    inputs = batch(9, model)
    together = fast.generate(**inputs, max_new_tokens=7)
    assert len(np.unique(together.exit_layers)) > 2
    for row in range(9):
        alone = fast.generate(**{k: v[row : row + 1] for k, v in inputs.items()}, max_new_tokens=7)
        tokens = alone.exit_layers.shape[1]
        np.testing.assert_array_equal(alone.exit_layers[0], together.exit_layers[row, :tokens])
        length = alone.sequences.shape[1]
        assert torch.equal(alone.sequences[0], together.sequences[row, :length])


def test_never_exiting_is_the_model_itself():
    model = t5()
    heads = ExitHeads(16, [0, 1]).eval()
    inputs = batch(4, model)
    plain = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    out = CalmModel(model, None, heads=heads).generate(**inputs, max_new_tokens=6)
    assert torch.equal(out.sequences, plain)


def test_fitted_heads_agree_more_than_none():
    """A deep model whose blocks add little: a linear map gets closer to its end."""
    model = llama(layers=6, initializer_range=0.35)
    data = texts(60)
    heads = fit_exit_heads(model, Texts(data[:40], tokenizer()), max_new_tokens=12)
    assert heads.exits == (0, 1, 2, 3, 4)
    assert not heads.training
    from swiftsure.text.calm.training import agreement_examples

    with_heads = agreement_examples(
        model, Texts(data[:40], tokenizer()), heads=heads, max_new_tokens=12
    )[1]
    without = agreement_examples(model, Texts(data[:40], tokenizer()), max_new_tokens=12)[1]
    assert with_heads.float().mean() > without.float().mean()


def test_heads_count_in_flops_and_fingerprints():
    model = llama()
    heads = ExitHeads(16, [0, 1, 2]).eval()
    assert calm_fingerprint(model, heads=heads) != calm_fingerprint(model)
    inputs = batch(2, model)
    without = CalmModel(model, 2.0 - 1.0, score="softmax").generate(**inputs, max_new_tokens=3)
    with_heads = CalmModel(model, 1.0, score="softmax", heads=heads).generate(
        **inputs, max_new_tokens=3
    )
    looks = np.isfinite(with_heads.depths.confidences).sum(axis=(1, 2))
    if (without.exit_layers == with_heads.exit_layers).all():
        np.testing.assert_allclose(with_heads.flops - without.flops, 2 * 16**2 * looks)


def test_heads_are_saved_with_what_they_saw(tmp_path):
    model, data = llama(), texts(6)
    heads = fit_exit_heads(model, Texts(data, tokenizer()), exits=[1], max_new_tokens=4)
    heads.save(tmp_path / "heads.safetensors")
    again = ExitHeads.load(tmp_path / "heads.safetensors")
    assert again.exits == (1,)
    assert again.trained_on == heads.trained_on
    states = torch.randn(3, 16)
    torch.testing.assert_close(again(1, states), heads(1, states))
    arguments = {"thresholds": [0.5], "losses": ["rouge_l"]}
    fast = CalmModel(model, heads=heads)
    with pytest.raises(ValueError, match="new to the heads, which saw 6 of them"):
        sweep(fast, Texts(data, tokenizer()), **arguments)
    record = sweep(
        fast,
        Texts([f"{text} b" for text in data], tokenizer()),
        generation={"max_new_tokens": 3},
        **arguments,
    )
    assert record.fingerprint == calm_fingerprint(model, heads=heads)


def test_a_meta_classifier_judges_what_the_heads_say():
    model, data = llama(), texts(8)
    heads = fit_exit_heads(model, Texts(data, tokenizer()), exits=[1, 2], max_new_tokens=4)
    judge = train_meta(
        model,
        Texts(data, tokenizer()),
        heads=heads,
        max_new_tokens=4,
        epochs=2,
        progress=False,
    )
    out = CalmModel(model, 0.0, score="meta", classifier=judge, heads=heads).generate(
        **batch(2, model), max_new_tokens=4
    )
    assert set(np.unique(out.exit_layers)) <= {0, 2, 4}


def test_heads_that_do_not_fit_are_refused():
    model = llama()
    with pytest.raises(ValueError, match="width 8"):
        CalmModel(model, 0.5, heads=ExitHeads(8, [0]))
    with pytest.raises(ValueError, match="a block after number 4"):
        CalmModel(model, 0.5, heads=ExitHeads(16, [3]))
    with pytest.raises(ValueError, match="must name blocks"):
        ExitHeads(16, [])
    with pytest.raises(ValueError, match="come before the last of 4 blocks"):
        fit_exit_heads(model, Texts(texts(2), tokenizer()), exits=[3], max_new_tokens=3)
