"""Train the heads of a staged model, alone or jointly with the network."""

import copy
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from swiftsure._lib import checks
from swiftsure._lib.progress import steps
from swiftsure.torch.batches import Batch, moved
from swiftsure.torch.cutting import CutModel
from swiftsure.torch.exit_losses import Objective, all_exits
from swiftsure.torch.heads import PooledHead
from swiftsure.torch.replaying import ReplayedModel
from swiftsure.torch.staged import batch_size

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
    frozen: bool | Literal["cached"] = True,
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
    frozen : bool or "cached"
        Train only the heads, with the network in evaluation mode and without gradients. Otherwise
        everything is trained jointly, including the last exit. With "cached", the network runs once
        over the loader and the epochs train on what the heads saw, so the batches stay those of
        the first pass; for linear and MLP heads, and data without random augmentation.
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
    length = _length(loader)
    checks.count("epochs", epochs)
    if dtype is not None:
        checks.choice("dtype", dtype, ["float32", "bfloat16", "float16"])
    if not isinstance(frozen, bool):
        checks.choice("frozen", frozen, ["cached"])
    objective = Objective.of(model, distill, label_smoothing)
    parameters = list((model.heads if frozen else model).parameters())
    if not parameters:
        raise ValueError("`model` must have heads with weights, but has none to train.")
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=learning_rate, total_steps=epochs * length, pct_start=0.2
    )
    device = parameters[0].device
    trainer = _Trainer(model, bool(frozen), objective, dtype, device)
    loaded, kept = trainer.batches(loader), trainer.batches(stop.held_out if stop else ())
    training: Iterable[_Loaded | _Cached] = loaded
    held_out: Iterable[_Loaded | _Cached] = kept
    if frozen == "cached":
        training, held_out = trainer.cached(loaded, progress), trainer.cached(kept, progress)
    best, waited = _Best(model.heads if frozen else model), 0
    history: list[dict[str, Any]] = []
    try:
        with steps("training", epochs * length, progress) as advance:
            for _ in range(epochs):
                model.train(not frozen)
                model.heads.train()
                totals = _Totals()
                for batch in training:
                    trainer.step(batch, totals, optimizer)
                    schedule.step()
                    advance()
                history.append(totals.means())
                if stop is None:
                    continue
                model.eval()
                seen = _Totals()
                with torch.no_grad():
                    for batch in held_out:
                        trainer.losses(batch, seen)
                history[-1]["held_out"] = seen.means()["loss"]
                waited = 0 if best.offer(history[-1]["held_out"][:-1]) else waited + 1
                if waited >= stop.patience:
                    break
        if stop is not None:
            best.restore()
    finally:
        model.eval()
    return history


def _length(loader: Iterable[Any]) -> int:
    """Return the number of batches of an epoch."""
    if not isinstance(loader, Sized):
        raise TypeError(
            f"`loader` must have a length and be iterable once per epoch, but got"
            f" {type(loader).__name__}: pass a list or a DataLoader."
        )
    if len(loader) == 0:
        raise ValueError("`loader` must not be empty.")
    return len(loader)


class _Loaded(NamedTuple):
    """A batch on its device, whose outputs the network computes."""

    inputs: Any
    labels: Tensor | None

    def outputs(self, model: CutModel | ReplayedModel, frozen: bool) -> list[Any]:
        return all_exits(model, self.inputs, frozen)


class _Cached(NamedTuple):
    """A batch that the network has seen: what each head pools, and the last exit's output."""

    pooled: list[Tensor]
    last: Any
    labels: Tensor | None

    def outputs(self, model: CutModel | ReplayedModel, frozen: bool) -> list[Any]:  # noqa: ARG002
        heads: Any = model.heads
        return [
            *(head.of_pooled(each) for head, each in zip(heads, self.pooled, strict=True)),
            self.last,
        ]


class _Batches:
    """The batches of a loader, loaded anew each epoch."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self._loader, self._device = loader, device

    def __iter__(self) -> Iterator[_Loaded]:
        for given in self._loader:
            batch = Batch.of(given)
            labels = None if batch.labels is None else torch.as_tensor(batch.labels)
            yield _Loaded(
                moved(batch.inputs, self._device),
                None if labels is None else labels.to(self._device),
            )


class _Trainer:
    """Computes the losses of all exits on a batch, and trains on them."""

    def __init__(
        self,
        model: CutModel | ReplayedModel,
        frozen: bool,
        objective: Objective,
        dtype: str | None,
        device: torch.device,
    ) -> None:
        self.model = model
        self.frozen = frozen
        self.objective = objective
        self.device = device
        self.dtype = None if dtype in (None, "float32") else getattr(torch, str(dtype))
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)

    def batches(self, loader: Iterable[Any]) -> Iterable[_Loaded]:
        """Return the batches of a loader, on the model's device."""
        return _Batches(loader, self.device)

    @torch.no_grad()
    def cached(self, batches: Iterable[_Loaded], progress: bool | None) -> list[_Cached]:
        """Run the network over all batches, and return what its heads need of each."""
        model = self.model
        pools = all(isinstance(head, PooledHead) for head in model.heads)
        if not pools or self.objective.task.name != "classification":
            raise ValueError(
                "`frozen` must be True, not 'cached', for heads other than linear and mlp, and for"
                " tasks other than classification."
            )
        model.eval()
        found: list[_Cached] = []
        with steps("running the network", None, progress) as advance, self._autocast():
            for batch in batches:
                found.append(self._pooled(batch))
                advance()
        return found

    def _pooled(self, batch: _Loaded) -> _Cached:
        model, pooled = self.model, []
        state = model.begin(batch.inputs)
        for k, head in enumerate(model.heads):
            state = model.advance(k, state)
            pooled.append(head.pooled(model.seen(k, state)).clone())  # type: ignore[operator]
        last = model.n_exits - 1
        return _Cached(pooled, model.head(last, model.advance(last, state)), batch.labels)

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def step(
        self, batch: _Loaded | _Cached, totals: "_Totals", optimizer: torch.optim.Optimizer
    ) -> None:
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

    def losses(self, batch: _Loaded | _Cached, totals: "_Totals") -> list[Tensor]:
        """Return the mean loss of each exit, and add to the totals of an epoch."""
        with self._autocast():
            given = batch.outputs(self.model, self.frozen)
        found = self.objective.scores(given, batch.labels)
        entries = {"loss": found.losses, "agreement": found.agreements}
        if found.right is not None:
            entries["accuracy"] = found.right
        totals.add(entries, batch_size(given[-1]))
        return found.losses


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
