"""`ForeignModel`: a staged model that another library runs, such as ONNX Runtime."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["ForeignModel"]


class ForeignModel(ABC):
    """A staged model that is not made of PyTorch modules, for `collect`.

    It says itself what PyTorch cannot find out about it.
    """

    n_exits: int
    flops: NDArray[np.float64]
    """Operations per sample up to each exit, (n_exits,)."""

    @abstractmethod
    def fingerprint(self, temperatures: Sequence[float] | None) -> str:
        """Return the fingerprint that policies are bound to."""

    @abstractmethod
    def confidence(self, name: str, output: Any) -> Tensor:
        """Return the confidences, (n,), that the model's own runtime computes."""
