"""Engines for folders: which runtime a folder is for, in this process or in workers."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from swiftsure.serve.engine import Engine
from swiftsure.serve.workers import Spare, WorkerEngine

__all__ = ["demo_engine", "load_engine", "load_engines"]


def load_engine(
    folder: str | os.PathLike[str],
    threads: int | None = None,
    network: Callable[[], Any] | None = None,
) -> Engine:
    """Return an engine for a folder from `EarlyExit.save_pretrained` or `swiftsure export`.

    Parameters
    ----------
    folder : path
    threads : int, optional
        Threads of ONNX Runtime; those of the folder by default.
    network : callable, optional
        Returns the network to load weights into, if it is not one of transformers.
    """
    place = Path(folder)
    if (place / "manifest.json").is_file():
        if network is not None:
            raise ValueError(
                f"`network` must not be given for {place}: exported stages need no network."
            )
        from swiftsure.serve.onnx_engine import OnnxEngine

        return OnnxEngine.load(place, threads)
    from swiftsure.serve.torch_engine import TorchEngine

    made = None if network is None else network()
    return TorchEngine.from_pretrained(str(folder), network=made)


def load_engines(
    folder: str | os.PathLike[str] | None,
    workers: int = 0,
    network: Callable[[], Any] | None = None,
) -> list[Engine]:
    """Return the engines of a server: one in this process, or one in each worker process.

    Parameters
    ----------
    folder : path, optional
        By default the network that comes with the library is served.
    workers : int
        How many processes; each has an equal share of the cores as threads. One more is loaded to
        replace one that dies.
    network : callable, optional
        As for `load_engine`; of the top level of a module if there are workers.
    """
    if workers < 0:
        raise ValueError(f"`workers` must be at least 0, but got {workers}.")
    threads = max(1, (os.cpu_count() or 1) // max(1, workers)) if workers else None
    make: Callable[[], Engine] = demo_engine
    if folder is not None:
        make = partial(load_engine, folder, threads, network)
    if workers == 0:
        return [make()]
    with ThreadPoolExecutor(workers) as side_by_side:
        engines = list(side_by_side.map(lambda _: WorkerEngine(make, threads), range(workers)))
    spare = Spare(make, threads)  # it loads while the others answer
    for engine in engines:
        engine.spare = spare
    return list(engines)


def demo_engine(epsilon: float = 0.03) -> Engine:
    """Return an engine for the zoo's MSDNet, or the small network where the zoo is missing."""
    import swiftsure as ss
    from swiftsure.curves.sample_order import SampleOrder
    from swiftsure.demo import zoo
    from swiftsure.demo.network import prepared
    from swiftsure.serve.torch_engine import TorchEngine
    from swiftsure.torch import EarlyExit

    measured = zoo.shown()
    record = replace(measured.calibration_record(), order=SampleOrder.of(0))
    policy = ss.calibrate(record, risk="consistency", loss="zero_one", epsilon=epsilon)
    example = prepared(measured.sample_images().images[:1])
    return TorchEngine(EarlyExit(zoo.shown_network(), policy, on_invalid="mark"), example)
