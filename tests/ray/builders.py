"""A cluster, samples, and what two records must have in common."""

import contextlib
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import ray

from tests.torch.builders import inputs, labels

SETTINGS = {"losses": ["zero_one", "brier"], "scores": ["top1", "entropy"]}


def start():
    """Start a small cluster on this machine."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # machines may be busy
    root, before = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [root, before]))
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)  # workers import models of the tests
        warnings.simplefilter("ignore")  # Ray's own
        ray.init(
            num_cpus=4,
            num_gpus=1,  # counted, not there
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            logging_level="ERROR",
            _system_config={"metrics_report_interval_ms": 500},
        )


def batches(n=400, size=23):
    x, y = inputs(n), labels(n)
    return [(x[k : k + size], y[k : k + size]) for k in range(0, n, size)]


def same(one, two):
    """Two exit records hold the same numbers, in the same order."""
    assert np.array_equal(one.ids, two.ids)
    for table in ("confidences", "losses", "inconsistencies"):
        assert set(getattr(one, table)) == set(getattr(two, table))
        for name, values in getattr(one, table).items():
            assert np.array_equal(values, getattr(two, table)[name]), name
    assert one.fingerprint == two.fingerprint
    assert one.costs["flops"].tolist() == two.costs["flops"].tolist()


def same_sweep(one, two):
    """Two threshold records hold the same numbers, in the same order."""
    assert np.array_equal(one.ids, two.ids)
    assert np.array_equal(one.thresholds, two.thresholds)
    for table in ("losses", "inconsistencies", "costs"):
        assert set(getattr(one, table)) == set(getattr(two, table))
        for name, values in getattr(one, table).items():
            assert np.array_equal(values, getattr(two, table)[name]), name
    assert one.fingerprint == two.fingerprint
    assert one.settings == two.settings


MODEL_WORKERS = ("ray::SwiftsureWorker", "ray::collecting", "ray::sweeping")
ALL_WORKERS = (*MODEL_WORKERS, "ray::IDLE", "ray::Map", "ray::Read")
"""How the titles of processes start; Ray's agents are not among them, a node dies with its own."""


def worker_pids(titles):
    """Process ids of the workers that this process's cluster runs."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if name.startswith(titles) and os.getpid() in ancestors(int(place.name)):
                found.append(int(place.name))
    return found


def ancestors(pid):
    """Process ids of a process's parents."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found
