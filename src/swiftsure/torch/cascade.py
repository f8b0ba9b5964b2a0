"""`Cascade`: whole models as exits, cheapest first."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from swiftsure.torch.staged import Staged

__all__ = ["Cascade"]


class Cascade(Staged):
    """A sequence of models, each run only on samples that the models before it were unsure of.

    The models share only the batch, so a sample costs the sum of all models up to its exit. A model
    whose answer no decision needs is not run.

    Parameters
    ----------
    models : sequence of Module
        Cheapest first. The last is the full model, with which losses are compared. Each takes a
        batch and returns outputs of the same form.

    Examples
    --------
    >>> import torch
    >>> small, large = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 3))
    >>> cascade = Cascade([small, large]).eval()
    >>> [tuple(logits.shape) for logits in cascade(torch.zeros(2, 4))]
    [(2, 3), (2, 3)]
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        if len(models) < 2:
            raise ValueError(f"`models` must be at least 2, but got {len(models)}.")
        self.models = nn.ModuleList(models)
        self.n_exits = len(models)

    def advance(self, exit_index: int, state: Any) -> Any:  # noqa: ARG002 (the same for all)
        """Return the batch: every model starts from it."""
        return state

    def head(self, exit_index: int, state: Any) -> Any:
        """Return the answer of one model."""
        return self.models[exit_index](state)
