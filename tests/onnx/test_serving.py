"""The ASGI application on the loopback, and the Triton repository."""

import importlib.util
import json
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime as ort
import pytest

from swiftsure import onnx
from swiftsure.onnx.triton import write_repository
from tests.torch.builders import inputs


def test_the_engine_answers_as_the_runtime_does(exported):
    pytest.importorskip("starlette")
    from swiftsure.serve import InvalidRequestError
    from swiftsure.serve.engines.onnx import OnnxEngine

    engine = OnnxEngine.load(exported)
    x = inputs(20).numpy()
    samples = [engine.inputs.sample(row.tolist()) for row in x]
    out = engine.fast(x)
    early, full = (engine.answer(samples, full=each) for each in (False, True))
    assert [each.exit for each in early] == out.exits.tolist()
    assert [each.content["prediction"] for each in early] == out.predictions.tolist()
    assert {each.exit for each in full} == {engine.n_exits - 1}
    assert len(engine.costs["flops"].exits) == engine.n_exits
    for sample, one, two in zip(samples, early, full, strict=True):
        differ = float(one.content["prediction"] != two.content["prediction"])
        assert engine.compare(sample, one, "zero_one").inconsistency == differ
        assert engine.compare(sample, two, "zero_one").inconsistency == 0.0
        assert 0 < one.confidence <= 1
    assert len({each.exit for each in early}) > 1
    with pytest.raises(InvalidRequestError, match="finite"):
        engine.inputs.sample([float("nan")] * 6)
    broken = engine.answer([np.full(6, np.nan, np.float32)], full=False)
    assert isinstance(broken[0], InvalidRequestError)
    engine.check(engine.policy)
    engine.install(engine.policy)
    engine.check_loss("zero_one")
    with pytest.raises(ValueError, match="logit maps"):
        engine.check_loss("miou")  # its audits would all fail


def test_the_application_starts_on_the_loopback(exported, tmp_path):
    pytest.importorskip("uvicorn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", (
        "import sys, os, uvicorn\n"
        "os.environ['SWIFTSURE_FOLDER'] = sys.argv[1]\n"
        "from swiftsure.serve.asgi import app\n"
        "assert 'torch' not in sys.modules\n"
        "uvicorn.run(app, port=int(sys.argv[2]), log_level='warning')"
    ), str(exported), str(port)]  # fmt: skip
    server = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"{url}/health") as answer:
                    assert json.load(answer)["status"] == "ok"
                break
            except urllib.error.URLError:
                assert server.poll() is None
                time.sleep(0.1)
        np.save(tmp_path / "x.npy", inputs(5).numpy())
        body = (tmp_path / "x.npy").read_bytes()

        def post(_):
            request = urllib.request.Request(f"{url}/predict", data=body)
            request.add_header("Content-Type", "application/x-npy")
            with urllib.request.urlopen(request) as answer:
                return [each["exit"] for each in json.load(answer)["answers"]]

        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(post, range(8)))
        assert found == [onnx.EarlyExit.load(exported)(inputs(5).numpy()).exits.tolist()] * 8
    finally:
        server.terminate()
        server.wait(20)


# ------------------------------------------------------------------------------------------ Triton


def fake_backend(repository):
    """Triton's Python module, which runs the repository's ONNX models with ONNX Runtime."""
    backend = types.ModuleType("triton_python_backend_utils")

    class Tensor:
        def __init__(self, name, array):
            self._name, self._array = name, array

        def name(self):
            return self._name

        def as_numpy(self):
            return self._array

    class InferenceResponse:
        def __init__(self, output_tensors, error=None):
            self._tensors, self._error = output_tensors, error

        def output_tensors(self):
            return self._tensors

        def has_error(self):
            return self._error is not None

        def error(self):
            return self._error

    class TritonError:
        def __init__(self, message):
            self._message = message

        def message(self):
            return self._message

    class InferenceRequest:
        def __init__(self, model_name, requested_output_names, inputs):
            self.model, self.wanted, self._inputs = model_name, requested_output_names, inputs

        def inputs(self):
            return self._inputs

        def exec(self):
            backend.called.append(self.model)
            session = ort.InferenceSession(repository / self.model / "1" / "model.onnx")
            given = {each.name(): each.as_numpy() for each in self._inputs}
            values = session.run(self.wanted, given)
            return InferenceResponse(
                [Tensor(*each) for each in zip(self.wanted, values, strict=True)]
            )

    backend.called = []
    for each in (Tensor, InferenceResponse, TritonError, InferenceRequest):
        setattr(backend, each.__name__, each)
    return backend


def test_a_triton_repository_runs_the_stages(exported, tmp_path, monkeypatch):
    write_repository(exported, tmp_path, "net", max_batch_size=16)
    models = sorted(path.name for path in tmp_path.iterdir())
    assert models == ["net", *(f"net_{kind}_{k}" for kind in ("head", "stage") for k in (1, 2, 3))]
    for name in models:
        config = (tmp_path / name / "config.pbtxt").read_text()
        assert f'name: "{name}"' in config
        assert "max_batch_size: 16" in config
        assert config.count("{") == config.count("}")
        model = "model.py" if name == "net" else "model.onnx"
        assert (tmp_path / name / "1" / model).is_file()
    main = (tmp_path / "net" / "config.pbtxt").read_text()
    assert 'backend: "python"' in main
    assert 'name: "exits"\n    data_type: TYPE_INT64\n    dims: [1]' in main
    assert 'name: "input_0"\n    data_type: TYPE_FP32\n    dims: [6]' in main

    backend = fake_backend(tmp_path)
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    spec = importlib.util.spec_from_file_location("model", tmp_path / "net" / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    served = module.TritonPythonModel()
    served.initialize({"model_repository": str(tmp_path / "net"), "model_name": "net"})
    x = inputs(20).numpy()
    request = backend.InferenceRequest("net", [], [backend.Tensor("input_0", x)])
    (response,) = served.execute([request])
    assert not response.has_error()
    found = {each.name(): each.as_numpy() for each in response.output_tensors()}
    expected = onnx.EarlyExit.load(exported)(x)
    assert found["exits"][:, 0].tolist() == expected.exits.tolist()
    np.testing.assert_allclose(found["output_0"], expected.outputs, rtol=1e-5)
    assert "net_head_3" in backend.called
    bad = backend.InferenceRequest("net", [], [backend.Tensor("input_0", x[:, :2])])
    assert "shape" in served.execute([bad])[0].error().message()


def test_a_repository_needs_a_policy(exported, tmp_path):
    import shutil

    folder = shutil.copytree(exported, tmp_path / "copy")
    (folder / "policy.json").unlink()
    with pytest.raises(ValueError, match=r"holds no policy\.json"):
        write_repository(folder, tmp_path / "r")
