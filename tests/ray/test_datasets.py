"""Collecting over a Ray Dataset: Parquet, images and a Hugging Face dataset, in any engine."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch

from swiftsure import RunOptions
from swiftsure.torch import collect
from swiftsure.torch.collecting import InterruptedCollectionError
from swiftsure.torch.ray_data import RemoteBatch, dataset_batches
from tests.ray.builders import SETTINGS, same
from tests.torch.builders import inputs, labels, network

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by Ray Data, of itself

N, SIZE = 150, 16


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """Samples in three files with ids and groups; row groups do not end where batches do."""
    folder = tmp_path_factory.mktemp("samples")
    x, y = inputs(N).numpy(), labels(N).numpy()
    for k, part in enumerate(np.array_split(np.arange(N), [41, 90])):
        columns = {
            "pixels": list(x[part]),
            "labels": y[part],
            "ids": [f"sample-{i:03d}" for i in part],
            "groups": part // 3,
        }
        pq.write_table(pa.table(columns), folder / f"part-{k}.parquet", row_group_size=17)
    return folder


def dataset(folder):
    return ray.data.read_parquet(str(folder)).map_batches(to_inputs)


def to_inputs(batch):
    return {
        "inputs": np.stack(batch["pixels"]).astype(np.float32),
        **{name: batch[name] for name in ("labels", "ids", "groups")},
    }


def loader(parts=None):
    """The same samples in this process."""
    x, y = inputs(N), labels(N)
    for k in range(0, N, SIZE):
        part = slice(k, min(k + SIZE, N))
        names = [f"sample-{i:03d}" for i in range(part.start, part.stop)]
        yield {
            "inputs": x[part],
            "labels": y[part],
            "ids": np.asarray(names, object),
            "groups": np.arange(part.start, part.stop) // 3,
        }
        if parts is not None and k // SIZE + 1 == parts:
            raise OSError("the disk is gone")


@pytest.mark.slow
def test_parquet_gives_the_local_record_and_resumes_a_local_run(cluster, parquet, tmp_path):
    model, place = network(), RunOptions(shards=tmp_path, shard_size=30)
    expected = collect(model, loader(), **SETTINGS)
    with pytest.raises(InterruptedCollectionError):
        collect(model, loader(5), run=place, **SETTINGS)
    given = dataset(parquet)
    on_ray = replace(place, engine="ray", workers=2)
    found = collect(model, given, run=on_ray, batch_size=SIZE, **SETTINGS)
    same(found, expected)
    assert np.array_equal(found.groups, expected.groups)
    assert not given.context.execution_options.preserve_order  # as it was
    same(collect(model, loader(), run=place, **SETTINGS), expected)  # which checks all hashes


@pytest.mark.slow
def test_a_local_run_goes_on_after_ray_and_over_the_same_dataset(cluster, parquet, tmp_path):
    model, place = network(), RunOptions(shards=tmp_path, shard_size=20)

    def failing(batch):
        if batch["ids"][0] >= "sample-120":
            raise OSError("the disk is gone")
        return batch

    broken = dataset(parquet).map_batches(failing, batch_size=10)
    with pytest.raises((InterruptedCollectionError, ray.exceptions.RayError)):
        collect(
            model, broken, run=replace(place, engine="ray", workers=1), batch_size=SIZE, **SETTINGS
        )
    found = collect(model, dataset(parquet), run=place, batch_size=SIZE, **SETTINGS)
    same(found, collect(model, loader(), **SETTINGS))


@pytest.mark.slow
def test_other_data_are_refused(cluster, parquet, tmp_path):
    model, place = network(), RunOptions(shards=tmp_path, engine="ray", workers=1)
    collect(model, dataset(parquet), run=place, batch_size=SIZE, **SETTINGS)
    changed = dataset(parquet).map_batches(lambda batch: {**batch, "labels": batch["labels"] * 0})
    with pytest.raises(ValueError, match="the labels differ"):
        collect(model, changed, run=place, batch_size=SIZE, **SETTINGS)


@pytest.mark.slow
def test_images(cluster, tmp_path):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 255, (20, 2, 3), dtype=np.uint8)
    for k, pixels in enumerate(pictures):
        image.fromarray(pixels).save(tmp_path / f"{k:02d}.png")

    def prepared(batch):
        return {
            "inputs": batch["image"].reshape(-1, 6).astype(np.float32) / 255,
            "ids": np.asarray([path.rpartition("/")[2] for path in batch["path"]]),
        }

    given = ray.data.read_images(str(tmp_path), include_paths=True, mode="L").map_batches(prepared)
    found = collect(network(), given, run=RunOptions(engine="ray", workers=1), batch_size=8)
    x = torch.from_numpy(pictures.reshape(20, 6).astype(np.float32) / 255)
    names = [f"{k:02d}.png" for k in range(20)]
    expected = collect(
        network(),
        [{"inputs": x[k : k + 8], "ids": names[k : k + 8]} for k in range(0, 20, 8)],
    )
    same(found, expected)


@pytest.mark.slow
def test_a_hugging_face_dataset(cluster):
    datasets = pytest.importorskip("datasets")
    x, y = inputs(50), labels(50)
    rows = datasets.Dataset.from_dict({"inputs": x.tolist(), "labels": y.tolist()})

    def prepared(batch):
        return {**batch, "inputs": np.stack(batch["inputs"]).astype(np.float32)}

    given = ray.data.from_huggingface(rows).map_batches(prepared)
    found = collect(
        network(), given, run=RunOptions(engine="ray", workers=1), batch_size=8, **SETTINGS
    )
    expected = collect(network(), zip(x.split(8), y.split(8), strict=True), **SETTINGS)
    same(found, expected)


def test_batches_are_cut_from_blocks(cluster):
    given = ray.data.from_items([{"inputs": float(k)} for k in range(20)], override_num_blocks=3)
    found = list(dataset_batches(given, 8))
    assert [batch.size for batch in found] == [8, 8, 4]
    assert torch.cat([each.load().inputs for each in found]).tolist() == list(range(20))
    assert found[0].rows(slice(5, None)).load().inputs.tolist() == [5, 6, 7]
    assert found[0].rows(slice(2)).load().inputs.tolist() == [0, 1]
    assert found[1].rows(slice(8, None)).size == 0
    assert RemoteBatch(()).size == 0


def test_what_cannot_be_a_batch_is_refused(cluster):
    with pytest.raises(ValueError, match="`batch_size` is for a Ray Dataset"):
        collect(network(), loader(), batch_size=8)
    ragged = ray.data.from_items([{"inputs": np.zeros(k + 1)} for k in range(2)])
    with pytest.raises(ValueError, match="column 'inputs' must have one shape"):
        collect(network(), ragged)
