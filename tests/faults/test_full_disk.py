"""A full disk keeps the old file, leaves nothing half-written, and is named in the error."""

import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import swiftsure as ss
from swiftsure.torch import collect
from swiftsure.torch.collecting import InterruptedCollectionError
from tests.builders import random_record
from tests.torch.builders import Played, logits


def batches(n, size=16):
    """Return samples of `Played` with their labels."""
    x, y = logits(n), torch.arange(n) % 3
    return list(zip(x.split(size), y.split(size), strict=True))


@contextmanager
def room_for(size):
    """Limit files to a size, as `ulimit -f` does; Python turns the signal into an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def policy():
    return ss.calibrate(random_record(n=300), loss="zero_one", epsilon=0.3)


def monitor():
    made = ss.Monitor(0.05)
    made.update_many(np.zeros(100))
    return made


@pytest.mark.parametrize("make", [lambda: random_record(n=300), policy, monitor])
def test_nothing_is_lost_and_nothing_left(tmp_path, make):
    path, made = tmp_path / "file.parquet", make()
    made.save(path)
    before = path.read_bytes()
    with room_for(200), pytest.raises(OSError, match=r"file\.parquet could not be written"):
        made.save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["file.parquet"]
    assert path.read_bytes() == before
    made.save(path)


def test_a_collection_says_what_is_on_the_disk(tmp_path):
    parts = tmp_path / "parts"
    collect(Played(4), batches(90)[:2], run=ss.RunOptions(shards=parts, shard_size=16))
    size = max(path.stat().st_size for path in parts.glob("*.parquet"))
    with (
        room_for(size // 2),
        pytest.raises(InterruptedCollectionError, match=r"after 48 samples, .*\(32 of them in"),
    ):
        collect(Played(4), batches(90), run=ss.RunOptions(shards=parts, shard_size=16))
    record = collect(Played(4), batches(90), run=ss.RunOptions(shards=parts, shard_size=16))
    assert record.n == 90


def test_an_alarm_is_seen_although_nothing_can_be_saved(tmp_path):
    (tmp_path / "stream.jsonl").write_text('{"loss": 1}\n' * 50)
    command = f"{sys.executable} -m swiftsure monitor - --epsilon 0.05 --state m.json"
    for line in (
        f"ulimit -f 0; cat stream.jsonl | {command}",  # a pipe, on a full disk
        f"mkdir m.json.journal; cat stream.jsonl | {command}",
        f"cat stream.jsonl | {command} > /dev/full",  # the log is full too
    ):
        for path in ("m.json", "m.json.journal"):
            shutil.rmtree(tmp_path / path, ignore_errors=True)
            (tmp_path / path).unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1, line
        assert "Alarm at loss" in done.stdout + done.stderr, line


def test_closed_standard_output_is_not_an_alarm(tmp_path):
    (tmp_path / "stream.jsonl").write_text('{"loss": 0}\n' * 50)
    line = f"{sys.executable} -m swiftsure monitor stream.jsonl --epsilon 0.05 >&-"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
