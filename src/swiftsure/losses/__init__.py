"""Losses, one file per family; each declares its range and whether it is 0/1.

To add one, write a `Loss` in its family's file, pass it to `LOSSES.register`, and export it here.
Functions work on both arrays and tensors if possible; the core never imports PyTorch.
"""

from swiftsure.losses.base import LOSSES, Loss, LossRange, TensorFunctions
from swiftsure.losses.classification import BRIER, ZERO_ONE
from swiftsure.losses.image import LPIPS, MSE, SSIM
from swiftsure.losses.segmentation import MIOU, MISCOVERAGE, PIXEL_BRIER, PIXEL_LOSSES, VOID
from swiftsure.losses.tasks import COSINE, SPAN_F1, TOKEN_ERROR
from swiftsure.losses.text import BLEU, CHOICE, EXACT_MATCH, ROUGE_L, TOKEN_F1

__all__ = [
    "BLEU",
    "BRIER",
    "CHOICE",
    "COSINE",
    "EXACT_MATCH",
    "LOSSES",
    "LPIPS",
    "MIOU",
    "MISCOVERAGE",
    "MSE",
    "PIXEL_BRIER",
    "PIXEL_LOSSES",
    "ROUGE_L",
    "SPAN_F1",
    "SSIM",
    "TOKEN_ERROR",
    "TOKEN_F1",
    "VOID",
    "ZERO_ONE",
    "Loss",
    "LossRange",
    "TensorFunctions",
]
