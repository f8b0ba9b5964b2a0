"""Exported stages in ONNX Runtime against PyTorch and against the full network in ONNX Runtime.

`python benchmarks/onnx_stages.py [--threads 2] [--seconds 4]`. The ways take turns, and each ratio
is one of best times. MSDNet is the trained one. The transformer is the DViT of
`experiments/image_classification` with random weights, and thresholds that give the exit shares
that its certified policy has on its record.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Result, show
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
    with torch.no_grad():  # larger weights, so that confidences differ
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
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


def measure(
    name: str, model: Staged, policy: Policy, x: Tensor, batch: int, seconds: float, threads: int
) -> list[Result]:
    import onnxruntime as ort

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        onnx.export(model, policy, folder / "stages", example=x[:32], threads=threads)
        with torch.no_grad(), _explained("The full network"):
            write_graph(Full(model), [x[:2]], folder / "full.onnx")
        session = ort.InferenceSession(folder / "full.onnx", _session_options(threads))
        fast = onnx.EarlyExit.load(folder / "stages")
    torch_fast, stages = EarlyExit(model, policy), fast.stages
    torch_full = torch.inference_mode()(Full(model))
    arrays = x.numpy()
    exits = fast(arrays).exits

    def stages_alone(part: Any) -> None:
        state, start = stages.begin(part), time.perf_counter()
        for k in range(model.n_exits):
            state = stages.advance(k, state)
            if k == model.n_exits - 1:
                stages.head(k, state)
            now = time.perf_counter()
            best_stage[k] = min(best_stage[k], now - start)
            start = now

    best_stage = np.full(model.n_exits, np.inf)
    ways: dict[str, Callable[[slice], object]] = {
        "torch full": lambda rows: torch_full(x[rows]),
        "torch early": lambda rows: torch_fast(x[rows]),
        "onnx full": lambda rows: session.run(None, {"state_0": arrays[rows]}),
        "onnx stages": lambda rows: stages_alone(arrays[rows]),
        "onnx early": lambda rows: fast(arrays[rows]),
    }
    parts = [slice(k, k + batch) for k in range(0, len(x) - batch + 1, batch)][:64]
    best = {way: np.full(len(parts), np.inf) for way in ways}
    until, rounds = time.perf_counter() + seconds * len(ways), 0
    while time.perf_counter() < until or rounds < 3:
        rounds += 1
        for number, rows in enumerate(parts):
            for way, run in ways.items():
                start = time.perf_counter()
                run(rows)
                best[way][number] = min(best[way][number], time.perf_counter() - start)
    n = batch * len(parts)
    total = {way: float(each.sum()) for way, each in best.items()}
    # What the skipped stages would have taken, at the time per sample of whole batches.
    ran = exits[:n]
    skipped = sum(best_stage[k] / batch * (ran < k).sum() for k in range(model.n_exits))
    share = (total["onnx full"] - total["onnx early"]) / skipped
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
        Result(f"{where}of the skipped stages' time saved", share, "", at_least=0.9),
    ]  # fmt: skip


def run(seconds: float = 4.0, threads: int = 2, batches: tuple[int, ...] = (1, 64)) -> list[Result]:
    found = []
    for name, make in {"MSDNet": msdnet, "DViT": dvit}.items():
        model, policy, x = make()
        for batch in batches:
            found += measure(name, model, policy, x, batch, seconds, threads)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="per way and batch size")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    show(TITLE, run(arguments.seconds, arguments.threads), Console())


if __name__ == "__main__":
    main()
