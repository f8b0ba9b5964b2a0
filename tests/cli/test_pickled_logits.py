"""Precomputed logits: pickles of arrays are converted, pickles of anything else are refused."""

import os
import pickle  # noqa: TID251
from pathlib import Path

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.cli.pickled_logits import convert_logits, read_pickled_logits


def published(n=40, exits=3, classes=5):
    rng = np.random.default_rng(0)
    return rng.normal(size=(exits, n, classes)).astype(np.float32), rng.integers(0, classes, n)


def pickled(tmp_path: Path, content, protocol=pickle.DEFAULT_PROTOCOL) -> Path:
    path = tmp_path / "imagenet.p"
    path.write_bytes(pickle.dumps(content, protocol))
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_become_a_record(tmp_path, protocol):
    logits, targets = published()
    source = pickled(tmp_path, (logits, targets.astype(np.float64)), protocol)
    assert convert_logits(source, tmp_path / "logits.npz") == (40, 3, 5)
    record = ss.ExitRecord.load(tmp_path / "logits.npz")
    expected = ss.ExitRecord.from_logits(logits.transpose(1, 0, 2), targets)
    for loss in expected.losses:
        np.testing.assert_array_equal(record.losses[loss], expected.losses[loss])
    np.testing.assert_array_equal(record.confidences["top1"], expected.confidences["top1"])


def test_a_third_entry_is_left_out(tmp_path):
    logits, targets = published()
    found, labels = read_pickled_logits(pickled(tmp_path, (logits, targets, {"time": [0.1]})))
    np.testing.assert_array_equal(found, logits.transpose(1, 0, 2))
    np.testing.assert_array_equal(labels, targets)


def test_tensors_are_read_too(tmp_path):
    torch = pytest.importorskip("torch")
    logits, targets = published()
    source = pickled(tmp_path, (torch.from_numpy(logits), torch.from_numpy(targets)))
    found, labels = read_pickled_logits(source)
    np.testing.assert_array_equal(found, logits.transpose(1, 0, 2))
    np.testing.assert_array_equal(labels, targets)


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


class HiddenAttack:
    """An attack inside a tensor's own bytes, which are a pickle once more."""

    def __reduce__(self):
        torch = pytest.importorskip("torch")
        return torch.storage._load_from_bytes, (pickle.dumps(Attack(), 2),)


@pytest.mark.parametrize("make", [Attack, HiddenAttack])
def test_code_is_never_run(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    logits, targets = published()
    source = pickled(tmp_path, (logits, targets, make()))
    with pytest.raises(ValueError, match="not a pickle of arrays"):
        read_pickled_logits(source)
    assert not (tmp_path / "attacked").exists()


def test_arrays_of_objects_bring_no_objects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = pickled(tmp_path, (np.asarray([Attack()], object), np.zeros(1)))
    with pytest.raises(ValueError, match=r"asks for \w+\.mkdir"):
        convert_logits(source, tmp_path / "logits.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["imagenet.p"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"logits": 1}, r"must hold \(logits, targets\), but holds a dict"),
        ((np.zeros((3, 4)), np.zeros(4)), r"shape \(exits, samples, classes\).*\(3, 4\)"),
        ((np.zeros((3, 4, 5)), np.zeros(3)), r"one target per sample, \(4,\).*\(3,\)"),
        (([1, 2], [3]), "shape"),
    ],
)
def test_other_contents_are_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_pickled_logits(pickled(tmp_path, content))


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"hello", b"PK\x03\x04"])
def test_foreign_and_truncated_files_are_refused(tmp_path, data):
    (tmp_path / "a.p").write_bytes(data)
    with pytest.raises(ValueError, match="not a pickle of arrays"):
        convert_logits(tmp_path / "a.p", tmp_path / "logits.npz")
    assert not (tmp_path / "logits.npz").exists()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="`source` must be a readable file"):
        read_pickled_logits(tmp_path / "no.p")
