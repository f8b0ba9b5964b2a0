"""Cascades: whole models as exits."""

import pytest
import torch
from torch import nn

import swiftsure as ss
from swiftsure.torch import Cascade, EarlyExit, check, collect, exit_flops


class Counted(nn.Module):
    """A linear classifier that counts the samples it is asked about."""

    def __init__(self, seed, scale=1.0):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(6, 4)
        self.scale = scale
        self.asked = 0

    def forward(self, batch):
        self.asked += len(batch)
        return self.scale * self.layer(batch)


def test_outputs_are_those_of_the_models():
    models = [Counted(seed) for seed in range(3)]
    cascade = Cascade(models).eval()
    batch = torch.randn(5, 6)
    for found, model in zip(cascade(batch), models, strict=True):
        torch.testing.assert_close(found, model(batch))
    check(cascade, batch)
    assert len(exit_flops(cascade, batch)) == 3
    assert exit_flops(cascade, batch)[0] == 2 * 6 * 4


def test_a_later_model_is_asked_only_about_what_is_left():
    small, large = Counted(0, scale=3.0), Counted(1)
    cascade = Cascade([small, large]).eval()
    batches = [(torch.randn(50, 6), torch.randint(0, 4, (50,))) for _ in range(6)]
    record = collect(cascade, batches, losses=["zero_one"])
    policy = ss.calibrate(record, risk="consistency", loss="zero_one", epsilon=0.9)
    policy = policy.model_copy(update={"threshold": 0.8})
    fast = EarlyExit(cascade, policy)
    large.asked = 0
    out = fast(batches[0][0])
    assert 0 < int((out.exits == 1).sum()) < 50
    assert large.asked == int((out.exits == 1).sum())


def test_a_model_nobody_decides_with_is_not_run():
    models = [Counted(seed) for seed in range(3)]
    cascade = Cascade(models).eval()
    record = collect(cascade, [(torch.randn(40, 6), torch.zeros(40).long())], losses=["zero_one"])
    policy = ss.calibrate(record, risk="consistency", loss="zero_one", epsilon=0.9)
    fast = EarlyExit(cascade, policy.model_copy(update={"threshold": (None, 0.0)}))
    for model in models:
        model.asked = 0
    fast(torch.randn(7, 6))
    assert [model.asked for model in models] == [0, 7, 0]


def test_one_model_is_no_cascade():
    with pytest.raises(ValueError, match="at least 2"):
        Cascade([nn.Linear(2, 2)])
