"""CALM's threshold, looks and decay as three dials, from the root of the repository:
`python -m experiments.several_dials.calm --data FOLDER`.

Sweeps the translator that comes with `swiftsure-assets` over Multi30k's test sentences in random
order, once per choice of looks and decay, and writes calm.parquet.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from experiments.calm.records import PARTS
from experiments.translation.data import Pairs, multi30k
from swiftsure import ThresholdRecord, assets
from swiftsure.text import CalmRule, Decay, sweep

HERE = Path(__file__).parent
THRESHOLDS = (0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.4, 0.2)
LOOKS = (None, (1,), (1, 3, 5))
DECAYS = (None, Decay(30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--sentences", type=int, default=400)
    parser.add_argument("--shards", type=Path, required=True, help="where to keep unfinished work")
    arguments = parser.parse_args()
    tests = Pairs([], [])
    for part in PARTS:
        tests += multi30k(arguments.data / "multi30k", part)
    drawn = np.random.default_rng(0).permutation(len(tests.german))[: arguments.sentences].tolist()
    model = AutoModelForSeq2SeqLM.from_pretrained(assets.TRANSLATOR, dtype=torch.float32).eval()
    records = [
        sweep(
            model,
            [tests.german[k] for k in drawn],
            [tests.english[k] for k in drawn],
            tokenizer=AutoTokenizer.from_pretrained(assets.TRANSLATOR),
            thresholds=THRESHOLDS,
            losses=["bleu"],
            rule=CalmRule(look_at=looks, decay=decay),
            generation={"max_new_tokens": 64},
            ids=drawn,
            batch_size=64,
            shards=arguments.shards / f"calm_{i}_{j}",
            shard_size=200,
        )
        for i, looks in enumerate(LOOKS)
        for j, decay in enumerate(DECAYS)
    ]
    record = ThresholdRecord.across(records)
    arguments.output.mkdir(parents=True, exist_ok=True)
    record.save(arguments.output / "calm.parquet")
    print(record)


if __name__ == "__main__":
    main()
