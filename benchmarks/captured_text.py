"""Captured decoding (CALM, BiLD) against captured full decoders and `generate`, with its targets.

`python benchmarks/captured_text.py [--parts large limit pair translator drafts]` on a GPU:

- large: a T5 of T5-large's size with random weights. Confidences are computed as usual, and tokens
  exit after half of the blocks, or at looks drawn uniformly.
- limit: the captured full decoder at smaller batches, and what leaving rows out could gain.
- translator: the library's translator under its policies at a BLEU gap of `--epsilon`; needs
  `--texts`, one German sentence per line.
- pair: BiLD with random models whose first blocks often predict the large model's token.
- drafts: BiLD with the library's translator and its own first blocks; needs `--texts`.

The peer is the full decoder over the same static caches, captured as one graph per token. On a CPU
(`--device cpu --width 128 --layers 8`) the same code runs without graphs. Ratios are of best times
in one run; with texts, of tokens per second. On a GPU, `generate` and assisted generation run on
the first `SLOW` batches only, twice, and the second time counts.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bild import llama_pair, random_sources, t5_pair
from calm import certified, counted, random_t5
from measure import Result, show
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from swiftsure.text import BigLittle, CalmModel, CalmRule, MetaClassifier, Rollback, self_draft
from swiftsure.text.calm.confidences import Confidence, Look, look_exits
from swiftsure_zoo.records import CALM, TRANSLATOR

TITLE = "captured text: early exits and drafts, against captured full decoders"
SOURCE, TOKENS = 64, 48
ALONE = {"saturation": 1.5, "meta": 1.35, "softmax": 1.35}
"""Targets against the captured full decoder, when all rows exit after half of the blocks."""
HOW = {"half": 2, "uniform": None, "uniform, or full": None}
"""Where rows exit: after half of the blocks, or at looks drawn uniformly."""
EAGER = {1: 6.0, 32: 2.5}
"""Targets against eager `generate`, by batch size."""
TRANSLATED = {1: 2.0, 8: 1.5, 32: 1.5}
DRAFTED = {1: 1.5, 8: 1.2}
DRAFT_TOKENS = 64
PAIR_TEXTS = 8
SLOW = 4
"""Number of batches that uncaptured peers run on."""


class Forced(Confidence):
    """Computes a confidence, and exits at a given depth, or at looks drawn uniformly (None)."""

    def __init__(self, inner: Confidence, looks: Sequence[int], depth: int | None) -> None:
        self.inner, self.looks, self.depth = inner, list(looks), depth
        self.first_exit, self.gives_logits = inner.first_exit, inner.gives_logits

    def begin(self) -> None:
        self.inner.begin()
        self.computed = self.tokens = None

    def measure(self, look: Look) -> Tensor:
        unused = 0.0 * self.inner.measure(look)
        self.computed, self.tokens = self.inner.computed, self.inner.tokens
        if self.depth is not None:
            return unused + float(look.exit_index + 1 >= self.depth)
        drawn = (37.7 * look.states.float().abs().sum(dim=1)).frac()
        left = len(self.looks) - self.looks.index(look.exit_index)
        return unused + (drawn < 1 / (left + 1)).float()

    def flops(self) -> int:
        return self.inner.flops()


def forced(
    model: Any, rule: CalmRule, judge: MetaClassifier, depth: int | None, *, compiled: bool = False
) -> CalmModel:
    """Return the captured model under a rule whose exits are forced."""
    classifier = judge if rule.score == "meta" else None
    fast = CalmModel(
        model,
        replace(rule, threshold=0.5),
        classifier=classifier,
        capture=True,
        compile=compiled,
    )
    looks = look_exits(fast.decoder, rule, fast._confidence)
    confidence = Forced(fast._confidence, looks, depth)
    fast._confidence = fast._captured.confidence = confidence
    return fast


def seconds(function: Callable[[], Any], device: str, repeats: int) -> tuple[float, Any]:
    """Return the best time of a function after a first call, and its result."""
    result, best = function(), float("inf")
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        result = function()
        wait(device)
        best = min(best, time.perf_counter() - start)
    return best, result


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def random_on(device: str, width: int, layers: int, dtype: torch.dtype) -> Any:
    """Return a random T5 whose weights are drawn on the device."""
    with torch.device(device):
        return random_t5(width, layers).to(dtype)


def run_large(
    device: str,
    batches: Sequence[int],
    width: int,
    layers: int,
    repeats: int,
    dtype: torch.dtype,
    intervals: Sequence[int],
) -> Iterator[list[Result]]:
    """Measure a random T5; its encoder runs beforehand."""
    model = random_on(device, width, layers, dtype)
    judge = MetaClassifier(width).to(device, dtype).eval()
    options = {"max_new_tokens": TOKENS, "eos_token_id": None}
    for batch in batches:
        results = []
        torch.manual_seed(batch)
        ids = torch.randint(5, 30000, (batch, SOURCE), device=device)
        with torch.no_grad():
            encoded = model.get_encoder()(input_ids=ids)
        given = {"encoder_outputs": encoded, "attention_mask": torch.ones_like(ids)}

        def time_of(generate: Any, given: Any = given) -> tuple[float, Any]:
            return seconds(lambda: generate(**given, **options), device, repeats)

        eager, _ = time_of(lambda **each: model.generate(**each, do_sample=False))
        full, _ = time_of(CalmModel(model, None, capture=True).generate)
        where = f"batch {batch}: "
        per_token = 1e3 / TOKENS
        results += [
            Result(f"{where}generate, eager", eager * per_token, "ms"),
            Result(f"{where}full decoder, captured", full * per_token, "ms"),
        ]
        for every in intervals:
            looks = None if every == 1 else range(every - 1, layers - 1, every)
            never = forced(
                model, CalmRule(None, score="saturation", look_at=looks), judge, layers + 1
            )
            results.append(
                Result(
                    f"{where}saturation, every {every}, never exiting",
                    100 * (time_of(never.generate)[0] / full - 1),
                    "% over the captured full decoder",
                    at_most=5,
                )
            )
            for score, target in ALONE.items():
                rule = CalmRule(None, score=score, look_at=looks)
                for how, depth in HOW.items():
                    fast = forced(model, rule, judge, depth and layers // depth)
                    if how == "uniform, or full":
                        fast.measure(**given, **options)
                    took, output = time_of(fast.generate)
                    goal = target if how == "half" else 1.3 if batch == 32 else 1.0
                    results.append(
                        Result(
                            f"{where}{score}, every {every}, {how}",
                            full / took,
                            at_least=goal,
                            note=f"{took * per_token:.2f} ms, {eager / took:.1f} x generate"
                            f" (target {EAGER.get(batch, '-')}), mean depth"
                            f" {float(output.mean_layers.mean()):.1f}",
                        )
                    )
        yield results


def run_limit(
    device: str, batches: Sequence[int], width: int, layers: int, repeats: int, dtype: torch.dtype
) -> Iterator[list[Result]]:
    """Measure the captured full decoder at smaller batches, and what leaving rows out could gain.

    Rows exit at six depths, uniformly, and each sixth of the blocks runs on the rows that are left,
    with no cost of looks and of gathering rows.
    """
    model = random_on(device, width, layers, dtype)
    full = CalmModel(model, None, capture=True)
    options = {"max_new_tokens": TOKENS, "eos_token_id": None}
    sizes = sorted({1, 2, 4, 8, 12, 16, 24, *batches})
    took = {}
    for batch in sizes:
        ids = torch.randint(5, 30000, (batch, SOURCE), device=device)
        with torch.no_grad():
            encoded = model.get_encoder()(input_ids=ids)
        given = {"encoder_outputs": encoded, "attention_mask": torch.ones_like(ids)}
        call = partial(full.generate, **given, **options)
        took[batch] = seconds(call, device, repeats)[0] * 1e3 / TOKENS
    results = [
        Result(f"full decoder, captured, batch {batch}", took[batch], "ms") for batch in sizes
    ]
    for batch in batches:
        left = [batch * (6 - k) / 6 for k in range(6)]
        shrinking = np.mean([np.interp(each, sizes, [took[s] for s in sizes]) for each in left])
        results.append(
            Result(f"batch {batch}: at most, by leaving rows out", took[batch] / shrinking)
        )
    yield results


def run_translator(
    device: str,
    batches: Sequence[int],
    texts: Sequence[str],
    repeats: int,
    epsilon: float,
    chosen: Sequence[str],
) -> Iterator[list[Result]]:
    """Measure the library's translator under its certified policies."""
    folder = TRANSLATOR
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    plain = certified(model, CALM, folder / "meta.safetensors", epsilon)
    options = next(iter(plain.values())).policy.settings["generation"]
    plain = {k: each for k, each in plain.items() if not chosen or k.split(",")[0] in chosen}
    slow, times = (SLOW, 1) if device == "cuda" else (None, repeats)
    for batch in batches:
        inputs = batches_of(tokenizer, texts, batch, device)

        def rate(generate: Any, inputs: Any, repeats: int = repeats) -> tuple[float, Any]:
            took, said = seconds(partial(over_all, generate, inputs), device, repeats)
            return counted(said, model) / took, said

        eager, _ = rate(partial(model.generate, **options, do_sample=False), inputs[:slow], times)
        full, _ = rate(partial(CalmModel(model, None, capture=True).generate, **options), inputs)
        where = f"translator, batch {batch}: "
        yield [
            Result(f"{where}captured full decoder", full, "tok/s"),
            Result(f"{where}captured full decoder, against generate", full / eager),
        ]
        for name, each in plain.items():
            fast = CalmModel(model, each.policy, classifier=each.classifier, capture=True)
            speed, said = rate(fast.generate, inputs)
            layers = np.concatenate([output.mean_layers for output in said]).mean()
            yield [
                Result(
                    f"{where}{name}",
                    speed / full,
                    at_least=TRANSLATED.get(batch)
                    if device == "cuda" and epsilon == 0.05
                    else None,
                    note=f"{speed / eager:.2f} x generate, {layers:.1f} layers",
                )
            ]


def batches_of(
    tokenizer: Any, texts: Sequence[str], batch: int, device: str
) -> list[dict[str, Tensor]]:
    """Return texts as padded batches on a device."""
    given = [
        tokenizer(list(texts[i : i + batch]), padding=True, return_tensors="pt").to(device)
        for i in range(0, len(texts), batch)
    ]
    return [{k: each[k] for k in ("input_ids", "attention_mask")} for each in given]


def run_pair(device: str, batches: Sequence[int], repeats: int) -> Iterator[list[Result]]:
    """Measure BiLD with random models; the large one alone runs as `CalmModel` captures it."""
    for name, build in {"T5": t5_pair, "Llama": llama_pair}.items():
        large, small = (model.to(device) for model in build())
        for model in (large, small):
            model.generation_config.eos_token_id = None  # answers of one length
        pairs = {"alone": CalmModel(large, None, capture=True)}
        pairs |= {"drafts": BigLittle(large, small, Rollback(2.0), capture=True)}
        rows = random_sources(large, PAIR_TEXTS)
        slow = seconds(assisted(large, small, rows[:SLOW]), device, 1)[0] / len(rows[:SLOW])
        for batch in batches:
            given = [
                {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                for ids in torch.cat(rows).split(batch)
            ]
            took, drafted = {}, []
            for each, pair in pairs.items():
                call = partial(pair.generate, max_new_tokens=TOKENS)
                took[each], drafted = seconds(partial(over_all, call, given), device, repeats)
            passes = np.concatenate([output.large_passes for output in drafted]).mean()
            where = f"{name} pair, batch {batch}: drafts, against "
            yield [
                Result(
                    f"{where}the captured large model",
                    took["alone"] / took["drafts"],
                    at_least=DRAFTED.get(batch),
                    note=f"{len(rows) * TOKENS / took['drafts']:,.0f} tok/s,"
                    f" {passes:.2f} large passes a token",
                ),
                Result(
                    f"{where}assisted generation", slow * len(rows) / took["drafts"], at_least=1.0
                ),
            ]


def assisted(
    large: Any, small: Any, rows: Iterable[Tensor], tokens: int = TOKENS
) -> Callable[[], list[Any]]:
    """Return transformers' assisted generation, which takes one text, (1, positions), at a time."""
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return lambda: [
        large.generate(row, attention_mask=torch.ones_like(row), assistant_model=small, **options)
        for row in rows
    ]


def run_drafts(
    device: str, batches: Sequence[int], texts: Sequence[str], repeats: int
) -> Iterator[list[Result]]:
    """Measure the library's translator with drafts of its own first blocks."""
    folder = TRANSLATOR
    tokenizer = AutoTokenizer.from_pretrained(folder)
    large = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    smalls = {f"{blocks} of 8 blocks": self_draft(large, blocks) for blocks in (1, 2)}
    for small in smalls.values():
        # Assisted generation makes a cache of `num_layers`, and fails if the decoder has fewer.
        small.config.num_layers = small.config.num_decoder_layers
    rows = [each["input_ids"] for each in batches_of(tokenizer, texts[:SLOW], 1, device)]
    peers = {}
    for name, small in smalls.items():
        took, said = seconds(assisted(large, small, rows, DRAFT_TOKENS), device, 1)
        peers[name] = counted(said, large) / took
    for batch in batches:
        inputs = batches_of(tokenizer, texts, batch, device)
        where = f"translator, batch {batch}: "
        alone = partial(CalmModel(large, None, capture=True).generate, max_new_tokens=DRAFT_TOKENS)
        took, said = seconds(partial(over_all, alone, inputs), device, repeats)
        full = counted(said, large) / took
        for size, small in smalls.items():
            for name, level in {"lossless": 0.0, "rollback 2": 2.0}.items():
                pair = BigLittle(large, small, Rollback(level), capture=True)
                call = partial(pair.generate, max_new_tokens=DRAFT_TOKENS)
                took, said = seconds(partial(over_all, call, inputs), device, repeats)
                runs = [run for output in said for run in output.runs]
                written = sum(len(run.tokens) for run in runs)
                rate = written / took
                passes = [sum(run.large_passes for run in runs) / written]
                passes += [sum(run.small_passes for run in runs) / written]
                yield [
                    Result(
                        f"{where}{name}, drafts of {size}",
                        rate / full,
                        at_least=DRAFTED.get(batch),
                        note=f"{rate:,.0f} tok/s, {rate / peers[size]:.1f} x assisted generation,"
                        f" {passes[0]:.2f} large and {passes[1]:.2f} small passes a token",
                    )
                ]


def over_all(generate: Any, inputs: Sequence[dict[str, Tensor]]) -> list[Any]:
    """Generate for all batches."""
    return [generate(**each) for each in inputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", default=["large", "pair"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--every", type=int, nargs="+", default=[1, 4], help="blocks per look")
    parser.add_argument("--texts", type=Path, help="file with one German sentence per line")
    parser.add_argument("--epsilon", type=float, default=0.05, help="BLEU gap of the policies")
    parser.add_argument("--policies", nargs="+", default=[], help="such as meta; all by default")
    parser.add_argument("--n", type=int, default=64, help="how many texts")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    device, batches, repeats = arguments.device, arguments.batch, arguments.repeats
    small_batches = [each for each in batches if each <= 8]
    parts: dict[str, Callable[[], Iterator[list[Result]]]] = {
        "large": lambda: run_large(
            device,
            batches,
            arguments.width,
            arguments.layers,
            repeats,
            getattr(torch, arguments.dtype),
            arguments.every,
        ),
        "limit": lambda: run_limit(
            device,
            batches,
            arguments.width,
            arguments.layers,
            repeats,
            getattr(torch, arguments.dtype),
        ),
        "pair": lambda: run_pair(device, small_batches, repeats),
    }
    if arguments.texts is not None:
        texts = arguments.texts.read_text(encoding="utf-8").splitlines()[: arguments.n]
        parts["translator"] = lambda: run_translator(
            device, batches, texts, repeats, arguments.epsilon, arguments.policies
        )
        parts["drafts"] = lambda: run_drafts(device, small_batches, texts, repeats)
    for part in arguments.parts:
        if part not in parts:
            parser.error(f"--parts must be among {', '.join(parts)}, but got {part!r}")
        for results in parts[part]():
            show(f"{TITLE}: {part}", results, Console())  # as they come


if __name__ == "__main__":
    main()
