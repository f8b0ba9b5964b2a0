"""Time a pair of models at every threshold of its record, from the root of the repository:
`python -m experiments.bild.seconds --data FOLDER --record bild.parquet`.

Translates some sentences of Multi30k's validation part one by one, at each threshold in turn, and
adds the cost "seconds" to the record: of a sentence, the mean of the sentences' best times. Nothing
else should run on the machine. The first column, the large model alone, is its own `generate`.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from experiments.bild.records import TRANSLATION, loaded
from experiments.translation.data import multi30k
from swiftsure import ThresholdRecord
from swiftsure.text import BigLittle, Rollback


def best_seconds(variants: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Return the best time of each, taken in turn and in changing order."""
    best, order = [float("inf")] * len(variants), list(range(len(variants)))
    for repeat in range(repeats + 1):  # the first warms up
        random.Random(repeat).shuffle(order)
        for k in order:
            start = time.perf_counter()
            variants[k]()
            if repeat:
                best[k] = min(best[k], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--large", type=Path, default=TRANSLATION / "results" / "bild_large")
    parser.add_argument("--small", type=Path, default=TRANSLATION / "results" / "bild_small")
    parser.add_argument("--sentences", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    record = ThresholdRecord.load(arguments.record)
    tokens = record.settings["generation"]["max_new_tokens"]
    large, small = loaded(arguments.large), loaded(arguments.small)
    tokenizer = AutoTokenizer.from_pretrained(arguments.large)
    pairs = [
        BigLittle(large, small, Rollback(float(level), fallback=record.settings["fallback"]))
        for level in record.thresholds[1:]
    ]
    total = np.zeros(len(record.thresholds))
    texts = multi30k(arguments.data / "multi30k", "val").german[: arguments.sentences]
    for number, text in enumerate(texts, 1):
        source = tokenizer(text, return_tensors="pt").to(large.device)
        ways: list[Callable[[], Any]] = [
            lambda source=source: large.generate(**source, max_new_tokens=tokens, do_sample=False)
        ]
        ways += [
            lambda pair=pair, source=source: pair.generate(**source, max_new_tokens=tokens)
            for pair in pairs
        ]
        with torch.inference_mode():
            total += best_seconds(ways, arguments.repeats)
        print(f"{number} of {len(texts)}", end="\r", flush=True)
    seconds = total / len(texts)
    replace(record, costs={**record.costs, "seconds": seconds}).save(arguments.record)
    rates = ", ".join(
        f"{level:g}: {1 / each:.2f}" for level, each in zip(record.thresholds, seconds, strict=True)
    )
    print(f"sentences a second by threshold: {rates}", flush=True)


if __name__ == "__main__":
    main()
