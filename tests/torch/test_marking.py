"""`on_invalid="mark"`: one bad sample does not take the others' answers with it."""

import numpy as np
import pytest
import torch

from swiftsure.torch import Auditor, EarlyExit, InvalidSampleError, Stream
from tests.torch.builders import (
    Played,
    inputs,
    logits,
    middle_threshold,
    network,
    policy_of,
    refused,
)
from tests.torch.test_audit import consistency_monitor, policy_for


class Picky(Played):
    """Raises an error on samples whose first logit is above 1,000, at one stage."""

    def __init__(self, n_exits, stage):
        super().__init__(n_exits)
        self.picky = stage

    def advance(self, exit_index, state):
        if exit_index == self.picky and bool((state["logits"][:, 0, 0] > 1000).any()):
            raise IndexError("no such word")
        return super().advance(exit_index, state)


def without(rows, n):
    return torch.tensor([k for k in range(n) if k not in rows])


def test_other_samples_of_a_batch_are_answered_as_if_alone():
    model, batch = network(), inputs(40)
    policy = policy_of(middle_threshold(model, batch), model.n_exits)
    spoilt = batch.clone()
    spoilt[[3, 17], 2] = torch.nan
    out = EarlyExit(model, policy, on_invalid="mark")(spoilt)
    clean = EarlyExit(model, policy)(batch)
    fine = without({3, 17}, 40)
    assert out.invalid.nonzero()[:, 0].tolist() == [3, 17]
    torch.testing.assert_close(out.outputs[fine], clean.outputs[fine])
    assert torch.equal(out.exits[fine], clean.exits[fine])
    assert out.failures == {}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("exit_", [0, 2])
def test_a_map_with_a_pixel_that_is_not_finite_is_invalid_at_any_exit(exit_, value):
    maps = torch.randn(6, 3, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    maps[3, exit_:, 1, 2, 2] = value
    policy = policy_of(None if exit_ else 0.0, 3, "mean_top1")  # all others exit here
    out = EarlyExit(Played(3), policy, on_invalid="mark")(maps)
    assert out.exits.tolist() == [2 if row == 3 else exit_ for row in range(6)]
    assert out.invalid.nonzero()[:, 0].tolist() == [3]
    with pytest.raises(InvalidSampleError, match=r"exit 3 .* sample 3"):
        EarlyExit(Played(3), policy)(maps)


def test_an_error_names_all_invalid_samples():
    batch = logits(8)
    batch[2], batch[5] = torch.nan, torch.inf
    with pytest.raises(InvalidSampleError, match=r"sample 2 \(and 1 more") as caught:
        EarlyExit(Played(4), policy_of(0.9, 4))(batch)
    assert caught.value.samples.tolist() == [2, 5]


@pytest.mark.parametrize("stage", [0, 2])
def test_samples_on_which_the_model_raises_are_marked(stage):
    model, batch = Picky(4, stage), logits(16)
    batch[[4, 5, 11], 0, 0] = 5000.0
    batch[7] = torch.nan
    policy = policy_of(1.0, 4, strict=True)  # nobody exits early
    with pytest.raises(IndexError, match="no such word"):
        EarlyExit(model, policy)(batch)
    out = EarlyExit(model, policy, on_invalid="mark")(batch)
    assert out.invalid.nonzero()[:, 0].tolist() == [4, 5, 7, 11]
    assert sorted(out.failures) == [4, 5, 11]
    assert out.failures[4] == "IndexError: no such word"
    assert out.exits[[4, 5, 11]].tolist() == [-1, -1, -1]
    fine = without({4, 5, 7, 11}, 16)
    assert torch.equal(out.outputs[fine], batch[fine, 3])
    assert out.exits[fine].eq(3).all()
    assert "n=16, samples_per_exit=[0, 0, 0, 13]" in repr(out)


def test_an_error_on_every_sample_is_raised():
    batch = logits(4)
    batch[:, 0, 0] = 5000.0
    with pytest.raises(IndexError, match="no such word"):
        EarlyExit(Picky(4, 1), policy_of(None, 4), on_invalid="mark")(batch)


def test_streams_mark_too():
    batch = logits(24)
    batch[9] = torch.nan
    fast = EarlyExit(Played(4), policy_of(0.9, 4), on_invalid="mark")
    stream = Stream(fast, batch_size=8)
    results = stream.push(batch) + stream.flush()
    marked = [result.ids[result.invalid].tolist() for result in results]
    assert [number for numbers in marked for number in numbers] == [9]
    assert sum(len(result.outputs) for result in results) == 24
    (whole,) = Stream(fast, batch_size=8).run([batch], ordered=True)
    assert whole.invalid.nonzero()[:, 0].tolist() == [9]
    assert len(whole.outputs) == 24
    strict = Stream(EarlyExit(Played(4), policy_of(0.9, 4)), 8)
    with pytest.raises(InvalidSampleError) as caught:
        [each.outputs for each in strict.push(batch) + strict.flush()]
    assert caught.value.samples.tolist() == [9]


def test_an_invalid_sample_does_not_cost_the_others_their_audit():
    monitor = consistency_monitor()
    auditor = Auditor(1.0, monitor, seed=0)
    batch = logits(12)
    batch[[0, 6]] = torch.nan
    policy = policy_for(monitor, 0.9, 4)
    out = EarlyExit(Played(4), policy, audit=auditor, on_invalid="mark")(
        batch, ids=list("abcdefghijkl")
    )
    assert out.audit.rows.tolist() == without({0, 6}, 12).tolist()
    assert out.audit.failed == ("a", "g")
    assert np.isfinite(out.audit.losses("consistency", "zero_one")).all()
    # They count as the lowest loss, so whether a request is invalid cannot raise an alarm.
    assert (monitor.n, auditor.order.given_up, auditor.order.waiting) == (12, 2, 0)
    assert auditor.failed == 0


def test_the_choice_is_checked():
    with refused("on_invalid"):
        EarlyExit(Played(4), policy_of(0.9, 4), on_invalid="ignore")


def test_captured_models_mark_too():
    model, batch = network(), inputs(24)
    policy = policy_of(middle_threshold(model, batch), model.n_exits)
    batch[[2, 9], 0] = torch.nan
    fast = EarlyExit(model, policy, capture=True, on_invalid="mark")
    plain = EarlyExit(model, policy, on_invalid="mark")(batch)
    for out in (fast(batch), *fast.run([batch])):
        assert out.invalid.nonzero()[:, 0].tolist() == [2, 9]
        assert torch.equal(out.exits[~out.invalid], plain.exits[~plain.invalid])
        torch.testing.assert_close(out.outputs[~out.invalid], plain.outputs[~plain.invalid])
