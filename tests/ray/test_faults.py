"""kill -9 of a worker, of half the workers and of the driver: nothing is lost, nothing is twice."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import ray

from swiftsure import RunOptions
from swiftsure.records import ExitRecord, ThresholdRecord
from swiftsure.run import Runs, Sweep
from swiftsure.run.ray_pool import RETRIES, RayPool
from swiftsure.torch import collect
from tests.ray.builders import (
    ALL_WORKERS,
    MODEL_WORKERS,
    SETTINGS,
    batches,
    same,
    same_sweep,
    start,
    worker_pids,
)
from tests.torch.builders import inputs, labels, network

WORKERS, N = 4, 600


class SlowSweep(Sweep):
    """A system of which each run takes a while."""

    def prepare(self, inputs):
        def run(rows, columns):
            time.sleep(0.05)
            answer = (rows + inputs.start) * 10.0 + columns
            return Runs({"cost": answer}, np.eye(len(self.grid), dtype=bool)[columns])

        return run

    def columns(self, inputs, tables):
        n = inputs.stop - inputs.start
        losses = {"x": np.linspace(0, 1, n * 3).reshape(n, 3) * [0, 1, 1]}
        return {"inconsistencies": losses, "costs": tables, "ids": np.arange(n) + inputs.start}

    def identity(self):
        return {"data": "fixed"}


def sweep(n=60, **options):
    made = SlowSweep(system="slow", grid=np.asarray([np.inf, 0.9, 0.5]), batch_size=4)
    return made.run(n, RunOptions(shard_size=4, **options))


class Slowly(list):
    """A loader that takes its time, so that a kill falls into the run."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.05)
            yield batch


def dataset(n):
    x, y = inputs(n).numpy(), labels(n).numpy()
    rows = [{"inputs": x[k], "labels": y[k], "ids": k} for k in range(n)]
    return ray.data.from_items(rows, override_num_blocks=20).map_batches(slow_batch)


def slow_batch(batch):
    time.sleep(0.1)
    return batch


class Killer(threading.Thread):
    """Kills some workers as soon as the folder holds a number of shards."""

    def __init__(self, folder, shards, n, titles=MODEL_WORKERS):
        super().__init__()
        self.folder, self.shards, self.n, self.titles = folder, shards, n, titles
        self.killed = []
        self.stopped = threading.Event()

    def run(self):
        while (
            len(list(self.folder.glob("shard-*.parquet"))) < self.shards
            or len(found := worker_pids(self.titles)) < self.n
        ):
            if self.stopped.wait(0.01):
                return
        for pid in found[: self.n]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed.append(pid)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_error):
        self.stopped.set()
        self.join()


def counted_once(folder, kind, n):
    """The shards hold every id once."""
    parts = [kind.load(path).ids for path in sorted(folder.glob("shard-*.parquet"))]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


# ------------------------------------------------------------------------------------------ workers


@pytest.mark.slow
@pytest.mark.parametrize("n_killed", [1, WORKERS // 2])
@pytest.mark.parametrize("after", [0, 1, 4, 8])
def test_killed_workers_of_a_collection(cluster, tmp_path, after, n_killed):
    model, data = network(), batches(N)
    with Killer(tmp_path, after, n_killed) as killer:
        found = collect(
            model,
            Slowly(data),
            run=RunOptions(engine="ray", workers=WORKERS, shards=tmp_path, shard_size=40),
            **SETTINGS,
        )
    assert len(killer.killed) == n_killed
    same(found, collect(model, data, **SETTINGS))
    counted_once(tmp_path, ExitRecord, N)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("n_killed", [1, 2])
@pytest.mark.parametrize("after", [1, 4])
def test_killed_workers_while_a_dataset_is_read(cluster, tmp_path, after, n_killed):
    """Workers that run the model, and those that read."""
    with Killer(tmp_path, after, n_killed, ALL_WORKERS) as killer:
        found = collect(
            network(),
            dataset(N),
            run=RunOptions(engine="ray", workers=2, shards=tmp_path, shard_size=40),
            batch_size=23,
            **SETTINGS,
        )
    assert len(killer.killed) == n_killed
    same(found, collect(network(), batches(N), **SETTINGS))
    counted_once(tmp_path, ExitRecord, N)


@pytest.mark.slow
@pytest.mark.parametrize("n_killed", [1, WORKERS // 2])
@pytest.mark.parametrize("after", [1, 3, 7])
def test_killed_workers_of_a_sweep(cluster, tmp_path, after, n_killed):
    with Killer(tmp_path, after, n_killed) as killer:
        found = sweep(shards=tmp_path, engine="ray", workers=WORKERS)
    assert len(killer.killed) == n_killed
    same_sweep(found, sweep())
    counted_once(tmp_path, ThresholdRecord, 60)


@pytest.mark.slow
def test_a_batch_that_kills_every_worker_is_an_error_at_last(cluster):
    with (
        RayPool(lambda: lambda k: os._exit(1) if k == 1 else k, 1, name="dying") as pool,
        pytest.raises(ray.exceptions.RayActorError),
    ):
        list(pool.unordered([(0,), (1,)]))
    assert RETRIES >= 3


# ------------------------------------------------------------------------------------------ drivers


def drive(kind, folder):
    """What the killed driver runs."""
    start()
    if kind == "sweep":
        sweep(engine="ray", workers=WORKERS, shards=folder)
    else:
        data = dataset(N) if kind == "dataset" else Slowly(batches(N))
        size, workers = (23, 2) if kind == "dataset" else (None, WORKERS)
        run = RunOptions(engine="ray", workers=workers, shards=folder, shard_size=40)
        collect(network(), data, batch_size=size, run=run, **SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 3, 6])
@pytest.mark.parametrize("kind", ["loader", "dataset", "sweep"])
def test_a_killed_driver_is_resumed_by_another_process(tmp_path, kind, after):
    folder = tmp_path / "shards"
    path = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    call = f"from tests.ray.test_faults import drive; drive({kind!r}, {str(folder)!r})"
    log = tmp_path / "log.txt"
    with log.open("w") as said:
        driver = subprocess.Popen(
            [sys.executable, "-c", call],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdout=said,
            stderr=said,
        )
    deadline = time.monotonic() + 400
    while len(list(folder.glob("shard-*.parquet"))) < after:
        assert driver.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.kill()
    driver.wait()
    kept = {path.name: path.read_bytes() for path in folder.glob("shard-*.parquet")}
    if kind == "sweep":
        same_sweep(sweep(shards=folder), sweep())
        counted_once(folder, ThresholdRecord, 60)
    else:
        found = collect(
            network(), loader_of(kind), run=RunOptions(shards=folder, shard_size=40), **SETTINGS
        )
        same(found, collect(network(), batches(N), **SETTINGS))
        counted_once(folder, ExitRecord, N)
    for name, content in kept.items():
        assert (folder / name).read_bytes() == content  # not collected again


def loader_of(kind):
    if kind == "loader":
        return batches(N)
    ids = np.arange(N)
    return [
        {"inputs": x, "labels": y, "ids": ids[k * 23 : (k + 1) * 23]}
        for k, (x, y) in enumerate(batches(N))
    ]
