"""The matrix library for products of a few rows, chosen by timing both.

For float32 and 8 to 16 rows, cuBLAS may take ten times as long as cuBLASLt on an H200 (31 against
3 µs for a layer of width 224); for 24 rows and more, cuBLASLt may take twice as long. PyTorch warns
once that the choice of a library is experimental.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from swiftsure.run.graphs.conditional import no_garbage_collection

__all__ = ["faster_blas"]

LIBRARIES = ("cublas", "cublaslt")


@contextmanager
def faster_blas(weights: Sequence[Tensor], rows: int) -> Iterator[None]:
    """Use the library that multiplies so many rows by these weights in less time.

    Parameters
    ----------
    weights : (outputs, inputs) each
        Of linear layers on a GPU.
    rows : int
    """
    before = torch.backends.cuda.preferred_blas_library()
    sizes = tuple((weight.shape[0], weight.shape[1]) for weight in weights)
    try:
        if sizes:
            library = _faster(sizes, rows, weights[0].dtype, weights[0].device)
            torch.backends.cuda.preferred_blas_library(library)
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@cache
def _faster(
    sizes: tuple[tuple[int, int], ...], rows: int, dtype: torch.dtype, device: torch.device
) -> str:
    took = {}
    for library in LIBRARIES:
        try:
            torch.backends.cuda.preferred_blas_library(library)
        except RuntimeError:  # PyTorch was built without it
            continue
        took[library] = _seconds(sizes, rows, dtype, device)
    return min(took, key=took.__getitem__)


@torch.inference_mode()
def _seconds(
    sizes: tuple[tuple[int, int], ...], rows: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Return how long products of these sizes take, as a graph: launches would hide it."""
    pairs = [
        (
            torch.randn((rows, inputs), dtype=dtype, device=device),
            torch.randn((outputs, inputs), dtype=dtype, device=device),
        )
        for outputs, inputs in sizes
    ]

    def multiply() -> None:
        for given, weight in pairs:
            linear(given, weight)

    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        multiply()
    torch.cuda.synchronize(device)
    with (
        no_garbage_collection(),
        torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
    ):
        multiply()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
