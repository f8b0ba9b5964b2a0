"""Every damaged file is refused with one line, or read with the meaning that it had.

Fast: 2,300 mutants in all. Slow: 55,000.
"""

import hashlib
import json
import pickle  # noqa: TID251
import warnings
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import swiftsure as ss
from experiments.image_classification.pickled_logits import read_pickled_logits
from swiftsure._lib.files import json_checksum
from swiftsure.cascade import Answer, answer_log
from swiftsure.cascade.answer_log import AnswerKey, AnswerLog
from swiftsure.cascade.logs import read_log as read_jsonl
from swiftsure.certify.anytime.log import GrowthLog
from swiftsure.curves.sampling import Sampling
from swiftsure.monitor import Monitor, Watch
from swiftsure.onnx.folder import Check, Manifest, Part, RuntimeConfig, read_runtime, write_folder
from swiftsure.onnx.folder import read_manifest as onnx_manifest
from swiftsure.onnx.trees import build, samples_of
from swiftsure.records import files
from swiftsure.records.shards import Shards
from swiftsure.text import ExitHeads, MetaClassifier
from tests.builders import random_logits, random_record
from tests.faults.mutants import mutants

FEW = 120
"""Mutants of each format in the fast test."""

LONGEST = 1_500
"""Characters that an error may have: it quotes at most 200 of the file."""


class Format(NamedTuple):
    """How a kind of file is written and read; reading gives something that can be compared."""

    name: str
    write: object
    read: object
    is_json: bool = False
    checksums: bool = True
    """Without them, damaged numbers are read as they are."""
    fewest: int = 200
    """How many of 290 mutants are refused at least; the others are read with the same meaning."""


def plain(record):
    """Return the fields of a record, or of its sampling, as plain lists."""
    return {each.name: listed(getattr(record, each.name)) for each in fields(record)}


def listed(value):
    if isinstance(value, Sampling):
        return plain(value)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if hasattr(value, "items"):
        return {key: listed(each) for key, each in value.items()}
    return value


def exit_record():
    return random_record(n=60, groups=np.arange(60) // 2)


def threshold_record():
    rng = np.random.default_rng(0)
    return ss.ThresholdRecord(
        [None, 0.9, 0.5],
        {"x": rng.random((40, 3))},
        inconsistencies={"x": rng.random((40, 3)) * [0, 1, 1]},
        costs={"flops": [3, 2, 1], "ms": rng.random((40, 3))},
        ids=[f"text {i}" for i in range(40)],
        settings={"score": "softmax"},
    )


def write_policy(path):
    made = ss.calibrate(random_record(n=400), loss="zero_one", epsilon=0.3)
    made.save(path)


def write_state(path):
    monitor = Monitor(0.05, risk="gap", loss="zero_one")
    monitor.update_many(np.random.default_rng(0).random(100) < 0.05)
    watch = Watch(monitor)
    for request in range(30):
        watch.feed(json.dumps({"id": request}).encode() + b"\n")
    watch.feed(b'{"id": 4, "loss": 0}\n')
    watch.save(path)


def read_state(path):
    watch = Watch.load(path)
    return watch.monitor.state(), watch.order.state()


def write_npz(path):
    record = random_record(n=50)
    np.savez(
        path.with_suffix(".npz"),
        **{f"confidences.{k}": v for k, v in record.confidences.items()},
        **{f"losses.{k}": v for k, v in record.losses.items()},
        **{"costs.flops": np.arange(1.0, record.n_exits + 1), "ids": record.ids},
    )
    path.with_suffix(".npz").rename(path)


def write_logits(path):
    logits, labels = random_logits(30, 3, 4)
    np.savez_compressed(path.with_suffix(".npz"), logits=logits, labels=labels)
    path.with_suffix(".npz").rename(path)


def read_record(path):
    found = plain(ss.load_record(path))
    found.pop("order", None)  # an npz has none, so one is drawn
    return found


def write_manifest(path):
    folder = path.parent / "parts"
    folder.mkdir()
    with Shards(folder, ss.ExitRecord, {"model": "m", "losses": ["brier"]}) as shards:
        shards.put(0, exit_record(), data=[{"n": 60, "hashes": {"inputs": "ab"}}])
    (folder / "manifest.json").rename(path)


def read_manifest(path):
    folder = path.parent / "parts"
    (folder / "manifest.json").write_bytes(path.read_bytes())
    with Shards(folder, ss.ExitRecord, {"model": "m", "losses": ["brier"]}) as shards:
        return shards.notes


def write_heads(path):
    torch.manual_seed(0)
    ExitHeads(6, [1, 3], trained_on=["ab", "cd"]).save(path)


def write_meta(path):
    torch.manual_seed(0)
    MetaClassifier(6, trained_on=["ab", "cd"]).save(path)


def read_weights(kind):
    def read(path):
        found = kind.load(path)
        weights = {name: value.tolist() for name, value in found.state_dict().items()}
        return weights, found.trained_on

    return read


def write_pickle(path):
    logits, labels = random_logits(30, 3, 4)
    path.write_bytes(pickle.dumps((logits.transpose(1, 0, 2), labels)))


def read_pickle(path):
    logits, labels = read_pickled_logits(path)
    assert not np.isnan(logits).any()
    assert logits.max() < np.inf
    assert (labels < logits.shape[2]).all()
    return logits.tolist(), labels.tolist()


def write_slices(path):
    record = random_record(n=600)
    slices = np.where(np.arange(600) < 300, "north", "south")
    promise = ss.Promise("zero_one", epsilon=0.3, within="each slice")
    ss.calibrate(record.sliced(slices), promise).save(path)


ENTRIES = [({"samples": n}, bytes(range(n))) for n in (40, 0, 200)]


def write_growth(path):
    log = GrowthLog(path)
    for facts, data in ENTRIES:
        log.append(facts, data)


def read_growth(path):
    """An incomplete end is left out; what is before it must be as it was."""
    found = [tuple(entry) for entry in GrowthLog(path).read()]
    assert found == ENTRIES[: len(found)]


ANSWERS = {
    AnswerKey("small", f"{i:032x}"): Answer(f"text {i}", 0.5, {"usd": 0.1}, scores={"x": 0.2})
    for i in range(20)
}


def write_answers(path):
    with AnswerLog(path.parent / "answers") as log:
        log.append((key, answer, 0.5) for key, answer in ANSWERS.items())
    (path.parent / "answers" / "answers.jsonl").rename(path)


def read_answers(path):
    """Lines that are damaged are asked for again."""
    (path.parent / "answers" / "answers.jsonl").write_bytes(path.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with AnswerLog(path.parent / "answers") as log:
            return log.answers


def read_good_answers(path):
    """Lines that are not damaged must be as they were."""
    for key, (answer, seconds) in read_answers(path).items():
        assert (answer.to_json(), seconds) == (ANSWERS[key].to_json(), 0.5)


def write_log(path):
    lines = [
        {"id": n, "model": model, "answer": "yes", "confidence": 0.9, "cost": 1.0, "label": "yes"}
        for n in range(20)
        for model in ("small", "large")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_log(path):
    return len(list(read_jsonl(path)))


def write_shard(path):
    folder = path.parent / "shards"
    folder.mkdir()
    with Shards(folder, ss.ExitRecord, {"model": "m", "losses": ["brier"]}) as shards:
        shards.put(0, random_record(n=40).take(range(20)))
        shards.put(1, random_record(n=40).take(range(20, 40)))
    (folder / "shard-00001.parquet").rename(path)


def read_shard(path):
    folder = path.parent / "shards"
    (folder / "shard-00001.parquet").write_bytes(path.read_bytes())
    return plain(ss.ShardedRecord(folder).load())


def resumed_shard(path):
    """A damaged shard is made again, with a warning; any other is as it was."""
    folder = path.parent / "shards"
    (folder / "shard-00001.parquet").write_bytes(path.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Shards(folder, ss.ExitRecord, {"model": "m", "losses": ["brier"]}) as shards:
            if 1 in shards.records:
                assert shards.records[1].ids.tolist() == list(range(20, 40))


def write_labels(path):
    path.write_text("id,label\n" + "".join(f"{i},{i % 3}\n" for i in range(40)))


def read_labels(path):
    from swiftsure.cli.label import _Classes, _read

    record = ss.ExitRecord.from_logits(random_logits(60, 3, 4)[0])
    with files.reading(path):
        return _read(record, path, _Classes("zero_one", record, None))[1]


def write_onnx(path):
    form = {"dict": {"x": {"dtype": "float32", "shape": [3]}, "y": {"value": 2}}}
    parts = [
        Part(stage=f"stage-{k}.onnx", head=f"head-{k}.onnx", state=[0, -1][: k + 1])
        for k in range(2)
    ]
    made = path.parent / "made"
    made.mkdir()
    for part in parts:
        for name in (part.stage, part.head):
            (made / name).write_bytes(name.encode())
    manifest = Manifest(
        model="Net",
        parts=parts,
        inputs=form,
        outputs={"tuple": [{"dtype": "float32", "shape": [5]}]},
        scored=False,
        network="sha256:ab",
        check=Check(samples=3, largest_difference=1e-7, near_threshold=0),
        int8=False,
        flops=[1.0, 2.0],
        files={},
    )
    write_folder(made, path.parent / "onnx", manifest, RuntimeConfig(threads=2))
    (path.parent / "onnx" / "manifest.json").rename(path)


def read_onnx(path):
    folder = path.parent / "onnx"
    (folder / "manifest.json").write_bytes(path.read_bytes())
    found = onnx_manifest(folder)
    build(found.inputs, samples_of(found.inputs, 0))
    return found.model_dump(), found.fingerprint()


def write_runtime(path):
    write_onnx(path)
    (path.parent / "onnx" / "runtime.json").rename(path)


def read_settings(path):
    (path.parent / "onnx" / "runtime.json").write_bytes(path.read_bytes())
    return read_runtime(path.parent / "onnx")


FORMATS = [
    Format("policy", write_policy, ss.Policy.load, is_json=True),
    Format("state", write_state, read_state, is_json=True),
    Format("manifest", write_manifest, read_manifest, is_json=True),
    Format("exits", lambda path: exit_record().save(path), read_record),
    Format("thresholds", lambda path: threshold_record().save(path), read_record),
    Format("npz", write_npz, read_record),
    Format("logits", write_logits, read_record),
    Format("heads", write_heads, read_weights(ExitHeads)),
    Format("meta", write_meta, read_weights(MetaClassifier)),
    Format("pickle", write_pickle, read_pickle, checksums=False, fewest=100),
    Format("slices", write_slices, ss.SlicedPolicy.load, is_json=True),
    Format("growth", write_growth, read_growth, fewest=100),
    Format("answers", write_answers, read_good_answers, fewest=1),
    Format("log", write_log, read_log, checksums=False, fewest=50),
    Format("shard", write_shard, read_shard),
    Format("resumed shard", write_shard, resumed_shard, fewest=0),
    Format("labels", write_labels, read_labels, checksums=False, fewest=20),
    Format("onnx", write_onnx, read_onnx, is_json=True),
    Format("runtime", write_runtime, read_settings, is_json=True, checksums=False, fewest=100),
]


def check(kind, folder, n, seed):
    """Read n mutants of a file; return how many were refused."""
    path = folder / "file"
    kind.write(path)
    content, original = path.read_bytes(), kind.read(path)
    refused = 0
    for mutant in mutants(content, n, seed, kind.is_json):
        path.write_bytes(mutant)
        if is_refused(kind.read, path):
            refused += 1
        elif kind.checksums:
            assert kind.read(path) == original
    return refused


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_damaged_files(tmp_path, kind):
    assert check(kind, tmp_path, FEW, seed=0) >= kind.fewest * FEW // 290


def resealed(text, ends=(), checksum="checksum"):
    """Return edited JSON with the checksum that it should have; None if it is not JSON."""
    try:
        content = json.loads(text)
        head = {name: content.pop(name) for name in (*ends, checksum) if name in content}
        return json.dumps({**head, **content, checksum: json_checksum(content)}).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return None


def header_of(path):
    return pq.read_schema(path).metadata[files.KEY]


def forge_header(path, text):
    """Replace the header of a record, with its checksum."""
    metadata = {files.KEY: text, files.CHECKSUM: hashlib.sha256(text).hexdigest().encode()}
    pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["policy", "state", "manifest", "slices", "onnx"])
def test_forged_files(tmp_path, name):
    """With a fitting checksum too, a file is refused in one line or read; nothing else happens."""
    kind = next(each for each in FORMATS if each.name == name)
    path = tmp_path / "file"
    kind.write(path)
    ends = ("format", "version") if name == "state" else ()
    refused = 0
    for mutant in mutants(path.read_bytes(), 200, seed=1, is_json=True):
        forged = resealed(mutant, ends)
        if forged is not None:
            path.write_bytes(forged)
            refused += is_refused(kind.read, path)
    assert refused > 10


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("write", [exit_record, threshold_record])
def test_forged_headers(tmp_path, write):
    path = tmp_path / "file"
    write().save(path)
    header, refused = header_of(path), 0
    for mutant in mutants(header, 200, seed=1, is_json=True):
        forge_header(path, mutant)
        refused += is_refused(read_record, path)
    assert refused > 100


def test_forged_answers(tmp_path):
    """With a fitting checksum too, a line counts as damaged or holds an answer."""
    path = tmp_path / "file"
    write_answers(path)
    head, line = path.read_bytes().splitlines(keepends=True)[:2]
    body = line.rpartition(b', "sum"')[0] + b"}"
    for mutant in mutants(body, 300, seed=1, is_json=True):
        sealed = mutant.rstrip(b"}\n")
        path.write_bytes(head + sealed + b', "sum": "' + answer_log._sum(sealed).encode() + b'"}\n')
        assert is_refused(read_answers, path) or len(read_answers(path)) <= 1


def is_refused(read, path):
    """Return whether a file is refused, which takes one line that names it."""
    try:
        read(path)
    except ValueError as error:
        message = str(error)
        assert len(message) < LONGEST, message
        assert "\n" not in message, message
        assert str(path.parent) in message, message
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_many_damaged_files(tmp_path, kind, seed):
    assert check(kind, tmp_path, 290, seed) >= kind.fewest


def test_a_damaged_stream_is_refused_or_folded(tmp_path):
    """Lines have no checksum: what can be read counts, and nothing else may happen."""
    lines = [{"id": i, "loss": i % 2, "exit": 1, "cost": 2.0} for i in range(50)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    for mutant in mutants(content, 300, seed=0):
        watch = Watch(Monitor(0.6))
        message = ""
        try:
            watch.feed(mutant)
            watch.finish()
        except ValueError as error:
            message = str(error)
        assert len(message) < LONGEST
        assert watch.monitor.n <= 52


def test_the_mutator_finds_a_reader_that_checks_nothing(tmp_path):
    def read(path):
        return json.loads(path.read_text())

    with pytest.raises((AssertionError, UnicodeDecodeError, RecursionError)):
        check(Format("careless", write_policy, read, is_json=True), tmp_path, 290, seed=0)
