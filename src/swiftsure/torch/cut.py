"""Cutting an existing network at named submodules, so that it can stop there.

`torch.fx` traces the network once. Every value that is computed before a cut and used after it
becomes part of the state.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import fx, nn

from swiftsure import checks
from swiftsure.torch.staged import Staged

__all__ = ["CutModel", "cut"]


class CutModel(Staged):
    """A traced network in pieces: piece k runs up to the k-th cut, the last one to the end."""

    def __init__(self, pieces: Sequence[nn.Module], heads: Sequence[nn.Module]) -> None:
        super().__init__()
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

    def head(self, exit_index: int, state: Any) -> Any:
        """Run the head on the value at the cut; the last exit is the network's own output."""
        return state[0] if exit_index == self.n_exits - 1 else self.heads[exit_index](state[0])


def cut(model: nn.Module, at: Sequence[str], heads: Sequence[nn.Module]) -> CutModel:
    """Return a network as a staged model with an exit after each named submodule.

    The network's own weights are shared, not copied; its own output is the last exit.

    Parameters
    ----------
    model : nn.Module
        Traceable by `torch.fx`: no control flow that depends on values.
    at : names of submodules
        In the order in which they run, each run once; `dict(model.named_modules())` lists them.
    heads : one module a cut
        From the submodule's output to what the network's own head gives.

    Raises
    ------
    ValueError
        If a name is unknown, is not run, or is run more than once, or if tracing fails; the error
        says what to do.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    >>> model = cut(network, at=["1"], heads=[nn.Linear(8, 3)])
    >>> model.n_exits
    2
    """
    if len(at) != len(heads):
        raise ValueError(f"`heads` must be as many as cuts, {len(at)}, but got {len(heads)}.")
    if not at:
        raise ValueError("`at` must name at least one submodule.")
    names = dict(model.named_modules())
    for name in at:
        checks.known("at", name, names)
    graph = _traced(model, at)
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    cuts = [_node_of(nodes, name) for name in at]
    if any(position[a] >= position[b] for a, b in pairwise(cuts)):
        raise ValueError("`at` must name submodules in the order in which they run.")
    bounds = [0, *(position[node] + 1 for node in cuts), len(nodes)]
    inputs = [node for node in nodes if node.op == "placeholder"]
    pieces, live = [], inputs
    for k in range(len(bounds) - 1):
        segment = [
            n for n in nodes[bounds[k] : bounds[k + 1]] if n.op not in ("placeholder", "output")
        ]
        if k < len(cuts):
            later = nodes[bounds[k + 1] :]
            after = _live_after(nodes[: bounds[k + 1]], later)
            results = [cuts[k], *after]
        else:
            output = nodes[-1].args[0]
            if not isinstance(output, fx.Node):
                raise ValueError("`model` must return one tensor, or wrap it so that it does.")
            after, results = [], [output]
        pieces.append(_piece(model, segment, live, results))
        live = after
    return CutModel(pieces, heads)


class _Tracer(fx.Tracer):
    """Keeps the submodules that are cut at whole, and traces the others as usual."""

    def __init__(self, whole: Sequence[str]) -> None:
        super().__init__()
        self.whole = set(whole)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        parents = {name for name in self.whole if name.startswith(f"{module_qualified_name}.")}
        if module_qualified_name in self.whole:
            return True
        return not parents and super().is_leaf_module(m, module_qualified_name)


def _traced(model: nn.Module, whole: Sequence[str]) -> fx.Graph:
    try:
        return _Tracer(whole).trace(model)
    except Exception as error:
        raise ValueError(
            f"`model` cannot be traced by torch.fx ({type(error).__name__}: {error}). Mark the part"
            " that depends on values with torch.fx.wrap, or write a Staged subclass: begin, advance"
            " and head are a few lines each."
        ) from error


def _node_of(nodes: list[fx.Node], name: str) -> fx.Node:
    found = [node for node in nodes if node.op == "call_module" and node.target == name]
    if len(found) != 1:
        times = "not run" if not found else f"run {len(found)} times"
        raise ValueError(
            f"`at`: submodule {name!r} is {times} by the network; cut at one run once."
        )
    return found[0]


def _live_after(before: list[fx.Node], later: list[fx.Node]) -> list[fx.Node]:
    """Return the tensors computed before a cut that are used after it, weights aside.

    A number read off a tensor's shape is not kept: it would not follow the samples. The tensor is,
    and the number is read off it again.
    """
    used = {
        tensor
        for node in later
        for source in node.all_input_nodes
        for tensor in _tensors_behind(source)
    }
    return [node for node in before if node in used and node.op != "get_attr"]


def _tensors_behind(node: fx.Node) -> set[fx.Node]:
    if not _is_shape(node):
        return {node}
    return {tensor for source in node.all_input_nodes for tensor in _tensors_behind(source)}


def _is_shape(node: fx.Node) -> bool:
    """Whether a value is a shape, a length, or computed from such alone."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    plain = getattr(node.target, "__module__", "") in ("_operator", "builtins")
    sources = node.all_input_nodes
    return plain and bool(sources) and all(_is_shape(source) for source in sources)


def _piece(
    model: nn.Module, segment: list[fx.Node], live: list[fx.Node], results: list[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in live:
        known[node] = graph.placeholder(node.name)

    def resolve(node: fx.Node) -> fx.Node:
        if node not in known:  # a weight, or a length, that an earlier piece also uses
            known[node] = graph.node_copy(node, resolve)
        return known[node]

    for node in segment:
        known[node] = graph.node_copy(node, resolve)
    graph.output(tuple(resolve(node) for node in results))
    graph.lint()
    return fx.GraphModule(model, graph)
