"""BiLD's rollback, fallback and draft length as three dials, from the root of the repository:
`python -m experiments.several_dials.bild --data FOLDER --shards FOLDER`.

The translator that comes with `swiftsure-assets` writes, and its own first two decoder blocks draft.
Every combination of the dials is swept over Multi30k's test sentences. Writes bild.parquet.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from experiments.calm.records import PARTS
from experiments.translation.data import Pairs, multi30k
from swiftsure import ThresholdRecord, assets
from swiftsure.text import Rollback, self_draft, sweep_pair

HERE = Path(__file__).parent
ROLLBACKS = (0.6, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0)
FALLBACKS = (0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
DRAFTS = (10, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--shards", type=Path, required=True, help="where to keep unfinished work")
    parser.add_argument("--sentences", type=int, help="the first of all; all by default")
    arguments = parser.parse_args()
    tests = Pairs([], [])
    for part in PARTS:
        tests += multi30k(arguments.data / "multi30k", part)
    kept = slice(arguments.sentences)
    model = AutoModelForSeq2SeqLM.from_pretrained(assets.TRANSLATOR, dtype=torch.float32).eval()
    draft = self_draft(model, 2)
    records = [
        sweep_pair(
            model,
            draft,
            tests.german[kept],
            tests.english[kept],
            tokenizer=AutoTokenizer.from_pretrained(assets.TRANSLATOR),
            thresholds=ROLLBACKS,
            rule=Rollback(0.0, fallback=fallback, max_draft=longest),
            losses=["bleu"],
            max_new_tokens=64,
            shards=arguments.shards / f"bild_{fallback}_{longest}",
        )
        for longest in DRAFTS
        for fallback in FALLBACKS
    ]
    record = ThresholdRecord.across(records)
    arguments.output.mkdir(parents=True, exist_ok=True)
    record.save(arguments.output / "bild.parquet")
    print(record)


if __name__ == "__main__":
    main()
