"""The training losses of all exits on one batch, for training loops of any kind."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swiftsure.torch.batches import Batch, moved
from swiftsure.torch.staged import Scored, StagedModel, plain_output
from swiftsure.torch.tasks import TASKS, Task

__all__ = ["Objective", "Scores", "all_exits", "exit_losses"]


class Scores(NamedTuple):
    """What a batch says of each exit: mean losses, with gradients, and shares without."""

    losses: list[Tensor]
    agreements: list[Tensor]
    right: list[Tensor] | None


class Objective(NamedTuple):
    """What the exits learn: the labels, and the last exit's answers.

    Parameters
    ----------
    task : Task
    distill : float
        Fraction of the loss that compares with the last exit; all of it without labels.
    smoothing : float
        Label smoothing.
    """

    task: Task
    distill: float = 0.5
    smoothing: float = 0.0

    @classmethod
    def of(cls, model: Any, distill: float, smoothing: float) -> "Objective":
        """Return the objective of a staged model; raise if a number is out of range."""
        if not 0 <= distill <= 1:
            raise ValueError(f"`distill` must be in [0, 1], but got {distill}.")
        return cls(getattr(model, "task", TASKS["classification"]), distill, smoothing)

    def scores(self, given: list[Any], labels: Tensor | None) -> Scores:
        """Return the mean losses of the exits' outputs."""
        # Losses in float32: a cross-entropy in half precision loses small probabilities.
        outputs = [_widened(plain_output(each)) for each in given]
        last = outputs[-1].detach()
        losses, agreements = [], []
        for k, output in enumerate(outputs):
            losses.append(self._loss(output, last, labels, k == len(outputs) - 1).mean())
            agreement = self.task.agreement(output.detach(), last)
            agreements.append(agreement.mean())
            if self.task.learned and isinstance(given[k], Scored):
                rated = given[k].confidence.float()
                losses[-1] = losses[-1] + (rated - agreement).square().mean()
        right = None
        if labels is not None and self.task.name == "classification":
            right = [(each.argmax(dim=1) == labels).float().mean() for each in outputs]
        return Scores(losses, agreements, right)

    def _loss(self, output: Tensor, last: Tensor, labels: Tensor | None, is_last: bool) -> Tensor:
        if labels is None:
            return self.task.against_last(output, last)
        hard = self.task.against_labels(output, labels, self.smoothing)
        soft = hard if is_last else self.task.against_last(output, last)
        return (1 - self.distill) * hard + self.distill * soft


def exit_losses(
    model: nn.Module, batch: Any, *, distill: float = 0.5, label_smoothing: float = 0.0
) -> Tensor:
    """Return the mean training loss of each exit on a batch, for your own training loop.

    Parameters
    ----------
    model : nn.Module
        A staged model, such as `attach_heads` returns; or one wrapped by DistributedDataParallel or
        `accelerator.prepare`.
    batch : any
        As `train_heads` takes it: `(inputs, labels)`, a dict with `labels`, or inputs alone.
    distill : float
        Fraction of the loss of early exits that compares with the last exit's answer, in [0, 1];
        all of it without labels.

    Returns
    -------
    losses : (n_exits,)
        With gradients. Train on `losses.mean()`, or on a weighted mean. To train the heads alone,
        freeze the network (`requires_grad_(False)`) and give its heads to the optimizer.

    Examples
    --------
    >>> from swiftsure.torch import Staged
    >>> stages, heads = [nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)]
    >>> model = Staged.from_sequential(stages, heads)
    >>> losses = exit_losses(model, (torch.zeros(5, 4), torch.tensor([0, 1, 2, 0, 1])))
    >>> losses.shape, losses.requires_grad
    (torch.Size([2]), True)
    """
    own: Any = getattr(model, "module", model)
    objective = Objective.of(own, distill, label_smoothing)
    parts = Batch.of(batch)
    device = next(model.parameters()).device
    inputs = moved(parts.inputs, device)
    if own is model:
        given = all_exits(cast(StagedModel, model), inputs)
    elif objective.task.learned:
        raise ValueError(
            "`model` must not be wrapped if its confidence is learned: use train_heads."
        )
    else:
        given = model(inputs)  # the wrapper's own call makes processes share their gradients
    labels = None if parts.labels is None else torch.as_tensor(parts.labels).to(device)
    return torch.stack(objective.scores(given, labels).losses)


def all_exits(model: StagedModel, inputs: Any, frozen: bool = False) -> list[Any]:
    """Return the outputs of all exits, with gradients of the heads alone if frozen."""
    without: Callable[[], Any] = torch.no_grad if frozen else nullcontext
    state = model.begin(inputs)
    outputs = []
    for k in range(model.n_exits):
        with without():
            state = model.advance(k, state)
        # The next stage may overwrite the state in place; the head's backward pass needs it.
        own = pytree.tree_map_only(Tensor, torch.clone, state)
        outputs.append(model.head(k, own))
    return outputs


def _widened(output: Tensor) -> Tensor:
    return output.to(torch.promote_types(output.dtype, torch.float32))
