"""Sweeps in Ray actors: the same record, resumable by either engine."""

import time
import urllib.request

import pytest
import ray
import torch

from swiftsure import RunOptions
from swiftsure.run.ray_pool import RayPool
from swiftsure.torch.modes import needs_gpu
from tests.ray.builders import same_sweep
from tests.run.test_sweep import GRID, NUMBERS, Rounding


def test_either_engine_resumes_the_other(cluster, tmp_path):
    expected = Rounding(NUMBERS, GRID).run(5, RunOptions(shard_size=2))
    on_ray = RunOptions(shards=tmp_path, engine="ray", workers=2, shard_size=2)
    same_sweep(Rounding(NUMBERS, GRID).run(5, on_ray), expected)
    (tmp_path / "shard-00001.parquet").unlink()
    here = Rounding(NUMBERS, GRID)
    same_sweep(here.run(5, RunOptions(shards=tmp_path, shard_size=2)), expected)
    assert {row for row, _ in here.runs} == {2, 3}
    (tmp_path / "shard-00000.parquet").unlink()
    there = Rounding(NUMBERS, GRID)
    same_sweep(there.run(5, on_ray), expected)
    assert not there.runs  # not in this process


class Failing(Rounding):
    def prepare(self, inputs):
        if inputs.start == 2:
            raise OSError("the disk is gone")
        return super().prepare(inputs)


def test_errors_of_workers_are_raised_here(cluster, tmp_path):
    with pytest.raises(OSError, match="the disk is gone"):
        Failing(NUMBERS, GRID).run(
            5, RunOptions(shards=tmp_path, shard_size=1, engine="ray", workers=1)
        )
    assert len(list(tmp_path.glob("shard-*.parquet"))) == 2


def test_a_pool_answers_every_call_once(cluster):
    with RayPool(lambda: lambda k: k * k, 2, name="squaring", ahead=3) as pool:
        found = dict(pool.unordered((k,) for k in range(40)))
    assert found == {k: k * k for k in range(40)}


@pytest.mark.slow
def test_workers_on_gpus_have_one_each(cluster):
    """And by default there are as many workers as GPUs."""
    assert not needs_gpu(None)
    assert not needs_gpu(torch.device("cpu"))
    assert needs_gpu(torch.device("cuda:0"))
    with pytest.raises(ValueError, match="must be on the CPU or on cuda:0"):
        needs_gpu(torch.device("cuda:1"))

    def gpus():
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    with RayPool(lambda: gpus, name="looking", gpus=1) as pool:
        assert pool.n == 1
        assert pool.result(pool.call()) == ["0"]


@pytest.mark.slow
def test_progress_is_among_the_metrics_of_ray(cluster):
    """Which its dashboard shows through Prometheus and Grafana."""
    Rounding(NUMBERS, GRID).run(5, RunOptions(shard_size=2, engine="ray", workers=1))
    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = urllib.request.urlopen(address, timeout=10).read().decode().splitlines()
        found = [line for line in lines if line.startswith("ray_swiftsure_") and "sweeping" in line]
        if len(found) >= 2 and all(line.split()[-1] == "25.0" for line in found):
            return
        time.sleep(0.5)
    pytest.fail(f"no metrics: {found}")


@pytest.mark.slow
def test_calm(cluster, tmp_path):
    from swiftsure.text import CalmModel, Texts, sweep
    from tests.text.builders import t5
    from tests.text.tokenizing import texts, tokenizer

    settings = {
        "thresholds": [None, 0.9, 0.5, 0.2],
        "generation": {"max_new_tokens": 6},
    }
    data = Texts(texts(8), tokenizer(), texts(8)[::-1])
    expected = sweep(CalmModel(t5()), data, **settings)
    found = sweep(
        CalmModel(t5()),
        data,
        run=RunOptions(shards=tmp_path, shard_size=3, engine="ray", workers=2),
        **settings,
    )
    same_sweep(found, expected)


@pytest.mark.slow
def test_bild(cluster):
    from swiftsure.text import BigLittle, Rollback, Texts, sweep_pair
    from tests.text.bild.drafting import PAIRS
    from tests.text.tokenizing import texts, tokenizer

    pair = BigLittle(*PAIRS["T5"](), Rollback(None, fallback=0.1, max_draft=4))
    data = Texts(texts(5), tokenizer())
    settings = {
        "thresholds": [0.0, 1.0, 4.0],
        "max_new_tokens": 8,
    }
    expected = sweep_pair(pair, data, **settings)
    found = sweep_pair(
        pair, data, run=RunOptions(shard_size=2, engine="ray", workers=2), **settings
    )
    same_sweep(found, expected)


@pytest.mark.slow
def test_deediff(cluster):
    from swiftsure.diffusion import DDIM, DeeDiff, Schedule, sweep
    from tests.diffusion.builders import confidence_levels, network

    model = DeeDiff(network(), sampler=DDIM(4, Schedule(40)))
    settings = {"thresholds": confidence_levels(model), "losses": ["mse"]}
    expected = sweep(model, 10, **settings)
    found = sweep(model, 10, run=RunOptions(shard_size=4, engine="ray", workers=2), **settings)
    same_sweep(found, expected)
