"""`Stages`: an exported model whose stages and heads run in ONNX Runtime on NumPy arrays."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure._lib.files import shortened
from swiftsure.onnx.folder import Manifest, Part, RuntimeConfig, read_manifest, read_runtime
from swiftsure.onnx.trees import arrays_in, build, samples_of

__all__ = ["Answer", "Stages", "provider_names"]

Array = NDArray[Any]
State = list[Array]

SHORT_NAMES = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}
STATE = re.compile(r"state_[0-9]{1,4}")
"""Names of the inputs of stages and heads."""

OPTIONS = {"CUDAExecutionProvider": {"use_tf32": "0"}}
"""Provider options that keep float32 products in float32."""


class Answer(NamedTuple):
    """What a head returned: its arrays, and the model's own confidence, (n,), if it has one."""

    arrays: list[Array]
    confidence: NDArray[np.float32] | None


class Stages:
    """The stages and heads of an exported model.

    A state is a list of arrays with the batch first. Several threads may share one instance.

    Parameters
    ----------
    manifest : Manifest
    folder : path
    config : RuntimeConfig
    """

    def __init__(self, manifest: Manifest, folder: Path, config: RuntimeConfig) -> None:
        self.manifest, self._config = manifest, config
        self.n_exits = manifest.n_exits
        self.providers = provider_names(config.providers)
        self.folder = folder
        self._options = _session_options(config.threads)
        # Dynamic quantisation scales a whole tensor, so a sample's outputs would depend on the
        # others in its batch: quantised stages run one sample at a time.
        self._single = manifest.int8
        self._stages = [self._stage(part) for part in manifest.parts]
        self._heads = [self._session(part.head) for part in manifest.parts]

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        providers: str | Sequence[str] | None = None,
        threads: int | None = None,
    ) -> "Stages":
        """Return the stages in a folder that `export` wrote; parameters as for `EarlyExit.load`."""
        place = Path(folder)
        manifest, config = read_manifest(place), read_runtime(place)
        if providers is not None:
            given = [providers] if isinstance(providers, str) else list(providers)
            config = config.model_copy(update={"providers": given})
        if threads is not None:
            config = config.model_copy(update={"threads": checks.count("threads", threads)})
        return cls(manifest, place, config)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let other processes load the same files, which are checked again."""
        return _reloaded, (self.manifest, self.folder.resolve(), self._config)

    def begin(self, batch: Any) -> State:
        """Return the arrays of a batch; raises if it does not have the form of the export."""
        return arrays_in(self.manifest.inputs, batch)

    def advance(self, exit_index: int, state: State) -> State:
        """Return the state at an exit, from the one before it."""
        return self._stages[exit_index](state)

    def head(self, exit_index: int, state: State) -> Answer:
        """Return the answer of an exit."""
        arrays = self._heads[exit_index](state)
        if not self.manifest.scored:
            return Answer(arrays, None)
        *arrays, confidence = arrays
        return Answer(arrays, confidence.astype(np.float32, copy=False))

    def select(self, state: State, index: NDArray[np.int64]) -> State:
        """Return the state of some of the samples."""
        return [array[index] for array in state]

    def output(self, arrays: Sequence[Any]) -> Any:
        """Return a head's arrays as the PyTorch model returns them: one array, a dict, a tuple."""
        return build(self.manifest.outputs, arrays)

    def empty_output(self) -> list[Array]:
        """Return the arrays of an output for no samples."""
        return samples_of(self.manifest.outputs, 0)

    def _stage(self, part: Part) -> Callable[[State], State]:
        """Return a function that runs a stage, and hands on the arrays that it does not change."""
        run = (lambda _: []) if part.stage is None else self._session(part.stage)

        def advance(state: State) -> State:
            made = run(state)
            return [made[k] if k >= 0 else state[-1 - k] for k in part.state]

        return advance

    def _session(self, name: str) -> Callable[[State], list[Array]]:
        chosen = [(each, OPTIONS.get(each, {})) for each in self.providers]
        try:
            session = ort.InferenceSession(self.folder / name, self._options, providers=chosen)
        except Exception as error:  # ONNX Runtime has classes of its own, of which it says nothing
            raise ValueError(f"{self.folder / name} cannot be run ({shortened(error)}).") from None
        # Inputs are named "state_0", "state_1", and so on; unused ones are not in the graph.
        names = [each.name for each in session.get_inputs()]
        if not all(STATE.fullmatch(each) for each in names):
            raise ValueError(f"{self.folder / name} is not a part that `export` wrote.")
        inputs = [(each, int(each.rpartition("_")[2])) for each in names]

        def run(state: State) -> list[Array]:
            found: list[Array] = session.run(
                None, {key: np.ascontiguousarray(state[place]) for key, place in inputs}
            )
            return found

        def run_each(state: State) -> list[Array]:
            rows = [run([array[k : k + 1] for array in state]) for k in range(len(state[0]))]
            return [np.concatenate(arrays) for arrays in zip(*rows, strict=True)]

        return run_each if self._single else run


def _reloaded(manifest: Manifest, folder: Path, config: RuntimeConfig) -> Stages:
    """Return stages that another process had loaded."""
    if read_manifest(folder) != manifest:
        raise ValueError(f"{folder} holds another model than when it was loaded.")
    return Stages(manifest, folder, config)


def provider_names(names: Sequence[str]) -> list[str]:
    """Return full names of execution providers, ending with the CPU's.

    Raises
    ------
    ValueError
        If the installed ONNX Runtime does not have one.
    """
    full = [SHORT_NAMES.get(name.lower(), name) for name in names]
    available = ort.get_available_providers()
    for name in full:
        if name not in available:
            raise ValueError(
                f"`providers`: this ONNX Runtime has {', '.join(available)}, but not {name}."
                " Install the package that has it, such as onnxruntime-gpu or"
                " onnxruntime-openvino, in place of onnxruntime."
            )
    cpu = SHORT_NAMES["cpu"]
    return full if cpu in full else [*full, cpu]


def _session_options(threads: int | None) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    # Every stage has its own threads; those of a finished stage must not spin beside the next's.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options
