"""One file that exits by itself: the same exits and outputs as the stages that it is made of."""

import json
import shutil

import numpy as np
import onnxruntime as ort
import pytest
import torch

import swiftsure as ss
from swiftsure import onnx
from swiftsure.onnx import single_file
from swiftsure.scores import LearnedScore
from swiftsure.torch import Staged
from tests.torch.builders import inputs, policy_of

SCORES = ["top1", "top_diff", "entropy"]
OF_IMAGES = [f"{a}_{s}" for a in ("mean", "quantile", "patch") for s in SCORES]


class Maps(Staged):
    """Exits that return maps of logits, (n, 3, 60, 55): larger than a patch."""

    n_exits = 3

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.eval()

    def begin(self, batch):
        return batch

    def advance(self, exit_index, state):
        return torch.tanh(self.layers[exit_index](state))

    def head(self, exit_index, state):
        return 4 * state


def session_of(path):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def answers(path, x):
    """What the file says of each sample: outputs, exits, confidences."""
    session = session_of(path)
    found = [session.run(None, {"input": x[k : k + 1]}) for k in range(len(x))]
    return [np.concatenate(each) for each in zip(*found, strict=True)]


def same(folder, path, x, within=0):
    fast = onnx.EarlyExit.load(folder)
    outputs, exits, confidences = answers(path, x)
    wanted = fast(x)
    assert exits.tolist() == wanted.exits.tolist()
    np.testing.assert_allclose(outputs, wanted.outputs, rtol=1e-5, atol=1e-6)
    left = wanted.exits < fast.policy.n_exits - 1
    decided = wanted.confidences[np.arange(len(x)), np.minimum(wanted.exits, 1)]
    np.testing.assert_allclose(confidences[left], decided[left], rtol=0, atol=within)
    assert np.isnan(confidences[~left]).all()
    return exits


@pytest.fixture
def with_policy(exported, tmp_path):
    """Return a function that writes the network with another policy, and its single file."""

    def write(policy, folder=exported):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        onnx.save_policy(copy, policy)
        return copy, onnx.write_single_file(copy, tmp_path / "one.onnx")

    return write


def level_of(folder, x):
    """Return the threshold that half of the samples reach at the first exit."""
    return float(np.median(onnx.EarlyExit.load(folder)(x).confidences[:, 0]))


@pytest.mark.parametrize("score", SCORES)
def test_it_exits_where_the_stages_do(with_policy, score):
    x = inputs(40).numpy()
    level = level_of(with_policy(policy_of(0.0, 3, score))[0], x)
    exits = same(*with_policy(policy_of(level, 3, score)), x)
    assert len(set(exits.tolist())) > 1
    fields = [{"strict": True}, {"min_exit": 1}, {"temperatures": (2.0, 0.5, 3.0)}]
    for each in fields:
        same(*with_policy(policy_of(level, 3, score, **each)), x)


@pytest.fixture(scope="module")
def maps(tmp_path_factory):
    """The folder of a network of maps."""
    folder = tmp_path_factory.mktemp("maps") / "maps"
    onnx.export(Maps(), policy_of(0.0, 3, "mean_top1"), folder, example=images()[:2], threads=1)
    return folder


def learned_policy(level, score):
    """A policy whose score was learned, which its request holds."""
    request = ss.Calibration(ss.Promise("zero_one", epsilon=0.05), rule=score)
    return policy_of(level, 3, score.name, calibration=request)


@pytest.mark.parametrize("features", [("top1", "log_ratio", "entropy"), ("top_diff",)])
def test_a_learned_score_is_inside(with_policy, features):
    weights = [[0.3, *(0.4 + 0.1 * k for k in range(len(features)))]] * 2
    score = LearnedScore(features, weights)
    x = inputs(40).numpy()
    level = level_of(with_policy(learned_policy(0.0, score))[0], x)
    exits = same(*with_policy(learned_policy(level, score)), x, within=2**-24)
    assert len(set(exits.tolist())) > 1


def test_a_learned_score_of_maps(with_policy, maps):
    score = LearnedScore(("mean_top1", "patch_entropy"), [[0.3, 0.5, 0.2]])
    x = images().numpy()
    level = level_of(with_policy(learned_policy(0.0, score), maps)[0], x)
    exits = same(*with_policy(learned_policy(level, score), maps), x, within=2**-24)
    assert len(set(exits.tolist())) > 1


def images():
    return torch.randn(6, 3, 60, 55, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("score", OF_IMAGES)
def test_maps(with_policy, maps, score):
    x = images().numpy()
    level = level_of(with_policy(policy_of(0.0, 3, score), maps)[0], x)
    exits = same(*with_policy(policy_of(level, 3, score), maps), x)
    assert len(set(exits.tolist())) > 1


def test_quantised_stages(model, tmp_path):
    x = inputs(20)
    folder = tmp_path / "int8"
    onnx.export(model, None, folder, example=x, int8=True, threads=1)
    onnx.save_policy(folder, policy_of(0.0, 3))
    onnx.save_policy(folder, policy_of(level_of(folder, x.numpy()), 3))
    same(folder, onnx.write_single_file(folder, tmp_path / "one.onnx"), x.numpy())


def test_it_carries_its_certificate(exported, policy, tmp_path):
    path = onnx.write_single_file(exported, tmp_path / "one.onnx", examples=inputs(3).numpy())
    kept = session_of(path).get_modelmeta().custom_metadata_map
    assert kept["swiftsure.promise"] == str(policy)
    assert json.loads(kept["swiftsure.policy"])["score"] == "top1"


def test_invalid_logits_go_on(exported, tmp_path):
    x = np.full_like(inputs(1).numpy(), np.nan)
    path = onnx.write_single_file(exported, tmp_path / "one.onnx")
    assert answers(path, x)[1].tolist() == [2]


def test_a_folder_without_a_policy(model, tmp_path):
    onnx.export(model, None, tmp_path / "bare", example=inputs(3), threads=1)
    with pytest.raises(ValueError, match="policy"):
        onnx.write_single_file(tmp_path / "bare", tmp_path / "one.onnx")


def test_other_answers_than_the_stages_are_refused(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(single_file, "SHIFT", -(2.0**23))
    with pytest.raises(ValueError, match="takes exit"):
        onnx.write_single_file(exported, tmp_path / "one.onnx", examples=inputs(40).numpy())
    assert not (tmp_path / "one.onnx").exists()


def test_the_full_model_as_one_file_never_exits_early(tmp_path, exported):
    path = onnx.write_single_file(exported, tmp_path / "full.onnx", full=True)
    x = inputs(20).numpy()
    outputs, exits, confidences = answers(path, x)
    fast = onnx.EarlyExit.load(exported)
    assert set(exits.tolist()) == {fast.last}
    assert np.isnan(confidences).all()
    full = fast.full_outputs(x)[0]
    np.testing.assert_allclose(outputs, full, rtol=1e-5, atol=1e-6)


def test_no_path_of_this_machine_is_in_the_files(exported):
    for file in exported.glob("*.onnx"):
        assert b"site-packages" not in file.read_bytes()
        assert __file__.encode() not in file.read_bytes()
