"""Attach exit heads to named layers of a plain network, and train them."""

from collections.abc import Iterable, Sequence, Sized
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from swiftsure import checks
from swiftsure.progress import steps
from swiftsure.torch.cutting import CutModel, cut
from swiftsure.torch.modes import evaluating

__all__ = ["PooledHead", "attach_heads", "train_heads"]


class PooledHead(nn.Module):
    """Mean over positions, layer normalisation, and a linear layer.

    Takes feature maps (n, channels, height, width), tokens (n, tokens, width) or vectors
    (n, width).
    """

    def __init__(self, width: int, n_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, n_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits, (n, n_classes)."""
        if features.ndim == 4:
            features = features.mean(dim=(2, 3))
        elif features.ndim == 3:
            features = features.mean(dim=1)
        logits: Tensor = self.linear(self.norm(features))
        return logits


def attach_heads(model: nn.Module, at: Sequence[str], example: Tensor) -> CutModel:
    """Return a plain classifier as a staged model, with an untrained head after each named layer.

    The result has the same train or eval mode as the network.

    Parameters
    ----------
    model : nn.Module
        Maps inputs to logits (n, n_classes).
    at : names of submodules
        In the order in which they run.
    example : Tensor
        A small batch, to find the shapes of the layers' outputs.

    Examples
    --------
    >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    >>> model = attach_heads(network, at=["1"], example=torch.zeros(2, 3, 8, 8))
    >>> [tuple(output.shape) for output in model.eval()(torch.zeros(2, 3, 8, 8))]
    [(2, 10), (2, 10)]
    """
    names = dict(model.named_modules())
    for name in at:
        checks.choice("at", name, names)
    features: dict[str, Any] = {}
    hooks = [
        names[name].register_forward_hook(
            lambda _module, _inputs, output, name=name: features.update({name: output})
        )
        for name in at
    ]
    try:
        with evaluating(model), torch.no_grad():
            logits = model(example)
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"`model` must return logits of shape (n, n_classes), but got {got}.")
    missing = [name for name in at if name not in features]
    if missing:
        raise ValueError(
            "`at` must name layers that the network runs, but it does not run"
            f" {', '.join(missing)}."
        )
    heads = [_head(name, features[name], logits.shape[1]) for name in at]
    return cut(model, at, [head.train(model.training) for head in heads])


def _head(name: str, features: Any, n_classes: int) -> PooledHead:
    """Return a head for a layer's output, with its device and dtype."""
    if not isinstance(features, Tensor) or features.ndim not in (2, 3, 4):
        raise ValueError(
            f"`at` must name layers that return one tensor of 2 to 4 axes, but {name!r} returns"
            f" {type(features).__name__}."
        )
    width = features.shape[1] if features.ndim == 4 else features.shape[-1]
    return PooledHead(width, n_classes).to(features.device, features.dtype)


def train_heads(
    model: CutModel,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    epochs: int = 10,
    learning_rate: float = 1e-2,
    frozen: bool = True,
    distill: float = 0.5,
    label_smoothing: float = 0.0,
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """Train the heads of a staged model, alone or jointly with the network.

    Uses AdamW with a one-cycle schedule on the mean cross-entropy of all exits. Part of that loss
    compares with the last exit's distribution, because early answers are judged against it.

    Parameters
    ----------
    model : CutModel
        From `attach_heads` or `cut`.
    loader : iterable of (inputs, labels)
        Iterated once per epoch; must have a length.
    frozen : bool
        Train only the heads, with the network in evaluation mode and without gradients. Otherwise
        everything is trained jointly, including the last exit.
    distill : float
        Fraction of the loss that compares with the last exit, in [0, 1].

    Returns
    -------
    history : list of dict
        One dict per epoch: mean loss and training accuracy of each exit.
    """
    checks.count("epochs", epochs)
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
    parameters = list(model.heads.parameters()) if frozen else list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=learning_rate, total_steps=epochs * length, pct_start=0.2
    )
    device = next(model.heads.parameters()).device
    history = []
    try:
        model.train(not frozen)
        model.heads.train()
        with steps("training", epochs * length, progress) as advance:
            for _ in range(epochs):
                totals = torch.zeros(2, model.n_exits)
                seen = 0
                for inputs, labels in loader:
                    x, y = inputs.to(device), labels.to(device)
                    outputs = _outputs(model, x, frozen)
                    losses = _losses(outputs, y, distill, label_smoothing)
                    trained = losses[:-1] if frozen else losses
                    _optimizer_step(torch.stack(trained).mean(), optimizer)
                    schedule.step()
                    seen += len(y)
                    with torch.no_grad():
                        totals[0] += torch.stack(losses).cpu() * len(y)
                        right = [(o.argmax(dim=1) == y).sum() for o in outputs]
                        totals[1] += torch.stack(right).cpu()
                    advance()
                history.append(
                    {"loss": (totals[0] / seen).tolist(), "accuracy": (totals[1] / seen).tolist()}
                )
    finally:
        model.eval()
    return history


def _optimizer_step(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    if not torch.isfinite(loss):
        raise ValueError(
            "The training loss is not finite: lower `learning_rate`, or look for NaN in the inputs."
        )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _outputs(model: CutModel, inputs: Tensor, frozen: bool) -> list[Tensor]:
    state = model.begin(inputs)
    outputs = []
    for k in range(model.n_exits):
        with torch.no_grad() if frozen else nullcontext():
            state = model.advance(k, state)
        # The next piece may overwrite the state in place; the head's backward pass needs it.
        outputs.append(model.head(k, (state[0].clone(), *state[1:])))
    return outputs


def _losses(
    outputs: list[Tensor], labels: Tensor, distill: float, smoothing: float
) -> list[Tensor]:
    teacher = outputs[-1].detach().softmax(dim=1)
    losses = []
    for k, output in enumerate(outputs):
        hard = cross_entropy(output, labels, label_smoothing=smoothing)
        last = k == len(outputs) - 1
        soft = hard if last else cross_entropy(output, teacher)
        losses.append((1 - distill) * hard + distill * soft)
    return losses
