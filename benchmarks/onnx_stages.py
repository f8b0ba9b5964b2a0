"""Exported stages in ONNX Runtime against PyTorch and against the full network in ONNX Runtime.

`python benchmarks/onnx_stages.py [--threads 2] [--seconds 4]`. The ways take turns, and each ratio
is one of best times: processor time with one thread, else wall time. MSDNet is the trained one. The
transformer is the DViT of `experiments/image_classification` with random weights, and thresholds
that give the exit shares that its certified policy has on its record.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import CLOCKS, Result, show
from rich.console import Console
from torch import Tensor, nn

from swiftsure import ExitRecord, Policy, assets, calibrate, onnx
from swiftsure.onnx.exporting import _explained
from swiftsure.onnx.graphs import write_graph
from swiftsure.onnx.stages import _session_options
from swiftsure.torch import EarlyExit, Staged, collect, models

TITLE = "onnx: exported stages (gap at most 0.01, δ = 0.1), in images a second"
EPSILON, N_CALIBRATION = 0.01, 2000
RECIPE = Path(__file__).parent.parent / "experiments/image_classification/results"


def policy_of(record: ExitRecord) -> Policy:
    rows = np.random.default_rng(0).permutation(record.n)[:N_CALIBRATION]
    return calibrate(record.take(rows), loss="zero_one", epsilon=EPSILON)


def msdnet() -> tuple[Staged, Policy, Tensor]:
    x = models.prepared(assets.sample_images().images[:512])
    return models.embedded_msdnet(), policy_of(assets.calibration_record()), x


def dvit() -> tuple[Staged, Policy, Tensor]:
    recipe = json.loads((RECIPE / "dvit_tiny_imagenet_100.json").read_text())["recipe"]
    options = {key: value for key, value in recipe["model"].items() if key != "name"}
    torch.manual_seed(0)
    model = models.DViT(**options).eval()
    with torch.no_grad():  # larger logits, so that confidences differ
        for name, parameter in model.named_parameters():
            if name.endswith("head.weight"):
                parameter.mul_(50.0)
    side = options.get("image_size", 64)
    x = torch.randn(256, 3, side, side)
    record = ExitRecord.load(assets.IMAGE_CLASSIFICATION / "dvit_tiny_imagenet_100.parquet")
    certified = policy_of(record)
    shares = np.asarray(certified.certificate.exit_shares)
    with torch.no_grad():
        seen = collect(model, x.split(64), losses=["zero_one"]).confidences["top1"]
    left, levels = np.arange(len(x)), []
    for k, share in enumerate(shares[:-1]):
        n = round(float(share) * len(x))
        order = left[np.argsort(-seen[left, k])]
        levels.append(float(seen[order[n - 1], k]) if n else None)
        left = order[n:]
    certificate = certified.certificate.model_copy(update={"model": None})
    fields = {"threshold": tuple(levels), "certificate": certificate}
    return model, certified.model_copy(update=fields), x


class Full(nn.Module):
    def __init__(self, model: Staged) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        model = self.model
        state = model.begin(inputs[0])
        for k in range(model.n_exits):
            state = model.advance(k, state)
        return model.head(model.n_exits - 1, state)


class Exported:
    """A network as exported stages, and whole as one ONNX file."""

    def __init__(self, model: Staged, policy: Policy, x: Tensor, threads: int) -> None:
        import onnxruntime as ort

        torch.set_num_threads(threads)
        self.model, self.policy, self.x, self.threads = model, policy, x, threads
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            onnx.export(model, policy, folder / "stages", example=x[:32], threads=threads)
            with torch.no_grad(), _explained("The full network"):
                write_graph(Full(model), [x[:2]], folder / "full.onnx")
            self.session = ort.InferenceSession(folder / "full.onnx", _session_options(threads))
            self.fast = onnx.EarlyExit.load(folder / "stages")


def measure(name: str, made: Exported, batch: int, seconds: float) -> list[Result]:
    model, x, threads, session = made.model, made.x, made.threads, made.session
    clock = CLOCKS["cpu" if threads == 1 else "wall"]  # the machine may be busy otherwise
    torch_fast, fast, stages = EarlyExit(model, made.policy), made.fast, made.fast.stages
    torch_full = torch.inference_mode()(Full(model))
    arrays = x.numpy()
    exits = fast(arrays).exits

    parts = [slice(k, k + batch) for k in range(0, len(x) - batch + 1, batch)][:64]
    stage_times = np.full((len(parts), model.n_exits), np.inf)
    head_times = np.full((len(parts), model.n_exits), np.inf)

    def stages_and_heads(rows: slice) -> None:
        state, start = stages.begin(arrays[rows]), clock()
        for k in range(model.n_exits):
            place = rows.start // batch, k
            state = stages.advance(k, state)
            middle = clock()
            stages.head(k, state)
            end = clock()
            stage_times[place] = min(stage_times[place], middle - start)
            head_times[place] = min(head_times[place], end - middle)
            start = end

    ways: dict[str, Callable[[slice], object]] = {
        "torch full": lambda rows: torch_full(x[rows]),
        "torch early": lambda rows: torch_fast(x[rows]),
        "onnx full": lambda rows: session.run(None, {"state_0": arrays[rows]}),
        "onnx all exits": stages_and_heads,
        "onnx early": lambda rows: fast(arrays[rows]),
    }
    best = {way: np.full(len(parts), np.inf) for way in ways}
    until, rounds = time.perf_counter() + seconds * len(ways), 0
    while time.perf_counter() < until or rounds < 3:
        rounds += 1
        for number, rows in enumerate(parts):
            for way, run in ways.items():
                start = clock()
                run(rows)
                best[way][number] = min(best[way][number], clock() - start)
    n = batch * len(parts)
    total = {way: float(each.sum()) for way, each in best.items()}
    # What the skipped stages take in whole batches, weighted with the samples that skip them. Heads
    # before a sample's exit must run, so the most that can be saved is less by their time.
    ran = exits[:n]
    skips = (ran.reshape(-1, batch)[:, :, None] < np.arange(model.n_exits)).mean(axis=1)
    full = float(stage_times.sum() + head_times[:, -1].sum())
    skipped = float((stage_times * skips).sum() + (head_times * skips)[:, -1].sum())
    early_heads = float((head_times * (1 - skips))[:, :-1].sum())
    saved = full - total["onnx early"]
    note = ", ".join(f"{way} {n / each:,.0f}" for way, each in total.items())
    where = f"{name}, batch {batch}, {threads} thread{'s' * (threads > 1)}: "
    to_torch = total["torch early"] / total["onnx early"]
    to_full = total["onnx full"] / total["onnx early"]
    return [
        Result(f"{where}against EarlyExit in PyTorch", to_torch,
               at_least=2 if batch == 1 else None, note=f"{rounds} rounds; {note}"),
        Result(f"{where}against the full network in ONNX", to_full,
               at_least=2.2 if batch > 1 else None,
               note=f"exits {np.bincount(ran, minlength=model.n_exits).tolist()}"),
        Result(f"{where}time saved / time of skipped stages", saved / skipped, "", at_least=0.9,
               note=f"{saved / (skipped - early_heads):.2f} less the heads that must run"),
    ]  # fmt: skip


def run(seconds: float = 4.0, threads: int = 2, batches: tuple[int, ...] = (1, 64)) -> list[Result]:
    found = []
    for name, make in {"MSDNet": msdnet, "DViT": dvit}.items():
        made = Exported(*make(), threads)
        for batch in batches:
            found += measure(name, made, batch, seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="per way and batch size")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    show(TITLE, run(arguments.seconds, arguments.threads), Console())


if __name__ == "__main__":
    main()
