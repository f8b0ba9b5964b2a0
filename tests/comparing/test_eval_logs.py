"""Scores are read from tables and from the logs of evaluation frameworks."""

import json
from pathlib import Path

import numpy as np
import pytest

from swiftsure.comparing import read_columns

INSPECT = Path(__file__).parent / "inspect.eval"
"""Written by inspect-ai: six samples, the second of them wrong."""


def lm_eval(path, scores, **more):
    lines = [
        {"doc_id": k, "doc_hash": f"{k:064x}", "filter": "none", "exact_match": each, **more}
        for k, each in enumerate(scores)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def inspect_json(path, values, epochs=1):
    samples = [
        {"id": f"q{k}", "epoch": turn + 1, "scores": {"match": {"value": value}}}
        for turn in range(epochs)
        for k, value in enumerate(values)
    ]
    path.write_text(json.dumps({"version": 2, "samples": samples}))
    return path


def test_logs_of_lm_evaluation_harness(tmp_path):
    a = lm_eval(tmp_path / "a.jsonl", [1, 0, 1])
    b = tmp_path / "b.jsonl"  # in another order
    b.write_text("\n".join(reversed(lm_eval(b, [0, 1, 1]).read_text().splitlines())))
    found = read_columns({"large": a, "small": b}, "exact_match")
    np.testing.assert_array_equal(found.scores["large"], [1, 0, 1])
    np.testing.assert_array_equal(found.scores["small"], [0, 1, 1])
    assert found.groups is None


def test_one_of_several_filters(tmp_path):
    strict = lm_eval(tmp_path / "a.jsonl", [1, 0], filter="strict-match").read_text()
    lax = lm_eval(tmp_path / "a.jsonl", [1, 1], filter="flexible-extract").read_text()
    (tmp_path / "a.jsonl").write_text(strict + lax)
    logs = {"a": tmp_path / "a.jsonl", "b": tmp_path / "a.jsonl"}
    with pytest.raises(ValueError, match="filtered in several ways"):
        read_columns(logs, "exact_match")
    found = read_columns(logs, "exact_match", filter_name="strict-match")
    np.testing.assert_array_equal(found.scores["a"], [1, 0])


def test_archives_of_inspect():
    found = read_columns({"a": INSPECT, "b": INSPECT}, "match")
    assert found.ids == [f"q{k}" for k in range(6)]
    np.testing.assert_array_equal(found.scores["a"], [1, 0, 1, 1, 1, 1])


def test_logs_of_inspect_in_json(tmp_path):
    a = inspect_json(tmp_path / "a.json", ["C", "I", "P", 0.25])
    found = read_columns({"a": a, "b": a}, "match")
    np.testing.assert_array_equal(found.scores["a"], [1, 0, 0.5, 0.25])


def test_repeated_samples_are_groups(tmp_path):
    a = inspect_json(tmp_path / "a.json", ["C", "I"], epochs=3)
    found = read_columns({"a": a, "b": a}, "match")
    record = found.record("match")
    assert (record.n, record.n_units) == (6, 2)


def test_logs_of_other_samples_are_refused(tmp_path):
    a = lm_eval(tmp_path / "a.jsonl", [1, 0, 1])
    b = lm_eval(tmp_path / "b.jsonl", [1, 0])
    with pytest.raises(ValueError, match="logs of the same samples, but 1 samples are only in"):
        read_columns({"a": a, "b": b}, "exact_match")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.jsonl", '{"doc_id": 0, "acc": 1}', "has no 'match'"),
        ("a.jsonl", '{"id": 0}', "not a sample of lm-evaluation-harness"),
        ("a.jsonl", "", "holds no samples"),
        ("a.jsonl", "{", "a.jsonl: "),
        ("a.json", '{"samples": []}', "holds no samples"),
        ("a.json", '{"samples": [{"id": 1, "scores": {}}]}', "has no 'match'"),
        ("a.json", '{"samples": [{"id": 1, "error": {"message": "x"}}]}', "ended in an error"),
        ("a.eval", "no archive", "a.eval: "),
        ("a.jsonl", '{"doc_id": 0, "match": 1}\n{"doc_id": 0, "match": 1}', "twice"),
    ],
)
def test_damaged_logs(tmp_path, name, text, error):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=error):
        read_columns({"a": tmp_path / name, "b": tmp_path / name}, "match")


@pytest.mark.parametrize("name", ["none.csv", "scores.txt"])
def test_no_table(tmp_path, name):
    with pytest.raises(ValueError, match="`source` must be"):
        read_columns(tmp_path / name, "f1")
