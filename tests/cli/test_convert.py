"""`swiftsure convert`: a record becomes a file that keeps its order."""

import json
import pickle  # noqa: TID251

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.records.files import keeps_order


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


@pytest.mark.parametrize("name", ["a.p", "a.npz"])
def test_a_pickle_does_not_become_a_record(run, folder, name):
    (folder / name).write_bytes(pickle.dumps((np.zeros((2, 3, 4)), np.zeros(3))))
    done = run("convert", name, "-o", "a.parquet")
    assert done.status == 2
    assert "not a readable" in done.err
