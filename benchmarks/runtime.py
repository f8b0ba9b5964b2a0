"""Speed of the PyTorch runtime: overhead, time saved of the time skipped, and common alternatives.

Ratios are of one run. Each variant is timed on each batch, in turn and in changing order, and its
best times are summed. On a GPU run
`python benchmarks/runtime.py --device cuda --batch 256 --width 192`.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from measure import Result, show
from rich.console import Console
from torch import Tensor, nn

from swiftsure.certify.calibration import calibrate
from swiftsure.certify.policy import Policy
from swiftsure.certify.promise import Promise
from swiftsure.torch import EarlyExit, Staged, Stream, collect, exit_flops
from swiftsure.torch.staged import all_outputs

TITLE = "runtime: a residual network with five exits, in full and with early exits"

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
    """Return a random residual network for 32 x 32 images with five exits."""
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
    """Return a policy that saves about this share of the FLOPs; None: no sample exits early."""
    batches = [
        (images[i : i + 64], torch.zeros(len(images[i : i + 64]), dtype=torch.long))
        for i in range(0, len(images), 64)
    ]
    record = collect(model, batches, losses=["zero_one"])
    path = np.quantile(record.confidences["top1"], np.linspace(0.999, 0, 400))
    curve = record.curve("consistency", "zero_one", path=path)
    flops = curve.mean_cost("flops")
    index = int(np.argmin(np.abs(1 - flops / flops[0] - (saving or 0.0))))
    policy = calibrate(record, Promise("zero_one", risk="consistency", epsilon=0.5), path=path)
    threshold = 1.0 if saving is None else float(curve.thresholds[index])
    return policy.model_copy(update={"threshold": threshold})


def best(
    variants: dict[str, Sequence[Callable[[], object]]], device: str, repeats: int
) -> dict[str, float]:
    """Return the seconds of each variant: the sum of its parts' best times."""
    parts = [(name, k) for name, calls in variants.items() for k in range(len(calls))]
    found = dict.fromkeys(parts, np.inf)
    shuffle = random.Random(0).shuffle
    for repeat in range(repeats + 2):  # the first two warm up
        shuffle(parts)
        for name, k in parts:
            _wait(device)
            start = time.perf_counter()
            variants[name][k]()
            _wait(device)
            if repeat >= 2:
                found[name, k] = min(found[name, k], time.perf_counter() - start)
    return {
        name: sum(found[name, k] for k in range(len(calls))) for name, calls in variants.items()
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def run_all_select(model: nn.Module, policy: Policy, x: Tensor) -> Tensor:
    """Compute every exit and select afterwards, as the paper's code does."""
    outputs = torch.stack(all_outputs(model, x), dim=1)
    confident = outputs[:, :-1].softmax(dim=2).amax(dim=2) >= policy.threshold
    last = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
    exits = torch.cat([confident, last], dim=1).int().argmax(dim=1)
    return outputs[torch.arange(len(x), device=x.device), exits]


@torch.inference_mode()
def exit_together(model: nn.Module, policy: Policy, x: Tensor) -> Tensor:
    """Exit when the whole batch is confident, as batched CALM does."""
    state = model.begin(x)
    for k in range(model.n_exits):
        state = model.advance(k, state)
        output = model.head(k, state)
        if k == model.n_exits - 1 or (output.softmax(dim=1).amax(dim=1) >= policy.threshold).all():
            return output
    raise AssertionError


@torch.inference_mode()
def states_before(model: nn.Module, x: Tensor) -> list[object]:
    """Return the state before each stage, in the full run."""
    states = [model.begin(x)]
    for k in range(model.n_exits - 1):
        states.append(model.advance(k, states[-1]))
    return states


def measure(device: str, batch: int, width: int, repeats: int, n: int) -> list[Result]:
    model = residual_network(width, blocks=2).to(device)
    torch.manual_seed(1)
    images = torch.randn(n, 3, 32, 32, device=device)
    # Images of unequal contrast give unequal confidences, as easy and hard samples do.
    images *= torch.rand(n, 1, 1, 1, device=device) * 2
    never = EarlyExit(model, policy_at(model, images, None))
    half = EarlyExit(model, policy_at(model, images, 0.5))
    batches = [images[i : i + batch] for i in range(0, n - batch + 1, batch)]

    def each(run: Callable[[Tensor], object]) -> list[Callable[[], object]]:
        return [lambda x=x: run(x) for x in batches]

    @torch.inference_mode()
    def plain(x: Tensor) -> object:
        return model(x)

    @torch.inference_mode()
    def stage(k: int, state: object) -> object:
        return model.head(k, model.advance(k, state))

    before = states_before(model, batches[0])
    seconds = best(
        {
            "full": each(plain),
            "full, once more": each(plain),
            "never exits": each(never),
            "early exit": each(half),
            "compute all, select": each(lambda x: run_all_select(model, half.policy, x)),
            "leave together": each(lambda x: exit_together(model, half.policy, x)),
            "stream": [lambda: list(Stream(half, batch).run(batches))],
            **{f"stage {k}": [lambda k=k: stage(k, before[k])] for k in range(N_EXITS)},
        },
        device,
        repeats,
    )
    exits = torch.cat([half(x).exits for x in batches]).cpu().numpy()
    flops = exit_flops(model, images[:1])
    # What the skipped stages take in the full run, weighted by who skips each.
    stages = np.asarray([seconds[f"stage {k}"] for k in range(N_EXITS)])
    skipping = np.asarray([(exits < k).mean() for k in range(N_EXITS)])
    skipped = float(stages @ skipping) * len(batches)
    full, again, early = (seconds[k] for k in ("full", "full, once more", "early exit"))
    latencies = latency(half, batches, device)
    where = f"{device}, batch {batch}: "
    gpu = device == "cuda"
    target = 0.9
    return [
        Result(
            f"{where}overhead of never exiting",
            100 * (seconds["never exits"] / full - 1),
            "%",
            at_most=3 if batch > 1 else None,
            note=f"the full run against itself: {100 * (again / full - 1):+.1f} %",
        ),
        Result(
            f"{where}time saved / time of what is skipped",
            (full - early) / skipped,
            at_least=None if gpu else target,
            note=f"saves {100 * (1 - flops[exits].mean() / flops[-1]):.0f} % of FLOPs and"
            f" {100 * (1 - early / full):.0f} % of {1000 * full / len(batches):.3g} ms",
        ),
        Result(
            f"{where}the same with the stream",
            (full - seconds["stream"]) / skipped,
            at_least=target if gpu else None,
            note="what `run` takes on a GPU" if gpu else "`run` does not take it on a CPU",
        ),
        Result(
            f"{where}against computing all, then selecting", seconds["compute all, select"] / early
        ),
        Result(
            f"{where}against leaving only together",
            seconds["leave together"] / early,
            note="the same thing, for single samples" if batch == 1 else "",
        ),
        Result(
            f"{where}a batch's p99 / p50",
            float(np.quantile(latencies, 0.99) / np.quantile(latencies, 0.5)),
            note=f"p50 {np.quantile(latencies, 0.5) * len(batches) / full:.2f}, p99"
            f" {np.quantile(latencies, 0.99) * len(batches) / full:.2f} of the full run's batch",
        ),
    ]


def latency(fast: EarlyExit, batches: list[Tensor], device: str) -> list[float]:
    """Return the best of five times of each batch."""
    found = np.full(len(batches), np.inf)
    for _ in range(5):
        for k, x in enumerate(batches):
            _wait(device)
            start = time.perf_counter()
            fast(x)
            _wait(device)
            found[k] = min(found[k], time.perf_counter() - start)
    return found.tolist()


def collecting(device: str, batch: int, width: int, repeats: int) -> Result:
    """Measure `collect` against the plain forward pass of the same batches."""
    model = residual_network(width, blocks=2).to(device)
    n_batches = 12 if device == "cpu" else 100  # FLOPs are counted once
    images = torch.randn(batch * n_batches, 3, 32, 32, device=device)
    labels = torch.zeros(batch, dtype=torch.long)  # on the CPU, as loaders give them
    pairs = [(x, labels) for x in images.split(batch)]

    @torch.inference_mode()
    def bare() -> None:
        for x, _ in pairs:
            model(x)

    seconds = best(
        {"bare": [bare], "collect": [lambda: collect(model, pairs)]},
        device,
        repeats,
    )
    return Result(
        f"{device}, batch {batch}: `collect` over the bare forward pass",
        100 * (seconds["collect"] / seconds["bare"] - 1),
        "%",
        at_most=5,
        note=f"{len(pairs)} batches, FLOPs counted too",
    )


def run(
    device: str = "cpu", batches: Sequence[int] = (1, 64), width: int = 32, repeats: int = 25
) -> list[Result]:
    results = []
    for batch in batches:
        n = 4 * batch if batch > 1 else 48
        results += measure(device, batch, width, repeats, n if device == "cpu" else 32 * batch)
    results.append(collecting(device, max(batches), width, 15))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=25)
    arguments = parser.parse_args()
    found = run(arguments.device, arguments.batch, arguments.width, arguments.repeats)
    show(TITLE, found, Console())


if __name__ == "__main__":
    main()
