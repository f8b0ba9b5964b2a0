"""CALM's threshold, decay and looks as dials, from the root of the repository:
`python -m experiments.several_dials.calm --data FOLDER --shards FOLDER`.

The translator that comes with `swiftsure-zoo` looks after every block, after every second one or
only after the second, each with a threshold that stays or that decays over the answer. The
confidence is the softmax measure. Writes calm.parquet.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from experiments.calm.records import GENERATION
from experiments.several_dials.sentences import sentences
from swiftsure import RunOptions, ThresholdRecord
from swiftsure.text import CalmModel, CalmRule, Decay, Texts, sweep
from swiftsure_zoo.records import TRANSLATOR

HERE = Path(__file__).parent
THRESHOLDS = (0.98, 0.94, 0.9, 0.8, 0.7, 0.6, 0.4, 0.2, 0.0)
LOOKS = (None, (1, 3, 5), (1,))
DECAYS = (None, Decay(length=64, temperature=4.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--shards", type=Path, required=True, help="where to keep unfinished work")
    parser.add_argument("--sentences", type=int, default=380)
    arguments = parser.parse_args()
    kept, tests = sentences(arguments.data, arguments.sentences)
    model = AutoModelForSeq2SeqLM.from_pretrained(TRANSLATOR, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TRANSLATOR)
    rules = [CalmRule(look_at=looks, decay=decay) for looks in LOOKS for decay in DECAYS]
    records = [
        sweep(
            CalmModel(model, rule),
            Texts(tests.german, tokenizer, tests.english, kept),
            thresholds=THRESHOLDS,
            losses=["bleu"],
            generation=GENERATION,
            batch_size=32,
            run=RunOptions(shards=arguments.shards / f"calm_{number}", shard_size=128),
        )
        for number, rule in enumerate(rules)
    ]
    record = ThresholdRecord.across(records)
    arguments.output.mkdir(parents=True, exist_ok=True)
    record.save(arguments.output / "calm.parquet")
    print(record)


if __name__ == "__main__":
    main()
