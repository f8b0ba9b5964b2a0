"""Speed of the encoder with exits against the plain network, from the root of the repository:
`OMP_NUM_THREADS=2 python -m experiments.intents.speed --model FOLDER --data FOLDER`.

Policies are calibrated on one half of the record. On questions of the other half, both networks run
each batch in turn, so that a busy machine slows both. Writes NAME.speed.json: the time of the plain
network over the time with exits (medians over repeats, summed over batches), by wall clock and by
processor time of all threads.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.intents.data import banking77, encoded
from experiments.intents.network import load
from experiments.intents.records import HERE, LEVELS, RISKS, halves, shuffled
from swiftsure import ExitRecord, calibrate
from swiftsure.torch import EarlyExit

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def ratios(plain: Any, fast: Any, batches: list[dict[str, Tensor]], repeats: int) -> dict[str, Any]:
    """Return the plain network's time over the other's, and milliseconds per batch."""
    totals = {(name, who): 0.0 for name in CLOCKS for who in ("plain", "exits")}
    for batch in batches:
        seen: dict[tuple[str, str], list[float]] = {key: [] for key in totals}
        for _ in range(repeats):
            for who, run in (("plain", plain), ("exits", fast)):
                began = {name: clock() for name, clock in CLOCKS.items()}
                run(batch)
                for name, clock in CLOCKS.items():
                    seen[name, who].append(clock() - began[name])
        for key, times in seen.items():
            totals[key] += statistics.median(times)
    found: dict[str, Any] = {}
    for name in CLOCKS:
        found[name] = round(totals[name, "plain"] / totals[name, "exits"], 2)
        for who in ("plain", "exits"):
            found[f"{name}_ms_{who}"] = round(1e3 * totals[name, who] / len(batches), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the encoder")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--name", default="minilm_banking77")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="their sizes")
    parser.add_argument("--questions", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    file = arguments.results / f"{arguments.name}.safetensors"
    recipe = json.loads(file.with_suffix(".json").read_text())["recipe"]
    names = json.loads((arguments.data / "categories.json").read_text())
    exits, tokenizer = load(arguments.model, file, recipe, len(names))
    calibration, rest = halves(ExitRecord.load(file.with_suffix(".parquet")))
    texts = shuffled(banking77(arguments.data, "test")).texts
    fresh = [texts[int(i)] for i in rest.ids[: arguments.questions]]

    @torch.inference_mode()
    def plain(batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = exits.network(**batch).logits
        return logits

    report: dict[str, Any] = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    rows = []
    for risk in RISKS:
        for epsilon in LEVELS:
            policy = calibrate(calibration, risk=risk, loss="zero_one", epsilon=epsilon)
            fast = EarlyExit(exits, policy)
            for size in arguments.batches:
                parts = [fresh[start : start + size] for start in range(0, len(fresh), size)]
                batches = [encoded(tokenizer, part, recipe["data"]["length"]) for part in parts]
                plain(batches[0]), fast(batches[0])
                row = {"risk": risk, "epsilon": epsilon, "batch": size}
                row |= ratios(plain, fast, batches, arguments.repeats)
                print(json.dumps(row), flush=True)
                rows.append(row)
    report["ratios"] = rows
    (file.with_suffix(".speed.json")).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
