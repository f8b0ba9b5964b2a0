"""Early exits on a GPU, at published sizes and under certified policies, against full networks.

`python benchmarks/gpu.py [--networks msdnet dvit] [--batch 1 16 64 256] [--dtype bfloat16]
[--compile] [--no-eager] [--json FILE]`. Without arguments it measures everything except compiled
variants, which take minutes per network and size; with --compile, that many processes compile side
by side and are then timed one at a time. Networks at published sizes have random weights, and exits
are drawn uniformly. `msdnet_fashion_mnist` is the trained MSDNet that comes with the library under
its policy at ε = 0.05; `msdnet_cifar10_record` and `dvit_tiny_imagenet_100_record` have random
weights, and exits drawn as their records and policies at ε = 0.05 say.

For each network, batch size and dtype, milliseconds per batch of

- full: the full network, eager, as one CUDA graph and, with --compile, by
  `torch.compile(mode="reduce-overhead")`
- `EarlyExit`, called for each batch: eager, captured and, for single samples, compiled too
- the captured stream, which is what `EarlyExit.run` uses for batches of more than one sample; with
  --compile also of compiled stages
- ideal: the fastest full network less the time of the skipped stages, which are timed as CUDA
  graphs at the full batch size

and the time saved / time of the skipped stages, relative to the fastest full network. Stages are
counted with their heads, like in the runtime, or without, like in the full network. Compiled
variants are compared with the time of compiled stages.

`uvit` is the U-ViT of the published CIFAR-10 size with DDIM's 50 steps; see `diffusion.py`.
"""

import argparse
import gc
import json
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from turns import run_in_turns, wait_for_turn

import swiftsure_zoo as zoo
from swiftsure import ExitRecord, Policy, calibrate
from swiftsure.run.graphs.precision import inference
from swiftsure.run.graphs.recorder import Recorded, Recorder
from swiftsure.torch import EarlyExit, Scored, Staged, Stream
from tests.diffusion import drawn_rows

SIZES = Path(__file__).with_name("published_sizes.json")

FEWEST, MOST, MOST_BYTES = 48, 3072, 6e9
"""Samples per run: at least, at most; and at most so many bytes of images."""


class Drawn(Staged):
    """A network whose samples leave where they are told, after a score was computed as usual."""

    def __init__(self, inner: Staged) -> None:
        super().__init__()
        self.inner, self.n_exits = inner, inner.n_exits

    def begin(self, batch: Any) -> Any:
        images, exits = batch
        return {"state": self.inner.begin(images), "exits": exits}

    def advance(self, exit_index: int, state: Any) -> Any:
        return {"state": self.inner.advance(exit_index, state["state"]), "exits": state["exits"]}

    def head(self, exit_index: int, state: Any) -> Scored:
        logits = self.inner.head(exit_index, state["state"])
        top = logits.float().softmax(1).amax(1)
        if top.ndim > 1:
            top = top.flatten(1).mean(1)
        leaves = (state["exits"] <= exit_index).float()
        return Scored(logits, leaves + 0 * top.nan_to_num())


class Case(NamedTuple):
    """A network to time: the staged model that runs, the network inside, inputs and policy."""

    name: str
    model: Staged
    network: Staged
    policy: Policy
    inputs: Callable[[int], tuple[Any, Tensor]]
    """Maps a number of samples to what the model takes and the images in it."""
    batches: Sequence[int]


def drawn_policy(n_exits: int, dtype: str) -> Policy:
    """A policy for `Drawn`: confidences are 0 or 1, the threshold is 0.5."""
    record = ExitRecord(
        {"model": np.full((99, n_exits - 1), 0.5)},
        inconsistencies={"zero_one": np.zeros((99, n_exits))},
    )
    policy = calibrate(record, risk="consistency", loss="zero_one", epsilon=0.5)
    return policy.model_copy(update={"threshold": 0.5, "dtype": _autocast(dtype)})


def published(name: str, dtype: str, small: bool) -> Case:
    sizes = json.loads(SIZES.read_text())
    shape, batches = (3, 224, 224), (1, 16, 64, 256)
    if name == "msdnet":
        network: Staged = zoo.MSDNet.from_hyperparameters(sizes["msdnet"])
    elif name == "dvit":
        depth = 2 if small else 14
        network = zoo.DViT(n_classes=1000, width=384, depth=depth, n_heads=6, mlp_ratio=3.0)
    elif name == "dyn_perc":
        network = zoo.DynPerceiver(n_classes=1000, branch="regnet_y_800mf")
    else:
        network = zoo.ADPC.from_hyperparameters(sizes["adp_c"])
        shape, batches = ((3, 64, 128) if small else (3, 1024, 2048)), (1, 4)
    return drawn_case(f"{name}, published size", network, shape, None, dtype, batches)


def drawn_case(
    name: str,
    network: Staged,
    shape: tuple[int, ...],
    shares: Any,
    dtype: str,
    batches: Sequence[int],
) -> Case:
    network = network.eval().to(DEVICE)
    random_ = np.random.default_rng(0)

    def inputs(n: int) -> tuple[Any, Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(0)
        images = torch.randn(n, *shape, device=DEVICE, generator=generator)
        exits = random_.choice(network.n_exits, size=n, p=shares)
        return (images, torch.from_numpy(exits).float().to(DEVICE)), images

    policy = drawn_policy(network.n_exits, dtype)
    return Case(name, Drawn(network).eval(), network, policy, inputs, batches)


def certified(name: str, dtype: str) -> Case:
    """Trained networks, or at least their exits, under policies at ε = 0.05."""
    if name == "msdnet_fashion_mnist":
        model = zoo.msdnet_fashion_mnist().to(DEVICE)
        policy = calibrate(
            zoo.records.record().split(1000, seed=0)[0], loss="zero_one", epsilon=0.05
        )
        policy = policy.model_copy(update={"dtype": _autocast(dtype)})
        if dtype != "float32":
            policy = _unbound(policy)
        images = zoo.prepared(zoo.records.sample_images().images).to(DEVICE)

        def inputs(n: int) -> tuple[Any, Tensor]:
            rows = torch.arange(n, device=DEVICE) % len(images)
            return images[rows], images[rows]

        return Case("MSDNet, Fashion-MNIST", model, model, policy, inputs, (1, 16, 64, 256))
    kind = name.removesuffix("_record")
    root = Path(__file__).parents[1]
    recipe = json.loads(
        (root / "experiments/image_classification/results" / f"{kind}.json").read_text()
    )["recipe"]
    arguments = dict(recipe["model"])
    network: Staged = getattr(zoo, arguments.pop("name"))(**arguments)
    record = ExitRecord.load(zoo.records.IMAGE_CLASSIFICATION / f"{kind}.parquet")
    first, rest = record.split(1000, seed=0)
    found = calibrate(first, loss="zero_one", epsilon=0.05).evaluate(rest)
    size = arguments.get("image_size", 32 if recipe["data"]["name"] == "cifar10" else 64)
    shares = np.asarray(found.exit_shares, dtype=float)
    return drawn_case(
        f"{kind}, exits of its record", network, (3, size, size), shares / shares.sum(), dtype,
        (1, 16, 64, 256),
    )  # fmt: skip


def _unbound(policy: Policy) -> Policy:
    """A policy without its model's fingerprint: calibrated in float32, only timed in bfloat16."""
    provenance = policy.certificate.provenance.model_copy(update={"model": None})
    certificate = policy.certificate.model_copy(update={"provenance": provenance})
    return policy.model_copy(update={"certificate": certificate})


def _autocast(dtype: str) -> str | None:
    return None if dtype == "float32" else dtype


# ------------------------------------------------------------------------------------------ times


def best_times(
    variants: dict[str, Callable[[], object]],
    repeats: int,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Seconds of each variant: the best of several runs in changing order, after a warm-up.

    Calls `wait` between the warm-up, which compiles and captures, and the rest.
    """
    found: dict[str, float] = {}
    for name, run in list(variants.items()):
        try:
            if _late:
                raise TimeoutError("too late")
            run()
            found[name] = np.inf
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if VERBOSE:
                traceback.print_exc()
            gc.collect()
            torch.cuda.empty_cache()
    signal.setitimer(signal.ITIMER_REAL, 0)
    _late.clear()
    wait()
    order = list(found)
    for repeat in range(repeats):
        random.Random(repeat).shuffle(order)
        for name in order:
            _wait()
            start = time.perf_counter()
            variants[name]()
            _wait()
            found[name] = min(found[name], time.perf_counter() - start)
    return found


_late: list[bool] = []
"""Not empty once there is no time left to compile."""


def _too_late(*_: Any) -> None:
    _late.append(True)
    raise TimeoutError("compiling took too long")


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def full(network: Staged, images: Tensor, until: int | None = None, heads: bool = False) -> Any:
    """Run a network up to a stage, with the last head, or all heads."""
    last = network.n_exits - 1 if until is None else until
    state: Any = network.begin(images)
    found = []
    for k in range(last + 1):
        state = network.advance(k, state)
        if heads:
            found.append(network.head(k, state))
    if heads:
        return state, found
    return network.head(last, state) if until is None else state


def captured(recorder: Recorder, run: Callable[[], Any]) -> Recorded:
    return recorder.record(run, warm_up=1)


def measure(
    case: Case,
    batch: int,
    dtype: str,
    *,
    compiled: bool,
    repeats: int,
    n_batches: int | None,
    with_eager: bool = True,
    only: Sequence[str] | None = None,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Time all variants on batches of one size; milliseconds per batch."""
    image = case.inputs(1)[1]
    most = min(MOST // batch, int(MOST_BYTES // (image.numel() * 4 * batch)))
    n_parts = n_batches or max(4, min(32 if batch > 1 else FEWEST, most))
    given, images = case.inputs(batch * n_parts)
    parts = [
        pytree.tree_map_only(Tensor, lambda leaf, i=i: leaf[i * batch : (i + 1) * batch], given)
        for i in range(n_parts)
    ]
    pieces = list(images.split(batch))
    network, device = case.network, torch.device(DEVICE)
    kind = _autocast(dtype)

    def eager(piece: Tensor) -> Any:
        with inference(device, kind):
            return full(network, piece)

    _wait()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        eager(pieces[0])
        weights = sum(p.numel() * p.element_size() for p in network.parameters())
        peak = torch.cuda.max_memory_allocated() - before + weights + pieces[0].nbytes
    else:
        peak = 0
    static = pieces[0].clone()
    with torch.inference_mode():
        recorder = Recorder(device, kind)
        one = captured(recorder, lambda: full(network, static))

    def graph() -> None:
        with torch.inference_mode():
            for piece in pieces:
                static.copy_(piece)
                one.replay()
                pytree.tree_map_only(Tensor, torch.clone, one.result)

    plain = EarlyExit(case.model, case.policy)
    # One each, so that the memory of each way is known.
    called, fast, whole_ = (EarlyExit(case.model, case.policy, capture=True) for _ in range(3))
    variants: dict[str, Callable[[], object]] = {
        "full captured": graph,
        "captured": lambda: [called(part) for part in parts],
        "stream": lambda: list(fast.way("stream", batch)(parts)),
        "run full": lambda: list(whole_.way("full", batch)(parts)),
    }
    if with_eager:
        variants["full"] = lambda: [eager(piece) for piece in pieces]
        variants["EarlyExit"] = lambda: [plain(part) for part in parts]
        if batch > 1:
            variants["stream, eager"] = lambda: list(Stream(plain, batch).run(parts, ordered=True))
    both = None
    if compiled:
        torch._dynamo.reset()  # graphs of other networks and sizes count against its limits
        whole = torch.compile(lambda x: full(network, x), mode="reduce-overhead", dynamic=False)

        def reduced() -> None:
            with inference(device, kind):
                for piece in pieces:
                    torch.compiler.cudagraph_mark_step_begin()
                    pytree.tree_map_only(Tensor, torch.clone, whole(piece))

        both = EarlyExit(case.model, case.policy, capture=True, compile=True)
        variants["full compiled"] = reduced
        if batch == 1:
            variants["captured compiled"] = lambda: [both(part) for part in parts]
        else:
            variants["stream compiled"] = lambda: list(both.way("stream", batch)(parts))
    if only is not None:
        variants = {name: run for name, run in variants.items() if name in only}
    start = time.perf_counter()
    seconds = best_times(variants, repeats, wait)
    seconds_all = time.perf_counter() - start
    ms = {name: 1e3 * value / n_parts for name, value in seconds.items()}
    fulls = {name: value for name, value in ms.items() if name.startswith("full")}
    if ms == fulls:
        return {"network": case.name, "batch": batch, "dtype": dtype, "ms": ms}
    # Prefixes of the network, as graphs at the full batch.
    cumulative = {}
    with torch.inference_mode():
        for heads in (False, True):
            graphs = [
                captured(recorder, lambda k=k, h=heads: full(network, static, k, h))
                for k in range(network.n_exits)
            ]
            n_replays = max(1, min(8, int(0.4 * n_parts / seconds["full captured"])))
            many = {
                str(k): (lambda g=g, n=n_replays: [g.replay() for _ in range(n)])
                for k, g in enumerate(graphs)
            }
            found = best_times(many, 2)
            cumulative[heads] = [found[str(k)] / n_replays for k in range(network.n_exits)]
            del graphs
    outs = list(map(plain, parts))
    exits = torch.cat([out.exits for out in outs]).cpu().numpy()
    same = {}
    ways: dict[str, Callable[[], Any]] = {
        "captured": lambda: map(called, parts),
        "stream": lambda: fast.way("stream", batch)(parts),
    }
    if both is not None:
        ways["stream compiled"] = lambda: both.way("stream", batch)(parts)
        ways["captured compiled"] = lambda: map(both, parts)
    for name, run in ways.items():
        if name in seconds:
            got = list(run())
            theirs = torch.cat([out.exits for out in got]).cpu().numpy()
            difference = max(
                float((a.raw - b.raw).abs().max() / b.raw.abs().max().clamp(min=1e-9))
                for a, b in zip(got, outs, strict=True)
            )
            same[name] = [float((theirs == exits).mean()), difference]
    del outs
    best_full = min(fulls, key=fulls.__getitem__)
    row: dict[str, Any] = {
        "network": case.name,
        "batch": batch,
        "dtype": dtype,
        "n_batches": n_parts,
        "ms": ms,
        "fastest_full": best_full,
        "same": same,
        "mean_exit": float(exits.mean()),
        "prefix_ms": [1e3 * value for value in cumulative[False]],
        "prefix_with_heads_ms": [1e3 * value for value in cumulative[True]],
        "eager_peak_gib": peak / 2**30,
        "calls_gib": called.captures.budget.bytes / 2**30,
        "full_gib": whole_.captures.budget.bytes / 2**30,
        "graphs": fast.captures.budget.graphs,
        "graphs_gib": fast.captures.budget.bytes / 2**30,
        "capture_s": fast.captures.budget.seconds,
        "compile_and_capture_s": both.captures.budget.seconds if both else 0.0,
        "wall_s": seconds_all,
    }
    for heads, label in ((True, "saved"), (False, "saved_without_heads")):
        steps = np.asarray(cumulative[heads])
        skipped = 1e3 * float(np.mean(steps[-1] - steps[exits]))
        row[f"skipped_ms_{label}"] = skipped
        # Against the captured full network, whose stages were timed, and against the fastest.
        for against in {"full captured", best_full} & set(ms):
            row[f"{label} | {against}"] = {
                name: round((ms[against] - value) / skipped, 3)
                for name, value in ms.items()
                if not name.startswith("full")
            }
        row[f"ideal_ms_{label}"] = ms[best_full] - skipped
    if both is not None and "compiled" in " ".join(set(ms) - set(fulls)):
        steps = np.cumsum(segment_times(both))
        row["compiled_prefix_with_heads_ms"] = (1e3 * steps).tolist()
        row["compiled_stages"] = compiled_stages(both)
        skipped = 1e3 * float(np.mean(steps[-1] - steps[exits]))
        row["skipped_ms_compiled"] = skipped
        row[f"saved compiled | {best_full}"] = {
            name: round((ms[best_full] - value) / skipped, 3)
            for name, value in ms.items()
            if not name.startswith("full")
        }
    row["speed_up"] = {
        name: round(ms[best_full] / value, 3)
        for name, value in ms.items()
        if not name.startswith("full")
    }
    return row


def captured_steps(fast: EarlyExit) -> list[tuple[Any, list[Tensor]]]:
    """What `fast` has captured: each segment's function and its input."""
    captures = fast.captures
    assert captures is not None
    for (*_, is_full), lanes in captures._lanes.items():
        if lanes and not is_full:
            rings = [[t[: lanes[0].size] for t in ring.tensors] for ring in lanes[0]._rings]
            return list(zip(lanes[0]._steps, rings, strict=True))
    (calls,) = captures._calls.values()
    assert calls._sample is not None
    tensors, found = calls._sample._inputs, []
    for step in calls._sample._steps:
        found.append((step, tensors))
        tensors = step(tensors).state
    return found


def segment_times(fast: EarlyExit) -> list[float]:
    """Seconds of each captured segment with its head, alone as a graph."""
    recorder = Recorder(torch.device(DEVICE), fast.dtype)
    with inference(torch.device(DEVICE), fast.dtype):
        return [
            recorder.record(lambda s=step, i=inputs: s(i)).seconds(torch.device(DEVICE), 20)
            for step, inputs in captured_steps(fast)
        ]


def compiled_stages(fast: EarlyExit) -> list[bool]:
    """Which segments run compiled, because that is faster."""
    with inference(torch.device(DEVICE), fast.dtype):
        return ["_compile." in step.__qualname__ for step, _ in captured_steps(fast)]


def shown(row: dict[str, Any]) -> str:
    ms = "  ".join(f"{name} {value:.2f}" for name, value in row["ms"].items())
    if "fastest_full" not in row:
        return f"{row['network']}, batch {row['batch']}, {row['dtype']}: ms: {ms}"
    best = row["fastest_full"]
    saved = "  ".join(f"{k} {v:.2f}" for k, v in row[f"saved | {best}"].items())
    bare = "  ".join(f"{k} {v:.2f}" for k, v in row[f"saved_without_heads | {best}"].items())
    speed = "  ".join(f"{k} {v:.2f}" for k, v in row["speed_up"].items())
    by_compiled = row.get(f"saved compiled | {best}", {})
    if by_compiled:
        bare += "; of compiled stages: " + "  ".join(f"{k} {v:.2f}" for k, v in by_compiled.items())
        bare += f" ({row['skipped_ms_compiled']:.2f} ms skipped; compiled {row['compiled_stages']})"
    return (
        f"{row['network']}, batch {row['batch']}, {row['dtype']}: ms: {ms}\n"
        f"    ideal {row['ideal_ms_saved_without_heads']:.2f}; against {best}: {speed}\n"
        f"    saved/skipped: {saved}; without heads: {bare}\n"
        f"    same exits {row['same']}; eager peak {row['eager_peak_gib']:.2f} GiB, {row['graphs']}"
        f" graphs {row['graphs_gib']:.2f} GiB in {row['capture_s']:.1f} s,"
        f" calls {row['calls_gib']:.2f}, full {row['full_gib']:.2f} GiB"
        f" (compiled {row['compile_and_capture_s']:.0f} s); {row['wall_s']:.0f} s"
    )


PUBLISHED = ("msdnet", "dvit", "dyn_perc", "adp_c")
BATCHES = (1, 16, 64, 256)
CERTIFIED = ("msdnet_fashion_mnist", "msdnet_cifar10_record", "dvit_tiny_imagenet_100_record")

DEVICE, VERBOSE = "cuda", False


def cases(names: Sequence[str], dtype: str, small: bool) -> Iterator[Case]:
    for name in names:
        yield published(name, dtype, small) if name in PUBLISHED else certified(name, dtype)


def main() -> None:
    global DEVICE, VERBOSE
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = (*PUBLISHED, *CERTIFIED, "uvit")
    parser.add_argument("--networks", nargs="+", choices=names, default=names)
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="compiled variants too; slow")
    parser.add_argument("--no-eager", action="store_true", help="leave eager variants out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--n-batches", type=int)
    parser.add_argument("--small", action="store_true", help="smaller networks, to try this out")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variants", nargs="+", help="only these, such as 'full captured'")
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--prepare-seconds", type=float, default=900, help="to compile at most")
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    DEVICE, VERBOSE = arguments.device, arguments.verbose
    rows: list[dict[str, Any]] = []
    if "uvit" in arguments.networks and arguments.turn is None:
        arguments.networks = [name for name in arguments.networks if name != "uvit"]
        for dtype in arguments.dtype:
            for batch in arguments.batch or (1, 16, 64):
                for row in drawn_rows(batch, dtype, DEVICE, arguments.repeats, arguments.small):
                    rows.append(row)
                    print(
                        f"{row['network']}, batch {batch}, {dtype}, {row['variant']}:"
                        f" {row['ms']:.1f} ms, {row['speed_up']:.2f} x of {row['full_ms']:.1f},"
                        f" layers saved {100 * row['layers_saved']:.0f} %",
                        flush=True,
                    )
                save(rows, arguments.json)
    if arguments.compile and arguments.turn is None:
        rows += compiled_rows(arguments)
        save(rows, arguments.json)
        return
    wait: Callable[[], None] = lambda: None  # noqa: E731
    if arguments.turn is not None:
        wait = partial(wait_for_turn, arguments.turn)
        signal.signal(signal.SIGALRM, _too_late)
        signal.setitimer(signal.ITIMER_REAL, 0.9 * arguments.prepare_seconds)
    for dtype in arguments.dtype:
        for case in cases(arguments.networks, dtype, arguments.small):
            for batch in arguments.batch or case.batches:
                if batch > max(case.batches):
                    continue
                try:
                    row = measure(
                        case,
                        batch,
                        dtype,
                        compiled=arguments.compile,
                        repeats=arguments.repeats,
                        n_batches=arguments.n_batches,
                        with_eager=not arguments.no_eager,
                        only=arguments.variants,
                        wait=wait,
                    )
                except Exception as error:
                    print(f"{case.name}, batch {batch}: {type(error).__name__}: {error}"[:600])
                    if VERBOSE:
                        traceback.print_exc()
                    continue
                finally:
                    gc.collect()
                    if DEVICE == "cuda":
                        torch.cuda.empty_cache()
                rows.append(row)
                print(shown(row), flush=True)
                save(rows, arguments.json)


def save(rows: list[dict[str, Any]], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n")


def compiled_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure with one process per network, size and dtype, which compile side by side."""
    commands, files = [], []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in arguments.dtype:
            for name in arguments.networks:
                for batch in arguments.batch or BATCHES:
                    files.append(Path(folder) / f"{name}_{batch}_{dtype}.json")
                    command = [__file__, "--networks", name, "--batch", str(batch)]
                    command += ["--dtype", dtype, "--compile", "--json", str(files[-1])]
                    command += ["--device", DEVICE, "--repeats", str(arguments.repeats)]
                    command += ["--prepare-seconds", str(arguments.prepare_seconds)]
                    command += ["--no-eager"] * arguments.no_eager + ["--small"] * arguments.small
                    if arguments.n_batches:
                        command += ["--n-batches", str(arguments.n_batches)]
                    if arguments.variants:
                        command += ["--variants", *arguments.variants]
                    commands.append(command)
        run_in_turns(commands, Path(folder), arguments.at_once, arguments.prepare_seconds)
        return [row for file in files if file.exists() for row in json.loads(file.read_text())]


if __name__ == "__main__":
    main()
