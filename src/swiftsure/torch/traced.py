"""`CompiledStep`: a function of tensors, traced to operations before it is compiled.

`torch.compile` reads Python code, and would break its graph wherever a network is stopped or
continued in the middle of its forward. So the function runs once on fake tensors, and what is
compiled are the operations that it called, for batches of any size.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils import _pytree as pytree

from swiftsure.run.graphs.recorder import no_autocast_cache

__all__ = ["CompiledStep"]

Function = Callable[[list[Tensor]], Any]


class CompiledStep:
    """Runs a function of tensors with the batch first, compiled on the first calls.

    Parameters
    ----------
    function : callable
        Its Python code must not depend on the values of tensors.
    name : str
    dynamic : bool
        One compiled function for all sizes from 2 on, instead of one for each size.
    """

    def __init__(self, function: Function, name: str, *, dynamic: bool) -> None:
        self._function, self._name, self._dynamic = function, name, dynamic
        self._compiled: dict[int, tuple[Callable[..., Any], pytree.TreeSpec]] = {}
        self._lock = threading.RLock()

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Run the function."""
        n = tensors[0].shape[0]
        key = min(n, 2) if self._dynamic else n
        found = self._compiled.get(key)
        if found is None:
            with self._lock:
                found = self._compiled.get(key)
                if found is None:
                    found = self._compiled[key] = self._compile(tensors, key)
        run, structure = found
        if self._dynamic and n > 1:
            for tensor in tensors:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        kind = tensors[0].device.type
        if not torch.is_autocast_enabled(kind):
            return pytree.tree_unflatten(run(*tensors), structure)
        with torch.autocast(kind, enabled=False):  # the operations hold its casts
            return pytree.tree_unflatten(run(*tensors), structure)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _compile(
        self, tensors: list[Tensor], size: int
    ) -> tuple[Callable[..., Any], pytree.TreeSpec]:
        batch = DimDynamic.DYNAMIC if self._dynamic and size > 1 else DimDynamic.STATIC
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        fakes = []
        for tensor in tensors:
            sizes = [batch, *[DimDynamic.STATIC] * (tensor.ndim - 1)]
            form: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
            like = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            fakes.append(mode.from_tensor(like, symbolic_context=form))
        structure: list[pytree.TreeSpec] = []

        def flat(*given: Tensor) -> list[Any]:
            leaves, spec = pytree.tree_flatten(self._function(list(given)))
            structure.append(spec)
            return leaves

        trace = make_fx(flat, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        with no_autocast_cache():
            operations = trace(*fakes)
        # PyTorch limits the number of graphs per code object, so each step gets its own.
        forward = type(operations).forward
        forward.__code__ = forward.__code__.replace(co_name=self._name)
        return torch.compile(operations, dynamic=False), structure[-1]
