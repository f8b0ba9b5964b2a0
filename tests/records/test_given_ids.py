"""Whether ids were given is remembered, not inferred from their values."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.builders import request_of

N = 60
SAMPLE = Population(n_exits=3).sample(N, seed=0)
IDS = {"given": np.arange(N), "none": None}


def exits(ids=None, **fields):
    return ss.ExitRecord.from_logits(SAMPLE.logits, SAMPLE.labels, ids=ids, **fields)


def dials(ids=None, seed=0, **fields):
    losses = np.random.default_rng(seed).random((N, 3)) < [0, 0.1, 0.2]
    return ss.ThresholdRecord(
        dials={"a": [0, 1, 2]},
        inconsistencies={"mse": losses.astype(float)},
        costs={"time": [3.0, 2.0, 1.0]},
        ids=ids,
        **fields,
    )


def from_file(record, folder):
    record.save(folder / "record.parquet")
    return ss.load_record(folder / "record.parquet")


def from_npz(record, folder):
    given = {"ids": record.ids} if record.has_ids else {}
    file = folder / "record.npz"
    np.savez(file, logits=SAMPLE.logits, labels=SAMPLE.labels, **given)
    return ss.load_record(file)


def from_shards(record, folder):
    for number, rows in enumerate(np.array_split(np.arange(N), 3)):
        record.take(rows).save(folder / f"{number}.parquet")
    return ss.ShardedRecord(folder).load()


def sampled_from_shards(record, folder):
    from_shards(record, folder)
    return ss.ShardedRecord(folder).sample(20)


def labelled(record, _):
    unlabelled = replace(record, losses={})
    return unlabelled.with_labels(record.ids[:3], SAMPLE.labels[:3])


WAYS = {
    "itself": lambda record, _: record,
    "its first samples": lambda record, _: record.take(np.arange(20)),
    "its last samples": lambda record, _: record.take(np.arange(20, N)),
    "one part": lambda record, _: record.split(20)[0],
    "the other part": lambda record, _: record.split(20)[1],
    "its parts, joined": lambda record, _: type(record).concatenate(record.split(20)),
    "a file": from_file,
    "a file of a part": lambda record, folder: from_file(record.take(np.arange(30, 50)), folder),
    "shards": from_shards,
    "a sample of shards": sampled_from_shards,
    "a file of logits": from_npz,
    "with labels": labelled,
}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("way", WAYS)
def test_exit_records_remember_whether_ids_were_given(way, ids, tmp_path):
    assert WAYS[way](exits(IDS[ids]), tmp_path).has_ids == (ids == "given")


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("way", ["one part", "its parts, joined", "a file", "a file of a part"])
def test_threshold_records_remember_whether_ids_were_given(way, ids, tmp_path):
    assert WAYS[way](dials(IDS[ids]), tmp_path).has_ids == (ids == "given")


@pytest.mark.parametrize("ids", IDS)
def test_records_of_several_dials_remember_it(ids):
    parts = [
        ss.ThresholdRecord(
            [0.0, 2.0], losses={"bleu": np.zeros((N, 2))}, settings={"b": b}, ids=IDS[ids]
        )
        for b in (1, 2)
    ]
    assert ss.ThresholdRecord.across(parts).has_ids == (ids == "given")


def test_a_file_is_as_before_unless_it_must_say_more(tmp_path):
    """Ids that look given and were, or do not and were not, need no newer version."""
    for name, ids, version in (
        ("none", None, 1),
        ("own", np.arange(5, N + 5), 1),
        ("0", IDS["given"], 3),
    ):
        exits(ids).save(tmp_path / name)
        header = ss.records.files.about(tmp_path / name)[0]
        assert (header.version, header.has_ids) == (version, True if version == 3 else None)


# ------------------------------------------------------------------------ what they are used for


def growing():
    return request_of(epsilon=0.1, risk="consistency", loss="zero_one").start()


def test_a_growing_calibration_refuses_the_ids_that_it_has():
    calibration = growing()
    calibration.update(exits(IDS["given"]))
    with pytest.raises(ValueError, match="was added before"):
        calibration.update(exits(IDS["given"]))
    with pytest.raises(ValueError, match="was added before"):
        calibration.update(exits(IDS["given"]).take(np.arange(40, N)))


def test_a_growing_calibration_refuses_them_after_a_restart(tmp_path):
    request = request_of(epsilon=0.1, risk="consistency", loss="zero_one")
    request.start(state=tmp_path / "state").update(exits(IDS["given"]))
    again = request.start(state=tmp_path / "state")
    with pytest.raises(ValueError, match="was added before"):
        again.update(exits(IDS["given"]))


def test_a_growing_calibration_takes_records_without_ids_one_after_another():
    calibration = growing()
    for _ in range(3):
        calibration.update(exits())
    assert calibration.n == 3 * N


def test_a_growing_calibration_knows_parts_of_one_record_by_its_seed():
    """Also where they overlap, and where a part is numbered from 0 on."""
    record, calibration = exits(), growing()
    calibration.update(record.take(np.arange(40)))
    with pytest.raises(ValueError, match="was added before"):
        calibration.update(record.take(np.arange(30, N)))
    calibration.update(record.take(np.arange(40, N)))
    assert calibration.n == N


@pytest.mark.parametrize("make", [exits, dials])
def test_a_pilot_is_refused_by_ids_that_look_like_numbers(make):
    """Both are numbered from 0 on, and not parts of one record."""
    pilot = make(IDS["given"]).take(np.arange(30))
    path = ss.Path.pareto(pilot, risk="consistency", loss=next(iter(pilot.inconsistencies)))
    with pytest.raises(ValueError, match=r"30 of them \(id 0\)"):
        make(IDS["given"]).curve("consistency", next(iter(pilot.inconsistencies)), path=path)


def test_a_pilot_is_refused_in_shards_and_datasets(tmp_path):
    pilot = exits(IDS["given"]).take(np.arange(30))
    path = ss.Path.pareto(pilot, risk="consistency", loss="zero_one")
    from_shards(exits(IDS["given"]), tmp_path)
    promise = {"risk": "consistency", "loss": "zero_one", "epsilon": 0.1, "path": path}
    with pytest.raises(ValueError, match="samples of the pilot"):
        ss.calibrate(ss.ShardedRecord(tmp_path), **promise)
    with pytest.raises(ValueError, match="samples of the pilot"):
        ss.joined_datasets({"a": exits(IDS["given"])}, path)


def test_numbers_are_no_ids_of_a_pilot():
    """Other samples with the same numbers are accepted, whatever their first number."""
    path = ss.Path.pareto(dials(seed=1).take(np.arange(30)))
    assert dials(seed=2).curve("consistency", path=path).n == N
    later = dials(seed=2).take(np.arange(20, N))
    assert later.curve("consistency", path=path).n == N - 20


def test_parts_of_one_record_are_known_by_its_seed_in_any_way():
    whole = dials()
    path = ss.Path.pareto(whole.take(np.arange(30)))
    with pytest.raises(ValueError, match="10 of them"):
        whole.take(np.arange(20, N)).curve("consistency", path=path)
