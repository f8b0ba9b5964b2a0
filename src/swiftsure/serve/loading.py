"""Engines for folders: which engine a folder is for, in this process or in workers."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from swiftsure.serve.engine import Engine, EngineOptions
from swiftsure.serve.workers import Spare, WorkerEngine

__all__ = ["ENGINES", "demo_engine", "load_engine", "load_engines"]

ENGINES = {
    "manifest.json": "swiftsure.serve.engines.onnx:OnnxEngine",
    "exits.json": "swiftsure.serve.engines.torch:TorchEngine",
}
"""The engine of a folder, by a file that only such folders have; the first that is there counts.

Named by texts, so that serving one kind imports no other framework.
"""


def load_engine(folder: str | os.PathLike[str], options: EngineOptions | None = None) -> Engine:
    """Return an engine for a folder, such as one from `swiftsure export`, and time it.

    Parameters
    ----------
    folder : path, or the name of a repository of the Hugging Face Hub
    options : EngineOptions, optional
    """
    chosen, place = options or EngineOptions(), Path(folder)
    named = next((name for mark, name in ENGINES.items() if (place / mark).is_file()), None)
    module, _, name = (named or ENGINES["exits.json"]).partition(":")
    engine: Engine = getattr(import_module(module), name).load(folder, chosen)
    if chosen.measure:
        engine.measure()
    return engine


def load_engines(
    folder: str | os.PathLike[str] | None,
    workers: int = 0,
    options: EngineOptions | None = None,
) -> list[Engine]:
    """Return the engines of a server: one in this process, or one in each worker process.

    Parameters
    ----------
    folder : path, optional
        By default the network that comes with the library is served.
    workers : int
        How many processes; each has an equal share of the cores as threads. One more is loaded to
        replace one that dies.
    options : EngineOptions, optional
        Its `network` must be of the top level of a module if there are workers.
    """
    if workers < 0:
        raise ValueError(f"`workers` must be at least 0, but got {workers}.")
    chosen = options or EngineOptions()
    threads = max(1, (os.cpu_count() or 1) // workers) if workers else chosen.threads
    chosen = replace(chosen, threads=threads)
    make: Callable[[], Engine] = demo_engine
    if folder is not None:
        make = partial(load_engine, folder, chosen)
    if workers == 0:
        return [make()]
    with ThreadPoolExecutor(workers) as side_by_side:
        engines = list(side_by_side.map(lambda _: WorkerEngine(make, threads), range(workers)))
    spare = Spare(make, threads)  # it loads while the others answer
    for engine in engines:
        engine.spare = spare
    return list(engines)


def demo_engine(epsilon: float = 0.03) -> Engine:
    """Return an engine for the network that comes with the library."""
    import swiftsure as ss
    from swiftsure import demo
    from swiftsure.curves.sample_order import SampleOrder
    from swiftsure.demo.network import prepared, trained_exits
    from swiftsure.serve.engines.torch import TorchEngine
    from swiftsure.torch import EarlyExit

    record = replace(demo.calibration_record(), order=SampleOrder.of(0))
    policy = ss.calibrate(record, risk="consistency", loss="zero_one", epsilon=epsilon)
    example = prepared(demo.sample_images().images[:1])
    engine = TorchEngine(EarlyExit(trained_exits(), policy, on_invalid="mark"), example)
    engine.measure()
    return engine
