"""The engine sits between a decoder and its blocks and decides, token by token, which blocks run.

Each call of the decoder is a step: one token of every sequence. Before a block runs, the tokens
that are confident enough exit. How the block runs depends on which tokens still run:

- all: it runs as usual;
- none: it does not run, and the keys and values of the exit states are deferred;
- some, of a small batch, where more rows take no longer: it runs on all rows, and exited tokens
  keep their exit states. A block computes keys and values from its input states, so the exited
  tokens' keys and values come from their exit states;
- some, otherwise: it runs on the remaining rows only, and the others' keys and values are computed
  separately.

Exited tokens carry their exit state to the end, where the model's own norm and head compute their
logits.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.text.calm.cache import ExitLayer, prepare_cache, rows_of_cache
from swiftsure.text.calm.confidences import Confidence, look_exits
from swiftsure.text.calm.results import Trace
from swiftsure.text.calm.rules import CalmRule, check_thresholds
from swiftsure.text.calm.steps import SplitRows, Step, rows_of
from swiftsure.text.decoder import Decoder, argument_names
from swiftsure.text.exit_heads import ExitHeads

__all__ = ["EarlyExitDecoder"]

SHARED = "encoder_hidden_states"
"""Block argument that is not cut to the active rows: its keys and values are in the cache."""


class EarlyExitDecoder:
    """Runs one decoder with early exits.

    Parameters
    ----------
    decoder : Decoder
        The model's; its forward methods call `run_stack`, `run_block` and `run_head`.
    rule : CalmRule
    confidence : Confidence
    thresholds : float32 array
        One for all sequences, shape (), or one per sequence, (n,).
    eos_token_ids : ints
        Tokens that end a sequence, after which it no longer runs.
    """

    def __init__(
        self,
        decoder: Decoder,
        rule: CalmRule,
        confidence: Confidence,
        thresholds: NDArray[np.float32],
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.decoder = decoder
        self.rule = rule
        self.confidence = confidence
        self.thresholds = thresholds
        self.blocks = list(decoder.blocks)
        self.trace: Trace | None = None
        self._names = [argument_names(type(block).forward) for block in self.blocks]
        self._stack_names = argument_names(type(decoder.stack).forward)
        self._cache_name = decoder.family.cache
        self._projects = [partial(decoder.project, index) for index in range(len(self.blocks))]
        self._exits = set(look_exits(decoder, rule, confidence))
        self._thread = threading.get_ident()
        self._eos = frozenset(eos_token_ids)
        self._cache: Any = None
        self._finished: set[int] = set()
        self._step: Step | None = None

    # ---------------------------------------------------------------- the decoder, once per token

    def run_stack(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the decoder on one token of every sequence, or on a prompt."""
        self._refuse_other_threads()
        given = dict(zip(self._stack_names, args, strict=False), **kwargs)
        cache, tokens = given.get("past_key_values"), given.get("input_ids")
        fed = tokens if tokens is not None else given.get("inputs_embeds")
        if cache is None or fed is None:
            return forward(*args, **kwargs)  # not generating
        past = cache.get_seq_length()
        if cache is not self._cache or past == 0:
            self._begin_generation(cache, past, fed, _attended(past, fed, given))
        trace: Trace = self.trace  # type: ignore[assignment]
        number = past + fed.shape[1] - trace.prompt
        if number > 0 and tokens is not None:
            self._mark_finished(tokens[:, -1])
        self._step = self._begin_step(number, fed)
        self.confidence.begin()
        try:
            return forward(*args, **kwargs)
        except BaseException:
            self._step = None
            raise

    def _begin_generation(self, cache: Any, past: int, fed: Tensor, attended: Tensor | int) -> None:
        n = len(fed)
        check_thresholds(self.thresholds, n)
        prepare_cache(cache, self._projects)
        self._cache = cache
        self._finished = set()
        self.trace = Trace(n, len(self.blocks), past + fed.shape[1], attended)

    def _mark_finished(self, tokens: Tensor) -> None:
        if self._eos:
            given = enumerate(tokens.tolist())
            self._finished.update(row for row, token in given if token in self._eos)

    def _begin_step(self, number: int, fed: Tensor) -> Step:
        alone = fed.shape[1] == 1
        levels = self.rule.levels(self.thresholds, number)
        may_exit = (
            alone
            and bool(self.rule.reachable(levels).any())
            and (number > 0 or self.decoder.config.is_encoder_decoder)
        )
        step = Step(len(fed), len(self.blocks), fed.device, levels.tolist(), may_exit)
        if alone and self._finished:
            step.finish(sorted(self._finished))
        return step

    # -------------------------------------------------------------------- a block, before it runs

    def run_block(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block on the tokens that have not exited."""
        step = self._step
        if step is None:
            return forward(*args, **kwargs)
        output = self._run_block(step, index, forward, args, kwargs)
        heads = self.decoder.exit_heads
        if heads is not None and index == len(self.blocks) - 1 and step.exits_taken:
            return _with_states(output, _apply_exit_heads(heads, step, _states(output)))
        return output

    def _run_block(
        self,
        step: Step,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        if step.may_exit and step.n_active and index - 1 in self._exits:
            look = step.look(index - 1, states)
            scores = self.confidence.measure(look)
            step.exit_confident(look, scores, self.confidence.computed, strict=self.rule.strict)
        step.previous = states
        if step.n_active == step.n:
            return forward(*args, **kwargs)
        arguments = dict(zip(self._names[index], args, strict=False), **kwargs)
        if step.n_active == 0:
            layer = _self_attention_layers(arguments[self._cache_name])[index]
            layer.defer(states, arguments.get("position_embeddings"))
            return self.decoder.skipped(states, arguments)
        split: SplitRows = step.split  # type: ignore[assignment]
        if step.compacts:
            return self._run_compacted(split, index, forward, states, arguments)
        output = forward(*args, **kwargs)
        return _with_states(output, torch.where(split.exited_mask, states, _states(output)))

    def _run_compacted(
        self,
        split: SplitRows,
        index: int,
        forward: Callable[..., Any],
        states: Tensor,
        arguments: dict[str, Any],
    ) -> Any:
        cache = arguments[self._cache_name]
        rows, exited = split.active, split.exited
        self.decoder.fill_cross_attention(index, arguments)
        turned = rows_of(arguments.get("position_embeddings"), exited, split.n)
        propagated = self.decoder.project(index, states.index_select(0, exited), turned)
        chosen = {
            name: value if name == SHARED else split.of(value) for name, value in arguments.items()
        }
        chosen[self._cache_name] = rows_of_cache(cache, index, rows, exited, propagated)
        output = forward(**chosen)
        return _with_states(output, states.index_copy(0, rows, _states(output)))

    # ------------------------------------------------------------------------- the head, at the end

    def run_head(self, forward: Callable[..., Tensor], inputs: Tensor) -> Tensor:
        """Run the head on the rows whose logits are not known yet, and end the step."""
        step = self._step
        if step is None or inputs.ndim < 3:  # called by a confidence
            return forward(inputs)
        self._step = None
        trace: Trace = self.trace  # type: ignore[assignment]
        if step.rows_known and inputs.shape[:2] == (step.n, 1):
            logits = step.all_logits(forward, inputs)
        else:
            logits = forward(inputs)
            step.count_head_for_all()
        trace.steps.append(step.results())
        return logits

    def release(self) -> None:
        """Drop the cache and the last step; keep the trace."""
        self._cache = self._step = None

    def _refuse_other_threads(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "This model runs with early exits in another thread; give each thread its own copy"
                " of the model, or let them take turns."
            )


def _apply_exit_heads(heads: ExitHeads, step: Step, states: Tensor) -> Tensor:
    """Return the states with those of exited tokens mapped through their exit heads."""
    mapped = states.clone()
    for depth in step.exits_taken:
        exited = [row for row, ran in enumerate(step.depths) if ran == depth]
        rows = torch.tensor(exited, device=states.device)
        mapped.index_copy_(0, rows, heads(depth - 1, states.index_select(0, rows)))
    return mapped


def _attended(past: int, fed: Tensor, arguments: Mapping[str, Any]) -> Tensor | int:
    """Return how many positions the first token attends to, without padding: a number, or (n,)."""
    own, states, source = (
        arguments.get(name)
        for name in ("attention_mask", "encoder_hidden_states", "encoder_attention_mask")
    )
    positions = past + fed.shape[1] if own is None or own.ndim != 2 else own.sum(dim=1)
    if states is not None:
        positions = positions + (states.shape[1] if source is None else source.sum(dim=1))
    found: Tensor | int = positions
    return found


def _self_attention_layers(cache: Any) -> list[ExitLayer]:
    layers: list[ExitLayer] = getattr(cache, "self_attention_cache", cache).layers
    return layers


def _states(output: Any) -> Tensor:
    """Return the hidden states in a block's output."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


def _with_states(output: Any, states: Tensor) -> Any:
    return (states, *output[1:]) if isinstance(output, tuple) else states
