"""Train the heads of a staged model, alone or jointly with the network."""

import copy
from collections.abc import Iterable, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swiftsure._lib import checks
from swiftsure._lib.progress import steps
from swiftsure.torch.batches import Batch, moved
from swiftsure.torch.cutting import CutModel
from swiftsure.torch.replaying import ReplayedModel
from swiftsure.torch.staged import Scored, plain_output
from swiftsure.torch.tasks import TASKS, Task

__all__ = ["EarlyStopping", "train_heads"]


@dataclass(frozen=True)
class EarlyStopping:
    """When training stops before its last epoch; the best weights are then kept.

    Parameters
    ----------
    held_out : iterable of batches
        Other data, iterated once per epoch.
    patience : int
        Training stops once the loss on it has not improved for so many epochs.
    """

    held_out: Iterable[Any]
    patience: int = 2

    def __post_init__(self) -> None:
        """Check the patience."""
        checks.count("patience", self.patience)


def train_heads(
    model: CutModel | ReplayedModel,
    loader: Iterable[Any],
    *,
    epochs: int = 10,
    learning_rate: float = 1e-2,
    frozen: bool = True,
    distill: float = 0.5,
    label_smoothing: float = 0.0,
    stop: EarlyStopping | None = None,
    dtype: str | None = None,
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """Train the heads of a staged model, alone or jointly with the network.

    Uses AdamW with a one-cycle schedule on the mean loss of all exits. Part of that loss compares
    with the last exit's output, because early answers are judged against it; all of it does for
    batches without labels.

    Parameters
    ----------
    model : CutModel or ReplayedModel
        From `attach_heads`.
    loader : iterable of batches
        `(inputs, labels)`, or dicts with `labels` as a tokenizer and a collator make them, or
        inputs alone. Iterated once per epoch; must have a length.
    frozen : bool
        Train only the heads, with the network in evaluation mode and without gradients. Otherwise
        everything is trained jointly, including the last exit.
    distill : float
        Fraction of the loss that compares with the last exit, in [0, 1].
    stop : EarlyStopping, optional
        Stop once the loss on other data no longer improves, and keep the best weights.
    dtype : {"bfloat16", "float16"}, optional
        Run the network and the heads in mixed precision.

    Returns
    -------
    history : list of dict
        One dict per epoch, each entry with one number per exit: mean `loss`, `agreement` with the
        last exit, `accuracy` for classifiers with labels, and with `stop` the loss `held_out`.
    """
    checks.count("epochs", epochs)
    if dtype is not None:
        checks.choice("dtype", dtype, ["float32", "bfloat16", "float16"])
    if not 0 <= distill <= 1:
        raise ValueError(f"`distill` must be in [0, 1], but got {distill}.")
    if not isinstance(loader, Sized):
        raise TypeError(
            f"`loader` must have a length and be iterable once per epoch, but got"
            f" {type(loader).__name__}: pass a list or a DataLoader."
        )
    length = len(loader)
    if length == 0:
        raise ValueError("`loader` must not be empty.")
    parameters = list((model.heads if frozen else model).parameters())
    if not parameters:
        raise ValueError("`model` must have heads with weights, but has none to train.")
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=learning_rate, total_steps=epochs * length, pct_start=0.2
    )
    device = parameters[0].device
    trainer = _Trainer(model, frozen, distill, label_smoothing, dtype, device)
    best, waited = _Best(model.heads if frozen else model), 0
    history: list[dict[str, Any]] = []
    try:
        with steps("training", epochs * length, progress) as advance:
            for _ in range(epochs):
                model.train(not frozen)
                model.heads.train()
                totals = _Totals()
                for batch in loader:
                    trainer.step(Batch.of(batch), totals, optimizer)
                    schedule.step()
                    advance()
                history.append(totals.means())
                if stop is None:
                    continue
                model.eval()
                seen = _Totals()
                with torch.no_grad():
                    for batch in stop.held_out:
                        trainer.losses(Batch.of(batch), seen)
                history[-1]["held_out"] = seen.means()["loss"]
                waited = 0 if best.offer(history[-1]["held_out"][:-1]) else waited + 1
                if waited >= stop.patience:
                    break
        if stop is not None:
            best.restore()
    finally:
        model.eval()
    return history


class _Trainer:
    """Computes the losses of all exits on a batch, and trains on them."""

    def __init__(
        self,
        model: CutModel | ReplayedModel,
        frozen: bool,
        distill: float,
        smoothing: float,
        dtype: str | None,
        device: torch.device,
    ) -> None:
        self.model = model
        self.frozen = frozen
        self.distill = distill
        self.smoothing = smoothing
        self.device = device
        self.task: Task = getattr(model, "task", TASKS["classification"])
        self.dtype = None if dtype in (None, "float32") else getattr(torch, str(dtype))
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)

    def step(self, batch: Batch, totals: "_Totals", optimizer: torch.optim.Optimizer) -> None:
        """Train on a batch."""
        losses = self.losses(batch, totals)
        loss = torch.stack(losses[:-1] if self.frozen else losses).mean()
        if not torch.isfinite(loss):
            raise ValueError(
                "The training loss is not finite: lower `learning_rate`, or look for NaN in the"
                " inputs."
            )
        optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(optimizer)
        self.scaler.update()

    def losses(self, batch: Batch, totals: "_Totals") -> list[Tensor]:
        """Return the mean loss of each exit, and add to the totals of an epoch."""
        inputs = moved(batch.inputs, self.device)
        labels = None if batch.labels is None else torch.as_tensor(batch.labels).to(self.device)
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            given = self._outputs(inputs)
        # Losses in float32: a cross-entropy in half precision loses small probabilities.
        outputs = [_widened(plain_output(each)) for each in given]
        last = outputs[-1].detach()
        losses = []
        agreements = []
        for k, output in enumerate(outputs):
            losses.append(self._loss(output, last, labels, k == len(outputs) - 1).mean())
            agreement = self.task.agreement(output.detach(), last)
            agreements.append(agreement.mean())
            if self.task.learned and isinstance(given[k], Scored):
                rated = given[k].confidence.float()
                losses[-1] = losses[-1] + (rated - agreement).square().mean()
        entries = {"loss": losses, "agreement": agreements}
        if labels is not None and self.task.name == "classification":
            right = [(each.argmax(dim=1) == labels).float().mean() for each in outputs]
            entries["accuracy"] = right
        totals.add(entries, len(last))
        return losses

    def _loss(self, output: Tensor, last: Tensor, labels: Tensor | None, is_last: bool) -> Tensor:
        if labels is None:
            return self.task.against_last(output, last)
        hard = self.task.against_labels(output, labels, self.smoothing)
        soft = hard if is_last else self.task.against_last(output, last)
        return (1 - self.distill) * hard + self.distill * soft

    def _outputs(self, inputs: Any) -> list[Any]:
        model = self.model
        state = model.begin(inputs)
        outputs = []
        for k in range(model.n_exits):
            with torch.no_grad() if self.frozen else nullcontext():
                state = model.advance(k, state)
            # The next stage may overwrite the state in place; the head's backward pass needs it.
            own = pytree.tree_map_only(Tensor, torch.clone, state)
            outputs.append(model.head(k, own))
        return outputs


def _widened(output: Tensor) -> Tensor:
    return output.to(torch.promote_types(output.dtype, torch.float32))


class _Totals:
    """Sums of an epoch, one number per exit."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._seen: dict[str, int] = {}

    def add(self, entries: dict[str, list[Tensor]], n: int) -> None:
        for name, values in entries.items():
            total = torch.stack([value.detach().float() for value in values]).cpu() * n
            self._sums[name] = self._sums.get(name, torch.zeros(len(values))) + total
            self._seen[name] = self._seen.get(name, 0) + n

    def means(self) -> dict[str, Any]:
        return {name: (total / self._seen[name]).tolist() for name, total in self._sums.items()}


class _Best:
    """The weights with the lowest loss on held-out data."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._loss = float("inf")
        self._weights: dict[str, Any] | None = None

    def offer(self, losses: list[float]) -> bool:
        """Keep the weights if the mean loss is lower than ever; return whether it is."""
        loss = sum(losses) / len(losses)
        if not loss < self._loss:
            return False
        self._loss = loss
        self._weights = copy.deepcopy(self._module.state_dict())
        return True

    def restore(self) -> None:
        if self._weights is not None:
            self._module.load_state_dict(self._weights)
