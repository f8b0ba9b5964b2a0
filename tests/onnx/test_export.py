"""Export: it checks itself, names what it cannot do, and notices damaged folders."""

import hashlib
import json
import re
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import swiftsure as ss
from swiftsure import onnx
from swiftsure._lib.files import json_checksum
from swiftsure.onnx import exporting
from swiftsure.onnx.folder import (
    MANIFEST,
    POLICY,
    RUNTIME,
    RuntimeConfig,
    read_manifest,
    write_folder,
)
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


def test_a_signed_folder_runs_no_other_network(exported, policy, tmp_path, monkeypatch):
    manifest, folder = read_manifest(exported), tmp_path / "signed"
    monkeypatch.setenv("SWIFTSURE_POLICY_KEY", "secret")
    with pytest.raises(ValueError, match=r"manifest\.json is not signed"):
        onnx.EarlyExit.load(exported, policy)
    write_folder(only_files(exported, tmp_path), folder, manifest, RuntimeConfig(threads=1))
    onnx.save_policy(folder, policy)
    assert onnx.EarlyExit.load(folder).policy == policy
    one, two = ((folder / f"head-{k}.onnx").read_bytes() for k in (1, 2))
    (folder / "head-1.onnx").write_bytes(two)
    (folder / "head-2.onnx").write_bytes(one)
    content = json.loads((folder / MANIFEST).read_text())
    sums = content["files"]
    sums["head-1.onnx"], sums["head-2.onnx"] = sums["head-2.onnx"], sums["head-1.onnx"]
    reseal(folder, content)
    with pytest.raises(ValueError, match=r"manifest\.json does not fit its signature"):
        onnx.EarlyExit.load(folder)
    monkeypatch.delenv("SWIFTSURE_POLICY_KEY")
    assert onnx.EarlyExit.load(folder).policy == policy  # a checksum alone can be made anew


def only_files(folder, tmp_path):
    """Copy what `export` hands to `write_folder`."""
    ignored = shutil.ignore_patterns(MANIFEST, RUNTIME)
    return shutil.copytree(folder, tmp_path / "made", ignore=ignored)


def reseal(folder, content):
    """Write a manifest with the checksum that fits it."""
    rest = {k: v for k, v in content.items() if k not in ("checksum", "signature")}
    (folder / MANIFEST).write_text(json.dumps(content | {"checksum": json_checksum(rest)}))


def outside(content):
    content["parts"][0]["stage"] = "../other/stage-1.onnx"


def outside_with_a_checksum(content):
    outside(content)
    content["files"]["../other/stage-1.onnx"] = content["files"]["stage-1.onnx"]


def unlisted(content):
    del content["files"]["head-2.onnx"]


def no_such_array(content):
    content["parts"][1]["state"] = [-9]


def odd_form(content):
    content["inputs"] = {"dtype": "object", "shape": [6]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (outside, "has no checksum of '../other/stage-1.onnx', which would run"),
        (outside_with_a_checksum, "'../other/stage-1.onnx', which is not in the folder"),
        (unlisted, "has no checksum of 'head-2.onnx', which would run"),
        (no_such_array, "parts.1.state names an array that does not exist"),
        (odd_form, "inputs: a form must be an array"),
        (lambda content: content["flops"].pop(), "flops must be 3"),
    ],
)
def test_a_manifest_that_no_export_writes_is_refused(exported, tmp_path, change, why):
    folder = shutil.copytree(exported, tmp_path / "copy")
    shutil.copytree(exported, tmp_path / "other")
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    reseal(folder, content)
    with pytest.raises(ValueError, match=re.escape(why)):
        onnx.EarlyExit.load(folder)


class Stopped(BaseException):
    """The process ends here."""


@contextmanager
def stop_at(monkeypatch, point):
    """Stop before the change number `point` to a folder: a file replaced, or removed."""
    done = []

    def counted(change):
        def changed(*given, **more):
            if len(done) == point:
                raise Stopped
            done.append(given)
            return change(*given, **more)

        return changed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        yield


def test_a_stop_while_a_policy_is_saved(exported, policy, tmp_path, monkeypatch):
    other = policy_of(0.4, 3)
    for point in range(20):
        folder = shutil.copytree(exported, tmp_path / str(point))
        try:
            with stop_at(monkeypatch, point):
                onnx.save_policy(folder, other)
        except Stopped:
            assert onnx.EarlyExit.load(folder).policy == policy
            onnx.save_policy(folder, other)
        else:
            break
    assert onnx.EarlyExit.load(folder).policy == other
    assert point == 1  # one change in all


@pytest.mark.parametrize("with_policy", [True, False])
def test_a_stop_while_a_folder_is_replaced(exported, policy, tmp_path, monkeypatch, with_policy):
    """Both networks have the same form, so that only checksums tell their files apart."""
    manifest, config, other = read_manifest(exported), RuntimeConfig(threads=1), policy_of(0.4, 3)
    made = only_files(exported, tmp_path)
    one, two = ((made / f"head-{k}.onnx").read_bytes() for k in (1, 2))
    (made / "head-1.onnx").write_bytes(two)
    (made / "head-2.onnx").write_bytes(one)
    (made / POLICY).unlink()
    if with_policy:
        other.save(made / POLICY)
    whole = 0
    for point in range(40):
        folder = shutil.copytree(exported, tmp_path / str(point))
        (folder / "stage-9.onnx").write_bytes(b"of a larger model")
        content = json.loads((folder / MANIFEST).read_text())
        content["files"]["stage-9.onnx"] = hashlib.sha256(b"of a larger model").hexdigest()
        reseal(folder, content)
        try:
            with stop_at(monkeypatch, point):
                write_folder(made, folder, manifest, config)
        except Stopped:
            old = (folder / "head-1.onnx").read_bytes() == one
            with suppress(ValueError):
                found = onnx.EarlyExit.load(folder).policy
                assert found == (policy if old else other)
                whole += 1
            write_folder(made, folder, manifest, config)
        else:
            break
        read_manifest(folder)
    assert 8 < point < 39
    assert whole >= 1  # before the first change
    assert not (folder / "stage-9.onnx").exists()
    assert (folder / POLICY).exists() is with_policy


def test_a_folder_with_a_damaged_manifest_is_exported_again(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "copy")
    (folder / MANIFEST).write_text("{")
    made = only_files(exported, tmp_path)
    write_folder(made, folder, read_manifest(exported), RuntimeConfig(threads=1))
    assert onnx.EarlyExit.load(folder).stages.n_exits == 3


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
