"""How collecting scales with Ray workers, on this machine and in a simulation.

`python benchmarks/ray_scaling.py [--repeats 3] [--batches 60] [--simulated 1 4 16 64]`.

Measured: `collect` of the trained MSDNet with one and with two single-threaded workers, in turn.
Workers start before the clock does. On a shared machine the wall clock depends on what others do,
so the share of a core that the workers got is shown too. The projection for two idle cores uses
processor time instead: what one worker needs for two batches, against what two workers, the driver
and Ray's own processes need for one.

Simulated: workers that sleep instead of computing, up to 64 of them as threads of eight processes,
since only the driver limits how fast they are given work. The overhead is the driver's time per
batch when batches cost nothing.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from measure import Result, show
from rich.console import Console
from torch import Tensor

import swiftsure_zoo as zoo
from swiftsure import RunOptions
from swiftsure.run.ray_pool import RETRIES, RayPool, SwiftsureWorker
from swiftsure.torch import collect
from swiftsure.torch.ray_workers import AHEAD

TITLE = "ray: collecting with several workers"
SIZE = 64
WARM = 6
"""Batches before the clock starts."""
PER_PROCESS = 8
WORKERS = ("ray::SwiftsureWorker", "ray::collecting")


class Timed:
    """Batches that note wall and processor time after the first few and at the end."""

    def __init__(self, images: Tensor, n: int) -> None:
        self.images, self.n = images, n
        self.times: list[tuple[float, float, float]] = []

    def __iter__(self) -> Iterator[Tensor]:
        for k in range(self.n):
            if k == WARM:
                self.times.append((time.perf_counter(), *used_seconds()))
            first = k * SIZE % (len(self.images) - SIZE)
            yield self.images[first : first + SIZE]
        self.times.append((time.perf_counter(), *used_seconds()))


def used_seconds() -> tuple[float, float]:
    """Return the processor time of the workers, and of this process with all of its cluster."""
    parents, titles, seconds = {}, {}, {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            titles[int(place.name)] = (place / "cmdline").read_bytes().decode()
        except OSError:  # it has ended
            continue
        parents[int(place.name)] = int(fields[1])
        seconds[int(place.name)] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    own = [pid for pid in titles if ours(pid)]
    working = [pid for pid in own if titles[pid].startswith(WORKERS)]
    return sum(seconds[pid] for pid in working), sum(seconds[pid] for pid in own)


def measured(n_batches: int, repeats: int) -> Iterator[Result]:
    """Yield the speed of two workers against one."""
    model, images = (
        zoo.msdnet_fashion_mnist(),
        zoo.prepared(zoo.records.sample_images().images[:512]),
    )
    runs: dict[int, list[Run]] = {1: [], 2: []}
    for _ in range(repeats):
        for workers in (1, 2):
            loader = Timed(images, n_batches)
            collect(
                model, loader, losses=["zero_one"], run=RunOptions(engine="ray", workers=workers)
            )
            wall = (time.perf_counter() - loader.times[0][0]) / (n_batches - WARM)
            (start, *before), (end, *after) = loader.times
            # About as many batches were waiting when the clock started as at its end.
            spent = [(b - a) / (n_batches - WARM) for a, b in zip(before, after, strict=True)]
            share = spent[0] * (n_batches - WARM) / (end - start) / workers
            runs[workers].append(Run(wall, *spent, share))
    best = {n: Run(*map(min, zip(*runs[n], strict=True))) for n in runs}
    note = "; ".join(
        f"{n} worker{'s' * (n > 1)}: {1e3 * best[n].wall:.1f} ms a batch, at most"
        f" {max(run.share for run in runs[n]):.0%} of a core each"
        for n in runs
    )
    speed = best[1].wall / best[2].wall
    yield Result("two workers against one, wall clock", speed, at_least=1.7, note=note)
    note = (
        f"processor time a batch: {1e3 * best[1].workers:.1f} ms of one worker,"
        f" {1e3 * best[2].workers:.1f} ms of two, {1e3 * (best[2].all - best[2].workers):.1f} ms of"
        " the driver and Ray"
    )
    on_idle = 2 * best[1].workers / best[2].all
    yield Result("the same on two idle cores, projected", on_idle, at_least=1.7, note=note)


class Run(NamedTuple):
    """Seconds per batch: wall clock, processor time of the workers and of everything."""

    wall: float
    workers: float
    all: float
    share: float


class ThreadPool(RayPool):
    """Workers that sleep, eight in each process."""

    def _start(self, gpus: int) -> list[Any]:
        options = {"num_gpus": gpus, "max_restarts": -1, "max_task_retries": RETRIES}
        n = -(-self.n // PER_PROCESS)
        threads = min(self.n, PER_PROCESS)
        actor = ray.remote(num_cpus=0, max_concurrency=threads, **options)(SwiftsureWorker)
        actors = [actor.remote(self._name) for _ in range(n)]
        return [actors[k // PER_PROCESS] for k in range(self.n)]


def seconds_per_batch(pool: RayPool, cost: float, n: int) -> float:
    """Return the time per batch, results taken in order, as `collect` does."""
    start, pending = time.perf_counter(), []
    for _ in range(n):
        pending.append(pool.call(cost))
        while pending and pool.is_done(pending[0]):
            pool.result(pending.pop(0))
    for answer in pending:
        pool.result(answer)
    return (time.perf_counter() - start) / n


def sleeping(workers: Sequence[int], cost: float) -> Iterator[Result]:
    """Yield the efficiency of sleeping workers."""
    for n in workers:
        with ThreadPool(lambda: time.sleep, n, name="simulating", ahead=AHEAD) as pool:
            seconds_per_batch(pool, 0.0, 4 * n)
            cpu = time.process_time()
            free = seconds_per_batch(pool, 0.0, 2000)
            cpu = (time.process_time() - cpu) / 2000
            took = seconds_per_batch(pool, cost, max(20, 20 * n))
        speed = cost / took
        note = (
            f"{speed / n:.0%} of {n}; overhead {1e3 * free:.2f} ms a batch, of which"
            f" {1e3 * cpu:.2f} ms are the driver's processor time"
        )
        yield Result(f"{n} workers, {1e3 * cost:g} ms a batch", speed, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--simulated", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--cost", type=float, default=0.2, help="seconds per simulated batch")
    options = parser.parse_args()
    show(TITLE, run(**vars(options)), Console(width=150))


def run(
    repeats: int = 3,
    batches: int = 60,
    simulated: Sequence[int] = (1, 4, 16, 64),
    cost: float = 0.2,
) -> list[Result]:
    torch.set_num_threads(1)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 << 20,
    )
    results = list(measured(batches, repeats)) if repeats else []
    results += sleeping(simulated, cost)
    ray.shutdown()
    return results


if __name__ == "__main__":
    main()
