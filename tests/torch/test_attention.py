"""Attention masks and compiled stages of networks of transformers, captured here without a GPU."""

import pytest
import torch
from torch import nn

import swiftsure as ss
from swiftsure.torch import EarlyExit, Stream, attach_heads, collect
from tests.torch.test_hugging_face import BERT, FAMILIES, images, sentences

VIT = next(each for each in FAMILIES if each.name.startswith("ViT"))
COMPILED = ("LlamaForS", "ResNet", "Whisper")

pytestmark = [pytest.mark.filterwarnings("ignore")]  # of PyTorch's compiler


def policy_in(model, batch, n_out=2):
    """A policy whose threshold lets some samples out at the first exit, near no confidence."""
    record = collect(model, [batch])
    policy = ss.calibrate(record, risk="consistency", loss="brier", epsilon=0.5, delta=0.5)
    order = sorted(record.confidences["top1"][:, 0].tolist(), reverse=True)
    return policy.model_copy(update={"threshold": (order[n_out - 1] + order[n_out]) / 2})


def unbound(policy):
    provenance = policy.certificate.provenance.model_copy(update={"model": None})
    certificate = policy.certificate.model_copy(update={"provenance": provenance})
    return policy.model_copy(update={"certificate": certificate})


def attached(family, batch):
    model = attach_heads(family.network(), family.at(0, 2), batch)
    with torch.no_grad():  # so that samples differ
        for name, value in model.named_parameters():
            if value.ndim == 2 and not name.startswith("heads"):
                value.mul_(5.0)
    return model


def padded(batch, full):
    mask = torch.ones_like(batch["input_ids"]) if full else batch["attention_mask"]
    return {**batch, "attention_mask": mask}


@pytest.fixture
def masks(monkeypatch):
    """For each call of attention, whether it had a mask."""
    seen = []
    real = nn.functional.scaled_dot_product_attention

    def attend(*given, attn_mask=None, **settings):
        seen.append(attn_mask is not None)
        return real(*given, attn_mask=attn_mask, **settings)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attend)
    return seen


@pytest.fixture
def traced(monkeypatch):
    """Compile nothing: run the operations that a step called, and count the steps."""
    steps = []

    def pretended(operations, **_):
        steps.append(operations)
        return operations

    monkeypatch.setattr(torch, "compile", pretended)
    return steps


def same(found, expected):
    assert torch.equal(found.exits, expected.exits)
    torch.testing.assert_close(found.outputs, expected.outputs, rtol=1e-4, atol=1e-5)


WAYS = [{}, {"capture": True}, {"compile": True}, {"capture": True, "compile": True}]


@pytest.mark.parametrize(("settings", "n"), [(WAYS[1], 1), (WAYS[1], 6), (WAYS[2], 3)], ids=str)
def test_stages_attend_as_eager_ones(settings, n, masks, traced, monkeypatch):
    model = attached(BERT, sentences())
    policy = policy_in(model, sentences())
    plain = EarlyExit(model, policy)
    cases = []
    for full in (True, False, True):
        batch = {name: each[-n:] for name, each in padded(sentences(), full).items()}
        masks.clear()
        cases.append((batch, plain(batch), set(masks)))
    # What transformers asks while a graph is captured.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    fast = EarlyExit(model, policy, **settings)
    for batch, expected, with_mask in cases:
        masks.clear()
        same(fast(batch), expected)
        assert set(masks) <= with_mask  # nothing, if an earlier batch was traced


@pytest.mark.parametrize("settings", WAYS[1:3], ids=str)
def test_images_need_no_mask(settings, masks, traced, monkeypatch):
    model = attached(VIT, images())
    policy = policy_in(model, images())
    expected = EarlyExit(model, policy)(images())
    assert set(masks) == {False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    same(EarlyExit(model, policy, **settings)(images()), expected)
    assert set(masks) == {False}


@pytest.mark.parametrize("settings", WAYS[:3], ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_a_batch_does_not_decide_about_the_masks_of_others(settings, first, traced):
    model = attached(BERT, sentences())
    policy = policy_in(model, sentences())
    plain, fast = EarlyExit(model, policy), EarlyExit(model, policy, **settings)
    batches = [padded(sentences(), first), padded(sentences(), not first)] * 2
    expected = [plain(batch) for batch in batches]
    assert not torch.equal(expected[0].outputs, expected[1].outputs)
    for batch, out in zip(batches, expected, strict=True):
        same(fast(batch), out)
    for found, out in zip(Stream(fast, 4).ordered(batches), expected, strict=True):
        same(found, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.name.startswith(COMPILED)], ids=lambda f: f.name
)
def test_compiled_stages_of_a_network_that_is_stopped(family, traced):
    batch = family.batch()
    model = attached(family, batch)
    policy = policy_in(model, batch)
    plain, fast = EarlyExit(model, policy), EarlyExit(model, policy, compile=True)
    for n in (6, 3, 2, 1):
        part = {name: each[:n] for name, each in batch.items()}
        same(fast(part), plain(part))
    assert len(traced) <= 2 * model.n_exits  # for one sample, and for any other number
    with torch.inference_mode():
        torch.testing.assert_close(
            fast.full_outputs(batch), plain.full_outputs(batch), rtol=1e-4, atol=1e-5
        )


def test_compiled_stages_see_new_weights(traced):
    batch = images()
    model = attached(VIT, batch)
    policy = unbound(policy_in(model, batch))
    fast = EarlyExit(model, policy, compile=True)
    before = fast(batch).outputs
    with torch.no_grad():
        model.heads[0].linear.weight.mul_(2.0)
    same(fast(batch), EarlyExit(model, policy)(batch))
    head = model.heads[0].linear
    head.weight = nn.Parameter(head.weight * 2.0)
    same(fast(batch), EarlyExit(model, policy)(batch))
    assert not torch.equal(fast(batch).outputs, before)


def test_compiled_stages_in_half_precision(traced):
    batch = sentences()
    model = attached(BERT, batch)
    policy = unbound(policy_in(model, batch))
    plain = EarlyExit(model, policy, dtype="bfloat16")(batch)
    found = EarlyExit(model, policy, dtype="bfloat16", compile=True)(batch)
    torch.testing.assert_close(found.outputs, plain.outputs, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", [BERT, VIT], ids=lambda family: family.name)
@pytest.mark.parametrize("capture", [False, True])
def test_the_compiler_gives_the_same(family, capture):
    batch = family.batch()
    model = attached(family, batch)
    policy = policy_in(model, batch)
    plain, fast = EarlyExit(model, policy), EarlyExit(model, policy, compile=True, capture=capture)
    for n in (6, 4, 1):
        part = {name: each[:n] for name, each in batch.items()}
        same(fast(part), plain(part))
