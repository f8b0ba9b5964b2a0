"""Records in folders: calibrating from the disk gives exactly what memory gives."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest

import swiftsure as ss
from swiftsure import records
from swiftsure._lib import storage
from swiftsure.records import files
from swiftsure.records.repeated_ids import RepeatedIds, _keys
from tests.builders import random_record, refused, request_of

CUTS = (0, 700, 701, 2600, 4000)
"""Where the samples of a record are cut into files, one of a single sample."""


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few rows, and row groups of a few hundred, so that all code has several."""
    monkeypatch.setattr(storage, "BLOCK_BYTES", 3000)
    write = pq.write_table
    monkeypatch.setattr(
        files.pq, "write_table", lambda *args, **kw: write(*args, **kw, row_group_size=500)
    )


def save(record, folder, cuts=CUTS):
    folder.mkdir(exist_ok=True)
    for number, (first, last) in enumerate(pairwise(cuts)):
        record.take(np.arange(first, last)).save(folder / f"part-{number}.parquet")
    return ss.ShardedRecord(folder)


def record_of(n=CUTS[-1], **arguments):
    rng = np.random.default_rng(5)
    return random_record(n, costs={"ms": rng.random((n, 4)).cumsum(axis=1)}, **arguments)


def shown(policy):
    """Everything that a policy says, but the time it was made."""
    return policy.model_dump(mode="json") | {"metadata": None}


ASKED = [
    {},
    {"risk": "consistency"},
    {"bound": "wsr"},
    {"bound": "star"},
    {"rule": ss.ExitRule(strict=True, min_exit=1)},
    {"path": [0.9, 0.5, 0.2]},
    {"path": [[0.9, 0.8, 0.7], [0.5, 0.9, 0.2]]},
    {"above": 0.1},
    {"worst": 0.5},
    {"among": "exits"},
    {"control": "empirical"},
    {"control": "crc"},
    {"control": ss.Control("crc", method="ucb")},
    {"control": ss.Control("ltt", "hoeffding_bentkus", zero_bounded=True)},
    {"control": ss.Control("ltt", "empirical_bernstein", correction="bonferroni")},
]


@pytest.mark.parametrize("loss", ["brier", "zero_one"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_a_calibration_from_the_disk_is_that_in_memory(tmp_path, loss, asked):
    record = record_of()
    opened = save(record, tmp_path / "record")
    request = request_of(loss=loss, epsilon=0.1, **asked)
    expected = request.run(record)
    assert shown(request.run(opened)) == shown(expected)
    assert not expected.runs_full_model


@pytest.mark.parametrize("loss", ["brier", "zero_one"])
@pytest.mark.usefixtures("small_blocks")
def test_what_a_record_says_of_its_draw_is_read_from_the_disk(tmp_path, loss):
    seeded, pool = replace(record_of(), order=7), record_of().drawn_from(50_000)
    for name, record in (("seed", seeded), ("pool", pool)):
        request = request_of(loss=loss, epsilon=0.1, bound="star")
        expected = request.run(record)
        assert shown(request.run(save(record, tmp_path / name))) == shown(expected)
        assert not expected.runs_full_model
    few = save(record_of().drawn_from(3999 + 1), tmp_path / "few")
    assert (
        request_of(loss=loss, epsilon=0.1, bound="star").run(few).certificate.samples.population
        == 4000
    )


@pytest.mark.parametrize("loss", ["brier", "zero_one"])
@pytest.mark.usefixtures("small_blocks")
def test_costs_are_promised_from_the_disk(tmp_path, loss):
    record = record_of()
    request = request_of(ss.CostPromise("exit", at_most=3.5), loss=loss, epsilon=0.1, bound="star")
    expected = request.run(record)
    assert shown(request.run(save(record, tmp_path / "record"))) == shown(expected)
    assert not expected.runs_full_model


def test_a_population_is_not_smaller_than_all_files_together(tmp_path):
    opened = save(record_of().drawn_from(5000), tmp_path / "record")
    part = record_of(1001, ids=np.arange(1001) + 9000).drawn_from(5000)
    replace(part, order=opened.order).save(tmp_path / "record" / "part-9.parquet")
    with pytest.raises(ValueError, match=r"population|pool"):
        ss.calibrate(ss.ShardedRecord(tmp_path / "record"), loss="brier", epsilon=0.1)


def test_files_with_and_without_groups_are_not_mixed(tmp_path):
    opened = save(record_of(ids=np.arange(4000)), tmp_path / "record")
    part = record_of(100, ids=np.arange(100) + 9000, groups=np.arange(100) // 50)
    part.save(tmp_path / "record" / "part-9.parquet")
    with pytest.raises(ValueError, match=r"part-9.*`groups` must be the same"):
        ss.calibrate(ss.ShardedRecord(tmp_path / "record"), loss="brier", epsilon=0.1)
    assert opened.n == 4000


def test_slices_on_the_disk_say_how_to_go_on(tmp_path):
    record = record_of().sliced(np.arange(4000) % 2)
    opened = save(record, tmp_path / "record")
    for within in ("slices", "each slice"):
        request = request_of(loss="brier", epsilon=0.1, within=within)
        with pytest.raises(ValueError, match=r"samples with slices\. Load the folder"):
            request.run(opened)
        assert not request.run(opened.load()).runs_full_model
    assert ss.calibrate(opened, loss="brier", epsilon=0.1).certificate.samples.slices is None


@pytest.mark.usefixtures("small_blocks")
def test_vectorised_tests_see_the_same_numbers(tmp_path):
    """From 50,000 samples on, betting tests of several settings run side by side."""
    record = random_record(60_000)
    opened = save(record, tmp_path / "record", (0, 25_000, 60_000))
    expected = ss.calibrate(record, loss="brier", epsilon=0.05)
    assert shown(ss.calibrate(opened, loss="brier", epsilon=0.05)) == shown(expected)


@pytest.mark.usefixtures("small_blocks")
def test_costs_of_the_full_model_for_each_sample(tmp_path):
    record = replace(record_of(), full_costs={"ms": np.random.default_rng(2).random(4000) + 1})
    opened = save(record, tmp_path / "record")
    expected = ss.calibrate(record, loss="brier", epsilon=0.1)
    assert shown(ss.calibrate(opened, loss="brier", epsilon=0.1)) == shown(expected)


@pytest.mark.usefixtures("small_blocks")
def test_several_risks_weights_and_missing_labels(tmp_path):
    full = record_of()
    losses = full.losses["zero_one"].copy()
    losses[1200:1300] = np.nan
    record = ss.ExitRecord(
        full.confidences,
        losses={"zero_one": losses},
        inconsistencies=full.inconsistencies,
        temperatures=[1.0, 1.1, 1.2, 1.3],
    )
    opened = save(record, tmp_path / "record")
    promises = [
        ss.Promise("zero_one", epsilon=0.1),
        ss.Promise("brier", risk="consistency", epsilon=0.2),
    ]
    for asked in (
        {"loss": promises, "missing": "worst"},
        {"loss": "zero_one", "epsilon": 0.1, "missing": "stop"},
    ):
        expected = ss.calibrate(record, **asked)
        assert shown(ss.calibrate(opened, **asked)) == shown(expected)
    with pytest.raises(ValueError, match="missing label"):
        ss.calibrate(opened, loss="zero_one", epsilon=0.1)


@pytest.mark.parametrize("promise", [{"above": 0.2}, {"among": "exits", "epsilon": 0.4}, {}])
@pytest.mark.usefixtures("small_blocks")
def test_weights_are_read_from_the_disk(tmp_path, promise):
    weights = np.random.default_rng(1).uniform(0.5, 1.5, 4000)
    record = record_of().weighted(weights, max_weight=1.5, estimated=True)
    opened = save(record, tmp_path / "record")
    request = request_of(**{"risk": "consistency", "loss": "brier", "epsilon": 0.2, **promise})
    expected = request.run(record)
    assert shown(request.run(opened)) == shown(expected)
    assert not expected.runs_full_model
    found, again = expected.evaluate(opened), expected.evaluate(record)
    assert (found.risk, found.savings, found.n) == (again.risk, again.savings, again.n)
    assert opened.sample(100).sampling.max_weight == 1.5
    np.testing.assert_array_equal(
        opened.curve("consistency", "brier").risk(), record.curve("consistency", "brier").risk()
    )


@pytest.mark.usefixtures("small_blocks")
def test_a_policy_is_evaluated_on_a_folder(tmp_path):
    record = record_of()
    policy = ss.calibrate(record, loss="brier", epsilon=0.1)
    found, expected = (policy.evaluate(r) for r in (save(record, tmp_path / "r"), record))
    assert (found.risk, found.saving, found.n) == (expected.risk, expected.saving, expected.n)
    np.testing.assert_array_equal(found.exit_shares, expected.exit_shares)


@pytest.mark.usefixtures("small_blocks")
def test_a_study_draws_a_sample(tmp_path, monkeypatch):
    opened = save(record_of(), tmp_path / "record")
    asked = {"loss": "zero_one", "controls": ["ucb"], "epsilons": [0.1], "splits": 3}
    whole = ss.evaluate(opened, **asked)
    np.testing.assert_array_equal(
        whole.test_risk["ucb"], ss.evaluate(record_of(), **asked).test_risk["ucb"]
    )
    monkeypatch.setattr("swiftsure.study.evaluation.LARGEST_POOL", 1000)
    assert ss.evaluate(opened, **asked).n_pool == 1000


def test_a_sample_is_drawn_without_replacement(tmp_path):
    record = record_of()
    drawn = save(record, tmp_path / "record").sample(500, seed=3)
    assert len(drawn) == 500
    rows = drawn.ids
    np.testing.assert_array_equal(drawn.losses["brier"], record.losses["brier"][rows])
    assert 2 < np.bincount(rows // 400).std() < 20  # spread over the whole record


@pytest.mark.usefixtures("small_blocks")
def test_what_was_saved_comes_back(tmp_path):
    record = record_of(ids=[f"photo {i}" * (1 + i % 3) for i in range(4000)])
    found = save(record, tmp_path / "record").load()
    assert found.order == record.order
    np.testing.assert_array_equal(found.ids, record.ids)
    for table in (*record.tables, "costs"):
        for name, values in getattr(record, table).items():
            np.testing.assert_array_equal(getattr(found, table)[name], values)
    same = records.load_record(tmp_path / "record")
    np.testing.assert_array_equal(same.ids, record.ids)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("ids", [np.arange(4000) - 5, [f"no {i}" for i in range(4000)]])
def test_an_id_used_twice_is_refused(tmp_path, ids):
    ids = np.array(ids)
    ids[3999] = ids[10]
    save(record_of(2000, ids=ids[:2000]), tmp_path / "a", (0, 2000))
    record_of(2000, ids=ids[2000:]).save(tmp_path / "a" / "part-1.parquet")
    with pytest.raises(ValueError, match=f"{ids[10]} is used twice"):
        ss.calibrate(ss.ShardedRecord(tmp_path / "a"), loss="brier", epsilon=0.1)


def test_equal_hashes_of_different_texts_are_no_repetition(monkeypatch):
    monkeypatch.setattr(
        "swiftsure.records.repeated_ids._keys", lambda ids: np.zeros(len(ids), "u8")
    )
    parts = [np.array(["a", "b"]), np.array(["long"])]
    for extra, refused_too in ((["c"], False), (["a"], True)):
        ids = RepeatedIds(4, storage.MEMORY)
        every = [*parts, np.array(extra)]
        for part in every:
            ids.add(part)
        if refused_too:
            with refused("ids"):
                ids.check(lambda every=every: every)
        else:
            ids.check(lambda every=every: every)


def test_a_hash_of_text_does_not_depend_on_its_neighbours():
    alone, beside = _keys(np.array(["ab", "ba"])), _keys(np.array(["ab", "ba", "abcdef"]))
    np.testing.assert_array_equal(alone, beside[:2])
    assert len(set(beside.tolist())) == 3


@pytest.mark.usefixtures("small_blocks")
def test_damage_is_noticed(tmp_path):
    opened = save(record_of(), tmp_path / "record")
    path = tmp_path / "record" / "part-2.parquet"
    metadata = pq.read_schema(path).metadata
    table = pq.read_table(path)
    swapped = table.take([1, 0, *range(2, len(table))])
    pq.write_table(swapped.replace_schema_metadata(metadata), path)
    with pytest.raises(ValueError, match=r"part-2\.parquet is damaged: its column 'id'"):
        ss.calibrate(opened, loss="brier", epsilon=0.1)


def test_files_of_different_models_are_refused(tmp_path):
    save(record_of(ids=np.arange(4000)), tmp_path / "a", (0, 4000))
    other = replace(record_of(5, ids=-1 - np.arange(5)), fingerprint="sha256:other")
    other.save(tmp_path / "a" / "part-1.parquet")
    with pytest.raises(ValueError, match=r"part-1.*`fingerprint` must be the same"):
        list(ss.ShardedRecord(tmp_path / "a").parts())


def test_losses_that_some_files_lack_are_left_out(tmp_path):
    record = record_of()
    save(record, tmp_path / "record")
    part = record.take(np.arange(700, 701))
    less = replace(part, losses={"zero_one": part.losses["zero_one"]})
    less.save(tmp_path / "record" / "part-1.parquet")
    opened = ss.ShardedRecord(tmp_path / "record")
    assert list(opened.first.losses) == ["zero_one"]
    assert list(opened.first.inconsistencies) == ["zero_one", "brier"]
    assert ss.calibrate(opened, loss="zero_one", epsilon=0.1).certificate.samples.n == 4000


def test_a_shard_that_the_manifest_names_must_be_there(tmp_path):
    from swiftsure.records.shards import Shards

    record = record_of()
    with Shards(tmp_path / "run", ss.ExitRecord, {"model": "m"}) as shards:
        for number in range(4):
            shards.put(number, record.take(np.arange(1000 * number, 1000 * (number + 1))))
    assert len(ss.ShardedRecord(tmp_path / "run")) == 4000
    (tmp_path / "run" / "shard-00002.parquet").unlink()
    with pytest.raises(ValueError, match=r"shard-00002\.parquet is missing"):
        ss.ShardedRecord(tmp_path / "run")


def test_what_needs_memory_is_refused(tmp_path):
    opened = save(record_of(), tmp_path / "record")
    with refused("path"):
        ss.calibrate(opened, loss="brier", epsilon=0.1, path="breakpoints")
    with refused("missing"):
        ss.calibrate(opened, loss="zero_one", epsilon=0.1, missing=ss.Ask(lambda ids: ids))
    with pytest.raises(ValueError, match=r"`Path\.learn` needs an ExitRecord or a ThresholdRecord"):
        ss.calibrate(opened, loss="zero_one", epsilon=0.1, path=ss.Path.learn(100))
    with refused("losses"):
        ss.ShardedRecord(tmp_path / "record", losses=["rouge"])
    with refused("folder"):
        ss.ShardedRecord(tmp_path)
    grouped = save(record_of(groups=np.arange(4000) // 2), tmp_path / "groups")
    with pytest.raises(ValueError, match="load_record"):
        ss.calibrate(grouped, loss="brier", epsilon=0.1)
    assert isinstance(records.open_record(tmp_path / "groups"), ss.ExitRecord)
    assert isinstance(records.open_record(tmp_path / "record"), ss.ShardedRecord)


def test_a_folder_of_threshold_records_is_loaded(tmp_path):
    record = ss.ThresholdRecord([None, 0.5], losses={"rouge_l": np.zeros((10, 2))})
    for number, rows in enumerate((range(4), range(4, 10))):
        record.take(rows).save(tmp_path / f"{number}.parquet")
    assert records.open_record(tmp_path).n == 10


@pytest.mark.usefixtures("small_blocks")
def test_rows_are_moved_as_in_memory():
    rng = np.random.default_rng(0)
    scratch = storage.Scratch()
    order = storage.MEMORY.permutation(5000, np.random.default_rng([1, 2]))
    found = scratch.permutation(5000, np.random.default_rng([1, 2]))
    np.testing.assert_array_equal(found, order)
    for table in (rng.random((5000, 4)), rng.random((5000, 3)).astype("f4"), np.empty((5000, 0))):
        np.testing.assert_array_equal(scratch.taken(order, table)[0], table[order])


def test_scratch_files_are_gone_with_their_arrays(tmp_path):
    array = storage.Scratch(tmp_path).empty((10, 2), np.float64)
    array[:] = 1
    assert list(tmp_path.iterdir()) == []


def test_costs_of_the_last_model_per_sample(tmp_path):
    rng = np.random.default_rng(0)
    for k in range(3):
        ss.ExitRecord(
            rng.random((200, 1)),
            losses={"zero_one": (rng.random((200, 2)) < [0.2, 0.1]).astype(float)},
            costs={"usd": np.cumsum(rng.random((200, 2)), axis=1)},
            full_costs={"usd": 2 * rng.random(200)},
            ids=np.arange(200) + 200 * k,
            order=0,
        ).save(tmp_path / f"part-{k}.parquet")
    shards = ss.ShardedRecord(tmp_path)
    options = {"loss": "zero_one", "epsilon": 0.2}
    found = ss.calibrate(shards, **options)
    assert str(found) == str(ss.calibrate(shards.load(), **options))
    assert "of the usd" in str(found)


def test_samples_of_a_pilot_are_refused_as_in_memory(tmp_path):
    """Numbers of samples without ids identify nothing, also those of the second file."""
    sample = ss.simulate.Population().sample(900, seed=0)
    record = ss.ExitRecord.from_logits(sample.logits[:600], sample.labels[:600])
    for k in range(2):
        record.take(range(300 * k, 300 * k + 300)).save(tmp_path / f"{k}.parquet")
    folder = ss.ShardedRecord(tmp_path)

    def calibrated(given, pilot):
        path = ss.Path.pareto(pilot, loss="zero_one")
        return ss.calibrate(given, loss="zero_one", epsilon=0.1, path=path)

    other = ss.ExitRecord.from_logits(np.tile(sample.logits[600:], (2, 1, 1))[:500])
    path = ss.Path.pareto(other, "consistency", "zero_one")
    found = [
        ss.calibrate(each, loss="zero_one", epsilon=0.1, path=path) for each in (record, folder)
    ]
    assert found[0].model_dump() == found[1].model_dump()
    assert found[1].certificate.samples.pilot == 500
    same = ss.ExitRecord.from_logits(sample.logits[:600], sample.labels[:600])  # another drawn seed
    for given in (record, folder):
        for pilot in (record.take(range(400, 600)), same):
            with pytest.raises(ValueError, match="samples of the pilot"):
                calibrated(given, pilot)
