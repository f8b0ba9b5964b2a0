"""`write_single_file`: one ONNX file that exits by itself, for single samples.

Stages, heads and decisions are nested in `If` nodes: what a sample does not need does not run, in
any ONNX Runtime (C++, phones, browsers), without Swiftsure.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swiftsure._lib import files
from swiftsure._lib.files import atomic_write
from swiftsure.onnx.folder import CHECK, POLICY
from swiftsure.onnx.runtime import EarlyExit
from swiftsure.onnx.scoring import MODEL_SCORE
from swiftsure.onnx.trees import arrays_in, build, leaf_names, leaves
from swiftsure.scores import SHIFT, STEPS, LearnedScore, patch, quantile

__all__ = ["OPSET", "write_single_file"]

OPSET = 18
"""The oldest opset in which every operation here has its form."""

EXIT, CONFIDENCE = "exit", "confidence"
"""Outputs of the file beside those of the model: where the sample left (0-based; int64), and with
which confidence (float32; NaN at the last exit, where nothing is decided)."""


def write_single_file(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    examples: Any = None,
    full: bool = False,
) -> Path:
    """Write an exported folder with its policy as one ONNX file that exits by itself.

    Its inputs are those of the model, for one sample; its outputs those of the model, then `exit`
    and `confidence`. The file then runs samples one by one and must take the same exits and give
    the same outputs as the stages in the folder.

    Parameters
    ----------
    folder : path
        Written by `export`, with a policy.
    path : path
        The file to write, such as "model.onnx".
    examples : optional
        A batch to check the file on, beside the samples that the folder keeps.
    full : bool
        Write the full model instead, which never exits early: to compare with.

    Returns
    -------
    path : Path

    Raises
    ------
    ValueError
        If the folder has no policy, its score has no ONNX form, or the file gives other answers
        than the stages.
    """
    import onnx
    import onnxruntime as ort

    fast = EarlyExit.load(folder)
    exits = [] if full else [k for k in range(fast.last) if fast.loop.can_exit(k)]
    model = _Writer(fast, exits).model()
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    content = model.SerializeToString()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    for batch in [_kept_samples(fast), *([] if examples is None else [examples])]:
        _compare(fast, session, batch, full)
    with atomic_write(Path(path)) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def _kept_samples(fast: EarlyExit) -> Any:
    with files.npz(fast.stages.folder / CHECK) as kept:
        n = sum(name.startswith("input_") for name in kept)
        return build(fast.stages.manifest.inputs, [kept[f"input_{k}"] for k in range(n)])


def _compare(fast: EarlyExit, session: Any, batch: Any, full: bool) -> None:
    """Raise unless a session answers every sample of a batch as the stages do."""
    inputs = arrays_in(fast.stages.manifest.inputs, batch)
    names = leaf_names(fast.stages.manifest.inputs, "input")
    for row in range(len(inputs[0])):
        one = [array[row : row + 1] for array in inputs]
        wanted_exit, wanted = _from_stages(fast, one, full)
        given = dict(zip(names, one, strict=True))
        known = {each.name for each in session.get_inputs()}
        *arrays, exit_, _ = session.run(None, {k: v for k, v in given.items() if k in known})
        if exit_[0] != wanted_exit:
            raise ValueError(
                f"Sample {row} takes exit {exit_[0] + 1} in the single file, but exit"
                f" {wanted_exit + 1} in the stages."
            )
        for got, array in zip(arrays, wanted, strict=True):
            if not np.allclose(got, array, rtol=1e-5, atol=1e-6, equal_nan=True):
                raise ValueError(
                    f"Sample {row} gets another output in the single file than in the stages (the"
                    f" largest difference is {np.abs(got - array).max():.3g})."
                )


def _from_stages(fast: EarlyExit, sample: list[Any], full: bool) -> tuple[int, list[Any]]:
    """Return the exit that one sample takes in the stages, and its arrays."""
    batch = build(fast.stages.manifest.inputs, sample)
    if full:
        return fast.last, fast.full_outputs(batch)
    answered = fast(batch)
    return int(answered.exits[0]), answered.raw


# ----------------------------------------------------------------------------------- the file


class _Nodes:
    """The nodes and constants of one graph, with names that no other graph has."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(
        self, operation: str, *inputs: str, name: str = "", outputs: int = 1, **attributes: Any
    ) -> str:
        """Add a node; return the name of its first output."""
        from onnx import helper

        output = name or f"{self.prefix}{operation}_{len(self.nodes)}"
        others = [f"{output}_{k}" for k in range(1, outputs)]
        self.nodes.append(helper.make_node(operation, inputs, [output, *others], **attributes))
        return output

    def constant(self, value: Any) -> str:
        """Return the name of a constant."""
        from onnx import numpy_helper

        name = f"{self.prefix}constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def double(self, value: float) -> str:
        """Return the name of a constant in float64."""
        return self.constant(np.float64(value))

    def cast(self, value: str, dtype: Any) -> str:
        """Return the name of a value in another dtype."""
        from onnx import helper

        return self("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def over(self, operation: str, value: str, *axes: int, keep: bool = False) -> str:
        """Return the name of a sum, mean or extremum over axes."""
        return self(operation, value, self.constant(np.array(axes, np.int64)), keepdims=int(keep))


class _Writer:
    """Puts the parts of a folder, and the decisions of its policy, into one graph."""

    def __init__(self, fast: EarlyExit, exits: Sequence[int]) -> None:
        self.fast = fast
        self.exits = exits
        self.manifest = fast.stages.manifest
        self.thresholds = fast.loop.thresholds
        self.outputs = [*leaf_names(self.manifest.outputs, "output"), EXIT, CONFIDENCE]
        self.imports: dict[str, int] = {"": OPSET}
        self.ir_version = 0

    def model(self) -> Any:
        """Return the whole file."""
        from onnx import helper

        names = leaf_names(self.manifest.inputs, "input")
        graph = self._from_stage(0, names)
        made = helper.make_graph(
            graph.nodes,
            "early_exit",
            [
                helper.make_tensor_value_info(name, _type(leaf["dtype"]), [1, *leaf["shape"]])
                for name, leaf in zip(names, leaves(self.manifest.inputs), strict=True)
            ],
            self._described(self.outputs),
            graph.constants,
        )
        model = helper.make_model(
            made,
            opset_imports=[helper.make_opsetid(*each) for each in self.imports.items()],
            ir_version=self.ir_version,
            producer_name="swiftsure",
        )
        helper.set_model_props(
            model,
            {
                "swiftsure.promise": str(self.fast.policy),
                "swiftsure.policy": (self.fast.stages.folder / POLICY).read_text("utf-8"),
            },
        )
        return model

    def _described(self, names: Sequence[str]) -> list[Any]:
        """Return the types of what every branch returns."""
        from onnx import helper

        of_all = [*leaves(self.manifest.outputs), {"dtype": "int64"}, {"dtype": "float32"}]
        shapes = [*([1, *leaf["shape"]] for leaf in of_all[:-2]), [1], [1]]
        return [
            helper.make_tensor_value_info(name, _type(leaf["dtype"]), shape)
            for name, leaf, shape in zip(names, of_all, shapes, strict=True)
        ]

    def _from_stage(self, exit_index: int, state: Sequence[str]) -> _Nodes:
        """Return the graph that starts with a stage and ends with `self.outputs` of any exit.

        Only the outermost graph may use these names; those inside have the exit's prefix.
        """
        graph = _Nodes(f"{exit_index}/")
        for k in range(exit_index, self.manifest.n_exits):
            state = self._advanced(graph, k, state)
            if k in self.exits or k == self.manifest.n_exits - 1:
                break
        names = self._names(exit_index)
        arrays = self._part(graph, f"{k}/head/", self.manifest.parts[k].head, state)
        if k == self.manifest.n_exits - 1:
            self._return(graph, k, arrays, graph.constant(np.array([np.nan], np.float32)), names)
            return graph
        confidence = self._confidence(graph, k, arrays)
        level = graph.constant(self.thresholds[k])
        reached = graph(
            "Greater" if self.fast.policy.strict else "GreaterOrEqual", confidence, level
        )
        leaving = _Nodes(f"{k}/exit/")
        self._return(leaving, k, arrays, confidence, [f"{k}/exit/{each}" for each in self.outputs])
        staying = self._from_stage(k + 1, state)
        self._either(graph, reached, leaving, staying, names, k)
        return graph

    def _names(self, exit_index: int) -> list[str]:
        return [each if exit_index == 0 else f"{exit_index}/{each}" for each in self.outputs]

    def _advanced(self, graph: _Nodes, k: int, state: Sequence[str]) -> list[str]:
        """Add a stage; return the names of the state after it."""
        part = self.manifest.parts[k]
        made = [] if part.stage is None else self._part(graph, f"{k}/stage/", part.stage, state)
        return [made[place] if place >= 0 else state[-1 - place] for place in part.state]

    def _part(self, graph: _Nodes, prefix: str, name: str, state: Sequence[str]) -> list[str]:
        """Add the graph of a file; return the names of its outputs."""
        import onnx
        from onnx import compose, inliner

        loaded = onnx.load(self.fast.stages.folder / name)
        whole = compose.add_prefix(inliner.inline_local_functions(loaded), prefix)
        self.ir_version = max(self.ir_version, whole.ir_version)
        for each in whole.opset_import:
            self.imports[each.domain] = max(each.version, self.imports.get(each.domain, 0))
        for value in whole.graph.input:
            place = int(value.name.rpartition("_")[2])
            graph("Identity", state[place], name=value.name)
        graph.nodes.extend(whole.graph.node)
        graph.constants.extend(whole.graph.initializer)
        return [value.name for value in whole.graph.output]

    def _return(
        self, graph: _Nodes, k: int, arrays: list[str], confidence: str, names: Sequence[str]
    ) -> None:
        """Hand out an exit's arrays, divided by its temperature, its number and its confidence."""
        arrays = arrays[: len(self.outputs) - 2]
        temperatures = self.fast.policy.temperatures
        if temperatures is not None and temperatures[k] != 1:
            arrays = [graph("Div", arrays[0], graph.constant(np.float32(temperatures[k])))]
        for value, name in zip([*arrays, graph.constant([k]), confidence], names, strict=True):
            graph("Identity", value, name=name)

    def _either(
        self,
        graph: _Nodes,
        reached: str,
        leaving: _Nodes,
        staying: _Nodes,
        names: Sequence[str],
        k: int,
    ) -> None:
        """Add the decision: `leaving` where the confidence reached the threshold."""
        from onnx import helper

        inner = [[f"{k}/exit/{each}" for each in self.outputs], self._names(k + 1)]
        branches = [
            helper.make_graph(each.nodes, name, [], self._described(outputs), each.constants)
            for each, name, outputs in zip((leaving, staying), ("exit", "stay"), inner, strict=True)
        ]
        condition = graph("Squeeze", reached)
        graph.nodes.append(
            helper.make_node(
                "If", [condition], names, then_branch=branches[0], else_branch=branches[1]
            )
        )

    def _confidence(self, graph: _Nodes, k: int, arrays: list[str]) -> str:
        """Add the score of an exit; return the name of the confidence, float32, (1,)."""
        score = self.fast.score
        if not isinstance(score, LearnedScore):
            return self._plain(graph, k, arrays, [score])[0]
        found = self._plain(graph, k, arrays, score.inputs)
        parts = [_Value(graph, graph.cast(each, np.float64)) for each in found]
        learned = score.at(_Functions, k, dict(zip(score.inputs, parts, strict=True)))
        return graph.cast(learned.name, np.float32)

    def _plain(self, graph: _Nodes, k: int, arrays: list[str], names: Sequence[str]) -> list[str]:
        """Add scores that were not learned; return the names of their values."""
        temperatures = self.fast.policy.temperatures
        temperature = 1.0 if temperatures is None else temperatures[k]
        of_logits = [each for each in names if each != MODEL_SCORE]
        shares = _softmax(graph, arrays[0], temperature) if of_logits else ""
        found = {each: self._of_shares(graph, shares, each) for each in of_logits}
        if MODEL_SCORE in names:
            found[MODEL_SCORE] = graph.cast(arrays[-1], np.float32)
        return [found[each] for each in names]

    def _of_shares(self, graph: _Nodes, shares: str, name: str) -> str:
        """Add a score of probabilities, or of each pixel's."""
        aggregate, _, of_pixel = name.partition("_")
        of_image = aggregate in AGGREGATES
        score = of_pixel if of_image else name
        if score not in SCORES:
            raise ValueError(
                f"The score {name!r} has no form in a single file: run the folder instead."
            )
        value = _clipped(graph, _rounded(graph, SCORES[score](graph, shares)))
        if of_image:
            shape = leaves(self.manifest.outputs)[0]["shape"][1:]
            pixels = graph.cast(value, np.float64)  # from float32, as the pixels' scores are
            value = _clipped(graph, AGGREGATES[aggregate](graph, pixels, *shape))
        return value


@dataclass(frozen=True)
class _Value:
    """A value of a graph in float64, with the arithmetic of arrays."""

    graph: _Nodes
    name: str

    def _with(self, operation: str, *others: "_Value | float", first: bool = True) -> "_Value":
        names = [
            each.name if isinstance(each, _Value) else self.graph.double(each) for each in others
        ]
        inputs = [self.name, *names] if first else [*names, self.name]
        return _Value(self.graph, self.graph(operation, *inputs))

    def __add__(self, other: "_Value | float") -> "_Value":
        return self._with("Add", other)

    def __radd__(self, other: float) -> "_Value":
        return self._with("Add", other, first=False)

    def __sub__(self, other: "_Value | float") -> "_Value":
        return self._with("Sub", other)

    def __rsub__(self, other: float) -> "_Value":
        return self._with("Sub", other, first=False)

    def __mul__(self, other: "_Value | float") -> "_Value":
        return self._with("Mul", other)

    def __rmul__(self, other: float) -> "_Value":
        return self._with("Mul", other, first=False)

    def __truediv__(self, other: "_Value | float") -> "_Value":
        return self._with("Div", other)

    def __rtruediv__(self, other: float) -> "_Value":
        return self._with("Div", other, first=False)

    def __neg__(self) -> "_Value":
        return self._with("Neg")


class _Functions:
    """What features call of numpy or torch, on values of a graph."""

    @staticmethod
    def clip(value: _Value, low: float, high: float) -> _Value:
        return value._with("Max", low)._with("Min", high)

    @staticmethod
    def exp(value: _Value) -> _Value:
        return value._with("Exp")

    @staticmethod
    def floor(value: _Value) -> _Value:
        return value._with("Floor")

    @staticmethod
    def log(value: _Value) -> _Value:
        return value._with("Log")

    @staticmethod
    def log1p(value: _Value) -> _Value:
        return (1.0 + value)._with("Log")


# ---------------------------------------------------------------------------------- the scores


def _softmax(graph: _Nodes, logits: str, temperature: float) -> str:
    """Return probabilities in float64; NaN for invalid logits."""
    scaled = graph("Div", graph.cast(logits, np.float64), graph.double(temperature))
    weights = graph("Exp", graph("Sub", scaled, graph.over("ReduceMax", scaled, 1, keep=True)))
    return graph("Div", weights, graph.over("ReduceSum", weights, 1, keep=True))


def _top1(graph: _Nodes, shares: str) -> str:
    return graph.over("ReduceMax", shares, 1)


def _top_diff(graph: _Nodes, shares: str) -> str:
    first, second = (graph.over("ReduceMax", each, 1) for each in _two_largest(graph, shares))
    return graph("Sub", first, second)


def _two_largest(graph: _Nodes, shares: str) -> list[str]:
    """Return the largest and the second largest, each with an axis of length 1."""
    two = graph("TopK", shares, graph.constant(np.array([2], np.int64)), outputs=2, axis=1)
    return [graph("Gather", two, graph.constant(np.array([k], np.int64)), axis=1) for k in (0, 1)]


def _entropy(graph: _Nodes, shares: str) -> str:
    positive = graph("Not", graph("Equal", shares, graph.double(0.0)))
    logs = graph("Log", graph("Where", positive, shares, graph.double(1.0)))
    total = graph.over("ReduceSum", graph("Mul", shares, logs), 1)
    n_classes = graph("Gather", graph("Shape", shares), graph.constant(1), axis=0)
    scale = graph("Log", graph.cast(n_classes, np.float64))
    return graph("Add", graph.double(1.0), graph("Div", total, scale))


def _rounded(graph: _Nodes, value: str) -> str:
    steps = graph.double(STEPS)
    shifted = graph("Add", graph("Mul", value, steps), graph.double(SHIFT))
    return graph("Div", graph("Floor", shifted), steps)


def _clipped(graph: _Nodes, value: str) -> str:
    within = graph("Min", graph("Max", value, graph.double(0.0)), graph.double(1.0))
    return graph.cast(within, np.float32)


SCORES: dict[str, Callable[[_Nodes, str], str]] = {
    "top1": _top1,
    "top_diff": _top_diff,
    "entropy": _entropy,
}
"""The scores of `swiftsure.scores` as nodes; classes are on axis 1."""


def _mean(graph: _Nodes, pixels: str, _rows: int, _columns: int) -> str:
    return graph.over("ReduceMean", pixels, 1, 2)


def _quantile(graph: _Nodes, pixels: str, rows: int, columns: int) -> str:
    n, q = rows * columns, _default(quantile, "q")
    below = min(int((n - 1) * q), n - 2) if n > 1 else 0
    flat = graph("Reshape", pixels, graph.constant(np.array([1, n], np.int64)))
    k = graph.constant(np.array([min(below + 2, n)], np.int64))
    lowest = graph("TopK", flat, k, outputs=2, axis=1, largest=0)
    one, two = (
        graph("Gather", lowest, graph.constant(min(place, n - 1)), axis=1)
        for place in (below, below + 1)
    )
    share = graph.double((n - 1) * q - below)
    return graph("Add", one, graph("Mul", graph("Sub", two, one), share))


def _patch(graph: _Nodes, pixels: str, rows: int, columns: int) -> str:
    size = _default(patch, "size")
    height, width = min(size, rows), min(size, columns)
    sums = graph("CumSum", graph("CumSum", pixels, graph.constant(1)), graph.constant(2))
    table = graph(
        "Pad", sums, graph.constant(np.array([0, 1, 1, 0, 0, 0], np.int64)), graph.double(0.0)
    )

    def corner(row: int, column: int) -> str:
        first = np.array([row, column], np.int64)
        last = np.array([row + rows + 1 - height, column + columns + 1 - width], np.int64)
        axes = graph.constant(np.array([1, 2], np.int64))
        return graph("Slice", table, graph.constant(first), graph.constant(last), axes)

    outer = graph("Add", corner(height, width), corner(0, 0))
    inner = graph("Add", corner(0, width), corner(height, 0))
    least = graph.over("ReduceMin", graph("Sub", outer, inner), 1, 2)
    return graph("Div", least, graph.double(float(height * width)))


AGGREGATES: dict[str, Callable[[_Nodes, str, int, int], str]] = {
    "mean": _mean,
    "quantile": _quantile,
    "patch": _patch,
}
"""The aggregates of `swiftsure.scores` over pixels, (1, rows, columns), as nodes."""


def _default(function: Callable[..., Any], name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def _type(dtype: str) -> int:
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
