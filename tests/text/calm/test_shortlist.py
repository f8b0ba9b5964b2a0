"""The shortlist: how far its exits are those of the whole vocabulary."""

import numpy as np
import pytest
import torch

from swiftsure.text import CalmModel, CalmRule
from swiftsure.text.calm.confidences import Look, Softmax
from swiftsure.text.decoder import decoder_of
from swiftsure.torch.scoring import top_diff
from tests.text.builders import batch, t5


def looks(model, n=64):
    """States of four blocks, each a step from the one before."""
    torch.manual_seed(0)
    states = [2 * torch.randn(n, 16)]
    for _ in range(3):
        states.append(states[-1] + torch.randn(n, 16))
    return states


@torch.no_grad()
@pytest.mark.parametrize("size", [2, 8, 40])
def test_tokens_exit_as_confident_as_on_the_whole_vocabulary(size):
    model = t5()
    short, whole = Softmax(decoder_of(model), size), Softmax(decoder_of(model))
    short.begin()
    level = 0.3
    for k, states in enumerate(looks(model)):
        look = Look(k, states, states, None, len(states), level)
        found, exact = short.measure(look), whole.measure(look)
        if k == 0:
            assert torch.equal(found, exact)
        exiting = found >= level
        assert (exact[exiting] >= level).all()  # no other token exits
        missed = (exact >= level) & ~exiting
        listed = torch.gather(whole.computed.values, 1, short.listed)
        best = whole.computed.values.amax(dim=1)
        assert (listed[missed].amax(dim=1) < best[missed]).all()  # missed for one reason only
        if short.computed is not None and short.computed.index is not None:
            verified = whole.computed.values[short.computed.index]
            torch.testing.assert_close(short.computed.values, verified)


@torch.no_grad()
def test_a_list_of_nearly_all_misses_no_exit():
    model = t5()
    inputs = batch(6, model)
    exact = CalmModel(model, CalmRule(0.4)).generate(**inputs, max_new_tokens=8)
    listed = CalmModel(model, CalmRule(0.4, shortlist=47)).generate(**inputs, max_new_tokens=8)
    assert torch.equal(exact.sequences, listed.sequences)
    assert np.array_equal(exact.exit_layers, listed.exit_layers)


def test_a_list_of_all_is_none():
    assert Softmax(decoder_of(t5()), 48).size is None


@torch.no_grad()
def test_confidences_are_the_known_score():
    model = t5()
    states = looks(model)[0]
    measure = Softmax(decoder_of(model))
    found = measure.measure(Look(0, states, states, None, len(states), 0.5))
    logits = model.lm_head(model.decoder.final_layer_norm(states) * 16**-0.5)
    torch.testing.assert_close(found, top_diff(logits))
