"""A pretrained causal model that drafts with its own first blocks, from the root of the repository:
`python -m experiments.bild.smollm2 --model FILE.gguf --data FOLDER`.

SmolLM2-135M-Instruct continues captions of Multi30k, whose first words are the prompt. What its
first blocks say goes through a head that is fitted, in closed form, on its own continuations of
training captions; the whole model checks. The rollback threshold is swept over test captions, with
the fallback threshold at 0.5, and losses are against the whole model's continuation. Writes
smollm2.parquet, and smollm2.json with what the pair costs at each threshold.
"""

import json
from pathlib import Path

import numpy as np

from experiments.calm.smollm2 import GENERATION, loaded, prompts, shared_options, tests
from swiftsure import RunOptions
from swiftsure.text import (
    BigLittle,
    Rollback,
    Texts,
    fit_exit_heads,
    self_draft,
    sweep_pair,
)

HERE = Path(__file__).parent
THRESHOLDS = np.round(np.geomspace(0.6, 12.0, 12), 3)
"""Safest first; those below log 2 only change the time."""


def main() -> None:
    parser = shared_options(__doc__, HERE, n_test=1000)
    parser.add_argument("--blocks", type=int, default=4, help="of 30, to draft with")
    arguments = parser.parse_args()
    model, tokenizer = loaded(arguments.model)
    arguments.output.mkdir(parents=True, exist_ok=True)
    seen = prompts(arguments.data, "train", arguments.fit)
    heads = fit_exit_heads(
        model,
        Texts(seen, tokenizer),
        exits=[arguments.blocks - 1],
        batch_size=32,
        **GENERATION,
    )
    record = sweep_pair(
        BigLittle(
            model,
            self_draft(model, arguments.blocks, heads=heads),
            Rollback(None, fallback=0.5),
        ),
        Texts(tests(arguments.data, arguments.first, arguments.test, set(seen)), tokenizer),
        thresholds=THRESHOLDS,
        losses=["rouge_l", "token_f1"],
        **GENERATION,
        run=RunOptions(shards=arguments.output / "smollm2_shards", shard_size=32),
    )
    record.save(arguments.output / "smollm2.parquet")
    means = {name: values.mean(axis=0).tolist() for name, values in record.costs.items()}
    means["rouge_l"] = record.inconsistencies["rouge_l"].mean(axis=0).tolist()
    report = {"blocks": arguments.blocks, "thresholds": record.thresholds.tolist(), **means}
    (arguments.output / "smollm2.json").write_text(json.dumps(report, indent=2) + "\n")
    for threshold, passes, lost in zip(
        record.thresholds, means["large_passes"], means["rouge_l"], strict=True
    ):
        print(f"{threshold:7.3f}: {passes:.3f} passes a token, ROUGE-L loss {lost:.3f}", flush=True)


if __name__ == "__main__":
    main()
