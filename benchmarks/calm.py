"""Tokens per second of early-exit generation against the model's own `generate`.

`python benchmarks/calm.py [--model FOLDER] [--device cuda] [--batch 1 8 32]` runs a random T5, or a
saved one, on random inputs, at thresholds that save about half of the decoder's blocks. With
`--every 2 4`, rules also look at every second or fourth block only. With `--texts FILE`, thresholds
limit the BLEU gap, and the model is the library's translator, or yours with its sweeps
(`--model FOLDER --records FOLDER`). The time of a decoder with half the blocks and no decisions is
the limit of what such a saving can gain: encoder, head and the loop of `generate` remain. Ratios
are of best times in one run.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Result, show
from rich.console import Console
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    T5Config,
    T5ForConditionalGeneration,
)

from swiftsure import ThresholdRecord, calibrate
from swiftsure.text import CalmModel, CalmRule, MetaClassifier
from swiftsure_zoo.records import CALM, TRANSLATOR

TITLE = "calm: a T5 that generates with early exits, against its own generate"

SOURCE, TOKENS, SAVING = 64, 32, 0.5
EPSILON, DELTA = 0.05, 0.1
RULES = {
    "saturation": CalmRule(None, score="saturation"),
    "meta": CalmRule(None, score="meta"),
    "softmax": CalmRule(None),
    "softmax, shortlist of 64": CalmRule(None, shortlist=64),
}


def random_t5(width: int = 512, layers: int = 8, vocabulary: int = 32128) -> Any:
    """Return a random T5."""
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


def halfway(model: Any, rule: CalmRule, judge: MetaClassifier, inputs: dict[str, Tensor]) -> Any:
    """Return the model under a rule that saves about half of the blocks, found by bisection."""
    few = {name: value[:4] for name, value in inputs.items()}

    def at(threshold: float) -> tuple[float, CalmModel]:
        chosen = replace(rule, threshold=threshold)
        fast = CalmModel(model, chosen, classifier=judge if rule.score == "meta" else None)
        output = fast.generate(**few, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        return 1 - float(output.mean_layers.mean()) / fast.n_exits, fast

    low, high = -1.0, 1.0
    found = [at(high)]
    for _ in range(12):
        middle = (low + high) / 2
        found.append(at(middle))
        low, high = (low, middle) if found[-1][0] < SAVING else (middle, high)
    return min(found, key=lambda pair: abs(pair[0] - SAVING))[1]


def with_half(model: Any, generate: Callable[[], list[Any]]) -> list[Any]:
    """Generate with the first half of the decoder's blocks."""
    blocks = model.decoder.block
    model.decoder.block = blocks[: len(blocks) // 2]
    try:
        return generate()
    finally:
        model.decoder.block = blocks


def best(variants: dict[str, Callable[[], object]], device: str, repeats: int) -> dict[str, float]:
    """Return the seconds of each variant, measured in turn and in changing order."""
    names, found = list(variants), dict.fromkeys(variants, float("inf"))
    for repeat in range(repeats + 1):  # the first warms up
        random.Random(repeat).shuffle(names)
        for name in names:
            _wait(device)
            start = time.perf_counter()
            variants[name]()
            _wait(device)
            if repeat:
                found[name] = min(found[name], time.perf_counter() - start)
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    model: Any,
    where: str,
    inputs: Sequence[dict[str, Tensor]],
    options: dict[str, Any],
    fast: dict[str, CalmModel],
    repeats: int,
) -> list[Result]:
    """Compare tokens per second with the model's own `generate`, at one batch size."""

    def over_all(generate: Callable[..., Any]) -> Callable[[], list[Any]]:
        return lambda: [generate(**each, **options) for each in inputs]

    generate = over_all(model.generate)
    variants: dict[str, Callable[[], list[Any]]] = {"generate": generate}
    variants |= {"generate, once more": generate}
    variants |= {"half the blocks": lambda: with_half(model, generate)}
    variants |= {"never exits": over_all(CalmModel(model, None).generate)}
    variants |= {name: over_all(each.generate) for name, each in fast.items()}
    seconds = best(variants, model.device.type, repeats)
    said = {name: write() for name, write in variants.items()}
    speeds = {name: counted(said[name], model) / seconds[name] for name in variants}
    plain = speeds["generate"]
    results = [
        Result(f"{where}generate", plain, "tok/s"),
        Result(
            f"{where}overhead of never exiting",
            100 * (plain / speeds["never exits"] - 1),
            "%",
            at_most=10,
            note="generate against itself:"
            f" {100 * (plain / speeds['generate, once more'] - 1):+.1f} %",
        ),
        Result(
            f"{where}a decoder of half the blocks saves",
            100 * (1 - plain / speeds["half the blocks"]),
            "%",
        ),
    ]
    alone = len(inputs[0]["input_ids"]) == 1
    for name, each in fast.items():
        layers = np.concatenate([output.mean_layers for output in said[name]])
        skipped = 1 - float(layers.mean()) / each.n_exits
        saved = 1 - plain / speeds[name]
        results.append(
            Result(
                f"{where}{name}: time saved / blocks saved",
                saved / skipped if skipped else 0.0,
                at_least=0.5 if alone and "saturation" in name else None,
                note=f"saves {100 * skipped:.0f} % of blocks and {100 * saved:.0f} % of time"
                f" a token: {speeds[name]:,.0f} tok/s",
            )
        )
    return results


def counted(outputs: Sequence[Any], model: Any) -> int:
    """Return the number of generated tokens, without start and padding; at least one."""
    told = [each if isinstance(each, Tensor) else each.sequences for each in outputs]
    return max(1, sum(int((each[:, 1:] != model.config.pad_token_id).sum()) for each in told))


def run(
    device: str = "cpu",
    batches: Sequence[int] = (1, 8, 32),
    model: Any = None,
    repeats: int = 3,
    every: Sequence[int] = (),
) -> list[Result]:
    """Measure on random inputs, at thresholds that save about half of the blocks."""
    chosen = (random_t5() if model is None else model).to(device)
    judge = MetaClassifier(chosen.config.d_model).to(device).eval()
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    last, rules = len(chosen.decoder.block) - 1, dict(RULES)
    for step in every:
        rules |= {
            f"{name}, every {step} blocks": replace(rule, look_at=range(step - 1, last, step))
            for name, rule in RULES.items()
        }
    results = []
    for batch in batches:
        torch.manual_seed(batch)
        ids = torch.randint(5, chosen.config.vocab_size - 100, (batch, SOURCE), device=device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        fast = {name: halfway(chosen, rule, judge, inputs) for name, rule in rules.items()}
        where = f"{device}, batch {batch}: "
        results += measure(chosen, where, [inputs], options, fast, repeats)
    return results


def certified(
    model: Any, folder: Path, classifier: Path | None, epsilon: float = EPSILON
) -> dict[str, CalmModel]:
    """Return the model under a policy of each sweep in a folder, as `experiments/calm` makes it."""
    found = {}
    for file in sorted(folder.glob("*_*.parquet")):
        name, record = file.stem.rpartition("_")[2], ThresholdRecord.load(file)
        policy = calibrate(record, risk="gap", loss="bleu", epsilon=epsilon, delta=DELTA)
        judge = None
        if policy.settings["score"] == "meta" and classifier is not None:
            judge = MetaClassifier.load(classifier).to(model.device).eval()
        found[f"{name}, BLEU gap {epsilon:g}"] = CalmModel(model, policy, classifier=judge)
    return found


def run_certified(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    fast: dict[str, CalmModel],
    batches: Sequence[int],
    repeats: int,
) -> Iterator[list[Result]]:
    """Measure on texts, under policies, at each batch size."""
    options = next(iter(fast.values())).policy.settings["generation"]
    for batch in batches:
        inputs = [
            tokenizer(list(texts[i : i + batch]), padding=True, return_tensors="pt")
            for i in range(0, len(texts), batch)
        ]
        given = [
            {key: each[key].to(model.device) for key in ("input_ids", "attention_mask")}
            for each in inputs
        ]
        where = f"{model.device.type}, batch {batch}: "
        yield measure(model, where, given, options, fast, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--model", type=Path, help="folder of a saved T5")
    parser.add_argument("--records", type=Path, help="sweeps; our translator's by default")
    parser.add_argument(
        "--classifier", type=Path, help="by default beside the model, or its sweeps"
    )
    parser.add_argument("--texts", type=Path, help="file with one text a line")
    parser.add_argument("--n", type=int, default=32, help="how many texts")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--every", type=int, nargs="+", default=[], help="look at fewer blocks")
    arguments = parser.parse_args()
    folder = arguments.model or (arguments.texts and TRANSLATOR)
    if folder is None:
        model = random_t5(arguments.width, arguments.layers, arguments.vocabulary)
    else:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = model.to(arguments.device)
    repeats = arguments.repeats
    if arguments.texts is None:
        results = run(arguments.device, arguments.batch, model, repeats, arguments.every)
        show(TITLE, results, Console())
        return
    records = arguments.records or CALM
    beside = [folder / "meta.safetensors", *records.glob("*_meta.safetensors")]
    classifier = arguments.classifier or next((f for f in beside if f.is_file()), None)
    fast = certified(model, records, classifier)
    texts = arguments.texts.read_text(encoding="utf-8").splitlines()[: arguments.n]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for results in run_certified(model, tokenizer, texts, fast, arguments.batch, repeats):
        show(TITLE, results, Console())  # as they come: each size takes minutes


if __name__ == "__main__":
    main()
