"""Parts of captured graphs: `run_if` a flag on the device is true, and `run_beside` one another.

The device reads the flag, so the host never waits. Conditional parts are IF nodes of CUDA graphs
(CUDA 12.4 and later), made through `cuda.bindings`, which PyTorch's CUDA builds depend on. On an
H200 one costs 6 to 8 µs if it runs and 5 µs if it is skipped. Nest them where a skipped part makes
later ones pointless: those then cost nothing.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Bodies",
    "GraphPool",
    "can_branch",
    "can_choose",
    "no_garbage_collection",
    "run_beside",
    "run_if",
]

SET_FLAG = b"""
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(
    unsigned long long handle, unsigned int value);
extern "C" __global__ void set_flag(unsigned long long handle, const unsigned char *flag)
{
    cudaGraphSetConditional(handle, *flag != 0);
}
"""

_local = threading.local()


def run_if(
    flag: Tensor, body: Callable[[], None], otherwise: Callable[[], None] | None = None
) -> None:
    """Run a function if a flag is true when the graph that is being captured is replayed.

    While a `Recorder` warms up, both functions run in any case. Outside of a recorder this is a
    plain `if`. Tensors that the function allocates stay valid for later parts of the graph, but
    hold garbage if it was skipped; so write results into tensors allocated before.

    Parameters
    ----------
    flag : () or (1,)
        bool or int8, at a fixed address.
    body
        It may call `run_if`, and must not draw random numbers.
    otherwise : optional
        Runs if the flag is false; in graphs only where `can_choose()`.
    """
    bodies: Bodies | None = getattr(_local, "bodies", None)
    branches = [body] if otherwise is None else [body, otherwise]
    if bodies is None:
        for branch in branches[:1] if bool(flag) else branches[1:]:
            branch()
    elif not bodies.capturing:
        for branch in branches:
            branch()
    else:
        bodies.add(flag, branches)


def run_beside(aside: Callable[[], None], main: Callable[[], None]) -> None:
    """Run two functions, at the same time in a graph that is being captured.

    Neither may read or overwrite what the other writes. Tensors that `aside` reads must be kept
    until this returns.
    """
    bodies: Bodies | None = getattr(_local, "bodies", None)
    if bodies is None or not bodies.capturing:
        aside()
        main()
        return
    current, side = torch.cuda.current_stream(bodies.device), bodies.side()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        aside()
    main()
    current.wait_stream(side)


@cache
def can_branch() -> bool:
    """Return whether graphs can have conditional parts here."""
    if not torch.cuda.is_available():
        return False
    try:
        driver = import_module("cuda.bindings.driver")
        import_module("cuda.bindings.runtime")
        _set_flag(torch.cuda.current_device())
    except (ImportError, RuntimeError):
        return False
    return bool(_checked(driver.cuDriverGetVersion()) >= 12040)


@cache
def can_choose() -> bool:
    """Return whether `run_if` can have an `otherwise` here: in graphs it needs CUDA 12.8."""
    if not can_branch():
        return True
    driver = import_module("cuda.bindings.driver")
    return bool(_checked(driver.cuDriverGetVersion()) >= 12080)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector: freeing an old graph would invalidate a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphPool:
    """Memory of captured graphs; it stays valid while graphs that use it come and go."""

    def __init__(self, device: torch.device) -> None:
        self.id = torch.cuda.graph_pool_handle()
        flag = torch.zeros(1, device=device)
        self._graph = torch.cuda.CUDAGraph()  # PyTorch frees a pool that no graph uses
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with no_garbage_collection(), torch.cuda.stream(stream):
            self._graph.capture_begin(self.id, capture_error_mode="thread_local")
            flag.zero_()
            self._graph.capture_end()


class Bodies:
    """The streams and the memory of conditional parts, for graphs that never run together."""

    def __init__(self, device: torch.device) -> None:
        bare = str(device) == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if bare else device
        self._pool: Any = GraphPool(self.device)
        # By depth of nesting: a stream belongs to one capture until that ends.
        self._streams: list[Any] = []
        self._sides: list[Any] = []
        self._depth = 0
        _set_flag(self.device.index)  # before a capture

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured, rather than warmed up."""
        return torch.cuda.is_current_stream_capturing()

    def side(self) -> Any:
        """Return a stream for what runs beside the current one."""
        return self._at_depth(self._sides)

    def _at_depth(self, streams: list[Any]) -> Any:
        while len(streams) <= self._depth:
            streams.append(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        return streams[self._depth]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Make `run_if` add conditional parts to what is captured in the block."""
        before = getattr(_local, "bodies", None)
        _local.bodies = self
        try:
            yield
        finally:
            _local.bodies = before

    def add(self, flag: Tensor, branches: Sequence[Callable[[], None]]) -> None:
        """Capture functions into a new IF node, which follows what was captured so far."""
        runtime = import_module("cuda.bindings.runtime")
        if flag.element_size() != 1 or flag.numel() != 1:
            raise TypeError(
                f"`flag` must be one bool or int8, but got {flag.numel()} of {flag.dtype}."
            )
        outer = torch.cuda.current_stream(self.device).cuda_stream
        graphs = _add_if_node(runtime, outer, flag, self.device.index, len(branches))
        for graph, branch in zip(graphs, branches, strict=True):
            with self._inside(runtime, graph):
                branch()

    @contextmanager
    def _inside(self, runtime: Any, graph: Any) -> Iterator[None]:
        """Capture into a graph."""
        stream = self._at_depth(self._streams)
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        # The allocator knows the outer capture only, so the body's memory needs a pool of its own.
        own = nullcontext() if self._depth else torch.cuda.use_mem_pool(self._pool, self.device)
        self._depth += 1
        with own, torch.cuda.stream(stream):
            begin = runtime.cudaStreamBeginCaptureToGraph
            _checked(begin(stream.cuda_stream, graph, None, None, 0, mode))
            try:
                yield
            finally:
                self._depth -= 1
                _checked(runtime.cudaStreamEndCapture(stream.cuda_stream))


def _add_if_node(runtime: Any, stream: int, flag: Tensor, device: int, n_branches: int) -> Any:
    """Add a node that reads the flag and an IF node to a capture; return the IF node's graphs."""
    driver = import_module("cuda.bindings.driver")
    graph = _checked(runtime.cudaStreamGetCaptureInfo(stream))[2]
    handle = _checked(runtime.cudaGraphConditionalHandleCreate(graph, 0, 0))
    arguments = ((int(handle), flag.data_ptr()), (ctypes.c_uint64, ctypes.c_void_p))
    kernel = _set_flag(device)
    _checked(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))
    before = _checked(runtime.cudaStreamGetCaptureInfo(stream))[3]
    node = driver.CUgraphNodeParams()
    node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    node.conditional.handle = driver.CUgraphConditionalHandle(int(handle))
    node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
    node.conditional.size = n_branches
    node.conditional.ctx = _checked(driver.cuCtxGetCurrent())
    edges = (None,) if _takes_edges() else ()
    graph = driver.CUgraph(int(graph))
    before = [driver.CUgraphNode(int(each)) for each in before or ()]
    added = _checked(driver.cuGraphAddNode(graph, before, *edges, len(before), node))
    instead = runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
    _checked(
        runtime.cudaStreamUpdateCaptureDependencies(
            stream, [runtime.cudaGraphNode_t(int(added))], *edges, 1, instead
        )
    )
    return [runtime.cudaGraph_t(int(node.conditional.phGraph_out[k])) for k in range(n_branches)]


@cache
def _takes_edges() -> bool:
    """Return whether calls take the data of edges, as from CUDA 13 on."""
    return int(import_module("cuda.bindings").__version__.split(".")[0]) >= 13


@cache
def _set_flag(device: int) -> Any:
    """Return the kernel that copies a flag to the handle of an IF node, loaded on a device."""
    driver = import_module("cuda.bindings.driver")
    nvrtc = import_module("cuda.bindings.nvrtc")
    program = _checked(nvrtc.nvrtcCreateProgram(SET_FLAG, b"set_flag.cu", 0, [], []))
    _checked(nvrtc.nvrtcCompileProgram(program, 0, []))
    ptx = b" " * _checked(nvrtc.nvrtcGetPTXSize(program))
    _checked(nvrtc.nvrtcGetPTX(program, ptx))
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context
        module = _checked(driver.cuModuleLoadData(ptx))
        return _checked(driver.cuModuleGetFunction(module, b"set_flag"))


def _checked(result: Any) -> Any:
    """Return what a CUDA call gave besides its status; raise if it failed."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"A CUDA call failed: {status!r}.")
    return values[0] if len(values) == 1 else values
