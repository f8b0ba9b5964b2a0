"""One local Ray cluster for all tests; its CPUs are only counted, so two cores are enough."""

from importlib.util import find_spec

import pytest

if any(find_spec(name) is None for name in ("ray", "torch")):
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    torch.set_num_threads(1)  # as workers have, so that results are equal to the last bit


@pytest.fixture(scope="session")
def cluster():
    import ray

    from tests.ray.builders import start

    start()
    yield
    ray.shutdown()
