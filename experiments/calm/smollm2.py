"""Add exits to a pretrained causal model without training it, from the root of the repository:
`python -m experiments.calm.smollm2 --model FILE.gguf --data FOLDER`.

SmolLM2-135M-Instruct continues captions of Multi30k, whose first words are the prompt. Light exit
heads are fitted on its own continuations of training captions, and a meta-classifier on others. A
softmax over all 49,152 tokens costs a fifth of the model, so it never pays here. Thresholds are
swept over test captions, and losses are against the full model's continuation.
Writes smollm2_SCORE.parquet, smollm2_heads.safetensors, smollm2_meta.safetensors and smollm2.json
(how often each exit's token is the full model's).
"""

import argparse
import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments import commands
from experiments.calm.records import PARTS
from experiments.translation.data import multi30k
from swiftsure import RunOptions
from swiftsure.text import CalmModel, CalmRule, Texts, fit_exit_heads, sweep, train_meta
from swiftsure.text.calm.training import agreement_examples

HERE = Path(__file__).parent
GENERATION = {"max_new_tokens": 24}
N_WORDS = 4
EXITS = range(17, 29, 2)
"""Blocks of 30 that get a head; earlier ones predict too little."""
THRESHOLDS = 1 - np.geomspace(1e-5, 0.1, 13)
"""Safest first, close to 1: both measures are overconfident."""
RULES = {
    "meta": CalmRule(None, score="meta"),
    "softmax": CalmRule(None, score="softmax", shortlist=64),
}
N_HELD = 64


def prompts(folder: Path, part: str, n: int | None) -> list[str]:
    """Return the first words of n captions (None: all), without duplicates."""
    captions = multi30k(folder / "multi30k", part).english
    starts = dict.fromkeys(" ".join(caption.split()[:N_WORDS]) for caption in captions)
    return list(starts)[:n]


def loaded(file: Path) -> tuple[Any, Any]:
    """Return model and tokenizer of a GGUF file, the model on the GPU if there is one."""
    options = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    return model.to(commands.device()).eval(), tokenizer


def tests(folder: Path, first: int, n: int, seen: Collection[str]) -> list[str]:
    """Return n prompts of the test parts from `first` on, without those in `seen`."""
    found = [text for part in PARTS for text in prompts(folder, part, None)]
    return [text for text in dict.fromkeys(found) if text not in seen][first : first + n]


def shared_options(description: str | None, here: Path, n_test: int) -> argparse.ArgumentParser:
    """Return the options of experiments with this model; each adds its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=here / "results")
    parser.add_argument("--fit", type=int, default=1000, help="prompts to fit exit heads on")
    parser.add_argument("--test", type=int, default=n_test, help="prompts to sweep over")
    parser.add_argument(
        "--first", type=int, default=0, help="first test prompt: skips those looked at before"
    )
    return parser


def main() -> None:
    parser = shared_options(__doc__, HERE, n_test=2000)
    parser.add_argument(
        "--meta", type=int, default=500, help="other prompts, to train the classifier on"
    )
    parser.add_argument("--scores", nargs="+", choices=RULES, default=["meta"])
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    model, tokenizer = loaded(arguments.model)
    arguments.output.mkdir(parents=True, exist_ok=True)

    began = time.perf_counter()
    training = prompts(arguments.data, "train", arguments.fit + arguments.meta)
    seen = training[: arguments.fit]
    options = {"max_new_tokens": GENERATION["max_new_tokens"], "batch_size": arguments.batch}
    heads = fit_exit_heads(model, Texts(seen, tokenizer), exits=EXITS, **options)
    heads.save(arguments.output / "smollm2_heads.safetensors")
    report = {"fitted_on": len(seen), "seconds": round(time.perf_counter() - began)}
    held = [text for text in prompts(arguments.data, "val", 400) if text not in set(training)]
    options["batch_size"] = N_HELD  # in one batch, examples come exit by exit
    for name, given in (("with_heads", heads), ("without", None)):
        agrees = agreement_examples(model, Texts(held[:N_HELD], tokenizer), heads=given, **options)[
            1
        ]
        exits = EXITS if given is not None else range(len(model.model.layers) - 1)
        shares = agrees.view(len(exits), -1).float().mean(dim=1).tolist()
        report[name] = {k + 1: round(share, 4) for k, share in zip(exits, shares, strict=True)}
    print(json.dumps(report), flush=True)
    (arguments.output / "smollm2.json").write_text(json.dumps(report, indent=2) + "\n")

    fresh = tests(arguments.data, arguments.first, arguments.test, set(training))
    classifier = None
    if "meta" in arguments.scores:
        options["batch_size"] = arguments.batch
        rest = Texts(training[arguments.fit :], tokenizer)
        classifier = train_meta(model, rest, heads=heads, **options)
        classifier.save(arguments.output / "smollm2_meta.safetensors")
    for score in arguments.scores:
        record = sweep(
            CalmModel(
                model,
                RULES[score],
                heads=heads,
                classifier=classifier if score == "meta" else None,
            ),
            Texts(fresh, tokenizer),
            thresholds=THRESHOLDS,
            losses=["rouge_l", "token_f1"],
            generation=GENERATION,
            batch_size=arguments.batch,
            run=RunOptions(shards=arguments.output / f"smollm2_{score}_shards", shard_size=256),
        )
        record.save(arguments.output / f"smollm2_{score}.parquet")
        layers = record.costs["layers"].mean(axis=0)
        print(
            f"{score}, {record.n} prompts: {layers[0]:.2f} to {layers[-1]:.2f} layers a token",
            flush=True,
        )


if __name__ == "__main__":
    main()
