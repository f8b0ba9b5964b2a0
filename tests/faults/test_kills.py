"""Runs that are killed with -9 at random moments end with what an uninterrupted run gives."""

import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch

import swiftsure as ss
from swiftsure.records import ThresholdRecord
from swiftsure.run import Runs, Sweep
from swiftsure.torch import collect
from tests.torch.builders import Played, logits

FORK = multiprocessing.get_context("fork")  # a forked process has everything imported already
N = 400


def killed_until_done(work, kills, seed, longest):
    """Run `work` in processes that are killed at random, then once to its end; count the kills."""
    rng, done = np.random.default_rng(seed), 0
    while done < kills:
        process = FORK.Process(target=work)
        process.start()
        time.sleep(float(rng.uniform(0, longest)))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            done += 1
        process.join()
        if process.exitcode == 0:
            longest /= 2  # it finished: kill earlier
            if longest < 1e-3:
                break
    process = FORK.Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    return done


def batches(n, size=16):
    """Return samples of `Played` with their labels."""
    x, y = logits(n), torch.arange(n) % 3
    return list(zip(x.split(size), y.split(size), strict=True))


def slowly(loader):
    for batch in loader:
        time.sleep(0.01)
        yield batch


class Slow(Sweep):
    """A system of which each run takes a while."""

    def prepare(self, inputs):
        def run(rows, columns):
            time.sleep(0.003)
            answer = (rows + inputs.start) * 10.0 + columns
            return Runs({"cost": answer}, np.eye(len(self.grid), dtype=bool)[columns])

        return run

    def columns(self, inputs, tables):
        n = inputs.stop - inputs.start
        losses = {"x": np.linspace(0, 1, n * 3).reshape(n, 3) * [0, 1, 1]}
        return {"inconsistencies": losses, "costs": tables, "ids": np.arange(n) + inputs.start}

    def identity(self):
        return {"data": "fixed"}


def sweep(folder):
    made = Slow(system="slow", grid=np.asarray([np.inf, 0.9, 0.5]), fingerprint=None, settings={})
    return made.run(60, ss.RunOptions(shards=folder, shard_size=8))


@pytest.mark.slow
def test_collecting(tmp_path):
    torch.set_num_threads(1)

    def work():
        record = collect(
            Played(4),
            slowly(batches(N)),
            run=ss.RunOptions(shards=tmp_path / "parts", shard_size=20, durable=False),
        )
        record.save(tmp_path / "record.parquet")

    assert killed_until_done(work, 100, seed=0, longest=0.4) >= 50
    record = ss.ExitRecord.load(tmp_path / "record.parquet")
    expected = collect(Played(4), batches(N))
    for table in ("confidences", "losses", "inconsistencies", "costs"):
        for name, values in getattr(expected, table).items():
            np.testing.assert_array_equal(getattr(record, table)[name], values)
    np.testing.assert_array_equal(record.ids, expected.ids)


@pytest.mark.slow
def test_sweeping(tmp_path):
    def work():
        sweep(tmp_path / "parts").save(tmp_path / "record.parquet")

    assert killed_until_done(work, 100, seed=1, longest=0.4) >= 50
    record, expected = ThresholdRecord.load(tmp_path / "record.parquet"), sweep(None)
    np.testing.assert_array_equal(record.costs["cost"], expected.costs["cost"])
    np.testing.assert_array_equal(record.ids, expected.ids)


@pytest.mark.slow
def test_monitoring(tmp_path):
    from swiftsure.cli.monitor import monitor

    rng = np.random.default_rng(0)
    lines = [json.dumps({"id": i, "loss": int(rng.random() < 0.04)}) for i in range(60_000)]
    stream, state = tmp_path / "stream.jsonl", tmp_path / "state.json"
    stream.write_text("\n".join(lines) + "\n")

    def work():
        import swiftsure.cli.monitor as command

        command.CHUNK = 1 << 14
        monitor(streams=[stream], epsilon=0.05, state=state)

    def quietly():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        work()

    assert killed_until_done(quietly, 100, seed=2, longest=0.3) >= 20
    found = ss.Monitor.load(state)
    expected = ss.Monitor(0.05)
    expected.update_many([json.loads(line)["loss"] for line in lines])
    assert found.state() == expected.state()
