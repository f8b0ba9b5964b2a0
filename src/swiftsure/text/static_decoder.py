"""A model's decoder over buffers of fixed size, so that its parts can be captured one by one.

`begin` runs everything before the first block: embeddings, positions and masks, through the model's
own code with its blocks replaced. What the blocks would have been given is kept for each row, and
`run_block` calls the model's own blocks with it. Rows may be at different positions and blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from swiftsure.run.graphs.blas import faster_blas
from swiftsure.run.graphs.recorder import Recorder
from swiftsure.text.decoder import Decoder, argument_names
from swiftsure.text.fast_blocks import run_block
from swiftsure.text.static_cache import StaticCache, chosen_rows, places

__all__ = ["StaticDecoder", "StaticEncoder", "StaticShape", "group_size"]

ATTENTIONS = ("eager", "sdpa")
"""Attention implementations that take an additive mask."""
ATTENDED = ("attention_mask", "position_bias")
"""Block arguments whose last axis are the cached positions."""
CHANGING_ROTARY = {"dynamic", "longrope"}
"""Types of rotary positions whose frequencies change with the length."""
COMPILED_STEP = 32
"""Compiled blocks read a multiple of so many positions, so that their shapes change rarely."""
SOURCE_STATES = "encoder_hidden_states"
SOURCE_MASKS = ("encoder_attention_mask", "encoder_decoder_position_bias")
"""Block arguments that are added to the scores of the source's positions."""


@dataclass(frozen=True)
class StaticShape:
    """Sizes of a static decoder's buffers."""

    n: int
    """Number of sequences."""
    capacity: int
    """Largest number of positions."""
    source: int = 0
    """Longest source; 0 for causal models."""


class StaticDecoder:
    """A decoder whose caches and block arguments have fixed addresses.

    Parameters
    ----------
    decoder : Decoder
    shape : StaticShape
    recorder : Recorder
        If it captures nothing, only as many positions are read as there are.

    Raises
    ------
    ValueError
        If the model's attention takes no additive mask, or its rotary positions depend on the
        longest sequence of a batch.
    """

    def __init__(self, decoder: Decoder, shape: StaticShape, recorder: Recorder) -> None:
        self.decoder, self.shape, self.n = decoder, shape, shape.n
        model = decoder.model
        self.device = model.device
        used = getattr(decoder.config, "_attn_implementation", "eager")
        if used not in ATTENTIONS:
            raise ValueError(
                f"Captured decoding needs attention 'eager' or 'sdpa', but the model has {used!r}:"
                " load it with attn_implementation='sdpa'."
            )
        changing = CHANGING_ROTARY & set(_rope_types(decoder.config))
        if changing:
            raise ValueError(
                f"Captured decoding does not support rotary positions of type"
                f" {min(changing)!r}, which depend on the longest sequence of a batch: generate"
                " without capture."
            )
        self.cache = StaticCache(shape.n, shape.capacity, recorder.buffers)
        if decoder.fast is not None:
            self.cache.step = COMPILED_STEP
        if decoder.family.positions in ("learned", "sinusoidal"):
            self.cache.last_position = int(decoder.config.max_position_embeddings) - 1
        self.blocks = list(decoder.blocks)
        self._names = [argument_names(type(block).forward) for block in self.blocks]
        self._stack_names = argument_names(type(decoder.stack).forward)
        self._windows = [_window(decoder.config, index) for index in range(len(self.blocks))]
        dtype = decoder.head.weight.dtype
        self._hidden = torch.finfo(dtype).min / 4  # a quarter: some models add masks twice
        self._dtype = dtype
        rows = shape.n + 1
        self._own = torch.arange(shape.n, device=self.device)
        self._padded = torch.zeros((rows, 1, 1, shape.capacity), dtype=dtype, device=self.device)
        """What is added to the scores of a prompt's padding."""
        self.padding = torch.zeros((rows, 1), dtype=torch.long, device=self.device)
        """How many positions of each prompt are padding."""
        self._causal = {window: self._causal_mask(window) for window in set(self._windows)}
        self._relative: Tensor | None = None
        self._relative_of: tuple[int, int] | None = None
        self._source_states: Tensor | None = None
        self._source_mask: Tensor | None = None
        self._layout: list[dict[str, Any]] = []
        """Arguments of each block: constants, and places among the kept tensors."""
        self._kept: dict[int, list[Tensor]] = {}
        """Tensors among the arguments, for each number of tokens that are fed at once."""
        self._rotary: dict[int, Tensor] = {}
        """Cosines and sines of all positions, for each kept tensor that holds them."""

    def _causal_mask(self, window: int | None) -> Tensor:
        """Return what is added to the scores of every position, (positions, 1, positions)."""
        columns = torch.arange(self.shape.capacity, device=self.device)
        before = columns[:, None] - columns
        seen = before >= 0 if window is None else (before >= 0) & (before < window)
        return self.added(seen).unsqueeze(1)

    def added(self, seen: Tensor) -> Tensor:
        """Return what is added to scores: nothing where they count, else a large negative."""
        added = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return added.masked_fill_(~seen, self._hidden)

    def _refresh_relative_bias(self) -> None:
        """Compute T5's bias of every position's scores, masked, (positions, heads, positions)."""
        if self.decoder.family.positions != "relative":
            return
        attention = self.decoder.self_attention(0)
        weight = attention.relative_attention_bias.weight
        made_of = weight.data_ptr(), weight._version
        if self._relative_of == made_of:
            return
        size = self.shape.capacity
        bias: Tensor = attention.compute_bias(size, size).detach()
        masked = bias[0].transpose(0, 1) + self._causal[self._windows[0]]
        if self._relative is None:
            self._relative = masked
        else:
            self._relative.copy_(masked)  # captured functions read it there
        self._relative_of = made_of

    # --------------------------------------------------------------------------------- the inputs

    def load_source(self, states: Tensor, mask: Tensor | None, rows: Tensor | None = None) -> None:
        """Store the encoder's states, (m, positions, width), and their mask, for some rows."""
        longest, length = self.shape.source, states.shape[1]
        if self._source_states is None or self._source_mask is None:
            size = self.n + 1
            self._source_states = states.new_zeros((size, longest, states.shape[2]))
            self._source_mask = torch.zeros(
                (size, 1, 1, longest), dtype=self._dtype, device=self.device
            )
        where = places(rows, self.n)
        kept = torch.ones_like(states[:, :, 0]) if mask is None else mask
        self._source_states[where, :length] = states
        seen = nn.functional.pad(kept.bool(), (0, longest - length))
        self._source_mask[where, 0, 0] = self.added(seen)
        for index in range(len(self.blocks)):
            pair = self.decoder.source_keys_values(index, states)
            self.cache.load_source(index, pair, longest, rows)

    def load_prompt(
        self,
        layers: Any,
        mask: Tensor | None,
        padding: Tensor | None,
        rows: Tensor | None = None,
    ) -> None:
        """Store the cache of prompts, their mask (m, positions), and how much of it is padding."""
        self.cache.load(layers, rows)
        self.reset(mask, padding, rows)

    def reset(
        self,
        mask: Tensor | None = None,
        padding: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """Start sequences without a prompt, or with the mask of one that is in the cache."""
        self._refresh_relative_bias()
        where = places(rows, self.n)
        self._padded[where] = 0.0
        self.padding[where] = 0
        if mask is not None:
            self._padded[where, 0, 0, : mask.shape[1]] = self.added(mask.bool())
        if padding is not None:
            self.padding[where] = padding

    # --------------------------------------------------------------------- before the first block

    def begin(self, tokens: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the states before the first block, (b, q, width), and keep its arguments.

        Parameters
        ----------
        tokens, positions : (b, q)
        rows : (b,), optional
            All n by default.
        """
        states, arguments = self._stack_arguments(tokens, positions, rows)
        self._store(arguments, positions, rows)
        return states.reshape(*tokens.shape, -1)

    def _stack_arguments(
        self, tokens: Tensor, positions: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        """Run the stack with its blocks replaced; return their input and arguments."""
        padded = chosen_rows(self._padded, rows, self.n)
        masks = {
            window: table[positions].transpose(1, 2) + padded
            for window, table in self._causal.items()
        }
        given: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": masks[self._windows[0]],
            "past_key_values": self.cache.spot(0, positions, rows).view(),
            "use_cache": True,
        }
        if "position_ids" in self._stack_names:
            shown = positions - chosen_rows(self.padding, rows, self.n)
            given["position_ids"] = self.cache.embedded(shown)
        if self._source_states is not None and self._source_mask is not None:
            given[SOURCE_STATES] = self._source_states[: self.n]
            given["encoder_attention_mask"] = self._source_mask[: self.n]
        seen: list[tuple[Tensor, dict[str, Any]]] = []
        stand_ins = [partial(self._see, seen, index) for index in range(len(self.blocks))]
        with _replaced_forwards([*self.blocks, self.decoder.norm], [*stand_ins, _unchanged]):
            self.decoder.stack(**given)
        found = [arguments for _, arguments in seen]
        for arguments, window in zip(found, self._windows, strict=True):
            arguments["attention_mask"] = masks[window]
        if self._relative is not None:
            # The first block would compute it for all others, at one position for all rows.
            bias = self._relative[positions].transpose(1, 2) + padded
            for arguments in found:
                arguments["position_bias"] = bias
        return seen[0][0], found

    def _see(
        self, seen: list[tuple[Tensor, dict[str, Any]]], index: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand in for a block: keep its arguments and return its input."""
        arguments = dict(zip(self._names[index], args, strict=False), **kwargs)
        states = arguments.pop("hidden_states")
        seen.append((states, arguments))
        return self.decoder.skipped(states, arguments)

    def _store(
        self, arguments: list[dict[str, Any]], positions: Tensor, rows: Tensor | None
    ) -> None:
        """Keep the tensors among the blocks' arguments, each once, for the rows they are of."""
        found: dict[int, Tensor] = {}
        layout = []
        for each in arguments:
            stored: dict[str, Any] = {}
            for name, value in each.items():
                if name not in (SOURCE_STATES, *SOURCE_MASKS, self.decoder.family.cache):
                    stored[name] = _slots(value, found, attended=name in ATTENDED)
            layout.append(stored)
        tensors = list(found.values())
        if not self._layout:
            self._layout = layout
        width = positions.shape[1]
        if width not in self._kept:
            self._allocate(width, tensors)
        for index, (kept, tensor) in enumerate(zip(self._kept[width], tensors, strict=True)):
            _write_rows(kept, tensor, rows)
            if index in self._rotary:
                own = self._own if rows is None else rows
                self._rotary[index][own[:, None], positions] = tensor

    def _allocate(self, width: int, tensors: list[Tensor]) -> None:
        rows, capacity = self.n + 1, self.shape.capacity
        self._kept[width] = [tensor.new_zeros((rows, *tensor.shape[1:])) for tensor in tensors]
        for arguments in self._layout:
            rotary = arguments.get("position_embeddings")
            for slot in rotary if isinstance(rotary, tuple) else ():
                tensor = tensors[slot.index]
                if slot.index not in self._rotary:
                    table = tensor.new_zeros((rows, capacity, tensor.shape[-1]))
                    self._rotary[slot.index] = table

    # ----------------------------------------------------------------------------------- a block

    def blas(self, rows: int) -> AbstractContextManager[None]:
        """Return a context in which products of so many rows with the blocks' weights are fast."""
        if self.device.type != "cuda":
            return nullcontext()
        layers = [part for part in self.blocks[0].modules() if isinstance(part, nn.Linear)]
        return faster_blas([layer.weight for layer in layers], rows)

    @property
    def kept(self) -> list[Tensor]:
        """The buffers of the blocks' arguments, for one token per row."""
        return self._kept[1]

    def arguments(self, rows: Tensor | None, width: int = 1) -> "BlockArguments":
        """Return the arguments of all blocks for some rows, as of their last `begin`.

        `width` is the number of tokens that were fed.
        """
        shared, masks = {}, {}
        if self._source_states is not None and self._source_mask is not None:
            shared = {SOURCE_STATES: self._source_states}
            names = [name for name in SOURCE_MASKS if name in self._names[0]]
            masks = dict.fromkeys(names, self._source_mask)
        return BlockArguments(
            self._layout,
            self._kept[width],
            shared,
            masks,
            rows,
            n=self.n,
            visible=self.cache.visible,
        )

    def run_block(
        self, index: int, states: Tensor, positions: Tensor, arguments: "BlockArguments"
    ) -> Tensor:
        """Return the states after a block; its keys and values are written at the positions."""
        given, decoder = arguments.of(index), self.decoder
        if index not in self.cache.own:
            rotary = given.get("position_embeddings")
            self.cache.allocate(index, *decoder.project(index, states, rotary))
        spot = self.cache.spot(index, positions, arguments.rows)
        if decoder.fast is not None:
            return decoder.fast.run(index, states, given, spot)
        return run_block(self.blocks[index], states, given, spot, decoder.family.cache)

    def write_skipped(
        self, index: int, states: Tensor, positions: Tensor, rows: Tensor | None
    ) -> None:
        """Write a block's keys and values of tokens that skipped it, (b, q), from their states."""
        slots = self._layout[index].get("position_embeddings")
        rotary = None
        if isinstance(slots, tuple):
            own = self._own if rows is None else rows
            cosines, sines = (self._rotary[slot.index][own[:, None], positions] for slot in slots)
            rotary = cosines, sines
        keys, values = self.decoder.project(index, states, rotary)
        self.cache.write(index, keys, values, positions, rows)


@dataclass(frozen=True)
class _Slot:
    """Place of a block argument among the kept tensors."""

    index: int
    attended: bool
    """Whether its last axis are the cached positions."""


class BlockArguments:
    """The arguments of blocks for some rows; each tensor is gathered once.

    Parameters
    ----------
    layout : one mapping per block
        Its arguments, by name: constants, and places among the kept tensors.
    kept : tensors with one row per sequence, and one for padding
    shared : tensors that are the same for all blocks and rows
    masks : the same for all blocks, with one row per sequence
    rows : (b,), or None for all n
    n : number of sequences
    visible : number of cached positions that attention reads
    """

    def __init__(
        self,
        layout: Sequence[Mapping[str, Any]],
        kept: Sequence[Tensor],
        shared: Mapping[str, Tensor],
        masks: Mapping[str, Tensor],
        rows: Tensor | None,
        *,
        n: int,
        visible: int,
    ) -> None:
        self.rows = rows
        self._layout, self._kept, self._shared, self._masks = layout, kept, shared, masks
        self._n, self._visible = n, visible
        self._gathered: dict[int, Tensor] = {}

    def of(self, index: int) -> dict[str, Any]:
        """Return the arguments of a block, without states and cache."""
        found = {name: self._value(each) for name, each in self._layout[index].items()}
        return found | self._of_source

    @cached_property
    def _of_source(self) -> dict[str, Tensor]:
        masks = {name: chosen_rows(each, self.rows, self._n) for name, each in self._masks.items()}
        return {**self._shared, **masks}

    def _value(self, place: Any) -> Any:
        if isinstance(place, tuple):
            return tuple(map(self._value, place))
        if not isinstance(place, _Slot):
            return place
        if place.index not in self._gathered:
            found = self._kept[place.index]
            if place.attended:
                found = found[..., : self._visible]
            self._gathered[place.index] = chosen_rows(found, self.rows, self._n)
        return self._gathered[place.index]


def _slots(value: Any, found: dict[int, Tensor], *, attended: bool) -> Any:
    """Return a block argument with its tensors replaced by places, which `found` counts."""
    if isinstance(value, tuple):
        return tuple(_slots(each, found, attended=attended) for each in value)
    if not isinstance(value, Tensor):
        return value
    found.setdefault(id(value), value)
    return _Slot(list(found).index(id(value)), attended)


def _write_rows(kept: Tensor, tensor: Tensor, rows: Tensor | None) -> None:
    """Write the rows of a tensor into a buffer; None: all but the last, which is for padding."""
    if rows is None:
        kept[: len(kept) - 1].copy_(tensor)
    else:
        kept.index_copy_(0, rows, tensor.expand(len(rows), *tensor.shape[1:]).contiguous())


class StaticEncoder:
    """Encodes sources into the cache of a decoder's rows, captured on a GPU.

    Parameters
    ----------
    static : StaticDecoder
    recorder : Recorder
    """

    def __init__(self, static: StaticDecoder, recorder: Recorder) -> None:
        self._static, self._recorder = static, recorder
        self._graphs: dict[tuple[int, int], tuple[tuple[Tensor, ...], Any]] = {}
        """By number and length of sources: ids, mask and rows, and the graph that reads them."""

    def run(self, ids: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
        """Encode sources, (m, positions); the mask is 0 for padding.

        More rows than sources stand for padding, which is last.
        """
        if not self._recorder.captures:
            encoder = self._static.decoder.model.get_encoder()
            states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            self._static.load_source(states, mask, rows)
            return
        m, length = len(ids) if rows is None else len(rows), -(-ids.shape[1] // 32) * 32
        size = m, min(length, self._static.shape.source)
        if size not in self._graphs:
            given = tuple(
                torch.zeros(each, dtype=torch.long, device=ids.device) for each in (size, size, m)
            )
            self._graphs[size] = given, None
        given, graph = self._graphs[size]
        for buffer, value in zip(given, (ids, mask), strict=False):
            buffer.zero_()
            buffer[: len(value), : value.shape[1]].copy_(value)
        given[2].copy_(torch.arange(m) if rows is None else rows)
        if graph is None:
            graph = self._recorder.record(partial(self._encode, *given))
            self._graphs[size] = given, graph
        graph.replay()

    def _encode(self, ids: Tensor, seen: Tensor, rows: Tensor) -> None:
        # As an additive mask: the encoder would look whether any position is hidden.
        added = self._static.added(seen.bool())[:, None, None]
        encoder = self._static.decoder.model.get_encoder()
        states = encoder(input_ids=ids, attention_mask=added).last_hidden_state
        self._static.load_source(states, seen, rows)


def group_size(size: int, n: int) -> int:
    """Return the captured size for a group: a power of two, or all rows."""
    return min(1 << (size - 1).bit_length(), n)


def _rope_types(config: Any) -> Iterator[str]:
    """Yield the types of a model's rotary positions; some have one per kind of attention."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None) or {}
        for each in (found, *(part for part in found.values() if isinstance(part, dict))):
            kind = each.get("rope_type") or each.get("type")
            if isinstance(kind, str):
                yield kind


def _window(config: Any, index: int) -> int | None:
    """Return the sliding window of a block's attention; None: all positions."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _unchanged(states: Tensor) -> Tensor:
    return states


@contextmanager
def _replaced_forwards(modules: Sequence[nn.Module], stand_ins: Sequence[Any]) -> Iterator[None]:
    """Replace the modules' forward methods within this context."""
    owners: list[Any] = [module.__dict__ for module in modules]
    before = [owner.get("forward") for owner in owners]
    for owner, stand_in in zip(owners, stand_ins, strict=True):
        owner["forward"] = stand_in
    try:
        yield
    finally:
        for owner, own in zip(owners, before, strict=True):
            if own is None:
                del owner["forward"]
            else:
                owner["forward"] = own
