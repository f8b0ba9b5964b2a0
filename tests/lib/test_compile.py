"""Kernels compile without a cache folder, and in spite of a damaged cache."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import numpy as np
import swiftsure as ss

losses = np.random.default_rng(0).random((200, 3)) / 10
losses[:, 0] = 0
curve = ss.RiskCurve.from_losses([None, 0.9, 0.5], losses, loss_range=(0, 1))
print(ss.control.ucb(curve, epsilon=0.2, bound="wsr", seed=0).index)
"""

NO_FOLDER = "import numba.core.caching as c; c.CacheImpl._locator_classes = []\n"
"""What numba finds in a container whose package and home folders are read-only."""


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_without_a_cache_folder_it_compiles_and_says_so_once():
    done = run(NO_FOLDER + PROGRAM)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert done.stderr.count("Set NUMBA_CACHE_DIR to a folder that can") == 1


def test_a_damaged_cache_is_discarded(tmp_path):
    assert run(PROGRAM, NUMBA_CACHE_DIR=str(tmp_path)).stdout == "2\n"
    cached = [path for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc")]
    assert cached
    for number, path in enumerate(cached):
        content = path.read_bytes()
        path.write_bytes([b"", b"garbage", content[: len(content) // 2]][number % 3])
    done = run(PROGRAM, NUMBA_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    assert sum(path.stat().st_size > 100 for path in cached if Path(path).exists()) > 0


def test_damaged_machine_code_is_compiled_again(tmp_path):
    """A flipped bit in machine code crashes or computes wrong numbers, and unpickles well."""
    assert run(PROGRAM, NUMBA_CACHE_DIR=str(tmp_path)).stdout == "2\n"
    damaged = {}
    for path in tmp_path.rglob("*.nbc"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        damaged[path] = bytes(content)
        path.write_bytes(content)
    assert damaged
    done = run(PROGRAM, NUMBA_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "2\n")
    assert not [path for path, content in damaged.items() if path.read_bytes() == content]
