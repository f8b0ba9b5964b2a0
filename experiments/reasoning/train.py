"""Train a small reasoner to run little programs, and to answer when it is asked on the way.

    nice -n 10 python -m experiments.reasoning.train --minutes 35 --folder runs/reasoner

One core; 0.45 M parameters. Half of the sequences are cut at a random place of their thinking and
continued with the answer, so that answers on the way are as calibrated as the last. The weights in
the zoo took 550 seconds of one busy core in three runs: 1,550 steps at 0.003 with another word
before the answer, and from there `--resume` for 650 steps at 0.002 and 325 at 0.001.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from swiftsure_zoo import programs
from swiftsure_zoo.programs import CHECK, END, NUMBER, STOP, WORDS, tokens_of

IGNORED = -100
TOKENS = 4000
"""Of a batch."""


def network() -> LlamaForCausalLM:
    """Return the reasoner, untrained."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=NUMBER[STOP],
        eos_token_id=NUMBER[STOP],
        pad_token_id=NUMBER["<pad>"],
    )
    return LlamaForCausalLM(config)


def sequence(source: random.Random, longest: int) -> tuple[list[int], list[int]]:
    """Return the tokens of an example and its targets, one place on."""
    found = programs.example(source, longest, uniform=source.random() < 0.5)
    thinking, ignored = list(found.thinking), set()
    if source.random() < 0.1 and len(thinking) > 6:  # a slip, then the third run decides
        thinking, ignored = _with_slip(found, source)
    start = len(found.program)
    if source.random() < 0.5:
        cut = source.randrange(1, len(thinking) + 1)
        ignored = {k for k in ignored if k < cut} | ({cut} if cut < len(thinking) else set())
        thinking = thinking[:cut]
    words = [*found.program, *thinking, END, found.answer, STOP]
    tokens = tokens_of(words)
    targets = [
        IGNORED if k <= start or k - start in ignored else token for k, token in enumerate(tokens)
    ]
    return tokens[:-1], targets[1:]


def _with_slip(found: programs.Example, source: random.Random) -> tuple[list[str], set[int]]:
    """Return thinking with a wrong result in its first run, and the places not to be learned."""
    steps = [
        (found.program[k + 1], int(found.program[k + 2])) for k in range(0, len(found.program), 3)
    ]
    at = source.randrange(len(steps))
    worked, right = programs.run(steps)
    wrong = int(worked[4 * at + 3]) + source.randrange(1, 10)
    rest, answer = programs.run([("=", wrong % 10), *steps[at + 1 :]])
    slipped = [*worked[: 4 * at + 3], str(wrong % 10)]
    for k in range(at + 1, len(steps)):
        slipped += [*worked[4 * k : 4 * k + 3], rest[4 * (k - at) + 3]]
    again = [CHECK, *worked] if answer != right else []
    return [programs.THINK, *slipped, CHECK, *worked, *again], {4 * at + 4}


def batches(seed: int, progress):
    """Yield batches of sequences of similar lengths; programs grow longer with `progress()`."""
    source = random.Random(seed)
    while True:
        done = progress()
        longest = (
            6 if done < 0.05 else 12 if done < 0.12 else 24 if done < 0.25 else programs.LONGEST
        )
        pool = sorted(
            (sequence(source, longest) for _ in range(400)), key=lambda each: len(each[0])
        )
        parts, width = [[]], 0
        for each in pool:
            width = max(width, len(each[0]))
            if width * (len(parts[-1]) + 1) > TOKENS:
                parts.append([])
                width = len(each[0])
            parts[-1].append(each)
        source.shuffle(parts)
        for part in parts:
            longest_row = max(len(tokens) for tokens, _ in part)
            yield (
                torch.tensor([t + [0] * (longest_row - len(t)) for t, _ in part]),
                torch.tensor([y + [IGNORED] * (longest_row - len(y)) for _, y in part]),
            )


def main() -> None:
    """Train for a given time and keep the weights every few minutes."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=35)
    options.add_argument("--folder", type=Path, default=Path("runs/reasoner"))
    options.add_argument("--rate", type=float, default=3e-3)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--resume", action="store_true", help="go on from the weights in the folder"
    )
    asked = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    model = network()
    if asked.resume:
        model = LlamaForCausalLM.from_pretrained(asked.folder)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "layers" not in n]
    optimizers = [
        torch.optim.Muon(
            matrices, lr=asked.rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=asked.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    start = saved = time.monotonic()

    def done() -> float:
        """Return the share of the time that has passed: on the CPU, or of twice it in all."""
        return max(time.process_time(), (time.monotonic() - start) / 2) / (60 * asked.minutes)

    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    sums = [0.0, 0.0, 0.0]
    source = batches(asked.seed + 1, lambda: 1.0 if asked.resume else done())
    for step, (tokens, targets) in enumerate(source, start=1):
        if (passed := done()) >= 1:
            break
        rate = asked.rate * min(1.0, step / 50, (1 - passed) / 0.4 + 0.01)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        sums[0] += loss.item()
        asked_now = tokens == NUMBER[END]
        sums[1] += (logits.argmax(-1) == targets)[asked_now].sum().item()
        sums[2] += asked_now.sum().item()
        if step % 25 == 0:
            seconds = time.monotonic() - start
            right = sums[1] / sums[2]
            times = f"{seconds:5.0f} s, CPU {time.process_time():5.0f} s"
            print(
                f"{times}  step {step:5}  loss {sums[0] / 25:.4f}  answers {right:.3f}", flush=True
            )
            sums = [0.0, 0.0, 0.0]
        if time.monotonic() - saved > 120:
            model.save_pretrained(asked.folder)
            saved = time.monotonic()
    model.save_pretrained(asked.folder)
    programs.tokenizer().save_pretrained(asked.folder)


if __name__ == "__main__":
    main()
