"""Costs of early exits beside the network's own: one sample, a small network, six exits, one core.

`OMP_NUM_THREADS=1 python benchmarks/decisions.py`. Differences of best times: a call of `EarlyExit`
less what its stages and heads take when they are called by themselves. The network has 70 modules,
with 48 parameters and 36 buffers, whose state is checked before every call.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from measure import Result, best_times, show
from rich.console import Console
from torch import nn

import swiftsure as ss
from swiftsure import onnx
from swiftsure.onnx.stages import _session_options
from swiftsure.torch import EarlyExit, Staged

TITLE = "decisions: what an early exit costs beside stages and heads, for one sample"
N_EXITS, WIDTH, ROUNDS = 6, 8, 150


def network() -> Staged:
    torch.manual_seed(0)
    stages = []
    for k in range(N_EXITS):
        layers: list[nn.Module] = []
        for inputs in (3 if k == 0 else WIDTH, WIDTH):
            layers += [nn.Conv2d(inputs, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()]
        stages.append(nn.Sequential(*layers))
    heads = [
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))
        for _ in range(N_EXITS)
    ]
    return Staged.from_sequential(stages, heads).eval()


def stages_alone(model: Staged, x: torch.Tensor, n_exits: int) -> Callable[[], Any]:
    @torch.inference_mode()
    def run() -> Any:
        state = model.begin(x)
        for k in range(n_exits):
            state = model.advance(k, state)
            output = model.head(k, state)
        return output

    return run


def sessions_alone(folder: Path, x: np.ndarray, n_exits: int) -> Callable[[], None]:
    """Return the runs of the sessions of the first exits, with inputs that are ready."""
    stages = onnx.Stages.load(folder, threads=1)
    state, runs = stages.begin(x), []
    for k, part in enumerate(stages.manifest.parts[:n_exits]):
        for name in (part.stage, part.head):
            if name is None:
                continue
            session = ort.InferenceSession(folder / name, _session_options(1))
            inputs = {
                each.name: state[int(each.name.rpartition("_")[2])] for each in session.get_inputs()
            }
            runs.append((session, inputs))
            state = stages.advance(k, state) if name == part.stage else state

    def run() -> None:
        for session, inputs in runs:
            session.run(None, inputs)

    return run


def measured(name: str, first: list[Any], every: list[Any], at_most: tuple[float, float]) -> Any:
    """Return the cost of a call, and of each further exit, from runs of one exit and of all."""
    calls = {"first": first[0], "first alone": first[1], "all": every[0], "all alone": every[1]}
    best = {key: 1e6 * seconds for key, seconds in best_times(calls, ROUNDS).items()}
    one, many = best["first"] - best["first alone"], best["all"] - best["all alone"]
    # The last exit decides nothing: five of six do.
    each = (many - one) / (N_EXITS - 2)
    return [
        Result(f"{name}: a call that takes the first exit", one, "µs", at_most=sum(at_most)),
        Result(f"{name}: each further exit", each, "µs", at_most=at_most[1]),
    ]


def main() -> None:
    torch.set_num_threads(1)
    model, x = network(), torch.randn(1, 3, 16, 16)
    drawn = np.random.default_rng(0)
    record = ss.ExitRecord.from_logits(
        drawn.normal(size=(400, N_EXITS, 10)), drawn.integers(0, 10, 400)
    )
    found = ss.calibrate(record, loss="zero_one", epsilon=0.5)
    policies = [found.model_copy(update={"threshold": level}) for level in (0.0, 1.0)]
    fast = [EarlyExit(model, policy) for policy in policies]
    alone = [stages_alone(model, x, n) for n in (1, N_EXITS)]
    pairs = [[lambda run=run: run(x), own] for run, own in zip(fast, alone, strict=True)]
    results = measured("PyTorch", *pairs, at_most=(80, 20))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "exported"
        onnx.export(model, None, folder, example=torch.randn(4, 3, 16, 16))
        rows = x.numpy()
        stages = onnx.Stages.load(folder, threads=1)
        exported = [onnx.EarlyExit(stages, policy) for policy in policies]
        alone = [sessions_alone(folder, rows, n) for n in (1, N_EXITS)]
        pairs = [[lambda run=run: run(rows), own] for run, own in zip(exported, alone, strict=True)]
        results += measured("ONNX", *pairs, at_most=(25, 25))
    show(TITLE, results, Console())


if __name__ == "__main__":
    main()
