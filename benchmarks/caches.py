"""Images per second of a certified cache against the pipeline without one, interleaved:
`python -m benchmarks.caches --device cpu`, from the root of the repository.

Runs diffusers' own pipeline, the same with its transformer captured as a CUDA graph (on a GPU),
diffusers' FirstBlockCache and the per-sample cache, in turn, on the trained DiT; best and median.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from experiments.caches.records import HERE, labels_of, trained
from swiftsure.diffusion.caches import CachedPipeline, DiffusersCache, SampleCache


def captured(pipe: Any, rows: int) -> Callable[..., Any]:
    """Return the transformer's forward as one CUDA graph for a number of rows."""
    device, model = pipe.device, pipe.transformer
    held = (
        torch.zeros(rows, 3, 32, 32, device=device),
        torch.zeros(rows, dtype=torch.long, device=device),
        torch.zeros(rows, dtype=torch.long, device=device),
    )
    plain, graph = model.forward, torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(side):
            for _ in range(3):
                plain(held[0], timestep=held[1], class_labels=held[2])
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            found = plain(held[0], timestep=held[1], class_labels=held[2]).sample

    def forward(hidden_states: Any, timestep: Any, class_labels: Any) -> Any:
        for own, new in zip(held, (hidden_states, timestep, class_labels), strict=True):
            own.copy_(new)
        graph.replay()
        return Transformer2DModelOutput(sample=found)

    return forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="dit_cifar10")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--record", type=Path, help="NAME_cache.json; the results' by default")
    parser.add_argument("--epsilon", nargs="+", default=["0.05", "0.1"], help="in the report")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_float32_matmul_precision("high")
    pipe, recipe = trained(arguments.name, arguments.results)
    pipe, call, batch = pipe.to(arguments.device), recipe["sampling"], arguments.batch
    file = arguments.record or arguments.results / f"{arguments.name}_cache.json"
    found = json.loads(file.read_text())["certified"]
    levels = {each: found[each] for each in arguments.epsilon}
    on_gpu = arguments.device == "cuda"
    runs: dict[str, Callable[..., Any]] = {"uncached": lambda **given: pipe(**given, **call)}
    if on_gpu:
        plain, replay = pipe.transformer.forward, captured(pipe, 2 * batch)

        def in_graph(**given: Any) -> Any:
            pipe.transformer.forward = replay
            try:
                return pipe(**given, **call)
            finally:
                pipe.transformer.forward = plain

        runs["uncached, captured"] = in_graph
    for epsilon, level in levels.items():
        kinds = {"SampleCache": SampleCache()}
        if batch == 1:
            kinds["FirstBlockCache"] = DiffusersCache(FirstBlockCacheConfig())
        for name, cache in kinds.items():
            runs[f"{name}, epsilon {epsilon}"] = CachedPipeline(
                pipe, cache=cache, threshold=level, **call
            )
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-1, arguments.repeats):
        for name, run in runs.items():
            given = {
                "class_labels": labels_of(batch, repeat + 100),
                "generator": torch.Generator().manual_seed(repeat + 100),
                "output_type": "pt",
            }
            began, used = time.perf_counter(), time.process_time()
            run(**given)
            if on_gpu:
                torch.cuda.synchronize()
            if repeat >= 0:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - used)
                print(
                    f"{name}: {seconds[name][-1]:.2f} s, {processor[name][-1]:.2f} s CPU",
                    flush=True,
                )
    base = np.asarray(seconds["uncached"])
    print(f"{arguments.device}, batch {batch}, {arguments.repeats} repeats")
    for name, values in seconds.items():
        row = {
            "images_per_second": round(batch / float(np.median(values)), 3),
            "times_uncached": round(float(np.median(base / np.asarray(values))), 3),
            "times_uncached_best": round(float(base.min() / min(values)), 3),
            "times_uncached_processor": round(sum(processor["uncached"]) / sum(processor[name]), 3),
        }
        print(json.dumps({"run": name, **row}), flush=True)


if __name__ == "__main__":
    main()
