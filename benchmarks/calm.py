"""Early-exit generation against the model's own `generate`: tokens a second, in several batches.

A T5 of random weights, or a saved one, on random inputs:
`python benchmarks/calm.py [--model FOLDER] [--device cuda] [--batch 1 8 32]`. The threshold of each
confidence is the one that saves about half of the decoder's blocks. What a decoder of half the
blocks takes, with nothing to decide, is the most that such a saving can turn into time: the rest of
`generate` (encoder, head, its own loop) stays. Ratios in one run, best times.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import CLOCKS, Result, show
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from swiftsure.text import CalmModel, ExitRule, MetaClassifier

TITLE = "calm: a T5 that generates with early exits, against its own generate"

SOURCE, TOKENS, SAVING = 64, 32, 0.5
RULES = {
    "saturation": ExitRule(None, score="saturation"),
    "meta": ExitRule(None, score="meta"),
    "softmax": ExitRule(None),
    "softmax, shortlist of 64": ExitRule(None, shortlist=64),
}


def random_t5(width: int = 512, layers: int = 8, vocabulary: int = 32128) -> Any:
    """A T5 of random weights."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=64,
        d_ff=4 * width,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=width // 64,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
        scale_decoder_outputs=False,
    )
    model = T5ForConditionalGeneration(config).eval()
    model.lm_head.weight.data *= 0.2  # else it is sure of everything, from the first block on
    return model


def halfway(model: Any, rule: ExitRule, judge: MetaClassifier, inputs: dict[str, Tensor]) -> Any:
    """The model under a rule that saves about half of the blocks: the threshold is bisected."""
    few = {name: value[:4] for name, value in inputs.items()}

    def at(level: float) -> tuple[float, CalmModel]:
        chosen = replace(rule, threshold=level)
        fast = CalmModel(model, chosen, classifier=judge if rule.score == "meta" else None)
        output = fast.generate(**few, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        return 1 - float(output.mean_layers.mean()) / fast.n_exits, fast

    low, high = -1.0, 1.0
    found = [at(high)]
    for _ in range(12):
        level = (low + high) / 2
        found.append(at(level))
        low, high = (low, level) if found[-1][0] < SAVING else (level, high)
    return min(found, key=lambda pair: abs(pair[0] - SAVING))[1]


def with_half(model: Any, generate: Callable[[], object]) -> None:
    """Generate with the first half of the decoder's blocks."""
    blocks = model.decoder.block
    model.decoder.block = blocks[: len(blocks) // 2]
    try:
        generate()
    finally:
        model.decoder.block = blocks


def best(variants: dict[str, Callable[[], object]], device: str, repeats: int) -> dict[str, float]:
    """Seconds of each variant, taken in turn and in changing order."""
    clock = CLOCKS["wall"] if device == "cuda" else time.process_time
    names, found = list(variants), dict.fromkeys(variants, float("inf"))
    for repeat in range(repeats + 1):  # the first warms up
        random.Random(repeat).shuffle(names)
        for name in names:
            _wait(device)
            start = clock()
            variants[name]()
            _wait(device)
            if repeat:
                found[name] = min(found[name], clock() - start)
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(model: Any, device: str, batch: int, repeats: int) -> list[Result]:
    torch.manual_seed(batch)
    ids = torch.randint(5, model.config.vocab_size - 100, (batch, SOURCE), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    judge = MetaClassifier(model.config.d_model).to(device).eval()
    never = CalmModel(model, None)
    fast = {name: halfway(model, rule, judge, inputs) for name, rule in RULES.items()}
    seconds = best(
        {
            "generate": lambda: model.generate(**inputs, **options),
            "generate, once more": lambda: model.generate(**inputs, **options),
            "half the blocks": lambda: with_half(
                model, lambda: model.generate(**inputs, **options)
            ),
            "never exits": lambda: never.generate(**inputs, **options),
            **{
                name: lambda each=each: each.generate(**inputs, **options)
                for name, each in fast.items()
            },
        },
        device,
        repeats,
    )
    plain = seconds["generate"]
    where = f"{device}, batch {batch}: "
    results = [
        Result(f"{where}generate", batch * TOKENS / plain, "tok/s"),
        Result(
            f"{where}overhead of never exiting",
            100 * (seconds["never exits"] / plain - 1),
            "%",
            at_most=10,
            note="generate against itself:"
            f" {100 * (seconds['generate, once more'] / plain - 1):+.1f} %",
        ),
    ]
    possible = 1 - seconds["half the blocks"] / plain
    results.append(Result(f"{where}a decoder of half the blocks saves", 100 * possible, "%"))
    for name, each in fast.items():
        output = each.generate(**inputs, **options)
        skipped = 1 - float(output.mean_layers.mean()) / each.n_exits
        saved = 1 - seconds[name] / plain
        cheapest = batch == 1 and name == "saturation"
        results.append(
            Result(
                f"{where}{name}: time saved / blocks saved",
                saved / skipped,
                at_least=0.5 if cheapest else None,
                note=f"saves {100 * skipped:.0f} % of blocks and {100 * saved:.0f} % of time:"
                f" {batch * TOKENS / seconds[name]:,.0f} tok/s",
            )
        )
    return results


def run(
    device: str = "cpu",
    batches: Sequence[int] = (1, 8, 32),
    model: Any = None,
    repeats: int = 3,
) -> list[Result]:
    chosen = (random_t5() if model is None else model).to(device)
    return [result for batch in batches for result in measure(chosen, device, batch, repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--model", type=Path, help="folder of a saved T5")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32128)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.model is None:
        model = random_t5(arguments.width, arguments.layers, arguments.vocabulary)
    else:
        model = AutoModelForSeq2SeqLM.from_pretrained(arguments.model).eval()
    for batch in arguments.batch:
        show(TITLE, run(arguments.device, [batch], model, arguments.repeats), Console())


if __name__ == "__main__":
    main()
