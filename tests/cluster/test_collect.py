"""Collecting in Ray actors: the same record, resumable by either engine, whatever dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.builders import SETTINGS, batches, same, worker_pids
from pytorch.builders import network
from swiftsure.records import ExitRecord
from swiftsure.torch import collect
from swiftsure.torch.collecting import InterruptedCollectionError


class Dies:
    """A loader that stops part-way."""

    def __init__(self, given, after):
        self.given, self.after = given, after

    def __iter__(self):
        yield from self.given[: self.after]
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("first", "second"),
    [("local", "ray"), pytest.param("ray", "local", marks=pytest.mark.slow)],
)
def test_either_engine_resumes_the_other_and_gives_the_same_record(
    cluster, tmp_path, first, second
):
    model, data = network(), batches()
    expected = collect(model, data, **SETTINGS)
    place = {"shards": tmp_path, "shard_size": 50}
    workers = {"ray": 2, "local": None}
    with pytest.raises(InterruptedCollectionError, match="the disk is gone") as stopped:
        collect(model, Dies(data, 9), engine=first, workers=workers[first], **place, **SETTINGS)
    assert stopped.value.n_saved >= 50
    found = collect(model, data, engine=second, workers=workers[second], **place, **SETTINGS)
    same(found, expected)


@pytest.mark.slow
def test_errors_of_workers_are_those_of_the_model(cluster):
    data = batches()
    bad = data[2][0].clone()
    bad[0] = torch.nan
    given = [*data[:2], (bad, data[2][1])]
    with pytest.raises(InterruptedCollectionError, match=r"exit 1 is NaN .* sample 46"):
        collect(network(), given, engine="ray", workers=1, **SETTINGS)


def test_arguments(cluster):
    with pytest.raises(ValueError, match="`workers` needs engine='ray'"):
        collect(network(), batches(), workers=2)
    with pytest.raises(ValueError, match="`engine`"):
        collect(network(), batches(), engine="spark")


# ------------------------------------------------------------------------------------------ faults


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_workers_lose_nothing(cluster, tmp_path, seed):
    """One worker, or all of them, are killed at a random batch."""
    rng = np.random.default_rng(seed)
    model, data = network(), batches(n=600)
    expected = collect(model, data, **SETTINGS)
    at = int(rng.integers(2, len(data)))

    class Killing(list):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number == at:
                    pids = worker_pids()
                    assert pids
                    for pid in pids[: 1 if seed % 2 else len(pids)]:
                        os.kill(pid, signal.SIGKILL)
                yield batch

    found = collect(
        model, Killing(data), engine="ray", workers=2, shards=tmp_path, shard_size=60, **SETTINGS
    )
    same(found, expected)


DRIVER = """
import sys, time, os
os.environ["RAY_AUTH_MODE"] = "disabled"
import ray, torch
torch.set_num_threads(1)
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
from pytorch.builders import network
from pytorch.test_ray import SETTINGS, batches
from swiftsure.torch import collect
class Slow(list):
    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.05)
            yield batch
collect(network(), Slow(batches(600)), engine="ray", workers=2, shards=sys.argv[1], shard_size=40,
        shard_seconds=0, **SETTINGS)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_killed_driver_is_resumed(tmp_path, seed):
    """By another process; nothing is lost and nothing is there twice."""
    folder = tmp_path / "shards"
    path = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    deadline = time.monotonic() + 400
    while len(list(folder.glob("shard-*.parquet"))) < 1 + seed and driver.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    n_before = sum(ExitRecord.load(path).n for path in folder.glob("shard-*.parquet"))
    assert n_before > 0
    found = collect(network(), batches(600), shards=folder, shard_size=40, **SETTINGS)
    same(found, collect(network(), batches(600), **SETTINGS))
