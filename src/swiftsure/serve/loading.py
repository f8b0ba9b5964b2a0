"""Engines for folders: which runtime a folder is for, in this process or in workers."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from swiftsure.serve.engine import Engine
from swiftsure.serve.workers import WorkerEngine

__all__ = ["demo_engine", "load_engine", "load_engines"]


def load_engine(folder: str | os.PathLike[str], threads: int | None = None) -> Engine:
    """Return an engine for a folder from `EarlyExit.save_pretrained` or `swiftsure export`.

    Parameters
    ----------
    folder : path
    threads : int, optional
        Threads of ONNX Runtime; those of the folder by default.
    """
    place = Path(folder)
    if (place / "manifest.json").is_file():
        from swiftsure.serve.onnx_engine import OnnxEngine

        return OnnxEngine.load(place, threads)
    from swiftsure.serve.torch_engine import TorchEngine

    return TorchEngine.from_pretrained(str(folder))


def load_engines(folder: str | os.PathLike[str] | None, workers: int = 0) -> list[Engine]:
    """Return the engines of a server: one in this process, or one in each worker process.

    Parameters
    ----------
    folder : path, optional
        By default the network that comes with the library is served.
    workers : int
        How many processes; each has an equal share of the cores as threads.
    """
    if workers < 0:
        raise ValueError(f"`workers` must be at least 0, but got {workers}.")
    threads = max(1, (os.cpu_count() or 1) // max(1, workers)) if workers else None
    make: Callable[[], Engine] = demo_engine
    if folder is not None:
        make = partial(load_engine, folder, threads)
    if workers == 0:
        return [make()]
    with ThreadPoolExecutor(workers) as side_by_side:
        return list(side_by_side.map(lambda _: WorkerEngine(make, threads), range(workers)))


def demo_engine(epsilon: float = 0.03) -> Engine:
    """Return an engine for the network that comes with the library."""
    import swiftsure as ss
    from swiftsure import assets
    from swiftsure.curves.sample_order import SampleOrder
    from swiftsure.serve.torch_engine import TorchEngine
    from swiftsure.torch import EarlyExit, StagedModel
    from swiftsure.torch.models.embedded import embedded_msdnet, embedded_small_exits, prepared

    small = not assets.installed()
    record = assets.calibration_record(small)
    policy = ss.calibrate(
        replace(record, order=SampleOrder.of(0)),
        risk="consistency",
        loss="zero_one",
        epsilon=epsilon,
    )
    model: StagedModel = embedded_small_exits() if small else embedded_msdnet()
    example = prepared(assets.sample_images(small).images[:1])
    return TorchEngine(EarlyExit(model, policy, on_invalid="mark"), example)
