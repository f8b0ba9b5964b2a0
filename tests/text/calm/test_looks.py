"""What a device decides by itself: kernels against plain operations."""

import pytest
import torch

from swiftsure.text.calm.looks import Batch, cosine, decide, gap_and_token, next_tokens

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confidences(device, dtype):
    torch.manual_seed(0)
    for rows, size in ((1, 2), (3, 17), (33, 5000), (2, 32128)):
        logits = (3 * torch.randn(rows, size)).to(device, dtype)
        logits[-1] = logits[-1].max()  # a tie of all
        gaps, tokens = gap_and_token(logits)
        first, second = logits.float().softmax(dim=1).topk(2, dim=1).values.T
        torch.testing.assert_close(gaps, first - second, atol=1e-6, rtol=1e-5)
        best = logits.gather(1, tokens[:, None])[:, 0]
        assert torch.equal(best, logits.amax(dim=1))
        other = logits + torch.randn_like(logits)
        wanted = torch.cosine_similarity(logits.float(), other.float(), dim=1)
        torch.testing.assert_close(cosine(logits, other), wanted, atol=1e-5, rtol=1e-5)


def example(device, ends=(), n=4):
    """Four rows at tokens of their own, the last of which has ended."""

    def whole(*values):
        return torch.tensor(values, dtype=torch.long, device=device)

    def flags(*values):
        return torch.tensor(values, dtype=torch.bool, device=device)

    return Batch(
        tokens=whole(1, 1, 1, 1),
        positions=whole(4, 6, 5, 9),
        finished=flags(False, False, False, True),
        exited=flags(False, False, False, True),
        levels=torch.tensor([0.5, 0.4, 0.0, 0.1], device=device),
        first=whole(2, 6, 3, 7),
        limits=whole(9, 9, 3, 3),
        level_table=torch.arange(30.0, device=device).view(n + 1, 6),
        ends=whole(*ends),
        pad=whole(2),
        found=whole(-1, -1, -1, -1),
        log=torch.zeros((2, 5, n), device=device),
        behind=whole(0, 3, 0),
        left=torch.zeros((), dtype=torch.bool, device=device),
        alive=torch.zeros((), dtype=torch.bool, device=device),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strict", [False, True])
def test_decisions(device, strict):
    it = example(device)
    scores = torch.tensor([0.5, 0.5, float("nan"), 0.9], device=device)
    scores = torch.stack([1 - scores, scores], dim=1)[:, 1]  # as of a classifier: not contiguous
    tokens = torch.tensor([10, 11, 12, 13], device=device)
    decide(scores, 1, tokens, it, strict=strict)
    assert it.exited.tolist() == [not strict, True, False, True]
    assert it.found.tolist() == [-1 if strict else 10, 11, -1, -1]
    assert bool(it.left)
    assert it.behind.tolist() == [0, -1, 0]
    assert not it.log[0].any()
    steps = it.log[1].nan_to_num(7.0).cpu()
    assert steps[[2, 0, 2, 2], range(4)].tolist() == pytest.approx([0.5, 0.5, 7.0, 0.9])
    it.levels.sub_(1)
    decide(scores.nan_to_num(1.0), 0, None, it, strict=strict)
    assert not bool(it.left)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends", [(), (7,), (9, 7)])
def test_turns(device, ends):
    it = example(device, ends)
    it.found.copy_(torch.tensor([7, 8, 5, 6]))
    next_tokens(it)
    over = [bool(ends), False, True, True]  # by its end token; not; by its limit; before
    assert it.finished.tolist() == it.exited.tolist() == over
    assert it.tokens.tolist() == [7, 8, 5, 2]
    assert it.positions.tolist() == [5, 7, 6, 9]
    assert it.levels[:3].tolist() == [3.0, 7.0, 15.0]
    assert it.behind.tolist() == [1, 4, 1]
    assert bool(it.alive)
    it.limits.fill_(1)
    next_tokens(it)
    assert not bool(it.alive)
