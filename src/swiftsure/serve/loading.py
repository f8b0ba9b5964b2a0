"""Engines for folders and systems: which engine a folder is for, in this process or in workers."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from swiftsure.serve.engine import Engine, EngineOptions
from swiftsure.serve.workers import Spare, WorkerEngine

__all__ = ["ENGINES", "SYSTEMS", "demo_engine", "engine_of", "load_engine", "load_engines"]

ENGINES = {
    "manifest.json": "swiftsure.serve.engines.onnx:OnnxEngine",
    "text.json": "swiftsure.serve.engines.text:TextEngine",
    "exits.json": "swiftsure.serve.engines.torch:TorchEngine",
}
"""The engine of a folder, by a file that only such folders have; the first that is there counts.

Named by texts, so that serving one kind imports no other framework.
"""


SYSTEMS = {
    "swiftsure.text.calm.model:CalmModel": "swiftsure.serve.engines.text:TextEngine",
    "swiftsure.text.bild.model:BigLittle": "swiftsure.serve.engines.text:TextEngine",
    "swiftsure.diffusion.deediff:DeeDiff": "swiftsure.serve.engines.diffusion:DiffusionEngine",
    "swiftsure.diffusion.caches.pipeline:CachedPipeline": (
        "swiftsure.serve.engines.diffusion:DiffusionEngine"
    ),
    "swiftsure.cascade.cascade:Cascade": "swiftsure.serve.engines.cascade:CascadeEngine",
    "swiftsure.torch.runtime:EarlyExit": "swiftsure.serve.engines.torch:TorchEngine",
    "swiftsure.onnx.runtime:EarlyExit": "swiftsure.serve.engines.onnx:OnnxEngine",
}
"""The engine of a system in memory, by its class."""


def load_engine(target: str | os.PathLike[str], options: EngineOptions | None = None) -> Engine:
    """Return an engine for a folder, such as one from `swiftsure export`, and time it.

    Parameters
    ----------
    target : path, or the name of a repository of the Hugging Face Hub, or "module:function"
        The function is called without arguments and returns what `engine_of` takes.
    options : EngineOptions, optional
    """
    chosen, place = options or EngineOptions(), Path(target)
    module, _, function = str(target).partition(":")
    if function.isidentifier() and not place.exists():
        chosen.refuse_unused("a function, which loads the system itself", "threads")
        engine = _called(module, function)
    else:
        named = next((name for mark, name in ENGINES.items() if (place / mark).is_file()), None)
        engine = _attribute(named or ENGINES["exits.json"]).load(target, chosen)
    if chosen.measure:
        engine.measure()
    return engine


def engine_of(system: Any, *arguments: Any, name: str | None = None) -> Engine:
    """Return the engine of a system in memory.

    Parameters
    ----------
    system : EarlyExit, CalmModel, BigLittle, DeeDiff, CachedPipeline, Cascade or Engine
    *arguments
        What else its engine needs: an example batch for an `EarlyExit` of PyTorch, the tokenizer
        of a text system, the policy of a `Cascade`.
    name : str, optional
        Of the model, for `/docs` and clients.
    """
    kind = next((f"{k.__module__}:{k.__qualname__}" for k in type(system).__mro__
                 if f"{k.__module__}:{k.__qualname__}" in SYSTEMS), None)  # fmt: skip
    if kind is None:
        if hasattr(system, "answer") and hasattr(system, "compare"):
            return cast(Engine, system)
        raise TypeError(
            f"`system` must be one that can be served, but got {type(system).__name__}: return"
            " an EarlyExit, CalmModel, BigLittle, DeeDiff, CachedPipeline or Cascade."
        )
    options = {} if name is None else {"name": name}
    engine: Engine = _attribute(SYSTEMS[kind])(system, *arguments, **options)
    return engine


def _called(module: str, function: str) -> Engine:
    found = getattr(import_module(module), function, None)
    if not callable(found):
        raise ValueError(f"`{module}` must have a function {function!r}, but has none.")
    system = found()
    parts = system if isinstance(system, tuple) else (system,)
    try:
        return engine_of(*parts, name=function)
    except TypeError as error:
        raise ValueError(f"{module}:{function} cannot be served: {error}") from None


def _attribute(named: str) -> Any:
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)


def load_engines(
    target: str | os.PathLike[str] | None,
    workers: int = 0,
    options: EngineOptions | None = None,
) -> list[Engine]:
    """Return the engines of a server: one in this process, or one in each worker process.

    Parameters
    ----------
    target : optional
        As for `load_engine`; by default the network that comes with the library is served.
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
    if target is not None:
        make = partial(load_engine, target, chosen)
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
