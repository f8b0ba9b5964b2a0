"""Weights in files: what `save` wrote is read again, and anything else is refused in one line."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftsure.text import ExitHeads, MetaClassifier
from swiftsure.text.weights import save_weights


def heads():
    return {"1.weight": torch.eye(4), "1.bias": torch.zeros(4)}


def meta():
    return {
        "0.weight": torch.eye(4),
        "0.bias": torch.zeros(4),
        "2.weight": torch.ones(2, 4),
        "2.bias": torch.zeros(2),
    }


def expect(kind, path, match):
    with pytest.raises(ValueError, match=match) as caught:
        kind.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_of_every_float_are_read(tmp_path, dtype):
    path = tmp_path / "weights"
    for kind, weights in ((ExitHeads, heads()), (MetaClassifier, meta())):
        given = {name: value.to(dtype) for name, value in weights.items()}
        save_weights(path, given, ["b", "a"])
        found = kind.load(path)
        assert {each.dtype for each in found.parameters()} == {dtype}
        assert found.trained_on == {"a", "b"}


@pytest.mark.parametrize(
    ("kind", "weights", "changes"),
    [
        (kind, weights, changes)
        for kind, weights, cases in [
            (
                ExitHeads,
                heads,
                [
                    {"1.weight": None},
                    {"1.bias": None},
                    {"1.weight": None, "1.bias": None},
                    {"2.bias": torch.zeros(4)},
                    {"x.weight": torch.eye(4)},
                    {"01.weight": torch.eye(4), "01.bias": torch.zeros(4)},
                    {"-1.weight": torch.eye(4), "-1.bias": torch.zeros(4)},
                    {"1.weight": torch.ones(4)},
                    {"1.weight": torch.tensor(1.0), "1.bias": torch.tensor(1.0)},
                    {"1.weight": torch.ones(4, 5)},
                    {"1.weight": torch.ones(1, 30_000), "1.bias": None},
                    {"1.weight": torch.zeros(0, 0), "1.bias": torch.zeros(0)},
                    {"1.weight": torch.eye(4) * torch.nan},
                    {"1.bias": torch.full((4,), torch.inf)},
                    {"1.weight": torch.eye(4).int(), "1.bias": torch.zeros(4).int()},
                    {"1.weight": torch.eye(4).half()},
                ],
            ),
            (
                MetaClassifier,
                meta,
                [
                    {"0.weight": None},
                    {"2.weight": None},
                    {"2.bias": None},
                    {"0.bias": None},
                    {"1.weight": torch.eye(4)},
                    {"0.weight": torch.ones(4)},
                    {"2.weight": torch.ones(4)},
                    {"2.weight": torch.tensor(1.0)},
                    {"2.weight": torch.ones(3, 4)},
                    {"0.weight": torch.ones(1, 30_000)},
                    {"2.bias": torch.tensor([torch.nan, 0.0])},
                ],
            ),
        ]
        for changes in cases
    ],
)
def test_other_weights_are_refused_before_anything_is_built(
    tmp_path, monkeypatch, kind, weights, changes
):
    path = tmp_path / "weights"
    held = {k: v for k, v in (weights() | changes).items() if v is not None}
    save_weights(path, held, [])
    monkeypatch.setattr(torch.nn.Linear, "__init__", None)
    expect(kind, path, "does not hold such weights")


def test_changed_weights_are_refused(tmp_path):
    path = tmp_path / "weights"
    ExitHeads(4, [1], trained_on=["a"]).save(path)
    weights = load_file(path)
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        note = json.loads(file.read(size))["__metadata__"]
    save_file(weights, path, metadata=note)
    assert ExitHeads.load(path).trained_on == {"a"}
    for other in (note | {"trained_on": "[]"}, {"trained_on": note["trained_on"]}, None):
        save_file(weights, path, metadata=other)
        expect(ExitHeads, path, "checksum does not fit")
    weights["1.bias"] += 1
    save_file(weights, path, metadata=note)
    expect(ExitHeads, path, "checksum does not fit")


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[1]", "null", "x"])
def test_odd_hashes_are_refused(tmp_path, text):
    from swiftsure.text.weights import _checksum

    path = tmp_path / "weights"
    save_file(heads(), path, {"trained_on": text, "checksum": _checksum(heads(), text)})
    expect(ExitHeads, path, "does not hold such weights")


def test_published_weights_of_another_shape():
    for changes in ({"2.weight": torch.ones(3, 4)}, {"4.weight": torch.eye(4)}):
        held = {f"cm_head.{name}": value for name, value in (meta() | changes).items()}
        with pytest.raises(ValueError, match="`state_dict` must hold a classifier"):
            MetaClassifier.from_published(held)
