"""Scores on tensors are the twins of those on arrays."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swiftsure import scores
from swiftsure.onnx.scoring import confidence as confidence_of_arrays
from swiftsure.onnx.stages import Answer
from swiftsure.scores.kernels import MOST_LOGITS
from swiftsure.torch import EarlyExit, Scored, Stream, fit_temperatures
from swiftsure.torch.scoring import confidence, warn_of_probabilities
from swiftsure.torch.staged import Tempered
from tests.torch.builders import (
    SCORES,
    Played,
    labels,
    logits,
    policy_of,
    refused,
)


@settings(max_examples=200)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=6),
        elements=st.floats(-200, 200, width=32),
    )
)
def test_twins(values):
    p = scores.probabilities(values.astype(np.float64))
    for name in SCORES:
        found = confidence(name, torch.from_numpy(values))
        assert found.dtype == torch.float32
        assert ((found >= 0) & (found <= 1)).all()
        assert np.array_equal(found.numpy(), scores.SCORES[name](p))


def test_certainty_is_exactly_one():
    sure = torch.tensor([[300.0, 0.0, 0.0]])
    for name in SCORES:
        assert confidence(name, sure).item() == 1.0


@pytest.mark.parametrize("name", SCORES)
def test_classes_that_are_ruled_out(name):
    """A logit of minus infinity is a probability of 0."""
    masked = torch.tensor([[1.0, 0.0, -torch.inf, -torch.inf]])
    expected = scores.SCORES[name](masked.double().softmax(dim=1).numpy())
    np.testing.assert_allclose(confidence(name, masked).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_has_no_confidence(name, value):
    """Least of all a high one."""
    broken = torch.zeros(3, 4)
    broken[1, 2] = value
    assert confidence(name, broken).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_that_hold_the_same_numbers_score_alike(name, dtype):
    values = logits(10, 1)[:, 0].to(dtype)
    assert torch.equal(confidence(name, values), confidence(name, values.float()))


def test_scored_outputs():
    values, own = logits(10, 1)[:, 0], torch.rand(10).double()
    for name in SCORES:
        assert torch.equal(confidence(name, Scored(values, own)), confidence(name, values))
    assert torch.equal(confidence("model", Scored(values, own)), own.float())


def test_empty_batches():
    for name in SCORES:
        assert confidence(name, torch.zeros(0, 3)).shape == (0,)


def test_refusals():
    with refused("score"):
        confidence("top2", torch.zeros(2, 3))
    with refused("score"):
        confidence("model", torch.zeros(2, 3))
    for output in (torch.zeros(3), torch.zeros(2, 3, 4), {"logits": torch.zeros(2, 3)}, None):
        with refused("score"):
            confidence("top1", output)


def test_own_confidences_are_one_a_sample():
    with refused("score"):
        confidence("model", Scored(torch.zeros(3, 2), torch.zeros(3, 1)))


WARNED = "The model's outputs look like probabilities"


def test_probabilities_warn_where_temperatures_are_fitted():
    with pytest.warns(UserWarning, match=WARNED):
        fit_temperatures(Played(2), [(logits(20, 2).softmax(dim=-1), labels(20))])


@pytest.mark.parametrize("way", ["call", "mark", "run", "stream", "captured"])
def test_probabilities_warn_once_in_every_runtime(way):
    p = logits(20, 2).softmax(dim=-1)
    mark = "mark" if way == "mark" else "raise"
    policy = policy_of(0.5, 2)
    fast = EarlyExit(Played(2), policy, on_invalid=mark, capture=way == "captured")

    def run():
        if way == "stream":
            list(Stream(fast, 4).run([p]))
        elif way == "run":
            list(fast.run([p]))
        else:
            fast(p)

    with pytest.warns(UserWarning, match=WARNED):
        run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()  # once is enough
        EarlyExit(Played(2), policy)(logits(20, 2))


def test_probabilities_beside_the_models_own_confidences_do_not_warn():
    class Own(Played):
        def head(self, exit_index, state):
            p = super().head(exit_index, state)
            return Scored(p, p.amax(dim=1))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EarlyExit(Own(2), policy_of(0.5, 2, "model"))(logits(20, 2).softmax(dim=-1))


def test_maps_of_probabilities_warn():
    with pytest.warns(UserWarning, match=WARNED):
        warn_of_probabilities(torch.randn(2, 3, 4, 4).softmax(dim=1))


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("name", ["top1", "top_diff", "entropy"])
def test_the_loop_for_a_few_logits_gives_the_same_bits(name, temperature):
    rng = np.random.default_rng(0)
    few = (rng.normal(size=(200, 10)) * rng.choice([0.1, 1, 10, 100], (200, 1))).astype(np.float32)
    few[:40] = np.round(few[:40] * 4) / 4  # ties and equal margins
    few[40, 3], few[41], few[42, 0], few[43, 1] = -np.inf, -np.inf, np.nan, np.inf
    many = np.concatenate([few, rng.normal(size=(100, 10)).astype(np.float32)])
    assert few.size <= MOST_LOGITS < many.size
    logits = torch.from_numpy(many)
    for kind in (torch.float32, torch.float64, torch.bfloat16):
        whole = logits.to(kind)
        output = Tempered(whole, whole, temperature)
        part = Tempered(whole[:200], whole[:200], temperature)
        expected = confidence(name, output)[:200].numpy()
        np.testing.assert_array_equal(confidence(name, part).numpy(), expected)
        assert np.isnan(expected[41:44]).all()
        assert not np.isnan(expected[:41]).any()
    answers = [Answer([values], None) for values in (few, many)]
    found, all_of_them = (confidence_of_arrays(name, each, temperature) for each in answers)
    np.testing.assert_array_equal(found, all_of_them[:200])
