"""Cutting: the pieces together are the network, and every piece carries what the rest needs."""

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from swiftsure.torch import EarlyExit, Stream, check
from swiftsure.torch.cutting import cut
from swiftsure.torch.heads import PooledHead
from tests.torch.builders import inputs, middle_threshold, policy_of, refused, rows, split


class Residual(nn.Module):
    """Residual connections past several layers, and functions between them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.layer1 = nn.Linear(8, 8)
        self.layer2 = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.layer3 = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        first = functional.gelu(self.stem(x))
        y = torch.tanh(self.layer1(first))
        y = self.layer2(y) + first
        y = torch.sin(self.layer3(y)) + first * y
        return self.fc(functional.layer_norm(y, (8,)))


class InputAgain(Residual):
    """The input is needed again at the end."""

    def forward(self, x):
        return super().forward(x) + x[:, :5]


class Deep(nn.Module):
    """Blocks within blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(6), "fc": nn.Linear(6, 5)})

    def forward(self, x):
        return self.head["fc"](self.head["norm"](self.blocks(x) + x))


class Direct(nn.Module):
    """Weights and buffers that are used without a module, on both sides of a cut."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("shift", torch.randn(8))
        self.inner = nn.Module()
        self.inner.bias = nn.Parameter(torch.randn(5))
        self.layer1 = nn.Linear(8, 8)
        self.layer2 = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = x @ self.weight * self.scale + self.shift
        x = self.layer1(x) * self.scale
        x = self.layer2(x) + self.shift
        return self.fc(x @ self.weight.T @ self.weight) + self.inner.bias


class Derived(Direct):
    """Values that are made of weights alone, before a cut, and used after it."""

    def forward(self, x):
        gain, table = self.scale.exp(), self.weight @ self.weight.T
        one = self.shift.mean()
        x = self.layer1(x @ self.weight * gain)
        return self.fc(self.layer2(x) * gain * one) + (x[:, :6] @ table)[:, :5]


class Positions(nn.Module):
    """What all samples share, made of lengths and weights before a cut and used after it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 9, 4))
        self.layer1 = nn.Linear(4, 4)
        self.layer2 = nn.Linear(4, 4)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        tokens = x.unflatten(1, (3, 2)).repeat(1, 1, 2)
        places = torch.arange(tokens.size(1), device=tokens.device)
        where = self.table[:, : tokens.shape[1]]
        x = self.layer1(tokens + where)
        x = self.layer2(x * (1 + places[:, None])) + where
        return self.fc((x * places[None, :, None]).mean(dim=1))


class Written(Direct):
    """A value that is made of weights and lengths, then written to, and used after a cut."""

    def forward(self, x):
        one = self.scale.repeat(x.shape[0], 1)
        x = x @ self.weight
        one.add_(x)
        return self.fc(self.layer2(self.layer1(x)) + one)


class Sized(Direct):
    """Lengths that are read off the input before a cut, and used after it."""

    def forward(self, x):
        n, width = x.shape[0], x.size(1)
        x = self.layer1((x @ self.weight).view(n, 2, 4).flatten(1))
        x = self.layer2(x.view(n, 4, 2).reshape(n, 8)) / width
        return self.fc(x.expand(n, x.size(-1)).reshape(n * 1, 8))


class SizedLater(Direct):
    """Likewise, off a value between two cuts, after some arithmetic."""

    def forward(self, x):
        x = self.layer1(x @ self.weight)
        n, half = x.shape[0], x.size(1) // 2
        x = self.layer2(x)
        return self.fc(x.view(n, half, 2).flatten(1)) * (half + 1)


class Batched(nn.Module):
    """Batch norms, dropout and convolutions, as in the networks that people have."""

    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.layer2 = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.fc = nn.Linear(8, 5)
        nn.init.uniform_(self.layer1[1].running_var, 0.5, 2)
        nn.init.normal_(self.layer2[1].running_mean)

    def forward(self, x):
        x = self.layer1(x)
        x = functional.dropout(self.layer2(x) + x, 0.5, training=self.training)
        return self.fc(functional.relu(x, inplace=True))


CASES = {
    "residual": (Residual, ["stem", "layer1", "layer2"], [8, 8, 8]),
    "residual, two": (Residual, ["layer1", "layer3"], [8, 8]),
    "input again": (InputAgain, ["layer1", "layer2"], [8, 8]),
    "inside a block": (Residual, ["layer2.0", "layer2.2"], [8, 8]),
    "blocks": (Deep, ["blocks.0", "blocks.1.0", "blocks.2"], [6, 6, 6]),
    "all blocks": (Deep, ["blocks", "head.norm"], [6, 6]),
    "weights": (Direct, ["layer1", "layer2"], [8, 8]),
    "made of weights": (Derived, ["layer1", "layer2"], [8, 8]),
    "positions": (Positions, ["layer1", "layer2"], [4, 4]),
    "written": (Written, ["layer1", "layer2"], [8, 8]),
    "lengths": (Sized, ["layer1", "layer2"], [8, 8]),
    "later lengths": (SizedLater, ["layer1", "layer2"], [8, 8]),
    "batch norm": (Batched, ["layer1", "layer2"], [8, 8]),
}


def build(case):
    """A network, and the same one cut."""
    kind, at, widths = CASES[case]
    torch.manual_seed(0)
    network = kind().eval()
    heads = [PooledHead(width, 5) for width in widths]
    for head in heads:
        nn.init.normal_(head.linear.weight)
    return network, cut(network, at, heads).eval()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [0, 1, 6])
def test_the_last_exit_is_the_network(case, n):
    network, model = build(case)
    with torch.no_grad():
        outputs = model(inputs(n))
        assert torch.equal(outputs[-1], network(inputs(n)))
    assert model.n_exits == len(CASES[case][1]) + 1
    assert [output.shape for output in outputs] == [(n, 5)] * model.n_exits


@pytest.mark.parametrize("case", CASES)
def test_heads_see_what_their_submodule_gives(case):
    network, model = build(case)
    _, at, _ = CASES[case]
    seen = {}
    for name in at:
        network.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.update({name: output.clone()})
        )
    with torch.no_grad():
        network(inputs(6))
        given = dict(seen)
        state = model.begin(inputs(6))
        for k, name in enumerate(at):
            state = model.advance(k, state)
            assert torch.equal(model.head(k, state), model.heads[k](given[name]))


@pytest.mark.parametrize("case", CASES)
def test_cut_networks_are_sound(case):
    _, model = build(case)
    check(model, inputs(6))
    check(model, inputs(8))  # as wide as some weights are


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [6, 8, 40])
def test_compaction(case, n):
    """Samples leave on the way, and those who stay get what the network would have given."""
    network, model = build(case)
    batch = inputs(n)
    policy = policy_of(middle_threshold(model, batch, share=0.4), model.n_exits)
    fast = EarlyExit(model, policy)
    out = fast(batch)
    assert len(out.exits.unique()) > 1
    with torch.no_grad():
        every = torch.stack(model(batch), dim=1)
        last = out.exits == model.n_exits - 1
        torch.testing.assert_close(out.outputs, rows(every, out.exits))
        torch.testing.assert_close(out.outputs[last], network(batch)[last])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 3])
def test_streams(case, size):
    """Groups of several batches are joined, so that lengths read off one would not fit."""
    _, model = build(case)
    batch = inputs(40)
    fast = EarlyExit(model, policy_of(middle_threshold(model, batch, share=0.4), model.n_exits))
    expected = fast(batch)
    results = list(Stream(fast, batch_size=8).run(split(batch, size), ordered=True))
    assert torch.equal(torch.cat([result.exits for result in results]), expected.exits)
    torch.testing.assert_close(torch.cat([r.outputs for r in results]), expected.outputs)


# ------------------------------------------------------------------------------------- the weights


@pytest.mark.parametrize("case", ["residual", "blocks", "weights", "batch norm"])
def test_weights_are_shared(case):
    network, model = build(case)
    own = {id(parameter) for parameter in model.heads.parameters()}
    shared = {id(parameter) for parameter in model.parameters()} - own
    assert shared == {id(parameter) for parameter in network.parameters()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.5)
        for buffer in network.buffers():
            buffer.mul_(2)
        assert torch.equal(model(inputs(4))[-1], network(inputs(4)))


@pytest.mark.parametrize("case", ["residual", "blocks", "weights", "batch norm"])
def test_states_are_saved_and_loaded(case):
    _, model = build(case)
    _, other = build(case)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
        other.load_state_dict(model.state_dict())
        for one, two in zip(model(inputs(4)), other(inputs(4)), strict=True):
            assert torch.equal(one, two)


def test_the_network_is_left_as_it_was():
    network = Batched().train()
    network.layer1[1].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    modes = {name: module.training for name, module in network.named_modules()}
    cut(network, ["layer1"], [nn.Linear(8, 5)])
    assert {name: module.training for name, module in network.named_modules()} == modes
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_network_that_is_cut_in_training_mode():
    """What is evaluated later must not keep the dropout of the moment it was traced in."""
    torch.manual_seed(0)
    network = Batched().train()
    model = cut(network, ["layer1"], [nn.Linear(8, 5)]).eval()
    network.eval()
    with torch.no_grad():
        assert torch.equal(model(inputs(6))[-1], network(inputs(6)))


def test_gradients_reach_network_and_heads():
    _, model = build("weights")
    sum(output.sum() for output in model(inputs(4))).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ------------------------------------------------------------------------------- inputs and outputs


def test_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 8)
            self.fc = nn.Linear(8, 5)

        def forward(self, x, mask):
            return self.fc(self.layer(x * mask)) * mask[:, :1]

    network = Two().eval()
    model = cut(network, ["layer"], [nn.Linear(8, 5)]).eval()
    x, mask = inputs(12), (inputs(12, seed=1) > 0).float()
    for batch in ((x, mask), [x, mask]):
        with torch.no_grad():
            assert torch.equal(model(batch)[-1], network(x, mask))
        policy = policy_of(middle_threshold(model, {"inputs": batch}), 2)
        out = EarlyExit(model, policy)(batch)
        assert out.exits.bincount().min() > 0
        with torch.no_grad():
            torch.testing.assert_close(
                out.outputs, rows(torch.stack(model(batch), dim=1), out.exits)
            )


def test_arguments_with_defaults():
    """Many networks take a flag or a mask that nobody passes."""

    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 8)
            self.fc = nn.Linear(8, 5)

        def forward(self, x, mask=None, features=False):
            x = self.layer(x)
            if mask is not None:
                x = x * mask
            return x if features else self.fc(x)

    network = Optional().eval()
    model = cut(network, ["layer"], [nn.Linear(8, 5)]).eval()
    with torch.no_grad():
        assert torch.equal(model(inputs(4))[-1], network(inputs(4)))


@pytest.mark.parametrize("form", [lambda x: (x, x), lambda x: {"logits": x}, lambda x: [x]])
def test_networks_with_several_outputs(form):
    class Several(Residual):
        def forward(self, x):
            return form(super().forward(x))

    with refused("model"):
        cut(Several(), ["layer1"], [nn.Linear(8, 5)])


# -------------------------------------------------------------------------------------- refusals


def test_names():
    network = Residual()
    head = nn.Linear(8, 5)
    with pytest.raises(ValueError, match=r"`at` must be one of: .*Did you mean 'layer1'\?"):
        cut(network, ["layer11"], [head])
    with pytest.raises(ValueError, match="'' is not run"):
        cut(network, [""], [head])
    with refused("at"):
        cut(network, [], [])
    with refused("heads"):
        cut(network, ["layer1"], [head, head])


@pytest.mark.parametrize("at", [["layer2", "layer1"], ["layer1", "layer1"], ["fc", "stem"]])
def test_order(at):
    with pytest.raises(ValueError, match="`at` must name submodules in the order"):
        cut(Residual(), at, [nn.Linear(8, 5)] * 2)


class Uses(nn.Module):
    """Runs some of its layers twice or not at all."""

    def __init__(self):
        super().__init__()
        self.once, self.twice, self.never = (nn.Linear(6, 6) for _ in range(3))
        self.branch = nn.Sequential(nn.Linear(6, 6))
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        return self.fc(self.branch(self.twice(self.once(self.twice(x)))))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("twice", "'twice' is run 2 times"),
        ("never", "'never' is not run"),
    ],
)
def test_layers_that_are_not_run_once(name, words):
    with pytest.raises(ValueError, match=words):
        cut(Uses(), [name], [nn.Linear(6, 5)])


def test_a_layer_beside_one_that_is_run_twice():
    torch.manual_seed(0)
    network = Uses().eval()
    model = cut(network, ["once"], [nn.Linear(6, 5)]).eval()
    with torch.no_grad():
        assert torch.equal(model(inputs(4))[-1], network(inputs(4)))


def test_a_block_and_a_layer_within_it():
    with pytest.raises(ValueError, match=r"'branch\.0' is not run"):
        cut(Uses(), ["branch", "branch.0"], [nn.Linear(6, 5)] * 2)


class Undecided(Residual):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def test_control_flow_that_depends_on_values():
    with pytest.raises(ValueError, match=r"cannot be traced by torch\.fx") as caught:
        cut(Undecided(), ["layer1"], [nn.Linear(8, 5)])
    assert "torch.fx.wrap" in str(caught.value)
    assert "Staged" in str(caught.value)
    assert caught.value.__cause__ is not None


@fx.wrap
def flipped(x):
    return x if x.sum() > 0 else -x


class Wrapped(Residual):
    def forward(self, x):
        return super().forward(flipped(x))


def test_the_remedy_that_the_error_names():
    network = Wrapped().eval()
    model = cut(network, ["layer1"], [nn.Linear(8, 5)]).eval()
    with torch.no_grad():
        assert torch.equal(model(-inputs(4).abs())[-1], network(-inputs(4).abs()))


def test_control_flow_inside_a_cut_layer_is_no_matter():
    """A submodule that is cut at is kept whole, not traced."""

    class Inner(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    network = nn.Sequential(nn.Linear(6, 8), Inner(), nn.Linear(8, 5)).eval()
    model = cut(network, ["1"], [nn.Linear(8, 5)]).eval()
    with torch.no_grad():
        assert torch.equal(model(inputs(4))[-1], network(inputs(4)))


def test_a_cut_at_the_last_layer_is_refused():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with pytest.raises(ValueError, match="'2' computes it"):
        cut(network, at=["1", "2"], heads=[nn.Linear(8, 3), nn.Identity()])
