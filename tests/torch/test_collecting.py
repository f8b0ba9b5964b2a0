"""`collect`: the record that the stacked logits would give, also after a break in the middle."""

import contextlib
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import swiftsure as ss
from swiftsure._lib.files import json_checksum
from swiftsure.losses import Loss, LossRange, TensorFunctions
from swiftsure.records import files as record_files
from swiftsure.torch import Scored, Staged, collect, cut, exit_flops, fingerprint
from swiftsure.torch.batches import Batch, DataHash, sample_digests
from swiftsure.torch.collecting import InterruptedCollectionError
from tests.torch.builders import (
    SCORES,
    OwnConfidence,
    Played,
    every_output,
    inputs,
    labels,
    logits,
    network,
    refused,
)


def batches(*tensors, size=16):
    """Batches of some size, as a loader would give them."""
    return list(zip(*(tensor.split(size) for tensor in tensors), strict=True))


def assert_same(one, two, *, costs=False):
    """Two records of the same samples; those of `collect` are computed in float32."""
    assert one.ids.tolist() == two.ids.tolist()
    assert one.has_ids == two.has_ids
    assert set(one.confidences) == set(two.confidences)
    for name, values in one.confidences.items():
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, two.confidences[name], atol=1e-6, rtol=0)
    for tables in ("losses", "inconsistencies"):
        assert set(getattr(one, tables)) == set(getattr(two, tables))
        for name, values in getattr(one, tables).items():
            np.testing.assert_allclose(values, getattr(two, tables)[name], atol=1e-9, rtol=0)
    assert one.loss_ranges == two.loss_ranges
    assert one.inconsistency_ranges == two.inconsistency_ranges
    assert (one.groups is None) == (two.groups is None)
    if one.groups is not None:
        assert one.groups.tolist() == two.groups.tolist()
    if costs:
        assert set(one.costs) == set(two.costs)
        for name in one.costs:
            assert np.array_equal(one.costs[name], two.costs[name])


# ------------------------------------------------------------------------------------ the record


@pytest.mark.parametrize("temperatures", [None, (2.0, 1.5, 1.0, 0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_the_record_of_the_stacked_logits(seed, temperatures):
    model, x, y = network(seed=seed), inputs(100, seed=seed), labels(100, seed=seed)
    record = collect(model, batches(x, y), scores=SCORES, temperatures=temperatures)
    # in the batches of the run: the network's own rounding depends on them
    outputs = torch.cat([every_output(model, part) for part in x.split(16)])
    scale = np.ones(4) if temperatures is None else np.asarray(temperatures)
    expected = ss.ExitRecord.from_logits(
        outputs.double().numpy(), y.numpy(), SCORES, temperatures=scale
    )
    if temperatures is None:
        assert_same(record, expected)
    else:  # the division is in float32
        scaled = (outputs / torch.tensor(temperatures)[:, None]).double().numpy()
        assert_same(record, ss.ExitRecord.from_logits(scaled, y.numpy(), SCORES))
    for name in SCORES:
        confidences = record.confidences[name]
        np.testing.assert_allclose(confidences, expected.confidences[name], atol=1e-5)
    assert record.temperatures == temperatures


def test_one_loss_and_one_score():
    record = collect(network(), batches(inputs(20), labels(20)), ["brier"], ["entropy"])
    assert set(record.losses) == set(record.inconsistencies) == {"brier"}
    assert set(record.confidences) == {"entropy"}


@pytest.mark.parametrize(
    "shape", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"inputs": x}]
)
def test_no_labels(shape):
    x = logits(40)
    record = collect(Played(4), [shape(part) for part in x.split(16)])
    expected = ss.ExitRecord.from_logits(x.double().numpy())
    assert record.losses == {}
    assert_same(record, expected)
    assert ss.calibrate(record, risk="consistency", loss="zero_one", epsilon=0.9).n_exits == 4


def test_missing_labels():
    x, y = logits(60), labels(60)
    y[::7] = -1
    y[3] = -100
    record = collect(Played(4), batches(x, y))
    assert_same(record, ss.ExitRecord.from_logits(x.double().numpy(), y.numpy()))
    missing = np.isnan(record.losses["zero_one"])
    assert np.array_equal(missing, np.repeat((y < 0).numpy()[:, None], 4, axis=1))
    assert set(record.inconsistencies) == {"zero_one", "brier"}


def test_labels_that_are_missing_in_a_later_shard_only(tmp_path):
    x, y = logits(60), labels(60)
    y[50] = -1
    record = collect(Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path, shard_size=16))
    assert_same(record, collect(Played(4), batches(x, y)))


def test_dicts_with_ids_and_groups():
    x, y = logits(50), labels(50)
    loader = [
        {"inputs": part, "labels": truth, "ids": ids, "groups": groups}
        for part, truth, ids, groups in zip(
            x.split(16),
            y.split(16),
            torch.arange(1000, 1050).split(16),
            np.array_split(np.repeat(np.arange(10), 5), [16, 32, 48]),
            strict=True,
        )
    ]
    record = collect(Played(4), loader)
    expected = ss.ExitRecord.from_logits(
        x.double().numpy(),
        y.numpy(),
        ids=np.arange(1000, 1050),
    )
    assert_same(record, replace(expected, groups=np.repeat(np.arange(10), 5)))
    assert ss.calibrate(record, loss="zero_one", epsilon=0.05).certificate.samples.unit == "groups"


@pytest.mark.parametrize("name", ["labels", "groups"])
@pytest.mark.parametrize("first", [False, True])
def test_batches_must_agree_in_what_they_hold(name, first):
    """Labels or groups of some batches only would be dropped, and with groups the guarantee."""
    with_it = {"inputs": logits(8), name: torch.zeros(8, dtype=torch.long)}
    without = {"inputs": logits(8)}
    with pytest.raises((ValueError, RuntimeError), match=name.removesuffix("s")):
        collect(Played(4), [with_it, without] if first else [without, with_it])


def test_stages_that_work_in_place():
    """A head may hand out its state, and the next stage write over it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 5)).eval()
    model = cut(plain, ["0"], [nn.Identity()]).eval()
    x, y = inputs(30), labels(30)
    with torch.no_grad():
        outputs = torch.stack([plain[0](x), plain(x)], dim=1)
        for one, two in zip(model(x), outputs.unbind(dim=1), strict=True):
            assert torch.equal(one, two)
    record = collect(model, [(x, y)])
    assert_same(record, ss.ExitRecord.from_logits(outputs.double().numpy(), y.numpy()))


def test_models_that_write_over_their_inputs():
    """FLOPs are counted on the first batch, which must not have been changed before it is run."""

    class Centred(Played):
        def begin(self, batch):
            return super().begin(batch.sub_(1.0).mul_(2.0))

    x = logits(30)
    record = collect(Centred(4), [part.clone() for part in x.split(16)])
    assert_same(record, collect(Played(4), [2.0 * (x - 1.0)]))


def test_ids_that_are_text():
    x, y = inputs(20), labels(20)
    names = [f"sample {i}" for i in range(20)]
    loader = [(x[i : i + 8], y[i : i + 8], names[i : i + 8]) for i in range(0, 20, 8)]
    assert collect(network(), loader).ids.tolist() == names


def test_nested_inputs():
    class Two(Staged):
        n_exits = 2

        def begin(self, batch):
            return batch["a"] + batch["more"][0]

        def advance(self, exit_index, state):
            return state * 2

        def head(self, exit_index, state):
            return state

    x, y = torch.randn(12, 3), torch.randn(12, 3)
    record = collect(Two().eval(), [({"a": x, "more": [y]}, labels(12, 3))])
    both = torch.stack([2 * (x + y), 4 * (x + y)], dim=1)
    assert_same(record, ss.ExitRecord.from_logits(both.double().numpy(), labels(12, 3).numpy()))


def test_the_models_own_confidence():
    confidences = torch.rand(30, 3, generator=torch.Generator().manual_seed(0))

    class Both(OwnConfidence):
        def head(self, exit_index, state):
            scored = super().head(exit_index, state)
            return Scored(torch.stack([scored.confidence, 0 * scored.confidence], 1), scored[1])

    record = collect(Both(3), [confidences], scores=["model", "top1"])
    assert np.array_equal(record.confidences["model"], confidences[:, :2].numpy())
    promise = ss.Promise("zero_one", epsilon=0.05, risk="consistency")
    request = ss.Calibration([promise], rule=ss.ExitRule("model"))
    assert request.run(record).score == "model"


def test_losses_of_ones_own():
    def against_last(outputs):
        last = outputs[-1].softmax(dim=1)
        return torch.stack([(o.softmax(dim=1) - last).abs().sum(1) for o in outputs], dim=1)

    functions = TensorFunctions(against_last=against_last)
    loss = Loss("distance", LossRange(0, 2), "distribution", tensors=functions)
    model, x = network(), inputs(20)
    record = collect(model, [(x, labels(20))], losses=["zero_one", loss])
    p = every_output(model, x).softmax(dim=2)
    expected = (p - p[:, -1:]).abs().sum(dim=2)
    np.testing.assert_allclose(record.inconsistencies["distance"], expected.numpy(), atol=1e-6)
    assert record.inconsistency_ranges["distance"] == LossRange(0, 2)
    assert set(record.losses) == {"zero_one"}
    with pytest.raises(ValueError, match=r"'bleu' .* `tensors\.against_last` or `tensors\.against"):
        collect(model, [(x, labels(20))], losses=["bleu"])


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("temperatures", [None, (2.0, 1.5, 1.0, 0.5)])
def test_what_the_policy_is_bound_to(tmp_path, dtype, temperatures):
    model, x = network(), inputs(64)
    record = collect(model, [(x, labels(64))], dtype=dtype, temperatures=temperatures)
    assert record.dtype == dtype
    assert record.temperatures == temperatures
    assert record.fingerprint == fingerprint(model, temperatures=temperatures, dtype=dtype)
    record.save(tmp_path / "record.parquet")
    loaded = ss.ExitRecord.load(tmp_path / "record.parquet")
    assert_same(loaded, record, costs=True)
    for name in ("dtype", "temperatures", "fingerprint"):
        assert getattr(loaded, name) == getattr(record, name)
    policy = ss.calibrate(loaded, loss="zero_one", epsilon=0.05)
    assert (policy.dtype, policy.temperatures) == (dtype, temperatures)
    assert policy.certificate.provenance.model == record.fingerprint


def test_the_fingerprint_is_of_the_model_before_it_ran(monkeypatch):
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("batches", torch.zeros(1))

        def forward(self, x):
            self.batches += 1
            self.register_buffer(f"seen_{int(self.batches)}", torch.zeros(1))
            return super().forward(x)

    model = Staged.from_sequential(
        [nn.Linear(4, 4), Counting()], [nn.Linear(4, 3), nn.Linear(4, 3)]
    ).eval()
    before = fingerprint(model)
    ran = threading.Event()
    module = sys.modules["swiftsure.torch.fingerprinting"]
    taken = module._hash

    def late(*given):
        ran.wait(30)
        return taken(*given)

    monkeypatch.setattr(module, "_hash", late)

    def some():
        yield from inputs(6, 4).split(3)
        ran.set()

    assert collect(model, some()).fingerprint == before
    assert fingerprint(model) != before


def test_a_model_that_is_no_module_has_no_fingerprint():
    class Plain:
        n_exits = 2

        def begin(self, batch):
            return batch

        def advance(self, exit_index, state):
            return state

        def head(self, exit_index, state):
            return state

    assert collect(Plain(), [inputs(5)]).fingerprint is None


def test_costs():
    model, x = network(), inputs(40)
    record = collect(model, x.split(16), seconds=True)
    assert set(record.costs) == {"exit", "flops", "seconds"}
    assert np.array_equal(record.costs["flops"], exit_flops(model, x[:5]))
    assert (np.diff(record.costs["seconds"], prepend=0) > 0).all()
    assert "seconds" not in collect(model, x.split(16)).costs


@pytest.mark.parametrize("size", [1, 7, 64])
def test_loaders_of_torch(size):
    x, y = logits(64), labels(64)
    loader = DataLoader(TensorDataset(x, y), batch_size=size)
    assert_same(collect(Played(4), loader), collect(Played(4), [(x, y)]))


def test_loaders_without_a_length():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(zip(logits(20), labels(20), strict=True))

    expected = collect(Played(4), [(logits(20), labels(20))])
    generator = (part for part in batches(logits(20), labels(20)))
    assert_same(collect(Played(4), generator), expected)
    assert_same(collect(Played(4), DataLoader(Endless(), batch_size=8)), expected)


def test_the_bar_counts_batches(monkeypatch):
    shown = []

    @contextmanager
    def steps(title, total, visible):
        assert visible
        shown.append((title, total, 0))
        yield lambda: shown.append((*shown[-1][:2], shown[-1][2] + 1))

    monkeypatch.setattr("swiftsure.torch.collecting.steps", steps)
    collect(Played(4), batches(logits(40), labels(40)), run=ss.RunOptions(progress=True))
    assert shown == [("collecting", 3, done) for done in range(4)]
    shown.clear()
    collect(Played(4), iter(batches(logits(40), labels(40))), run=ss.RunOptions(progress=True))
    assert shown == [("collecting", None, done) for done in range(4)]


class Wide(Played):
    """Many classes, most of which are never likely."""

    n_classes = 5_000

    def head(self, exit_index, state):
        narrow = super().head(exit_index, state)
        return torch.cat([narrow, narrow.new_zeros(len(narrow), self.n_classes - 5)], dim=1)


def test_tensors_as_wide_as_the_classes_are_gone_before_the_next_batch():
    alive = []

    class Watched(Wide):
        def begin(self, batch):
            tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
            alive.append(sum(each.shape[-1:] == (self.n_classes,) for each in tensors))
            return super().begin(batch)

    record = collect(Watched(4), batches(logits(64), labels(64)), scores=SCORES)
    assert record.n == 64
    assert alive == [0] * 5  # once more for the first sample, to count its FLOPs


def test_memory_does_not_grow_with_classes():
    x, y = logits(96), labels(96)
    collect(Wide(4), batches(x[:16], y[:16]))  # what the first call leaves in memory
    tracemalloc.start()
    try:
        collect(Wide(4), batches(x, y), scores=SCORES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 96 * Wide.n_classes * 4 / 2


# -------------------------------------------------------------------------------------- resuming


def broken(loader, after):
    """A loader that breaks off after some batches."""
    yield from itertools.islice(loader, after)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_break_leaves_what_was_collected(after):
    model, x, y = Played(4), logits(90), labels(90)
    with pytest.raises(InterruptedCollectionError, match="the disk is gone") as caught:
        collect(model, broken(batches(x, y), after))
    assert f"OSError after {16 * after} samples" in str(caught.value)
    whole = collect(model, batches(x, y))
    assert_same(caught.value.record, whole.take(np.arange(16 * after)), costs=True)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_break_with_nothing_to_keep():
    with pytest.raises(OSError, match="the disk is gone"):
        collect(Played(4), broken([], 0))


def test_a_break_in_the_model():
    class Failing(Played):
        def advance(self, exit_index, state):
            if 40 in state["numbers"]:
                raise RuntimeError("out of memory")
            return super().advance(exit_index, state)

    with pytest.raises(InterruptedCollectionError, match="out of memory") as caught:
        collect(Failing(4), logits(60).split(10))
    assert caught.value.record.n == 30  # the first batch was also counted for FLOPs


@pytest.mark.parametrize("shard_size", [1, 20, 64, 1000])
@pytest.mark.parametrize("size", [16, 10, 7, 90])
@pytest.mark.parametrize("after", [1, 4])
def test_a_run_resumes_from_its_shards(tmp_path, after, size, shard_size):
    """Also with batches of another size, so that the break falls inside one."""
    x, y, numbers = logits(90), labels(90), torch.arange(90)

    def loader(size):
        for a, b, c in batches(x, y, numbers, size=size):
            yield {"inputs": a, "labels": b, "groups": c // 3, "ids": 500 + c}

    model = Played(4)
    with pytest.raises(InterruptedCollectionError, match=str(tmp_path)):
        collect(
            model,
            broken(loader(16), after),
            run=ss.RunOptions(shards=tmp_path, shard_size=shard_size),
        )
    begun = model.begun
    record = collect(model, loader(size), run=ss.RunOptions(shards=tmp_path, shard_size=shard_size))
    assert model.begun - begun == 90 - 16 * after
    assert_same(record, collect(Played(4), loader(16)), costs=True)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".parquet"}


def test_a_run_resumes_inside_a_batch_with_names(tmp_path):
    model, x = Played(4), logits(20)
    names = [f"sample {i}" for i in range(20)]

    def loader(size):
        for i in range(0, 20, size):
            part = slice(i, i + size)
            yield {"inputs": x[part], "labels": labels(20)[part].tolist(), "ids": names[part]}

    with pytest.raises(InterruptedCollectionError):
        collect(model, broken(loader(6), 1), run=ss.RunOptions(shards=tmp_path))
    record = collect(model, loader(4), run=ss.RunOptions(shards=tmp_path))
    assert record.ids.tolist() == names


def test_ids_follow_the_order_of_the_loader_after_a_break(tmp_path):
    model, x = Played(4), logits(50)
    with pytest.raises(InterruptedCollectionError):
        collect(model, broken(x.split(16), 2), run=ss.RunOptions(shards=tmp_path))
    record = collect(model, x.split(9), run=ss.RunOptions(shards=tmp_path))
    assert record.ids.tolist() == list(range(50))
    assert_same(record, collect(model, [x]))


def test_an_interruption_goes_on_and_leaves_its_shards(tmp_path):
    x, y = logits(90), labels(90)

    def interrupted():
        yield from batches(x, y)[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(Played(4), interrupted(), run=ss.RunOptions(shards=tmp_path))
    model = Played(4)
    record = collect(model, batches(x, y), run=ss.RunOptions(shards=tmp_path))
    assert model.begun == 90 - 48
    assert_same(record, collect(Played(4), batches(x, y)), costs=True)


def test_several_breaks(tmp_path):
    model, x, y = Played(4), logits(90), labels(90)
    for after in (1, 2, 4, 5):
        with pytest.raises(InterruptedCollectionError) as caught:
            collect(
                model,
                broken(batches(x, y), after),
                run=ss.RunOptions(shards=tmp_path, shard_size=20),
            )
        assert caught.value.record.n == 16 * after
    record = collect(model, batches(x, y), run=ss.RunOptions(shards=tmp_path, shard_size=20))
    assert_same(record, collect(model, batches(x, y)), costs=True)


def test_a_whole_collection_is_read_from_its_shards(tmp_path):
    model, x, y = Played(4), logits(40), labels(40)
    first = collect(model, batches(x, y), run=ss.RunOptions(shards=tmp_path, shard_size=16))
    begun = model.begun
    assert_same(
        collect(model, batches(x, y), run=ss.RunOptions(shards=tmp_path)), first, costs=True
    )
    assert model.begun == begun


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    x, y = logits(90), labels(90)
    write = record_files.write

    def full(table, path, **options):
        if path.name == "shard-00001.parquet":
            raise OSError("no space left")
        write(table, path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(record_files, "write", full)
        with pytest.raises(InterruptedCollectionError, match="no space left") as caught:
            collect(Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path, shard_size=32))
    assert (caught.value.record.n, caught.value.n_saved) == (64, 32)
    record = collect(Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path, shard_size=32))
    assert_same(record, collect(Played(4), batches(x, y)), costs=True)


def test_a_resumed_run_must_be_given_the_same_parts(tmp_path):
    x, y = logits(40), labels(40)
    with pytest.raises(InterruptedCollectionError):
        collect(Played(4), broken(batches(x, y), 1), run=ss.RunOptions(shards=tmp_path))
    with pytest.raises(ValueError, match="among the first 16 the labels differ"):
        collect(Played(4), x.split(16), run=ss.RunOptions(shards=tmp_path))
    assert collect(Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path)).n == 40


@pytest.mark.parametrize("finished", [True, False])
def test_shards_are_bound_to_their_data(tmp_path, finished):
    x, y = logits(90), labels(90)
    first = batches(x, y)
    if finished:
        collect(Played(4), first, run=ss.RunOptions(shards=tmp_path, shard_size=32))
    else:
        with pytest.raises(InterruptedCollectionError):
            collect(Played(4), broken(first, 4), run=ss.RunOptions(shards=tmp_path, shard_size=32))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refused(loader, message):
        with pytest.raises(ValueError, match=message):
            collect(Played(4), loader, run=ss.RunOptions(shards=tmp_path, shard_size=32))
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    shuffled = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    refused(batches(x[shuffled], y[shuffled]), "among the first 32 the inputs and labels differ")
    late = x.clone()
    late[40] += 1
    refused(batches(late, y), "among the first 64 the inputs differ")
    refused(batches(x, (y + 1) % 3), "among the first 32 the labels differ")
    refused(batches(x[:50], y[:50]), r"it gives only 50: pass the same data")


def test_a_finished_run_goes_on_with_more_samples(tmp_path):
    x, y = logits(90), labels(90)
    collect(Played(4), batches(x[:64], y[:64]), run=ss.RunOptions(shards=tmp_path))
    model = Played(4)
    record = collect(model, batches(x, y), run=ss.RunOptions(shards=tmp_path))
    assert model.begun == 90 - 64
    assert_same(record, collect(Played(4), batches(x, y)), costs=True)


@pytest.mark.parametrize("damage", ["deleted", "cut", "flipped"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_lost_shard_is_collected_again(tmp_path, damage, number):
    x, y = logits(90), labels(90)
    collect(Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path, shard_size=32))
    path = tmp_path / f"shard-0000{number}.parquet"
    content = bytearray(path.read_bytes())
    if damage == "deleted":
        path.unlink()
        expected = contextlib.nullcontext()
    else:
        content[len(content) // 3] ^= 1
        path.write_bytes(content[:-50] if damage == "cut" else content)
        expected = pytest.warns(UserWarning, match=rf"This shard is made again: .*{path.name}")
    with expected:
        record = collect(
            Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path, shard_size=32)
        )
    assert_same(record, collect(Played(4), batches(x, y)), costs=True)


def test_a_shard_of_another_run_is_collected_again(tmp_path):
    x, y = logits(90), labels(90)
    collect(Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path / "own", shard_size=32))
    collect(
        Played(4),
        batches(x.flip(0), y),
        run=ss.RunOptions(shards=tmp_path / "other", shard_size=32),
    )
    shutil.copy(tmp_path / "other" / "shard-00001.parquet", tmp_path / "own")
    with pytest.warns(UserWarning, match=r"made again: .*shard-00001.parquet is not the shard"):
        record = collect(
            Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path / "own", shard_size=32)
        )
    assert_same(record, collect(Played(4), batches(x, y)), costs=True)


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    x, y = logits(90), labels(90)
    collect(Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path, shard_size=32))
    copies = ["shard-00000 (copy).parquet", "shard-0.parquet", "shard-00001.parquet.bak"]
    for name in copies:
        shutil.copy(tmp_path / "shard-00000.parquet", tmp_path / name)
    assert (
        collect(Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path, shard_size=32)).n == 90
    )
    assert all((tmp_path / name).exists() for name in copies)


def test_temporary_files_of_any_shard_are_removed(tmp_path):
    collect(Played(4), [logits(20)], run=ss.RunOptions(shards=tmp_path))
    old, new = tmp_path / ".shard-00099.parquet.abc.part", tmp_path / ".manifest.json.def.part"
    old.touch()
    os.utime(old, (0, 0))
    new.touch()  # perhaps still being written
    collect(Played(4), [logits(20)], run=ss.RunOptions(shards=tmp_path))
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": None},
        {"notes": None},
        {"shards": None},
        {"identity": []},
        {"notes": {"data": [1]}},
        {"notes": {"data": [{"n": "20", "hashes": {}}]}},
        {"notes": {"data": [{"n": 21, "hashes": {}}]}},
        {"notes": {"left_out": {"x": []}}},
        {"notes": {"batches": 3}},
    ],
)
def test_a_manifest_of_another_shape_is_refused(tmp_path, changes):
    collect(Played(4), [logits(20)], run=ss.RunOptions(shards=tmp_path))
    manifest = tmp_path / "manifest.json"
    content = json.loads(manifest.read_text()) | changes
    del content["checksum"]
    content = {name: value for name, value in content.items() if value is not None}
    manifest.write_text(json.dumps(content | {"checksum": json_checksum(content)}))
    with pytest.raises(ValueError, match=r"manifest.json is not a manifest") as caught:
        collect(Played(4), [logits(20)], run=ss.RunOptions(shards=tmp_path))
    assert "\n" not in str(caught.value)


def test_a_manifest_that_does_not_describe_a_shard(tmp_path):
    x = logits(60)
    collect(Played(4), x.split(20), run=ss.RunOptions(shards=tmp_path, shard_size=20))
    manifest = tmp_path / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["checksum"], content["notes"]["data"][1:]
    manifest.write_text(json.dumps(content | {"checksum": json_checksum(content)}))
    model = Played(4)
    assert_same(
        collect(model, x.split(20), run=ss.RunOptions(shards=tmp_path)), collect(Played(4), [x])
    )
    assert model.begun == 40


class Scaled(Played):
    """Multiplies its outputs by a number that comes with each batch."""

    def begin(self, batch):
        outputs, scale = batch
        return super().begin(outputs * scale)


@pytest.mark.parametrize("size", [16, 10])
def test_a_number_in_the_inputs_belongs_to_every_sample(tmp_path, size):
    x, y = logits(60), labels(60)

    def loader(size, scale=2.0):
        for a, b in batches(x, y, size=size):
            yield {"inputs": (a, torch.tensor(scale)), "labels": b}

    with pytest.raises(InterruptedCollectionError):
        collect(Scaled(4), broken(loader(16), 2), run=ss.RunOptions(shards=tmp_path))
    with pytest.raises(ValueError, match=r"inputs \(2\) differ"):
        collect(Scaled(4), loader(size, 3.0), run=ss.RunOptions(shards=tmp_path))
    record = collect(Scaled(4), loader(size), run=ss.RunOptions(shards=tmp_path))
    assert_same(record, collect(Scaled(4), loader(16)))


@pytest.mark.parametrize(
    "other", [lambda x: x.view(torch.int32), lambda x: x.reshape(len(x), 2, -1)]
)
def test_shards_are_bound_to_dtype_and_shape(other):
    x = logits(12)
    assert digest([x]) == digest(x.split(5))
    assert digest([x]) != digest([other(x)])


def digest(parts):
    found = DataHash()
    for part in parts:
        found.update(sample_digests(Batch(part)))
    return found.digests()


def test_text_has_the_same_hash_in_batches_of_any_size():
    x, names = logits(3), ["a", "longer", "b"]
    one, many = DataHash(), DataHash()
    one.update(sample_digests(Batch(x, ids=names)))
    for i in range(3):
        many.update(sample_digests(Batch(x[i : i + 1], ids=names[i : i + 1])))
    assert one.digests() == many.digests()


def test_two_runs_never_share_a_folder(tmp_path):
    x, y = logits(90), labels(90)

    def nested():
        yield from batches(x, y)[:1]
        collect(Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path))

    with pytest.raises(InterruptedCollectionError, match="is locked by another process"):
        collect(Played(4), nested(), run=ss.RunOptions(shards=tmp_path))
    collect(Played(4), batches(x, y), run=ss.RunOptions(shards=tmp_path))  # the lock was released


def test_shards_are_also_written_after_some_time(tmp_path):
    collect(
        Played(4),
        batches(logits(90), labels(90)),
        run=ss.RunOptions(shards=tmp_path, shard_seconds=0),
    )
    assert len(list(tmp_path.glob("*.parquet"))) == 6


def test_shards_without_their_list_are_refused(tmp_path):
    collect(Played(4), [logits(20)], run=ss.RunOptions(shards=tmp_path))
    (tmp_path / "manifest.json").unlink()
    with refused("shards"):
        collect(Played(4), [logits(20)], run=ss.RunOptions(shards=tmp_path))


KILLED = """
    import os
    import sys
    from tests.torch.builders import Played, labels, logits
    from swiftsure import RunOptions
    from swiftsure.torch import collect

    def loader():
        for i, part in enumerate(zip(logits(90).split(16), labels(90).split(16))):
            if i == 4:
                os.kill(os.getpid(), 9)
            yield part

    collect(Played(4), loader(), run=RunOptions(shards=sys.argv[1], shard_size=20))
"""


def test_a_killed_process(tmp_path):
    path = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -9, done.stderr
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["manifest.json", "shard-00000.parquet", "shard-00001.parquet"]
    (tmp_path / ".shard-00002.parquet.abc.part").write_bytes(b"half a shard")
    whole = batches(logits(90), labels(90))
    record = collect(Played(4), whole, run=ss.RunOptions(shards=tmp_path, shard_size=20))
    assert_same(record, collect(Played(4), whole), costs=True)


@pytest.mark.parametrize(
    "other",
    [
        {"model": network(seed=1)},
        {"losses": ["zero_one"]},
        {"scores": ["entropy"]},
        {"temperatures": (1.0, 1.0, 1.0, 2.0)},
        {"dtype": "bfloat16"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_shards_of_another_run_are_refused(tmp_path, other):
    arguments = {"model": network(), "loader": batches(inputs(40), labels(40))}
    arguments["run"] = ss.RunOptions(shards=tmp_path, shard_size=16)
    collect(**arguments)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with refused("shards"):
        collect(**arguments | other)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_shards_of_an_older_score_definition_are_refused(tmp_path, monkeypatch):
    arguments = {"model": network(), "loader": batches(inputs(40), labels(40))}
    arguments["run"] = ss.RunOptions(shards=tmp_path, shard_size=16)
    collect(**arguments)
    monkeypatch.setattr("swiftsure.torch.reducing.SCORE_VERSION", 99)
    with pytest.raises(ValueError, match=r"`shards`: .* score_version"):
        collect(**arguments)


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("loss", ["zero_one", "brier"])
@pytest.mark.parametrize("exit_", [0, 3])
def test_nan_is_refused_by_name(exit_, loss, score):
    """At whichever exit, and whatever is to be recorded of it."""
    batch = logits(40)
    batch[37, exit_, 1] = torch.nan
    with pytest.raises((ValueError, RuntimeError), match=f"exit {exit_ + 1} is NaN .* sample 37"):
        collect(Played(4), batch.split(16), losses=[loss], scores=[score])


@pytest.mark.parametrize("score", SCORES)
def test_a_confidence_that_is_no_number_is_refused(score):
    batch = logits(40)
    batch[37, 1, 1] = torch.inf
    with pytest.raises((ValueError, RuntimeError), match=r"exit 2 .* sample 37"):
        collect(Played(4), batch.split(16), losses=["zero_one"], scores=[score])


def test_what_the_library_refuses_is_a_value_error():
    batch = logits(20)
    batch[3, 1, 1] = torch.nan
    with pytest.raises(ValueError, match="sample 3"):
        collect(Played(4), [batch])


@pytest.mark.parametrize("score", ["topp1", "model"])
def test_scores_are_checked(score):
    with pytest.raises(ValueError, match="`score"):
        collect(network(), [inputs(5)], scores=[score])


def test_arguments_are_checked_before_anything_runs():
    model = Played(4)
    for name, value in [
        ("losses", ["zero_won"]),
        ("scores", ["topp1"]),
        ("scores", []),
        ("dtype", "int8"),
        ("temperatures", (1.0, 1.0)),
        ("temperatures", (1.0, 1.0, -1.0, 1.0)),
        ("temperatures", (1.0, 1.0, 0.0, 1.0)),
    ]:
        with pytest.raises((ValueError, TypeError), match=f"`{name.removesuffix('s')}s?`"):
            collect(model, [logits(5)], **{name: value})
    assert model.stages == []


def test_training_mode_is_refused():
    model = network().train()
    with refused("model"):
        collect(model, [inputs(5)])
    model.eval().heads[2].train()
    with pytest.raises(ValueError, match=r"part 'heads\.2' is in training mode"):
        collect(model, [inputs(5)])


def test_models_without_exits_are_refused():
    with pytest.raises(TypeError, match=r"`model` must have a method `begin`, but Linear has none"):
        collect(nn.Linear(6, 5), [inputs(5)])


def test_an_empty_loader():
    for loader in ([], [inputs(0)], [(inputs(0), labels(0))]):
        with refused("loader"):
            collect(network(), loader)


def test_empty_batches_among_others():
    x = logits(20)
    record = collect(Played(4), [x[:0], x[:8], x[:0], x[8:]])
    assert_same(record, collect(Played(4), [x]), costs=True)


def test_another_device():
    with pytest.raises(ValueError, match=r"`device` must be the model's, cpu, but got cuda"):
        collect(network(), [inputs(5)], device="cuda")
    with refused("device"):
        collect(network(), [inputs(5)], device="gpu")
    record = collect(network(), [inputs(5)], device="cpu")
    assert record.n == 5


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": "text"}, "must have the key `inputs`"),
        ((torch.zeros(3, 6),) * 4, r"\(inputs, labels, ids\), but has 4"),
        (("text", "text"), "`batch` must hold at least one tensor"),
    ],
)
def test_batches_of_another_form(batch, words):
    with pytest.raises((ValueError, TypeError, InterruptedCollectionError), match=words):
        collect(network(), [batch])


def test_outputs_of_the_wrong_shape():
    class Image(Played):
        def head(self, exit_index, state):
            return super().head(exit_index, state)[:, :, None]

    with pytest.raises((ValueError, RuntimeError), match=r"\(n, n_classes\)"):
        collect(Image(4), [logits(5)])

    class Mean(Played):
        def head(self, exit_index, state):
            return super().head(exit_index, state).mean(dim=0, keepdim=True)

    with pytest.raises(
        (ValueError, RuntimeError),
        match=r"exit 1 must have the samples .* 5, but has shape \(1, 5\)",
    ):
        collect(Mean(4), [logits(5)])


def test_nested_outputs_need_losses_and_scores_of_their_own():
    class Nested(Played):
        def head(self, exit_index, state):
            output = super().head(exit_index, state)
            return Scored({"logits": output}, output.softmax(dim=1).amax(dim=1))

    with pytest.raises(ValueError, match="a Loss of your own"):
        collect(Nested(4), [logits(5)], scores=["model"])
    with pytest.raises(ValueError, match=r"`temperatures` .* exit 1 returns dict"):
        collect(Nested(4), [logits(5)], scores=["model"], temperatures=(2.0,) * 4)


@pytest.mark.parametrize(
    "truth", [labels(6), labels(1), labels(5)[:, None], torch.tensor(2)], ids=str
)
def test_labels_that_do_not_fit(truth):
    with pytest.raises((ValueError, RuntimeError), match=r"labels|losses"):
        collect(network(), [(inputs(5), truth)], losses=["zero_one"])


def test_labels_beyond_the_classes():
    with pytest.raises((ValueError, RuntimeError), match="labels"):
        collect(network(), [(inputs(5), torch.tensor([0, 1, 2, 3, 5]))], losses=["zero_one"])


def test_an_id_used_twice():
    x, y = inputs(10), labels(10)
    with pytest.raises((ValueError, RuntimeError), match="`ids` must be unique"):
        collect(network(), [(x, y, torch.arange(10)), (x, y, torch.arange(9, 19))])


def test_a_network_with_batch_statistics_is_left_as_it_was():
    model = Staged.from_sequential(
        [nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), nn.Linear(8, 8)],
        [nn.Linear(8, 5), nn.Linear(8, 5)],
    ).eval()
    before = fingerprint(model)
    record = collect(model, [(inputs(20), labels(20))], seconds=True)
    assert fingerprint(model) == before == record.fingerprint


# ------------------------------------------------------------------------------ first mistakes


def test_probabilities_in_place_of_logits_warn():
    p = logits(40).softmax(dim=2)
    with pytest.warns(UserWarning, match="a model without its last softmax"):
        collect(Played(4), [(p, labels(40))])


def test_labels_that_are_text_are_refused():
    x = inputs(40)
    with pytest.raises(TypeError, match=r"Labels must be numbers.* such as 'cat': number the"):
        collect(network(), [(x, ["cat"] * len(x))])


@pytest.mark.parametrize("wrong", [lambda x: {"image": x, "target": x}, lambda x: (x[:, :1], None)])
def test_a_first_batch_that_does_not_fit_is_described(wrong):
    with pytest.raises(Exception, match=r".") as raised:
        collect(network(), [wrong(inputs(40))])
    (note,) = raised.value.__notes__
    assert note.startswith("The model failed on the first batch, which has ")
    assert "a dict with the keys `inputs` and `labels`" in note
