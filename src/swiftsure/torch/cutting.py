"""`cut`: splits an existing network at named submodules so that it can exit there.

`torch.fx` traces the network once. Every per-sample value that is computed before a cut and used
after it becomes part of the state. Values shared by all samples are recomputed where they are used.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import fx, nn

from swiftsure._lib import checks
from swiftsure.torch.modes import evaluating
from swiftsure.torch.staged import Staged

__all__ = ["CutModel", "NotTraceableError", "cut"]


class NotTraceableError(ValueError):
    """A network cannot be traced by torch.fx."""


class CutModel(Staged):
    """A traced network in pieces: piece k runs up to cut k, and the last piece to the end."""

    network: nn.Module

    def __init__(
        self, network: nn.Module, pieces: Sequence[nn.Module], heads: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        # Not a submodule: its weights are those of the pieces.
        self.__dict__["network"] = network
        self.attached: dict[str, Any] = {}  # how `attach_heads` was called
        self.pieces = nn.ModuleList(pieces)
        self.heads = nn.ModuleList(heads)
        self.n_exits = len(pieces)

    def begin(self, batch: Any) -> Any:
        """Return the network's inputs as the first state."""
        return tuple(batch) if isinstance(batch, tuple | list) else (batch,)

    def advance(self, exit_index: int, state: Any) -> Any:
        """Run one piece; the value at the cut comes first in the state."""
        live = state if exit_index == 0 else state[1:]
        return self.pieces[exit_index](*live)

    def seen(self, exit_index: int, state: Any) -> Any:  # noqa: ARG002
        """Return what the head of a cut sees."""
        return state[0]

    def head(self, exit_index: int, state: Any) -> Any:
        """Run the head on the value at the cut; the last exit returns the network's own output."""
        return (
            state[0]
            if exit_index == self.n_exits - 1
            else self.heads[exit_index](self.seen(exit_index, state))
        )


def cut(model: nn.Module, at: Sequence[str], heads: Sequence[nn.Module]) -> CutModel:
    """Return a network as a staged model with an exit after each named submodule.

    The network's weights are shared, not copied, and its own output is the last exit. Every part
    keeps its train or eval mode.

    Parameters
    ----------
    model : nn.Module
        Traceable by `torch.fx`: no control flow that depends on values. It is traced in evaluation
        mode, and `forward` arguments with defaults keep their defaults.
    at : names of submodules
        In the order in which they run, each run once; `dict(model.named_modules())` lists them.
    heads : one module per cut
        Each maps the submodule's output to the form of the network's own output.

    Raises
    ------
    ValueError
        If a name is unknown, is not run, or is run more than once, or if tracing fails. The
        message says what to do.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    >>> model = cut(network, at=["1"], heads=[nn.Linear(8, 3)])
    >>> model.n_exits
    2
    """
    if len(at) != len(heads):
        raise ValueError(f"`heads` must have one module per cut, {len(at)}, but got {len(heads)}.")
    if not at:
        raise ValueError("`at` must name at least one submodule.")
    names = dict(model.named_modules())
    for name in at:
        checks.choice("at", name, names)
    graph = _trace(model, at)
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    cuts = [_find_node(nodes, name) for name in at]
    if any(position[a] >= position[b] for a, b in pairwise(cuts)):
        raise ValueError("`at` must name submodules in the order in which they run.")
    output = nodes[-1].args[0]
    if output in cuts:
        last = at[cuts.index(output)]
        raise ValueError(
            f"`at` must name submodules before the network's output, but {last!r} computes it: an"
            " exit there would be the last exit once more."
        )
    ends = [0, *(position[node] + 1 for node in cuts), len(nodes)]
    shared = _shared_nodes(nodes)
    pieces, live = [], [node for node in nodes if node.op == "placeholder"]
    for k, (start, end) in enumerate(pairwise(ends)):
        segment = [
            node
            for node in nodes[start:end]
            if node.op not in ("placeholder", "output") and node not in shared
        ]
        if k < len(cuts):
            after = _live_after(nodes[:end], nodes[end:], shared)
            results = [cuts[k], *after]
        else:
            if not isinstance(output, fx.Node):
                raise NotTraceableError(
                    f"`model` must return one tensor, but returns {type(output).__name__}: wrap it."
                )
            after, results = [], [output]
        pieces.append(_graph_module(model, segment, live, results))
        live = after
    staged = CutModel(model, pieces, heads)
    kept = {*model.modules(), *(part for head in heads for part in head.modules())}
    for part in staged.modules():
        if part not in kept:  # created here, so it takes the network's mode
            part.training = model.training
    return staged


class _Tracer(fx.Tracer):
    """Traces submodules at cuts as leaves, and fixes arguments with defaults to their defaults."""

    def __init__(self, whole: Sequence[str]) -> None:
        super().__init__()
        self.whole = set(whole)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        parents = {name for name in self.whole if name.startswith(f"{module_qualified_name}.")}
        if module_qualified_name in self.whole:
            return True
        return not parents and super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        function, arguments = super().create_args_for_root(root_fn, is_module, concrete_args)
        for i, argument in enumerate(arguments):
            if isinstance(argument, fx.Proxy) and argument.node.args:  # its default
                arguments[i] = argument.node.args[0]
                self.graph.erase_node(argument.node)
        return function, arguments


def _trace(model: nn.Module, whole: Sequence[str]) -> fx.Graph:
    try:
        with evaluating(model):  # else functional dropout would be traced in training mode
            return _Tracer(whole).trace(model)
    except Exception as error:
        raise NotTraceableError(
            f"`model` cannot be traced by torch.fx ({type(error).__name__}: {error}). Mark the part"
            " that depends on values with torch.fx.wrap, or write a Staged subclass: begin, advance"
            " and head are a few lines each."
        ) from error


def _find_node(nodes: list[fx.Node], name: str) -> fx.Node:
    found = [node for node in nodes if node.op == "call_module" and node.target == name]
    if len(found) != 1:
        times = "not run" if not found else f"run {len(found)} times"
        raise ValueError(
            f"`at` must name submodules that run once, but {name!r} is {times} by the network."
        )
    return found[0]


def _live_after(before: list[fx.Node], later: list[fx.Node], shared: set[fx.Node]) -> list[fx.Node]:
    """Return the per-sample values that are computed before a cut and used after it."""

    def behind(node: fx.Node) -> set[fx.Node]:
        if node not in shared:
            return {node}
        return {value for source in node.all_input_nodes for value in behind(source)}

    used = {value for node in later for source in node.all_input_nodes for value in behind(source)}
    return [node for node in before if node in used]


def _shared_nodes(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes that all samples share: weights, shapes, and what only depends on these.

    The state must only hold per-sample values, so shared ones are recomputed after a cut: a batch
    length, for example, is that of the remaining samples. Values that are written in place are not
    shared, since recomputing them would lose the writes.
    """
    written = {_in_place_target(node) for node in nodes}
    shared: set[fx.Node] = set()
    for node in nodes:
        made = node.op.startswith("call_") and node not in written
        if (
            node.op == "get_attr"
            or _reads_shape(node)
            or (made and all(source in shared for source in node.all_input_nodes))
        ):
            shared.add(node)
    return shared


def _reads_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    return node.target is getattr and node.args[1] in ("shape", "ndim", "device", "dtype")


def _in_place_target(node: fx.Node) -> Any:
    """Return the value that a node writes in place, by PyTorch's naming rules, or None."""
    if node.op not in ("call_method", "call_function"):
        return None
    if "out" in node.kwargs:
        return node.kwargs["out"]
    name = getattr(node.target, "__name__", str(node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    return node.args[0] if in_place or node.kwargs.get("inplace") else None


def _graph_module(
    model: nn.Module, segment: list[fx.Node], live: list[fx.Node], results: list[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in live:
        known[node] = graph.placeholder(node.name)

    def resolve(node: fx.Node) -> fx.Node:
        if node not in known:  # a shared value: recompute it here
            known[node] = graph.node_copy(node, resolve)
        return known[node]

    for node in segment:
        known[node] = graph.node_copy(node, resolve)
    graph.output(tuple(resolve(node) for node in results))
    graph.lint()
    return fx.GraphModule(model, graph)
