"""Losses, one file a family; each declares its range and whether it is 0/1.

To add one, write a `Loss` in the file of its family and pass it to `register`.
"""

from swiftsure.losses.base import LOSSES, Loss, LossRange, register
from swiftsure.losses.classification import BRIER, ZERO_ONE

__all__ = ["BRIER", "LOSSES", "ZERO_ONE", "Loss", "LossRange", "register"]
