"""A causal decoder with compiled blocks and merged weights, against `generate` and captured blocks.

`python benchmarks/compiled_text.py [--device cpu] [--batch 1 8]` runs a Qwen2 of random weights, by
default of Qwen2-1.5B's size on a GPU and small on a CPU: the full decoder, and half of its blocks
with one look after which every row exits. Ratios are of best times in one run; the first calls,
which compile, are not counted but shown.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from captured_text import forced, seconds
from measure import Result, show
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM

from swiftsure.text import CalmModel, CalmRule, MetaClassifier

TITLE = "compiled decoders: milliseconds per token"
PROMPT, TOKENS = 48, 48
SIZES = {"cuda": (1536, 8960, 28, 151936), "cpu": (512, 2816, 12, 8192)}
"""Width, width of the MLP, blocks and vocabulary."""
AT_LEAST = {"cuda": 1.7}
"""Target of half of the blocks against the fastest full decoder."""


def random_qwen2(device: str, size: Sequence[int], dtype: torch.dtype) -> Any:
    """Return a random Qwen2 with six queries for each head of keys, as Qwen2-1.5B has."""
    width, inner, layers, vocabulary = size
    torch.manual_seed(0)
    heads = max(width // 128, 6)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 6,
        head_dim=128 if width >= 768 else 64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.device(device):
        return Qwen2ForCausalLM(config).to(dtype).eval()


def run(
    device: str, batches: Sequence[int], size: Sequence[int], repeats: int, dtype: torch.dtype
) -> Iterator[list[Result]]:
    """Measure each way at each batch size."""
    model = random_qwen2(device, size, dtype)
    judge = MetaClassifier(size[0]).to(device, dtype).eval()
    half = size[2] // 2
    rule = CalmRule(None, score="saturation", look_at=[half - 1])
    options = {"max_new_tokens": TOKENS, "eos_token_id": None}
    fast: dict[str, CalmModel] = {}
    for name, compiled in (("captured", False), ("compiled", True)):
        fast[f"full, {name}"] = CalmModel(model, None, capture=True, compile=compiled)
        fast[f"half, {name}"] = forced(model, rule, judge, half, compiled=compiled)
    for batch in batches:
        torch.manual_seed(batch)
        ids = torch.randint(5, size[3], (batch, PROMPT), device=device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        took, first = {}, {}
        slow, _ = seconds(
            lambda given=given: model.generate(**given, **options, do_sample=False), device, repeats
        )
        for name, each in fast.items():
            start = time.perf_counter()
            each.generate(**given, **options)
            first[name] = time.perf_counter() - start
            took[name], _ = seconds(
                lambda each=each, given=given: each.generate(**given, **options), device, repeats
            )
        where, per_token = f"batch {batch}: ", 1e3 / TOKENS
        best = min(slow, took["full, captured"], took["full, compiled"])
        yield [
            Result(f"{where}generate", slow * per_token, "ms"),
            *(
                Result(f"{where}{name}", took[name] * per_token, "ms", note=f"first call {s:.0f} s")
                for name, s in first.items()
            ),
            Result(
                f"{where}full: compiled against captured",
                took["full, captured"] / took["full, compiled"],
            ),
            Result(
                f"{where}half: compiled against captured",
                took["half, captured"] / took["half, compiled"],
            ),
            Result(
                f"{where}half, compiled, against the fastest full decoder",
                best / took["half, compiled"],
                at_least=AT_LEAST.get(device),
            ),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--size", type=int, nargs=4, help="width, MLP, blocks, vocabulary")
    parser.add_argument("--dtype", help="bfloat16 on a GPU, else float32")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    size = given.size or SIZES[given.device]
    dtype = getattr(torch, given.dtype or ("bfloat16" if given.device == "cuda" else "float32"))
    for results in run(given.device, given.batch, size, given.repeats, dtype):
        show(TITLE, results, Console())  # as they come


if __name__ == "__main__":
    main()
