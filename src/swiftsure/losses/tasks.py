"""Losses of tagged tokens, embeddings and extracted answers; computed on tensors only."""

from swiftsure.losses.base import LOSSES, Loss, LossRange

__all__ = ["COSINE", "SPAN_F1", "TOKEN_ERROR"]

TOKEN_ERROR = LOSSES.register(
    Loss(
        "token_error",
        LossRange(0, 1),
        "prediction",
        tensors="swiftsure.torch.tasks:TOKEN_ERROR",
    )
)
"""Share of a sequence's tokens with the wrong tag."""

COSINE = LOSSES.register(
    Loss("cosine", LossRange(0, 1), "prediction", tensors="swiftsure.torch.tasks:COSINE")
)
"""(1 - cosine) / 2 of two embeddings."""

SPAN_F1 = LOSSES.register(
    Loss("span_f1", LossRange(0, 1), "prediction", tensors="swiftsure.torch.tasks:SPAN_F1")
)
"""1 - F1 of the tokens of two extracted answers."""
