"""A Triton kernel for learned scores of classifiers: one launch, where top1 alone takes eight."""

import triton
import triton.language as tl

__all__ = ["learned_kernel"]


@triton.jit
def on_grid(value, constants):
    """Return a score as `swiftsure.scores` rounds it."""
    steps, shift = tl.load(constants + 6), tl.load(constants + 7)
    rounded = tl.floor(value * steps + shift) / steps
    return tl.minimum(tl.maximum(rounded, 0.0), 1.0)


@triton.jit
def log_inside(score, edge):
    """Return the log of a score that is kept from 0 and 1."""
    return tl.log(tl.minimum(tl.maximum(score, edge), 1.0 - edge))


@triton.jit
def learned_kernel(logits, found, constants, n_classes, stride, BLOCK: tl.constexpr):
    """Do what `swiftsure.scores.kernels.learned_confidences` does, a row per program.

    `constants` are intercept, three slopes, temperature, log(n_classes), STEPS, SHIFT and EDGE, in
    float64: Triton rounds scalar arguments to float32.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < n_classes
    values = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    x = values.to(tl.float64) / tl.load(constants + 4)
    raised = tl.exp(x - tl.max(x, axis=0))
    raised = tl.where(inside, raised, 0.0)
    total = tl.sum(raised, axis=0)
    p = raised / total
    first = tl.max(p, axis=0)
    place = tl.argmax(p, axis=0)
    second = tl.max(tl.where(column == place, 0.0, p), axis=0)
    information = tl.sum(tl.where(p > 0.0, p * tl.log(tl.where(p > 0.0, p, 1.0)), 0.0), axis=0)
    edge = tl.load(constants + 8)
    top1, top_diff = on_grid(first, constants), on_grid(first - second, constants)
    certainty = on_grid(1.0 + information / tl.load(constants + 5), constants)
    # Rounded scores are multiples of 2**-25, so 1 - c is exact, and log(1 - c) is log1p(-c).
    least = tl.minimum(tl.maximum(top1 - top_diff, edge), 1.0)
    z = tl.load(constants) + tl.load(constants + 1) * (
        log_inside(top1, edge) - log_inside(1.0 - top1, edge)
    )
    z = z + tl.load(constants + 2) * (log_inside(top1, edge) - tl.log(least))
    z = z + tl.load(constants + 3) * (log_inside(certainty, edge) - log_inside(1 - certainty, edge))
    sure = on_grid(1.0 / (1.0 + tl.exp(-z)), constants)
    sure = tl.where(total > 0.0, sure, float("nan"))
    tl.store(found + row, sure.to(tl.float32))
