"""A decoder's blocks as they run fastest: merged weights, folded queries, one compiled function.

Decoding one token reads every weight once, so few large products beat many small ones. A block here
is the model's own with some parts replaced, never a rewritten `forward`:

- linear layers with the same input (`Family.merged`) become one product. Their weights move next to
  each other in memory, and the model's own layers become views of them, so nothing is stored twice
  and changed values are seen by both;
- queries that share keys and values become more positions of one query, so that attention need not
  repeat the keys and values of the whole cache;
- all blocks run through one compiled function, since they differ only in weights.
"""

import copy
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swiftsure.text.families import Family
from swiftsure.text.static_cache import Spot
from swiftsure.text.twins import replace_submodule, shallow_copy

if TYPE_CHECKING:
    from swiftsure.text.decoder import Decoder

__all__ = ["FastBlocks", "run_block"]

FOLDED = "swiftsure_folded"
"""Name of our attention function in transformers."""


def run_block(
    block: nn.Module, states: Tensor, given: Mapping[str, Any], spot: Spot, cache: str
) -> Tensor:
    """Return the states after a block; `cache` is the name of its argument for the cache."""
    output = block(states, **given, **{cache: spot.view()})
    after: Tensor = output[0] if isinstance(output, tuple) else output
    return after


class FastBlocks:
    """The blocks of a decoder, compiled.

    Parameters
    ----------
    decoder : Decoder
    """

    def __init__(self, decoder: "Decoder") -> None:
        self._decoder = decoder
        self._blocks: list[nn.Module] = []
        self._compiled: dict[Hashable, Callable[..., Tensor]] = {}

    def refresh(self) -> None:
        """Merge weights that are not yet next to each other: at first, and after they moved."""
        decoder = self._decoder
        groups = [_layers(block, decoder.family.merged) for block in decoder.blocks]
        if self._blocks and all(_adjacent(*group.values()) for each in groups for group in each):
            return
        self._blocks = [
            _fast_block(block, each, decoder.family)
            for block, each in zip(decoder.blocks, groups, strict=True)
        ]

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks before they are compiled."""
        return self._blocks

    def run(self, index: int, states: Tensor, given: Mapping[str, Any], spot: Spot) -> Tensor:
        """Run a block, as `run_block` does."""
        fixed = states.device.type == "cuda"
        # PyTorch limits how often one function is compiled, so each kind of call has its own.
        key = tuple(states.shape) if fixed else (spot.rows is None, len(states) == 1)
        if key not in self._compiled:
            self._compiled[key] = _compile(f"block_{len(self._compiled)}", dynamic=not fixed)
        return self._compiled[key](
            self._blocks[index], states, given, spot, self._decoder.family.cache
        )


def _compile(name: str, *, dynamic: bool) -> Callable[..., Tensor]:
    def run(
        block: nn.Module, states: Tensor, given: Mapping[str, Any], spot: Spot, cache: str
    ) -> Tensor:
        return run_block(block, states, given, spot, cache)

    run.__code__ = run.__code__.replace(co_name=name)
    return torch.compile(run, dynamic=dynamic)


# ----------------------------------------------------------------------------------------- weights


def _layers(block: nn.Module, groups: Sequence[Sequence[str]]) -> list[dict[str, nn.Linear]]:
    """Return the linear layers of a block that can be merged, by name, for each group."""
    named = dict(block.named_modules())
    found = []
    for names in groups:
        layers = {name: named[name] for name in names if type(named.get(name)) is nn.Linear}
        if len(layers) == len(names) and len({_kind(each) for each in layers.values()}) == 1:
            found.append(layers)
    return found


def _kind(layer: Any) -> Hashable:
    """Return what layers must have in common to be merged."""
    weight = layer.weight
    return weight.shape[1], weight.dtype, weight.device, layer.bias is None


def _adjacent(*layers: nn.Linear) -> bool:
    """Return whether layers' weights, and biases, lie one after the other in memory."""
    return all(_one_after_the_other(each) for each in _tensors(layers))


def _tensors(layers: Sequence[nn.Linear]) -> list[list[Tensor]]:
    """Return the weights of some layers, and their biases if they have any."""
    biases: list[Any] = [each.bias for each in layers]
    weights: list[Tensor] = [each.weight for each in layers]
    return [weights] if biases[0] is None else [weights, biases]


def _one_after_the_other(parts: Sequence[Tensor]) -> bool:
    place = parts[0].data_ptr()
    storage = parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != place or part.untyped_storage().data_ptr() != storage:
            return False
        place += part.numel() * part.element_size()
    return True


@torch.inference_mode(False)
@torch.no_grad()
def _joined(parts: Sequence[Any]) -> nn.Parameter:
    """Return parameters as one, in the memory that they share from now on."""
    sizes = [len(part) for part in parts]
    if _one_after_the_other(parts):
        first = parts[0]
        shape = (sum(sizes), *first.shape[1:])
        whole = torch.as_strided(first.detach(), shape, first.stride(), first.storage_offset())
    else:
        whole = torch.cat([part.detach() for part in parts])
        for part, own in zip(parts, torch.split(whole, sizes), strict=True):
            part.data = own
    return nn.Parameter(whole, requires_grad=False)


class _First(nn.Module):
    """The first of several linear layers with one input; it computes the others' outputs, too."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weight, *bias = (_joined(parts) for parts in _tensors(layers))
        self.weight = weight
        self.bias = bias[0] if bias else None
        self.sizes = [each.out_features for each in layers]
        self.waiting: dict[int, Tensor] = {}

    def forward(self, states: Tensor) -> Tensor:
        own, *others = torch.split(linear(states, self.weight, self.bias), self.sizes, dim=-1)
        for place, other in enumerate(others):
            self.waiting[place] = other
        return own


class _Next(nn.Module):
    """One of the others; it must be called after the first."""

    def __init__(self, first: _First, place: int) -> None:
        super().__init__()
        self.first, self.place = first, place

    def forward(self, states: Tensor) -> Tensor:  # noqa: ARG002
        if self.place not in self.first.waiting:
            raise ValueError(
                "A group of `Family.merged` must begin with the layer that is called first."
            )
        return self.first.waiting.pop(self.place)


def _fast_block(
    block: nn.Module, groups: Sequence[Mapping[str, nn.Linear]], family: Family
) -> nn.Module:
    twin: nn.Module = shallow_copy(block)
    for group in groups:
        names = list(group)
        first = _First(list(group.values()))
        replace_submodule(twin, names[0], first)
        for place, name in enumerate(names[1:]):
            replace_submodule(twin, name, _Next(first, place))
    folded = _folding(twin.get_submodule(family.attention))
    if folded is not None:
        replace_submodule(twin, family.attention, folded)
    if family.cross_attention is not None:
        # Where a block finds its cache; the same in all, so that all are one compiled function.
        for path in (family.attention, family.cross_attention):
            part = shallow_copy(twin.get_submodule(path))
            part.layer_idx = 0
            replace_submodule(twin, path, part)
    return twin


# --------------------------------------------------------------------------------------- attention


def _folding(attention: Any) -> nn.Module | None:
    """Return attention that folds its queries; None if each of them has its own keys."""
    if getattr(attention, "num_key_value_groups", 1) == 1:
        return None
    modelling = sys.modules[type(attention).__module__]
    eager = getattr(modelling, "eager_attention_forward", None)
    if eager is None:
        return None
    twin: Any = shallow_copy(attention)
    twin.unfolded = ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation, eager
    )
    twin.num_key_value_groups = 1
    twin.config = copy.copy(attention.config)
    twin.config._attn_implementation_internal = FOLDED
    return twin  # type: ignore[no-any-return]


def _folded(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with the queries that share a head of keys as more positions of one query.

    Parameters
    ----------
    module : with its own attention function as `unfolded`
    query : (b, heads, q, width)
    key, value : (b, fewer heads, positions, width)
    attention_mask : (b, 1, q, positions), or None for causal attention, which cannot be folded
    """
    b, heads, q, width = query.shape
    shared = heads // key.shape[1]
    if attention_mask is None:
        key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
        found, _ = module.unfolded(module, query, key, value, None, **options)
        return found, None
    folded = query.reshape(b, key.shape[1], shared * q, width)
    size = len(attention_mask), 1, shared * q, key.shape[2]
    mask = attention_mask.expand(-1, shared, -1, -1).reshape(size)
    found, _ = module.unfolded(module, folded, key, value, mask, **options)
    # (b, shared · q, fewer heads, width) to (b, q, heads, width)
    found = found.reshape(b, shared, q, key.shape[1], width)
    return found.permute(0, 2, 3, 1, 4).reshape(b, q, heads, width), None


AttentionInterface.register(FOLDED, _folded)
