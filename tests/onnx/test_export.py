"""Export: it checks itself, names what it cannot do, and notices damaged folders."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import swiftsure as ss
from swiftsure import onnx
from swiftsure.onnx import exporting
from swiftsure.onnx.folder import MANIFEST, read_manifest
from swiftsure.torch import EarlyExit, Scored, Staged, collect
from tests.torch.builders import inputs, labels, network, policy_of


class Own(Staged):
    """A user's own model: dicts, several outputs, its own confidence, a state handed on."""

    n_exits = 2

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def begin(self, batch):
        return {"x": batch["x"], "times": batch["times"], "hidden": self.first(batch["x"])}

    def advance(self, exit_index, state):
        if exit_index == 0:
            return {**state, "hidden": state["hidden"].relu()}
        return {"x": state["x"], "hidden": self.second(state["hidden"]).relu()}

    def head(self, exit_index, state):
        logits = 6 * self.out(state["hidden"])
        return Scored({"logits": logits, "sum": state["x"].sum(1)}, logits.softmax(1).amax(1))


def own_batch(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(n, 4, generator=generator), "times": torch.arange(n)}


def two_exits(stage, head=None):
    """A network whose second stage is given."""
    heads = [nn.Linear(8, 3), head or nn.Linear(8, 3)]
    return Staged.from_sequential([nn.Linear(6, 8), stage], heads).eval()


class Sorts(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x[:, :, None])[:, :1] * x


class Drifts(nn.Module):
    """Gives other numbers in a trace than in PyTorch."""

    def forward(self, x):
        return x + 1.0 if torch.compiler.is_compiling() else 1.0 * x


class AddsLittle(nn.Module):
    """Adds 1e-8, as layers that divide do; graph optimisers may take it for 0."""

    def forward(self, x):
        return x + (0.0 * x + 1e-8) * 1e8


class FixedBatch(nn.Module):
    def forward(self, x):
        return x * len(x)


def test_a_model_of_ones_own(tmp_path):
    torch.manual_seed(0)
    model, x = Own().eval(), own_batch(12)
    policy = policy_of(0.6, 2, score="model")
    manifest = onnx.export(model, policy, tmp_path / "own", example=x, threads=1)
    assert manifest.parts[1].state == [-1, 0]  # handed on, not copied by the graph
    fast = onnx.EarlyExit.load(tmp_path / "own")
    other = own_batch(9, seed=1)
    out = fast({name: value.numpy() for name, value in other.items()})
    expected = EarlyExit(model, policy)(other)
    assert out.exits.tolist() == expected.exits.tolist()
    assert 0 < out.exits.sum() < 9
    assert list(out.outputs) == ["logits", "sum"]
    for name, value in expected.outputs.items():
        np.testing.assert_allclose(out.outputs[name], value, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="a dict with x, times"):
        fast(other["x"].numpy())
    with pytest.raises(ValueError, match="one number of samples"):
        fast({"x": other["x"].numpy(), "times": np.arange(3)})


def test_an_operator_without_an_onnx_form_is_named(tmp_path):
    with pytest.raises(onnx.ExportError, match=r"Stage 2 cannot be exported: the operator .*svd"):
        onnx.export(two_exits(Sorts()), None, tmp_path / "f", example=inputs(4))
    assert not (tmp_path / "f").exists()


def test_a_fixed_batch_size_is_refused(tmp_path):
    with pytest.raises(onnx.ExportError, match=r"Stage 2 cannot .* batch size is a constant .*len"):
        onnx.export(two_exits(FixedBatch()), None, tmp_path / "f", example=inputs(4))


def test_small_constants_are_kept(tmp_path):
    manifest = onnx.export(two_exits(AddsLittle()), None, tmp_path / "f", example=inputs(4))
    assert manifest.check.largest_difference < 1e-4


def test_other_outputs_than_in_pytorch_are_refused(tmp_path):
    with pytest.raises(onnx.ExportError, match=r"Exit 2 gives another output .* sample 0"):
        onnx.export(two_exits(Drifts()), None, tmp_path / "f", example=inputs(4))
    assert not (tmp_path / "f").exists()


def test_other_exits_than_in_pytorch_are_refused(exported, model, policy, monkeypatch):
    """As if a sample's confidence had fallen on the other side of the threshold."""
    fast = onnx.EarlyExit.load(exported)
    out = EarlyExit(model, policy)(inputs(20))
    exits, seen = out.exits.numpy(), out.confidences.numpy()
    assert fast.compare_exits(exits, exits, seen) == 0
    other = exits.copy()
    other[7] = 2 - other[7] if other[7] != 1 else 0
    with pytest.raises(ValueError, match="Sample 7 takes exit"):
        fast.compare_exits(other, exits, seen)
    level = np.float32(policy.threshold)
    seen[7] = level  # too near to say
    assert fast.compare_exits(other, exits, seen) == 1


@pytest.mark.slow
def test_int8_needs_a_policy_of_its_own(model, policy, tmp_path):
    x, y = inputs(300), labels(300)
    folder = tmp_path / "int8"
    with pytest.raises(ValueError, match="`policy` must be None with int8"):
        onnx.export(model, policy, folder, example=x[:8], int8=True)
    manifest = onnx.export(model, None, folder, example=x[:8], int8=True, threads=1)
    assert manifest.check is None
    with pytest.raises(ValueError, match="`policy` must be given"):
        onnx.EarlyExit.load(folder)
    of_network = ss.calibrate(
        collect(model, [(x, y)]), risk="consistency", loss="brier", epsilon=0.5
    )
    with pytest.raises(ValueError, match="`policy` was made for another model"):
        onnx.EarlyExit.load(folder, of_network)
    # A sample's confidence does not depend on its batch: the record is about any batch size.
    with pytest.raises(ValueError, match="`engine` must be 'local' for an exported model"):
        onnx.collect(folder, [(x, y)], engine="ray")
    record = onnx.collect(folder, [(x, y)], losses=["brier"])
    singly = onnx.collect(folder, [(x[k : k + 1], y[k : k + 1]) for k in range(40)], ["brier"])
    assert np.array_equal(record.confidences["top1"][:40], singly.confidences["top1"])
    assert not np.allclose(
        record.confidences["top1"], collect(model, [(x, y)]).confidences["top1"], atol=1e-4
    )
    onnx.save_policy(folder, ss.calibrate(record, risk="consistency", loss="brier", epsilon=0.5))
    fast = onnx.EarlyExit.load(folder)
    expected = ss.exits.exit_indices(record.confidences["top1"], fast.policy.thresholds)
    assert fast(x.numpy()).exits.tolist() == expected.tolist()


def test_arguments_are_checked(model, policy, tmp_path):
    with pytest.raises(ValueError, match="at least 2 samples"):
        onnx.export(model, policy, tmp_path, example=inputs(1))
    with pytest.raises(ValueError, match="made for 4 exits"):
        onnx.export(model, policy_of(0.5, 4), tmp_path, example=inputs(4))
    with pytest.raises(ValueError, match="must be made for float32"):
        onnx.export(model, policy_of(0.5, 3, dtype="bfloat16"), tmp_path, example=inputs(4))
    with pytest.raises(ValueError, match="training mode"):
        onnx.export(network(n_exits=3).train(), None, tmp_path, example=inputs(4))
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------- the folder


def test_the_manifest_says_what_was_checked(exported, model):
    manifest = read_manifest(exported)
    assert manifest.check.samples == 40
    assert 0 < manifest.check.largest_difference < 1e-4
    assert manifest.network.startswith("sha256:")
    assert set(manifest.files) == {
        *(f"{kind}-{k}.onnx" for kind in ("stage", "head") for k in (1, 2, 3)),
        "check.npz",
        "policy.json",
    }


@pytest.mark.parametrize("name", ["stage-2.onnx", "head-1.onnx", "policy.json", "check.npz"])
@pytest.mark.parametrize("damage", ["change", "remove"])
def test_damaged_folders_are_refused(exported, tmp_path, name, damage):
    folder = shutil.copytree(exported, tmp_path / "copy")
    file = folder / name
    if damage == "remove":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(ValueError, match=name):
        onnx.EarlyExit.load(folder)


def test_an_edited_manifest_is_refused(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "copy")
    content = json.loads((folder / MANIFEST).read_text())
    content["int8"] = True
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="damaged: its checksum differs"):
        onnx.EarlyExit.load(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match="has no manifest"):
        onnx.EarlyExit.load(folder)


def test_runtime_settings_may_be_edited(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "copy")
    (folder / "runtime.json").write_text('{"providers": ["cpu"], "threads": 2}')
    assert onnx.EarlyExit.load(folder)(inputs(3).numpy()).exits.shape == (3,)
    (folder / "runtime.json").write_text('{"providers": ["cpu"], "threads": 0}')
    with pytest.raises(ValueError, match=r"runtime\.json is not valid: threads"):
        onnx.EarlyExit.load(folder)


def test_the_error_names_the_operator_that_failed():
    inner = RuntimeError("No ONNX function found for <OpOverload(op='aten.kthvalue', ...)>")
    assert "aten.kthvalue" in exporting._reason(inner)
    assert "ValueError: odd" in exporting._reason(ValueError("odd\nmore"))
