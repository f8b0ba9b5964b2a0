"""A Lightning callback that trains exits beside the network of a LightningModule."""

from typing import Any

import torch
from torch import Tensor, nn

from swiftsure.torch.batches import Batch, moved
from swiftsure.torch.cutting import CutModel
from swiftsure.torch.exit_losses import Objective, all_exits
from swiftsure.torch.replaying import ReplayedModel

try:
    from lightning.pytorch import Callback
except ImportError:
    raise ImportError("swiftsure.torch.lightning needs Lightning: pip install lightning") from None

__all__ = ["ExitHeads"]


class ExitHeads(Callback):
    """Trains the heads of a network with exits while Lightning trains the network.

    The heads learn from the same batches, with an optimizer of their own and without gradients
    into the network, which trains as if they were not there; each batch runs the network once
    more. Checkpoints hold the heads, and restore them. For exits that also shape the network,
    return `exit_losses(exits, batch).mean()` from your `training_step` instead.

    Parameters
    ----------
    exits : CutModel or ReplayedModel
        From `attach_heads` on the network that the LightningModule trains.
    learning_rate : float
    distill : float
        As in `train_heads`.

    Examples
    --------
    >>> from swiftsure.torch import attach_heads
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> callback = ExitHeads(attach_heads(network, ["1"], torch.zeros(2, 4)))
    >>> sorted(callback.state_dict()["heads"])
    ['0.linear.bias', '0.linear.weight', '0.norm.bias', '0.norm.weight']
    """

    def __init__(
        self,
        exits: CutModel | ReplayedModel,
        *,
        learning_rate: float = 1e-2,
        distill: float = 0.5,
    ) -> None:
        super().__init__()
        self.exits = exits
        self._objective = Objective.of(exits, distill, 0.0)
        self._optimizer = torch.optim.AdamW(
            exits.heads.parameters(), lr=learning_rate, weight_decay=1e-2
        )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Move the heads to the network's device."""
        self.exits.heads.to(pl_module.device)
        for state in self._optimizer.state.values():
            state.update(
                {k: v.to(pl_module.device) for k, v in state.items() if torch.is_tensor(v)}
            )

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,  # noqa: ARG002
        batch: Any,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Train the heads on the batch that the network has just been trained on."""
        parts = Batch.of(batch)
        device = pl_module.device
        network: nn.Module = self.exits.network
        was_training = network.training
        network.eval()
        try:
            with torch.enable_grad():
                given = all_exits(self.exits, moved(parts.inputs, device), frozen=True)
                labels = None if parts.labels is None else torch.as_tensor(parts.labels).to(device)
                losses = torch.stack(self._objective.scores(given, labels).losses[:-1])
                self._optimizer.zero_grad(set_to_none=True)
                losses.mean().backward()  # type: ignore[no-untyped-call]
        finally:
            network.train(was_training)
        if trainer.world_size > 1:
            self._share_gradients(trainer)
        self._optimizer.step()
        for k, loss in enumerate(losses.detach()):
            pl_module.log(f"exit_{k + 1}_loss", loss)

    def _share_gradients(self, trainer: Any) -> None:
        for weight in self.exits.heads.parameters():
            if isinstance(weight.grad, Tensor):
                weight.grad = trainer.strategy.reduce(weight.grad, reduce_op="mean")

    def state_dict(self) -> dict[str, Any]:
        """Return the heads and their optimizer's state, for a checkpoint."""
        return {"heads": self.exits.heads.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them from a checkpoint."""
        self.exits.heads.load_state_dict(state_dict["heads"])
        self._optimizer.load_state_dict(state_dict["optimizer"])
