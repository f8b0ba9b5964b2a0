"""Time for a fresh process to import the library and to compile its kernels."""

import os
import subprocess
import sys
import tempfile

from measure import Result

TITLE = "import: fresh processes"

ROUNDS = 10
CALIBRATE = """
import numpy as np
import swiftsure as ss
rng = np.random.default_rng(0)
losses = rng.random((1000, 3)) < [0.2, 0.1, 0.0]
confidences = rng.random((1000, 2))
record = ss.ExitRecord(confidences, losses={"loss": losses}, loss_ranges={"loss": (0, 1)})
record.n
start = time.perf_counter()
ss.calibrate(record, epsilon=0.1)
"""


def run() -> list[Result]:
    statements = {
        "library": "import swiftsure",
        "scipy": "import scipy.stats",
        "all": "from swiftsure import ExitRecord, calibrate, evaluate",
    }
    best = dict.fromkeys(statements, float("inf"))
    for _ in range(ROUNDS):
        for name, statement in statements.items():
            best[name] = min(best[name], seconds(statement))
    with tempfile.TemporaryDirectory() as folder:
        cold = seconds(CALIBRATE, NUMBA_CACHE_DIR=folder)
        warm = min(seconds(CALIBRATE, NUMBA_CACHE_DIR=folder) for _ in range(3))
    return [
        Result(
            "`import swiftsure` / `import scipy.stats`",
            best["library"] / best["scipy"],
            at_most=0.5,
            note=f"{best['library'] * 1e3:.1f} against {best['scipy'] * 1e3:.0f} ms",
        ),
        Result(
            "with everything that calibrates / `import scipy.stats`",
            best["all"] / best["scipy"],
            note=f"{best['all'] * 1e3:.0f} ms",
        ),
        Result("first calibration, kernels to be compiled", cold, "s"),
        Result("first calibration, kernels from the disk", warm, "s"),
    ]


def seconds(statements: str, **environment: str) -> float:
    """Return the seconds that statements took, from the start they set, or else from the first."""
    code = f"import time\nstart = time.perf_counter()\n{statements}\n"
    code += "print(time.perf_counter() - start)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)
