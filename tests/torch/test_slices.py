"""A policy of slices: each sample takes the exit that the policy of its own slice says."""

import numpy as np
import pytest
import torch

from swiftsure.certify.slices import SlicedPolicy
from swiftsure.torch import EarlyExit
from tests.torch.builders import inputs, network, policy_of

THRESHOLDS = {"day": 0.5, "night": 0.9, "fog": None}


def sliced(**fields):
    policies = {name: policy_of(level, 4, **fields) for name, level in THRESHOLDS.items()}
    return SlicedPolicy(policies=policies, delta=0.1)


def cases(n=60):
    names = ["day", "night", "fog", "never seen"]
    return inputs(n), [names[k] for k in np.random.default_rng(0).integers(4, size=n)]


@pytest.mark.parametrize("on_invalid", ["raise", "mark"])
def test_exits_and_outputs_are_those_of_each_slice(on_invalid):
    model, (batch, slices) = network(), cases()
    out = EarlyExit(model, sliced(), on_invalid=on_invalid)(batch, slices=slices)
    exits = set()
    for name in dict.fromkeys(slices):
        rows = torch.tensor([k for k, each in enumerate(slices) if each == name])
        alone = EarlyExit(model, policy_of(THRESHOLDS.get(name), 4))(batch[rows])
        assert out.exits[rows].tolist() == alone.exits.tolist()
        torch.testing.assert_close(out.outputs[rows], alone.outputs)
        torch.testing.assert_close(out.confidences[rows], alone.confidences, equal_nan=True)
        exits |= set(alone.exits.tolist())
    assert len(exits) > 2, "the test should see several exits"
    assert set(out.exits[[k for k, s in enumerate(slices) if s == "never seen"]].tolist()) == {3}


def test_failures_keep_the_number_of_their_sample():
    class Breaks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.n_exits = network(), 4

        def begin(self, batch):
            if (batch[:, 0] > 90).any():
                raise RuntimeError("a broken input")
            return self.inner.begin(batch)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    batch, slices = cases(12)
    batch[7, 0] = 99.0
    out = EarlyExit(Breaks().eval(), sliced(), on_invalid="mark")(batch, slices=slices)
    assert list(out.failures) == [7]
    assert out.invalid.nonzero().ravel().tolist() == [7]


def test_an_empty_batch_has_no_answers():
    out = EarlyExit(network(), sliced())(inputs(0), slices=[])
    assert len(out.exits) == 0


def test_slices_are_given_where_there_are_some_and_only_there():
    model, (batch, slices) = network(), cases(8)
    fast = EarlyExit(model, sliced())
    with pytest.raises(ValueError, match="`slices` must be given"):
        fast(batch)
    with pytest.raises(ValueError, match="each of 8 samples, but has 7"):
        fast(batch, slices=slices[:7])
    with pytest.raises(ValueError, match="only there"):
        EarlyExit(model, policy_of(0.5, 4))(batch, slices=slices)
    with pytest.raises(ValueError, match="call each batch with `slices`"):
        next(fast.run([batch]))
    with pytest.raises(ValueError, match="watch each slice by itself"):
        EarlyExit(model, sliced(), audit=0.5)


def test_every_policy_is_bound_to_the_model():
    """A policy of one slice that was made for another model is refused."""
    policies = {"day": policy_of(0.5, 4), "night": policy_of(0.5, 4, model="sha256:other")}
    with pytest.raises(ValueError, match="made for another model"):
        EarlyExit(network(), SlicedPolicy(policies=policies, delta=0.1))
