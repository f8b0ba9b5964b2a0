"""Exported stages in ONNX Runtime against PyTorch and against the full network in ONNX Runtime.

`python benchmarks/onnx_stages.py [--threads 2] [--seconds 4] [--networks DViT ...]`. The variants
take turns, each over all batches. Ratios compare sums of the best time of each batch: processor
time with one thread, else wall time. All policies promise a gap of at most ε with δ = 0.1.

| network | weights, inputs and policy |
|---|---|
| MSDNet | of `experiments/image_classification`, trained on CIFAR-10; other images (*) |
| DViT | of `experiments/image_classification`; random weights and images (*) |
| small MSDNet | of the zoo, trained on Fashion-MNIST; its images and its policy |
| MiniLM-64 | of `experiments/intents`, trained; its policy; questions padded to 64 tokens |
| MiniLM-16 | the same on questions of at most 16 tokens, padded to 16 |

(*) Thresholds give the exit shares that the certified policy has on the network's record.

MiniLM needs `--encoder FOLDER --questions FOLDER`, as `experiments/intents` does, and
`PYTHONPATH=.`.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import CLOCKS, Result, show
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import swiftsure_zoo as zoo
from swiftsure import ExitRecord, Policy, calibrate, onnx
from swiftsure.onnx.exporting import _explained
from swiftsure.onnx.graphs import write_graph
from swiftsure.onnx.stages import _session_options
from swiftsure.torch import EarlyExit, Staged, collect

TITLE = "onnx: exported stages, in samples a second"
EPSILON, N_CALIBRATION = 0.01, 2000
RESULTS = Path(__file__).parent.parent / "experiments/image_classification/results"


def policy_of(record: ExitRecord, epsilon: float) -> Policy:
    rows = np.random.default_rng(0).permutation(record.n)[:N_CALIBRATION]
    return calibrate(record.take(rows), loss="zero_one", epsilon=epsilon)


def with_shares(model: Staged, name: str, x: Tensor, epsilon: float) -> Policy:
    """Return a policy that has the exit shares of a record's policy on other images."""
    certified = policy_of(
        ExitRecord.load(zoo.records.IMAGE_CLASSIFICATION / f"{name}.parquet"), epsilon
    )
    shares = np.asarray(certified.certificate.costs.exit_shares)
    with torch.no_grad():
        seen = collect(model, x.split(64), losses=["zero_one"]).confidences["top1"]
    left, levels = np.arange(len(x)), []
    for k, share in enumerate(shares[:-1]):
        n = round(float(share) * len(x))
        order = left[np.argsort(-seen[left, k])]
        levels.append(float(seen[order[n - 1], k]) if n else None)
        left = order[n:]
    provenance = certified.certificate.provenance.model_copy(update={"model": None})
    certificate = certified.certificate.model_copy(update={"provenance": provenance})
    return certified.model_copy(update={"threshold": tuple(levels), "certificate": certificate})


def recipe_of(name: str) -> dict[str, Any]:
    model = json.loads((RESULTS / f"{name}.json").read_text())["recipe"]["model"]
    return {key: value for key, value in model.items() if key != "name"}


def msdnet(epsilon: float) -> tuple[Staged, Policy, Tensor]:
    model = zoo.MSDNet(**recipe_of("msdnet_cifar10")).eval()
    model.load_state_dict(load_file(RESULTS / "msdnet_cifar10.safetensors"))
    x = nn.functional.pad(zoo.prepared(zoo.records.sample_images().images[:256]), (2, 2, 2, 2))
    return model, with_shares(model, "msdnet_cifar10", x, epsilon), x


def small_msdnet(epsilon: float) -> tuple[Staged, Policy, Tensor]:
    x = zoo.prepared(zoo.records.sample_images().images[:256])
    return zoo.msdnet_fashion_mnist(), policy_of(zoo.records.calibration_record(), epsilon), x


def dvit(epsilon: float) -> tuple[Staged, Policy, Tensor]:
    options = recipe_of("dvit_tiny_imagenet_100")
    torch.manual_seed(0)
    model = zoo.DViT(**options).eval()
    with torch.no_grad():  # larger logits, so that confidences differ
        for name, parameter in model.named_parameters():
            if name.endswith("head.weight"):
                parameter.mul_(50.0)
    side = options.get("image_size", 64)
    x = torch.randn(256, 3, side, side)
    return model, with_shares(model, "dvit_tiny_imagenet_100", x, epsilon), x


def minilm(
    encoder: Path, questions: Path, length: int, epsilon: float
) -> tuple[Staged, Policy, dict[str, Tensor]]:
    from experiments.intents.data import banking77
    from experiments.intents.network import load
    from experiments.intents.records import HERE, halves, shuffled

    file = HERE / "results/minilm_banking77.safetensors"
    recipe = json.loads(file.with_suffix(".json").read_text())["recipe"]
    n_classes = len(json.loads((questions / "categories.json").read_text()))
    model, tokenizer = load(encoder, file, recipe, n_classes)
    calibration, rest = halves(ExitRecord.load(file.with_suffix(".parquet")))
    policy = calibrate(calibration, loss="zero_one", epsilon=epsilon)
    texts = shuffled(banking77(questions, "test")).texts
    fitting = [
        text
        for text in (texts[int(k)] for k in rest.ids)
        if length == recipe["data"]["length"] or len(tokenizer(text)["input_ids"]) <= length
    ]
    padding = {"padding": "max_length", "truncation": True, "max_length": length}
    batch = tokenizer(fitting[:256], **padding, return_tensors="pt")
    return model, policy, {name: batch[name] for name in ("input_ids", "attention_mask")}


def rows_of(tree: Any, rows: slice) -> Any:
    return pytree.tree_map(lambda leaf: leaf[rows], tree)


Make = Callable[[float], tuple[Staged, Policy, Any]]
NETWORKS: dict[str, Make] = {"MSDNet": msdnet, "DViT": dvit, "small MSDNet": small_msdnet}
LENGTHS = (16, 64)


class Full(nn.Module):
    """The full network, from the tensors of a batch to the last exit's logits."""

    def __init__(self, model: Staged, example: Any) -> None:
        super().__init__()
        self.model = model
        self.structure = pytree.tree_structure(example)

    def forward(self, *inputs: Tensor) -> Tensor:
        model = self.model
        state = model.begin(pytree.tree_unflatten(inputs, self.structure))
        for k in range(model.n_exits):
            state = model.advance(k, state)
        return model.head(model.n_exits - 1, state)


class Exported:
    """A network as exported stages, and whole as one ONNX file."""

    def __init__(self, model: Staged, policy: Policy, x: Any, threads: int) -> None:
        import onnxruntime as ort

        torch.set_num_threads(threads)
        self.model, self.policy, self.x, self.threads = model, policy, x, threads
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            example, traced = rows_of(x, slice(32)), rows_of(x, slice(2))
            onnx.export(model, policy, folder / "stages", example=example, threads=threads)
            with torch.no_grad(), _explained("The full network"):
                write_graph(Full(model, x), pytree.tree_leaves(traced), folder / "full.onnx")
            self.session = ort.InferenceSession(folder / "full.onnx", _session_options(threads))
            self.fast = onnx.EarlyExit.load(folder / "stages")


def measure(name: str, made: Exported, batch: int, seconds: float) -> list[Result]:
    model, x, threads, session = made.model, made.x, made.threads, made.session
    clock = CLOCKS["cpu" if threads == 1 else "wall"]  # the machine may be busy otherwise
    torch_fast, fast, stages = EarlyExit(model, made.policy), made.fast, made.fast.stages
    torch_full = torch.inference_mode()(Full(model, x))
    arrays = pytree.tree_map(Tensor.numpy, x)
    exits = fast(arrays).exits
    names = [(each.name, int(each.name.rpartition("_")[2])) for each in session.get_inputs()]

    parts = [slice(k, k + batch) for k in range(0, len(exits) - batch + 1, batch)][:64]
    tensors = [rows_of(x, rows) for rows in parts]
    pieces = [rows_of(arrays, rows) for rows in parts]
    feeds = [{name: pytree.tree_leaves(each)[k] for name, k in names} for each in pieces]
    stage_times = np.full((len(parts), model.n_exits), np.inf)
    head_times = np.full((len(parts), model.n_exits), np.inf)

    def stages_and_heads(number: int) -> None:
        state, start = stages.begin(pieces[number]), clock()
        for k in range(model.n_exits):
            place = number, k
            state = stages.advance(k, state)
            middle = clock()
            stages.head(k, state)
            end = clock()
            stage_times[place] = min(stage_times[place], middle - start)
            head_times[place] = min(head_times[place], end - middle)
            start = end

    ways: dict[str, Callable[[int], object]] = {
        "torch full": lambda number: torch_full(*pytree.tree_leaves(tensors[number])),
        "torch early": lambda number: torch_fast(tensors[number]),
        "onnx full": lambda number: session.run(None, feeds[number]),
        "onnx all exits": stages_and_heads,
        "onnx early": lambda number: fast(pieces[number]),
    }
    best = {way: np.full(len(parts), np.inf) for way in ways}
    until, rounds = time.perf_counter() + seconds * len(ways), 0
    while time.perf_counter() < until or rounds < 3:
        rounds += 1
        for way, run in ways.items():
            for number in range(len(parts)):
                start = clock()
                run(number)
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


def run(
    seconds: float = 4.0,
    threads: int = 2,
    networks: dict[str, Make] | None = None,
    epsilon: float = EPSILON,
) -> list[Result]:
    found = []
    for name, make in (networks or NETWORKS).items():
        made = Exported(*make(epsilon), threads)
        for batch in (1, 64):
            found += measure(name, made, batch, seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="per way and batch size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--networks", nargs="+", help="names as above; all by default")
    parser.add_argument("--encoder", type=Path, help="folder of MiniLM, to measure it too")
    parser.add_argument("--questions", type=Path, help="folder of Banking77, for MiniLM")
    arguments = parser.parse_args()
    networks = dict(NETWORKS)
    if arguments.encoder is not None:
        for length in LENGTHS:
            given = arguments.encoder, arguments.questions, length
            networks[f"MiniLM-{length}"] = partial(minilm, *given)
    chosen = {name: networks[name] for name in arguments.networks or networks}
    found = run(arguments.seconds, arguments.threads, chosen, arguments.epsilon)
    show(f"{TITLE}; ε = {arguments.epsilon:g}", found, Console())


if __name__ == "__main__":
    main()
