"""Triton kernels of `looks`: confidences, decisions and next tokens, one launch each."""

import triton
import triton.language as tl

__all__ = ["cosine_kernel", "decide_kernel", "gap_kernel", "next_tokens_kernel"]


@triton.jit
def cosine_kernel(now, before, scores, width, now_stride, before_stride, BLOCK: tl.constexpr):
    """Write the cosine similarity of two rows, as `torch.cosine_similarity` defines it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(now + row * now_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(before + row * before_stride + column, mask=inside, other=0.0).to(tl.float32)
    lengths = tl.maximum(tl.sqrt(tl.sum(a * a)), 1e-8) * tl.maximum(tl.sqrt(tl.sum(b * b)), 1e-8)
    tl.store(scores + row, tl.sum(a * b) / lengths)


@triton.jit
def gap_kernel(logits, gaps, tokens, size, stride, BLOCK: tl.constexpr):
    """Write the difference of a row's two largest probabilities, and the place of the first."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    column = tl.arange(0, BLOCK)
    first = tl.full([BLOCK], float("-inf"), tl.float32)
    second = tl.full([BLOCK], float("-inf"), tl.float32)
    place = column
    for offset in range(0, size, BLOCK):
        at = offset + column
        value = tl.load(start + at, mask=at < size, other=float("-inf")).to(tl.float32)
        larger = value > first
        second = tl.where(larger, first, tl.maximum(second, value))
        place = tl.where(larger, at, place)
        first = tl.where(larger, value, first)
    top = tl.max(first)
    token = tl.min(tl.where(first == top, place, size))
    rest = tl.max(tl.where(place == token, second, first))
    total = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, size, BLOCK):
        at = offset + column
        value = tl.load(start + at, mask=at < size, other=float("-inf")).to(tl.float32)
        total += tl.exp(value - top)
    tl.store(gaps + row, (1.0 - tl.exp(rest - top)) / tl.sum(total))
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def decide_kernel(
    scores,
    levels,
    exited,
    left,
    log,
    positions,
    first,
    tokens,
    chosen,
    behind,
    n,
    HAS_TOKENS: tl.constexpr,
    STRICT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do what `looks.decide` documents, in one program."""
    row = tl.arange(0, BLOCK)
    inside = row < n
    score = tl.load(scores + row, mask=inside, other=0.0)
    level = tl.load(levels + row, mask=inside, other=0.0)
    before = tl.load(exited + row, mask=inside, other=1) != 0
    if STRICT:  # noqa: SIM108
        passed = score > level
    else:
        passed = score >= level
    step = tl.load(positions + row, mask=inside, other=0) - tl.load(
        first + row, mask=inside, other=0
    )
    tl.store(log + step * n + row, score, mask=inside)
    if HAS_TOKENS:
        token = tl.load(tokens + row, mask=inside, other=0)
        tl.store(chosen + row, token, mask=inside & passed & (before == 0))
    after = before | passed
    tl.store(exited + row, after.to(tl.int8), mask=inside)
    tl.store(left, tl.max((inside & (after == 0)).to(tl.int8)))
    tl.store(behind, -1)


@triton.jit
def next_tokens_kernel(
    found,
    tokens,
    positions,
    first,
    limits,
    finished,
    exited,
    level_table,
    levels,
    ends,
    pad,
    behind,
    alive,
    n,
    level_columns,
    parts,
    N_ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Do what `looks.next_tokens` documents, in one program."""
    row = tl.arange(0, BLOCK)
    inside = row < n
    before = tl.load(finished + row, mask=inside, other=1) != 0
    token = tl.load(found + row, mask=inside, other=0)
    token = tl.where(before, tl.load(pad), token)
    place = tl.load(positions + row, mask=inside, other=0)
    step = place - tl.load(first + row, mask=inside, other=0) + 1
    over = before | (step >= tl.load(limits + row, mask=inside, other=0))
    for each in tl.static_range(N_ENDS):
        over = over | (token == tl.load(ends + each))
    tl.store(tokens + row, token, mask=inside)
    tl.store(finished + row, over.to(tl.int8), mask=inside)
    tl.store(exited + row, over.to(tl.int8), mask=inside)
    tl.store(positions + row, tl.where(before, place, place + 1), mask=inside)
    column = tl.minimum(step, level_columns - 1)
    level = tl.load(level_table + row.to(tl.int64) * level_columns + column, mask=inside, other=0.0)
    tl.store(levels + row, level, mask=inside)
    tl.store(alive, tl.max((inside & (over == 0)).to(tl.int8)))
    part = tl.arange(0, PARTS)
    lacking = tl.load(behind + part, mask=part < parts, other=0)
    tl.store(behind + part, lacking + 1, mask=part < parts)
