"""Time a pair of models at every threshold of its record, from the root of the repository:
`python -m experiments.bild.seconds --data FOLDER --record bild.parquet`.

Translates some sentences of Multi30k's validation part one by one, at each threshold in turn, and
writes bild.seconds.json beside the record: the mean over sentences of each sentence's best time.
Nothing else should run on the machine. The first entry is the large model's own `generate`.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.measure import best_times
from experiments.bild.records import TRANSLATION, loaded
from experiments.translation.data import multi30k
from swiftsure import ThresholdRecord
from swiftsure.text import BigLittle, Rollback


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
        BigLittle(large, small, Rollback(float(threshold), fallback=record.settings["fallback"]))
        for threshold in record.thresholds[1:]
    ]
    total = np.zeros(len(record.thresholds))
    texts = multi30k(arguments.data / "multi30k", "val").german[: arguments.sentences]
    for number, text in enumerate(texts, 1):
        source = tokenizer(text, return_tensors="pt").to(large.device)
        ways: list[Callable[[], Any]] = [partial(large.generate, do_sample=False)]
        ways += [pair.generate for pair in pairs]
        timed = {
            str(k): partial(write, **source, max_new_tokens=tokens) for k, write in enumerate(ways)
        }
        with torch.inference_mode():
            total += list(best_times(timed, arguments.repeats).values())
        print(f"{number} of {len(texts)}", end="\r", flush=True)
    seconds = total / len(texts)
    found = {"thresholds": record.thresholds.tolist(), "seconds": seconds.round(6).tolist()}
    arguments.record.with_suffix(".seconds.json").write_text(json.dumps(found) + "\n")
    rates = ", ".join(
        f"{t:g}: {1 / s:.2f}" for t, s in zip(record.thresholds, seconds, strict=True)
    )
    print(f"sentences a second by threshold: {rates}", flush=True)


if __name__ == "__main__":
    main()
