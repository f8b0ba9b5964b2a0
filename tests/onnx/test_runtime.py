"""The exported runtime: the same answers as PyTorch, without importing it."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import swiftsure as ss
from swiftsure import onnx
from swiftsure.certify.slices import SlicedPolicy
from swiftsure.onnx.scoring import broken_rows, confidence, tempered
from swiftsure.onnx.stages import Answer
from swiftsure.torch import EarlyExit, Staged, collect
from swiftsure.torch import scoring as torch_scoring
from swiftsure.torch.staged import exit_output
from tests.torch.builders import (
    expected_exits,
    full_confidences,
    inputs,
    labels,
    policy_of,
    rules,
    split,
)

WITHOUT_TORCH = """
import json, sys
import numpy as np
from swiftsure.onnx import EarlyExit, Stream
fast = EarlyExit.load(sys.argv[1])
x = np.load(sys.argv[2])
out = fast(x)
streamed = list(Stream(fast, 16).run([x[:7], x[7:]], ordered=True))
assert "torch" not in sys.modules, "torch was imported"
print(json.dumps([out.exits.tolist(), out.predictions.tolist(),
                  np.concatenate([each.exits for each in streamed]).tolist()]))
"""


def same_outputs(out, expected):
    """Exits are equal, and outputs and confidences are near, those of PyTorch."""
    assert out.exits.tolist() == expected.exits.tolist()
    np.testing.assert_allclose(out.outputs, expected.outputs, rtol=1e-4, atol=1e-5)
    if out.confidences is not None:
        np.testing.assert_allclose(out.confidences, expected.confidences, atol=1e-5)


def test_it_runs_without_importing_torch(model, policy, exported, tmp_path):
    x = inputs(30)
    np.save(tmp_path / "x.npy", x.numpy())
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(exported), str(tmp_path / "x.npy")],
        capture_output=True,
        text=True,
        check=True,
    )
    exits, predictions, streamed = json.loads(done.stdout)
    out = EarlyExit(model, policy)(x)
    assert exits == streamed == out.exits.tolist()
    assert predictions == out.predictions.tolist()


@pytest.mark.parametrize("n", [0, 1, 2, 33])
def test_the_same_answers_as_pytorch(model, policy, exported, n):
    x = inputs(n, seed=n)
    same_outputs(onnx.EarlyExit.load(exported)(x.numpy()), EarlyExit(model, policy)(x))


@settings(max_examples=30)
@given(data=st.data())
def test_it_exits_where_the_rule_says(model, exported, data):
    """Given the exported stages' own confidences, whatever the thresholds are."""
    stages = onnx.Stages.load(exported, threads=1)
    x = inputs(20, seed=data.draw(st.integers(0, 1000)))
    full = onnx.collect(stages, [x], losses=["zero_one"]).confidences["top1"]
    policy = policy_of(n_exits=3, **data.draw(rules(full)))
    out = onnx.EarlyExit(stages, policy)(x.numpy())
    assert out.exits.tolist() == expected_exits(policy, full)
    seen = ~np.isnan(out.confidences)
    assert np.array_equal(out.confidences[seen], full[seen])


@settings(max_examples=20)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 4))
def test_a_stream_gives_the_same_answers(exported, sizes, batch_size, max_wait):
    fast = onnx.EarlyExit.load(exported, threads=1)
    x = inputs(sum(sizes)).numpy()
    parts = np.split(x, np.cumsum(sizes)[:-1])
    stream = onnx.Stream(fast, batch_size, max_wait)
    outs = list(stream.run(parts, ordered=True))
    assert [len(out.exits) for out in outs] == sizes
    expected = fast(x)
    assert np.concatenate([out.exits for out in outs]).tolist() == expected.exits.tolist()
    got = np.concatenate([out.outputs for out in outs])
    np.testing.assert_allclose(got, expected.outputs, rtol=1e-5, atol=1e-6)
    results = list(onnx.Stream(fast, batch_size, max_wait).run(parts))
    ids = np.concatenate([result.ids for result in results]) if results else np.zeros(0)
    assert sorted(ids.tolist()) == list(range(len(x)))


def test_heads_that_no_decision_needs_are_not_run(exported, monkeypatch):
    stages = onnx.Stages.load(exported)
    run = []
    heads = [lambda state, k=k, head=head: (run.append(k), head(state))[1]
             for k, head in enumerate(stages._heads)]  # fmt: skip
    monkeypatch.setattr(stages, "_heads", heads)
    onnx.EarlyExit(stages, policy_of(None, 3))(inputs(4).numpy())
    assert run == [2]
    onnx.EarlyExit(stages, policy_of(0.0, 3, min_exit=1))(inputs(4).numpy())
    assert run == [2, 1]


@pytest.mark.parametrize("score", ["top1", "top_diff", "entropy", "mean_top1", "patch_entropy"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_confidences_and_temperatures_are_those_of_pytorch(score, temperature):
    shape = (50, 7) if score in torch_scoring.SCORES else (6, 4, 9, 8)
    logits = 5 * torch.randn(shape, generator=torch.Generator().manual_seed(0))

    class Given:
        def head(self, _, state):
            return state

    output = exit_output(Given(), 0, logits, len(logits), temperature)
    got = confidence(score, Answer([logits.numpy()], None), temperature)
    expected = torch_scoring.confidence(score, output).numpy()
    if score in torch_scoring.SCORES:
        assert np.array_equal(got, expected)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    divided = getattr(output, "output", output)
    np.testing.assert_allclose(
        tempered([logits.numpy()], temperature)[0], divided.numpy(), rtol=1e-6
    )


def test_a_temperature_keeps_the_prediction():
    logits = np.float32([[1.0, np.nextafter(np.float32(1), np.float32(2))]])
    assert tempered([logits], 3.0)[0].argmax() == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_map_with_a_pixel_that_is_not_finite_is_broken(value):
    maps = np.random.default_rng(0).normal(size=(4, 3, 5, 5)).astype(np.float32)
    maps[2, 1, 3, 3] = value
    assert broken_rows([maps]).tolist() == [False, False, True, False]


def test_nan_is_refused_with_its_sample(exported, policy):
    x = inputs(5).numpy()
    x[3] = np.nan
    fast = onnx.EarlyExit.load(exported)
    with pytest.raises(ValueError, match="exit 3 is NaN or infinite for sample 3"):
        fast(x)
    results = list(onnx.Stream(fast, 4).run([x]))
    bad = next(result for result in results if 3 in result.ids)
    with pytest.raises(ValueError, match="sample 3"):
        _ = bad.outputs


@pytest.mark.parametrize(
    "batch", [np.zeros((2, 6)), np.zeros((2, 5), np.float32), np.zeros(6, np.float32), [1, 2]]
)
def test_batches_of_another_form_are_refused(exported, batch):
    with pytest.raises(ValueError, match=r"`batch` must be float32 of shape \(n, 6\)"):
        onnx.EarlyExit.load(exported)(batch)


# ------------------------------------------------------------------------ policies and records


def test_a_record_of_the_folder_makes_a_policy_for_it_alone(model, exported):
    x, y = inputs(400), labels(400)
    batches = list(zip(split(x, 90), split(y, 90), strict=True))
    record = onnx.collect(exported, batches, losses=["zero_one", "brier"], scores=["top1"])
    expected = collect(model, batches, losses=["zero_one", "brier"], scores=["top1"])
    np.testing.assert_allclose(record.confidences["top1"], expected.confidences["top1"], atol=1e-5)
    np.testing.assert_allclose(record.losses["brier"], expected.losses["brier"], atol=1e-5)
    assert record.costs["flops"].tolist() == expected.costs["flops"].tolist()
    policy = ss.calibrate(record, risk="consistency", loss="brier", epsilon=0.5)
    out = onnx.EarlyExit.load(exported, policy)(x.numpy())
    assert out.exits.tolist() == expected_exits(policy, record.confidences["top1"])
    with pytest.raises(ValueError, match="`policy` was made for another model"):
        EarlyExit(model, policy)


def test_a_policy_of_the_network_is_accepted_through_the_check(model, exported, tmp_path):
    x, y = inputs(300), labels(300)
    record = collect(model, [(x, y)], losses=["brier"])
    policy = ss.calibrate(record, risk="consistency", loss="brier", epsilon=0.5)
    fast = onnx.EarlyExit.load(exported, policy)
    assert fast.bound_to_network
    assert fast.check() < 1e-4
    same_outputs(fast(x.numpy()), EarlyExit(model, policy)(x))
    folder = shutil.copytree(exported, tmp_path / "copy")
    onnx.save_policy(folder, policy)
    assert onnx.EarlyExit.load(folder).policy == policy
    other = ss.calibrate(
        collect(type(model).from_sequential(model.stages, model.heads[::-1]).eval(), [(x, y)]),
        risk="consistency",
        loss="brier",
        epsilon=0.5,
    )
    with pytest.raises(ValueError, match="`policy` was made for another model"):
        onnx.EarlyExit.load(exported, other)


def test_confidences_of_a_record_match_those_of_from_logits(exported):
    stages = onnx.Stages.load(exported)
    x = inputs(50).numpy()
    state, outputs = stages.begin(x), []
    for k in range(3):
        state = stages.advance(k, state)
        outputs.append(stages.head(k, state).arrays[0])
    record = ss.ExitRecord.from_logits(np.stack(outputs, axis=1))
    seen = onnx.EarlyExit(stages, policy_of(1.0, 3))(x).confidences
    assert np.array_equal(record.confidences["top1"], seen)


def test_full_confidences_helper_agrees(model, exported):
    """The PyTorch network's confidences are within the tolerance of the exit rule."""
    x = inputs(60)
    got = onnx.collect(exported, [x], losses=["zero_one"]).confidences["top1"]
    np.testing.assert_allclose(got, full_confidences(model, x), atol=1e-5)


def test_unknown_providers_are_refused(exported):
    with pytest.raises(ValueError, match="but not CUDAExecutionProvider"):
        onnx.EarlyExit.load(exported, providers="cuda")


def test_probabilities_warn_once(model, policy, tmp_path):
    """Of a network whose export ends in a softmax."""
    heads = [torch.nn.Sequential(head, torch.nn.Softmax(dim=1)) for head in model.heads]
    network = Staged.from_sequential(list(model.stages), heads).eval()
    with pytest.warns(UserWarning, match="The model's outputs look like probabilities"):
        onnx.export(network, policy, tmp_path / "net", example=inputs(40), threads=1)
    fast = onnx.EarlyExit.load(tmp_path / "net")
    with pytest.warns(UserWarning, match="The model's outputs look like probabilities") as seen:
        assert [len(fast(inputs(8)).exits) for _ in range(2)] == [8, 8]
    assert len(seen) == 1


def test_each_sample_takes_the_exit_of_the_policy_of_its_slice(exported, policy):
    levels = {"day": policy.threshold, "night": 0.99}
    policies = {name: policy_of(level, policy.n_exits) for name, level in levels.items()}
    x, slices = inputs(40).numpy(), np.asarray(["day", "night", "never seen", "day"] * 10)
    stages = onnx.EarlyExit.load(exported).stages
    fast = onnx.EarlyExit(stages, SlicedPolicy(policies=policies, delta=0.1))
    out = fast(x, slices=slices)
    for name in ("day", "night", "never seen"):
        alone = onnx.EarlyExit(stages, policy_of(levels.get(name), policy.n_exits))
        same_outputs(alone(x[slices == name]), _rows_of(out, slices == name))
    with pytest.raises(ValueError, match="`slices` must be given"):
        fast(x)


def _rows_of(out, rows):
    """Some samples of a result, as PyTorch's are compared with."""
    return SimpleNamespace(
        exits=out.exits[rows], outputs=out.outputs[rows], confidences=out.confidences[rows]
    )
