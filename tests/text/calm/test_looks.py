"""What a device decides by itself: kernels against plain operations."""

import pytest
import torch

from swiftsure.text.calm.looks import Turn, cosine, decide, gap_and_token, turn

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strict", [False, True])
def test_decisions(device, strict):
    def on(*values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    scores = on(0.5, 0.5, float("nan"), 0.9, dtype=torch.float32)
    scores = torch.stack([1 - scores, scores], dim=1)[:, 1]  # as of a classifier: not contiguous
    levels = on(0.5, 0.4, 0.0, 0.1, dtype=torch.float32)
    exited = on(False, False, False, True, dtype=torch.bool)
    left, step = on(False, dtype=torch.bool)[0], on(2, dtype=torch.long)
    log = torch.zeros((5, 4), device=device)
    chosen = on(-1, -1, -1, -1, dtype=torch.long)
    tokens = on(10, 11, 12, 13, dtype=torch.long)
    where = on(3, 3, 3, 3, dtype=torch.long), torch.zeros((), dtype=torch.long, device=device)
    decide(scores, levels, exited, left, log, step, tokens, chosen, *where, strict=strict)
    assert exited.tolist() == [not strict, True, False, True]
    assert chosen.tolist() == [-1 if strict else 10, 11, -1, -1]
    assert bool(left)
    assert int(where[1]) == 4
    assert log.nan_to_num(7.0).sum(dim=1).tolist() == pytest.approx([0, 0, 8.9, 0, 0])
    lower, given = levels - 1, scores.nan_to_num(1.0)
    decide(given, lower, exited, left, log, step, None, chosen, *where, strict=strict)
    assert not bool(left)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends", [(), (7,), (9, 7)])
def test_turns(device, ends):
    def whole(*values):
        return torch.tensor(values, dtype=torch.long, device=device)

    n = 3
    it = Turn(
        tokens=whole(1, 1, 1),
        positions=whole(4, 4, 4),
        finished=torch.tensor([False, True, False], device=device),
        exited=torch.zeros(n, dtype=torch.bool, device=device),
        levels=torch.zeros(n, device=device),
        output=torch.zeros((n + 1, 6), dtype=torch.long, device=device),
        level_table=torch.arange(24.0, device=device).view(n + 1, 6),
        ends=whole(*ends),
        pad=whole(2),
        step=whole(3),
        limit=whole(5),
        alive=torch.ones((), dtype=torch.bool, device=device),
    )
    turn(whole(7, 8, 5), it)
    over = [bool(ends), True, False]
    assert it.finished.tolist() == it.exited.tolist() == over
    assert it.tokens.tolist() == it.output[:n, 3].tolist() == [7, 2, 5]
    assert (it.positions.tolist(), it.step.item()) == ([5, 5, 5], 4)
    assert it.levels.tolist() == [4.0, 10.0, 16.0]
    assert bool(it.alive)
    turn(whole(3, 3, 3), it)  # the last token
    assert not bool(it.alive)
    assert int(it.output.sum()) == 7 + 2 + 5 + (2 if ends else 3) + 2 + 3
