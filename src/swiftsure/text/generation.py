"""What both systems share of generation: options, sampling, and checks of token ids."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
from torch import Tensor, nn
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swiftsure.run import check_same

__all__ = [
    "check_length",
    "check_options",
    "check_sequence_ids",
    "check_token_ids",
    "end_tokens",
    "exclusive",
    "token_random",
    "warpers",
]

_in_use: "WeakSet[nn.Module]" = WeakSet()
_lock = threading.Lock()

OUTPUT_OPTIONS = {
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "use_cache",
}
"""Options that change how answers are returned, but not the answers."""

ANSWER_ARGUMENTS = {
    "assistant_model",
    "custom_generate",
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
}
"""Arguments of `generate` that change answers but are not in a generation_config."""

DEFAULTS = {"do_sample": False, "num_return_sequences": 1, "repetition_penalty": 1.0}
"""Defaults for options that are missing from a model's generation_config."""


def check_options(options: Mapping[str, Any], made_for: Mapping[str, Any], model: Any) -> None:
    """Raise if options of `generate` could give other answers than those certified."""
    own = model.generation_config
    for name, value in options.items():
        changes_answers = name in made_for or name in ANSWER_ARGUMENTS or hasattr(own, name)
        if name in OUTPUT_OPTIONS or not changes_answers:
            continue
        usual = getattr(own, name, None)
        expected = made_for.get(name, DEFAULTS.get(name) if usual is None else usual)
        if name == "eos_token_id" and end_tokens(model, value) == end_tokens(model, expected):
            continue
        check_same({name: expected}, {name: value})


def end_tokens(model: Any, given: int | Sequence[int] | str | None) -> frozenset[int]:
    """Return the tokens that end an answer; "model": the model's own."""
    ends: Any = model.generation_config.eos_token_id if given == "model" else given
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)


def check_token_ids(input_ids: Tensor) -> None:
    """Raise if token ids are not a batch of texts."""
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ValueError(
            "`input_ids` must have shape (n, positions) and not be empty, but got"
            f" {tuple(input_ids.shape)}: an empty text needs at least one token."
        )


def check_length(model: Any, prompt: int, new: int, name: str = "model") -> None:
    """Raise if a prompt and its answer exceed the model's positions; T5's have no limit."""
    config = model.config
    limit = getattr(config, "max_position_embeddings", None)
    # A source and its answer have positions of their own.
    needed = max(prompt, new) if config.is_encoder_decoder else prompt + new
    short = getattr(config, "original_max_position_embeddings", None)
    if short is not None and prompt <= short:
        limit = short  # beyond it Phi-3 changes its rotation and drops the cache
    if limit is not None and needed > limit:
        raise ValueError(
            f"A prompt of {prompt} tokens and `max_new_tokens` of {new} are more than the {name}'s"
            f" {limit} positions: shorten one of them."
        )


def check_sequence_ids(sequence_ids: Sequence[int] | None, n: int) -> Sequence[int]:
    """Return one id per sequence, positions in the batch by default."""
    ids = range(n) if sequence_ids is None else sequence_ids
    if len(ids) != n:
        raise ValueError(f"`sequence_ids` must have one id per sequence, {n}, but got {len(ids)}.")
    return ids


def token_random(seed: int, sequence: int, place: int) -> np.random.Generator:
    """Return the random numbers of one token: they depend on nothing else, such as the batch."""
    # Philox counts blocks in its first word; with the position in the last, streams never overlap.
    return np.random.Generator(np.random.Philox(key=[seed, sequence], counter=[0, 0, 0, place]))


def warpers(temperature: float, top_k: int, top_p: float) -> LogitsProcessorList:
    """Return the processors that turn logits into those of the sampling distribution."""
    found = LogitsProcessorList()
    if temperature != 1.0:
        found.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        found.append(TopKLogitsWarper(int(top_k)))
    if top_p < 1.0:
        found.append(TopPLogitsWarper(float(top_p)))
    return found


@contextmanager
def exclusive(model: nn.Module) -> Iterator[None]:
    """Reserve a model: only one early-exit run at a time."""
    with _lock:
        if model in _in_use:
            raise RuntimeError(
                "`model` runs with early exits already: leave that context first, or use a copy of"
                " the model."
            )
        _in_use.add(model)
    try:
        yield
    finally:
        with _lock:
            _in_use.discard(model)
