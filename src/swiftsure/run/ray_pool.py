"""`RayPool`: Ray actors that share calls of one function; each holds its own copy of it.

Actors that die are started again and repeat the calls that they had not answered. The caller
receives each answer once.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from swiftsure._lib import checks

__all__ = ["RayPool"]


RETRIES = 8
"""How often a call is repeated because its actor died; a batch that kills every actor fails."""

SILENCE = 60.0
"""Seconds without an answer after which a warning says what the cluster may lack."""


class RayPool:
    """Actors that share calls; connects to a cluster, or starts one on this machine.

    Use it as a context manager: it stops its actors at the end.

    Parameters
    ----------
    make : callable
        Called once in each actor. Returns the function that the actor runs, with one thread.
    workers : int, optional
        Number of actors; the CPUs of the cluster by default. Each claims one CPU, or less if they
        would leave too few to others.
    name : str
        Name of the calls in Ray's dashboard and metrics.
    gpus : int
        GPUs of each actor.
    spare : int
        CPUs that the actors leave to others, such as Ray Data's readers.
    ahead : int
        Calls that each actor is given at once: one that runs, and others that wait for it.
    """

    def __init__(
        self,
        make: Callable[[], Callable[..., Any]],
        workers: int | None = None,
        *,
        name: str,
        gpus: int = 0,
        spare: int = 0,
        ahead: int = 1,
    ) -> None:
        self._ray = ray = connected()
        resources = ray.cluster_resources()
        kind = "GPU" if gpus else "CPU"
        default = max(1, int(resources.get(kind, 1)) - (0 if gpus else spare))
        self.n = checks.count("workers", default if workers is None else workers)
        self._name, self._ahead = name, ahead
        cpus = 1.0 if gpus else cpus_each(self.n, resources.get("CPU", 1), spare)
        self._needs = f"{cpus * self.n:g} CPUs{f' and {self.n} GPUs' if gpus else ''}"
        # Copied to each node once, and kept: an actor that is started again reads it again.
        self._given = [ray.put(make)]
        self._actors = self._start(cpus, gpus)
        # Calls that run, each with its actor and how many calls it counts for. An actor that has
        # not started yet counts as busy.
        self._open = {
            each.ready.remote(self._given): (k, ahead) for k, each in enumerate(self._actors)
        }
        self._load = [ahead] * self.n
        self._progress = _Progress(name)
        self._heard = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def call(self, *arguments: Any) -> Any:
        """Give a call to the actor that has the fewest; waits while all have enough to do."""
        self._listen(0)
        while min(self._load) >= self._ahead:
            self._listen(1.0)
        k = self._load.index(min(self._load))
        answer = self._actors[k].run.options(name=self._name).remote(self._given, *arguments)
        self._load[k] += 1
        self._open[answer] = k, 1
        return answer

    def is_done(self, answer: Any) -> bool:
        """Whether the answer to a call has arrived."""
        return bool(self._ray.wait([answer], timeout=0)[0])

    def result(self, answer: Any) -> Any:
        """Wait for the answer to a call; raises what the function raised."""
        while not self._ray.wait([answer], timeout=1.0)[0]:
            self._listen(0)
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None

    def unordered(self, calls: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Yield the number of each call and its result, in the order in which they finish."""
        waiting: dict[Any, int] = {}

        def finished(timeout: float | None) -> Iterator[tuple[int, Any]]:
            while waiting:
                done, _ = self._ray.wait(list(waiting), timeout=timeout)
                self._listen(0)
                if not done:
                    return
                yield waiting.pop(done[0]), self.result(done[0])

        for number, arguments in enumerate(calls):
            waiting[self.call(*arguments)] = number
            yield from finished(0)
        while waiting:
            yield from finished(1.0)

    def report(self, done: int, total: int | None) -> None:
        """Publish how much is done as Ray metrics."""
        self._progress.report(done, total)

    def close(self) -> None:
        """Stop the actors, so that their CPUs are free."""
        for actor in self._actors:
            self._ray.kill(actor)

    def _start(self, cpus: float, gpus: int) -> list[Any]:
        """Return the actors."""
        options = {"max_restarts": -1, "max_task_retries": RETRIES}
        actor = self._ray.remote(num_cpus=cpus, num_gpus=gpus, **options)(SwiftsureWorker)
        return [actor.remote(self._name) for _ in range(self.n)]

    def _listen(self, timeout: float) -> None:
        """Note which calls are done; warn once if the cluster has been silent for long."""
        if not self._open:
            return
        found, _ = self._ray.wait(list(self._open), num_returns=len(self._open), timeout=0)
        if not found and timeout:
            found, _ = self._ray.wait(list(self._open), timeout=timeout)
        for answer in found:
            k, calls = self._open.pop(answer)
            self._load[k] -= calls
        if found:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > SILENCE:
            self._heard = float("inf")
            free = self._ray.available_resources()
            warnings.warn(
                f"No worker has answered for {SILENCE:g} s. The workers need {self._needs}, and"
                f" the cluster has {free.get('CPU', 0):g} free CPUs and {free.get('GPU', 0):g}"
                " free GPUs besides. If they are too few, choose fewer `workers`.",
                UserWarning,
                stacklevel=4,
            )


class SwiftsureWorker:
    """One worker, with one thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.function: Callable[..., Any] | None = None

    def __repr__(self) -> str:  # in the dashboard, and before each line of the log
        return f"swiftsure {self.name}"

    def ready(self, given: list[Any]) -> None:
        """Make the function, from a reference to what makes it."""
        import ray

        make = ray.get(given[0])
        torch = sys.modules.get("torch")  # loaded with `make`, if it is needed
        if torch is not None:
            torch.set_num_threads(1)
        self.function = make()

    def run(self, given: list[Any], *arguments: Any) -> Any:
        """Call the function; an actor that was started again makes it first."""
        if self.function is None:
            self.ready(given)
        return self.function(*arguments)  # type: ignore[misc]


class _Progress:
    """How much is done, as metrics that Ray's dashboard and Prometheus show."""

    def __init__(self, name: str) -> None:
        from ray.util.metrics import Gauge

        self._gauges = {}
        for part in ("done", "total"):
            gauge = Gauge(f"swiftsure_{part}", f"Steps: {part}.", tag_keys=("run",))
            gauge.set_default_tags({"run": name})
            self._gauges[part] = gauge

    def report(self, done: int, total: int | None) -> None:
        self._gauges["done"].set(done)
        if total is not None:
            self._gauges["total"].set(total)


def cpus_each(workers: int, total: float, spare: int) -> float:
    """Return how many CPUs each worker claims, so that `spare` are left where they all fit.

    Readers that find no CPU free never start, and the workers would wait for them for ever.

    Examples
    --------
    >>> cpus_each(2, total=4, spare=1), cpus_each(2, total=2, spare=1), cpus_each(1, 1, spare=1)
    (1.0, 0.5, 0.0)
    """
    if not workers <= total < workers + spare:
        return 1.0
    return max(total - spare, 0.0) / workers


def connected() -> Any:
    """Return the module `ray`, connected to a cluster."""
    try:
        import ray
    except ImportError:
        raise ImportError(
            "engine='ray' needs Ray: pip install 'swiftsure[ray]'.", name="ray"
        ) from None

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    return ray
