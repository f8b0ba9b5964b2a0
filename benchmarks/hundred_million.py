"""Calibrate on a folder of Parquet shards: `python benchmarks/hundred_million.py [--n N]`.

Writes a record of N samples (100,000,000 by default) with five exits to a temporary folder, one
million samples per shard, calibrates on it from the disk, and prints time and memory. Memory is the
largest RssAnon of the process, which does not count pages of files that the operating system
caches. With --compare, the same record is also calibrated in memory, and the policies must be
equal.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import data
import numpy as np

import swiftsure as ss

SHARD = 1_000_000
EPSILON = 0.05
CASES = (
    ("gap", "brier", {}),
    ("consistency", "zero_one", {}),
)
"""Betting tests, which need an order, and counts, which do not."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--n", type=int, default=100_000_000)
    parser.add_argument("--folder", type=Path, help="where temporary files are made")
    parser.add_argument("--compare", action="store_true", help="also calibrate in memory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        start = time.perf_counter()
        write(Path(folder), arguments.n)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(f"{arguments.n:,} samples written: {size / 2**30:.1f} GiB,", clock(start), flush=True)
        for risk, loss, options in CASES:
            policies = [calibrated(folder, arguments.folder, risk, loss, options)]
            if arguments.compare:
                record = ss.load_record(folder)
                policies.append(
                    ss.calibrate(record, risk=risk, loss=loss, epsilon=EPSILON, **options)
                )
                shown = [p.model_dump(mode="json") | {"metadata": None} for p in policies]
                print("  the same policy as in memory:", shown[0] == shown[1], flush=True)
        start = time.perf_counter()
        with Peak() as peak:
            study = ss.evaluate(
                ss.ShardedRecord(folder, losses=["brier"]),
                loss="brier",
                controls=["ucb"],
                epsilons=[EPSILON],
                n_calibration=10_000,
                splits=ss.Repeats(20, progress=False),
            )
        print(f"evaluate, brier gap, of {study.n_pool:,} samples drawn: {clock(start)}, {peak}")


def calibrated(folder: str, scratch: Path | None, risk: str, loss: str, options: dict) -> ss.Policy:
    """Calibrate from the disk, and print time, memory and what was chosen."""
    start, cpu = time.perf_counter(), time.process_time()
    with Peak() as peak:
        record = ss.ShardedRecord(folder, losses=[loss], scratch=scratch)
        policy = ss.calibrate(record, risk=risk, loss=loss, epsilon=EPSILON, **options)
    promise = policy.certificate.promises[0]
    print(
        f"calibrate, {loss} {risk}, {promise.bound}: {clock(start)}"
        f" ({time.process_time() - cpu:.0f} s of CPU), {peak}; threshold {policy.threshold:.4f},"
        f" risk {promise.calibration_risk:.5f}, upper bound {promise.upper_bound:.5f}",
        flush=True,
    )
    return policy


def write(folder: Path, n: int) -> None:
    """Write shards of samples drawn from a million simulated ones."""
    pool = data.arrays(min(n, SHARD))
    for number, first in enumerate(range(0, n, SHARD)):
        size = min(SHARD, n - first)
        rows = np.random.default_rng([3, number]).integers(0, len(pool["confidences"]), size)
        shard = ss.ExitRecord(
            pool["confidences"][rows],
            losses={"brier": pool["gap brier"][rows]},
            inconsistencies={"zero_one": pool["consistency zero_one"][rows]},
            ids=np.arange(first, first + size),
            order=7,
        )
        shard.save(folder / f"shard-{number:05d}.parquet", durable=False)
    data.arrays.cache_clear()


class Peak:
    """The largest RssAnon of this process, above what it is at the start."""

    def __enter__(self) -> "Peak":
        self.start = self.most = anonymous()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(0.02):
            self.most = max(self.most, anonymous())

    def __str__(self) -> str:
        return (
            f"{self.most / 2**30:.2f} GiB of memory at most"
            f" ({(self.most - self.start) / 2**30:.2f} GiB above the start)"
        )


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def clock(start: float) -> str:
    return f"{time.perf_counter() - start:.0f} s"


if __name__ == "__main__":
    main()
