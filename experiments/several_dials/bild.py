"""BiLD's rollback, fallback and draft length as dials, from the root of the repository:
`python -m experiments.several_dials.bild bild --data FOLDER --shards FOLDER`.

The translator that comes with `swiftsure-zoo` writes, and its first two decoder blocks draft.
Every combination of the dials is swept over test sentences of Multi30k in random order. Writes
bild.parquet (rollback and fallback) or bild_drafts.parquet (rollback and draft length).
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from experiments.several_dials.sentences import sentences
from swiftsure import RunOptions, ThresholdRecord
from swiftsure.text import BigLittle, Rollback, Texts, self_draft, sweep_pair
from swiftsure_zoo.records import TRANSLATOR

HERE = Path(__file__).parent
ROLLBACKS = (0.6, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 12.0)
FALLBACKS = (0.5, 0.3, 0.2, 0.1, 0.0)
DRAFTS = (10, 20, 5)

RECORDS: dict[str, list[dict[str, Any]]] = {
    "bild": [{"fallback": each} for each in FALLBACKS],
    "bild_drafts": [{"fallback": 0.0, "max_draft": each} for each in DRAFTS],
}
"""The sweeps of each record, that of today's settings first; see `Rollback`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(RECORDS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--shards", type=Path, required=True, help="where to keep unfinished work")
    parser.add_argument("--sentences", type=int, default=380)
    arguments = parser.parse_args()
    kept, tests = sentences(arguments.data, arguments.sentences)
    model = AutoModelForSeq2SeqLM.from_pretrained(TRANSLATOR, dtype=torch.float32).eval()
    draft = self_draft(model, 2)
    tokenizer = AutoTokenizer.from_pretrained(TRANSLATOR)
    records = [
        sweep_pair(
            BigLittle(model, draft, Rollback(0.0, **settings)),
            Texts(tests.german, tokenizer, tests.english, kept),
            thresholds=ROLLBACKS,
            losses=["bleu"],
            max_new_tokens=64,
            run=RunOptions(shards=arguments.shards / f"{arguments.name}_{number}", shard_size=32),
        )
        for number, settings in enumerate(RECORDS[arguments.name])
    ]
    record = ThresholdRecord.across(records)
    arguments.output.mkdir(parents=True, exist_ok=True)
    record.save(arguments.output / f"{arguments.name}.parquet")
    print(record)


if __name__ == "__main__":
    main()
