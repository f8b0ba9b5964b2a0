"""Speed of a transformers model with exits: BERT-base size, random weights, drawn exits.

Exits after layers 2, 4, 6, 8 and 10. Samples leave them in turn, so that half of the layers are
skipped on average. Confidences are drawn, but heads are run.
`python benchmarks/hugging_face.py --clock cpu --threads 1` suits a busy machine.
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import torch
from measure import CLOCKS, Result, best_times, show, use_clock
from rich.console import Console
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from swiftsure.certify.calibration import calibrate
from swiftsure.torch import EarlyExit, Scored, attach_heads, collect
from swiftsure.torch.heads import PooledHead

TITLE = "hugging_face: BERT-base size, exits after every second layer, half of the layers skipped"

AT = [f"bert.encoder.layer.{layer}" for layer in (1, 3, 5, 7, 9)]


class DrawnExit(nn.Module):
    """A linear head that lets the first `leaving` samples of a batch exit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = PooledHead(width, 2)
        self.leaving = 0

    def forward(self, hidden: Tensor) -> Scored:
        confidence = torch.zeros(len(hidden))
        confidence[: self.leaving] = 1.0
        return Scored(self.head(hidden), confidence)


def exits_of(n: int) -> list[list[int]]:
    """Return how many samples leave at each exit, in one batch of n or in several."""
    if n < len(AT):
        return [[n if k == exit_ else 0 for k in range(len(AT))] for exit_ in range(len(AT))]
    share, more = divmod(n, len(AT))
    return [[share + (k in (1, 3)[:more]) for k in range(len(AT))]]


def measure(n: int, tokens: int, rounds: int) -> list[Result]:
    torch.manual_seed(0)
    config = BertConfig(num_labels=2)
    network = BertForSequenceClassification(config).eval()
    batch = {
        "input_ids": torch.randint(1000, 30000, (n, tokens)),
        "attention_mask": torch.ones(n, tokens, dtype=torch.long),
    }
    heads = [DrawnExit(config.hidden_size) for _ in AT]
    model = attach_heads(network, AT, batch, heads=heads).eval()
    small = {name: value[:1, :8].repeat(20, 1) for name, value in batch.items()}
    record = collect(model, [small], losses=["brier"], scores=["model"])
    policy = calibrate(
        record, risk="consistency", loss="brier", epsilon=1.9, delta=0.5, path=[1.1, 0.5]
    )
    fast = EarlyExit(model, policy)

    def early() -> None:
        for counts in exits_of(n):
            for head, count in zip(heads, counts, strict=True):
                head.leaving = count
            fast(batch)

    def never() -> None:
        for head in heads:
            head.leaving = 0
        fast(batch)

    @torch.inference_mode()
    def full() -> None:
        network(**batch)

    with torch.inference_mode():
        before = [model.begin(batch)]
        for k in range(len(AT)):
            before.append(model.advance(k, before[-1]))

    @torch.inference_mode()
    def stage(k: int) -> None:
        model.advance(k, before[k])

    timed: dict[str, Callable[[], object]] = {
        "full": full,
        "again": full,
        "early": early,
        "never": never,
    }
    timed |= {f"stage {k}": lambda k=k: stage(k) for k in range(1, len(AT) + 1)}
    seconds = best_times(timed, rounds)
    schedules = np.asarray(exits_of(n))
    gone = schedules.cumsum(axis=1).mean(axis=0) / n  # share of samples that skip stage k + 1
    skipped = sum(gone[k] * seconds[f"stage {k + 1}"] for k in range(len(AT)))
    once = seconds["early"] / len(schedules)
    layers = 12 - 2 * float(gone.sum())
    where = f"batch {n}, {tokens} tokens: "
    return [
        Result(
            f"{where}time saved / time of what is skipped",
            (seconds["full"] - once) / skipped,
            at_least=0.9,
            note=f"{layers:.1f} of 12 layers; {1e3 * once:.0f} of {1e3 * seconds['full']:.0f} ms",
        ),
        Result(
            f"{where}overhead of never leaving",
            100 * (seconds["never"] / seconds["full"] - 1),
            "%",
            at_most=3,
            note="the full run against itself:"
            f" {100 * (seconds['again'] / seconds['full'] - 1):+.1f} %",
        ),
    ]


def run(batches: Sequence[int] = (1, 32), tokens: int = 128, rounds: int = 5) -> list[Result]:
    return [result for n in batches for result in measure(n, tokens, rounds * (4 if n == 1 else 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    use_clock(arguments.clock)
    show(TITLE, run(arguments.batch, arguments.tokens, arguments.rounds), Console())


if __name__ == "__main__":
    main()
