"""How small is too small? Speed of early exits against the size of a network, one sample at a time.

Networks of `benchmarks/runtime.py`, five exits, thresholds that save about half of the FLOPs;
processor time of one thread, the best of several turns.
"""

import argparse
import json
import random
import time

import numpy as np
import torch
from runtime import policy_at, residual_network

from swiftsure.torch import EarlyExit

SAMPLES = 24


@torch.inference_mode()
def measured(width: int, repeats: int) -> dict[str, float]:
    """Return milliseconds per sample of the full network and with early exits."""
    model = residual_network(width, 1)
    images = torch.randn(512, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    fast = EarlyExit(model, policy_at(model, images, 0.5))
    samples = images[:SAMPLES].split(1)

    def full(x: torch.Tensor) -> torch.Tensor:
        state = model.begin(x)
        for k in range(model.n_exits):
            state = model.advance(k, state)
        return model.head(model.n_exits - 1, state)

    best = {name: np.full(SAMPLES, np.inf) for name in ("full", "fast")}
    turns = [(name, k) for name in best for k in range(SAMPLES)]
    for turn in range(repeats + 2):
        random.Random(turn).shuffle(turns)
        for name, k in turns:
            began = time.process_time()
            (full if name == "full" else fast)(samples[k])
            if turn >= 2:
                best[name][k] = min(best[name][k], time.process_time() - began)
    milliseconds = {name: 1000 * each.mean() for name, each in best.items()}
    return {
        "width": width,
        "full, ms": milliseconds["full"],
        "early exits, ms": milliseconds["fast"],
        "faster": milliseconds["full"] / milliseconds["fast"],
        "mean exit": float(np.mean([fast(x).exits.item() for x in samples])),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 16, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for width in options.widths:
        print(json.dumps(measured(width, options.repeats)), flush=True)
