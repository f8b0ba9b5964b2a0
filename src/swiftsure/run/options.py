"""`RunOptions`: how a long run over many samples is stored, shown and spread over machines."""

import os
from dataclasses import dataclass
from typing import Literal

from swiftsure._lib import checks

__all__ = ["RunOptions"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to collect or sweep: stored in pieces, with a progress bar, here or on a cluster.

    The record is the same with any of them.

    Parameters
    ----------
    shards : folder, optional
        Where to write the record in pieces as it grows, and to resume from. It is bound to the
        data: on resuming, the same samples must come in the same order.
    shard_size : int, optional
        Samples per shard; by default 1,000 for `collect` and 64 to 256 for sweeps.
    shard_seconds : float
        `collect` also writes a shard after this many seconds.
    durable : bool
        Wait until each shard is on disk. If False, a power failure may cost a few shards, which are
        then made again.
    progress : bool, optional
        Show a progress bar; by default if standard error is a terminal.
    engine : {"local", "ray"}
        Where the model runs: in this process, or in Ray actors, which each hold a copy of it.
        Shards may be resumed by either.
    workers : int, optional
        Number of Ray actors, each with one CPU, and one GPU if the model runs on GPUs. By default
        as many as the cluster has; CPUs to read a Ray Dataset are left free.

    Examples
    --------
    >>> RunOptions(shards="parts", shard_size=500).engine
    'local'
    """

    shards: str | os.PathLike[str] | None = None
    shard_size: int | None = None
    shard_seconds: float = 60.0
    durable: bool = True
    progress: bool | None = None
    engine: Literal["local", "ray"] = "local"
    workers: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        if self.shard_size is not None:
            checks.count("shard_size", self.shard_size)
        if not checks.number("shard_seconds", self.shard_seconds) >= 0:  # also refuses NaN
            raise ValueError(f"`shard_seconds` must be at least 0, but got {self.shard_seconds:g}.")
        checks.choice("engine", self.engine, ("local", "ray"))
        if self.engine == "local" and self.workers is not None:
            raise ValueError("`workers` needs engine='ray'.")
