"""Parts of captured graphs that run on a condition, or beside one another."""

import pytest
import torch

from swiftsure.run.graphs.conditional import can_branch, can_choose, run_beside, run_if
from swiftsure.run.graphs.recorder import Recorder
from swiftsure.torch import EarlyExit
from tests.torch.builders import inputs, middle_threshold, network, policy_of

GPU = pytest.mark.skipif(not can_branch(), reason="needs a GPU and cuda.bindings")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def flags_of(n, device):
    return torch.zeros(n, dtype=torch.bool, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_parts_run_only_if_their_flag_is_true(device):
    x, flags = torch.zeros(4, device=device), flags_of(2, device)

    def function():
        x.fill_(1.0)
        run_if(flags[0], lambda: x.add_(10.0))
        run_if(flags[1], lambda: x.mul_(2.0))
        x.add_(0.5)

    with torch.inference_mode():
        recorded = Recorder(torch.device(device)).record(function)
        for first, second, expected in (
            (0, 0, 1.5),
            (1, 0, 11.5),
            (0, 1, 2.5),
            (1, 1, 22.5),
            (0, 0, 1.5),
        ):
            flags.copy_(torch.tensor([first, second]))
            recorded.replay()
            assert x.tolist() == [expected] * 4


@pytest.mark.skipif(not can_choose(), reason="needs CUDA 12.8")
@pytest.mark.parametrize("device", DEVICES)
def test_one_of_two_parts_runs(device):
    x, flags = torch.zeros(4, device=device), flags_of(2, device)

    def function():
        x.fill_(1.0)
        run_if(
            flags[0],
            lambda: run_if(flags[1], lambda: x.add_(10.0), otherwise=lambda: x.add_(20.0)),
            otherwise=lambda: x.mul_(x + 2.0),
        )
        x.add_(0.5)

    with torch.inference_mode():
        recorded = Recorder(torch.device(device)).record(function)
        for first, second, expected in ((1, 1, 11.5), (0, 1, 3.5), (1, 0, 21.5), (0, 0, 3.5)):
            flags.copy_(torch.tensor([first, second]))
            recorded.replay()
            assert x.tolist() == [expected] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_nested_parts(device):
    depth = 14
    x, flags = torch.zeros((), device=device), flags_of(depth, device)

    def part(k):
        x.add_(1.0)
        if k < depth:
            run_if(flags[k], lambda: part(k + 1))

    def function():
        x.zero_()
        part(0)

    with torch.inference_mode():
        recorded = Recorder(torch.device(device)).record(function)
        for n in (0, 3, depth):
            flags.copy_(torch.arange(depth) < n)
            recorded.replay()
            assert x.item() == n + 1


@pytest.mark.parametrize("device", DEVICES)
def test_parts_decide_about_later_parts(device):
    """Matrix products, whose workspaces must not be shared, and memory that parts allocate."""
    torch.manual_seed(0)
    weights = [torch.randn(64, 64, device=device) / 8 for _ in range(6)]
    x, out = torch.randn(8, 64, device=device), torch.zeros(8, 64, device=device)
    again, looked = flags_of(1, device), torch.zeros(7, device=device)

    def part(k, state):
        here = state @ weights[k]

        def look():
            looked[k].copy_((here @ weights[0]).abs().mean())
            again.copy_((here.mean() > 0).view(1))

        run_beside(look, lambda: None)
        out.copy_(here)
        if k + 1 < len(weights):
            run_if(again, lambda: part(k + 1, torch.relu(here) @ weights[k]))

    def expected():
        state = x
        for k, weight in enumerate(weights):
            here = state @ weight
            if here.mean() <= 0 or k + 1 == len(weights):
                return k, here
            state = torch.relu(here) @ weight
        raise AssertionError

    with torch.inference_mode():
        recorded = Recorder(torch.device(device)).record(lambda: part(0, x))
        depths = set()
        for seed in range(40):
            x.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)))
            looked.zero_()
            recorded.replay()
            k, found = expected()
            torch.testing.assert_close(out, found)
            assert int((looked > 0).sum()) == k + 1
            depths.add(k)
    assert len(depths) > 2


@GPU
def test_a_flag_must_be_one_byte():
    with pytest.raises(TypeError, match="flag"):
        Recorder(torch.device("cuda")).record(
            lambda: run_if(torch.ones((), device="cuda"), lambda: None)
        )


@pytest.mark.parametrize("device", DEVICES)
def test_single_samples_exit_as_in_the_plain_runtime(device):
    model = network(width=32)
    policy = policy_of(middle_threshold(network(width=32), inputs(96)), model.n_exits, "top1")
    model.to(device)
    plain, fast = EarlyExit(model, policy), EarlyExit(model, policy, capture=True)
    exits = set()
    for part in inputs(64).to(device).split(1):
        expected, found = plain(part), fast(part)
        assert torch.equal(found.exits, expected.exits)
        torch.testing.assert_close(found.outputs, expected.outputs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            found.confidences, expected.confidences, equal_nan=True, atol=1e-5, rtol=0
        )
        exits.add(int(expected.exits))
    assert len(exits) > 1
    assert fast.captures.budget.graphs == 1


@GPU
def test_single_samples_without_conditional_parts(monkeypatch):
    monkeypatch.setattr("swiftsure.torch.captured_calls.can_branch", lambda: False)
    model = network(width=32)
    policy = policy_of(middle_threshold(network(width=32), inputs(96)), model.n_exits, "top1")
    model.cuda()
    plain, fast = EarlyExit(model, policy), EarlyExit(model, policy, capture=True)
    for part in inputs(16).cuda().split(1):
        assert torch.equal(fast(part).exits, plain(part).exits)
