"""`ray_application`: the server of a certified model as a Ray Serve application."""

from collections.abc import Callable
from typing import Any

from swiftsure._lib import checks
from swiftsure.serve.app import create_app
from swiftsure.serve.engine import Engine
from swiftsure.serve.limits import Limits
from swiftsure.serve.policy_manager import PolicyManager

__all__ = ["ray_application"]


def ray_application(
    make: Callable[[], Engine],
    limits: Limits | None = None,
    *,
    replicas: int = 1,
    gpus: float = 0,
    manager: Callable[[Engine], PolicyManager] | None = None,
    audit_rate: float = 0.0,
    token: str | None = None,
    name: str = "swiftsure",
) -> Any:
    """Return a Ray Serve application whose replicas answer as `create_app` does.

    Each replica holds one engine and gathers its requests into batches.

    Parameters
    ----------
    make : callable
        Returns the engine; called once in each replica. For a folder:
        `partial(load_engine, folder)`.
    limits, token
        As for `create_app`; each replica has its own queue.
    replicas : int
        How many copies of the model serve, each with one CPU.
    gpus : float
        GPUs of each replica; `make` must put the model there.
    manager : callable, optional
        Returns the `PolicyManager` of a replica's engine. Replicas whose managers have one folder
        share the monitor, its alarm and installed policies, as servers do.
    audit_rate : float
        As for `create_app`.
    name : str
        Name of the deployment.

    Returns
    -------
    application : ray.serve.Application
        For `ray.serve.run`.
    """
    try:
        from ray import serve
    except ImportError:
        raise ImportError(
            "ray_application needs Ray Serve: pip install 'swiftsure[ray]'.", name="ray"
        ) from None

    given = limits or Limits()

    def build() -> Any:
        engine = make()
        own = None if manager is None else manager(engine)
        return create_app(engine, given, manager=own, audit_rate=audit_rate, token=token)

    deployment = serve.deployment(
        name=name,
        num_replicas=checks.count("replicas", replicas),
        # Serve's own limit, 5, would keep batches small; beyond these the replica answers 429.
        max_ongoing_requests=given.max_queue + given.max_batch + 1,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
    )
    return deployment(serve.ingress(build)()).bind()
