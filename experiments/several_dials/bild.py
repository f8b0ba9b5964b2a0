"""BiLD's rollback and fallback as two dials, from the root of the repository:
`python -m experiments.several_dials.bild --data FOLDER --shards FOLDER`.

The translator that comes with `swiftsure-assets` writes, and its first two decoder blocks draft.
Every combination of the dials is swept over test sentences of Multi30k in random order. Writes
bild.parquet.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from experiments.calm.records import PARTS
from experiments.translation.data import Pairs, multi30k
from swiftsure import ThresholdRecord, assets
from swiftsure.text import Rollback, self_draft, sweep_pair

HERE = Path(__file__).parent
ROLLBACKS = (0.6, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 12.0)
FALLBACKS = (0.5, 0.3, 0.2, 0.1, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--shards", type=Path, required=True, help="where to keep unfinished work")
    parser.add_argument("--sentences", type=int, help="all by default")
    arguments = parser.parse_args()
    tests = Pairs([], [])
    for part in PARTS:
        tests += multi30k(arguments.data / "multi30k", part)
    order = np.random.default_rng(0).permutation(len(tests.german))
    kept = sorted(order[: arguments.sentences].tolist())
    model = AutoModelForSeq2SeqLM.from_pretrained(assets.TRANSLATOR, dtype=torch.float32).eval()
    draft = self_draft(model, 2)
    records = [
        sweep_pair(
            model,
            draft,
            [tests.german[k] for k in kept],
            [tests.english[k] for k in kept],
            tokenizer=AutoTokenizer.from_pretrained(assets.TRANSLATOR),
            thresholds=ROLLBACKS,
            rule=Rollback(0.0, fallback=fallback),
            losses=["bleu"],
            max_new_tokens=64,
            ids=kept,
            shards=arguments.shards / f"bild_{fallback}",
        )
        for fallback in FALLBACKS
    ]
    record = ThresholdRecord.across(records)
    arguments.output.mkdir(parents=True, exist_ok=True)
    record.save(arguments.output / "bild.parquet")
    print(record)


if __name__ == "__main__":
    main()
