"""L2W-DEN: an MSDNet trained with a learned weight per sample and exit.

Han et al., *Learning to Weight Samples for Dynamic Early-Exiting Networks* (ECCV 2022), as
published by LeapLabTHU/L2W-DEN. The network is MSDNet; only the training is new. A small network
predicts the weight of every sample at every exit from how hard the sample is, and is trained to
make each exit good at the samples that exit there. It is not needed after training.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from swiftsure._lib import checks
from swiftsure.torch.state_dicts import plain_state_dict
from swiftsure_zoo.networks.msdnet import MSDNet

__all__ = ["L2WDEN", "L2WTrainer", "WeightNetwork", "assign_exits", "exit_shares"]

INPUTS = ("loss", "confidence", "both")
CENTRES: dict[str, tuple[int, ...]] = {"samples": (0,), "exits": (1,), "all": (0, 1)}
"""Axes of (samples, exits) over which weights have mean one; published as row, col and mat."""


class L2WDEN(MSDNet):
    """The network of L2W-DEN: an MSDNet, with the same hyperparameters.

    `L2WTrainer` trains it, or any other network with several exits.
    """

    @classmethod
    def from_published(
        cls, hyperparameters: Mapping[str, Any], state_dict: Mapping[str, Any], **options: Any
    ) -> Self:
        """Return a published network with its weights, in evaluation mode; see `MSDNet`.

        If the state dict holds both the network (`net.`) and the weight network (`meta.`), the
        latter is ignored.
        """
        tensors = plain_state_dict(state_dict)
        if any(key.startswith("net.") for key in tensors):
            tensors = {
                key.removeprefix("net."): value
                for key, value in tensors.items()
                if not key.startswith("meta.")
            }
        return super().from_published(hyperparameters, tensors, **options)


class WeightNetwork(nn.Module):
    """Predicts the weight of every sample at every exit.

    Parameters
    ----------
    n_exits : int
    width, n_hidden : int
        Units per hidden layer, and number of hidden layers.
    inputs : {"loss", "confidence", "both"}
        Inputs for a sample: the cross-entropies or the confidences (top-1) of all exits, or both.
    centre : {"exits", "samples", "all"}
        Weights have mean one over the exits of each sample, over the samples of a batch at each
        exit, or over the whole batch. Published: "exits" for CIFAR, "all" for ImageNet.
    spread : float
        Weights lie in 1 ± twice the spread. Published: 0.8 for CIFAR, 0.3 for ImageNet.

    Examples
    --------
    >>> weigh = WeightNetwork(n_exits=3, width=8)
    >>> weights = weigh(torch.rand(5, 3), torch.rand(5, 3))
    >>> weights.mean(dim=1).allclose(torch.ones(5))
    True
    """

    def __init__(
        self,
        n_exits: int,
        *,
        width: int = 500,
        n_hidden: int = 1,
        inputs: str = "loss",
        centre: str = "exits",
        spread: float = 0.8,
    ) -> None:
        super().__init__()
        checks.count("n_exits", n_exits)
        checks.count("width", width)
        checks.count("n_hidden", n_hidden)
        self.inputs = checks.choice("inputs", inputs, INPUTS)
        self.axes = CENTRES[checks.choice("centre", centre, CENTRES)]
        self.spread = checks.between("spread", spread, 0, float("inf"))
        n_inputs = 2 * n_exits if inputs == "both" else n_exits
        self.first_hidden_layer = _Hidden(n_inputs, width)
        self.rest_hidden_layers = nn.Sequential(
            *(_Hidden(width, width) for _ in range(n_hidden - 1))
        )
        self.output_layer = nn.Linear(width, n_exits)

    def forward(self, losses: Tensor, confidences: Tensor) -> Tensor:
        """Return weights, (n, n_exits), from losses and confidences of that shape.

        Gradients flow to the parameters, not to the inputs.
        """
        seen = {
            "loss": [losses],
            "confidence": [confidences],
            "both": [losses, confidences],
        }[self.inputs]
        features = self.first_hidden_layer(torch.cat(seen, dim=1).detach())
        raw = self.output_layer(self.rest_hidden_layers(features)).tanh()
        weights: Tensor = 1 + self.spread * (raw - raw.mean(dim=self.axes, keepdim=True))
        return weights


class _Hidden(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.fc = nn.Linear(n_in, n_out)

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = self.fc(features).relu()
        return result


class Lookahead(NamedTuple):
    """Results of a trial update with the current weights.

    Attributes
    ----------
    weights : (n, n_exits)
        Weights of the samples trained on.
    weighted_loss : scalar
        The loss of the trial update: the mean weighted cross-entropy, summed over exits.
    outputs : list of (n, n_classes)
        Outputs for the other samples at every exit, after the trial update.
    exits : (n,)
        Exits of the other samples.
    loss : scalar
        Sum over exits of the mean cross-entropy of the samples that exit there; differentiable
        through the update, back to the weight network.
    """

    weights: Tensor
    weighted_loss: Tensor
    outputs: list[Tensor]
    exits: Tensor
    loss: Tensor


class L2WTrainer:
    """Trains a network with several exits together with its weight network.

    Trains on each half of a batch in turn, and learns the weights from the other half:

    1. pseudo update: one step of SGD on the weighted loss, on a copy of the parameters;
    2. meta update: the weight network learns to improve the copy on the other half, where each
       exit counts only the samples that would exit there;
    3. real update: one step of the optimiser with the new weights.

    The caller schedules learning rates: step schedulers after `step`.

    Parameters
    ----------
    model : nn.Module
        Maps inputs to a list of logits, one per exit.
    weight_network : WeightNetwork
    optimizer : torch.optim.SGD
        Optimiser of the model, without Nesterov or dampening. Published: learning rate 0.8 (for
        batches of 1024 on CIFAR, of 4096 on ImageNet), cosine; momentum 0.9; weight decay 1e-4.
    weight_optimizer : Optimizer
        Optimiser of the weight network. Published: Adam, learning rate and weight decay 1e-4,
        cosine.
    shares : (n_exits,), optional
        Share of samples to exit at each exit; `exit_shares` by default.
    interval : int
        The weight network learns from every `interval`-th batch. Published: 1 for CIFAR, 100 for
        ImageNet.

    Examples
    --------
    >>> model = MSDNet(n_classes=10, n_blocks=2, base=1, step=1, n_channels=4, growth=2)
    >>> weigh = WeightNetwork(model.n_exits, width=8)
    >>> trainer = L2WTrainer(
    ...     model,
    ...     weigh,
    ...     torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
    ...     torch.optim.Adam(weigh.parameters(), lr=1e-4, weight_decay=1e-4),
    ... )
    >>> losses = trainer.step(torch.randn(8, 3, 32, 32), torch.arange(8))
    >>> losses.shape  # one per exit
    torch.Size([2])
    """

    def __init__(
        self,
        model: nn.Module,
        weight_network: WeightNetwork,
        optimizer: torch.optim.SGD,
        weight_optimizer: torch.optim.Optimizer,
        *,
        shares: Tensor | None = None,
        interval: int = 1,
    ) -> None:
        n_exits = weight_network.output_layer.out_features
        self.model = model
        self.weight_network = weight_network
        self.optimizer = _plain_sgd(optimizer)
        self.weight_optimizer = weight_optimizer
        self.shares = exit_shares(n_exits) if shares is None else _accepted_shares(shares, n_exits)
        self.interval = checks.count("interval", interval)
        self.n_steps = 0

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch and return its unweighted mean loss at each exit, (n_exits,)."""
        n = len(labels)
        if n < 2:
            raise ValueError(f"`inputs` must hold at least 2 samples, one per half, but got {n}.")
        first, second = zip(inputs.chunk(2), labels.chunk(2), strict=True)
        self.model.train()
        means = []
        for used, other in ((first, second), (second, first)):
            if self.n_steps % self.interval == 0:
                self.meta_update(used, other)
            means.append(self.real_update(used))
        self.n_steps += 1
        return torch.stack(means).mean(dim=0)

    def meta_update(self, used: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Lookahead:
        """Update the weight network: its weights for `used` should lower the loss on `other`."""
        ahead = self.look_ahead(used, other)
        parameters = list(self.weight_network.parameters())
        # Not backward(), which would also leave gradients on the model.
        gradients = torch.autograd.grad(ahead.loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.weight_optimizer.step()
        return ahead

    def look_ahead(self, used: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Lookahead:
        """Return what an update with the current weights for `used` does to `other`."""
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        outputs = self._outputs(parameters, used[0])
        losses = _losses(outputs, used[1])
        weights = self.weight_network(losses, _confidences(outputs))
        weighted_loss = _total(weights * losses)
        ahead = self._outputs(self.pseudo_update(parameters, weighted_loss), other[0])
        exits = assign_exits(_confidences(ahead), self.shares)
        loss = _loss_at_exits(ahead, other[1], exits)
        return Lookahead(weights, weighted_loss, ahead, exits, loss)

    def pseudo_update(self, parameters: Mapping[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
        """Return the parameters after one differentiable optimiser step; the model is unchanged."""
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            loss, list(parameters.values()), create_graph=True, allow_unused=True
        )
        settings = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        updated = dict(parameters)
        for (name, value), gradient in zip(parameters.items(), gradients, strict=True):
            if gradient is None or value not in settings:  # the optimiser skips it too
                continue
            group = settings[value]
            direction = gradient + group["weight_decay"] * value
            momentum = self.optimizer.state.get(value, {}).get("momentum_buffer")
            if momentum is not None:
                direction = group["momentum"] * momentum + direction
            updated[name] = value - group["lr"] * direction
        return updated

    def real_update(self, used: tuple[Tensor, Tensor]) -> Tensor:
        """Take one optimiser step and return the unweighted mean loss at each exit."""
        total, losses = self.weighted_loss(self.model(used[0]), used[1])
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return losses.detach().mean(dim=0)

    def weighted_loss(self, outputs: list[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss to minimise, and the unweighted losses, (n, n_exits).

        `labels` may be class numbers or, as for `cross_entropy`, probabilities.
        """
        losses = _losses(outputs, labels)
        with torch.no_grad():
            weights = self.weight_network(losses, _confidences(outputs))
        return _total(weights * losses), losses

    def _outputs(self, parameters: Mapping[str, Tensor], inputs: Tensor) -> list[Tensor]:
        """Return the model's outputs with other parameters; its buffers are not changed."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        outputs: list[Tensor] = functional_call(self.model, {**parameters, **buffers}, (inputs,))
        return outputs


def exit_shares(n_exits: int, ratio: float = 0.75) -> Tensor:
    """Return the share of samples per exit, each `ratio` times the one before.

    Published: 0.75.

    Examples
    --------
    >>> exit_shares(3, ratio=0.5)
    tensor([0.5714, 0.2857, 0.1429])
    """
    checks.between("ratio", ratio, 0, float("inf"))
    shares = ratio ** torch.arange(1, checks.count("n_exits", n_exits) + 1)
    return shares / shares.sum()


def assign_exits(confidences: Tensor, shares: Tensor) -> Tensor:
    """Return the exit of each sample, (n,), for given shares per exit.

    Each exit takes the most confident of the remaining samples: its share of all samples, rounded
    down. The last exit takes the rest.

    Examples
    --------
    >>> confidences = torch.tensor([[0.9, 0.8], [0.7, 0.9], [0.8, 0.6], [0.6, 0.7]])
    >>> assign_exits(confidences, torch.tensor([0.5, 0.5]))
    tensor([0, 1, 0, 1])
    """
    n, n_exits = confidences.shape
    quotas = (n * shares).floor().long().tolist()
    exits = torch.full((n,), n_exits - 1, device=confidences.device)
    left = torch.ones(n, dtype=torch.bool, device=confidences.device)
    for k, quota in enumerate(quotas[:-1]):
        order = confidences[:, k].argsort(descending=True)
        taken = order[left[order]][:quota]
        exits[taken] = k
        left[taken] = False
    return exits


def _losses(outputs: list[Tensor], labels: Tensor) -> Tensor:
    """Return the cross-entropy of every sample at every exit, (n, n_exits)."""
    each = [cross_entropy(output, labels, reduction="none") for output in outputs]
    return torch.stack(each, dim=1)


def _confidences(outputs: list[Tensor]) -> Tensor:
    """Return the largest probability of every sample at every exit, (n, n_exits)."""
    return torch.stack([output.detach().softmax(dim=1).amax(dim=1) for output in outputs], dim=1)


def _total(losses: Tensor) -> Tensor:
    """Return the sum over exits of the mean over samples."""
    return losses.mean(dim=0).sum()


def _loss_at_exits(outputs: list[Tensor], labels: Tensor, exits: Tensor) -> Tensor:
    """Return the sum over exits of the mean loss of the samples that exit there, however few."""
    groups = [exits == k for k in range(len(outputs))]
    means = [
        cross_entropy(output[group], labels[group])
        for output, group in zip(outputs, groups, strict=True)
        if group.any()
    ]
    return torch.stack(means).sum()


def _plain_sgd(optimizer: torch.optim.SGD) -> torch.optim.SGD:
    if not isinstance(optimizer, torch.optim.SGD):
        raise TypeError(f"`optimizer` must be SGD, but got {type(optimizer).__name__}.")
    for group in optimizer.param_groups:
        if group["nesterov"] or group["dampening"] or group["maximize"]:
            raise ValueError(
                "`optimizer` must be SGD without Nesterov momentum, dampening and maximize: the"
                " trial update does not model them."
            )
    return optimizer


def _accepted_shares(shares: Tensor, n_exits: int) -> Tensor:
    total = float(shares.sum())
    if shares.shape != (n_exits,) or bool((shares < 0).any()) or abs(total - 1) > 1e-4:
        raise ValueError(
            f"`shares` must be {n_exits} shares that add up to 1, but got {shares.tolist()}."
        )
    return shares
