"""Checks of `generate` options: which of them change answers, and whether they match a policy."""

from collections.abc import Mapping, Sequence
from typing import Any

from swiftsure.systems import check_same

__all__ = ["check_options", "end_tokens"]

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
