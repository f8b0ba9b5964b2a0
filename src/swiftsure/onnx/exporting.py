"""`export`: writes the stages and heads of a PyTorch model as ONNX files, and checks them."""

import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swiftsure.certify.policy import Policy
from swiftsure.onnx.folder import CHECK, POLICY, Check, Manifest, Part, RuntimeConfig, write_folder
from swiftsure.onnx.graphs import quantise, write_graph
from swiftsure.onnx.runtime import ATOL, RTOL, EarlyExit, differences
from swiftsure.onnx.stages import Stages
from swiftsure.onnx.trees import describe
from swiftsure.torch.batches import register_batch_types, without_labels
from swiftsure.torch.costs import exit_flops
from swiftsure.torch.fingerprinting import fingerprint
from swiftsure.torch.modes import refuse_training, uncompiled
from swiftsure.torch.runtime import EarlyExit as TorchEarlyExit
from swiftsure.torch.staged import (
    Scored,
    StagedModel,
    batch_size,
    device_of,
    exit_outputs,
    plain_output,
    refuse_unstaged,
    rows_of,
)

__all__ = ["ExportError", "export"]

Array = NDArray[Any]

N_TRACED = 2
"""Samples to trace with: PyTorch would take a batch of 1 for a constant."""

N_KEPT = 8
"""Samples that the folder keeps, to check other providers with."""


class ExportError(ValueError):
    """A model cannot be exported, or gives other answers after it; the message says where."""


def export(
    model: StagedModel,
    policy: Policy | None,
    folder: str | os.PathLike[str],
    *,
    example: Any,
    int8: bool = False,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    threads: int | None = None,
) -> Manifest:
    """Write a model to a folder that `swiftsure.onnx.EarlyExit` runs without PyTorch.

    Every stage and every head becomes one ONNX file with a dynamic batch size. Other sizes are
    those of the example. The exported model then runs the example, alone and as single samples, and
    must take the same exits and give the same outputs as the PyTorch model.

    Parameters
    ----------
    model : StagedModel
        In evaluation mode.
    policy : Policy, optional
        Made for this model, in float32. Without one, collect a record from the folder and put
        its policy there with `save_policy`.
    folder : path
        Created if it does not exist. The files of an earlier export in it are replaced.
    example
        A batch of at least 2 samples, as the model takes it. The more samples, the more the
        check says; 8 of them are kept in the folder.
    int8 : bool
        Quantise matrix products: weights beforehand, activations as they come. The exported model
        is then another one, so `policy` must be None: calibrate on a record of the folder. It runs
        one sample at a time, since the scale of a tensor would depend on the whole batch.
    providers, threads
        What `EarlyExit.load` uses by default.

    Returns
    -------
    manifest : Manifest
        What the folder holds, and how far outputs are from those of PyTorch.

    Raises
    ------
    ExportError
        If a stage or head cannot be exported; the message names the operator. Also if exits differ
        or outputs are beyond a tolerance of 1e-4 + 0.1 %.
    ValueError
        If the policy was made for another model.
    """
    refuse_unstaged(model)
    refuse_training(model)
    register_batch_types()
    config = RuntimeConfig(providers=list(providers), threads=threads)
    example = without_labels(example)
    n = batch_size(example)
    if n < N_TRACED:
        raise ValueError(f"`example` must hold at least {N_TRACED} samples, but got {n}.")
    torch_fast = _torch_runtime(model, policy, int8)
    with torch.no_grad(), uncompiled(model) if isinstance(model, nn.Module) else torch.no_grad():
        answers = _answers(model, example)
        outputs = [describe(answer.output, "A head's output") for answer in answers]
        _same_form(outputs)
        with tempfile.TemporaryDirectory() as made:
            place = Path(made)
            parts = _write_parts(model, example, place)
            manifest = Manifest(
                model=type(model).__name__,
                parts=parts,
                inputs=describe(_as_arrays(example)),
                outputs=outputs[0],
                scored=answers[0].confidence is not None,
                network=_network(model, policy),
                check=None,
                int8=int8,
                flops=exit_flops(model, _rows(example, 0, 1)).tolist(),
                files={},
            )
            if int8:
                _quantise(place, manifest)
            stages = Stages(manifest, place, RuntimeConfig(threads=threads))
            if not int8:
                check = _compared(stages, example, answers, policy, torch_fast)
                manifest = manifest.model_copy(update={"check": check})
            np.savez(place / CHECK, allow_pickle=False, **_kept(example, answers))
            if policy is not None:
                policy.save(place / POLICY)
            return write_folder(place, Path(folder), manifest, config)


def _torch_runtime(model: StagedModel, policy: Policy | None, int8: bool) -> Any:
    """Return the PyTorch runtime, which refuses policies of other models."""
    if policy is None:
        return None
    if int8:
        raise ValueError(
            "`policy` must be None with int8, because quantised stages are another model: export"
            " them, collect a record with `swiftsure collect FOLDER`, calibrate, and save the"
            " policy with `swiftsure.onnx.save_policy`."
        )
    if policy.dtype not in (None, "float32"):
        raise ValueError(
            f"`policy` must be made for float32, in which exported stages run, but is for"
            f" {policy.dtype}: collect without `dtype` and calibrate again."
        )
    return TorchEarlyExit(model, policy)


def _network(model: StagedModel, policy: Policy | None) -> str | None:
    if not isinstance(model, nn.Module):
        return None
    return fingerprint(
        model,
        temperatures=None if policy is None else policy.temperatures,
        dtype=None if policy is None else policy.dtype,
    )


# ------------------------------------------------------------------------------- what it answers


def _answers(model: StagedModel, example: Any) -> list[Scored]:
    """Return the arrays of every exit's output and its own confidence, or None for that."""
    found = []
    for output in exit_outputs(model, example):
        own = output.confidence.cpu().numpy() if isinstance(output, Scored) else None
        found.append(Scored(_as_arrays(plain_output(output)), own))  # type: ignore[arg-type]
    return found


def _as_arrays(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().cpu().numpy(), tree)


def _flat(tree: Any) -> list[Array]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, np.ndarray)]


def _same_form(forms: list[dict[str, Any]]) -> None:
    for k, form in enumerate(forms):
        if form != forms[0]:
            raise ExportError(
                f"Exits must return outputs of one form, but exit 1 returns {forms[0]} and exit"
                f" {k + 1} {form}."
            )


def _rows(tree: Any, first: int, stop: int) -> Any:
    return rows_of(tree, torch.arange(first, stop, device=device_of(tree)))


# ------------------------------------------------------------------------------------- the graphs


class _Stage(nn.Module):
    """One stage as a function of the tensors in the state before it."""

    def __init__(self, model: StagedModel, exit_index: int, state: Any, made: list[int]) -> None:
        super().__init__()
        self.model = model
        self.exit_index = exit_index
        self.leaves, self.structure = pytree.tree_flatten(state)
        self.made = made  # which tensors of the result it returns

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the next state that are not handed on."""
        state = _filled(self.leaves, self.structure, tensors)
        if self.exit_index == 0:
            state = self.model.begin(state)
        found = _tensors(self.model.advance(self.exit_index, state))
        return tuple(found[k] for k in self.made)


class _Head(nn.Module):
    """One head as a function of the tensors in the state."""

    def __init__(self, model: StagedModel, exit_index: int, state: Any) -> None:
        super().__init__()
        self.model = model
        self.exit_index = exit_index
        self.leaves, self.structure = pytree.tree_flatten(state)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the output, then the model's own confidence if there is one."""
        output = self.model.head(self.exit_index, _filled(self.leaves, self.structure, tensors))
        own = [output.confidence] if isinstance(output, Scored) else []
        # A head may hand on its input, which a graph may not.
        return tuple(each.clone() for each in [*_tensors(plain_output(output)), *own])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _filled(leaves: list[Any], structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a state with its tensors replaced; what else it holds is a constant."""
    rest = iter(tensors)
    filled = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(filled, structure)


def _write_parts(model: StagedModel, example: Any, place: Path) -> list[Part]:
    """Write the ONNX files of all stages and heads."""
    state = _rows(example, 0, N_TRACED)
    parts = []
    for k in range(model.n_exits):
        before = _tensors(state)
        after = model.advance(k, model.begin(state) if k == 0 else state)
        origins, made = _origins(before, _tensors(after))
        stage, head = f"stage-{k + 1}.onnx", f"head-{k + 1}.onnx"
        if made:
            with _explained(f"Stage {k + 1}"):
                write_graph(_Stage(model, k, state, made), before, place / stage)
        with _explained(f"The head of exit {k + 1}"):
            write_graph(_Head(model, k, after), _tensors(after), place / head)
        parts.append(Part(stage=stage if made else None, head=head, state=origins))
        state = after
    return parts


def _origins(before: list[Tensor], after: list[Tensor]) -> tuple[list[int], list[int]]:
    """Return where each tensor of a state comes from, as in `Part.state`, and which are new."""
    place = {id(tensor): k for k, tensor in enumerate(before)}
    made = [k for k, tensor in enumerate(after) if id(tensor) not in place]
    number = {k: i for i, k in enumerate(made)}
    origins = [
        number[k] if k in number else -1 - place[id(tensor)] for k, tensor in enumerate(after)
    ]
    return origins, made


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn errors of the exporter into one line that names the operator."""
    loud = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [each.level for each in loud]
    try:
        for each in loud:
            each.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch about itself
            yield
    except Exception as error:
        raise ExportError(f"{what} cannot be exported: {_reason(error)}.") from error
    finally:
        for each, level in zip(loud, levels, strict=True):
            each.setLevel(level)


OPERATOR = re.compile(r"(?:OpOverload\(op='|torch\.ops\.)(\w+(?:\.|::)\w+)")


def _reason(error: BaseException) -> str:
    """Return why an export failed, with the operator's name if there is one."""
    texts: list[str] = []
    each: BaseException | None = error
    while each is not None:
        texts.append(str(each))
        each = each.__cause__ or each.__context__
    operators = [match[1] for text in texts for match in OPERATOR.finditer(text)]
    if operators:
        return f"the operator {operators[-1]} has no ONNX form"
    if any("Constraints violated (batch)" in text for text in texts):
        return (
            "its batch size is a constant there. Use `x.shape[0]` in place of `len(x)`, and no"
            " numbers that depend on the batch"
        )
    lines = [line.strip() for line in texts[-1].splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"[:300].rstrip(".")


def _quantise(place: Path, manifest: Manifest) -> None:
    """Quantise the matrix products of all files."""
    names = [part.stage for part in manifest.parts] + [part.head for part in manifest.parts]
    counts = [quantise(place / name) for name in names if name is not None]
    if not any(counts):
        raise ExportError(
            "`int8` has no effect: the model has no matrix product with constant weights."
            " Convolutions are not quantised."
        )


# --------------------------------------------------------------------------------------- the check


def _compared(
    stages: Stages,
    example: Any,
    answers: list[Scored],
    policy: Policy | None,
    torch_fast: Any,
) -> Check:
    """Run the exported stages on the example, whole and as single samples, and compare."""
    n, arrays = batch_size(example), _as_arrays(example)
    expected = [_flat(answer.output) for answer in answers]
    near = 0
    try:
        largest = differences(stages, arrays, expected)
        one = _as_arrays(_rows(example, n - 1, n))
        single = [[array[-1:] for array in each] for each in expected]
        largest = max(largest, differences(stages, one, single))
        if policy is not None:
            near = _compare_exits(EarlyExit.unbound(stages, policy), torch_fast, example)
    except ValueError as error:
        raise ExportError(f"The export is not the same model: {error}") from None
    return Check(samples=n, largest_difference=largest, near_threshold=near)


def _compare_exits(fast: EarlyExit, torch_fast: Any, example: Any) -> int:
    """Raise if exits or outputs differ; return how many samples are too near to a threshold."""
    wanted, got = torch_fast(example), fast(_as_arrays(example))
    exits, seen = wanted.exits.cpu().numpy(), wanted.confidences.cpu().numpy()
    near = fast.compare_exits(got.exits, exits, seen)
    same = exits == got.exits
    arrays = zip(_flat(_as_arrays(wanted.outputs)), got.raw, strict=True)
    for two, one in arrays:
        close = np.isclose(one[same], two[same], rtol=RTOL, atol=ATOL, equal_nan=True)
        if not close.all():
            raise ValueError("Outputs under the policy differ after samples have left a batch.")
    return near


def _kept(example: Any, answers: list[Scored]) -> dict[str, Array]:
    """Return the samples that the folder keeps, with the answers of the PyTorch model."""
    few = slice(N_KEPT)
    found = {f"input_{k}": a[few] for k, a in enumerate(_flat(_as_arrays(example)))}
    for k, answer in enumerate(answers):
        for i, array in enumerate(_flat(answer.output)):
            found[f"output_{k}_{i}"] = array[few]
        if answer.confidence is not None:
            found[f"confidence_{k}"] = np.asarray(answer.confidence)[few]
    return found
