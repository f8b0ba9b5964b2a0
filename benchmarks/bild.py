"""Drafts by a small model against the large model alone and transformers' assisted generation.

Batch 1, greedy. `python benchmarks/bild.py [--device cuda]` measures a T5 and a Llama with random
weights whose later blocks change little, so that their first blocks often predict the same token.
For saved models pass `--large FOLDER --small FOLDER --texts FILE`, with one text per line, or
`--self-draft N` instead of a small model; with `--record FILE` of the pair, policies that limit the
BLEU gap are measured too. Ratios are of best times in one run.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Result, best_times, show, use_clock
from rich.console import Console
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from swiftsure import Policy, ThresholdRecord, calibrate
from swiftsure.text import BigLittle, Rollback, self_draft

TITLE = "bild: drafts of a small model, against the large one alone (batch 1)"

SOURCE, TOKENS, TEXTS = 32, 48, 4
LAYERS, DRAFT_LAYERS = 12, 2
DAMPING = 0.05
"""Scale of the later blocks' contributions."""
SURETY = 0.8
"""Mean probability of the top token, to which the head is scaled."""
EPSILONS, DELTA = (0.01, 0.02, 0.05), 0.1
RULES: dict[str, Rollback | Policy] = {
    "lossless drafts": Rollback(0.0),
    "rollback 2": Rollback(2.0),
    "rollback 5": Rollback(5.0),
}


def t5_pair(width: int = 256, vocabulary: int = 8000) -> tuple[Any, Any]:
    """Return two random T5s, the small one made of the large one's first blocks."""
    torch.manual_seed(0)
    config = {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": 64,
        "d_ff": 4 * width,
        "num_heads": width // 64,
        "decoder_start_token_id": 0,
    }
    configs = [T5Config(num_layers=n, **config) for n in (LAYERS, DRAFT_LAYERS)]
    for each in configs:
        each.tie_word_embeddings = False  # else the next token is mostly the last one
    large, small = (T5ForConditionalGeneration(each).eval() for each in configs)
    for stack in (large.encoder, large.decoder):
        for block in stack.block[DRAFT_LAYERS:]:
            for layer in block.layer[:-1]:
                attention = getattr(layer, "SelfAttention", None) or layer.EncDecAttention
                attention.o.weight.data *= DAMPING
            block.layer[-1].DenseReluDense.wo.weight.data *= DAMPING
    make_sure(large)
    small.load_state_dict(large.state_dict(), strict=False)
    return large, small


def llama_pair(width: int = 512, vocabulary: int = 8000) -> tuple[Any, Any]:
    """Return a random Llama and its own first blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 64,
        initializer_range=0.1,
    )
    large = LlamaForCausalLM(config).eval()
    for block in large.model.layers[DRAFT_LAYERS:]:
        block.self_attn.o_proj.weight.data *= DAMPING
        block.mlp.down_proj.weight.data *= DAMPING
    make_sure(large)
    return large, self_draft(large, DRAFT_LAYERS)


@torch.no_grad()
def make_sure(model: Any) -> None:
    """Scale a model's head until it is as confident as trained models are."""
    given = torch.randint(5, model.config.vocab_size, (1, 64))
    logits = model(given, **({"labels": given} if model.config.is_encoder_decoder else {})).logits
    scale = 1.0
    while (scale * logits).softmax(dim=-1).amax(dim=-1).mean() < SURETY:
        scale *= 1.1
    model.get_output_embeddings().weight.mul_(scale)


def certified(path: Path) -> dict[str, Rollback | Policy]:
    """Return policies that keep the gap of sentence BLEU, from a sweep of the pair."""
    record = ThresholdRecord.load(path)
    return {
        f"BLEU gap {epsilon:g}": calibrate(
            record, risk="gap", loss="bleu", epsilon=epsilon, delta=DELTA
        )
        for epsilon in EPSILONS
    }


def measure(
    name: str,
    large: Any,
    small: Any,
    sources: list[Tensor],
    tokens: int,
    repeats: int,
    rules: dict[str, Rollback | Policy] = RULES,
) -> list[Result]:
    device = large.device.type
    ends = large.generation_config.eos_token_id
    greedy = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": ends}
    greedy |= {"pad_token_id": large.generation_config.pad_token_id or 0}
    pairs = {"large alone": BigLittle(large, small, None)}
    pairs |= {each: BigLittle(large, small, rule) for each, rule in rules.items()}

    def over_all(write: Callable[[Tensor], object]) -> Callable[[], object]:
        def run() -> object:
            said = [write(source) for source in sources]
            if device == "cuda":
                torch.cuda.synchronize()
            return said

        return run

    def masked(source: Tensor) -> dict[str, Tensor]:
        return {"input_ids": source, "attention_mask": torch.ones_like(source)}

    variants: dict[str, Callable[[], Any]] = {
        "generate": over_all(lambda source: large.generate(**masked(source), **greedy)),
        "assisted": over_all(
            lambda source: large.generate(**masked(source), **greedy, assistant_model=small)
        ),
        **{
            each: over_all(lambda source, pair=pair: pair.generate(source, max_new_tokens=tokens))
            for each, pair in pairs.items()
        },
    }
    seconds = best_times(variants, repeats)
    plain = [each.tolist() for each in variants["generate"]()]
    n_plain = new_tokens(plain, large, sources)
    assisted = counted_passes(large, variants["assisted"]) / n_plain
    same = [each.sequences.tolist() for each in variants["lossless drafts"]()] == plain
    where = f"{name}, {device}: "
    n = len(sources)
    results = [
        Result(f"{where}generate", n / seconds["generate"], "texts/s"),
        Result(
            f"{where}large alone, against generate",
            seconds["generate"] / seconds["large alone"],
            at_least=0.9,
        ),
        Result(
            f"{where}assisted generation, against generate",
            seconds["generate"] / seconds["assisted"],
            note=f"{assisted:.2f} large passes a token",
        ),
    ]
    for each in rules:
        runs = [run for output in variants[each]() for run in output.runs]
        written = sum(len(run.tokens) for run in runs)
        note = f"{sum(run.large_passes for run in runs) / written:.2f} large passes a token"
        note += f", {sum(run.small_passes for run in runs) / written:.2f} small"
        if each == "lossless drafts":
            note += f"; {'the same tokens' if same else 'OTHER TOKENS (ties within rounding?)'}"
        speed = seconds["generate"] / seconds[each] * (written / n_plain)  # by the token
        results.append(Result(f"{where}{each}, against generate", speed, note=note))
    results.append(
        Result(
            f"{where}lossless drafts, against assisted generation",
            seconds["assisted"] / seconds["lossless drafts"],
            at_least=1,
        )
    )
    return results


def new_tokens(sequences: list[Any], large: Any, sources: list[Tensor]) -> int:
    """Return the number of new tokens of all sequences."""
    crossed = large.config.is_encoder_decoder
    before = [1 if crossed else source.shape[1] for source in sources]
    return sum(len(rows[0]) - start for rows, start in zip(sequences, before, strict=True))


def counted_passes(large: Any, write: Callable[[], Any]) -> int:
    """Count the passes of the large model, by a hook."""
    counted: list[int] = []
    hook = large.register_forward_hook(lambda *_: counted.append(1))
    try:
        write()
    finally:
        hook.remove()
    return len(counted)


def saved_pair(large: Path, small: Path | None, layers: int | None) -> tuple[Any, Any, Any]:
    """Return two saved models and the tokenizer that they share."""
    crossed = AutoConfig.from_pretrained(large).is_encoder_decoder
    loader = AutoModelForSeq2SeqLM if crossed else AutoModelForCausalLM
    model = loader.from_pretrained(large, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(large)
    if small is None:
        return model, self_draft(model, layers or 1), tokenizer
    draft = loader.from_pretrained(small, dtype=torch.float32).eval()
    if crossed and hasattr(draft.config, "num_decoder_layers"):
        # Assisted generation makes a cache for so many layers, and fails if the decoder has fewer.
        draft.config.num_layers = draft.config.num_decoder_layers
    BigLittle(model, draft, None, tokenizers=(tokenizer, AutoTokenizer.from_pretrained(small)))
    return model, draft, tokenizer


def random_sources(model: Any, n: int) -> list[Tensor]:
    torch.manual_seed(1)
    drawn = torch.randint(5, model.config.vocab_size, (n, 1, SOURCE))  # the same on all devices
    return list(drawn.to(model.device))


def run(device: str = "cpu", texts: int = TEXTS, tokens: int = TOKENS, repeats: int = 3) -> Any:
    results = []
    for name, build in {"T5": t5_pair, "Llama": llama_pair}.items():
        large, small = (model.to(device) for model in build())
        sources = random_sources(large, texts)
        results += measure(name, large, small, sources, tokens, repeats)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--large", type=Path, help="folder of a saved model")
    parser.add_argument("--small", type=Path, help="folder of a saved model")
    parser.add_argument("--self-draft", type=int, help="blocks of the large model, to draft with")
    parser.add_argument("--texts", type=Path, help="file with one text a line")
    parser.add_argument("--record", type=Path, help="sweep of the pair")
    parser.add_argument("--n", type=int, default=TEXTS, help="how many texts")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    arguments = parser.parse_args()
    use_clock(arguments.clock)
    numbers = (arguments.tokens, arguments.repeats)
    if arguments.large is None:
        show(TITLE, run(arguments.device, arguments.n, *numbers), Console())
        return
    if arguments.texts is None or (arguments.small is None) == (arguments.self_draft is None):
        parser.error("--large needs --texts, and either --small or --self-draft")
    large, small, tokenizer = saved_pair(arguments.large, arguments.small, arguments.self_draft)
    large, small = large.to(arguments.device), small.to(arguments.device)
    lines = arguments.texts.read_text(encoding="utf-8").splitlines()[: arguments.n]
    sources = [
        tokenizer(line, return_tensors="pt")["input_ids"].to(arguments.device) for line in lines
    ]
    rules = RULES | (certified(arguments.record) if arguments.record is not None else {})
    results = measure(arguments.large.name, large, small, sources, *numbers, rules)
    show(TITLE, results, Console())


if __name__ == "__main__":
    main()
