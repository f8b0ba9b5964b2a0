"""Heads: attached to any layer, learnt, and the network beneath them left alone."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from swiftsure.torch import attach_heads, check, train_heads
from swiftsure.torch.cutting import cut
from swiftsure.torch.heads import PooledHead
from tests.torch.builders import inputs, labels, refused


class Tokens(nn.Module):
    """Layers that give images, tokens and vectors."""

    def __init__(self):
        super().__init__()
        self.image = nn.Conv2d(3, 7, 3, padding=1)
        self.tokens = nn.Linear(7, 9)
        self.vector = nn.Linear(9, 11)
        self.fc = nn.Linear(11, 5)

    def forward(self, x):
        x = self.tokens(self.image(x).flatten(2).transpose(1, 2))
        return self.fc(torch.tanh(self.vector(x.mean(dim=1))))


IMAGES = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))


# --------------------------------------------------------------------------------- attach_heads


def test_heads_for_features_of_any_kind():
    network = Tokens().eval()
    model = attach_heads(network, ["image", "tokens", "vector"], IMAGES).eval()
    assert [head.linear.in_features for head in model.heads] == [7, 9, 11]
    outputs = model(IMAGES)
    assert [tuple(output.shape) for output in outputs] == [(6, 5)] * 4
    assert torch.equal(outputs[-1], network(IMAGES))
    check(model, IMAGES)


@pytest.mark.parametrize("shape", [(4, 8), (4, 5, 8), (4, 8, 5, 3)])
def test_heads_take_the_mean_over_positions(shape):
    features = torch.randn(shape)
    head = PooledHead(8, 3)
    mean = {2: features, 3: features.mean(dim=1)}.get(features.ndim)
    if mean is None:
        mean = features.mean(dim=(2, 3))
    torch.testing.assert_close(head(features), head.linear(head.norm(mean)))


def plain(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), *more, nn.Linear(16, 5))


def test_the_network_is_left_as_it_was():
    network = plain(nn.Dropout(0.5)).train()
    network[1].eval()
    before = copy.deepcopy(network.state_dict())
    modes = {name: module.training for name, module in network.named_modules()}
    attach_heads(network, ["0", "2"], inputs(4))
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any(module._forward_hooks for module in network.modules())
    assert {name: module.training for name, module in network.named_modules()} == modes


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_of_the_network_is_restored(training):
    network = plain().train(training)
    attach_heads(network, ["0"], inputs(4))
    assert all(module.training == training for module in network.modules())
    with pytest.raises(RuntimeError, match="shapes"):
        attach_heads(network, ["0"], torch.zeros(4, 7))
    assert all(module.training == training for module in network.modules())


def test_a_network_in_training_mode_answers_as_it_will():
    """Dropout that is called as a function must not be attached with the rest."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.fc = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x):
            x = self.layer(x)
            return self.fc(nn.functional.dropout(x, 0.5, training=self.training))

    network = Dropping().train()
    model = attach_heads(network, ["layer"], inputs(4)).eval()
    network.eval()
    assert torch.equal(model(inputs(4))[-1], network(inputs(4)))


class Broken(nn.Module):
    def forward(self, x):
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("network", "error"),
    [
        (plain(Broken()), RuntimeError),
        (plain(nn.Unflatten(1, (2, 2, 2, 2)), nn.Flatten()), ValueError),  # five axes
        (nn.Sequential(*plain(), nn.Unflatten(1, (5, 1))), ValueError),  # not logits
    ],
)
def test_hooks_are_removed_after_an_error(network, error):
    at = ["0", "3"] if len(network) > 4 else ["0"]
    with pytest.raises(error):
        attach_heads(network, at, inputs(4))
    assert not any(module._forward_hooks for module in network.modules())


def test_refusals():
    network = plain()
    with pytest.raises(ValueError, match="`at` must be one of"):
        attach_heads(network, ["7"], inputs(4))
    with refused("at"):
        attach_heads(network, [], inputs(4))
    with refused("at"):
        attach_heads(network, ["2", "0"], inputs(4))

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 5), nn.Linear(6, 5)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(ValueError, match="does not run unused"):
        attach_heads(Unused(), ["unused"], inputs(4))


def test_heads_are_of_the_networks_dtype():
    network = plain().double().eval()
    model = attach_heads(network, ["2"], inputs(4).double()).eval()
    assert [output.dtype for output in model(inputs(4).double())] == [torch.float64] * 2


def test_layers_of_unknown_width():
    network = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(5))
    model = attach_heads(network, ["1"], inputs(4)).eval()
    assert [tuple(output.shape) for output in model(inputs(4))] == [(4, 5)] * 2


# ---------------------------------------------------------------------------------- train_heads


def easy(n=512, seed=0):
    """Samples around the centres of their classes."""
    centres = 3 * torch.randn(5, 6, generator=torch.Generator().manual_seed(9))
    truth = labels(n, seed=seed)
    return centres[truth] + inputs(n, seed=seed), truth


def loader(n=512, seed=0, size=64):
    return list(zip(*(part.split(size) for part in easy(n, seed)), strict=True))


def accuracy(model, x, truth):
    with torch.no_grad():
        return [float((output.argmax(dim=1) == truth).float().mean()) for output in model(x)]


@pytest.fixture(scope="module")
def trained():
    """A network that is trained on the easy task, heads attached and not."""
    network = plain()
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(5):
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
    return network.eval()


def attached(trained):
    torch.manual_seed(1)
    network = copy.deepcopy(trained)
    return network, attach_heads(network, ["0", "2"], easy(4)[0])


@pytest.mark.parametrize("distill", [0.0, 0.5, 1.0])
def test_heads_learn(trained, distill):
    network, model = attached(trained)
    history = train_heads(model, loader(), epochs=4, learning_rate=2e-2, distill=distill)
    assert len(history) == 4
    assert all(len(epoch["loss"]) == len(epoch["accuracy"]) == 3 for epoch in history)
    for k in range(2):
        assert history[-1]["loss"][k] < 0.6 * history[0]["loss"][k]
    found = accuracy(model, *easy(seed=5))
    assert min(found) > 0.8  # chance is 0.2
    assert history[-1]["accuracy"][0] == pytest.approx(accuracy(model, *easy())[0], abs=0.1)
    with torch.no_grad():
        assert torch.equal(model(easy()[0])[-1], network(easy()[0]))


def test_a_frozen_network_is_untouched(trained):
    network, model = attached(trained)
    before = copy.deepcopy(network.state_dict())
    heads = copy.deepcopy(model.heads.state_dict())
    history = train_heads(model, loader(), epochs=2, learning_rate=1e-2)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, value in model.heads.state_dict().items():
        assert not torch.equal(value, heads[name]), name
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(parameter.requires_grad for parameter in network.parameters())
    truth = [epoch["accuracy"][-1] for epoch in history]
    assert truth == pytest.approx([accuracy(model, *easy())[-1]] * 2)


def test_a_network_that_is_trained_along(trained):
    network, model = attached(trained)
    before = copy.deepcopy(network.state_dict())
    history = train_heads(model, loader(), epochs=2, learning_rate=1e-2, frozen=False)
    for name, value in network.state_dict().items():
        assert not torch.equal(value, before[name]), name  # statistics of batches too
    assert history[-1]["loss"][0] < history[0]["loss"][0]
    assert min(accuracy(model, *easy(seed=5))) > 0.8


def test_the_model_is_ready_to_be_evaluated(trained):
    for frozen in (True, False):
        _, model = attached(trained)
        train_heads(model, loader(128), epochs=1, frozen=frozen)
        assert not any(module.training for module in model.modules())


def test_heads_are_trained_in_training_mode_and_the_network_is_not(trained):
    seen = set()

    class Watched(PooledHead):
        def forward(self, features):
            seen.add(("head", self.training))
            return super().forward(features)

    network = copy.deepcopy(trained)
    model = cut(network, ["0"], [Watched(16, 5)])
    network[1].register_forward_hook(lambda module, *_: seen.add(("norm", module.training)))
    train_heads(model, loader(64), epochs=1)
    assert seen == {("head", True), ("norm", False)}
    seen.clear()
    train_heads(model, loader(64), epochs=1, frozen=False)
    assert seen == {("head", True), ("norm", True)}


def test_distillation_follows_the_last_exit(trained):
    """Against wrong labels, a head that only follows the last exit still learns what that knows."""
    _, model = attached(trained)
    wrong = [(x, (y + 1) % 5) for x, y in loader()]
    train_heads(model, wrong, epochs=4, learning_rate=2e-2, distill=1.0)
    assert min(accuracy(model, *easy(seed=5))) > 0.8
    _, model = attached(trained)
    train_heads(model, wrong, epochs=4, learning_rate=2e-2, distill=0.0)
    assert max(accuracy(model, *easy(seed=5))[:2]) < 0.2


def test_the_bar_counts_steps(trained, monkeypatch):
    shown = []

    @contextmanager
    def steps(title, total, visible):
        shown.append(total)
        yield lambda: shown.append(1)

    monkeypatch.setattr("swiftsure.torch.training.steps", steps)
    _, model = attached(trained)
    train_heads(model, loader(128), epochs=3, progress=True)
    assert shown == [6] + 6 * [1]


@pytest.mark.parametrize("distill", [-0.1, 1.1, float("nan")])
def test_distillation_is_a_share(trained, distill):
    with refused("distill"):
        train_heads(attached(trained)[1], loader(64), distill=distill)


def test_training_refusals(trained):
    _, model = attached(trained)
    with refused("epochs"):
        train_heads(model, loader(64), epochs=0)
    with refused("loader"):
        train_heads(model, [])


def test_a_loader_without_a_length(trained):
    with refused("loader"):
        train_heads(attached(trained)[1], iter(loader(64)))


def test_networks_that_work_in_place():
    """What a head learns from must not be written over by the layer after it."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 5))
    model = attach_heads(network, ["0"], easy(4)[0])
    history = train_heads(model, loader(), epochs=4, learning_rate=2e-2, distill=0.0)
    assert history[-1]["loss"][0] < 0.6 * history[0]["loss"][0]
    assert accuracy(model, *easy(seed=5))[0] > 0.8


def test_a_loss_that_is_not_finite(trained):
    network, model = attached(trained)
    before = copy.deepcopy(network.state_dict())
    model.eval()
    broken = [(torch.full((4, 6), torch.nan), labels(4))]
    with pytest.raises(ValueError, match="not finite"):
        train_heads(model, broken, epochs=1)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_network_is_kept(training):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    network.train(training)
    network[1].train(not training)
    model = attach_heads(network, at=["1"], example=torch.zeros(2, 3, 8, 8))
    parts = [part for part in model.modules() if part is not network[1]]
    assert all(part.training is training for part in parts)
    assert network[1].training is not training
