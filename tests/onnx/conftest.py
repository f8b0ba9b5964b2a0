"""One exported network that all tests share; exporting takes seconds."""

from importlib.util import find_spec

import pytest

MISSING = [name for name in ("torch", "onnxruntime", "onnxscript") if find_spec(name) is None]

if MISSING:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    from swiftsure import onnx
    from tests.torch.builders import inputs, middle_threshold, network, policy_of

    torch.set_num_threads(1)

    @pytest.fixture(scope="session")
    def model():
        return network(n_exits=3)

    @pytest.fixture(scope="session")
    def policy(model):
        """A policy under which samples exit everywhere."""
        return policy_of(middle_threshold(model, inputs(100)), model.n_exits)

    @pytest.fixture(scope="session")
    def exported(model, policy, tmp_path_factory):
        """The folder of the network; tests that change it must copy it."""
        folder = tmp_path_factory.mktemp("exported") / "network"
        onnx.export(model, policy, folder, example=inputs(40), threads=1)
        return folder
