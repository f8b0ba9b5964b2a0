"""A Triton kernel for learned scores of classifiers: one launch, where top1 alone takes eight."""

import triton
import triton.language as tl

__all__ = ["learned_kernel"]


@triton.jit
def on_grid(value, constants):
    """Return a score as `swiftsure.scores` rounds it."""
    steps, shift = tl.load(constants + 4), tl.load(constants + 5)
    rounded = tl.floor(value * steps + shift) / steps
    return tl.minimum(tl.maximum(rounded, 0.0), 1.0)


@triton.jit
def learned_kernel(logits, found, constants, n_classes, stride, BLOCK: tl.constexpr):
    """Do what `swiftsure.scores.kernels.learned_confidences` does, a row per program.

    `constants` are intercept, two slopes, temperature, STEPS, SHIFT and EDGE, in float64: Triton
    rounds scalar arguments to float32.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < n_classes
    values = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    x = values.to(tl.float64) / tl.load(constants + 3)
    raised = tl.exp(x - tl.max(x, axis=0))
    raised = tl.where(inside, raised, 0.0)
    total = tl.sum(raised, axis=0)
    p = raised / total
    first = tl.max(p, axis=0)
    place = tl.argmax(p, axis=0)
    second = tl.max(tl.where(column == place, 0.0, p), axis=0)
    edge = tl.load(constants + 6)
    top1, top_diff = on_grid(first, constants), on_grid(first - second, constants)
    least = tl.minimum(tl.maximum(top1 - top_diff, edge), 1.0)
    ratio = tl.log(tl.minimum(tl.maximum(top1, edge), 1.0 - edge)) - tl.log(least)
    z = tl.load(constants) + tl.load(constants + 1) * ratio
    z = z + tl.load(constants + 2) * tl.log(1.0 + ratio)
    sure = on_grid(1.0 / (1.0 + tl.exp(-z)), constants)
    sure = tl.where(total > 0.0, sure, float("nan"))
    tl.store(found + row, sure.to(tl.float32))
