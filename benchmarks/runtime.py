"""Speed of the PyTorch runtime: overhead, saved time against skipped time, and the usual ways.

Ratios in one run: variants are interleaved and the best of many runs is taken. Run by itself:
`python benchmarks/runtime.py [--device cuda] [--batch 64] [--width 64]`.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from swiftsure.calibration import Risk, calibrate
from swiftsure.policy import Policy
from swiftsure.torch import EarlyExit, Staged, Stream, collect, exit_flops
from swiftsure.torch.costs import stage_seconds
from swiftsure.torch.staged import all_outputs

N_EXITS = 5


class Block(nn.Module):
    def __init__(self, width: int, stride: int = 1, inputs: int | None = None) -> None:
        super().__init__()
        inputs = inputs or width
        self.main = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = stride == 1 and inputs == width
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.main(x) + self.skip(x))


def residual_network(width: int, blocks: int, seed: int = 0) -> nn.Module:
    """A residual network for 32 x 32 images with five exits, of random weights."""
    torch.manual_seed(seed)
    stages: list[nn.Module] = []
    inputs = 3
    for k in range(N_EXITS):
        out = width * (1 if k < 2 else 2 if k < 4 else 4)
        stride = 2 if k in (2, 4) else 1
        layers = [Block(out, stride, inputs), *(Block(out) for _ in range(blocks - 1))]
        stages.append(nn.Sequential(*layers))
        inputs = out
    widths = [width, width, 2 * width, 2 * width, 4 * width]
    heads = [
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(w, 100)) for w in widths
    ]
    return Staged.from_sequential(stages, heads).eval()


def policy_at(model: nn.Module, images: Tensor, saving: float | None) -> Policy:
    """A policy whose threshold saves about this share of the FLOPs; None: nobody ever leaves."""
    batches = [
        (images[i : i + 64], torch.zeros(len(images[i : i + 64]), dtype=torch.long))
        for i in range(0, len(images), 64)
    ]
    record = collect(model, batches, losses=["zero_one"], progress=False)
    path = np.quantile(record.confidences["top1"], np.linspace(0.999, 0, 400))
    curve = record.curve("consistency", "zero_one", path=path)
    flops = curve.mean_cost("flops")
    index = int(np.argmin(np.abs(1 - flops / flops[0] - (saving or 0.0))))
    policy = calibrate(record, risks=[Risk("consistency", "zero_one", 0.5)], path=path)
    level = 1.0 if saving is None else float(curve.thresholds[index])
    return policy.model_copy(update={"threshold": level})


def best(
    variants: dict[str, Callable[[], object]], device: str, repeats: int = 15
) -> dict[str, float]:
    """Seconds of each variant: interleaved, best of many."""
    found = dict.fromkeys(variants, np.inf)
    for repeat in range(repeats + 2):
        for name, run in variants.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat >= 2:
                found[name] = min(found[name], time.perf_counter() - start)
    return found


@torch.inference_mode()
def run_all_select(model: nn.Module, policy: Policy, x: Tensor) -> Tensor:
    """What the paper's code does: compute every exit, select afterwards."""
    outputs = torch.stack(all_outputs(model, x), dim=1)
    confident = outputs[:, :-1].softmax(dim=2).amax(dim=2) >= policy.threshold
    last = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
    exits = torch.cat([confident, last], dim=1).int().argmax(dim=1)
    return outputs[torch.arange(len(x), device=x.device), exits]


@torch.inference_mode()
def exit_together(model: nn.Module, policy: Policy, x: Tensor) -> Tensor:
    """What CALM and its kin do with batches: leave when the whole batch agrees."""
    state = model.begin(x)
    for k in range(model.n_exits):
        state = model.advance(k, state)
        output = model.head(k, state)
        if k == model.n_exits - 1 or (output.softmax(dim=1).amax(dim=1) >= policy.threshold).all():
            return output
    raise AssertionError


def skipped_seconds(
    model: nn.Module, fast: EarlyExit, batches: list[Tensor], repeats: int
) -> float:
    """Seconds that the skipped stages take in the full run, weighted by who skips each."""
    stages = stage_seconds(model, batches[0], repeats)
    exits = torch.cat([fast(x).exits for x in batches])
    skipping = np.array([float((exits < k).float().mean()) for k in range(model.n_exits)])
    return float((stages * skipping).sum() * len(batches))


def measure(
    device: str, batch: int, width: int, blocks: int, repeats: int, n: int
) -> dict[str, float]:
    model = residual_network(width, blocks).to(device)
    torch.manual_seed(1)
    images = torch.randn(n, 3, 32, 32, device=device)
    # Images of unequal contrast give unequal confidences, as easy and hard samples do.
    images *= torch.rand(n, 1, 1, 1, device=device) * 2
    never = EarlyExit(model, policy_at(model, images, None))
    half = EarlyExit(model, policy_at(model, images, 0.5))
    batches = [images[i : i + batch] for i in range(0, n - batch + 1, batch)]

    def each(run: Callable[[Tensor], object]) -> Callable[[], object]:
        return lambda: [run(x) for x in batches]

    @torch.inference_mode()
    def plain(x: Tensor) -> object:
        return model(x)

    seconds = best(
        {
            "full, all heads": each(plain),
            "never exits": each(never),
            "early exit": each(half),
            "stream": lambda: list(Stream(half, batch).run(batches)),
            "compute all, select": each(lambda x: run_all_select(model, half.policy, x)),
            "leave together": each(lambda x: exit_together(model, half.policy, x)),
        },
        device,
        repeats,
    )
    exits = torch.cat([half(x).exits for x in batches]).cpu().numpy()
    flops = exit_flops(model, images[:1])
    skipped = skipped_seconds(model, half, batches, repeats)
    full = seconds["full, all heads"]
    latencies = []
    for x in batches:
        start = time.perf_counter()
        half(x)
        if device == "cuda":
            torch.cuda.synchronize()
        latencies.append(time.perf_counter() - start)
    p50, p99 = np.quantile(latencies, [0.5, 0.99])
    return {
        "overhead of never exiting": seconds["never exits"] / full - 1,
        "FLOPs saved": 1 - flops[exits].mean() / flops[-1],
        "time saved, early exit": 1 - seconds["early exit"] / full,
        "time saved, stream": 1 - seconds["stream"] / full,
        "saved / skipped, early exit": (full - seconds["early exit"]) / skipped,
        "saved / skipped, stream": (full - seconds["stream"]) / skipped,
        "early exit against compute all": seconds["compute all, select"] / seconds["early exit"],
        "early exit against leave together": seconds["leave together"] / seconds["early exit"],
        "p50 of a batch / full": p50 / (full / len(batches)),
        "p99 of a batch / full": p99 / (full / len(batches)),
        "images a second, full": len(batches) * batch / full,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = {}
    for batch in arguments.batch:
        n = max(arguments.n, batch)
        rows[batch] = measure(
            arguments.device, batch, arguments.width, arguments.blocks, arguments.repeats, n
        )
        print(f"{arguments.device}, batch {batch}, width {arguments.width}, {n} images")
        for name, value in rows[batch].items():
            print(f"  {name:36s} {value:10.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
