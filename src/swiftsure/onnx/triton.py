"""A Triton model repository: an ONNX model per stage and head, and a Python model that runs them.

    NAME/config.pbtxt, NAME/1/model.py          calls the stages (business logic scripting)
    NAME/1/exported/                            manifest and policy
    NAME_stage_1/config.pbtxt, 1/model.onnx     and so on
    NAME_head_1/config.pbtxt, 1/model.onnx

Triton's Python backend needs `pip install 'swiftsure[onnx]'` in its environment.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from swiftsure._lib.files import write_text
from swiftsure.onnx.folder import (
    CHECK,
    MANIFEST,
    POLICY,
    RUNTIME,
    RuntimeConfig,
    folder_policy,
    read_manifest,
)
from swiftsure.onnx.runtime import EarlyExit
from swiftsure.onnx.stages import Stages, State
from swiftsure.onnx.trees import leaves

__all__ = ["TritonStages", "load", "write_repository"]

EXPORTED = "exported"

DTYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}
ONNX_DTYPES = {"float": "float32", "double": "float64"}


def write_repository(
    folder: str | os.PathLike[str],
    repository: str | os.PathLike[str],
    name: str = "early_exit",
    *,
    max_batch_size: int = 64,
) -> None:
    """Write an exported folder, with its policy, as a Triton model repository.

    The inputs of the model `name` are called input_0, input_1, …, its outputs output_0, … and
    `exits`.
    """
    source, target = Path(folder), Path(repository)
    manifest = read_manifest(source)
    folder_policy(source)  # refuses a folder without one
    for file in {part.stage for part in manifest.parts} | {part.head for part in manifest.parts}:
        if file is not None:
            _write_onnx(source / file, target / _model_name(name, file), max_batch_size)
    place = target / name / "1"
    (place / EXPORTED).mkdir(parents=True, exist_ok=True)
    for file in (MANIFEST, POLICY, RUNTIME, CHECK):
        shutil.copyfile(source / file, place / EXPORTED / file)
    shutil.copyfile(Path(__file__).parent / "triton_model.py.txt", place / "model.py")
    inputs = [(f"input_{k}", *_leaf(leaf)) for k, leaf in enumerate(leaves(manifest.inputs))]
    outputs = [(f"output_{k}", *_leaf(leaf)) for k, leaf in enumerate(leaves(manifest.outputs))]
    outputs.append(("exits", "int64", [1]))
    config = _config(name, "backend", "python", max_batch_size, inputs, outputs)
    config += "dynamic_batching { max_queue_delay_microseconds: 1000 }\n"
    write_text(target / name / "config.pbtxt", config)


Call = Callable[[str, dict[str, NDArray[Any]], list[str]], list[NDArray[Any]]]
"""(model name, inputs by name, names of outputs) -> arrays of those outputs."""


class TritonStages(Stages):
    """Stages that Triton runs, called from the Python backend.

    Parameters
    ----------
    repository : path
    name : str
        Name of the model in the repository.
    call : callable
        Runs one of the repository's models.
    """

    def __init__(self, repository: Path, name: str, call: Call) -> None:
        self.repository = repository
        self.name = name
        self._call = call
        place = repository / name / "1" / EXPORTED
        super().__init__(read_manifest(place, check_files=False), place, RuntimeConfig())

    def _session(self, name: str) -> Callable[[State], list[NDArray[Any]]]:
        model = _model_name(self.name, name)
        config = (self.repository / model / "config.pbtxt").read_text("utf-8")
        inputs, outputs = _declared(config, "input"), _declared(config, "output")

        def run(state: State) -> list[NDArray[Any]]:
            given = {}
            for each, is_number in inputs.items():
                array = state[int(each.rpartition("_")[2])]
                given[each] = array[:, None] if is_number else array
            found = self._call(model, given, list(outputs))
            numbers = zip(found, outputs.values(), strict=True)
            return [array.reshape(len(array)) if number else array for array, number in numbers]

        return run


def load(repository: Path, name: str, call: Call) -> EarlyExit:
    """Return the runtime of a repository's model, whose stages `call` runs."""
    stages = TritonStages(repository, name, call)
    return EarlyExit(stages, folder_policy(stages.folder))


def _declared(config: str, which: str) -> dict[str, bool]:
    """Return the names of a model's inputs or outputs, and whether each is a number per sample."""
    block = re.search(rf"^{which} \[\n(.*?)\n\]$", config, re.DOTALL | re.MULTILINE)
    if block is None:
        raise ValueError(f"A config.pbtxt of the repository has no {which}.")
    parts = block[1].split("},\n")
    return {part.split('"')[1]: "reshape" in part for part in parts}


def _model_name(name: str, file: str) -> str:
    return f"{name}_{file.removesuffix('.onnx').replace('-', '_')}"


def _write_onnx(source: Path, target: Path, max_batch_size: int) -> None:
    (target / "1").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target / "1" / "model.onnx")
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])

    def described(values: Any) -> list[tuple[str, str, list[int]]]:
        found = []
        for each in values:
            kind = each.type.removeprefix("tensor(").removesuffix(")")
            sizes = [size if isinstance(size, int) else -1 for size in each.shape[1:]]
            found.append((each.name, ONNX_DTYPES.get(kind, kind), sizes))
        return found

    inputs, outputs = described(session.get_inputs()), described(session.get_outputs())
    config = _config(target.name, "platform", "onnxruntime_onnx", max_batch_size, inputs, outputs)
    write_text(target / "config.pbtxt", config)


def _config(
    name: str,
    key: str,
    value: str,
    max_batch_size: int,
    inputs: list[tuple[str, str, list[int]]],
    outputs: list[tuple[str, str, list[int]]],
) -> str:
    """Return a config.pbtxt."""

    def block(which: str, values: list[tuple[str, str, list[int]]]) -> str:
        parts = []
        for each, dtype, sizes in values:
            # Triton wants at least one size; a number per sample is reshaped to none.
            dims = sizes or [1]
            reshape = "" if sizes else "\n    reshape: { shape: [ ] }"
            parts.append(
                f'  {{\n    name: "{each}"\n    data_type: {DTYPES[dtype]}\n'
                f"    dims: {dims}{reshape}\n  }}"
            )
        return f"{which} [\n" + ",\n".join(parts) + "\n]\n"

    return (
        f'name: "{name}"\n{key}: "{value}"\nmax_batch_size: {max_batch_size}\n'
        + block("input", inputs)
        + block("output", outputs)
    )


def _leaf(form: dict[str, Any]) -> tuple[str, list[int]]:
    return form["dtype"], form["shape"]
