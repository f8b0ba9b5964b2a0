"""What exits cost: FLOPs by hand, times that are times."""

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from swiftsure.torch import Staged, collect, cut, exit_flops, exit_seconds
from swiftsure.torch.costs import stage_seconds
from tests.torch.builders import Played, inputs, logits, network, refused


class Convolutional(Staged):
    """Work in `begin`, in the stages and in the heads; the second stage has none."""

    n_exits = 3

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.stages = nn.ModuleList([nn.Conv2d(4, 6, 3), nn.Identity(), nn.Linear(6, 10)])
        self.heads = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(10, 5)])
        self.eval()

    def begin(self, batch):
        return self.stem(batch)

    def advance(self, exit_index, state):
        state = self.stages[exit_index](state)
        return state.mean(dim=(2, 3)) if exit_index == 0 else state

    def head(self, exit_index, state):
        return self.heads[exit_index](state)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_flops_of_one_sample_by_hand(n):
    """A multiply-add counts as two; heads on the way are included."""
    stem = 2 * 4 * 3 * 3 * 3 * 8 * 8
    first = 2 * 6 * 4 * 3 * 3 * 6 * 6 + 2 * 6 * 5
    second = 2 * 6 * 5
    third = 2 * 6 * 10 + 2 * 10 * 5
    flops = exit_flops(Convolutional(), torch.zeros(n, 3, 8, 8))
    assert flops.tolist() == np.cumsum([stem + first, second, third]).tolist()
    assert flops.dtype == np.float64


def test_flops_of_nested_batches():
    class Two(Convolutional):
        def begin(self, batch):
            return super().begin(batch["a"]) + super().begin(batch["b"][0])

    image = torch.zeros(2, 3, 8, 8)
    stem = 2 * 4 * 3 * 3 * 3 * 8 * 8
    more = exit_flops(Two(), {"a": image, "b": [image]})
    assert (more - exit_flops(Convolutional(), image)).tolist() == [stem] * 3


def test_flops_of_a_cut_network_are_its_own():
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).eval()
    flops = exit_flops(cut(plain, ["1"], [nn.Linear(8, 5)]).eval(), inputs(3))
    assert flops.tolist() == [2 * 6 * 8 + 2 * 8 * 5, 2 * 6 * 8 + 2 * 2 * 8 * 5]


def test_nothing_is_computed_with_gradients():
    class Watched(Played):
        def advance(self, exit_index, state):
            assert torch.is_inference_mode_enabled()
            return super().advance(exit_index, state)

    assert exit_flops(Watched(3), logits(2, 3)).tolist() == [0.0, 0.0, 0.0]
    assert stage_seconds(Watched(3), logits(2, 3), repeats=1).shape == (3,)


class Attending(Staged):
    """Attention as models write it: the function, the layer, the encoder's layer."""

    n_exits = 3

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.eval()

    def advance(self, exit_index, state):
        if exit_index == 0:
            heads = state.unflatten(2, (4, 4)).transpose(1, 2)
            mixed = scaled_dot_product_attention(heads, heads, heads)
            return mixed.transpose(1, 2).flatten(2)
        if exit_index == 1:
            return self.layer(state, state, state, need_weights=False)[0]
        return self.encoder(state)

    def head(self, exit_index, state):
        return state.mean(dim=1)


def test_attention_counts():
    """In evaluation mode PyTorch runs attention in fused kernels, which must count too."""
    attention = 2 * (2 * 8 * 8 * 16)
    projections = 4 * (2 * 8 * 16 * 16)
    feedforward = 2 * (2 * 8 * 16 * 32)
    flops = np.diff(exit_flops(Attending(), torch.randn(2, 8, 16)), prepend=0)
    assert flops.tolist() == [
        attention,
        attention + projections,
        attention + projections + feedforward,
    ]


def test_times():
    model, batch = network(), inputs(32)
    times = stage_seconds(model, batch, repeats=3)
    assert times.shape == (4,)
    assert (times > 0).all()
    assert np.isfinite(times).all()
    exits = exit_seconds(model, batch, repeats=3)
    assert exits.shape == (4,)
    assert (np.diff(exits, prepend=0) > 0).all()


class Sleepy(Played):
    """Known times: `begin` and the first stage together, then each stage and its head."""

    def begin(self, batch):
        time.sleep(0.002)
        return super().begin(batch)

    def advance(self, exit_index, state):
        time.sleep([0.002, 0.02, 0.001][exit_index])
        return super().advance(exit_index, state)

    def head(self, exit_index, state):
        time.sleep([0.0, 0.0, 0.007][exit_index])
        return super().head(exit_index, state)


def test_times_are_those_of_each_stage_with_its_head():
    times = stage_seconds(Sleepy(3), logits(4, 3), repeats=2)
    expected = np.array([0.004, 0.02, 0.008])
    assert (times >= expected).all()
    assert times.argmax() == 1
    per_sample = exit_seconds(Sleepy(3), logits(4, 3), repeats=2)
    assert (per_sample >= np.cumsum(expected) / 4).all()


def test_refusals():
    with refused("repeats"):
        stage_seconds(network(), inputs(4), repeats=0)
    with refused("model"):
        exit_seconds(network().train(), inputs(4))


def test_empty_batches_have_no_cost_of_one_sample():
    for measure in (exit_flops, exit_seconds):
        with refused("batch"):
            measure(network(), inputs(0))


def test_counting_leaves_batch_statistics_alone():
    """A model in training mode is refused, or at least not changed."""
    model = Staged.from_sequential(
        [nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), nn.Linear(8, 8)],
        [nn.Linear(8, 5), nn.Linear(8, 5)],
    ).train()
    before = model.stages[0][1].running_mean.clone()
    with refused("model"):
        exit_flops(model, inputs(4))
    assert torch.equal(model.stages[0][1].running_mean, before)


def test_times_include_decisions_and_the_full_model_runs_alone():
    class Heads(Sleepy):
        def head(self, exit_index, state):
            time.sleep(0.01)
            return super().head(exit_index, state)

    record = collect(Heads(3), [logits(4, 3)], losses=["zero_one"], seconds=True)
    assert record.costs["seconds"].shape == (3,)
    full = record.full_costs["seconds"]
    assert full <= record.costs["seconds"][-1] - 2 * 0.009 / 4  # two heads less
    assert record.take([0, 1]).full_costs == record.full_costs
