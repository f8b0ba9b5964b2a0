"""Precomputed logits: pickles of arrays are converted, pickles of anything else are refused."""

import os
import pickle  # noqa: TID251
from pathlib import Path

import numpy as np
import pytest

import swiftsure as ss
from experiments.image_classification.pickled_logits import (
    convert_logits,
    main,
    read_pickled_logits,
)


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


class Call:
    """A pickled call of any name with any arguments."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def one_line(source, match):
    with pytest.raises(ValueError, match=match) as caught:
        read_pickled_logits(source)
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "logits",
    [
        Call(np.ndarray, (3, 10, 4)),
        Call(np.empty(0).__reduce__()[0], np.ndarray, (3, 10, 4), b"f"),
        Call(np.dtype, "no such dtype"),
        Call(np.empty(0).__reduce_ex__(5)[0], b"1234", np.dtype("f4"), (3, 10, 4), "C"),
    ],
)
@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL])
def test_calls_that_make_no_array_are_refused(tmp_path, logits, protocol):
    one_line(pickled(tmp_path, (logits, np.zeros(10)), protocol), "not a pickle of arrays")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\x80\x05.",  # an empty stack
        b"\x80\x05K\x01r\xff\xff\xff\x7f.",  # a memo number of 2 billion
        b"\x80\x05\x8e" + b"\xff" * 7 + b"\x7f.",  # bytes of a huge length
        b"\x80\x05\x8c\x05numpy\x8c\x01x\x93.",
        b"\x80\x05N}b.",
        b"c\xc3\nx\n.",
        b"(" * 100_000,
        b"\x80\x05" + b"]" * 10_000 + b"a" * 9_999 + b".",
        b"\x80\x05cnumpy\ndtype\nK\x01b.",
    ],
)
def test_files_that_are_no_pickle(tmp_path, content):
    path = tmp_path / "file.p"
    path.write_bytes(content)
    one_line(path, "not a pickle of arrays|must hold")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x, y: (x, y + 0.5), "target 0 is"),
        (lambda x, y: (x, np.where(y == y[3], np.nan, y)), "is nan"),
        (lambda x, y: (x, y.astype(np.uint64) + np.uint64(2**63)), "target 0 is"),
        (lambda x, y: (x, y + 5), "below 5"),
        (lambda x, y: (x, np.full(40, np.inf)), "is inf"),
        (lambda x, y: (x, y.astype(str)), "targets"),
        (lambda x, y: (x * np.nan, y), "finite"),
        (lambda x, y: (x + np.inf, y), "finite"),
        (lambda x, y: (x.astype(np.float64) * 1e300, y), "finite in float32"),
        (lambda x, y: (-np.abs(x.astype(np.float64)) * 1e300, y), "finite in float32"),
        (lambda x, y: (x[:, :0], y[:0]), "shape"),
        (lambda x, y: (x.astype(object), y), "logits"),
        (lambda x, y: ([[1.0], [1.0, 2.0]], y), "rectangular"),
        (lambda x, y: (x, {"a": 1}), "targets"),
        (lambda x, y: (x, None), "targets"),
    ],
)
def test_values_that_no_record_can_hold(tmp_path, change, match):
    one_line(pickled(tmp_path, change(*published())), match)


def test_masked_classes_and_missing_labels_stay(tmp_path):
    logits, targets = published()
    logits[:, :, 0], targets[3] = -np.inf, -1
    found, labels = read_pickled_logits(pickled(tmp_path, (logits, targets)))
    np.testing.assert_array_equal(found, logits.transpose(1, 0, 2))
    np.testing.assert_array_equal(labels, targets)


def test_tensors_of_every_float_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    logits, targets = published()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        made = torch.from_numpy(logits).to(dtype).requires_grad_()
        found, _ = read_pickled_logits(pickled(tmp_path, (made, torch.from_numpy(targets))))
        np.testing.assert_array_equal(found, made.detach().float().numpy().transpose(1, 0, 2))


def test_an_exit_per_list_entry(tmp_path):
    torch = pytest.importorskip("torch")
    logits, targets = published()
    for parts in (list(logits), [torch.from_numpy(each) for each in logits], logits.tolist()):
        found, _ = read_pickled_logits(pickled(tmp_path, (parts, targets.tolist())))
        np.testing.assert_array_equal(found, logits.transpose(1, 0, 2))


def test_repeated_parts_do_not_fill_the_memory(tmp_path):
    torch = pytest.importorskip("torch")
    lists = [0.0]
    for _ in range(30):
        lists = [lists] * 10
    wide = torch.zeros(1).expand(3, 10**6, 10**6)
    for logits in (lists, wide):
        one_line(pickled(tmp_path, (logits, np.zeros(3))), "must hold arrays of numbers")


def test_the_command_writes_what_calibrate_reads(tmp_path, monkeypatch, capsys):
    logits, targets = published()
    source, target = pickled(tmp_path, (logits, targets)), tmp_path / "logits.npz"
    monkeypatch.setattr("sys.argv", ["pickled_logits", str(source), "-o", str(target)])
    main()
    assert "40 samples, 3 exits, 5 classes" in capsys.readouterr().out
    assert ss.load_record(target).n == 40
