"""ONNX graphs of single modules: tracing, writing and quantising."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["quantise", "write_graph"]

MAX_EMBEDDED = 1 << 30
"""Weights beyond this many bytes go to a file of their own: an ONNX file holds at most 2 GB."""


def write_graph(module: nn.Module, tensors: Sequence[Tensor], path: Path) -> None:
    """Trace a function of tensors with a dynamic batch size, and write it.

    Inputs are named "state_0", "state_1", and so on; those that have no effect are left out.
    """
    _require_exporter()
    from onnxscript.optimizer import fold_constants, remove_unused_nodes

    batch = torch.export.Dim("batch")
    # Not left to torch.onnx.export, which falls back to a fixed batch size where this one fails.
    traced = torch.export.export(
        module.eval(), tuple(tensors), dynamic_shapes=(tuple({0: batch} for _ in tensors),)
    )
    program = torch.onnx.export(
        traced,
        dynamo=True,
        verbose=False,
        optimize=False,  # its rewriting rules take 1e-8 for 0 and remove such additions
        input_names=[f"state_{k}" for k in range(len(tensors))],
    )
    if program is None:
        raise RuntimeError("the exporter returned nothing")
    fold_constants(program.model)  # exact, and ONNX Runtime fuses more afterwards
    remove_unused_nodes(program.model)
    inputs = program.model.graph.inputs
    for value in [each for each in inputs if not each.uses() and not each.is_graph_output()]:
        inputs.remove(value)
    _forget_source(program.model)
    size = sum(value.numel() * value.element_size() for value in module.state_dict().values())
    program.save(path, external_data=size > MAX_EMBEDDED)


def _forget_source(model: Any) -> None:
    """Remove what the exporter notes of each node: this machine's paths and lines of source."""
    for graph in (model.graph, *model.functions.values()):
        for node in graph.all_nodes():
            node.metadata_props.clear()


def quantise(path: Path) -> int:
    """Quantise the matrix products of a file to int8 and return how many there are."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path)
    # Shapes of the exporter no longer fit once the quantiser has transposed weights.
    model.graph.ClearField("value_info")
    root = logging.getLogger()  # which is told of each file that shapes could be inferred first
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        quantize_dynamic(model, path, op_types_to_quantize=["MatMul"], weight_type=QuantType.QInt8)
    finally:
        root.setLevel(level)
    nodes = onnx.load(path, load_external_data=False).graph.node
    return sum(node.op_type == "MatMulInteger" for node in nodes)


def _require_exporter() -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ImportError(
            "Exporting needs onnx and onnxscript: pip install 'swiftsure[export]'."
        ) from None
