"""Learned scores give the confidences of the record in every runtime."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import swiftsure as ss
from swiftsure.onnx.scoring import confidence as confidence_of_arrays
from swiftsure.onnx.stages import Answer
from swiftsure.scores import SCORES
from swiftsure.torch import EarlyExit, collect
from swiftsure.torch.scoring import confidence
from tests.torch.builders import inputs, labels, network

WEIGHTS = [[0.3, 0.5, 0.4], [-1.0, 0.6, 0.9]]
LEARNED = ss.LearnedScore(("log_ratio", "log1p_ratio"), np.asarray(WEIGHTS))
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


def recorded(logits, temperature=1.0):
    """The confidences of a record of these logits, (n, n_classes), at the second exit."""
    three = np.repeat(np.asarray(logits)[:, None], 3, axis=1)
    record = ss.ExitRecord.from_logits(three, score=SCORES, temperatures=temperature)
    return LEARNED.confidences(record.confidences)[:, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_classes", [2, 10, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_kernels_agree_with_the_record(device, n_classes, dtype):
    generator = torch.Generator().manual_seed(n_classes)
    logits = (8 * torch.randn(300, n_classes, generator=generator)).to(dtype)
    expected = recorded(logits.double().numpy())
    assert np.array_equal(confidence(LEARNED, logits.to(device), 1).cpu().numpy(), expected)
    strided = logits.to(device).T.contiguous().T
    assert np.array_equal(confidence(LEARNED, strided, 1).cpu().numpy(), expected)


@settings(max_examples=100)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=6),
        elements=st.floats(-200, 200, width=32),
    )
)
def test_operations_and_kernels_agree(values):
    compiled = torch.compile(lambda logits: confidence(LEARNED, logits, 1), backend="eager")
    found = confidence(LEARNED, torch.from_numpy(values), 1).numpy()
    assert np.array_equal(found, recorded(values))
    assert np.array_equal(found, confidence_of_arrays(LEARNED, Answer([values], None), 1.0, 1))
    # What is compiled uses operations, as other features do.
    if len(values) == 3:
        assert np.array_equal(found, compiled(torch.from_numpy(values)).numpy())


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_no_number_has_no_confidence(device):
    logits = torch.zeros(5, 4)
    logits[0, 1], logits[1, 2], logits[2], logits[3, 0] = torch.nan, torch.inf, -torch.inf, 5.0
    logits[3, 1] = -torch.inf
    found = confidence(LEARNED, logits.to(device), 1).cpu()
    assert found.isnan().tolist() == [True, True, True, False, False]
    assert confidence(LEARNED, torch.zeros(0, 4).to(device), 1).shape == (0,)


@pytest.fixture(scope="module")
def learned_policy():
    """A network, its inputs, their record, and a policy by a learned score."""
    model, batch = network(n_exits=3), inputs(400)
    record = collect(model, [(batch, labels(400))], losses=["zero_one"], scores=[*SCORES])
    middle = float(np.median(LEARNED.confidences(record.confidences)))
    asked = ss.Promise("zero_one", risk="consistency", epsilon=0.95)
    policy = ss.Calibration(asked, rule=LEARNED, control="empirical", path=[middle]).run(record)
    return model, batch, record, policy


def test_what_is_collected_without_labels_can_be_learned_from():
    """`collect` and `from_logits` give the same score."""
    model, batch = network(n_exits=3), inputs(200)
    with torch.no_grad():
        logits = torch.stack(list(model(batch)), dim=1).numpy()
    found = ss.LearnedScore.fit(collect(model, [batch]))
    assert np.allclose(found.weights, ss.LearnedScore.fit(logits).weights, atol=1e-6)
    named = collect(model, [batch], scores=found)
    assert list(named.confidences) == ["top1", "top_diff"]
    assert named.features == {}


@pytest.mark.parametrize("options", [{}, {"capture": True}])
def test_runtimes_exit_where_the_policy_says(learned_policy, options):
    model, batch, record, policy = learned_policy
    found = EarlyExit(model, policy, score=policy.rule.score, **options)(batch)
    expected = policy.exits(policy.rule.score.confidences(record.confidences))
    near = np.abs(
        policy.rule.score.confidences(record.confidences) - np.float32(policy.threshold)
    ).min(axis=1)
    assert len(set(expected.tolist())) > 1
    assert np.array_equal(found.exits.numpy()[near > 1e-5], expected[near > 1e-5])


def test_another_score_is_refused(learned_policy):
    model, _, _, policy = learned_policy
    other = replace(policy.rule.score, weights=policy.rule.score.weights + 1.0)
    with pytest.raises(ValueError, match="made for score='learned-"):
        EarlyExit(model, policy, score=other)
    with pytest.raises(ValueError, match="made for score='learned-"):
        EarlyExit(model, policy, score="top1")
