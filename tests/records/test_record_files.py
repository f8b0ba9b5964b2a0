"""Records as files: what goes in comes out, and what is no record is told so."""

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import swiftsure as ss
from swiftsure.records import files
from tests.builders import random_logits, random_record

TABLES = ("confidences", "losses", "inconsistencies", "features", "costs")


def exit_record(**changes):
    rng = np.random.default_rng(0)
    logits, labels = random_logits(n=30)
    made = ss.ExitRecord.from_logits(logits, labels, score=["top1", "entropy"])
    arguments = {
        "confidences": made.confidences,
        "losses": {**made.losses, "rouge/l": rng.random((30, 4)).astype(np.float32)},
        "inconsistencies": made.inconsistencies,
        "costs": {"flops": [1 / 3, 1.5, 2, 3], "ms": rng.random((30, 4)).cumsum(axis=1)},
        "loss_ranges": {"rouge/l": (-0.5, 1.25)},
        "inconsistency_ranges": {"brier": ss.LossRange(-2, 2)},
        "ids": [f"sample-{i} λ" for i in range(30)],
        "groups": np.arange(30, dtype=np.int32) // 3,
        "fingerprint": "sha256:abc",
        "temperatures": (1.0, 0.5, 2.0, 1 / 3),
        "dtype": "bfloat16",
    }
    return ss.ExitRecord(**{**arguments, **changes})


def threshold_record(**changes):
    rng = np.random.default_rng(0)
    arguments = {
        "thresholds": [None, 0.9, 1 / 3],
        "losses": {"bleu": rng.random((8, 3))},
        "inconsistencies": {"bleu": np.column_stack([np.zeros(8), rng.random((8, 2))])},
        "costs": {"layers": [3, 2, 1], "flops": rng.random((8, 3))},
        "loss_ranges": {"bleu": ss.LossRange(0, 1)},
        "ids": np.arange(8, dtype=np.uint16)[::-1],
        "groups": list("aabbccdd"),
        "dial": "rollback",
        "settings": {"fallback": 0.4, "draft": "small", "depth": [1, 2], "on": True, "none": None},
    }
    return ss.ThresholdRecord(**{**arguments, **changes})


def same_array(first, second):
    assert type(first) is type(second) is np.ndarray
    assert first.dtype == second.dtype
    np.testing.assert_array_equal(first, second)


def same_record(first, second):
    """Every field equal, dtypes included."""
    assert type(first) is type(second)
    for name, value in vars(first).items():
        other = getattr(second, name)
        if name in TABLES:
            assert list(value) == list(other), name
            for key in value:
                same_array(value[key], other[key])
        elif isinstance(value, np.ndarray):
            same_array(value, other)
        elif name == "sampling":
            assert value.facts() == other.facts()
            assert value.part == other.part
            assert (value.weights is None) == (other.weights is None)
            if value.weights is not None:
                same_array(value.weights, other.weights)
        else:
            assert value == other, name


WEIGHTS = np.tile([0.5, 1.5], 15)
DRAWS = {
    "weights": lambda made: made.weighted(np.resize(WEIGHTS, made.n), max_weight=1.5),
    "estimated weights": lambda made: made.weighted(
        np.resize(WEIGHTS, made.n), max_weight=2.5, estimated=True
    ),
    "groups by sample": lambda made: made.grouped(made.groups, average="sample", max_size=9),
    "groups by group": lambda made: made.grouped(made.groups, average="group"),
    "a population": lambda made: made.drawn_from(5000),
    "slices": lambda made: made.sliced(np.arange(made.n) % 2),
    "everything": lambda made: (
        made.sliced(["x", "y"] * (made.n // 2))
        .grouped(made.groups, average="sample", max_size=30)
        .weighted({"x": 0.5, "y": 1.5}, max_weight=1.5, estimated=True)
        .drawn_from(999)
    ),
}
RECORDS = {
    **{f"exits, {k}": lambda draw=draw: draw(exit_record()) for k, draw in DRAWS.items()},
    **{f"thresholds, {k}": lambda draw=draw: draw(threshold_record()) for k, draw in DRAWS.items()},
    "exits": exit_record,
    "exits, defaults": lambda: ss.ExitRecord([[0.5]], losses={"zero_one": [[1, 0]]}),
    "exits, text groups": lambda: exit_record(ids=np.arange(30) - 5, groups=["x", "yy", "z"] * 10),
    "exits, whole range": lambda: random_record(n=20),
    "thresholds": threshold_record,
    "thresholds, defaults": lambda: ss.ThresholdRecord([1, 0], losses={"bleu": [[0.1, 0.2]]}),
}


@pytest.mark.parametrize("name", list(RECORDS))
def test_parquet_brings_everything_back(tmp_path, name):
    record = RECORDS[name]()
    path = tmp_path / "record.parquet"
    record.save(path)
    same_record(type(record).load(path), record)
    same_record(ss.load_record(str(path)), record)
    assert [p.name for p in tmp_path.iterdir()] == ["record.parquet"]


@pytest.mark.parametrize("name", [name for name in RECORDS if "defaults" not in name])
def test_what_is_known_of_the_draw_is_kept_by_every_part(tmp_path, name):
    record = RECORDS[name]()
    rows = np.arange(record.n)[::-2]
    part = record.take(rows)
    assert part.sampling.facts() == record.sampling.facts()
    pieces = record.split(record.n_units // 2)
    whole = type(record).concatenate(pieces)
    again = whole.take([whole.ids.tolist().index(each) for each in record.ids.tolist()])
    same_record(replace(again, order=record.order), record)
    drawn = record.resampled(rows)
    assert drawn.sampling.facts() == record.sampling.facts()
    if record.sampling.weights is not None:
        for some in (part, drawn):
            same_array(some.sampling.weights, record.sampling.weights[rows])
        unweighted = replace(part.sampling, weights=None, max_weight=None)
        plain = replace(pieces[1], sampling=unweighted)
        with pytest.raises(ValueError, match="`records` must agree in `sampling`"):
            type(record).concatenate([pieces[0], plain])


def test_never_is_written_as_null(tmp_path):
    threshold_record().save(tmp_path / "record.parquet")
    header = json.loads(pq.read_schema(tmp_path / "record.parquet").metadata[b"swiftsure"])
    assert header["thresholds"] == [None, 0.9, 1 / 3]


def test_a_file_of_many_row_groups_is_read_whole(tmp_path):
    record = exit_record()
    record.save(tmp_path / "one.parquet")
    table = pq.read_table(tmp_path / "one.parquet")
    pq.write_table(table, tmp_path / "many.parquet", row_group_size=7)
    same_record(ss.ExitRecord.load(tmp_path / "many.parquet"), record)


@pytest.fixture
def columns_read(monkeypatch):
    """The columns that Parquet is asked for."""
    asked = []
    read = pq.ParquetFile.read

    def spy(file, columns=None, **arguments):
        asked.extend(columns)
        return read(file, columns=columns, **arguments)

    monkeypatch.setattr(pq.ParquetFile, "read", spy)
    return asked


def test_only_what_is_wanted_is_read(tmp_path, columns_read):
    record = exit_record()
    record.save(tmp_path / "record.parquet")
    loaded = ss.ExitRecord.load(tmp_path / "record.parquet", scores=["entropy"], losses=["brier"])
    assert sorted(columns_read) == [
        "confidence/entropy",
        "cost/ms",
        "group",
        "id",
        "inconsistency/brier",
        "loss/brier",
    ]
    assert list(loaded.confidences) == ["entropy"]
    assert list(loaded.losses) == list(loaded.inconsistencies) == ["brier"]
    same_array(loaded.losses["brier"], record.losses["brier"])
    assert loaded.inconsistency_ranges == {"brier": ss.LossRange(-2, 2)}
    same_array(loaded.groups, record.groups)


def test_only_the_wanted_loss_of_a_threshold_record_is_read(tmp_path, columns_read):
    losses = {"bleu": np.zeros((2, 2)), "rouge": np.ones((2, 2))}
    ss.ThresholdRecord([1, 0], losses=losses).save(tmp_path / "record.parquet")
    loaded = ss.ThresholdRecord.load(tmp_path / "record.parquet", losses=["rouge"])
    assert list(loaded.losses) == ["rouge"]
    assert "loss/bleu" not in columns_read


def test_an_unknown_score_is_refused_with_the_known(tmp_path):
    exit_record().save(tmp_path / "record.parquet")
    with pytest.raises(ValueError, match=r"`scores` must be one of: top1, entropy; .*'entropy'"):
        ss.ExitRecord.load(tmp_path / "record.parquet", scores=["entropi"])


@pytest.mark.parametrize("losses", [["brier", "rouge"], ["rouge"]])
def test_an_unknown_loss_is_refused_with_the_known(tmp_path, losses):
    exit_record().save(tmp_path / "record.parquet")
    with pytest.raises(ValueError, match=r"`losses` must be one of: .*brier"):
        ss.ExitRecord.load(tmp_path / "record.parquet", losses=losses)


def test_a_record_of_the_other_kind_says_how_to_load_it(tmp_path):
    exit_record().save(tmp_path / "exits.parquet")
    threshold_record().save(tmp_path / "thresholds.parquet")
    with pytest.raises(ValueError, match=r"holds an ExitRecord, .* ExitRecord\.load"):
        ss.ThresholdRecord.load(tmp_path / "exits.parquet")
    with pytest.raises(ValueError, match=r"holds a ThresholdRecord, .* ThresholdRecord\.load"):
        ss.ExitRecord.load(tmp_path / "thresholds.parquet")


# Files that are no records


def expect(path, message):
    for load in (ss.load_record, ss.ExitRecord.load):
        with pytest.raises(ValueError, match=message) as caught:
            load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["missing.parquet", "missing.npz"])
def test_a_path_that_is_no_file(tmp_path, name):
    expect(tmp_path / name, "`path` must be an existing file, but .* is not one")


def test_a_folder_without_records(tmp_path):
    expect(tmp_path, "must be an existing file, but .* is not one|must hold Parquet files")


@pytest.mark.parametrize("content", [b"", b"plain text", b"PAR1" + bytes(40) + b"PAR1"])
def test_a_file_that_is_no_parquet(tmp_path, content):
    path = tmp_path / "record.parquet"
    path.write_bytes(content)
    expect(path, "is not a readable Parquet file")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_parquet(tmp_path, share):
    path = tmp_path / "record.parquet"
    exit_record().save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    expect(path, "is not a readable Parquet file")


def test_a_parquet_with_damaged_data(tmp_path):
    path = tmp_path / "record.parquet"
    random_record(n=2000).save(path)
    content = bytearray(path.read_bytes())
    content[20:2000] = bytes(1980)
    path.write_bytes(content)
    expect(path, "is damaged or cut short")


def rewrite(path, columns):
    """Replace columns of a record; its header stays."""
    table = pq.read_table(path)
    made = pa.table({name: columns.get(name, table[name][:1]) for name in table.column_names})
    pq.write_table(made.replace_schema_metadata(table.schema.metadata), path)


def equal_rows(n):
    """Return columns of n equal rows, which take a few bytes when they are encoded."""
    losses = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2 * n)), 2)
    scores = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(n, np.float32)), 1)
    ids = pa.array(np.zeros(n, np.int64))
    return {"id": ids, "confidence/top1": scores, "loss/zero_one": losses}


def test_a_parquet_that_would_unpack_to_far_more_is_not_decoded(
    tmp_path, monkeypatch, columns_read
):
    path = tmp_path / "record.parquet"
    RECORDS["exits, defaults"]().save(path)
    rewrite(path, equal_rows(1_000_000))
    assert path.stat().st_size < 50_000
    monkeypatch.setenv("SWIFTSURE_MAX_UNPACKED", str(20_000_000))
    expect(path, r"would unpack to 28,000,000, over the limit of 20,000,000\. If you trust it, set")
    assert columns_read == []


def test_one_long_text_does_not_make_all_long(tmp_path, monkeypatch):
    path = tmp_path / "record.parquet"
    ids = [str(i) for i in range(5_000)]
    record = ss.ExitRecord(np.full((5_000, 1), 0.5), losses={"zero_one": np.zeros((5_000, 2))})
    replace(record, ids=ids).save(path)
    rewrite(path, {"id": pa.array(["x" * 10_000, *ids[1:]]), **without_ids(path)})
    monkeypatch.setenv("SWIFTSURE_MAX_UNPACKED", str(20_000_000))
    expect(path, "would unpack to 200,000,000")


def without_ids(path):
    table = pq.read_table(path)
    return {name: table[name] for name in table.column_names if name != "id"}


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([True]),
        pa.array([None], pa.int64()),
        pa.array([None], pa.string()),
        pa.array([{"a": 1}]),
        pa.array([[1]]),
        pa.array([b"a"]),
        pa.array([0], pa.timestamp("s")),
    ],
    ids=lambda ids: str(ids.type),
)
def test_columns_of_other_types_are_refused(tmp_path, ids):
    path = tmp_path / "record.parquet"
    RECORDS["exits, defaults"]().save(path)
    rewrite(path, {"id": ids})
    expect(path, "is damaged or cut short")


@pytest.mark.slow
def test_forty_million_encoded_rows_take_little_memory(tmp_path):
    path = tmp_path / "record.parquet"
    RECORDS["exits, defaults"]().save(path)
    RECORDS["exits, defaults"]().save(tmp_path / "small.parquet")
    rewrite(path, equal_rows(40_000_000))
    program = (
        "import resource, sys, swiftsure as ss\n"
        "ss.load_record(sys.argv[2])\n"  # imports what is needed
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    ss.load_record(sys.argv[1])\n"
        "except ValueError as error:\n    assert 'would unpack to 1,120,000,000' in str(error)\n"
        "else:\n    raise SystemExit('it was read')\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 50_000"
    )
    subprocess.run([sys.executable, "-c", program, path, tmp_path / "small.parquet"], check=True)


def test_a_foreign_parquet(tmp_path):
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"a": [1, 2]}), path)
    expect(path, "is a Parquet file, but not a Swiftsure record")


def test_a_record_of_a_newer_version(tmp_path, monkeypatch):
    path = tmp_path / "record.parquet"
    monkeypatch.setattr(files, "FIRST_VERSION", 4)
    exit_record().save(path)
    monkeypatch.undo()
    expect(path, r"newer Swiftsure \(record version 4; this one reads up to 3\): upgrade swiftsure")


# Writing


def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "record.parquet"
    exit_record().save(path)
    before = path.read_bytes()

    def fail(table, where, **_):
        where.write(b"PAR1 half a record")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        random_record(n=5).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_settings_that_are_no_data_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="JSON"):
        threshold_record(settings={"model": object()}).save(tmp_path / "record.parquet")
    assert list(tmp_path.iterdir()) == []


def test_saving_replaces_a_file(tmp_path):
    path = tmp_path / "record.parquet"
    exit_record().save(path)
    record = threshold_record()
    record.save(path)
    same_record(ss.load_record(path), record)


def test_saving_into_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`path` must be in an existing folder"):
        exit_record().save(tmp_path / "missing" / "record.parquet")


# npz


def test_npz_of_exits(tmp_path):
    record = exit_record()
    np.savez(
        tmp_path / "record.npz",
        **{f"confidences.{k}": v for k, v in record.confidences.items()},
        **{f"losses.{k}": v for k, v in record.losses.items()},
        **{f"inconsistencies.{k}": v for k, v in record.inconsistencies.items()},
        **{f"costs.{k}": v for k, v in record.costs.items()},
        **{"loss_ranges.rouge/l": [-0.5, 1.25], "inconsistency_ranges.brier": [-2, 2]},
        ids=record.ids,
        groups=record.groups,
    )
    loaded = ss.load_record(tmp_path / "record.npz")
    assert isinstance(loaded, ss.ExitRecord)
    for table in TABLES:
        assert set(getattr(loaded, table)) == set(getattr(record, table))
        for name, values in getattr(record, table).items():
            same_array(getattr(loaded, table)[name], values)
    same_array(loaded.ids, record.ids)
    same_array(loaded.groups, record.groups)
    assert loaded.loss_ranges == record.loss_ranges
    assert loaded.inconsistency_ranges == record.inconsistency_ranges


def test_npz_with_one_nameless_score(tmp_path):
    np.savez_compressed(
        tmp_path / "a.npz", confidences=[[0.5], [0.25]], **{"losses.zero_one": [[0, 1], [1, 1]]}
    )
    loaded = ss.ExitRecord.load(tmp_path / "a.npz")
    assert list(loaded.confidences) == ["top1"]
    assert loaded.losses["zero_one"].tolist() == [[0, 1], [1, 1]]


def test_npz_of_thresholds(tmp_path):
    np.savez(tmp_path / "a.npz", thresholds=[1, 0.5], **{"losses.bleu": [[0.1, 0.2]]})
    loaded = ss.load_record(tmp_path / "a.npz")
    assert isinstance(loaded, ss.ThresholdRecord)
    assert loaded.thresholds.tolist() == [1, 0.5]


def test_npz_is_known_by_its_content_too(tmp_path):
    np.savez(tmp_path / "a.npz", thresholds=[1, 0.5], **{"losses.bleu": [[0.1, 0.2]]})
    (tmp_path / "a.npz").rename(tmp_path / "a.data")
    assert ss.load_record(tmp_path / "a.data").n == 1


def test_npz_reads_only_what_is_wanted(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        **{"confidences.top1": [[0.5]], "confidences.entropy": [[0.5]]},
        **{"losses.brier": [[0, 1]], "losses.zero_one": [[0, 1]]},
    )
    loaded = ss.ExitRecord.load(tmp_path / "a.npz", scores=["entropy"], losses=["zero_one"])
    assert list(loaded.confidences) == ["entropy"]
    assert list(loaded.losses) == ["zero_one"]


def test_npz_of_logits(tmp_path):
    logits, labels = random_logits(n=20)
    arrays = {"ids": np.arange(20) + 5, "groups": np.arange(20) // 2, "costs.ms": [1.0, 2, 3, 4]}
    np.savez(tmp_path / "a.npz", logits=logits, labels=labels, **arrays)
    expected = ss.ExitRecord.from_logits(
        logits, labels, ids=arrays["ids"], costs={"ms": [1, 2, 3, 4]}
    )
    expected = replace(expected, groups=arrays["groups"])
    loaded = ss.load_record(tmp_path / "a.npz")
    assert loaded.order.drawn
    same_record(replace(loaded, order=expected.order), expected)
    part = ss.ExitRecord.load(tmp_path / "a.npz", scores=["entropy"], losses=["brier"])
    assert (list(part.confidences), list(part.losses)) == (["entropy"], ["brier"])


def test_npz_of_logits_with_an_unknown_array(tmp_path):
    np.savez(tmp_path / "a.npz", logits=np.zeros((2, 2, 2)), label=[0, 1])
    with pytest.raises(ValueError, match=r"logits, labels, .* got 'label'. Did you mean 'labels'"):
        ss.load_record(tmp_path / "a.npz")


def test_npz_with_a_misspelt_array(tmp_path):
    np.savez(tmp_path / "a.npz", logit=np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match=r"unknown array 'logit'; .* Did you mean 'logits'"):
        ss.load_record(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["record.csv", "record.NPZ", "record.json"])
def test_a_name_that_says_it_is_something_else_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"must not end in .*: a record is a Parquet file"):
        exit_record().save(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["loss.brier", "losses", "losses."])
def test_npz_with_an_unknown_array(tmp_path, key):
    np.savez(tmp_path / "a.npz", confidences=[[0.5]], **{key: [[0.5, 0.5]]})
    with pytest.raises(ValueError, match=rf"unknown array '{re.escape(key)}'; known are"):
        ss.load_record(tmp_path / "a.npz")


def test_npz_with_pickles_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", confidences=[[0.5]], ids=np.asarray([{"a": 1}], object))
    with pytest.raises(ValueError, match="holds Python objects, which are never loaded"):
        ss.load_record(tmp_path / "a.npz")


@pytest.mark.parametrize("content", [b"", b"plain text"])
def test_a_file_that_is_no_npz(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    expect(tmp_path / "a.npz", "is not a readable npz file")


def test_a_single_array_is_no_npz(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    expect(tmp_path / "a.npz", "is not a readable npz file")


def test_npz_with_bad_arrays_is_refused_like_any_record(tmp_path):
    np.savez(tmp_path / "a.npz", confidences=[[1.5]], **{"losses.zero_one": [[0, 1]]})
    with pytest.raises(ValueError, match=r"`confidences\['top1'\]` must lie in \[0, 1\]"):
        ss.load_record(tmp_path / "a.npz")


def test_an_edited_header_is_refused(tmp_path):
    path = tmp_path / "record.parquet"
    exit_record().save(path)
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    metadata[files.KEY] = metadata[files.KEY].replace(b'"drawn": true', b'"drawn": false')
    pq.write_table(table.replace_schema_metadata(metadata), path)
    expect(path, "its header does not fit its checksum")


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": {}},
        {"order": {"seed": "", "drawn": True}},
        {"order": {"seed": [], "drawn": True}},
        {"order": {"seed": {}, "drawn": True}},
        {"order": {"seed": -1, "drawn": True}},
        {"order": {"seed": None, "drawn": True}},
        {"order": {"seed": 1, "drawn": 1}},
        {"order": {}},
        {"kind": "thresholds"},
        {"thresholds": [None, 0.5]},
    ],
)
def test_a_header_of_another_shape_is_refused(tmp_path, changes):
    path = tmp_path / "record.parquet"
    exit_record().save(path)
    table = pq.read_table(path)
    text = json.dumps(json.loads(table.schema.metadata[files.KEY]) | changes).encode()
    metadata = {files.KEY: text, files.CHECKSUM: hashlib.sha256(text).hexdigest().encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    expect(path, r"is not a valid record: [^\n]*$")


def test_exchanged_columns_are_refused(tmp_path):
    path = tmp_path / "record.parquet"
    exit_record().save(path)
    table = pq.read_table(path)
    metadata, names = table.schema.metadata, table.column_names
    one, other = names.index("loss/brier"), names.index("inconsistency/brier")
    names[one], names[other] = names[other], names[one]
    table = table.rename_columns(names).replace_schema_metadata(metadata)
    pq.write_table(table, path)
    expect(path, "column '.*' does not fit its checksum")


def test_an_npz_that_claims_more_than_it_holds(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("ids.npy", "w") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ValueError, match=r"'ids' claims 8,000,000,000,000 bytes, but the file"):
        ss.load_record(tmp_path / "a.npz")


@pytest.mark.parametrize(("offset", "value"), [(8, 1), (10, 14), (10, 12), (8, 0x40), (8, 0x20)])
def test_an_encrypted_or_oddly_packed_npz(tmp_path, offset, value):
    path = tmp_path / "a.npz"
    np.savez(path, confidences=[[0.5]], **{"losses.zero_one": [[0, 1]]})
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + offset] = value  # in the directory
    path.write_bytes(content)
    expect(path, "is not a readable npz file")


def test_an_npz_with_names_that_are_not_text(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, ids=[1], **{"é.x": [1]})
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xfe"))
    expect(path, "is not a readable npz file")


def test_an_error_in_a_file_that_is_not_text_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"a\.npz: .* can't decode"), files.reading("a.npz"):
        b"\xff".decode()


def test_an_npz_that_unpacks_to_far_more_than_its_size(tmp_path, monkeypatch):
    monkeypatch.setenv("SWIFTSURE_MAX_UNPACKED", "1000000")
    np.savez_compressed(tmp_path / "a.npz", confidences=np.zeros((500_000, 1)))
    with pytest.raises(ValueError, match=r"would unpack to 4,000,\d+, over the limit of 1,000,000"):
        ss.load_record(tmp_path / "a.npz")
    monkeypatch.setenv("SWIFTSURE_MAX_UNPACKED", "5000000")
    with pytest.raises(ValueError, match="losses"):  # it is read, and lacks losses
        ss.load_record(tmp_path / "a.npz")
