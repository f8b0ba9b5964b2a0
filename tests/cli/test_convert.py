"""`swiftsure convert`: published logits become a file that the other verbs read."""

import json
import pickle  # noqa: TID251

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.records.files import keeps_order


def test_converted_logits_calibrate(run, folder, sample):
    content = (sample.logits.transpose(1, 0, 2), sample.labels)
    (folder / "imagenet.p").write_bytes(pickle.dumps(content))
    done = run("convert", "imagenet.p", "-o", "converted.npz")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines() == [
        "800 samples, 4 exits, 10 classes.",
        "Wrote converted.npz",
    ]
    assert run("calibrate", "converted.npz", "--loss", "zero_one", "--epsilon", "0.1").status == 0


def test_json(run, folder, sample):
    (folder / "a.p").write_bytes(pickle.dumps((sample.logits.transpose(1, 0, 2), sample.labels)))
    shown = json.loads(run("convert", "a.p", "--json").out)
    assert shown == {"samples": 800, "exits": 4, "classes": 10, "file": "logits.npz"}


def test_code_is_refused(run, folder, made):
    (folder / "a.p").write_bytes(b"cos\nsystem\n(S'touch attacked'\ntR.")
    done = run("convert", "a.p", "-o", "b.npz")
    assert done.status == 2
    assert "it asks for os.system" in done.err
    assert not (folder / "attacked").exists()
    assert not (folder / "b.npz").exists()


def test_other_arrays_are_refused(run, folder):
    (folder / "a.p").write_bytes(pickle.dumps((np.zeros((2, 3)), np.zeros(3))))
    done = run("convert", "a.p")
    assert done.status == 2
    assert "(exits, samples, classes)" in done.err


@pytest.mark.parametrize("source", ["arrays.npz", "logits.npz", "thresholds.parquet"])
def test_a_record_becomes_a_file_that_keeps_its_order(run, source):
    done = run("convert", source, "-o", "converted.parquet")
    record = ss.load_record("converted.parquet")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"{record.n} samples, tested in the order of seed {record.order.seed}.",
        "Wrote converted.parquet",
    ]
    assert keeps_order("converted.parquet")
    shown = json.loads(run("convert", source, "-o", "other.parquet", "--json").out)
    assert shown["samples"] == record.n
    assert shown["seed"] == ss.load_record("other.parquet").order.seed


def test_a_pickle_does_not_become_a_record(run, folder):
    (folder / "a.p").write_bytes(pickle.dumps((np.zeros((2, 3, 4)), np.zeros(3))))
    done = run("convert", "a.p", "-o", "a.parquet")
    assert done.status == 2
    assert "not a readable Parquet file" in done.err
