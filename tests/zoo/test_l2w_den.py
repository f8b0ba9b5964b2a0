"""L2W-DEN: its network and its training, against what its authors' code computes."""

import pytest
import torch
from torch import nn

from swiftsure.torch import check
from swiftsure_zoo import L2WDEN, L2WTrainer, MSDNet, WeightNetwork
from swiftsure_zoo.networks.l2w_den import assign_exits, exit_shares
from swiftsure_zoo.networks.published import load_published
from tests.torch.builders import every_output, refused
from tests.torch.reference import Reference

REFERENCE = Reference("l2w_den")
CONFIGURATIONS = REFERENCE.configurations("backbone_configurations")
CENTRES = {"row": "samples", "col": "exits", "mat": "all"}


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


class Exits(nn.Module):
    """A network with several exits that is not a staged model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
        self.unused = nn.Linear(8, 8)

    def forward(self, inputs):
        early = self.norm(self.first(inputs).tanh())
        late = early + self.second(early).tanh()
        return [self.heads[0](early), self.heads[1](late)]


def trainer_of(model, weigh=None, **options):
    weigh = weigh or WeightNetwork(2, width=6)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    adam = torch.optim.Adam(weigh.parameters(), lr=1e-2)
    return L2WTrainer(model, weigh, sgd, adam, **options)


def batch(n=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def copied(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one, two):
    return all(torch.equal(one[name], two[name]) for name in one)


# ------------------------------------------------------------------------- the published network


@pytest.fixture(scope="module")
def parity():
    _, weights, tensors = REFERENCE.parity()
    return REFERENCE.facts("parity_small.json"), weights, tensors


def part(weights, prefix):
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def weight_network(parity, centre):
    settings, weights, _ = parity
    meta = settings["meta"]
    network = WeightNetwork(
        settings["hyperparameters"]["nBlocks"],
        width=meta["hidden"],
        n_hidden=meta["num_layers"],
        inputs=meta["input_type"],
        centre=centre,
        spread=meta["epsilon"],
    )
    load_published(network, part(weights, "meta."))
    return network


@REFERENCE.needed
@pytest.mark.parametrize(
    "wrap",
    [
        lambda weights: weights,
        lambda weights: part(weights, "net."),
        lambda weights: {
            "state_dict": part(weights, "net."),
            "meta_state_dict": part(weights, "meta."),
        },
    ],
    ids=["with the weight network", "alone", "checkpoint"],
)
def test_every_exit_gives_the_published_logits(parity, wrap):
    settings, weights, tensors = parity
    model = L2WDEN.from_published(settings["hyperparameters"], wrap(weights))
    check(model, tensors["in.p1"])
    outputs = every_output(model, tensors["in.x"])
    for k in range(model.n_exits):
        torch.testing.assert_close(outputs[:, k], tensors[f"out.eval_exit{k}"], rtol=0, atol=1e-4)


@REFERENCE.needed
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_published_configuration_has_the_published_keys_and_shapes(name):
    with torch.device("meta"):
        model = L2WDEN.from_hyperparameters(CONFIGURATIONS[name]["hyperparameters"])
    found = [[key, list(value.shape)] for key, value in model.state_dict().items()]
    assert found == [[key, shape] for key, shape, _ in REFERENCE.facts("state_dict.json")[name]]


@REFERENCE.needed
def test_the_weight_network_has_the_published_keys_and_shapes():
    found = [[key, list(value.shape)] for key, value in WeightNetwork(5).state_dict().items()]
    published = REFERENCE.facts("state_dict.json")
    name = next(name for name in published if name.startswith("meta_net"))
    assert found == [[key, shape] for key, shape, _ in published[name]]


# ----------------------------------------------------------------------------- the published loop


@REFERENCE.needed
@pytest.mark.parametrize("published", CENTRES)
def test_weights_are_the_published_ones(parity, published):
    tensors = parity[2]
    weigh = weight_network(parity, CENTRES[published])
    found = weigh(tensors["out.trace_losses_p1"], tensors["out.trace_conf_p1"])
    close(found, tensors[f"out.weights_{published}"])


@REFERENCE.needed
def test_one_meta_iteration_goes_as_published(parity):
    settings, weights, tensors = parity
    meta = settings["meta"]
    model = L2WDEN.from_published(settings["hyperparameters"], weights).train()
    weigh = weight_network(parity, CENTRES[meta["constraint_dimension"]])
    sgd = torch.optim.SGD(
        model.parameters(),
        lr=meta["lr"],
        momentum=meta["momentum"],
        weight_decay=meta["weight_decay"],
    )
    trainer = L2WTrainer(model, weigh, sgd, torch.optim.Adam(weigh.parameters(), lr=1e-4))
    before = copied(model)
    halves = [(tensors[f"in.p{i}"], tensors[f"in.t{i}"]) for i in (1, 2)]
    ahead = trainer.meta_update(*halves)
    close(ahead.weights, tensors["out.trace_weights_p1"])
    close(ahead.weighted_loss, tensors["out.trace_weighted_loss"].squeeze())
    close(torch.stack(ahead.outputs), tensors["out.trace_meta_outputs_p2"])
    assert torch.equal(ahead.exits, tensors["out.trace_assigned_exit_p2"])
    close(ahead.loss, tensors["out.trace_meta_loss"].squeeze())
    for name, parameter in weigh.named_parameters():
        close(parameter.grad, tensors[f"out.trace_meta_grad.{name}"])
    assert same(before, copied(model)), "looking ahead changes the network"


@REFERENCE.needed
def test_shares_of_exits_are_the_published_ones(parity):
    close(exit_shares(3), parity[2]["out.target_fractions"])
    close(
        exit_shares(5), torch.tensor(REFERENCE.facts("config.json")["target_fractions_5_exits_p15"])
    )


# ------------------------------------------------------------------------------- the loop at large


def test_the_pseudo_update_is_the_step_that_the_optimizer_takes():
    """With momentum of earlier steps, and without touching what has no gradient."""
    model = Exits()
    trainer = trainer_of(model)
    inputs, labels = batch()
    for _ in range(2):  # the first step has no momentum yet
        parameters = dict(model.named_parameters())
        loss = sum(nn.functional.cross_entropy(output, labels) for output in model(inputs))
        tried = trainer.pseudo_update(parameters, loss)
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.optimizer.step()
        for name, value in model.named_parameters():
            torch.testing.assert_close(tried[name], value)


def test_the_meta_gradient_is_what_finite_differences_say():
    model, weigh = Exits().double(), WeightNetwork(2, width=6).double()
    trainer = trainer_of(model, weigh)
    inputs, labels = batch()
    halves = (inputs[:8].double(), labels[:8]), (inputs[8:].double(), labels[8:])
    bias = weigh.output_layer.bias
    (gradient,) = torch.autograd.grad(trainer.look_ahead(*halves).loss, [bias])
    for k in range(2):
        losses = []
        for shift in (1e-5, -2e-5):
            with torch.no_grad():
                bias[k] += shift
            losses.append(trainer.look_ahead(*halves).loss.item())
        with torch.no_grad():
            bias[k] += 1e-5
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradient[k].item(), abs=1e-7)


def test_steps_lower_the_loss_of_a_network_that_is_not_staged():
    trainer = trainer_of(Exits())
    losses = [trainer.step(*batch(64)).sum().item() for _ in range(20)]
    assert losses[-1] < losses[0] / 2


def test_a_layout_with_an_unused_scale_at_the_end_trains_too():
    """The published loop raises there: it asks for gradients of weights that nothing uses."""
    torch.manual_seed(0)
    model = MSDNet(3, n_blocks=2, base=1, step=1, n_channels=4, growth=2)
    losses = trainer_of(model).step(torch.randn(6, 3, 32, 32), torch.arange(6) % 3)
    assert losses.isfinite().all()


def test_the_weight_network_learns_at_intervals():
    weigh = WeightNetwork(2, width=6)
    trainer = trainer_of(Exits(), weigh, interval=2)
    changes = []
    for seed in range(4):
        before = copied(weigh)
        trainer.step(*batch(seed=seed))
        changes.append(not same(before, copied(weigh)))
    assert changes == [True, False, True, False]


def test_exits_are_assigned_by_shares_to_the_most_confident():
    confidences = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.9], [0.1, 0.2], [0.8, 0.3]])
    assert assign_exits(confidences, torch.tensor([0.5, 0.5])).tolist() == [0, 1, 1, 1, 0]
    assert assign_exits(confidences, torch.tensor([0.0, 1.0])).tolist() == [1] * 5


@pytest.mark.parametrize("inputs", ["loss", "confidence", "both"])
def test_the_weight_network_sees_what_it_is_to_see(inputs):
    weigh = WeightNetwork(2, width=6, n_hidden=3, inputs=inputs)
    losses, confidences = torch.rand(4, 2), torch.rand(4, 2)
    weights = weigh(losses, confidences)
    assert torch.equal(weights, weigh(losses + 1, confidences)) == (inputs == "confidence")
    assert torch.equal(weights, weigh(losses, confidences / 2)) == (inputs == "loss")
    assert "rest_hidden_layers.1.fc.weight" in weigh.state_dict()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"centre": "row"}, "centre"),
        ({"inputs": "logits"}, "inputs"),
        ({"spread": -1}, "spread"),
        ({"width": 0}, "width"),
    ],
    ids=str,
)
def test_a_bad_setting_of_the_weight_network_is_refused_by_name(options, name):
    with refused(name):
        WeightNetwork(2, **options)


def test_what_the_loop_cannot_follow_is_refused():
    model = Exits()
    with refused("optimizer"):
        L2WTrainer(model, WeightNetwork(2), torch.optim.Adam(model.parameters()), None)
    nesterov = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    with refused("optimizer"):
        L2WTrainer(model, WeightNetwork(2), nesterov, None)
    with refused("shares"):
        trainer_of(model, shares=torch.tensor([0.5, 0.6]))
    with refused("inputs"):
        trainer_of(model).step(*batch(1))
